//! The virtio-mmio transport, version 2: registers, the status machine, and the queues of one
//! device.
//!
//! ```text
//!   status:  0 ─> ACKNOWLEDGE ─> DRIVER ─> FEATURES_OK ─> DRIVER_OK ─> (running)
//!            ▲                              refused if not offered        │
//!            └── writing 0: reset ──────────────────── NEEDS_RESET <──────┘ a broken queue
//! ```
//!
//! A queue is built when the driver declares it ready, from its earlier settings, and only if they
//! are valid: otherwise the queue stays not ready and the device needs a reset. While a queue is
//! ready its addresses do not change.
//!
//! The guest notifies a queue by a 32-bit write of its index to [`NOTIFY`]. The monitor may connect
//! this register to [`Mmio::queue_events`] (ioeventfd), so that no vCPU waits; otherwise
//! [`Device::write`] does the same. For the same reason it may serve [`Mmio::interrupt_status`]
//! without the lock of the device.

use crate::{
    Device, Event, Interrupt, Memory, State, StateError,
    limit::Limit,
    virtio::{Fault, INT_CONFIG, InterruptStatus, Line, Rings, VirtioDevice},
    watch::{Interest, Watch},
};
use serde::{Deserialize, Serialize};
use std::{io, os::fd::BorrowedFd, sync::Arc, time::Instant};
use virtio_bindings::{
    virtio_config::{
        VIRTIO_CONFIG_S_ACKNOWLEDGE, VIRTIO_CONFIG_S_DRIVER, VIRTIO_CONFIG_S_DRIVER_OK,
        VIRTIO_CONFIG_S_FAILED, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET, VIRTIO_F_VERSION_1,
    },
    virtio_mmio::{
        VIRTIO_MMIO_CONFIG, VIRTIO_MMIO_CONFIG_GENERATION, VIRTIO_MMIO_DEVICE_FEATURES,
        VIRTIO_MMIO_DEVICE_FEATURES_SEL, VIRTIO_MMIO_DEVICE_ID, VIRTIO_MMIO_DRIVER_FEATURES,
        VIRTIO_MMIO_DRIVER_FEATURES_SEL, VIRTIO_MMIO_MAGIC_VALUE, VIRTIO_MMIO_QUEUE_AVAIL_HIGH,
        VIRTIO_MMIO_QUEUE_AVAIL_LOW, VIRTIO_MMIO_QUEUE_DESC_HIGH, VIRTIO_MMIO_QUEUE_DESC_LOW,
        VIRTIO_MMIO_QUEUE_NOTIFY, VIRTIO_MMIO_QUEUE_NUM, VIRTIO_MMIO_QUEUE_NUM_MAX, VIRTIO_MMIO_QUEUE_READY,
        VIRTIO_MMIO_QUEUE_SEL, VIRTIO_MMIO_QUEUE_USED_HIGH, VIRTIO_MMIO_QUEUE_USED_LOW,
        VIRTIO_MMIO_SHM_BASE_HIGH, VIRTIO_MMIO_SHM_LEN_LOW, VIRTIO_MMIO_STATUS, VIRTIO_MMIO_VENDOR_ID,
        VIRTIO_MMIO_VERSION,
    },
    virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC},
};
use virtio_queue::{Queue, QueueState, QueueT};

/// Bytes of the address space of a device.
pub const WINDOW: u64 = 0x1000;
/// Offset of the queue notification register.
pub const NOTIFY: u64 = VIRTIO_MMIO_QUEUE_NOTIFY as u64;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VENDOR: u32 = u32::from_le_bytes(*b"keik");
const TRANSPORT_FEATURES: u64 =
    1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX | 1 << VIRTIO_RING_F_INDIRECT_DESC;
const ALL_STATUS: u32 = VIRTIO_CONFIG_S_ACKNOWLEDGE
    | VIRTIO_CONFIG_S_DRIVER
    | VIRTIO_CONFIG_S_DRIVER_OK
    | VIRTIO_CONFIG_S_FEATURES_OK
    | VIRTIO_CONFIG_S_NEEDS_RESET
    | VIRTIO_CONFIG_S_FAILED;
/// Tokens of queue events start here. Tokens of devices are below.
const QUEUE_TOKENS: u64 = 1 << 32;

const KIND: &str = "virtio-mmio";
const VERSION: u16 = 1;

/// The settings of a queue, and its position.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Setup {
    size: u16,
    ready: bool,
    desc: u64,
    avail: u64,
    used: u64,
    next_avail: u16,
    next_used: u16,
}

/// The state of the transport, and that of the device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct MmioState {
    status: u32,
    interrupt_status: u32,
    generation: u32,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    queues: Vec<Setup>,
    device: State,
}

pub struct Mmio<D> {
    device: D,
    rings: Rings,
    setups: Vec<Setup>,
    watch: Watch,
    status: u32,
    driver_features: u64,
    device_features_sel: u32,
    driver_features_sel: u32,
    queue_sel: u32,
    started: bool,
    running: bool,
}

impl<D: VirtioDevice> Mmio<D> {
    /// Makes a new device, paused.
    pub fn new(device: D, memory: Memory, interrupt: Box<dyn Interrupt>) -> io::Result<Self> {
        let (mut queues, mut events, mut setups) = (Vec::new(), Vec::new(), Vec::new());
        let watch = Watch::new()?;
        for (token, &max) in (QUEUE_TOKENS..).zip(device.queues()) {
            queues.push(Queue::new(max).map_err(io::Error::other)?);
            let event = Event::new()?;
            watch.watcher().add(&event, token, Interest { read: true, write: false })?;
            events.push(event);
            setups.push(Setup { size: max, ..Setup::default() });
        }
        let limit = Limit::new(device.kind());
        let rings = Rings { memory, queues, events, line: Line::new(interrupt), limit, live: false };
        Ok(Self {
            device,
            rings,
            setups,
            watch,
            status: 0,
            driver_features: 0,
            device_features_sel: 0,
            driver_features_sel: 0,
            queue_sel: 0,
            started: false,
            running: false,
        })
    }

    /// An eventfd per queue. The monitor may connect it to a 32-bit write of the queue index to
    /// [`NOTIFY`].
    pub fn queue_events(&self) -> &[Event] {
        &self.rings.events
    }

    /// The interrupt registers, which the monitor may serve without the lock of this device.
    pub fn interrupt_status(&self) -> Arc<InterruptStatus> {
        Arc::clone(&self.rings.line.status)
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Notifies the guest that the configuration space has changed.
    pub fn config_changed(&mut self) {
        self.rings.config_changed();
    }
}

impl<D: VirtioDevice> Device for Mmio<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if self.rings.line.status.read(offset, data) {
            return;
        }
        data.fill(0);
        if let Some(at) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            let config = self.device.config();
            for (byte, from) in
                data.iter_mut().zip(config.iter().skip(usize::try_from(at).unwrap_or(usize::MAX)))
            {
                *byte = *from;
            }
        } else if let (Ok(offset), Ok(into)) = (u32::try_from(offset), <&mut [u8; 4]>::try_from(data)) {
            *into = self.register(offset).to_le_bytes();
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if self.rings.line.status.write(offset, data) {
            return;
        }
        if let Some(at) = offset.checked_sub(u64::from(VIRTIO_MMIO_CONFIG)) {
            if self.is(VIRTIO_CONFIG_S_DRIVER) {
                self.device.write_config(at, data);
            }
        } else if let (Ok(offset), Ok(data)) = (u32::try_from(offset), <[u8; 4]>::try_from(data)) {
            self.set_register(offset, u32::from_le_bytes(data));
        }
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.watch.fd())
    }

    fn process(&mut self) {
        if !self.running {
            return;
        }
        for token in self.watch.ready() {
            let result = match token.checked_sub(QUEUE_TOKENS) {
                Some(queue) => {
                    let queue = queue as usize;
                    self.rings.events.get(queue).map(Event::take);
                    self.device.process_queue(queue, &mut self.rings)
                }
                None => self.device.on_ready(token, &mut self.rings),
            };
            if let Err(fault) = result {
                self.fail(&fault);
            }
        }
    }

    fn pause(&mut self, deadline: Instant) -> io::Result<()> {
        self.device.drain(deadline)?;
        self.watch.set_open(false)?;
        self.running = false;
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        let queues = self.setups.iter().zip(&self.rings.queues).map(|(setup, queue)| Setup {
            next_avail: queue.next_avail(),
            next_used: queue.next_used(),
            ..*setup
        });
        let state = MmioState {
            status: self.status,
            interrupt_status: self.rings.line.status.get(),
            generation: self.rings.line.generation,
            driver_features: self.driver_features,
            device_features_sel: self.device_features_sel,
            driver_features_sel: self.driver_features_sel,
            queue_sel: self.queue_sel,
            queues: queues.collect(),
            device: self.device.save()?,
        };
        State::pack(KIND, VERSION, &state)
    }

    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        let state: MmioState = state.unpack(KIND, VERSION)?;
        let queues = self.checked_queues(&state)?;
        let live = state.status & VIRTIO_CONFIG_S_DRIVER_OK != 0;
        self.device.restore(&state.device, if live { state.driver_features } else { 0 })?;
        self.status = state.status;
        self.rings.line.status.set(state.interrupt_status);
        self.rings.line.generation = state.generation;
        self.driver_features = state.driver_features;
        self.device_features_sel = state.device_features_sel;
        self.driver_features_sel = state.driver_features_sel;
        self.queue_sel = state.queue_sel;
        self.setups = state.queues;
        self.rings.queues = queues;
        self.rings.live = live && !self.is(VIRTIO_CONFIG_S_NEEDS_RESET);
        Ok(())
    }

    fn resume(&mut self) -> io::Result<()> {
        self.running = true;
        if !self.started {
            self.started = true;
            self.device.start(self.watch.watcher(), &mut self.rings)?;
            // Repeats notifications and interrupts that the frozen machine may have missed. Later
            // the events keep them.
            (0..self.rings.events.len()).for_each(|queue| self.rings.kick(queue));
            if self.rings.line.status.get() != 0 {
                self.rings.line.raise(0);
            }
        }
        self.watch.set_open(true)
    }
}

impl<D: VirtioDevice> Mmio<D> {
    fn register(&self, offset: u32) -> u32 {
        let setup = self.selected();
        match offset {
            VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            VIRTIO_MMIO_VERSION => 2,
            VIRTIO_MMIO_DEVICE_ID => self.device.id(),
            VIRTIO_MMIO_VENDOR_ID => VENDOR,
            VIRTIO_MMIO_DEVICE_FEATURES => half(self.offered(), self.device_features_sel),
            VIRTIO_MMIO_QUEUE_NUM_MAX => {
                setup.and_then(|at| self.device.queues().get(at)).map_or(0, |&max| max.into())
            }
            VIRTIO_MMIO_QUEUE_READY => {
                setup.and_then(|at| self.setups.get(at)).map_or(0, |setup| setup.ready.into())
            }
            VIRTIO_MMIO_STATUS => self.status,
            VIRTIO_MMIO_CONFIG_GENERATION => self.rings.line.generation,
            // No shared memory is a length of all ones.
            VIRTIO_MMIO_SHM_LEN_LOW..=VIRTIO_MMIO_SHM_BASE_HIGH => u32::MAX,
            _ => 0,
        }
    }

    fn set_register(&mut self, offset: u32, value: u32) {
        match offset {
            VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_sel = value,
            VIRTIO_MMIO_DRIVER_FEATURES if self.is_negotiating() => {
                set_half(&mut self.driver_features, self.driver_features_sel, value);
            }
            VIRTIO_MMIO_QUEUE_SEL => self.queue_sel = value,
            VIRTIO_MMIO_QUEUE_NOTIFY => self.rings.kick(value as usize),
            VIRTIO_MMIO_STATUS => self.set_status(value),
            VIRTIO_MMIO_QUEUE_READY => self.set_ready(value & 1 != 0),
            _ => self.set_up(offset, value),
        }
    }

    /// Writes a setting of a queue that is not ready yet.
    fn set_up(&mut self, offset: u32, value: u32) {
        let setting = self.is(VIRTIO_CONFIG_S_FEATURES_OK);
        let Some(setup) = self.selected().and_then(|at| self.setups.get_mut(at)) else { return };
        if !setting || setup.ready {
            return;
        }
        match offset {
            // A size out of range becomes 0, which is never accepted.
            VIRTIO_MMIO_QUEUE_NUM => setup.size = u16::try_from(value).unwrap_or(0),
            VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut setup.desc, 0, value),
            VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut setup.desc, 1, value),
            VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut setup.avail, 0, value),
            VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut setup.avail, 1, value),
            VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut setup.used, 0, value),
            VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut setup.used, 1, value),
            _ => {}
        }
    }

    fn set_ready(&mut self, ready: bool) {
        if !self.is(VIRTIO_CONFIG_S_FEATURES_OK) {
            return;
        }
        let Some(at) = self.selected() else { return };
        let (Some(setup), Some(queue)) = (self.setups.get_mut(at), self.rings.queues.get_mut(at)) else {
            return;
        };
        if !ready {
            setup.ready = false;
            queue.set_ready(false);
        } else if !setup.ready {
            *setup = Setup { ready, next_avail: 0, next_used: 0, ..*setup };
            match build(setup, queue.max_size(), self.driver_features, &self.rings.memory) {
                Ok(built) => *queue = built,
                Err(why) => {
                    setup.ready = false;
                    self.rings.warn(format_args!("queue {at} is refused: its rings {why}"));
                    self.need_reset();
                }
            }
        }
    }

    fn set_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        // A driver only adds bits, and only the device sets NEEDS_RESET.
        let mut new = (value & ALL_STATUS & !VIRTIO_CONFIG_S_NEEDS_RESET) | self.status;
        if new & VIRTIO_CONFIG_S_FEATURES_OK != 0 && !self.is(VIRTIO_CONFIG_S_FEATURES_OK) {
            let version_1 = self.driver_features & 1 << VIRTIO_F_VERSION_1 != 0;
            if !self.is(VIRTIO_CONFIG_S_DRIVER) || !version_1 || self.driver_features & !self.offered() != 0 {
                new &= !VIRTIO_CONFIG_S_FEATURES_OK;
            }
        }
        if new & VIRTIO_CONFIG_S_FEATURES_OK == 0 {
            new &= !VIRTIO_CONFIG_S_DRIVER_OK;
        }
        let starts = new & VIRTIO_CONFIG_S_DRIVER_OK != 0 && !self.is(VIRTIO_CONFIG_S_DRIVER_OK);
        self.status = new;
        if starts {
            self.rings.live = !self.is(VIRTIO_CONFIG_S_NEEDS_RESET);
            self.device.activate(self.driver_features);
            // The driver may not notify chains that it made available before.
            (0..self.rings.events.len()).for_each(|queue| self.rings.kick(queue));
        }
    }

    fn reset(&mut self) {
        self.device.reset();
        self.rings.live = false;
        self.status = 0;
        self.rings.line.generation = self.rings.line.generation.wrapping_add(1);
        (self.driver_features, self.queue_sel) = (0, 0);
        (self.device_features_sel, self.driver_features_sel) = (0, 0);
        self.rings.line.status.set(0);
        for (setup, queue) in self.setups.iter_mut().zip(&mut self.rings.queues) {
            queue.reset();
            *setup = Setup { size: queue.max_size(), ..Setup::default() };
        }
    }

    fn fail(&mut self, fault: &Fault) {
        let cause = std::error::Error::source(fault).map(ToString::to_string).unwrap_or_default();
        self.rings.warn(format_args!("{fault}: {cause}"));
        self.need_reset();
    }

    fn need_reset(&mut self) {
        self.status |= VIRTIO_CONFIG_S_NEEDS_RESET;
        self.rings.live = false;
        // Half-done work in the queues is not part of a state.
        self.setups.iter_mut().for_each(|setup| setup.ready = false);
        self.rings.queues.iter_mut().for_each(|queue| queue.set_ready(false));
        if self.is(VIRTIO_CONFIG_S_DRIVER_OK) {
            self.rings.line.raise(INT_CONFIG);
        }
    }

    fn checked_queues(&self, state: &MmioState) -> Result<Vec<Queue>, StateError> {
        let bad = |field, why| Err(StateError::Field { kind: KIND, field, why });
        let has = |bit| state.status & bit != 0;
        if state.status & !ALL_STATUS != 0
            || has(VIRTIO_CONFIG_S_FEATURES_OK) && !has(VIRTIO_CONFIG_S_DRIVER)
            || has(VIRTIO_CONFIG_S_DRIVER_OK) && !has(VIRTIO_CONFIG_S_FEATURES_OK)
        {
            return bad("status", "cannot be reached by a driver");
        }
        if state.interrupt_status & !(crate::virtio::INT_USED | INT_CONFIG) != 0 {
            return bad("interrupt_status", "has bits that do not exist");
        }
        let negotiated = has(VIRTIO_CONFIG_S_FEATURES_OK);
        let version_1 = state.driver_features & 1 << VIRTIO_F_VERSION_1 != 0;
        if negotiated && (state.driver_features & !self.offered() != 0 || !version_1) {
            return bad("driver_features", "are not offered by this device");
        }
        if state.queues.len() != self.rings.queues.len() {
            return bad("queues", "differ in number from those of this device");
        }
        let mut queues = Vec::new();
        for (setup, queue) in state.queues.iter().zip(&self.rings.queues) {
            if !setup.ready {
                queues.push(Queue::new(queue.max_size()).map_err(|_| StateError::Malformed { kind: KIND })?);
                continue;
            }
            if !negotiated {
                return bad("queues", "are ready before the features were negotiated");
            }
            match build(setup, queue.max_size(), state.driver_features, &self.rings.memory) {
                Ok(queue) => queues.push(queue),
                Err(why) => return bad("queues", why),
            }
        }
        Ok(queues)
    }

    fn offered(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn selected(&self) -> Option<usize> {
        usize::try_from(self.queue_sel).ok().filter(|&at| at < self.setups.len())
    }

    fn is(&self, status: u32) -> bool {
        self.status & status != 0
    }

    fn is_negotiating(&self) -> bool {
        self.is(VIRTIO_CONFIG_S_DRIVER) && !self.is(VIRTIO_CONFIG_S_FEATURES_OK)
    }
}

/// Builds a queue from its settings, if they are valid.
fn build(setup: &Setup, max_size: u16, features: u64, memory: &Memory) -> Result<Queue, &'static str> {
    let queue = Queue::try_from(QueueState {
        max_size,
        next_avail: setup.next_avail,
        next_used: setup.next_used,
        event_idx_enabled: features & 1 << VIRTIO_RING_F_EVENT_IDX != 0,
        size: setup.size,
        ready: true,
        desc_table: setup.desc,
        avail_ring: setup.avail,
        used_ring: setup.used,
    })
    .map_err(|_| "have an invalid size or alignment")?;
    if setup.avail == 0 || !queue.is_valid(memory) {
        return Err("are outside RAM");
    }
    // Our devices finish each chain that they take before they pause.
    if setup.next_avail != setup.next_used {
        return Err("have chains in flight");
    }
    Ok(queue)
}

fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_half(value: &mut u64, select: u32, half: u32) {
    match select {
        0 => *value = *value & !0xffff_ffff | u64::from(half),
        1 => *value = *value & 0xffff_ffff | u64::from(half) << 32,
        _ => {}
    }
}
