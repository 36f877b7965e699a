//! What a descriptor is for.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Most lower layers of a disk.
pub(crate) const MAX_LAYERS: usize = 64;

/// Most disks besides the root disk.
pub const MAX_DISKS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Role {
    /// `/dev/kvm`.
    Kvm,
    Kernel,
    Initrd,
    /// `vm.mem`: read for a load, written for a persist.
    Memory,
    /// `vm.state`: read for a load, written for a persist.
    State,
    /// `/proc/PID/pagemap` of the zygote, which may not open it itself.
    Pagemap,
    /// One end of a socket pair: the control connection of a new zygote, or the connection on which
    /// a copy answers.
    Control,
    /// Listener for control connections of a new machine.
    Listener,
    /// An immutable disk layer. Layers are sent bottom first. The bottom is raw, the others are
    /// qcow2.
    Layer,
    /// The writable disk layer, qcow2.
    Top,
    /// The tap, with a virtio-net header.
    Tap,
    /// Listener for connections to the agent port, one at a time.
    Agent,
    /// Console log, read and written.
    Console,
    /// A pipe for the standard error of a copy.
    Stderr,
    /// Like [`Role::Layer`], for the additional disk with this number, counted from 0.
    DiskLayer(u8),
    /// Like [`Role::Top`], for that disk. A read-only disk has none.
    DiskTop(u8),
    /// The working set of machines of these files, from [`crate::Pages::encode`].
    Pages,
}

impl Role {
    /// The role for each additional disk that a machine may have.
    pub(crate) fn of_disks(role: impl Fn(u8) -> Self) -> impl Iterator<Item = Self> {
        (0..u8::MAX).take(MAX_DISKS).map(role)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::DiskLayer(disk) => return write!(f, "a layer of additional disk {disk}"),
            Self::DiskTop(disk) => return write!(f, "the top layer of additional disk {disk}"),
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

/// How many descriptors of a role a request may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Want {
    pub role: Role,
    pub least: usize,
    pub most: usize,
}
