//! virtio-rng: entropy from the host kernel.
//!
//! The device asks the kernel for bytes only when the guest asks for them. This process keeps none,
//! so a fork shares no entropy with its parent. A request gets at most [`MAX_REQUEST`] bytes, and a
//! guest [`PER_TICK`] bytes per [`TICK`]. Further requests wait in the ring.

use crate::{
    State, StateError,
    virtio::{Fault, Interest, Rings, Served, VirtioDevice},
    watch::Watcher,
};
use keiki_sys::bucket::TokenBucket;
use rustix::{
    rand::{GetRandomFlags, getrandom},
    time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    },
};
use std::{
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

/// Most bytes of a request.
pub const MAX_REQUEST: usize = 4096;
/// Most bytes of a guest per tick.
pub const PER_TICK: usize = 64 * 1024;
/// Length of a tick.
pub const TICK: Duration = Duration::from_millis(50);

const QUEUE_SIZE: u16 = 64;
const QUEUE: usize = 0;
const TIMER: u64 = 0;
const KIND: &str = "rng";
const VERSION: u16 = 1;

#[derive(Debug)]
pub struct Rng {
    timer: OwnedFd,
    waiting: bool,
    bucket: TokenBucket,
}

impl Rng {
    pub fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        Ok(Self { timer, waiting: false, bucket: TokenBucket::new(PER_TICK as u64, PER_TICK as u64, TICK) })
    }

    fn wait(&mut self) -> io::Result<()> {
        if !self.waiting {
            let value = Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) };
            let once = Itimerspec { it_interval: Timespec::default(), it_value: value };
            timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)?;
            self.waiting = true;
        }
        Ok(())
    }
}

impl VirtioDevice for Rng {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn features(&self) -> u64 {
        0
    }

    fn queues(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {}

    fn start(&mut self, watcher: &Watcher, _rings: &mut Rings) -> io::Result<()> {
        watcher.add(&self.timer, TIMER, Interest { read: true, write: false })
    }

    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault> {
        let now = Instant::now();
        let (bucket, mut failed, mut late) = (&mut self.bucket, None, false);
        rings.serve(queue, |memory, chain| {
            let mut bytes = [0; MAX_REQUEST];
            let wanted = chain.writable_len().min(MAX_REQUEST as u64);
            let granted = bucket.take_up_to(wanted, now);
            if granted == 0 && wanted > 0 {
                late = true;
                return Served::Later;
            }
            let Some(bytes) = bytes.get_mut(..granted as usize) else { return Served::Done(0) };
            match getrandom(&mut *bytes, GetRandomFlags::empty()) {
                // The kernel may interrupt a request of more than 256 bytes, and the answer is then
                // shorter.
                Ok(got) => {
                    let got = bytes.get(..got).unwrap_or_default();
                    Served::Done(chain.write(memory, 0, got) as u32)
                }
                Err(error) => {
                    failed = Some(error);
                    Served::Done(0)
                }
            }
        })?;
        if let Some(error) = failed {
            rings.warn(format_args!("the kernel provides no entropy: {error}"));
        }
        if late { Ok(self.wait()?) } else { Ok(()) }
    }

    fn on_ready(&mut self, _token: u64, rings: &mut Rings) -> Result<(), Fault> {
        // Clears the timer.
        let _ = rustix::io::read(&self.timer, &mut [0; 8]);
        self.waiting = false;
        self.process_queue(QUEUE, rings)
    }

    fn save(&self) -> Result<State, StateError> {
        State::pack(KIND, VERSION, &())
    }

    fn restore(&mut self, state: &State, _features: u64) -> Result<(), StateError> {
        state.unpack(KIND, VERSION)
    }
}
