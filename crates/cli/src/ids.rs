//! Short ids.
//!
//! Ids are UUIDs that start with a timestamp: sandboxes of one fork share their first dozen digits
//! and differ at the end. So tables show the last group of an id, and commands take the whole id or
//! any unique prefix or suffix.

use crate::exit::Failure;
use std::fmt::Display;

/// Shorter texts would too easily name the wrong one.
const MIN: usize = 4;

/// The last group of an id, for tables.
pub fn short(id: impl Display) -> String {
    let text = id.to_string();
    text.rsplit('-').next().unwrap_or(&text).to_owned()
}

/// Which ids a list shows.
#[derive(Debug, clap::Args)]
pub struct Shown {
    /// Print only whole ids
    #[arg(short, long)]
    pub quiet: bool,
    /// Show whole ids
    #[arg(long)]
    pub full: bool,
}

impl Shown {
    /// An id in a table.
    pub fn id(&self, id: impl Display) -> String {
        if self.full { id.to_string() } else { short(id) }
    }

    /// Only the ids, one per line, if `--quiet`; the table otherwise.
    pub fn list(&self, ids: impl IntoIterator<Item: Display>, table: impl FnOnce() -> String) -> String {
        if !self.quiet {
            return table();
        }
        ids.into_iter().map(|id| id.to_string()).collect::<Vec<_>>().join("\n")
    }
}

/// Does `text` look like an id or a part of one?
pub fn looks_like_id(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-')
}

/// The one of `ids` that `text` names. `what` goes into errors: `sandbox`, `snapshot`.
pub fn pick<T: Copy + Display>(what: &str, text: &str, ids: &[T]) -> Result<T, Failure> {
    let wanted = text.to_ascii_lowercase();
    if !looks_like_id(&wanted) {
        return Err(Failure::Usage(format!("not a {what} id: {text}")));
    }
    let named = |id: &T| {
        let id = id.to_string();
        id == wanted || (wanted.len() >= MIN && (id.starts_with(&wanted) || id.ends_with(&wanted)))
    };
    let hits: Vec<T> = ids.iter().copied().filter(named).collect();
    match hits.as_slice() {
        [id] => Ok(*id),
        [] if wanted.len() < MIN => {
            Err(Failure::Usage(format!("{what} id {text:?} is too short: type at least {MIN} characters")))
        }
        [] => Err(Failure::Usage(format!("no such {what}: {text}"))),
        many => Err(Failure::Usage(format!("{what} id {text} is ambiguous: {} match", many.len()))),
    }
}

#[cfg(test)]
mod tests {
    use super::{looks_like_id, pick, short};

    const IDS: [&str; 3] = [
        "0198f2a4-7c1e-7000-8000-aaaaaaaa0001",
        "0198f2a4-7c1e-7000-8000-aaaaaaaa0002",
        "0198f2b5-0000-7abc-9000-bbbbbbbb0001",
    ];

    #[test]
    fn beginnings_and_ends_name_one_or_none() {
        let ok = |text: &str| pick("sandbox", text, &IDS).ok();
        assert_eq!(ok(IDS[0]), Some(IDS[0]));
        assert_eq!(ok("0198f2b"), Some(IDS[2]));
        assert_eq!(ok("0198F2B"), Some(IDS[2]));
        assert_eq!(ok("aaaa0002"), Some(IDS[1]));
        assert_eq!(ok("8000-aaaaaaaa0002"), Some(IDS[1]));
        for none in ["0198", "0001", "bbb", "ffff", "", "x", "../..", "é"] {
            assert_eq!(ok(none), None, "{none:?}");
        }
    }

    #[test]
    fn the_reason_is_given() {
        let why = |text: &str| pick("sandbox", text, &IDS).unwrap_err().to_string();
        assert_eq!(why("0198f2a4"), "sandbox id 0198f2a4 is ambiguous: 2 match");
        assert!(why("0").contains("too short"));
        assert!(why("dead").contains("no such sandbox: dead"));
    }

    #[test]
    fn what_is_shown_can_be_typed() {
        for id in IDS {
            assert_eq!(pick("sandbox", &short(id), &IDS).unwrap(), id);
        }
        assert!(looks_like_id("00ff-"));
        assert!(!looks_like_id("C:\\x"));
    }
}
