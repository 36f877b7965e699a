//! Machine ID, DHCP identifiers and random seeds.
//!
//! A new machine gets new ones; a machine that wakes keeps its own. A template can keep some: it
//! lists them in `/etc/keiki/keep`, one per line, as `machine-id`, `ssh-host-keys`, `duid` or
//! `random-seed`. The kernel's `boot_id` cannot be changed: it is new only after a boot.
//!
//! The machine ID lies in memory and is bind-mounted over the file on disk, as systemd does for
//! machines with a read-only disk. A copy then writes to no disk while it assumes its identity, and
//! no disk image holds a machine ID.

use crate::sys;
use rustix::{
    mount::mount_bind,
    rand::{GetRandomFlags, getrandom},
};
use std::{
    fs, io,
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt},
    path::Path,
    sync::OnceLock,
};

const KEEP: &str = "/etc/keiki/keep";
const MACHINE_ID: &str = "/etc/machine-id";
/// Where D-Bus looks; often a link to the former.
const DBUS_ID: &str = "/var/lib/dbus/machine-id";
const OWN_ID: &str = "/run/keiki/machine-id";
/// Files that identify a DHCP client. The client makes a new one when it needs it.
const DUIDS: [&str; 4] =
    ["/var/lib/dhcpcd/duid", "/etc/dhcpcd.duid", "/var/lib/NetworkManager/secret_key", "/var/lib/dhcp/duid"];
/// Files that seed the generator at boot.
const SEEDS: [&str; 3] =
    ["/var/lib/systemd/random-seed", "/var/lib/urandom/random-seed", "/var/lib/misc/random-seed"];
const SEED_BYTES: usize = 512;

/// The machine ID in memory. Open from boot: finding and opening it would take longer than writing
/// it.
static OWN: OnceLock<fs::File> = OnceLock::new();

/// The parts that the template keeps.
pub struct Kept(String);

impl Kept {
    /// What the template's file says now.
    pub fn read() -> Self {
        Self(fs::read_to_string(KEEP).unwrap_or_default())
    }

    pub(super) fn has(&self, part: &str) -> bool {
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

/// A machine ID as in the file: 32 hexadecimal digits and a newline. Also a valid version 4 UUID.
fn new_machine_id() -> io::Result<String> {
    let mut bytes: [u8; 16] = random()?;
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    Ok(format!("{:032x}\n", u128::from_be_bytes(bytes)))
}

/// At boot, mounts a machine ID in memory over the one on disk.
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

/// Makes a new machine ID.
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
    // User work may have removed the mount or replaced the file.
    for path in [MACHINE_ID, DBUS_ID] {
        let Ok(found) = fs::metadata(path) else { continue };
        let is_own = own.as_ref().is_some_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()));
        if found.is_file() && !is_own {
            fs::write(path, &id)?;
        }
    }
    Ok(())
}

/// Removes the identifiers of DHCP clients and replaces the seeds that exist.
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

/// Removes a file that usually does not exist. A lookup first, because it runs kernel code that is
/// warm already.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path).and_then(|_| fs::remove_file(path)) {
        Err(error) if !is_absent(&error) => Err(error),
        _ => Ok(()),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
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
