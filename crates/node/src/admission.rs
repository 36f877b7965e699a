//! RAM and disk are reserved before anything is created.
//!
//! A machine is counted at its worst case: all of its RAM private, plus its monitor. Copy-on-write
//! makes the usual case far smaller, but a parent may rewrite every page it shares, and then the
//! host must still have room.

use crate::error::{Error, Result};
use keiki_engine::MONITOR_MIB;
use keiki_types::Shape;
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

/// The RAM of this host that machines may use. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admission {
    limit_mib: u64,
    used_mib: Arc<AtomicU64>,
}

/// A reservation, released when dropped.
#[derive(Debug)]
pub struct Ticket {
    amount: u64,
    of: Arc<AtomicU64>,
}

impl Ticket {
    /// The part of one machine, as a separate ticket.
    #[must_use]
    pub fn split_off(&mut self, shape: Shape) -> Self {
        let amount = machine_mib(shape).min(self.amount);
        self.amount -= amount;
        Self { amount, of: Arc::clone(&self.of) }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.of.fetch_sub(self.amount, Ordering::AcqRel);
    }
}

/// Space on the store that is reserved for running operations: what they are going to write still
/// counts as free.
#[derive(Debug, Default)]
pub struct DiskRoom {
    reserved: Arc<AtomicU64>,
    /// One decides at a time.
    deciding: Mutex<()>,
}

impl DiskRoom {
    /// Reserves `wanted` bytes. `free` asks the file system.
    ///
    /// # Errors
    /// 507 if there is not enough space; 503 if the space is free but reserved.
    pub fn reserve(&self, wanted: u64, free: impl FnOnce() -> Result<u64>) -> Result<Ticket> {
        let _one = self.deciding.lock();
        // In this order: what is released in between has been written, and no longer counts as
        // free.
        let reserved = self.reserved();
        let free = free()?;
        if free < wanted {
            return Err(Error::NoRoom(format!(
                "insufficient host storage for sandbox: {} MiB wanted, {} MiB free",
                wanted >> 20,
                free >> 20
            )));
        }
        let left = free.saturating_sub(reserved);
        if left < wanted {
            return Err(Error::Busy {
                why: format!(
                    "the node's free disk space is reserved by running operations: {} MiB wanted, {} MiB left",
                    wanted >> 20,
                    left >> 20
                ),
                retry_after: Duration::from_secs(1),
            });
        }
        self.reserved.fetch_add(wanted, Ordering::AcqRel);
        Ok(Ticket { amount: wanted, of: Arc::clone(&self.reserved) })
    }

    /// Bytes that are promised.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Acquire)
    }
}

impl Admission {
    /// At most this much.
    pub fn new(limit_mib: u64) -> Self {
        Self { limit_mib, used_mib: Arc::default() }
    }

    /// Nine tenths of the host's RAM.
    pub fn of_host() -> Self {
        Self::new((keiki_sys::host::meminfo("MemTotal").unwrap_or(0) >> 20) / 10 * 9)
    }

    /// Reserves RAM for machines of these shapes, all or nothing: [`Ticket::split_off`] gives each
    /// its part.
    ///
    /// # Errors
    /// 507 if there is not room for all of them.
    pub fn admit(&self, shapes: impl IntoIterator<Item = Shape>) -> Result<Ticket> {
        let all = shapes.into_iter().map(machine_mib).fold(0, u64::saturating_add);
        let taken = self.used_mib.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(all).filter(|&sum| sum <= self.limit_mib)
        });
        match taken {
            Ok(_) => Ok(self.ticket(all)),
            Err(used) => Err(Error::NoRoom(format!(
                "insufficient host memory for sandbox: {all} MiB wanted, {} of {} MiB free",
                self.limit_mib.saturating_sub(used),
                self.limit_mib
            ))),
        }
    }

    /// Counts a machine that runs already, even if there is no room.
    #[must_use]
    pub fn count(&self, shape: Shape) -> Ticket {
        let mib = machine_mib(shape);
        self.used_mib.fetch_add(mib, Ordering::AcqRel);
        self.ticket(mib)
    }

    fn ticket(&self, mib: u64) -> Ticket {
        Ticket { amount: mib, of: Arc::clone(&self.used_mib) }
    }

    /// Bytes that machines may use together.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_mib << 20
    }

    /// Bytes promised to them.
    pub fn used_bytes(&self) -> u64 {
        self.used_mib.load(Ordering::Acquire) << 20
    }
}

/// What a machine may need in the worst case.
fn machine_mib(shape: Shape) -> u64 {
    u64::from(shape.memory_mib) + MONITOR_MIB
}

#[cfg(test)]
mod tests {
    use super::{Admission, DiskRoom, MONITOR_MIB};
    use crate::Error;
    use keiki_types::Shape;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn what_is_promised_is_not_promised_again() {
        let room = DiskRoom::default();
        let free = || Ok(100 << 20);
        let first = room.reserve(60 << 20, free);
        assert!(first.is_ok());
        assert!(matches!(room.reserve(60 << 20, free), Err(Error::Busy { .. })), "there, but promised");
        assert!(matches!(room.reserve(101 << 20, free), Err(Error::NoRoom(_))), "not there at all");
        assert!(room.reserve(40 << 20, free).is_ok());
        drop(first);
        assert_eq!(room.reserved(), 0);
        assert!(room.reserve(100 << 20, free).is_ok());
    }

    #[test]
    fn parallel_requests_near_full_never_write_more_than_there_is() {
        const EACH: u64 = 7;
        let (room, free) = (DiskRoom::default(), AtomicU64::new(100));
        let done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..2000 {
                        let Ok(_ticket) = room.reserve(EACH, || Ok(free.load(Ordering::SeqCst))) else {
                            continue;
                        };
                        let before = free.fetch_sub(EACH, Ordering::SeqCst);
                        assert!((EACH..=100).contains(&before), "written beyond the end: {before}");
                        std::thread::yield_now();
                        // Deleted again, within the operation.
                        free.fetch_add(EACH, Ordering::SeqCst);
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!((room.reserved(), free.into_inner()), (0, 100));
        assert!(done.into_inner() > 0);
    }

    #[test]
    fn all_or_none_and_given_back() {
        let shape = Shape { vcpus: 1, memory_mib: 256, disk_mib: 1 };
        let admission = Admission::new(3 * (256 + MONITOR_MIB));
        let mut both = admission.admit([shape; 2]).unwrap();
        assert!(admission.admit([shape; 2]).is_err());
        assert!(admission.admit([Shape { memory_mib: u32::MAX, ..shape }; 3]).is_err());
        let each = [both.split_off(shape), both.split_off(shape)];
        drop(both);
        assert_eq!(admission.used_bytes() >> 20, 2 * (256 + MONITOR_MIB), "both parts are kept");
        drop(each);
        assert!(admission.admit([shape; 3]).is_ok());
    }
}
