//! The network of machines: slots, or no network in tests.

use crate::error::{Error, Result};
use keiki_net::Slots;
#[cfg(test)]
use std::{collections::BTreeSet, sync::Arc};
use std::{net::Ipv4Addr, path::PathBuf};

/// Where machines get their network from.
pub enum Network {
    Slots(Slots),
    /// Numbers in use, and no namespaces.
    #[cfg(test)]
    None(Arc<parking_lot::Mutex<BTreeSet<u16>>>),
}

/// The network of one machine.
pub enum Slot {
    Net(keiki_net::Slot),
    #[cfg(test)]
    None(u16),
}

impl Slot {
    pub fn index(&self) -> u16 {
        match self {
            Self::Net(slot) => slot.index(),
            #[cfg(test)]
            Self::None(index) => *index,
        }
    }

    pub fn netns_path(&self) -> Option<PathBuf> {
        match self {
            Self::Net(slot) => Some(slot.netns_path()),
            #[cfg(test)]
            Self::None(_) => None,
        }
    }

    /// The address under which the host sees its sandbox.
    pub fn outside(&self) -> Ipv4Addr {
        match self {
            Self::Net(slot) => slot.outside(),
            #[cfg(test)]
            Self::None(_) => Ipv4Addr::LOCALHOST,
        }
    }
}

impl Network {
    pub async fn take(&self) -> Result<Slot> {
        match self {
            Self::Slots(slots) => {
                let slot = slots.take().await;
                slot.map(Slot::Net).map_err(|cause| Error::internal("cannot create a network slot", cause))
            }
            #[cfg(test)]
            Self::None(used) => {
                let mut used = used.lock();
                let free = (0..u16::MAX).find(|index| !used.contains(index)).unwrap_or(u16::MAX);
                used.insert(free);
                Ok(Slot::None(free))
            }
        }
    }

    /// The slot of a machine that an earlier node left running.
    pub async fn adopt(&self, index: u16) -> Result<Slot> {
        match self {
            Self::Slots(slots) => {
                let slot = slots.adopt(index).await;
                slot.map(Slot::Net).map_err(|cause| Error::internal("its network slot is gone", cause))
            }
            #[cfg(test)]
            Self::None(used) => {
                used.lock().insert(index);
                Ok(Slot::None(index))
            }
        }
    }

    pub async fn give_back(&self, slot: Slot) {
        match (self, slot) {
            (Self::Slots(slots), Slot::Net(slot)) => slots.give_back(slot).await,
            #[cfg(test)]
            (Self::None(used), slot) => drop(used.lock().remove(&slot.index())),
            #[cfg(test)]
            (Self::Slots(_), Slot::None(_)) => {}
        }
    }

    /// Slots that are taken, and those built ahead.
    pub fn used_and_ready(&self) -> (usize, usize) {
        match self {
            Self::Slots(slots) => (slots.used(), slots.ready()),
            #[cfg(test)]
            Self::None(used) => (used.lock().len(), 0),
        }
    }

    pub async fn stop(&self) {
        match self {
            Self::Slots(slots) => slots.stop(&[]).await,
            #[cfg(test)]
            Self::None(_) => {}
        }
    }
}
