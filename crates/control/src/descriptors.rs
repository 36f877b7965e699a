//! The descriptors of a request, each with its role.

use crate::{ControlError, Request, Result, Role};
use std::os::fd::OwnedFd;

/// The descriptors of a request, checked against [`Request::wants`].
#[derive(Debug)]
pub struct Descriptors {
    request: &'static str,
    entries: Vec<(Role, OwnedFd)>,
}

impl Descriptors {
    pub(crate) fn new(request: &Request, roles: Vec<Role>, files: Vec<OwnedFd>) -> Result<Self> {
        if roles.len() != files.len() {
            return Err(ControlError::Malformed(format!(
                "{} names {} descriptors and has {}",
                request.name(),
                roles.len(),
                files.len()
            )));
        }
        check(request, &roles)?;
        Ok(Self { request: request.name(), entries: roles.into_iter().zip(files).collect() })
    }

    /// Takes the descriptor of this role.
    pub fn take(&mut self, role: Role) -> Result<OwnedFd> {
        self.take_if_any(role).ok_or(ControlError::Missing { request: self.request, role })
    }

    /// Takes the descriptor of this role, if there is one.
    pub fn take_if_any(&mut self, role: Role) -> Option<OwnedFd> {
        let index = self.entries.iter().position(|(entry, _)| *entry == role)?;
        Some(self.entries.remove(index).1)
    }

    /// Refuses descriptors of additional disks that were not taken: their disk does not exist, or is
    /// read-only.
    pub fn no_other_disks(&self) -> Result<()> {
        let of_disk = |role: &Role| matches!(role, Role::DiskLayer(_) | Role::DiskTop(_));
        match self.entries.iter().find(|(role, _)| of_disk(role)) {
            None => Ok(()),
            Some((role, _)) => {
                let count = self.entries.iter().filter(|(other, _)| other == role).count();
                Err(ControlError::TooMany { request: self.request, role: *role, most: 0, count })
            }
        }
    }

    /// Takes all descriptors of this role, in the order sent.
    pub fn take_all(&mut self, role: Role) -> Vec<OwnedFd> {
        let (taken, rest) =
            std::mem::take(&mut self.entries).into_iter().partition(|(entry, _)| *entry == role);
        self.entries = rest;
        let taken: Vec<(Role, OwnedFd)> = taken;
        taken.into_iter().map(|(_, file)| file).collect()
    }
}

/// Checks that a request with descriptors of these roles has what it wants, and no more.
pub(crate) fn check(request: &Request, roles: &[Role]) -> Result<()> {
    let count = |role| roles.iter().filter(|other| **other == role).count();
    let most = |role| request.wants().iter().find(|want| want.role == role).map_or(0, |want| want.most);
    for role in roles {
        let (most, count) = (most(*role), count(*role));
        if count > most {
            return Err(ControlError::TooMany { request: request.name(), role: *role, most, count });
        }
    }
    match request.wants().iter().find(|want| count(want.role) < want.least) {
        Some(want) => Err(ControlError::Missing { request: request.name(), role: want.role }),
        None => Ok(()),
    }
}
