//! The identity that a copy of a machine assumes before its user work resumes. In order:
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
//! The generation identifies a copy: a number greater than that of every ancestor. An identity with a smaller one
//! was meant for another machine or is late, and is refused. If a step fails there is no acknowledgement, and the node
//! destroys the copy.

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

/// Why a machine did not assume an identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// Meant for another machine, or late.
    #[error("generation {wanted} is not greater than {current}")]
    Generation {
        /// Asked for.
        wanted: u64,
        /// Had.
        current: u64,
    },
    /// Less randomness than a copy needs.
    #[error("{0} bytes of entropy: {MIN_ENTROPY} to {MAX_ENTROPY} are needed")]
    Entropy(usize),
    /// Not a name a machine can have.
    #[error("not a host name")]
    Hostname,
    /// A step failed. The machine must not be released.
    #[error("cannot set {0}")]
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

/// Steps done, and how long each took.
#[derive(Debug, Default)]
struct Steps(Vec<StepTime>);

impl Steps {
    fn note<T>(
        &mut self,
        name: &'static str,
        begin: Instant,
        result: io::Result<T>,
    ) -> Result<T, IdentityError> {
        let done = result.map_err(|error| IdentityError::Step(name, error))?;
        let micros = u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.0.push(StepTime { step: name.to_owned(), micros });
        Ok(done)
    }

    fn run<T>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> io::Result<T>,
    ) -> Result<T, IdentityError> {
        let begin = Instant::now();
        let result = work();
        self.note(name, begin, result)
    }
}

impl IdentityState {
    /// Of generation 0.
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

    /// Randomness that another has, credited, before a key is drawn: a copy would draw its original's.
    pub fn refresh(bytes: &[u8]) -> Result<(), IdentityError> {
        check_entropy(bytes)?;
        entropy(bytes).map_err(|error| IdentityError::Step("entropy", error))
    }

    /// Assumes an identity, and stores the secrets that came with it.
    pub async fn assume(&self, identity: &Identity, given: &[Plain]) -> Result<IdentityAck, IdentityError> {
        let _one = self.assuming.lock().await;
        let current = self.generation();
        check(identity, current)?;
        let mut steps = Steps::default();
        // Here and not on another thread: a few system calls, none of which waits for a disk.
        steps.run("entropy", || {
            entropy(&identity.entropy)?;
            generation::tell_kernel()
        })?;
        if identity.unix_nanos > 0 {
            steps.run("clock", || clock(identity.unix_nanos, identity.uptime_ms))?;
        }
        if !identity.hostname.is_empty() {
            steps.run("hostname", || Ok(rustix::system::sethostname(identity.hostname.as_bytes())?))?;
        }
        let mut slow_keys = vec![];
        if identity.is_new {
            let kept = steps.run("machine_id", || {
                let kept = machine_id::Kept::read();
                machine_id::machine_id(&kept)?;
                Ok(kept)
            })?;
            steps.run("seeds", || machine_id::seeds(&kept))?;
            let begin = Instant::now();
            let keys = host_keys::host_keys(&self.reaper, &self.slow_keys, &kept).await;
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
        steps.run("secrets", || secrets::renew(given, &identity.keep_secrets))?;
        steps.run("generation", || {
            generation::record(identity.generation)?;
            generation::tell(&processes);
            Ok(())
        })?;
        self.generation.store(identity.generation, Ordering::Release);
        if identity.run_hooks {
            let begin = Instant::now();
            steps.note("hooks", begin, hooks::run(&self.reaper, identity).await)?;
        }
        self.slow_keys.begin(&self.reaper, slow_keys).await;
        Ok(IdentityAck { generation: identity.generation, steps: steps.0 })
    }
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

/// Adds the machine's own name to `/etc/hosts`. Programs can do without it, and the write goes to a disk that is cold
/// after a thaw, so it happens after the release. User work may have made the file read-only.
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
