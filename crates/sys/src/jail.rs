//! A process with as little as possible: its own user, no capability, and only chosen files of the
//! host.
//!
//! ```text
//! parent   prepare()   directories of an empty root; every argument of the calls below, so that the child
//!                      neither allocates nor locks
//! child    enter()     limits ── mount namespace, binds, pivot_root ── groups, gid, uid ── no capability,
//!                      no new privileges
//! child    exec
//! ```
//!
//! The old root is detached at once. A surviving copy of the mounts of the host would keep alive
//! every namespace and file system that the host unmounts later.

use rustix::{
    fs::{CWD, Gid, Mode, OFlags, Uid},
    io::Errno,
    mount::{
        MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind, mount_change, mount_remount,
        unmount,
    },
    process::{Resource, Rlimit, chdir, pivot_root, setrlimit},
    thread::{
        CapabilitySet, CapabilitySets, UnshareFlags, clear_ambient_capability_set,
        remove_capability_from_bounding_set, set_capabilities, set_no_new_privs, set_thread_groups,
        set_thread_res_gid, set_thread_res_uid, unshare_unsafe,
    },
};
use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::unix::{ffi::OsStrExt, fs::symlink},
    path::Path,
};

/// Directories of programs and libraries. A link on the host is a link inside.
const SYSTEM: [&str; 5] = ["usr", "lib", "lib64", "bin", "sbin"];
/// The library cache of the loader.
const LOADER_CACHE: &str = "etc/ld.so.cache";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    pub files: u64,
    /// Processes and threads of its user.
    pub tasks: u64,
    /// Bytes of the largest file it may write.
    pub file_bytes: u64,
    /// Added to its score when the host runs out of memory, -1000 to 1000.
    pub oom_score_adj: i16,
}

impl Limits {
    fn to_rlimits(self) -> [(Resource, u64); 4] {
        [
            (Resource::Core, 0),
            (Resource::Nofile, self.files),
            (Resource::Nproc, self.tasks),
            (Resource::Fsize, self.file_bytes),
        ]
    }
}

/// A file or directory of the host, and where it appears. The place must exist in the jail's root.
#[derive(Debug)]
struct Bind {
    from: CString,
    to: CString,
    flags: MountFlags,
}

/// A prepared jail, which one process can enter.
#[derive(Debug)]
pub struct Jail {
    root: CString,
    binds: Vec<Bind>,
    uid: Uid,
    gid: Gid,
    oom_score_adj: String,
    limits: [(Resource, u64); 4],
}

fn c_string(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

/// Makes a root for jails in `dir`: mount points and links, no content. `dirs` and `files` are the
/// further mount points that [`Jail::bind`] uses. Any number of jails can share it: each mounts in
/// its own namespace.
pub fn make_root(dir: &Path, dirs: &[&str], files: &[&str]) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    for name in SYSTEM {
        let (host, inside) = (Path::new("/").join(name), dir.join(name));
        if fs::symlink_metadata(&inside).is_ok() {
            continue;
        }
        match fs::symlink_metadata(&host) {
            Ok(meta) if meta.is_symlink() => symlink(fs::read_link(&host)?, &inside)?,
            Ok(_) => fs::create_dir_all(&inside)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    for name in dirs.iter().chain(&["etc"]) {
        fs::create_dir_all(dir.join(name))?;
    }
    for name in files.iter().chain(&[LOADER_CACHE]) {
        File::options().create(true).append(true).open(dir.join(name))?;
    }
    Ok(())
}

impl Jail {
    /// A jail in `root`, made by [`make_root`], for the user and group number `id`.
    pub fn new(root: &Path, id: u32, limits: Limits) -> io::Result<Self> {
        let mut jail = Self {
            root: c_string(root)?,
            binds: Vec::new(),
            uid: Uid::from_raw(id),
            gid: Gid::from_raw(id),
            oom_score_adj: limits.oom_score_adj.to_string(),
            limits: limits.to_rlimits(),
        };
        for name in SYSTEM.into_iter().chain([LOADER_CACHE]) {
            let host = Path::new("/").join(name);
            if fs::symlink_metadata(&host).is_ok_and(|meta| !meta.is_symlink()) {
                jail.bind(&host, root, name, true)?;
            }
        }
        Ok(jail)
    }

    /// Shows `from` of the host at `place` in the jail's root.
    pub fn bind(&mut self, from: &Path, root: &Path, place: &str, read_only: bool) -> io::Result<()> {
        let mut flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV;
        flags.set(MountFlags::RDONLY, read_only);
        self.binds.push(Bind { from: c_string(from)?, to: c_string(&root.join(place))?, flags });
        Ok(())
    }

    /// Puts the calling process in. Between fork and exec: allocates nothing, takes no lock.
    pub(crate) fn enter(&self) -> io::Result<()> {
        self.limit()?;
        self.leave_host_files()?;
        self.leave_privileges()
    }

    fn limit(&self) -> io::Result<()> {
        let score = rustix::fs::openat(
            CWD,
            c"/proc/self/oom_score_adj",
            OFlags::WRONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        rustix::io::write(&score, self.oom_score_adj.as_bytes())?;
        for (resource, most) in self.limits {
            setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })?;
        }
        Ok(())
    }

    fn leave_host_files(&self) -> io::Result<()> {
        // SAFETY: the process has one thread and its own descriptor table, which these flags do not
        // change.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWIPC) }?;
        mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        mount_bind(&*self.root, &*self.root)?;
        for bind in &self.binds {
            mount_bind(&*bind.from, &*bind.to)?;
            mount_remount(&*bind.to, bind.flags, c"")?;
        }
        chdir(&*self.root)?;
        self.pivot()
    }

    /// Makes the working directory, which is a mount, the root.
    fn pivot(&self) -> io::Result<()> {
        // The old root is mounted at the same place below the new one. Unmount it.
        pivot_root(c".", c".")?;
        unmount(c".", UnmountFlags::DETACH)?;
        let flags = MountFlags::BIND | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RDONLY;
        mount_remount(c"/", flags, c"")?;
        Ok(chdir(c"/")?)
    }

    fn leave_privileges(&self) -> io::Result<()> {
        for capability in CapabilitySet::all() {
            match remove_capability_from_bounding_set(capability) {
                // INVAL: the kernel is older than this capability.
                Ok(()) | Err(Errno::INVAL) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        clear_ambient_capability_set()?;
        set_thread_groups(&[])?;
        set_thread_res_gid(self.gid, self.gid, self.gid)?;
        set_thread_res_uid(self.uid, self.uid, self.uid)?;
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
        Ok(set_no_new_privs(true)?)
    }
}

/// Puts the calling process, which must have one thread, into an empty root with its own namespaces
/// for mounts, network, IPC and host name, as user and group `id`, without capabilities. It keeps
/// its descriptors.
///
/// # Errors
/// After an error the process should end: it cannot get back what it has given up.
pub fn enter_empty(id: u32, limits: Limits) -> io::Result<()> {
    let jail = Jail {
        root: c"/proc".into(),
        binds: Vec::new(),
        uid: Uid::from_raw(id),
        gid: Gid::from_raw(id),
        oom_score_adj: limits.oom_score_adj.to_string(),
        limits: limits.to_rlimits(),
    };
    jail.limit()?;
    let flags = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWNET | UnshareFlags::NEWUTS;
    // SAFETY: the process has one thread and its own descriptor table, which these flags do
    // not change.
    unsafe { unshare_unsafe(flags) }?;
    mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
    // Every host has this directory, and the mount hides its contents from this process only.
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount(c"keiki", &*jail.root, c"tmpfs", flags, c"size=4k,mode=555")?;
    chdir(&*jail.root)?;
    jail.pivot()?;
    jail.leave_privileges()
}

#[cfg(test)]
mod tests {
    use super::{Jail, Limits, make_root};
    use crate::process::{Process, Setup};
    use std::{error::Error, fs, io::Read, os::unix::fs::chown, path::Path, process::Command};

    const ID: u32 = 1_262_000_001;
    const LIMITS: Limits = Limits { files: 64, tasks: 32, file_bytes: 4096, oom_score_adj: 500 };

    fn run(dir: &Path, script: &str) -> Result<String, Box<dyn Error>> {
        let root = dir.join("root");
        make_root(&root, &["m"], &[])?;
        let mut jail = Jail::new(&root, ID, LIMITS)?;
        jail.bind(&dir.join("mine"), &root, "m", false)?;
        let (mut out, to) = std::io::pipe()?;
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).env_clear().stdout(to.try_clone()?).stderr(to);
        let (process, _) = Process::spawn(&mut command, Setup { jail: Some(jail), ..Setup::default() })?;
        drop(command);
        let mut text = String::new();
        out.read_to_string(&mut text)?;
        while process.try_reap().is_none() {
            std::thread::yield_now();
        }
        Ok(text)
    }

    /// A directory for the files of a jail.
    fn test_dir() -> Result<Option<tempfile::TempDir>, Box<dyn Error>> {
        if !keiki_testing::is_root() {
            return Ok(None);
        }
        let dir = tempfile::tempdir()?;
        fs::create_dir(dir.path().join("mine"))?;
        fs::write(dir.path().join("mine/base"), "base")?;
        fs::write(dir.path().join("mine/own"), "own")?;
        chown(dir.path().join("mine/own"), Some(ID), Some(ID))?;
        Ok(Some(dir))
    }

    #[test]
    fn a_jailed_process_has_its_own_files_and_nothing_else() -> Result<(), Box<dyn Error>> {
        let Some(dir) = test_dir()? else { return Ok(()) };
        let seen = run(
            dir.path(),
            "echo *; cat m/base m/own; echo new > m/own && echo written; \
             echo x >> m/base; echo x > m/more; echo x > /etc/more; echo x > /usr/more; true",
        )?;
        let mut lines = seen.lines();
        let names = lines.next().unwrap_or_default();
        for name in names.split(' ') {
            assert!(["bin", "etc", "lib", "lib64", "m", "sbin", "usr"].contains(&name), "{names}");
        }
        assert_eq!(lines.next(), Some("baseownwritten"), "{seen}");
        assert_eq!(lines.count(), 4, "four refusals: {seen}");
        assert_eq!(fs::read_to_string(dir.path().join("mine/base"))?, "base");
        assert_eq!(fs::read_to_string(dir.path().join("mine/own"))?, "new\n");
        assert_eq!(fs::read_dir(dir.path().join("mine"))?.count(), 2);
        Ok(())
    }

    #[test]
    fn a_jailed_process_has_no_privilege_left() -> Result<(), Box<dyn Error>> {
        let Some(dir) = test_dir()? else { return Ok(()) };
        let root = dir.path().join("root");
        make_root(&root, &["m"], &[])?;
        let mut jail = Jail::new(&root, ID, LIMITS)?;
        jail.bind(&dir.path().join("mine"), &root, "m", false)?;
        let mut command = Command::new("/bin/sleep");
        command.arg("60");
        let (process, _) = Process::spawn(&mut command, Setup { jail: Some(jail), ..Setup::default() })?;
        let proc = Path::new("/proc").join(process.pid().to_string());
        let (status, limits) =
            (fs::read_to_string(proc.join("status"))?, fs::read_to_string(proc.join("limits"))?);
        let mounts = fs::read_to_string(proc.join("mounts"))?;
        let score = fs::read_to_string(proc.join("oom_score_adj"))?;
        process.kill()?;
        while process.try_reap().is_none() {
            std::thread::yield_now();
        }
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.map(|rest| rest.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        };
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), Some(vec!["0000000000000000".into()]), "{set}");
        }
        for id in ["Uid:", "Gid:"] {
            assert_eq!(field(id), Some(vec![ID.to_string(); 4]), "{id}");
        }
        assert_eq!(field("Groups:"), Some(Vec::new()));
        assert_eq!(field("NoNewPrivs:"), Some(vec!["1".into()]));
        assert_eq!(score.trim(), "500");
        for limit in [
            "Max core file size 0 0",
            "Max open files 64 64",
            "Max processes 32 32",
            "Max file size 4096 4096",
        ] {
            let plain = limits.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(plain.contains(limit), "{limits}");
        }
        assert!(mounts.lines().count() < 10, "the host's mounts are gone: {mounts}");
        Ok(())
    }
}
