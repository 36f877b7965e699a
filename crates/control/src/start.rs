//! The command line of a monitor.
//!
//! ```text
//!   keiki-vmm --control 3 --user 1262000007 --files 256 --tasks 64 --file-bytes 1099511627776 --oom-score 500 MARK
//! ```
//!
//! A monitor starts as root. It builds its jail from these arguments before it receives a message.

use std::{ffi::OsString, fmt};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Number of the descriptor of the control connection.
    pub control: i32,
    /// User and group in the jail. None: no jail, for tests without root.
    pub user: Option<u32>,
    pub files: u64,
    /// Most processes and threads of the user, all relatives together.
    pub tasks: u64,
    /// Largest file it may write.
    pub file_bytes: u64,
    /// `oom_score_adj`, -1000 to 1000.
    pub oom_score_adj: i16,
    /// Tells people who list processes which machine this is. The monitor does not read it.
    pub mark: String,
}

impl Start {
    /// The arguments after the name of the program.
    #[must_use]
    pub fn to_args(&self) -> Vec<OsString> {
        let mut args = vec!["--control".to_owned(), self.control.to_string()];
        if let Some(user) = self.user {
            args.extend(["--user".to_owned(), user.to_string()]);
        }
        args.extend(["--files".to_owned(), self.files.to_string()]);
        args.extend(["--tasks".to_owned(), self.tasks.to_string()]);
        args.extend(["--file-bytes".to_owned(), self.file_bytes.to_string()]);
        args.extend(["--oom-score".to_owned(), self.oom_score_adj.to_string()]);
        args.push(self.mark.clone());
        args.into_iter().map(OsString::from).collect()
    }

    /// The reverse of [`Start::to_args`].
    pub fn from_args(args: impl IntoIterator<Item = OsString>) -> Result<Self, BadStart> {
        let mut start = Self {
            control: -1,
            user: None,
            files: 0,
            tasks: 0,
            file_bytes: 0,
            oom_score_adj: 0,
            mark: String::new(),
        };
        let mut args = args.into_iter().map(|arg| arg.to_string_lossy().into_owned());
        while let Some(name) = args.next() {
            if !name.starts_with("--") {
                start.mark = name;
                continue;
            }
            let value = args.next().unwrap_or_default();
            let understood = match name.as_str() {
                "--control" => put(&mut start.control, &value),
                "--user" => value.parse().is_ok_and(|user| start.user.replace(user).is_none()),
                "--files" => put(&mut start.files, &value),
                "--tasks" => put(&mut start.tasks, &value),
                "--file-bytes" => put(&mut start.file_bytes, &value),
                "--oom-score" => put(&mut start.oom_score_adj, &value),
                _ => false,
            };
            if !understood {
                return Err(BadStart(format!("{name} {value}")));
            }
        }
        match start {
            Self { control: 0.., files: 1.., tasks: 1.., file_bytes: 1.., .. } => Ok(start),
            _ => Err(BadStart("--control, --files, --tasks or --file-bytes missing".into())),
        }
    }
}

fn put<T: std::str::FromStr>(place: &mut T, text: &str) -> bool {
    text.parse().map(|value| *place = value).is_ok()
}

/// The command line is not valid for a monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadStart(String);

impl fmt::Display for BadStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "keiki-vmm is started by a keiki node, not by hand (not understood: {})", self.0)
    }
}

impl std::error::Error for BadStart {}

#[cfg(test)]
mod tests {
    use super::Start;
    use std::ffi::OsString;

    #[test]
    fn a_start_is_read_as_it_was_written_and_nothing_else_is() {
        let start = Start {
            control: 3,
            user: Some(1_262_000_007),
            files: 256,
            tasks: 64,
            file_bytes: 1 << 40,
            oom_score_adj: -5,
            mark: "/var/lib/keiki/x".into(),
        };
        for user in [None, start.user] {
            let start = Start { user, ..start.clone() };
            assert_eq!(Start::from_args(start.to_args()), Ok(start));
        }
        let refused = |args: &[&str]| {
            Start::from_args(args.iter().map(OsString::from)).expect_err("it was taken").to_string()
        };
        assert!(refused(&[]).contains("missing"));
        assert!(refused(&["--help"]).contains("started by a keiki node"));
        assert!(refused(&["--control", "three"]).contains("--control three"));
        assert!(refused(&["--user", "1", "--user", "2"]).contains("--user 2"));
    }
}
