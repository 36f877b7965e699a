//! Room is promised before anything is made.
//!
//! A machine is admitted by its worst case: all of its RAM private, plus its monitor. Copy-on-write makes the
//! usual case far smaller, but a parent may rewrite every page it shares, and then the host must hold.

use crate::error::{Error, Result};
use keiki_types::Shape;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// What a monitor needs beside its guest's RAM, in MiB: a waiting one holds 23, translated guest code comes to it.
const MONITOR_MIB: u64 = 48;

/// The RAM of this host that machines may use. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Admission {
    limit_mib: u64,
    used_mib: Arc<AtomicU64>,
}

/// Room for one machine, given back when dropped.
#[derive(Debug)]
pub struct Ticket {
    mib: u64,
    used_mib: Arc<AtomicU64>,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.used_mib.fetch_sub(self.mib, Ordering::AcqRel);
    }
}

impl Admission {
    /// At most this much.
    #[must_use]
    pub fn new(limit_mib: u64) -> Self {
        Self { limit_mib, used_mib: Arc::default() }
    }

    /// Nine tenths of the host's RAM.
    #[must_use]
    pub fn of_host() -> Self {
        Self::new((keiki_sys::host::meminfo("MemTotal").unwrap_or(0) >> 20) / 10 * 9)
    }

    /// Room for `count` machines, or for none.
    ///
    /// # Errors
    /// 507 if there is not room for all of them.
    pub fn admit(&self, shape: Shape, count: usize) -> Result<Vec<Ticket>> {
        let each = u64::from(shape.memory_mib) + MONITOR_MIB;
        let all = each.saturating_mul(count as u64);
        let taken = self.used_mib.fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
            used.checked_add(all).filter(|&sum| sum <= self.limit_mib)
        });
        match taken {
            Ok(_) => Ok((0..count).map(|_| self.ticket(each)).collect()),
            Err(used) => Err(Error::NoRoom(format!(
                "insufficient host memory for sandbox: {all} MiB wanted, {} of {} MiB free",
                self.limit_mib.saturating_sub(used),
                self.limit_mib
            ))),
        }
    }

    /// Counts a machine that runs already, room or not.
    #[must_use]
    pub fn count(&self, shape: Shape) -> Ticket {
        let each = u64::from(shape.memory_mib) + MONITOR_MIB;
        self.used_mib.fetch_add(each, Ordering::AcqRel);
        self.ticket(each)
    }

    fn ticket(&self, mib: u64) -> Ticket {
        Ticket { mib, used_mib: Arc::clone(&self.used_mib) }
    }
}

#[cfg(test)]
mod tests {
    use super::{Admission, MONITOR_MIB};
    use keiki_types::Shape;

    #[test]
    fn all_or_none_and_given_back() {
        let shape = Shape { vcpus: 1, memory_mib: 256, disk_mib: 1 };
        let admission = Admission::new(3 * (256 + MONITOR_MIB));
        let two = admission.admit(shape, 2).unwrap_or_default();
        assert_eq!(two.len(), 2);
        assert!(admission.admit(shape, 2).is_err());
        assert!(admission.admit(shape, usize::MAX).is_err());
        drop(two);
        assert_eq!(admission.admit(shape, 3).map(|tickets| tickets.len()).ok(), Some(3));
    }
}
