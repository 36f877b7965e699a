//! What every device is to the monitor: registers, a descriptor to poll, one lifecycle, and state as plain data.

use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

pub type Memory = vm_memory::GuestMemoryMmap<()>;

/// A device as the monitor knows it.
///
/// ```text
///   new ──> [restore] ──> resume ──> running ──> pause ──> [save]* ──┐
///                            ▲                                       │
///                            └───────────────────────────────────────┘   drop at any time
/// ```
///
/// Rules, which callers keep and implementations rely on:
/// - A new device is paused. [`restore`](Device::restore) comes before the first [`resume`](Device::resume), never
///   after; a device whose `restore` failed is dropped.
/// - [`pause`](Device::pause) is called once the vCPUs are parked. When it returns, nothing is in flight: what the guest
///   asked for is either done, and said to be done in its memory, or still untouched in its rings. It does not wait
///   beyond `deadline`.
/// - [`save`](Device::save) only while paused, any number of times. It changes nothing. What the guest would have to
///   be told (an interrupt that is pending) is part of the state.
/// - Whatever is signalled around a pause is never lost: notifications wait in their events, and a device that was restored
///   looks at every queue and raises a pending interrupt again, at the price of a spurious one.
/// - While paused, [`events`](Device::events) never becomes readable, so it can stay in the monitor's epoll.
pub trait Device: Send {
    /// A read of registers by the guest. Any offset, any length: what is not there reads as zeroes.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// A write to registers by the guest. Any offset, any length: what makes no sense is ignored.
    fn write(&mut self, offset: u64, data: &[u8]);

    /// Readable when [`process`](Device::process) has something to do. None: never. Stays the same.
    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Does what is to be done, a bounded amount of it; the rest makes [`events`](Device::events) readable again.
    fn process(&mut self) {}

    /// Stops, with nothing in flight.
    fn pause(&mut self, deadline: Instant) -> io::Result<()>;

    fn save(&self) -> Result<State, StateError>;

    /// Takes over a state, which is not trusted.
    fn restore(&mut self, state: &State) -> Result<(), StateError>;

    fn resume(&mut self) -> io::Result<()>;
}

/// An interrupt line, edge triggered: each call is one edge.
pub trait Interrupt: Send + Sync {
    fn raise(&self) -> io::Result<()>;
}

/// An event counter of the kernel: a queue notification (ioeventfd) or an interrupt line (irqfd).
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new one, not signalled.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Signals it. One that is signalled to its limit is signalled.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it was signalled since the last time.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An irqfd: the monitor connected it to a line.
impl Interrupt for Event {
    fn raise(&self) -> io::Result<()> {
        self.signal()
    }
}

impl<T: Interrupt + ?Sized> Interrupt for Arc<T> {
    fn raise(&self) -> io::Result<()> {
        T::raise(self)
    }
}

/// State of one device: plain data that says of itself what it is. The kind and the version are the device's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// What it is the state of.
    pub kind: String,
    /// Version of the layout of `data`.
    pub version: u16,
    /// The fields (postcard).
    pub data: Vec<u8>,
}

/// A state that cannot be taken over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("state of a {found} device where that of a {wanted} device belongs")]
    Kind {
        wanted: &'static str,
        /// What there was, cut short.
        found: String,
    },
    #[error("state of the {kind} device has version {found}, this monitor reads version {wanted}")]
    Version { kind: &'static str, wanted: u16, found: u16 },
    /// Not the fields that the version has.
    #[error("state of the {kind} device cannot be read: it is cut short, or not what it says to be")]
    Malformed { kind: &'static str },
    /// A field with a value that no device of ours has.
    #[error("state of the {kind} device: {field} {why}")]
    Field { kind: &'static str, field: &'static str, why: &'static str },
}

impl State {
    pub fn pack(kind: &'static str, version: u16, fields: &impl Serialize) -> Result<Self, StateError> {
        let data = postcard::to_stdvec(fields).map_err(|_| StateError::Malformed { kind })?;
        Ok(Self { kind: kind.into(), version, data })
    }

    /// Unpacks the fields, if they are of this kind and version and nothing follows them.
    pub fn unpack<T: DeserializeOwned>(&self, kind: &'static str, version: u16) -> Result<T, StateError> {
        if self.kind != kind {
            return Err(StateError::Kind { wanted: kind, found: self.kind.chars().take(32).collect() });
        }
        if self.version != version {
            return Err(StateError::Version { kind, wanted: version, found: self.version });
        }
        match postcard::take_from_bytes(&self.data) {
            Ok((fields, [])) => Ok(fields),
            _ => Err(StateError::Malformed { kind }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{State, StateError};

    #[test]
    fn a_state_is_read_as_what_it_is_only() {
        let good = State::pack("thing", 3, &(7_u32, true)).unwrap();
        assert_eq!(good.unpack::<(u32, bool)>("thing", 3), Ok((7, true)));
        assert!(matches!(good.unpack::<(u32, bool)>("other", 3), Err(StateError::Kind { .. })));
        assert!(matches!(good.unpack::<(u32, bool)>("thing", 4), Err(StateError::Version { found: 3, .. })));
        let mut long = good.clone();
        long.data.push(0);
        assert!(matches!(long.unpack::<(u32, bool)>("thing", 3), Err(StateError::Malformed { .. })));
        let mut short = good;
        short.data.pop();
        assert!(matches!(short.unpack::<(u32, bool)>("thing", 3), Err(StateError::Malformed { .. })));
    }
}
