//! What a monitor may touch, should its guest take it over.
//!
//! Every monitor runs as a user of its own, without capabilities, in a mount namespace that holds the host's
//! programs and libraries, read-only, and the machine's directory as [`INSIDE`]:
//!
//! ```text
//! /usr, /lib …          read-only
//! /m                    resources.dir: root's, the monitor may list nothing and make nothing in it
//! /m/vm.mem             root's; mapped privately from a descriptor that cannot write
//! /m/layers/<lower>     root's
//! /m/layers/<top>       its own: the one file it can change
//! /m/device.state       its own, during a freeze
//! /kernel, /initrd      root's, at a first boot
//! /ram.so               root's, see `ram`
//! ```
//!
//! Sockets and the tap are opened by the node and inherited, so the run directory is out of its reach: no name
//! in there can be swapped for that of another socket. What a monitor wrote becomes a base file only as a copy
//! that is root's (a reflink: [`adopt_layer`]), because the monitor still holds the descriptor it wrote with.
//!
//! Users are numbers of a range that nothing else should use, drawn at random so that two nodes of one host
//! seldom meet: a monitor can neither signal nor trace its siblings, and task limits count by machine.
//!
//! Without root there is no jail, and [`crate::Capabilities`] says so.

use super::{Host, args::Launch};
use crate::{EngineError, Resources, Result};
use keiki_sys::{
    jail::{Jail, Limits, make_root},
    process::{Process, Setup},
};
use std::{
    collections::BTreeSet,
    fs::{self, File, Permissions},
    os::unix::fs::{MetadataExt, PermissionsExt, chown},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Default of the first user number of monitors.
pub const FIRST_USER: u32 = 1_262_026_752;
/// How many there are.
pub const USERS: u32 = 65_536;

/// Where a monitor sees its machine's directory.
const INSIDE: &str = "m";
/// Where it sees what a first boot needs.
pub(super) const KERNEL: &str = "kernel";
pub(super) const INITRD: &str = "initrd";
/// Where a monitor writes its device state to.
pub(super) const SAVED: &str = "device.state";

/// Descriptors: a chain of layers, sockets, eventfds.
const FILES: u64 = 1024;
/// Threads: vCPUs, and up to 64 for its input and output.
const TASKS: u64 = 512;
/// How long a jailed program may take to tell its version.
const PROBE: Duration = Duration::from_secs(10);
/// The node must be the last to go.
const OOM_SCORE_ADJ: i16 = 500;

/// The user numbers in use.
#[derive(Debug, Clone, Default)]
pub(super) struct Users(Arc<Mutex<BTreeSet<u32>>>);

/// A user number, free again when dropped.
#[derive(Debug)]
pub(super) struct User {
    id: u32,
    of: Users,
}

impl Users {
    /// A number that no machine of this engine has.
    pub(super) fn draw(&self, first: u32) -> Option<User> {
        let mut used = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = uuid::Uuid::now_v7().as_u128() as u32 % USERS;
        let id = (0..USERS).map(|step| first + (start + step) % USERS).find(|id| !used.contains(id))?;
        used.insert(id);
        Some(User { id, of: self.clone() })
    }

    /// The number of a machine that was found again.
    pub(super) fn claim(&self, id: u32) -> User {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        User { id, of: self.clone() }
    }
}

impl User {
    pub(super) fn id(&self) -> u32 {
        self.id
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.of.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// The machine's directory as its monitor sees it.
pub(super) fn seen(user: Option<u32>, resources: &Resources) -> PathBuf {
    match user {
        Some(_) => Path::new("/").join(INSIDE),
        None => resources.dir.clone(),
    }
}

/// A user for a new monitor, if this engine jails. Its directories are closed to everybody else.
pub(super) fn settle(host: &Host, resources: &Resources) -> Result<Option<User>> {
    let Some(first) = host.config.first_user else { return Ok(None) };
    let none = || EngineError::Monitor("has no user number left to run as".into());
    let user = host.users.draw(first).ok_or_else(none)?;
    close(&resources.run_dir, 0o700, None)?;
    super::make_layers_dir(&resources.dir)?;
    for dir in [resources.dir.clone(), resources.dir.join(keiki_snapshot::LAYERS_DIR)] {
        close(&dir, 0o710, Some(user.id))?;
    }
    Ok(Some(user))
}

fn close(dir: &Path, mode: u32, group: Option<u32>) -> Result<()> {
    fs::set_permissions(dir, Permissions::from_mode(mode))
        .and_then(|()| chown(dir, Some(0), Some(group.unwrap_or(0))))
        .map_err(EngineError::at("close", dir))
}

/// Closes a directory of base files to all but root: monitors get names of their own for what they need.
pub(super) fn hide(dir: &Path) -> Result<()> {
    close(dir, 0o700, None)
}

/// The root of all jails: each mounts over it in a namespace of its own.
pub(super) fn root(host: &Host) -> PathBuf {
    host.config.store.join("jail")
}

/// Can a monitor be jailed here? Says how they run.
pub(super) fn probe(host: &Host) -> Result<String> {
    let Some(first) = host.config.first_user else {
        return Ok("its processes are not jailed, because this one is not root".into());
    };
    let root = root(host);
    let failed = || EngineError::at("jail a process in", &root);
    make_root(&root, &[INSIDE], &[KERNEL, INITRD]).map_err(failed())?;
    let limits = Limits { files: FILES, tasks: TASKS, file_bytes: 0, oom_score_adj: OOM_SCORE_ADJ };
    let jail = Jail::new(&root, first, limits).map_err(failed())?;
    let mut command = std::process::Command::new(&host.config.binary);
    let quiet = std::process::Stdio::null;
    command.arg("--version").stdin(quiet()).stdout(quiet()).stderr(quiet());
    let setup = Setup { jail: Some(jail), ..Setup::default() };
    let (process, _) = Process::spawn(&mut command, setup).map_err(failed())?;
    let started = Instant::now();
    let how = loop {
        match process.try_reap() {
            Some(how) => break how,
            None if started.elapsed() > PROBE => {
                process.kill().map_err(failed())?;
                break "no end".into();
            }
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    if how != "exit status 0" {
        return Err(EngineError::Monitor(format!("does not run in a jail: {how}")));
    }
    Ok(format!("jailed, as users {first} to {}", first + (USERS - 1)))
}

/// Makes a file the monitor's own.
pub(super) fn give(path: &Path, user: Option<u32>) -> Result<()> {
    let Some(id) = user else { return Ok(()) };
    fs::set_permissions(path, Permissions::from_mode(0o600))
        .and_then(|()| chown(path, Some(id), Some(id)))
        .map_err(EngineError::at("hand over", path))
}

/// Lets monitors read a base file. Who may come near it, its directory says.
pub(super) fn show(path: &Path) -> Result<()> {
    let mode = fs::metadata(path).map_err(EngineError::at("look at", path))?.mode();
    if mode & 0o004 != 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(0o644)).map_err(EngineError::at("open up", path))
}

/// Gives the layer at `old` the name `new` among base files. What a monitor has written is copied (its blocks
/// are shared), and the copy takes the old one's place too: the monitor may keep its descriptor, nobody will
/// read what it writes there.
pub(super) fn adopt_layer(old: &Path, new: &Path) -> Result<()> {
    let meta = fs::metadata(old).map_err(EngineError::at("look at", old))?;
    if meta.uid() == rustix::process::geteuid().as_raw() {
        return fs::hard_link(old, new).map_err(EngineError::at("link", new));
    }
    let from = File::open(old).map_err(EngineError::at("open", old))?;
    let to = File::options().write(true).create_new(true).open(new).map_err(EngineError::at("make", new))?;
    keiki_sys::files::reflink(&from, &to).map_err(EngineError::at("fill", new))?;
    show(new)?;
    let beside = old.with_extension("new");
    super::process::remove_file(&beside)?;
    fs::hard_link(new, &beside).map_err(EngineError::at("link", &beside))?;
    fs::rename(&beside, old).map_err(EngineError::at("replace", old))
}

/// The jail of a monitor.
pub(super) fn build(host: &Host, user: u32, launch: &Launch<'_>) -> Result<Jail> {
    let root = root(host);
    let failed = || EngineError::at("make a jail in", &root);
    make_root(&root, &[INSIDE], &[KERNEL, INITRD]).map_err(failed())?;
    let disk = u64::from(launch.shape.disk_mib) << 20;
    let limits = Limits {
        files: FILES,
        tasks: TASKS,
        // The top layer: the disk at worst, and what tells where its parts are.
        file_bytes: disk.saturating_mul(2).saturating_add(64 << 20),
        oom_score_adj: OOM_SCORE_ADJ,
    };
    let mut jail = Jail::new(&root, user, limits).map_err(failed())?;
    jail.bind(&launch.resources.dir, &root, INSIDE, false).map_err(failed())?;
    if let Some((spec, _)) = launch.boot {
        for (file, place) in [(&spec.kernel, KERNEL), (&spec.initrd, INITRD)] {
            jail.bind(file, &root, place, true).map_err(failed())?;
        }
    }
    Ok(jail)
}

#[cfg(test)]
mod tests {
    use super::{FIRST_USER, USERS, Users};

    #[test]
    fn no_two_machines_get_one_user() {
        let users = Users::default();
        let claimed = users.claim(FIRST_USER);
        let drawn: Vec<_> = (1..USERS).filter_map(|_| users.draw(FIRST_USER)).collect();
        assert_eq!(drawn.len(), USERS as usize - 1);
        assert!(drawn.iter().all(|user| user.id() != claimed.id() && (user.id() - FIRST_USER) < USERS));
        assert!(users.draw(FIRST_USER).is_none());
        drop(drawn);
        assert!(users.draw(FIRST_USER).is_some());
    }
}
