//! The identity that a copy of a machine assumes before its user work resumes. In order:
//!
//! ```text
//!   entropy      credited, and the kernel's generator reseeded; a new VM generation ID
//!   clock        the host's wall clock
//!   hostname
//!   machine_id, seeds, host_keys       not for a wake: it is the same machine
//!   connections  TCP to the outside reset, neighbours and cached names forgotten
//!   secrets      those given to this copy, and no others
//!   generation   /run/keiki/generation and SIGURG, for programs that want to know
//!   hooks        /etc/keiki/thaw.d
//! ```
//!
//! The generation identifies a copy: a number greater than that of every ancestor. An identity with
//! a smaller one was meant for another machine or is late, and is refused. If a step fails there is
//! no acknowledgement, and the node destroys the copy.

mod connections;
mod generation;
mod hooks;
mod host_keys;
mod machine_id;
mod program;
pub mod secrets;

pub use machine_id::prepare;

use crate::{cgroup, reaper::Reaper, sys};
use keiki_protocol::{
    guest::{Identity, IdentityAck, StepTime},
    seal::Plain,
};
use keiki_sys::stopwatch::Stopwatch;
use rustix::time::{ClockId, Timespec, clock_gettime, clock_settime};
use std::{
    fs, io,
    os::fd::AsFd,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

const MIN_ENTROPY: usize = 64;
const MAX_ENTROPY: usize = 4096;
const MAX_HOSTNAME: usize = 64;
const HOSTS: &str = "/etc/hosts";
const HOSTS_MARK: &str = "# keiki";

/// Why a machine did not assume an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Meant for another machine, or late.
    #[error("generation {wanted} is not greater than {current}")]
    Generation { wanted: u64, current: u64 },
    /// Less randomness than a copy needs.
    #[error("{0} bytes of entropy: {MIN_ENTROPY} to {MAX_ENTROPY} are needed")]
    Entropy(usize),
    /// Not a valid host name.
    #[error("not a valid host name")]
    Hostname,
    /// A step failed. The machine must not be released.
    #[error("step {0} failed")]
    Step(&'static str, #[source] io::Error),
}

/// The identity that this machine has.
#[derive(Debug)]
pub struct IdentityState {
    generation: AtomicU64,
    /// One at a time.
    assuming: tokio::sync::Mutex<()>,
    reaper: Arc<Reaper>,
    slow_keys: host_keys::SlowKeys,
}

impl IdentityState {
    /// Generation 0.
    pub fn new(reaper: Arc<Reaper>) -> Self {
        Self {
            generation: AtomicU64::new(0),
            assuming: tokio::sync::Mutex::default(),
            reaper,
            slow_keys: host_keys::SlowKeys::default(),
        }
    }

    /// The generation; 0 before the first.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Credits entropy before a key is made: without it a copy would make the same key as its
    /// original.
    pub fn refresh(bytes: &[u8]) -> Result<(), IdentityError> {
        check_entropy(bytes)?;
        entropy(bytes).map_err(|error| IdentityError::Step("entropy", error))
    }

    /// Assumes an identity, and stores the secrets that came with it.
    pub async fn assume(&self, identity: &Identity, given: &[Plain]) -> Result<IdentityAck, IdentityError> {
        let _one = self.assuming.lock().await;
        let current = self.generation();
        check(identity, current)?;
        let mut watch = Stopwatch::start();
        // On this thread: a few system calls, none of which waits for a disk.
        let seeded = entropy(&identity.entropy).and_then(|()| generation::renew_kernel_id());
        step(&mut watch, "entropy", seeded)?;
        if identity.unix_nanos > 0 {
            step(&mut watch, "clock", clock(identity.unix_nanos, identity.uptime_ms))?;
        }
        if !identity.hostname.is_empty() {
            let named = rustix::system::sethostname(identity.hostname.as_bytes());
            step(&mut watch, "hostname", named.map_err(io::Error::from))?;
        }
        let mut slow_keys = vec![];
        if identity.is_new {
            let kept = machine_id::Kept::read();
            step(&mut watch, "machine_id", machine_id::machine_id(&kept))?;
            step(&mut watch, "seeds", machine_id::seeds(&kept))?;
            let keys = host_keys::host_keys(&self.reaper, &self.slow_keys, &kept).await;
            slow_keys = step(&mut watch, "host_keys", keys)?;
        }
        let processes = step(&mut watch, "connections", disconnect())?;
        step(&mut watch, "secrets", secrets::renew(given, &identity.keep_secrets))?;
        step(&mut watch, "generation", generation::record(identity.generation))?;
        generation::signal(&processes);
        self.generation.store(identity.generation, Ordering::Release);
        if identity.run_hooks {
            step(&mut watch, "hooks", hooks::run(&self.reaper, identity).await)?;
        }
        let steps = watch.into_steps().0.into_iter().map(|(name, took)| StepTime {
            step: name.into_owned(),
            micros: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
        });
        let ack = IdentityAck { generation: identity.generation, steps: steps.collect() };
        self.slow_keys.begin(&self.reaper, slow_keys).await;
        Ok(ack)
    }
}

/// Ends a step: names it in the error, or notes its time.
fn step<T>(watch: &mut Stopwatch, name: &'static str, result: io::Result<T>) -> Result<T, IdentityError> {
    let done = result.map_err(|error| IdentityError::Step(name, error))?;
    watch.lap(name);
    Ok(done)
}

/// Cuts user work off from the outside. Returns its processes.
fn disconnect() -> io::Result<Vec<i32>> {
    // A copy of a template usually has none, and then no connections either.
    let processes = if cgroup::has_user_work()? { cgroup::user_processes() } else { vec![] };
    connections::reset_foreign(&processes)?;
    connections::forget_neighbours()?;
    connections::forget_names(&processes);
    Ok(processes)
}

fn check(identity: &Identity, current: u64) -> Result<(), IdentityError> {
    if identity.generation <= current {
        return Err(IdentityError::Generation { wanted: identity.generation, current });
    }
    check_entropy(&identity.entropy)?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    if identity.hostname.len() > MAX_HOSTNAME || !identity.hostname.bytes().all(fits) {
        return Err(IdentityError::Hostname);
    }
    Ok(())
}

fn check_entropy(bytes: &[u8]) -> Result<(), IdentityError> {
    let fits = (MIN_ENTROPY..=MAX_ENTROPY).contains(&bytes.len());
    if fits { Ok(()) } else { Err(IdentityError::Entropy(bytes.len())) }
}

fn entropy(bytes: &[u8]) -> io::Result<()> {
    static RANDOM: OnceLock<fs::File> = OnceLock::new();
    let random = sys::kept_open(&RANDOM, || fs::OpenOptions::new().write(true).open("/dev/urandom"))?;
    sys::add_entropy(random.as_fd(), bytes)?;
    sys::reseed(random.as_fd())
}

/// Sets the wall clock to the time it had at `uptime_ms`, plus the time that has passed since.
fn clock(unix_nanos: u64, uptime_ms: u64) -> io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let passed = match uptime_ms {
        0 => 0,
        then => uptime().saturating_sub(then).saturating_mul(1_000_000),
    };
    let nanos = unix_nanos.saturating_add(passed);
    let seconds = i64::try_from(nanos / SECOND).map_err(io::Error::other)?;
    // Below one second, so it fits any type.
    let time = Timespec { tv_sec: seconds, tv_nsec: (nanos % SECOND) as _ };
    Ok(clock_settime(ClockId::Realtime, time)?)
}

/// Uptime in ms. A copy continues to count from its original's.
pub fn uptime() -> u64 {
    let up = clock_gettime(ClockId::Boottime);
    u64::try_from(up.tv_sec).unwrap_or(0) * 1000 + u64::try_from(up.tv_nsec).unwrap_or(0) / 1_000_000
}

/// Adds the machine's own name to `/etc/hosts`. Programs can do without it, and the write goes to a
/// disk that is cold after a thaw, so it happens after the release. User work may have made the
/// file read-only.
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

/// The hosts file with our line for `name` and all other lines unchanged. None if nothing changes.
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
    use super::{IdentityError, check, with_host};
    use keiki_protocol::guest::Identity;

    #[test]
    fn only_a_greater_generation_with_enough_entropy_is_taken() {
        let identity = Identity {
            generation: 5,
            entropy: vec![1; 64].into(),
            hostname: "a-b.c".into(),
            ..Identity::default()
        };
        assert!(check(&identity, 4).is_ok());
        assert!(matches!(check(&identity, 5), Err(IdentityError::Generation { wanted: 5, current: 5 })));
        let dry = Identity { entropy: vec![1; 63].into(), ..identity.clone() };
        assert!(matches!(check(&dry, 4), Err(IdentityError::Entropy(63))));
        let odd = Identity { hostname: "a\nb".into(), ..identity };
        assert!(matches!(check(&odd, 4), Err(IdentityError::Hostname)));
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
