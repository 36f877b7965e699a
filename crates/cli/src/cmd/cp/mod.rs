//! `keiki cp`.
//!
//! Files keep their permission bits. Directories are copied with what is inside, as one tar stream: modes, times,
//! symlinks, hard links and holes stay what they are. As with `cp -r`: a destination that is a directory receives the
//! source under its own name, any other destination is the new name. `-` is a tar stream on standard input or output.
//!
//! A sandbox is not trusted with the local file system: see `keiki_archive::unpack`.

mod download;
mod stdio;
mod upload;

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    ids::looks_like_id,
    progress::Progress,
    signals::unless_interrupted,
    text,
};
use keiki_client::{
    Client, SandboxId,
    api::{FsEntry, FsUnpacked},
};
use serde::Serialize;
use std::path::PathBuf;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep owners, by their numbers; else files belong to root in a sandbox and to you here
    #[arg(short, long)]
    pub archive: bool,
    /// A local path, SANDBOX:/path, or - for a tar stream on standard input
    #[arg(value_name = "FROM")]
    pub from: String,
    /// A local path, SANDBOX:/path, or - for a tar stream on standard output
    #[arg(value_name = "TO")]
    pub to: String,
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Local(PathBuf),
    /// A tar stream.
    Stdio,
    Remote {
        sandbox: String,
        path: String,
    },
}

/// `ID:/path` is in a sandbox; anything else, or what starts with `/`, `./` or `../`, is local.
fn parse_end(text: &str) -> Result<End, Failure> {
    if text.is_empty() {
        return Err(Failure::Usage("a path is empty".into()));
    }
    if text == "-" {
        return Ok(End::Stdio);
    }
    let Some((sandbox, path)) = text.split_once(':').filter(|(before, _)| looks_like_id(before)) else {
        return Ok(End::Local(text.into()));
    };
    if !path.starts_with('/') {
        let hint = format!("if it is a local file, write ./{text}");
        return Err(Failure::Usage(format!("{text:?}: a path in a sandbox starts with '/' ({hint})")));
    }
    Ok(End::Remote { sandbox: sandbox.into(), path: path.into() })
}

/// What was copied.
#[derive(Debug, Default, Serialize)]
struct Copied {
    files: u64,
    dirs: u64,
    symlinks: u64,
    bytes: u64,
    /// Devices, sockets and pipes, which are left out.
    skipped: u64,
}

impl Copied {
    fn add(&mut self, unpacked: &FsUnpacked) {
        self.files += unpacked.files;
        self.dirs += unpacked.dirs;
        self.symlinks += unpacked.symlinks;
        self.bytes += unpacked.bytes;
    }
}

/// What both directions need.
struct Copier {
    client: Client,
    id: SandboxId,
    progress: Progress,
    copied: Copied,
    owners: bool,
}

impl Copier {
    fn say(&self, name: &str) {
        let plain: String = name.chars().filter(|c| !c.is_control()).collect();
        self.progress.say(format!("copying {plain}"));
    }
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let (from, to) = (parse_end(&args.from)?, parse_end(&args.to)?);
    let sandbox = match (&from, &to) {
        (End::Remote { .. }, End::Remote { .. }) => {
            return Err(Failure::Usage("copy from one sandbox to another through a local file".into()));
        }
        (End::Remote { sandbox, .. }, _) | (_, End::Remote { sandbox, .. }) => sandbox,
        _ => return Err(Failure::Usage("one of the two must be in a sandbox: SANDBOX:/path".into())),
    };
    let id = context.sandbox_id(sandbox).await?;
    let progress = Progress::start("copying");
    let (client, copied) = (context.client.clone(), Copied::default());
    let mut copier = Copier { client, id, progress, copied, owners: args.archive };
    match (&from, &to) {
        (End::Remote { path, .. }, End::Stdio) => {
            drop(copier);
            return stdio::write(&context.client, id, path).await;
        }
        (End::Stdio, End::Remote { path, .. }) => {
            unless_interrupted(stdio::read(&mut copier, path)).await?;
        }
        (End::Local(from), End::Remote { path, .. }) => {
            unless_interrupted(upload::copy(&mut copier, from, path)).await?;
        }
        (End::Remote { path, .. }, End::Local(to)) => download::copy(&mut copier, path, to).await?,
        _ => {}
    }
    let Copier { copied, progress, .. } = copier;
    drop(progress);
    context.out.show(&copied, String::new)?;
    if copied.skipped > 0 {
        context.out.note(&format!("keiki: left out {}: devices, sockets or pipes", copied.skipped));
    }
    if !context.out.is_json() {
        let (files, size) = (copied.files, text::bytes(copied.bytes));
        context.out.note(&format!("copied {files} file{}, {size}", if files == 1 { "" } else { "s" }));
    }
    Ok(if copied.skipped == 0 { ExitCode::Success } else { ExitCode::Failed } as i32)
}

/// As many symlinks in a row as Linux follows.
const MAX_LINKS: usize = 40;

/// What the user named, behind any symlinks: what they point at is meant.
async fn follow(copier: &Copier, path: &str) -> Result<(String, FsEntry), Failure> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let entry = copier.client.stat(copier.id, &path).await?;
        match &entry.target {
            Some(target) if entry.kind == "symlink" => path = beside(&path, target),
            _ => return Ok((path, entry)),
        }
    }
    Err(Failure::Wrong(format!("{path:?}: too many symlinks")))
}

/// Where a symlink at `path` that says `target` points.
fn beside(path: &str, target: &str) -> String {
    if target.starts_with('/') {
        return target.to_owned();
    }
    let dir = path.trim_end_matches('/').rsplit_once('/').map_or("", |(dir, _)| dir);
    format!("{dir}/{target}")
}

/// A path in the guest, one level down.
fn join(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// The last name of a path in the guest; None for the root and for paths that end in `.` or `..`.
fn base_name(path: &str) -> Option<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next()?;
    (!matches!(name, "" | "." | "..")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::{End, base_name, beside, join, parse_end};

    fn remote(sandbox: &str, path: &str) -> End {
        End::Remote { sandbox: sandbox.into(), path: path.into() }
    }

    #[test]
    fn ends_are_local_or_in_a_sandbox() {
        for (text, end) in [
            ("0198f2a4:/a b/é\n", remote("0198f2a4", "/a b/é\n")),
            ("abcd:/x:y", remote("abcd", "/x:y")),
            ("0198f2a4-7c1e-7000-8000-aaaaaaaa0001:/", remote("0198f2a4-7c1e-7000-8000-aaaaaaaa0001", "/")),
            ("./abcd:/x", End::Local("./abcd:/x".into())),
            ("/abcd:/x", End::Local("/abcd:/x".into())),
            ("file name", End::Local("file name".into())),
            ("-", End::Stdio),
            ("./-", End::Local("./-".into())),
            ("notes:today", End::Local("notes:today".into())),
            (":/x", End::Local(":/x".into())),
        ] {
            assert_eq!(parse_end(text).unwrap(), end, "{text:?}");
        }
        for text in ["", "abcd:", "abcd:x"] {
            assert!(parse_end(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn symlinks_point_from_where_they_are() {
        assert_eq!(beside("/a/l", "b c"), "/a/b c");
        assert_eq!(beside("/a/l/", "../x"), "/a/../x");
        assert_eq!(beside("/l", "b"), "/b");
        assert_eq!(beside("/a/l", "/b"), "/b");
    }

    #[test]
    fn guest_paths() {
        assert_eq!(join("/", "a"), "/a");
        assert_eq!(join("/a/", "b c"), "/a/b c");
        assert_eq!(base_name("/a/b/"), Some("b"));
        for none in ["/", "", "/a/..", "/a/."] {
            assert_eq!(base_name(none), None, "{none:?}");
        }
    }
}
