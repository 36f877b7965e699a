//! One descriptor to poll for everything that a device waits for.
//!
//! There are two epoll instances, one inside the other. Queue events and backends are in the inner
//! one; the monitor polls the outer one. A pause removes the inner from the outer: nothing needs to
//! be unregistered, and the monitor does not spin over events that nothing consumes.

use rustix::event::{Timespec, epoll};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
};

/// Events taken at once.
const BATCH: usize = 16;

/// What to wait for on a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interest {
    /// Readable, or closed.
    pub read: bool,
    /// Writable.
    pub write: bool,
}

/// Where a device registers what it waits for.
#[derive(Debug, Clone)]
pub struct Watcher(Arc<OwnedFd>);

impl Watcher {
    pub fn add(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&*self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    pub fn set(&self, fd: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&*self.0, fd, epoll::EventData::new_u64(token), flags(interest))?)
    }

    /// Closing a descriptor removes it too, if it has no copy.
    pub fn remove(&self, fd: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&*self.0, fd)?)
    }
}

/// The two epoll instances.
#[derive(Debug)]
pub(crate) struct Watch {
    outer: OwnedFd,
    inner: Watcher,
    open: bool,
}

impl Watch {
    /// Starts closed.
    pub(crate) fn new() -> io::Result<Self> {
        let outer = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let inner = Watcher(Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC)?));
        Ok(Self { outer, inner, open: false })
    }

    pub(crate) fn watcher(&self) -> &Watcher {
        &self.inner
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.outer.as_fd()
    }

    /// Lets events through or holds them back.
    pub(crate) fn set_open(&mut self, open: bool) -> io::Result<()> {
        if open && !self.open {
            epoll::add(&self.outer, &*self.inner.0, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        } else if !open && self.open {
            epoll::delete(&self.outer, &*self.inner.0)?;
        }
        self.open = open;
        Ok(())
    }

    /// Tokens of ready descriptors. Empty while closed.
    pub(crate) fn ready(&self) -> Vec<u64> {
        let mut events = Vec::with_capacity(BATCH);
        if self.open {
            // An error is like no event: epoll is level-triggered and reports again.
            let _ = epoll::wait(
                &*self.inner.0,
                rustix::buffer::spare_capacity(&mut events),
                Some(&Timespec::default()),
            );
        }
        events.iter().map(|event: &epoll::Event| event.data.u64()).collect()
    }
}

fn flags(interest: Interest) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, interest.read);
    flags.set(epoll::EventFlags::OUT, interest.write);
    flags
}
