//! virtio-net: a network card on a tap.
//!
//! The header before each frame is the same on both sides (12 bytes, set on the tap), so a frame
//! whose checksum or segmentation is left to the other side passes through unchanged. Each frame is
//! copied once, through a buffer of the device: a system call needs the frame in one piece of host
//! memory, and guest memory is never borrowed.
//!
//! A frame for the guest may span several of its buffers (`MRG_RXBUF`), which then become visible
//! in one step. A frame that finds no room waits, and so does the tap. A frame of the guest that
//! the tap refuses is lost, as on any network. Without a tap the link is down and sent frames are
//! lost.

use crate::{
    State, StateError,
    limit::Limit,
    virtio::{Chain, Fault, Interest, Rings, Served, VirtioDevice},
    watch::Watcher,
};
use keiki_sys::tap::{self, Offloads};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
};
use serde::{Deserialize, Serialize};
use std::{io, os::fd::OwnedFd};
use virtio_bindings::{
    virtio_ids::VIRTIO_ID_NET,
    virtio_net::{
        VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_TSO4, VIRTIO_NET_F_GUEST_TSO6,
        VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF,
        VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP,
    },
};

/// Bytes of `struct virtio_net_hdr_v1`.
pub const HEADER: usize = 12;
/// The longest frame: 64 KiB before segmentation, and an Ethernet header with a tag.
const MAX_FRAME: usize = HEADER + 65_536 + 18;
/// Offset of the number of buffers in the header.
const NUM_BUFFERS: usize = 10;
const QUEUE_SIZE: u16 = 256;
const RX: usize = 0;
const TX: usize = 1;
const TAP: u64 = 0;
/// Frames for the guest before other work.
const BUDGET: usize = 64;
const READABLE: Interest = Interest { read: true, write: false };

const KIND: &str = "net";
const VERSION: u16 = 1;

#[derive(Debug)]
pub struct Net {
    tap: Option<OwnedFd>,
    mac: [u8; 6],
    features: u64,
    watcher: Option<Watcher>,
    watching: bool,
    /// The first `pending` bytes are a frame for the guest that has found no room yet.
    frame: Vec<u8>,
    pending: usize,
    /// Buffer for a frame of the guest.
    sent: Vec<u8>,
    limit: Limit,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct NetState {
    mac: [u8; 6],
}

impl Net {
    /// Makes a card with this address. The tap must put a header before each frame
    /// (`IFF_VNET_HDR`).
    pub fn new(tap: Option<OwnedFd>, mac: [u8; 6]) -> io::Result<Self> {
        if let Some(tap) = &tap {
            fcntl_setfl(tap, fcntl_getfl(tap)? | OFlags::NONBLOCK)?;
            tap::set_header_len(tap, HEADER as i32)?;
            tap::set_offloads(tap, Offloads::default())?;
        }
        Ok(Self {
            tap,
            mac,
            features: 0,
            watcher: None,
            watching: false,
            frame: vec![0; MAX_FRAME],
            pending: 0,
            sent: vec![0; MAX_FRAME],
            limit: Limit::new(KIND),
        })
    }

    fn has(&self, feature: u32) -> bool {
        self.features & 1 << feature != 0
    }

    fn set_offloads(&mut self) {
        let Some(tap) = &self.tap else { return };
        let offloads = Offloads {
            checksum: self.has(VIRTIO_NET_F_GUEST_CSUM),
            tso4: self.has(VIRTIO_NET_F_GUEST_TSO4),
            tso6: self.has(VIRTIO_NET_F_GUEST_TSO6),
        };
        if let Err(error) = tap::set_offloads(tap, offloads) {
            self.limit.warn(format_args!("offloads cannot be set: {error}"));
        }
    }

    /// Starts or stops watching the tap. While the guest has no room there is no point in it.
    fn watch(&mut self, watching: bool) -> io::Result<()> {
        let (Some(watcher), Some(tap)) = (&self.watcher, &self.tap) else { return Ok(()) };
        if watching && !self.watching {
            watcher.add(tap, TAP, READABLE)?;
        } else if !watching && self.watching {
            watcher.remove(tap)?;
        }
        self.watching = watching;
        Ok(())
    }

    /// Moves frames from the tap to the guest until there is none, there is no room, or the budget
    /// is used up.
    fn receive(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        for _ in 0..BUDGET {
            if self.pending == 0 {
                let Some(tap) = &self.tap else { return Ok(()) };
                match rustix::io::read(tap, &mut *self.frame) {
                    Ok(count) if count >= HEADER => self.pending = count,
                    Ok(_) | Err(Errno::INTR) => continue,
                    Err(Errno::AGAIN) => return Ok(self.watch(true)?),
                    Err(error) => {
                        self.limit.warn(format_args!("the tap cannot be read: {error}"));
                        return Ok(self.watch(false)?);
                    }
                }
            }
            if !self.deliver(rings)? {
                return Ok(self.watch(false)?);
            }
        }
        // There may be more frames.
        Ok(self.watch(true)?)
    }

    /// Delivers the pending frame to the guest. False if there is no room.
    fn deliver(&mut self, rings: &mut Rings) -> Result<bool, Fault> {
        let mergeable = self.has(VIRTIO_NET_F_MRG_RXBUF);
        let (mut chains, mut room) = (Vec::new(), 0_u64);
        // A queue holds no more chains than this. A driver that seems to add more adds chains
        // without room.
        let most = usize::from(rings.size(RX));
        while room < self.pending as u64 && (mergeable || chains.is_empty()) && chains.len() < most {
            let Some(chain) = rings.take(RX)? else {
                rings.untake(RX, chains.len());
                return Ok(false);
            };
            room += chain.writable_len();
            chains.push(chain);
        }
        if room < self.pending as u64 {
            // A driver without MRG_RXBUF must provide buffers that are large enough. This frame is
            // lost.
            self.pending = 0;
            rings.untake(RX, chains.len());
            return Ok(true);
        }
        let count = u16::try_from(chains.len()).unwrap_or(u16::MAX).to_le_bytes();
        if let Some(field) = self.frame.get_mut(NUM_BUFFERS..NUM_BUFFERS + count.len()) {
            field.copy_from_slice(&count);
        }
        let mut left = self.frame.get(..self.pending).unwrap_or_default();
        let memory = rings.memory();
        let used: Vec<(Chain, u32)> = chains
            .into_iter()
            .map(|chain| {
                let written = chain.write(memory, 0, left);
                left = left.get(written..).unwrap_or_default();
                (chain, written as u32)
            })
            .collect();
        self.pending = 0;
        rings.publish(RX, &used)?;
        Ok(true)
    }

    /// Moves frames from the guest to the tap.
    fn transmit(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let Self { tap, sent, .. } = self;
        rings.serve(TX, |memory, chain| {
            let len = usize::try_from(chain.readable_len()).unwrap_or(usize::MAX);
            // A frame that is too long is lost, like one that the tap refuses.
            if let (Some(tap), Some(bytes), true) = (&*tap, sent.get_mut(..len), len >= HEADER) {
                let count = chain.read(memory, 0, bytes);
                let _ = rustix::io::write(tap, bytes.get(..count).unwrap_or_default());
            }
            Served::Done(0)
        })
    }
}

impl VirtioDevice for Net {
    fn id(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_NET_F_CSUM
            | 1 << VIRTIO_NET_F_GUEST_CSUM
            | 1 << VIRTIO_NET_F_GUEST_TSO4
            | 1 << VIRTIO_NET_F_GUEST_TSO6
            | 1 << VIRTIO_NET_F_HOST_TSO4
            | 1 << VIRTIO_NET_F_HOST_TSO6
            | 1 << VIRTIO_NET_F_MAC
            | 1 << VIRTIO_NET_F_MRG_RXBUF
            | 1 << VIRTIO_NET_F_STATUS
    }

    fn queues(&self) -> &[u16] {
        &[QUEUE_SIZE; 2]
    }

    /// The used part of `struct virtio_net_config`.
    fn config(&self) -> Vec<u8> {
        let link = if self.tap.is_some() { VIRTIO_NET_S_LINK_UP as u8 } else { 0 };
        self.mac.into_iter().chain([link, 0]).collect()
    }

    fn activate(&mut self, features: u64) {
        self.features = features;
        self.set_offloads();
    }

    fn reset(&mut self) {
        (self.features, self.pending) = (0, 0);
        self.set_offloads();
    }

    fn start(&mut self, watcher: &Watcher, _rings: &mut Rings) -> io::Result<()> {
        self.watcher = Some(watcher.clone());
        Ok(())
    }

    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault> {
        match queue {
            // While the tap is watched the guest has room, and there is nothing to read.
            RX if self.watching => Ok(()),
            RX => self.receive(rings),
            _ => self.transmit(rings),
        }
    }

    fn on_ready(&mut self, _token: u64, rings: &mut Rings) -> Result<(), Fault> {
        self.receive(rings)
    }

    fn save(&self) -> Result<State, StateError> {
        State::pack(KIND, VERSION, &NetState { mac: self.mac })
    }

    fn restore(&mut self, state: &State, features: u64) -> Result<(), StateError> {
        let state: NetState = state.unpack(KIND, VERSION)?;
        if state.mac != self.mac {
            return Err(StateError::Field {
                kind: KIND,
                field: "mac",
                why: "is not the address of this card",
            });
        }
        self.activate(features);
        Ok(())
    }
}
