//! Descriptors with roles.

use crate::{ControlError, Request, Result};
use serde::{Deserialize, Serialize};
use std::{fmt, os::fd::OwnedFd};

/// Most lower layers of a disk.
pub(crate) const MAX_LAYERS: usize = 64;

/// Most disks besides the root disk.
pub const MAX_DISKS: usize = 8;

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// `/dev/kvm`.
    Kvm,
    /// Kernel image, read.
    Kernel,
    /// Initial RAM file system, read.
    Initrd,
    /// `vm.mem`: read for a load, written for a persist.
    Memory,
    /// `vm.state`: read for a load, written for a persist.
    State,
    /// `/proc/PID/pagemap` of the zygote itself, which it may not open.
    Pagemap,
    /// One end of a socket pair: the control connection of a new zygote, or the one on which a copy answers.
    Control,
    /// Listening socket: control connections of a new machine.
    Listener,
    /// An immutable disk layer, read. In the order sent: bottom first, which is raw; the others are qcow2.
    Layer,
    /// The writable disk layer, qcow2.
    Top,
    /// The tap, with a virtio-net header.
    Tap,
    /// Listening socket: connections to the agent port, one at a time.
    Agent,
    /// Console log, read and written.
    Console,
    /// A pipe: what a copy says on its standard error.
    Stderr,
    /// As [`Role::Layer`], of the further disk with this number, counted from 0.
    DiskLayer(u8),
    /// As [`Role::Top`], of that disk. One that is only read has none.
    DiskTop(u8),
    /// Pages that machines of these files touch first: a list as of [`crate::Pages::encode`].
    Pages,
}

impl Role {
    /// This role for each further disk that a machine may have.
    pub(crate) fn of_disks(role: impl Fn(u8) -> Self) -> impl Iterator<Item = Self> {
        (0..u8::MAX).take(MAX_DISKS).map(role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::DiskLayer(disk) => return write!(f, "a layer of further disk {disk}"),
            Self::DiskTop(disk) => return write!(f, "the top layer of further disk {disk}"),
            Self::Kvm => "/dev/kvm",
            Self::Kernel => "the kernel",
            Self::Initrd => "the initial RAM file system",
            Self::Memory => "memory",
            Self::State => "state",
            Self::Pagemap => "the page map",
            Self::Pages => "a list of pages",
            Self::Control => "a control connection",
            Self::Listener => "a control listener",
            Self::Layer => "a disk layer",
            Self::Top => "the top disk layer",
            Self::Tap => "the tap",
            Self::Agent => "the agent listener",
            Self::Console => "the console log",
            Self::Stderr => "standard error",
        };
        f.write_str(name)
    }
}

/// How many descriptors of a role a request has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    /// Which.
    pub role: Role,
    /// At least.
    pub least: usize,
    /// At most.
    pub most: usize,
}

/// The descriptors of a request, checked against what it wants.
#[derive(Debug)]
pub struct Descriptors {
    request: &'static str,
    entries: Vec<(Role, OwnedFd)>,
}

impl Descriptors {
    /// Pairs roles and descriptors, and checks them.
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

    /// The one of this role.
    ///
    /// # Errors
    /// If there is none, or it was taken.
    pub fn take(&mut self, role: Role) -> Result<OwnedFd> {
        self.take_if_any(role).ok_or(ControlError::Missing { request: self.request, role })
    }

    /// The one of this role, if there is one.
    pub fn take_if_any(&mut self, role: Role) -> Option<OwnedFd> {
        let index = self.entries.iter().position(|(entry, _)| *entry == role)?;
        Some(self.entries.remove(index).1)
    }

    /// Refuses what nobody took of further disks: it is of one that is not there, or cannot be written.
    ///
    /// # Errors
    /// Names the first.
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

    /// All of this role, in the order sent.
    pub fn take_all(&mut self, role: Role) -> Vec<OwnedFd> {
        let (taken, rest) =
            std::mem::take(&mut self.entries).into_iter().partition(|(entry, _)| *entry == role);
        self.entries = rest;
        let taken: Vec<(Role, OwnedFd)> = taken;
        taken.into_iter().map(|(_, file)| file).collect()
    }
}

/// Does a request with descriptors of these roles have what it wants, and no other?
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
