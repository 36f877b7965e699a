//! Who owns what: users that monitors run as, and files that are theirs or nobody's.
//!
//! Users are numbers of a range that nothing else should use, drawn at random so that two nodes of one host
//! seldom meet. Base files are root's: a monitor can read them through names or descriptors it is given, and
//! write none.

use crate::{Common, EngineError, Result, VmPaths, layers::make_layers_dir};
use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::Path,
    sync::{Arc, Mutex, PoisonError},
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
    pub(crate) fn draw(&self, first: u32) -> Option<User> {
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = uuid::Uuid::now_v7().as_u128() as u32 % USERS;
        let id = (0..USERS).map(|step| first + (start + step) % USERS).find(|id| !used.contains(id))?;
        used.insert(id);
        Some(User { id, of: self.clone() })
    }

    /// The number of a machine that was found again.
    pub(crate) fn claim(&self, id: u32) -> User {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
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
        self.of.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// A user for a new monitor, if this engine jails. Its directories are closed to everybody else.
pub(crate) fn settle(common: &Common, users: &Users, paths: &VmPaths) -> Result<Option<User>> {
    let Some(first) = common.first_user else { return Ok(None) };
    let none = || EngineError::Monitor("has no user number left to run as".into());
    let user = users.draw(first).ok_or_else(none)?;
    close(&paths.run_dir, 0o700, None)?;
    make_layers_dir(&paths.dir)?;
    for dir in [paths.dir.clone(), paths.dir.join(keiki_snapshot::LAYERS_DIR)] {
        close(&dir, 0o710, Some(user.id))?;
    }
    Ok(Some(user))
}

fn close(dir: &Path, mode: u32, group: Option<u32>) -> Result<()> {
    fs::set_permissions(dir, Permissions::from_mode(mode))
        .and_then(|()| chown(dir, Some(0), Some(group.unwrap_or(0))))
        .map_err(EngineError::at("close", dir))
}

/// Closes a directory of base files to all but root: monitors get names of their own for what they need.
pub(crate) fn hide(dir: &Path) -> Result<()> {
    close(dir, 0o700, None)
}

/// Makes a file the monitor's own.
pub(crate) fn give(path: &Path, user: Option<u32>) -> Result<()> {
    let Some(id) = user else { return Ok(()) };
    fs::set_permissions(path, Permissions::from_mode(0o600))
        .and_then(|()| chown(path, Some(id), Some(id)))
        .map_err(EngineError::at("hand over", path))
}

/// Lets monitors read a base file. Who may come near it, its directory says.
pub(crate) fn show(path: &Path) -> Result<()> {
    let mode = fs::metadata(path).map_err(EngineError::at("look at", path))?.mode();
    if mode & 0o004 != 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(0o644)).map_err(EngineError::at("open up", path))
}

#[cfg(test)]
mod tests {
    use super::{FIRST_USER, USERS, Users};

    #[test]
    fn no_two_machines_get_one_user() {
        let users = Users::default();
        let claimed = users.claim(FIRST_USER);
        let drawn: Vec<_> = (1..USERS).filter_map(|_| users.draw(FIRST_USER)).collect();
        assert_eq!(drawn.len(), USERS as usize - 1);
        assert!(drawn.iter().all(|user| user.id() != claimed.id() && (user.id() - FIRST_USER) < USERS));
        assert!(users.draw(FIRST_USER).is_none());
        drop(drawn);
        assert!(users.draw(FIRST_USER).is_some());
    }
}
