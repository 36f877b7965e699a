//! Making a copy of a machine a new individual before user work goes on. In order:
//!
//! ```text
//!   entropy      credited, and the kernel's generator started anew: all that follows draws from it. A VM generation ID
//!   clock        the wall clock of the host
//!   hostname
//!   identity     machine ID, DHCP identifiers, seeds, SSH host keys       not for a wake: it is the same machine
//!   connections  TCP with the outside reset, neighbours and names forgotten
//!   secrets      those given to this copy, and none it may not have
//!   generation   /run/keiki/generation and SIGURG, for programs that want to know
//!   hooks        /etc/keiki/thaw.d
//! ```
//!
//! A copy is known by its generation, a number greater than those of all its ancestors. An order for another
//! one is refused: it was meant for another machine, or comes late. If any step fails there is no
//! acknowledgement, and the node destroys the copy.

mod connections;
mod generation;
mod hooks;
mod identity;
mod program;
pub mod secrets;

pub use identity::prepare;

use crate::{cgroup, reaper::Reaper, sys};
use keiki_protocol::{
    guest::{Individual, IndividualAck, StepTime},
    seal::Plain,
};
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::{
    fs, io,
    os::fd::AsFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

const MIN_ENTROPY: usize = 64;
const MAX_ENTROPY: usize = 4096;
const MAX_HOSTNAME: usize = 64;
const HOSTS: &str = "/etc/hosts";
const HOSTS_MARK: &str = "# keiki";

/// Why a machine did not become a new individual.
#[derive(Debug, thiserror::Error)]
pub enum IndividualError {
    /// Meant for another machine, or late.
    #[error("generation {wanted} is not greater than {current}")]
    Generation {
        /// Asked for.
        wanted: u64,
        /// Had.
        current: u64,
    },
    /// Less randomness than a new individual needs.
    #[error("{0} bytes of entropy: {MIN_ENTROPY} to {MAX_ENTROPY} are needed")]
    Entropy(usize),
    /// Not a name a machine can have.
    #[error("not a host name")]
    Hostname,
    /// A step failed. The machine must not be released.
    #[error("cannot set {0}")]
    Step(&'static str, #[source] io::Error),
}

/// Which individual this machine is.
#[derive(Debug)]
pub struct Identity {
    generation: AtomicU64,
    /// One order at a time.
    order: tokio::sync::Mutex<()>,
    reaper: Arc<Reaper>,
    slow_keys: identity::SlowKeys,
}

/// Steps done, and how long each took.
#[derive(Debug, Default)]
struct Steps(Vec<StepTime>);

impl Steps {
    fn note<T>(
        &mut self,
        name: &'static str,
        begin: Instant,
        result: io::Result<T>,
    ) -> Result<T, IndividualError> {
        let done = result.map_err(|error| IndividualError::Step(name, error))?;
        let micros = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.0.push(StepTime { step: name.to_owned(), micros });
        Ok(done)
    }

    fn run<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, IndividualError> {
        let begin = Instant::now();
        let result = work();
        self.note(name, begin, result)
    }
}

impl Identity {
    /// Of generation 0.
    pub fn new(reaper: Arc<Reaper>) -> Self {
        Self {
            generation: AtomicU64::new(0),
            order: tokio::sync::Mutex::default(),
            reaper,
            slow_keys: identity::SlowKeys::default(),
        }
    }

    /// The generation; 0 before the first.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Randomness that another has, credited, before a key is drawn: a copy would draw its original's.
    pub fn refresh(bytes: &[u8]) -> Result<(), IndividualError> {
        check_entropy(bytes)?;
        entropy(bytes).map_err(|error| IndividualError::Step("entropy", error))
    }

    /// Carries out an order, and gives the machine the secrets that came with it.
    pub async fn become_new(
        &self,
        order: &Individual,
        given: &[Plain],
    ) -> Result<IndividualAck, IndividualError> {
        let _one = self.order.lock().await;
        let current = self.generation();
        check(order, current)?;
        let mut steps = Steps::default();
        // Here and not on another thread: a few system calls, none of which waits for a disk.
        steps.run("entropy", || {
            entropy(&order.entropy)?;
            generation::tell_kernel()
        })?;
        if order.unix_nanos > 0 {
            steps.run("clock", || clock(order.unix_nanos, order.uptime_ms))?;
        }
        if !order.hostname.is_empty() {
            steps.run("hostname", || Ok(rustix::system::sethostname(order.hostname.as_bytes())?))?;
        }
        let mut slow_keys = vec![];
        if order.is_new {
            let kept = steps.run("machine_id", || {
                let kept = identity::Kept::read();
                identity::machine_id(&kept)?;
                Ok(kept)
            })?;
            steps.run("seeds", || identity::seeds(&kept))?;
            let begin = Instant::now();
            let keys = identity::host_keys(&self.reaper, &self.slow_keys, &kept).await;
            slow_keys = steps.note("host_keys", begin, keys)?;
        }
        let processes = steps.run("connections", || {
            // Of a template, as a rule: none. Then there are no connections either.
            let processes = if cgroup::has_user_work()? { cgroup::user_processes() } else { vec![] };
            connections::reset_foreign(&processes)?;
            connections::forget_neighbours()?;
            connections::forget_names(&processes);
            Ok(processes)
        })?;
        steps.run("secrets", || secrets::renew(given, &order.keep_secrets))?;
        steps.run("generation", || {
            generation::record(order.generation)?;
            generation::tell(&processes);
            Ok(())
        })?;
        self.generation.store(order.generation, Ordering::Release);
        if order.run_hooks {
            let begin = Instant::now();
            steps.note("hooks", begin, hooks::run(&self.reaper, order).await)?;
        }
        self.slow_keys.begin(&self.reaper, slow_keys).await;
        Ok(IndividualAck { generation: order.generation, steps: steps.0 })
    }
}

fn check(order: &Individual, current: u64) -> Result<(), IndividualError> {
    if order.generation <= current {
        return Err(IndividualError::Generation { wanted: order.generation, current });
    }
    check_entropy(&order.entropy)?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if order.hostname.len() > MAX_HOSTNAME || !order.hostname.bytes().all(fits) {
        return Err(IndividualError::Hostname);
    }
    Ok(())
}

fn check_entropy(bytes: &[u8]) -> Result<(), IndividualError> {
    let fits = (MIN_ENTROPY..=MAX_ENTROPY).contains(&bytes.len());
    if fits { Ok(()) } else { Err(IndividualError::Entropy(bytes.len())) }
}

fn entropy(bytes: &[u8]) -> io::Result<()> {
    static RANDOM: OnceLock<fs::File> = OnceLock::new();
    let random = sys::kept_open(&RANDOM, || fs::OpenOptions::new().write(true).open("/dev/urandom"))?;
    sys::add_entropy(random.as_fd(), bytes)?;
    sys::reseed(random.as_fd())
}

/// Sets the wall clock to what it was at some uptime and what has passed since.
fn clock(unix_nanos: u64, uptime_ms: u64) -> io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let passed = match uptime_ms {
        0 => 0,
        then => uptime().saturating_sub(then).saturating_mul(1_000_000),
    };
    let nanos = unix_nanos.saturating_add(passed);
    let seconds = i64::try_from(nanos / SECOND).map_err(io::Error::other)?;
    // Below a second, so it fits whatever the type.
    let time = Timespec { tv_sec: seconds, tv_nsec: (nanos % SECOND) as _ };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

/// For how long this machine has run, in ms: it goes on in a copy from where it stood.
pub fn uptime() -> u64 {
    let up = clock_gettime(ClockId::Boottime);
    u64::try_from(up.tv_sec).unwrap_or(0) * 1000 + u64::try_from(up.tv_nsec).unwrap_or(0) / 1_000_000
}

/// Lets programs look the machine itself up. A comfort, and a write to a disk that is cold after a thaw: not
/// for the way to a new individual. A sandbox may have made its files unwritable.
pub fn announce(name: &str) {
    let text = match fs::read(HOSTS) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => b"127.0.0.1\tlocalhost\n".to_vec(),
        Err(_) => return,
        Ok(text) => text,
    };
    if let Some(new) = with_host(&text, name) {
        let _ = fs::write(HOSTS, new);
    }
}

/// The hosts file with one line of ours for `name`, all other lines as they were. None: nothing to change.
fn with_host(text: &[u8], name: &str) -> Option<Vec<u8>> {
    const LIMIT: usize = 1 << 20;
    let line = format!("127.0.1.1\t{name}\t{HOSTS_MARK}\n");
    let lines = || text.split_inclusive(|&byte| byte == b'\n');
    let ours = |line: &&[u8]| line.trim_ascii_end().ends_with(HOSTS_MARK.as_bytes());
    if text.len() > LIMIT || lines().any(|found| found == line.as_bytes()) {
        return None;
    }
    let mut new: Vec<u8> = lines().filter(|line| !ours(line)).flatten().copied().collect();
    if new.last().is_some_and(|&byte| byte != b'\n') {
        new.push(b'\n');
    }
    new.extend_from_slice(line.as_bytes());
    Some(new)
}

#[cfg(test)]
mod tests {
    use super::{IndividualError, check, with_host};
    use keiki_protocol::guest::Individual;

    #[test]
    fn only_a_greater_generation_with_enough_entropy_is_taken() {
        let order = Individual {
            generation: 5,
            entropy: vec![1; 64].into(),
            hostname: "a-b.c".into(),
            ..Individual::default()
        };
        assert!(check(&order, 4).is_ok());
        assert!(matches!(check(&order, 5), Err(IndividualError::Generation { wanted: 5, current: 5 })));
        let dry = Individual { entropy: vec![1; 63].into(), ..order.clone() };
        assert!(matches!(check(&dry, 4), Err(IndividualError::Entropy(63))));
        let odd = Individual { hostname: "a\nb".into(), ..order };
        assert!(matches!(check(&odd, 4), Err(IndividualError::Hostname)));
    }

    #[test]
    fn the_hosts_file_keeps_its_own_lines() {
        let first = with_host(b"127.0.0.1 localhost\n1.2.3.4 x", "one").unwrap();
        assert_eq!(first, b"127.0.0.1 localhost\n1.2.3.4 x\n127.0.1.1\tone\t# keiki\n");
        assert_eq!(with_host(&first, "one"), None);
        let second = with_host(&first, "two").unwrap();
        assert_eq!(second, b"127.0.0.1 localhost\n1.2.3.4 x\n127.0.1.1\ttwo\t# keiki\n");
    }
}
