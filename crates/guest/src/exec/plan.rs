//! Turns a request into everything that a new process needs, before it is started.

use super::ExecError;
use crate::{
    sys::{Plan, SpawnError, Step},
    users::{self, Account},
};
use keiki_protocol::guest::ExecSpec;
use rustix::{
    fs::OFlags,
    pipe::{PipeFlags, pipe_with},
    pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use std::{
    collections::BTreeMap,
    ffi::CString,
    io,
    os::fd::{AsFd, OwnedFd},
};

const PATH: &[u8] = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SHELL: &[u8] = b"/bin/sh";
/// The environment that the root disk sets for all users, as PAM reads it.
const ENVIRONMENT: &str = "/etc/environment";
const ENVIRONMENT_LIMIT: u64 = 64 << 10;
/// Arguments and environment together. The kernel has its own, smaller limits.
const MAX_WORDS: usize = 2 << 20;

/// The agent's ends of a command's standard streams.
#[derive(Debug)]
pub enum Ends {
    /// One pipe each. No input if the command's stdin is not open.
    Pipes { input: Option<OwnedFd>, output: OwnedFd, error: OwnedFd },
    /// A pseudo-terminal.
    Terminal(OwnedFd),
}

/// Prepares everything for a command.
pub fn plan(spec: &ExecSpec) -> Result<(Plan, Ends), ExecError> {
    let account = users::lookup(&spec.user).map_err(|error| ExecError::Invalid(error.to_string()))?;
    let argv: Vec<&[u8]> = match (spec.argv.is_empty(), spec.shell.is_empty()) {
        (false, true) => spec.argv.iter().map(|word| &word[..]).collect(),
        (true, false) => vec![SHELL, b"-c", &spec.shell],
        _ => return Err(ExecError::Invalid("give either argv or a shell line, not both".into())),
    };
    let own = users::slurp(ENVIRONMENT, ENVIRONMENT_LIMIT);
    let env = environment(&account, &own, spec);
    let size = argv.iter().map(|word| word.len() + 8).sum::<usize>()
        + env.iter().map(|(name, value)| name.len() + value.len() + 8).sum::<usize>();
    if size > MAX_WORDS {
        return Err(ExecError::Invalid("arguments and environment are too long".into()));
    }
    let path = env.get(&b"PATH"[..]).copied().unwrap_or(PATH);
    let paths = candidates(argv[0], path).into_iter().map(word).collect::<Result<_, _>>()?;
    let words = |all: &[&[u8]]| all.iter().map(|text| word(text.to_vec())).collect::<Result<Vec<_>, _>>();
    let settings = env.iter().map(|(name, value)| word([name, &b"="[..], value].concat()));
    let (stdio, ends) = streams(spec, &account).map_err(ExecError::Streams)?;
    let plan = Plan {
        paths,
        argv: words(&argv)?,
        env: settings.collect::<Result<_, _>>()?,
        cwd: word(if spec.cwd.is_empty() { account.home.clone() } else { spec.cwd.to_vec() })?,
        cwd_optional: spec.cwd.is_empty(),
        uid: account.uid,
        gid: account.gid,
        groups: account.groups.clone(),
        stdio,
        terminal: spec.pty.is_some(),
    };
    Ok((plan, ends))
}

/// The exit code and message of a program that does not start, as a shell reports them.
pub fn refusal(error: &SpawnError, spec: &ExecSpec) -> (i32, String) {
    let show = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(256)]).into_owned();
    let program = spec.argv.first().map_or(show(SHELL), |word| show(word));
    match error {
        SpawnError::Clone(error) => (126, format!("cannot create a process: {error}")),
        SpawnError::Child { step: Step::Exec, error } => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => (127, format!("{program}: not found")),
            _ => (126, format!("{program}: cannot execute: {error}")),
        },
        SpawnError::Child { step: Step::Directory, error } => {
            (126, format!("cannot enter directory {}: {error}", show(&spec.cwd)))
        }
        SpawnError::Child { step: Step::User, error } => {
            (126, format!("cannot become user {}: {error}", show(spec.user.as_bytes())))
        }
        SpawnError::Child { step: Step::Prepare, error } => {
            (126, format!("cannot set up the process: {error}"))
        }
    }
}

fn word(bytes: Vec<u8>) -> Result<CString, ExecError> {
    CString::new(bytes).map_err(|_| {
        ExecError::Invalid("an argument, a variable or the directory contains a zero byte".into())
    })
}

fn environment<'a>(account: &'a Account, own: &'a [u8], spec: &'a ExecSpec) -> BTreeMap<&'a [u8], &'a [u8]> {
    let mut env: BTreeMap<&[u8], &[u8]> = BTreeMap::from([
        (&b"PATH"[..], PATH),
        (b"HOME", &account.home),
        (b"USER", &account.name),
        (b"LOGNAME", &account.name),
        (b"SHELL", &account.shell),
        (b"LANG", b"C.UTF-8"),
    ]);
    env.extend(own.split(|&byte| byte == b'\n').filter_map(setting));
    if spec.pty.is_some() {
        env.insert(b"TERM", b"xterm-256color");
    }
    env.extend(spec.env.iter().map(|var| (&var.name[..], &var.value[..])));
    // A name with a '=' would set another variable.
    env.retain(|name, _| !name.is_empty() && !name.contains(&b'='));
    env
}

/// `NAME=value`, `export NAME="value"`: one line of [`ENVIRONMENT`].
fn setting(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let line = line.trim_ascii();
    let line = line.strip_prefix(b"export ").unwrap_or(line);
    let (name, value) = line.split_at(line.iter().position(|&byte| byte == b'=')?);
    let value = value.get(1..)?;
    let plain = name.iter().all(|&byte| byte.is_ascii_alphanumeric() || byte == b'_');
    let value = match value {
        [b'"', inner @ .., b'"'] | [b'\'', inner @ .., b'\''] => inner,
        bare => bare,
    };
    (plain && !name.is_empty() && !value.contains(&0)).then_some((name, value))
}

/// The paths where a program may be.
fn candidates(program: &[u8], path: &[u8]) -> Vec<Vec<u8>> {
    if program.contains(&b'/') || program.is_empty() {
        return vec![program.to_vec()];
    }
    path.split(|&byte| byte == b':')
        .map(|dir| if dir.is_empty() { program.to_vec() } else { [dir, b"/", program].concat() })
        .collect()
}

fn streams(spec: &ExecSpec, account: &Account) -> io::Result<([OwnedFd; 3], Ends)> {
    if let Some(pty) = &spec.pty {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&master)?;
        tcsetwinsize(&master, winsize(pty.cols, pty.rows))?;
        let slave =
            ioctl_tiocgptpeer(&master, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let owner = Some(rustix::fs::Uid::from_raw(account.uid));
        rustix::fs::fchown(&slave, owner, None)?;
        nonblocking(&master)?;
        let (second, third) = (slave.try_clone()?, slave.try_clone()?);
        return Ok(([slave, second, third], Ends::Terminal(master)));
    }
    let (input, stdin) = if spec.stdin_open {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        nonblocking(&ours)?;
        (Some(ours), theirs)
    } else {
        (None, OwnedFd::from(std::fs::File::open("/dev/null")?))
    };
    let (output, stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (error, stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    nonblocking(&output)?;
    nonblocking(&error)?;
    Ok(([stdin, stdout, stderr], Ends::Pipes { input, output, error }))
}

/// A terminal's size; 0 means the default.
pub fn winsize(cols: u32, rows: u32) -> Winsize {
    let size =
        |value: u32, usual: u16| if value == 0 { usual } else { u16::try_from(value).unwrap_or(u16::MAX) };
    Winsize { ws_col: size(cols, 80), ws_row: size(rows, 24), ws_xpixel: 0, ws_ypixel: 0 }
}

fn nonblocking(fd: impl AsFd) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(&fd)?;
    Ok(rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK)?)
}

#[cfg(test)]
mod tests {
    use super::{candidates, environment, refusal};
    use crate::{
        sys::{SpawnError, Step},
        users::Account,
    };
    use keiki_protocol::guest::{EnvVar, ExecSpec, Pty};
    use std::io;

    #[test]
    fn a_path_is_searched_in_order_and_a_slash_stops_the_search() {
        assert_eq!(candidates(b"ls", b"/bin::/x"), [&b"/bin/ls"[..], b"ls", b"/x/ls"]);
        assert_eq!(candidates(b"./ls", b"/bin"), [b"./ls"]);
        assert_eq!(candidates(b"", b"/bin"), [b""]);
    }

    #[test]
    fn given_variables_win_and_bad_names_are_dropped() {
        let account = Account {
            name: b"amy".to_vec(),
            uid: 1,
            gid: 1,
            groups: vec![],
            home: b"/h".to_vec(),
            shell: b"/bin/sh".to_vec(),
        };
        let var = |name: &'static str, value: &'static str| EnvVar { name: name.into(), value: value.into() };
        let spec = ExecSpec {
            env: vec![var("HOME", "/other"), var("A=B", "c"), var("X", "1"), var("X", "2=3")],
            pty: Some(Pty::default()),
            ..ExecSpec::default()
        };
        let own = b"# none\nHOME=/etc\nPATH=\"/opt/x/bin:/bin\"\nexport Y='a b'\nX=own\n=bad\nA B=c\nlast";
        let env = environment(&account, own, &spec);
        assert_eq!(env[&b"PATH"[..]], b"/opt/x/bin:/bin");
        assert_eq!(env[&b"Y"[..]], b"a b");
        assert_eq!(env[&b"HOME"[..]], b"/other");
        assert_eq!(env[&b"USER"[..]], b"amy");
        assert_eq!(env[&b"X"[..]], b"2=3");
        assert_eq!(env[&b"TERM"[..]], b"xterm-256color");
        assert!(!env.contains_key(&b"A=B"[..]));
    }

    #[test]
    fn codes_are_those_of_a_shell() {
        let spec = ExecSpec { argv: vec!["prog".into()], cwd: "/nope".into(), ..ExecSpec::default() };
        let code = |step, errno| {
            refusal(&SpawnError::Child { step, error: io::Error::from_raw_os_error(errno) }, &spec)
        };
        assert_eq!(code(Step::Exec, libc::ENOENT), (127, "prog: not found".into()));
        assert_eq!(code(Step::Exec, libc::EACCES).0, 126);
        assert_eq!(code(Step::Exec, libc::ENOEXEC).0, 126);
        let (status, words) = code(Step::Directory, libc::ENOENT);
        assert_eq!(status, 126);
        assert!(words.contains("/nope"), "{words}");
    }
}
