//! Users that monitors run as, and the owners of files.
//!
//! Users are numbers from a range that nothing else should use, drawn at random so that two nodes
//! on one host rarely pick the same one. Base files belong to root: a monitor can read them through
//! the names or descriptors that it receives, and cannot write any.

use crate::{EngineError, Result};
use parking_lot::Mutex;
use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::Path,
    sync::Arc,
};

/// Default of the first user number of monitors.
pub const FIRST_USER: u32 = 1_262_026_752;
/// How many there are.
pub const USERS: u32 = 65_536;

/// The user numbers in use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Users(Arc<Mutex<BTreeSet<u32>>>);

/// A user number, free again when dropped.
#[derive(Debug)]
pub(crate) struct User {
    id: u32,
    of: Users,
}

impl Users {
    /// A number that no machine of this engine has.
    pub(crate) fn draw(&self, first: u32) -> Result<User> {
        let mut used = self.0.lock();
        let start = uuid::Uuid::now_v7().as_u128() as u32 % USERS;
        let id = (0..USERS)
            .map(|step| first + (start + step) % USERS)
            .find(|id| !used.contains(id))
            .ok_or_else(|| EngineError::Monitor("has no user number left to run as".into()))?;
        used.insert(id);
        Ok(User { id, of: self.clone() })
    }

    /// The number of an adopted machine again.
    pub(crate) fn claim(&self, id: u32) -> User {
        self.0.lock().insert(id);
        User { id, of: self.clone() }
    }
}

impl User {
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.of.0.lock().remove(&self.id);
    }
}

/// Sets mode and group of a directory of root's.
pub(crate) fn close(dir: &Path, mode: u32, group: Option<u32>) -> Result<()> {
    fs::set_permissions(dir, Permissions::from_mode(mode))
        .and_then(|()| chown(dir, Some(0), Some(group.unwrap_or(0))))
        .map_err(EngineError::at("close", dir))
}

/// Closes a directory of base files to all but root: a monitor gets its own names for what it
/// needs.
pub(crate) fn chmod_private(dir: &Path) -> Result<()> {
    close(dir, 0o700, None)
}

/// Gives a file to a monitor.
pub(crate) fn chown_to(path: &Path, user: Option<u32>) -> Result<()> {
    let Some(id) = user else { return Ok(()) };
    fs::set_permissions(path, Permissions::from_mode(0o600))
        .and_then(|()| chown(path, Some(id), Some(id)))
        .map_err(EngineError::at("change the owner of", path))
}

/// Lets monitors read a base file, as far as its directory lets them reach it.
pub(crate) fn chmod_readable(path: &Path) -> Result<()> {
    let mode = fs::metadata(path).map_err(EngineError::at("inspect", path))?.mode();
    if mode & 0o004 != 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(0o644)).map_err(EngineError::at("chmod", path))
}

#[cfg(test)]
mod tests {
    use super::{FIRST_USER, USERS, Users};

    #[test]
    fn no_two_machines_get_one_user() {
        let users = Users::default();
        let claimed = users.claim(FIRST_USER);
        let drawn: Vec<_> = (1..USERS).filter_map(|_| users.draw(FIRST_USER).ok()).collect();
        assert_eq!(drawn.len(), USERS as usize - 1);
        assert!(drawn.iter().all(|user| user.id() != claimed.id() && (user.id() - FIRST_USER) < USERS));
        assert!(users.draw(FIRST_USER).is_err());
        drop(drawn);
        assert!(users.draw(FIRST_USER).is_ok());
    }
}
