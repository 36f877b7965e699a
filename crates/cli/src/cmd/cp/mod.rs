//! `keiki cp`.
//!
//! Files keep their permission bits. Directories are copied recursively, as one tar stream that
//! keeps modes, times, symlinks, hard links and holes. As with `cp -r`, a destination directory
//! receives the source under its own name; any other destination is the new name. `-` is a tar
//! stream on standard input or output.
//!
//! A sandbox is not trusted with the local file system: see `keiki_archive::unpack`.

mod copier;
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
use copier::{Copied, Copier};
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Keep owners, by number; otherwise files belong to root in the sandbox and to you here
    #[arg(short, long)]
    pub archive: bool,
    /// Local path, SANDBOX:/path, or - for a tar stream from standard input
    pub from: String,
    /// Local path, SANDBOX:/path, or - for a tar stream to standard output
    pub to: String,
}

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    Local(PathBuf),
    Stdio,
    Remote { sandbox: String, path: String },
}

/// `ID:/path` is in a sandbox; anything else, or what starts with `/`, `./` or `../`, is local.
fn parse_end(text: &str) -> Result<End, Failure> {
    if text.is_empty() {
        return Err(Failure::Usage("empty path".into()));
    }
    if text == "-" {
        return Ok(End::Stdio);
    }
    let Some((sandbox, path)) = text.split_once(':').filter(|(before, _)| looks_like_id(before)) else {
        return Ok(End::Local(text.into()));
    };
    if !path.starts_with('/') {
        return Err(Failure::Usage(format!(
            "{text}: a path in a sandbox starts with '/' (for a local file, write ./{text})"
        )));
    }
    Ok(End::Remote { sandbox: sandbox.into(), path: path.into() })
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let (from, to) = (parse_end(&args.from)?, parse_end(&args.to)?);
    let sandbox = match (&from, &to) {
        (End::Remote { .. }, End::Remote { .. }) => {
            return Err(Failure::Usage("cannot copy between sandboxes: copy through a local file".into()));
        }
        (End::Remote { sandbox, .. }, _) | (_, End::Remote { sandbox, .. }) => sandbox,
        _ => return Err(Failure::Usage("one path must be in a sandbox: SANDBOX:/path".into())),
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
        context.out.note(&format!("keiki: skipped {} devices, sockets or pipes", copied.skipped));
    }
    if !context.out.is_json() {
        let (files, size) = (copied.files, text::bytes(copied.bytes));
        context.out.note(&format!("copied {files} file{}, {size}", if files == 1 { "" } else { "s" }));
    }
    Ok(if copied.skipped == 0 { ExitCode::Success } else { ExitCode::Failed } as i32)
}

#[cfg(test)]
mod tests {
    use super::{End, parse_end};

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
}
