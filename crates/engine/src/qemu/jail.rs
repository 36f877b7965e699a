//! What a monitor may touch, should its guest take it over.
//!
//! Every monitor runs as another user, without capabilities, in a mount namespace that holds the
//! host's programs and libraries, read-only, and the machine's directory as [`INSIDE`]:
//!
//! ```text
//! /usr, /lib …          read-only
//! /m                    paths.dir: root's, the monitor may list nothing and make nothing in it
//! /m/vm.mem             root's; mapped privately from a descriptor that cannot write
//! /m/layers/<lower>     root's
//! /m/layers/<top>       its own: the one file it can change
//! /m/device.state       its own, during a freeze
//! /kernel, /initrd      root's, at a first boot
//! /ram.so               root's, see `ram`
//! ```
//!
//! Sockets and the tap are opened by the node and inherited, so the run directory is out of its
//! reach: it cannot replace a socket there. What a monitor wrote becomes a base file only as a copy
//! owned by root (a reflink), because the monitor still holds the descriptor it wrote with.
//!
//! As a separate user it can neither signal nor trace its siblings, and task limits apply per
//! machine.
//!
//! Without root there is no jail, and [`crate::Capabilities`] says so.

use super::{
    args::{INITRD, INSIDE, KERNEL, Launch},
    host::Host,
};
use crate::{
    EngineError, Result, VmPaths,
    layers::make_layers_dir,
    users::{USERS, User, close},
};
use keiki_sys::{
    jail::{Jail, Limits, make_root},
    process::{Process, Setup},
};
use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

/// Descriptors: a chain of layers, sockets, eventfds.
const FILES: u64 = 1024;
/// Threads: vCPUs, and up to 64 for its input and output.
const TASKS: u64 = 512;
/// How long a jailed program may take to print its version.
const PROBE: Duration = Duration::from_secs(10);
/// The node must be the last to be killed.
const OOM_SCORE_ADJ: i16 = 500;

/// A user for a new monitor, if this engine jails. Its directories are closed to others.
pub(super) fn user(host: &Host, paths: &VmPaths) -> Result<Option<User>> {
    let Some(first) = host.config.common.first_user else { return Ok(None) };
    let user = host.users.draw(first)?;
    close(&paths.run_dir, 0o700, None)?;
    make_layers_dir(&paths.dir)?;
    for dir in [paths.dir.clone(), paths.dir.join(keiki_snapshot::LAYERS_DIR)] {
        close(&dir, 0o710, Some(user.id()))?;
    }
    Ok(Some(user))
}

/// The root of all jails: each mounts over it in a private namespace.
pub(super) fn root(host: &Host) -> PathBuf {
    host.config.common.store.join("jail")
}

/// Can a monitor be jailed here? Describes how monitors run.
pub(super) fn probe(host: &Host) -> Result<String> {
    let Some(first) = host.config.common.first_user else {
        return Ok("its processes are not jailed, because the node is not root".into());
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

/// The jail of a monitor.
pub(super) fn build(host: &Host, user: u32, launch: &Launch<'_>) -> Result<Jail> {
    let root = root(host);
    let failed = || EngineError::at("create a jail in", &root);
    make_root(&root, &[INSIDE], &[KERNEL, INITRD]).map_err(failed())?;
    let disk = u64::from(launch.shape.disk_mib) << 20;
    let limits = Limits {
        files: FILES,
        tasks: TASKS,
        // The top layer: at worst the disk and its tables.
        file_bytes: disk.saturating_mul(2).saturating_add(64 << 20),
        oom_score_adj: OOM_SCORE_ADJ,
    };
    let mut jail = Jail::new(&root, user, limits).map_err(failed())?;
    jail.bind(&launch.paths.dir, &root, INSIDE, false).map_err(failed())?;
    if let Some((spec, _)) = launch.boot {
        for (file, place) in [(&spec.kernel, KERNEL), (&spec.initrd, INITRD)] {
            jail.bind(file, &root, place, true).map_err(failed())?;
        }
    }
    Ok(jail)
}
