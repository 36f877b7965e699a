//! A device as the monitor sees it: registers, a descriptor to poll, one lifecycle, and state as
//! plain data.

use rustix::event::{EventfdFlags, eventfd};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::Instant,
};

pub type Memory = vm_memory::GuestMemoryMmap<()>;

/// A device as the monitor sees it.
///
/// ```text
///   new ──> [restore] ──> resume ──> running ──> pause ──> [save]* ──┐
///                            ▲                                       │
///                            └───────────────────────────────────────┘   drop at any time
/// ```
///
/// Rules that callers keep and implementations rely on:
/// - A new device is paused. [`restore`](Device::restore) comes before the first
///   [`resume`](Device::resume), never after. A device whose `restore` failed is dropped.
/// - [`pause`](Device::pause) is called while the vCPUs are parked. When it returns, nothing is in
///   flight: a request of the guest is either done and completed in guest memory, or untouched in
///   its ring. It does not wait beyond `deadline`.
/// - [`save`](Device::save) is called only while paused, any number of times, and changes nothing.
///   A pending interrupt is part of the state.
/// - A signal around a pause is never lost: notifications wait in their events, and a restored
///   device looks at every queue and raises a pending interrupt again, at the price of a spurious
///   one.
/// - While paused, [`events`](Device::events) never becomes readable, so the monitor can keep
///   polling it.
pub trait Device: Send {
    /// The guest reads registers, at any offset and of any length. Other addresses read as zeroes.
    fn read(&mut self, offset: u64, data: &mut [u8]);

    /// The guest writes registers, at any offset and of any length. A write without meaning is
    /// ignored.
    fn write(&mut self, offset: u64, data: &[u8]);

    /// A descriptor that is readable when [`process`](Device::process) has work. None: never. It
    /// does not change.
    fn events(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Does a bounded amount of work. More work makes [`events`](Device::events) readable again.
    fn process(&mut self) {}

    /// Stops, with nothing in flight.
    fn pause(&mut self, deadline: Instant) -> io::Result<()>;

    fn save(&self) -> Result<State, StateError>;

    /// Restores a state, which is not trusted.
    fn restore(&mut self, state: &State) -> Result<(), StateError>;

    fn resume(&mut self) -> io::Result<()>;
}

/// An interrupt line, edge triggered: each call is one edge.
pub trait Interrupt: Send + Sync {
    fn raise(&self) -> io::Result<()>;
}

/// An eventfd: a queue notification (ioeventfd) or an interrupt line (irqfd).
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Signals it. A full counter is signalled already.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether it was signalled since the last call.
    pub fn take(&self) -> bool {
        rustix::io::read(&self.0, &mut [0; 8]).is_ok()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// An irqfd, which the monitor has connected to a line.
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

/// State of one device: plain data with the kind of the device and its own version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub kind: String,
    /// Version of the layout of `data`.
    pub version: u16,
    /// The fields, in postcard.
    pub data: Vec<u8>,
}

/// Why a state cannot be restored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    #[error("state of a {found} device where the state of a {wanted} device is expected")]
    Kind {
        wanted: &'static str,
        /// Truncated.
        found: String,
    },
    #[error("state of the {kind} device has version {found}, this monitor reads version {wanted}")]
    Version { kind: &'static str, wanted: u16, found: u16 },
    #[error("state of the {kind} device cannot be read: it is truncated or damaged")]
    Malformed { kind: &'static str },
    /// A field has a value that no such device can have.
    #[error("state of the {kind} device: {field} {why}")]
    Field { kind: &'static str, field: &'static str, why: &'static str },
}

impl State {
    pub fn pack(kind: &'static str, version: u16, fields: &impl Serialize) -> Result<Self, StateError> {
        let data = postcard::to_stdvec(fields).map_err(|_| StateError::Malformed { kind })?;
        Ok(Self { kind: kind.into(), version, data })
    }

    /// Unpacks the fields. Kind and version must match, and nothing may follow the fields.
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
