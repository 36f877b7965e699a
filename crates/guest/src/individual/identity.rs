//! What a machine is known by, and what it is made of anew: machine ID, SSH host keys, DHCP identifiers, seeds.
//!
//! A machine that is another one than before gets them new; one that wakes keeps them. A template that wants some of
//! them kept lists them in `/etc/keiki/keep`, one a line: `machine-id`, `ssh-host-keys`, `duid`, `random-seed`.
//! Not in anybody's hands is the kernel's `boot_id`: it changes at a boot only.
//!
//! The machine ID lives in memory and lies over the disk's own by a mount, as systemd does it for machines whose disk
//! is not theirs: a copy then writes no disk on its way to a new identity, and a disk image never carries one.

use super::{connections::processes_named, program};
use crate::{cgroup, exec::signal_all, log, reaper::Reaper, sys};
use rustix::{
    mount::mount_bind,
    process::Signal,
    rand::{GetRandomFlags, getrandom},
};
use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::{
    sync::{Mutex, Notify},
    task::JoinHandle,
};

const KEEP: &str = "/etc/keiki/keep";
const MACHINE_ID: &str = "/etc/machine-id";
/// D-Bus looks here; often a link to the former.
const DBUS_ID: &str = "/var/lib/dbus/machine-id";
const OWN_ID: &str = "/run/keiki/machine-id";
const SSH: &str = "/etc/ssh";
const KEYGEN: &str = "/usr/bin/ssh-keygen";
/// Kinds of host key, and how long each takes at most. The last one takes seconds where the processor is emulated,
/// so it is made once the machine is released; until then there is none.
const QUICK_KEYS: [&str; 2] = ["ed25519", "ecdsa"];
const SLOW_KEYS: [&str; 1] = ["rsa"];
const QUICK: Duration = Duration::from_secs(10);
const SLOW: Duration = Duration::from_secs(300);
/// Files that identify a DHCP client. They are made anew by whoever needs them.
const DUIDS: [&str; 4] =
    ["/var/lib/dhcpcd/duid", "/etc/dhcpcd.duid", "/var/lib/NetworkManager/secret_key", "/var/lib/dhcp/duid"];
/// Files that seed a generator at a boot.
const SEEDS: [&str; 3] =
    ["/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed", "/var/lib/misc/random-seed"];
const SEED_BYTES: usize = 512;

/// The machine ID in memory: open from the boot on, since finding and opening it is most of what writing it costs a copy.
static OWN: OnceLock<fs::File> = OnceLock::new();

/// The parts that are declared to be kept.
pub struct Kept(String);

impl Kept {
    /// As the template says now.
    pub fn read() -> Self {
        Self(fs::read_to_string(KEEP).unwrap_or_default())
    }

    fn has(&self, part: &str) -> bool {
        self.0.lines().any(|line| line.trim() == part)
    }
}

pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let mut at = 0;
    while at < N {
        at += getrandom(&mut bytes[at..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}

/// A machine ID as the file has it: 32 hexadecimal digits and a newline. Valid as a version 4 UUID too.
fn new_machine_id() -> io::Result<String> {
    let mut bytes: [u8; 16] = random()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(format!("{:032x}\n", u128::from_be_bytes(bytes)))
}

/// Puts a machine ID in memory over the disk's, at the boot.
pub fn prepare() -> io::Result<()> {
    if Kept::read().has("machine-id") {
        return Ok(());
    }
    let own = sys::kept_open(&OWN, || fs::File::create(OWN_ID))?;
    own.write_all_at(new_machine_id()?.as_bytes(), 0)?;
    own.set_permissions(fs::Permissions::from_mode(0o444))?;
    if !Path::new(MACHINE_ID).exists() {
        fs::write(MACHINE_ID, "")?;
    }
    mount_bind(OWN_ID, MACHINE_ID)?;
    if fs::symlink_metadata(DBUS_ID).is_ok_and(|meta| meta.is_file()) {
        mount_bind(OWN_ID, DBUS_ID)?;
    }
    Ok(())
}

/// A new machine ID.
pub fn machine_id(kept: &Kept) -> io::Result<()> {
    if kept.has("machine-id") {
        return Ok(());
    }
    let id = new_machine_id()?;
    let mut own = None;
    if let Some(file) = OWN.get() {
        file.write_all_at(id.as_bytes(), 0)?;
        own = Some(file.metadata()?);
    }
    // User work may have taken the mount away, or put another file there.
    for path in [MACHINE_ID, DBUS_ID] {
        let Ok(found) = fs::metadata(path) else { continue };
        let is_own = own.as_ref().is_some_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()));
        if found.is_file() && !is_own {
            fs::write(path, &id)?;
        }
    }
    Ok(())
}

/// Identifiers of DHCP clients go, seeds become others. Absent ones stay absent.
pub fn seeds(kept: &Kept) -> io::Result<()> {
    if !kept.has("duid") {
        DUIDS.iter().try_for_each(|path| remove(Path::new(path)))?;
    }
    if !kept.has("random-seed") {
        for path in SEEDS {
            match fs::symlink_metadata(path) {
                Ok(meta) if meta.is_file() && meta.size() > 0 => fs::write(path, random::<SEED_BYTES>()?)?,
                Err(error) if !is_absent(&error) => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Removes what mostly is not there. Looked at first, as all else here is: removing is other code of the kernel's.
fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path).and_then(|_| fs::remove_file(path)) {
        Err(error) if !is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// Host keys that are still being made after the release.
#[derive(Debug, Default)]
pub struct SlowKeys(Mutex<Option<Making>>);

#[derive(Debug)]
struct Making {
    kinds: Vec<&'static str>,
    stop: Arc<Notify>,
    task: JoinHandle<()>,
}

impl SlowKeys {
    /// Makes them in the background. Without them a server has the others.
    pub async fn begin(&self, reaper: &Arc<Reaper>, kinds: Vec<&'static str>) {
        if kinds.is_empty() {
            return;
        }
        let (reaper, stop) = (reaper.clone(), Arc::new(Notify::new()));
        let (wanted, stopped) = (kinds.clone(), stop.clone());
        let task = tokio::spawn(async move {
            match make_keys(&reaper, &wanted, SLOW, &stopped).await {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                    log::line(&format!("SSH host keys: {error}"));
                }
                _ => {}
            }
        });
        *self.0.lock().await = Some(Making { kinds, stop, task });
    }

    /// Ends what is under way; returns what that was to make. Where a machine is copied meanwhile, each copy would
    /// otherwise come to the same key.
    async fn stop(&self) -> io::Result<Vec<&'static str>> {
        let Some(making) = self.0.lock().await.take() else { return Ok(vec![]) };
        if making.task.is_finished() {
            return Ok(vec![]);
        }
        making.stop.notify_one();
        making.task.await.map_err(io::Error::other)?;
        Ok(making.kinds)
    }
}

/// New SSH host keys of the kinds that there are, and the server told. Returns what is left to do after the release.
pub async fn host_keys(reaper: &Arc<Reaper>, slow: &SlowKeys, kept: &Kept) -> io::Result<Vec<&'static str>> {
    let unfinished = slow.stop().await?;
    let kinds: Vec<_> = QUICK_KEYS
        .into_iter()
        .chain(SLOW_KEYS)
        .filter(|kind| key(kind).exists() || unfinished.contains(kind))
        .collect();
    if kept.has("ssh-host-keys") {
        return Ok(unfinished);
    }
    for kind in &kinds {
        // One that was not finished may be missing, and a public half.
        for path in [key(kind), key(kind).with_extension("pub")] {
            remove(&path)?;
        }
    }
    let (slow, quick): (Vec<_>, Vec<_>) = kinds.into_iter().partition(|kind| SLOW_KEYS.contains(kind));
    if !quick.is_empty() {
        make_keys(reaper, &quick, QUICK, &Notify::new()).await?;
    }
    Ok(slow)
}

async fn make_keys(reaper: &Arc<Reaper>, kinds: &[&str], limit: Duration, stop: &Notify) -> io::Result<()> {
    if !Path::new(KEYGEN).exists() {
        // A server without keys says so. One with somebody else's would not.
        return Ok(());
    }
    for kind in kinds {
        let path = key(kind);
        let words = ["-q", "-t", kind, "-N", "", "-C", "", "-f"].map(str::to_owned);
        let arguments = words.into_iter().chain([path.to_string_lossy().into_owned()]).collect();
        let ended = program::run(reaper, Path::new(KEYGEN), arguments, &[], limit, stop).await?;
        if ended.code != 0 {
            return Err(io::Error::other(format!("ssh-keygen ended with {}: {}", ended.code, ended.said)));
        }
    }
    // A server has read its keys when it began. It reads them again before anything else, once it goes on; those that
    // serve a connection ignore the signal's meaning and end, as their connection does.
    signal_all(&processes_named(&cgroup::user_processes(), "sshd"), Signal::HUP);
    Ok(())
}

fn key(kind: &str) -> PathBuf {
    Path::new(SSH).join(format!("ssh_host_{kind}_key"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_ids_are_32_digits_and_never_the_same() {
        let (one, two) = (new_machine_id().unwrap(), new_machine_id().unwrap());
        assert_ne!(one, two);
        assert_eq!(one.len(), 33);
        assert!(one.trim_end().bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
        assert_eq!(one.as_bytes()[12], b'4');
    }

    #[test]
    fn what_is_kept_is_listed_one_a_line() {
        let keeps = |text: &str| Kept(text.into()).has("duid");
        assert!(keeps("# ours\nmachine-id\n  duid \n"));
        assert!(!keeps("machine-id-old\nno duid\n"));
        assert!(!keeps(""));
    }
}
