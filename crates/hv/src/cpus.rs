//! vCPU threads: running, or parked.
//!
//! ```text
//!            run()                     a vCPU cannot continue
//!  parked ──────────> running ───────────────────────────> ended
//!     ▲                  │
//!     └──── park() ──────┘
//! ```
//!
//! A running thread holds its vCPU. A parked thread has completed its last exit (see
//! [`Vcpu::complete_exit`]), has given back the vCPU and waits. So the thread that parked them may
//! use every vCPU, and may fork.
#![allow(unsafe_code)]

use crate::{Bus, End, Error, Exit, Result, Vcpu, state::VcpuState};
use std::{
    io,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, Once, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Bytes of a vCPU thread's stack.
const STACK: usize = 256 << 10;
/// How long to wait before kicking a thread again that has not stopped.
const KICK_AGAIN: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Run,
    Park,
    Leave,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    parked: usize,
    /// When the last vCPU left the parked state, since the last change of `wanted`.
    left: Option<Instant>,
    ended: Option<End>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    bus: Arc<dyn Bus>,
    on_end: Box<dyn Fn() + Send + Sync>,
}

/// A vCPU and the flag that makes its thread leave the guest.
#[derive(Clone)]
struct VcpuSlot {
    vcpu: Arc<Mutex<Vcpu>>,
    flag: Flag,
}

/// `immediate_exit` of a vCPU's `kvm_run`. Valid as long as the vCPU, which is in the same
/// [`VcpuSlot`].
#[derive(Clone, Copy)]
struct Flag(*const AtomicU8);

// SAFETY: the byte is only accessed atomically.
unsafe impl Send for Flag {}
// SAFETY: as above.
unsafe impl Sync for Flag {}

impl Flag {
    fn set(self, value: u8) {
        // SAFETY: the mapping lives as long as the vCPU, which every holder of this flag holds too.
        unsafe { &*self.0 }.store(value, Ordering::SeqCst);
    }
}

/// All vCPUs of a machine, each with a thread.
pub struct Cpus {
    shared: Arc<Shared>,
    slots: Vec<VcpuSlot>,
    threads: Vec<JoinHandle<()>>,
}

impl std::fmt::Debug for Cpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cpus").field("count", &self.slots.len()).finish_non_exhaustive()
    }
}

impl Cpus {
    /// Starts a thread for each vCPU, parked. A vCPU that cannot continue calls `on_end` on its
    /// thread.
    pub fn start(
        vcpus: Vec<Vcpu>,
        bus: Arc<dyn Bus>,
        on_end: impl Fn() + Send + Sync + 'static,
    ) -> Result<Self> {
        install_kick()?;
        let state = Mutex::new(State { wanted: Wanted::Park, parked: 0, left: None, ended: None });
        let on_end = Box::new(on_end);
        let shared = Arc::new(Shared { state, changed: Condvar::new(), bus, on_end });
        let mut cpus = Self { shared, slots: Vec::new(), threads: Vec::new() };
        for mut vcpu in vcpus {
            let flag = Flag(vcpu.immediate_exit());
            let slot = VcpuSlot { vcpu: Arc::new(Mutex::new(vcpu)), flag };
            cpus.slots.push(slot.clone());
            let shared = cpus.shared.clone();
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{}", cpus.threads.len()))
                .stack_size(STACK)
                .spawn(move || serve(&slot, &shared))
                .map_err(Error::io("starting a vCPU thread"))?;
            cpus.threads.push(thread);
        }
        cpus.wait_parked(Duration::from_secs(5))?;
        Ok(cpus)
    }

    /// Lets the vCPUs run. No effect if they run.
    pub fn run(&self) {
        self.want(Wanted::Run);
    }

    /// Waits, `most` at most, until the last vCPU is on its way into the guest after [`Cpus::run`].
    /// Returns that time.
    #[must_use]
    pub fn running_since(&self, most: Duration) -> Option<Instant> {
        let waiting = |state: &mut State| state.left.is_none() && state.ended.is_none();
        let wait = self.shared.changed.wait_timeout_while(self.state(), most, waiting);
        wait.unwrap_or_else(PoisonError::into_inner).0.left
    }

    /// Parks the vCPUs. No effect if they are parked. On error they run again.
    ///
    /// # Errors
    /// If a vCPU does not stop within `most`.
    pub fn park(&self, most: Duration) -> Result<()> {
        self.want(Wanted::Park);
        self.wait_parked(most).inspect_err(|_| self.want(Wanted::Run))
    }

    #[must_use]
    pub fn is_parked(&self) -> bool {
        let state = self.state();
        state.wanted == Wanted::Park && state.parked == self.slots.len()
    }

    /// Why the machine cannot continue, if it cannot.
    #[must_use]
    pub fn ended(&self) -> Option<End> {
        self.state().ended.clone()
    }

    /// The state of each vCPU. They must be parked.
    pub fn save(&self) -> Result<Vec<VcpuState>> {
        self.each(|vcpu| vcpu.save())
    }

    /// Calls `what` with each vCPU. They must be parked.
    pub fn each<T>(&self, mut what: impl FnMut(&mut Vcpu) -> Result<T>) -> Result<Vec<T>> {
        if !self.is_parked() {
            return Err(Error::State("the vCPUs are running".into()));
        }
        self.slots.iter().map(|slot| what(&mut lock(&slot.vcpu))).collect()
    }

    fn want(&self, wanted: Wanted) {
        let mut state = self.state();
        state.wanted = wanted;
        state.left = None;
        drop(state);
        match wanted {
            Wanted::Run => self.shared.changed.notify_all(),
            Wanted::Park => self.kick(),
            Wanted::Leave => {
                self.shared.changed.notify_all();
                self.kick();
            }
        }
    }

    /// Makes every thread look at `wanted`. The signal makes a thread leave the guest. If it is
    /// about to enter, `immediate_exit` makes it leave. A thread clears that flag before it reads
    /// `wanted`, never after.
    fn kick(&self) {
        use std::os::unix::thread::JoinHandleExt;
        for (slot, thread) in self.slots.iter().zip(&self.threads) {
            slot.flag.set(1);
            // SAFETY: the thread has not been joined: only `drop` joins threads, and nothing is
            // kicked afterwards.
            unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGRTMIN()) };
        }
    }

    fn wait_parked(&self, most: Duration) -> Result<()> {
        let started = Instant::now();
        let mut state = self.state();
        while state.parked < self.slots.len() {
            if started.elapsed() >= most {
                let running = self.slots.len() - state.parked;
                return Err(Error::Park(running, self.slots.len(), most.as_millis()));
            }
            let wait = self.shared.changed.wait_timeout(state, KICK_AGAIN);
            let (next, waited) = wait.unwrap_or_else(PoisonError::into_inner);
            state = next;
            if waited.timed_out() {
                drop(state);
                self.kick();
                state = self.state();
            }
        }
        Ok(())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.shared.state)
    }
}

impl Drop for Cpus {
    fn drop(&mut self) {
        self.want(Wanted::Leave);
        let started = Instant::now();
        for thread in std::mem::take(&mut self.threads) {
            while !thread.is_finished() && started.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

/// The loop of a vCPU thread.
fn serve(slot: &VcpuSlot, shared: &Shared) {
    loop {
        let mut state = lock(&shared.state);
        state.parked += 1;
        shared.changed.notify_all();
        while state.wanted == Wanted::Park || state.wanted == Wanted::Run && state.ended.is_some() {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.wanted == Wanted::Leave {
            return;
        }
        state.parked -= 1;
        if state.parked == 0 {
            state.left = Some(Instant::now());
            shared.changed.notify_all();
        }
        drop(state);
        let mut vcpu = lock(&slot.vcpu);
        let end = loop {
            match vcpu.run(&*shared.bus) {
                Exit::Served => {}
                Exit::Interrupted => break vcpu.complete_exit(&*shared.bus).err(),
                Exit::End(end) => break Some(end),
            }
        };
        drop(vcpu);
        if let Some(end) = end {
            lock(&shared.state).ended.get_or_insert(end);
            (shared.on_end)();
        }
    }
}

/// Ignores poisoning: a panic ends the process, or a test.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Installs an empty handler for the signal that makes `KVM_RUN` return. Call it early: all copies
/// inherit the handler, so this signal, the only one that relatives may send each other, never ends
/// a process.
pub fn install_kick() -> Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    static ONCE: Once = Once::new();
    let mut result = Ok(());
    ONCE.call_once(|| {
        // SAFETY: all zeroes is an empty action; the fields that matter are set next.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
        // SAFETY: the action is complete and its handler does nothing.
        if unsafe { libc::sigaction(libc::SIGRTMIN(), &raw const action, std::ptr::null_mut()) } != 0 {
            result = Err(Error::Call("sigaction", io::Error::last_os_error()));
        }
    });
    result
}
