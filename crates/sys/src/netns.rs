//! Named network namespaces, and threads inside them.
//!
//! A *thread* is in a namespace. Work inside one runs on a thread made for it ([`inside`]), never
//! on a thread that returns to a pool. Sockets opened there stay in the namespace for their whole
//! life, wherever they are used.
//!
//! A name is a bind mount of the namespace on a file in `/run/netns`, as `ip netns` makes it. So
//! the usual tools see it, and the namespace outlives the thread that made it.

#![allow(unsafe_code)]

use rustix::{
    fs::{CWD, Mode, OFlags},
    io::Errno,
    mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount},
    thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe},
};
use std::{
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    thread,
};

/// Where named network namespaces live.
pub const DIR: &str = "/run/netns";

/// Path of the namespace called `name`.
#[must_use]
pub fn path(name: &str) -> PathBuf {
    Path::new(DIR).join(name)
}

/// Opens the network namespace of the calling thread.
pub fn current() -> io::Result<OwnedFd> {
    open(Path::new("/proc/thread-self/ns/net"))
}

/// Opens a named namespace. The error is `NotFound` if the name does not exist, and `InvalidData`
/// if no namespace is mounted on the file.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let fd = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // An interrupted creation leaves an empty regular file on another file system.
    if rustix::fs::fstatfs(&fd)?.f_type as i64 != NSFS_MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no namespace is mounted here"));
    }
    Ok(fd)
}

/// `NSFS_MAGIC` of `linux/magic.h`.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Moves the calling thread into a namespace for the rest of its life. Use a thread made for this.
pub fn enter(namespace: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsFd;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Creates a namespace called `name` and moves the calling thread into it for the rest of its life.
/// On error nothing of that name is left. The error is `AlreadyExists` if the name is taken.
pub fn create(name: &str) -> io::Result<()> {
    prepare_dir()?;
    let path = path(name);
    let file = rustix::fs::openat(
        CWD,
        &path,
        OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    drop(file);
    // SAFETY: NEWNET only changes the network stack of new sockets of this thread. The descriptor
    // table stays shared, which is what the safety condition requires.
    let made = unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
        .and_then(|()| mount_bind("/proc/thread-self/ns/net", &path));
    if let Err(errno) = made {
        let _ = std::fs::remove_file(&path);
        return Err(errno.into());
    }
    Ok(())
}

/// Removes the name. The namespace ends with its last process and socket. No error if the name does
/// not exist.
pub fn remove(name: &str) -> io::Result<()> {
    let path = path(name);
    // A copied mount namespace may have left several mounts on the name. Remove all of them.
    loop {
        match unmount(&path, UnmountFlags::DETACH) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

pub fn list(prefix: &str) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(DIR) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        if let Ok(name) = entry?.file_name().into_string()
            && name.starts_with(prefix)
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// Runs `work` on its own thread and waits. Changes to the namespace of that thread end with it.
pub fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("keiki-netns".into()).spawn_scoped(scope, work)?;
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the namespace thread panicked")))
    })
}

/// Runs `work` on its own thread inside the namespace at `path`, and waits.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = open(path)?;
    on_own_thread(move || {
        enter(&namespace)?;
        work()
    })
}

/// Makes the directory a shared mount, as `ip netns` does. Mount namespaces copied from this one,
/// such as those of services, then see new names and removals.
fn prepare_dir() -> io::Result<()> {
    std::fs::create_dir_all(DIR)?;
    let flags = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
    match mount_change(DIR, flags) {
        Err(Errno::INVAL) => {
            mount_bind_recursive(DIR, DIR)?;
            Ok(mount_change(DIR, flags)?)
        }
        changed => Ok(changed?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_namespace_is_refused() {
        let file = tempfile::NamedTempFile::new().expect("temporary file");
        let error = open(file.path()).expect_err("refused");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_thread_of_its_own_does_not_move_the_caller() {
        if !keiki_testing::is_root() {
            return;
        }
        let name = format!("keiki-systest-{}", std::process::id());
        let before = std::fs::read_link("/proc/thread-self/ns/net").expect("link");
        let there = on_own_thread(|| {
            create(&name)?;
            std::fs::read_link("/proc/thread-self/ns/net")
        });
        let again = inside(&path(&name), || std::fs::read_link("/proc/thread-self/ns/net"));
        let taken = on_own_thread(|| create(&name));
        remove(&name).expect("removed");
        remove(&name).expect("removing twice is no error");
        let there = there.expect("made");
        assert_ne!(there, before);
        assert_eq!(again.expect("entered"), there);
        assert_eq!(taken.expect_err("taken").kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_link("/proc/thread-self/ns/net").expect("link"), before);
        assert!(list(&name).expect("listed").is_empty());
    }
}
