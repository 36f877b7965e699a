//! Network namespaces with a name, and threads inside them.
//!
//! A namespace belongs to a *thread*. Whoever wants to work inside one does so on a thread made for it
//! ([`Entry`] runs it and ends it), never on a thread that goes back to a pool: sockets opened there stay in
//! the namespace for their whole life, wherever they are used later.
//!
//! A name is a bind mount of the namespace on a file in `/run/netns`, as `ip netns` makes them, so that the
//! usual tools see ours and the namespace outlives the thread that made it.

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

/// The network namespace of the calling thread, kept open.
pub fn current() -> io::Result<OwnedFd> {
    open(Path::new("/proc/thread-self/ns/net"))
}

/// Opens a named namespace. An error of kind `NotFound` if there is none of that name, `InvalidData` if the
/// file is there but no namespace is mounted on it.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let fd = rustix::fs::openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    // A leftover of a creation that was cut short is an empty regular file on some other file system.
    if rustix::fs::fstatfs(&fd)?.f_type as i64 != NSFS_MAGIC {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no namespace is mounted here"));
    }
    Ok(fd)
}

/// `NSFS_MAGIC` of `linux/magic.h`.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Puts the calling thread into a namespace, for the rest of its life. Call it on threads made for the purpose.
pub fn enter(namespace: &OwnedFd) -> io::Result<()> {
    use std::os::fd::AsFd;
    Ok(move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?)
}

/// Makes a namespace called `name` and puts the calling thread into it, for the rest of its life. On error
/// nothing of that name is left. An error of kind `AlreadyExists` if the name is taken.
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
    // SAFETY: NEWNET alone changes which network stack this thread's new sockets use; the descriptor table
    // stays shared, which is what the safety condition is about.
    let made = unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
        .and_then(|()| mount_bind("/proc/thread-self/ns/net", &path));
    if let Err(errno) = made {
        let _ = std::fs::remove_file(&path);
        return Err(errno.into());
    }
    Ok(())
}

/// Removes the name. The namespace itself ends when the last process and socket in it does. Gone already: no
/// error.
pub fn remove(name: &str) -> io::Result<()> {
    let path = path(name);
    // More than one mount may lie on the name if a mount namespace was copied; take them all.
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

/// Runs `work` on a thread of its own and waits. What it does to its namespace ends with it.
pub fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("keiki-netns".into()).spawn_scoped(scope, work)?;
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the namespace thread panicked")))
    })
}

/// Runs `work` inside the namespace at `path`, on a thread of its own, and waits.
pub fn inside<T: Send>(path: &Path, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    let namespace = open(path)?;
    on_own_thread(move || {
        enter(&namespace)?;
        work()
    })
}

/// Makes the directory a shared mount of its own, as `ip netns` does: names made here are then seen (and their
/// removal too) in mount namespaces copied from this one, such as those of services.
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
