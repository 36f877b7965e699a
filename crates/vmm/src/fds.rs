//! The descriptors that one machine owns.

use crate::Result;
use keiki_control::{Descriptors, Disk, Role};
use keiki_devices::disk::{Format, Layer};
use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// Open descriptors of one machine. No other machine has them.
#[derive(Debug)]
pub struct VmFds {
    /// Lower layers of the root disk, bottom first.
    pub layers: Vec<OwnedFd>,
    /// Writable layer of the root disk.
    pub top: OwnedFd,
    pub tap: Option<OwnedFd>,
    /// Listener of the agent port.
    pub agent: OwnedFd,
    /// Console log.
    pub console: OwnedFd,
    /// Listener of the control socket.
    pub listener: OwnedFd,
    /// Disks besides the root disk.
    pub disks: Vec<DiskFds>,
    /// Standard error. None: the copy keeps the one it was forked with.
    pub stderr: Option<OwnedFd>,
    /// List of the pages in the working set.
    pub pages: Option<OwnedFd>,
}

/// Descriptors of a disk besides the root disk.
#[derive(Debug)]
pub struct DiskFds {
    pub layers: Vec<OwnedFd>,
    /// Writable layer. None: the disk is read-only.
    pub top: Option<OwnedFd>,
}

impl VmFds {
    /// Takes the descriptors of a request, for a machine that has `disks` besides its root disk.
    pub fn take(descriptors: &mut Descriptors, disks: &[Disk]) -> Result<Self> {
        let disk_fds = |(number, disk): (u8, &Disk)| -> Result<DiskFds> {
            let mut layers = vec![descriptors.take(Role::DiskLayer(number))?];
            layers.extend(descriptors.take_all(Role::DiskLayer(number)));
            let top = (!disk.read_only).then(|| descriptors.take(Role::DiskTop(number))).transpose()?;
            Ok(DiskFds { layers, top })
        };
        let disks = (0..).zip(disks).map(disk_fds).collect::<Result<_>>()?;
        let fds = Self {
            disks,
            layers: descriptors.take_all(Role::Layer),
            top: descriptors.take(Role::Top)?,
            tap: descriptors.take_if_any(Role::Tap),
            agent: descriptors.take(Role::Agent)?,
            console: descriptors.take(Role::Console)?,
            listener: descriptors.take(Role::Listener)?,
            stderr: descriptors.take_if_any(Role::Stderr),
            pages: descriptors.take_if_any(Role::Pages),
        };
        descriptors.no_other_disks()?;
        Ok(fds)
    }

    /// All of them: what a copy keeps open.
    #[must_use]
    pub fn all(&self) -> Vec<BorrowedFd<'_>> {
        let mut all: Vec<_> = self.layers.iter().map(AsFd::as_fd).collect();
        all.extend(self.disks.iter().flat_map(|disk| disk.layers.iter().chain(&disk.top)).map(AsFd::as_fd));
        all.extend([&self.tap, &self.stderr, &self.pages].into_iter().flatten().map(AsFd::as_fd));
        all.extend([&self.top, &self.agent, &self.console, &self.listener].map(AsFd::as_fd));
        all
    }
}

/// Files as disk layers: the bottom layer is raw, the others are qcow2.
#[must_use]
pub fn layers(files: Vec<OwnedFd>) -> Vec<Layer> {
    let format = |index| if index == 0 { Format::Raw } else { Format::Qcow2 };
    let layer = |(index, file)| Layer { format: format(index), file: File::from(file) };
    files.into_iter().enumerate().map(layer).collect()
}
