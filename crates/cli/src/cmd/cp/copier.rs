//! What both directions of a copy share.

use crate::{exit::Failure, progress::Progress};
use keiki_client::{
    Client, SandboxId,
    api::{FsEntry, FsUnpacked},
};
use serde::Serialize;

#[derive(Debug, Default, Serialize)]
pub struct Copied {
    pub files: u64,
    pub dirs: u64,
    pub symlinks: u64,
    pub bytes: u64,
    /// Devices, sockets and pipes.
    pub skipped: u64,
}

impl Copied {
    pub fn add(&mut self, unpacked: &FsUnpacked) {
        self.files += unpacked.files;
        self.dirs += unpacked.dirs;
        self.symlinks += unpacked.symlinks;
        self.bytes += unpacked.bytes;
    }
}

pub struct Copier {
    pub client: Client,
    pub id: SandboxId,
    pub progress: Progress,
    pub copied: Copied,
    pub owners: bool,
}

impl Copier {
    pub fn announce(&self, name: &str) {
        let plain: String = name.chars().filter(|c| !c.is_control()).collect();
        self.progress.set(format!("copying {plain}"));
    }
}

/// As many symlinks as Linux follows.
const MAX_LINKS: usize = 40;

/// Resolves symlinks at the end of a path.
pub async fn follow(copier: &Copier, path: &str) -> Result<(String, FsEntry), Failure> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let entry = copier.client.stat(copier.id, &path).await?;
        match &entry.target {
            Some(target) if entry.kind == "symlink" => path = beside(&path, target),
            _ => return Ok((path, entry)),
        }
    }
    Err(Failure::Wrong(format!("{path}: too many symlinks")))
}

/// Where a symlink at `path` with this `target` points.
fn beside(path: &str, target: &str) -> String {
    if target.starts_with('/') {
        return target.to_owned();
    }
    let dir = path.trim_end_matches('/').rsplit_once('/').map_or("", |(dir, _)| dir);
    format!("{dir}/{target}")
}

/// Appends a name to a path in the guest.
pub fn join(dir: &str, name: &str) -> String {
    format!("{}/{name}", dir.trim_end_matches('/'))
}

/// The last component of a path in the guest; None for the root and for paths that end in `.` or
/// `..`.
pub fn base_name(path: &str) -> Option<&str> {
    let name = path.trim_end_matches('/').rsplit('/').next()?;
    (!matches!(name, "" | "." | "..")).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::{base_name, beside, join};

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
