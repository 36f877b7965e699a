//! `/etc/keiki/thaw.d`: programs of a template's owner that run in each copy before it is released.
//!
//! Executable files run one after the other in the order of their names, as root, while user work
//! is frozen. If one fails, or all of them together take too long, the release fails: the node
//! destroys the copy and reports why.

use super::program;
use crate::reaper::Reaper;
use keiki_protocol::guest::Identity;
use std::{
    fs, io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Notify;

const DIRECTORY: &str = "/etc/keiki/thaw.d";
/// For all hooks together.
const LIMIT: Duration = Duration::from_secs(10);
const MAX: usize = 64;

/// Runs all hooks.
pub async fn run(reaper: &Arc<Reaper>, identity: &Identity) -> io::Result<()> {
    let hooks = find(Path::new(DIRECTORY))?;
    if hooks.is_empty() {
        return Ok(());
    }
    let env = [
        ("KEIKI_REASON", identity.reason.clone()),
        ("KEIKI_GENERATION", identity.generation.to_string()),
        ("KEIKI_SANDBOX_ID", identity.sandbox_id.clone()),
        ("KEIKI_PARENT_SANDBOX_ID", identity.parent_sandbox_id.clone()),
        ("KEIKI_PARENT_SNAPSHOT_ID", identity.parent_snapshot_id.clone()),
    ];
    let begin = Instant::now();
    for hook in hooks {
        let name = hook.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let left = LIMIT.saturating_sub(begin.elapsed());
        let exited = program::run(reaper, &hook, vec![], &env, left, &Notify::new())
            .await
            .map_err(|error| io::Error::new(error.kind(), format!("hook {name}: {error}")))?;
        if exited.code != 0 {
            return Err(io::Error::other(format!(
                "hook {name} exited with {}: {}",
                exited.code, exited.output
            )));
        }
    }
    Ok(())
}

/// Executable files, sorted by name. Skips hidden files and leftovers of editors and package tools.
fn find(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let mut found = vec![];
    for entry in entries {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let is_leftover = name.starts_with('.') || name.ends_with('~') || name.contains(".dpkg-");
        if is_leftover {
            continue;
        }
        let meta = fs::metadata(&path)?;
        if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
            found.push(path);
        }
        if found.len() > MAX {
            return Err(io::Error::other(format!("more than {MAX} hooks in {}", directory.display())));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_files_are_found_in_the_order_of_their_names() {
        let directory = tempfile::tempdir().unwrap();
        assert!(find(&directory.path().join("none")).unwrap().is_empty());
        for (name, mode) in
            [("20-b", 0o755), ("10-a", 0o700), ("README", 0o644), (".x", 0o755), ("9~", 0o755)]
        {
            let path = directory.path().join(name);
            fs::write(&path, "").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        fs::create_dir(directory.path().join("30-dir")).unwrap();
        let names: Vec<_> = find(directory.path()).unwrap();
        assert_eq!(names, ["10-a", "20-b"].map(|name| directory.path().join(name)));
    }
}
