//! The agent port as an asynchronous byte stream.
//!
//! A virtio-console port can be opened only once, so it stays open for the agent's life, across all
//! connections. Without a host it reads as ended and polls as hung up. An event loop takes a
//! hang-up as final, but here the host comes back. So the port is in its own epoll instance, which
//! reports each change once, and the runtime watches that instance.

use rustix::{
    event::{Timespec, epoll},
    fs::{Mode, OFlags},
    io::Errno,
};
use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    task::{Context, Poll, ready},
    time::Duration,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    time::timeout,
};

const CLASS: &str = "/sys/class/virtio-ports";

/// An open port.
#[derive(Debug)]
pub struct Port {
    file: OwnedFd,
    changes: AsyncFd<OwnedFd>,
}

impl Port {
    /// Opens the port that the host calls `name`. Its number differs between machines.
    pub fn open(name: &str) -> io::Result<Self> {
        let path = find(name)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        Self::new(rustix::fs::open(path, flags, Mode::empty())?)
    }

    fn new(file: OwnedFd) -> io::Result<Self> {
        let changes = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&changes, &file, epoll::EventData::new_u64(0), flags)?;
        let changes = crate::sys::watch(changes, Interest::READABLE)?;
        Ok(Self { file, changes })
    }

    /// Reads what is there. 0 if there is no host. For one task at a time, together with
    /// [`Port::poll_write`].
    pub fn poll_read(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        self.poll(context, || rustix::io::read(&self.file, &mut *buffer))
    }

    /// Writes what fits.
    pub fn poll_write(&self, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(context, || rustix::io::write(&self.file, bytes))
    }

    /// Waits at most `limit` for a change: a host may have connected.
    pub async fn changed(&self, limit: Duration) {
        if let Ok(Ok(mut ready)) = timeout(limit, self.changes.readable()).await {
            take_events(self.changes.get_ref().as_fd());
            ready.clear_ready();
        }
    }

    fn poll<T>(
        &self,
        context: &mut Context<'_>,
        mut operation: impl FnMut() -> rustix::io::Result<T>,
    ) -> Poll<io::Result<T>> {
        loop {
            match operation() {
                Err(Errno::AGAIN) => {}
                Err(Errno::INTR) => continue,
                result => return Poll::Ready(Ok(result?)),
            }
            let mut ready = ready!(self.changes.poll_read_ready(context))?;
            take_events(self.changes.get_ref().as_fd());
            ready.clear_ready();
        }
    }
}

/// Consumes the events so far.
fn take_events(changes: impl AsFd) {
    let mut events = Vec::with_capacity(1);
    // No event is fine: the caller tries the port itself.
    let _ = epoll::wait(changes, rustix::buffer::spare_capacity(&mut events), Some(&Timespec::default()));
}

fn find(name: &str) -> io::Result<PathBuf> {
    for entry in fs::read_dir(CLASS)? {
        let entry = entry?;
        if fs::read_to_string(entry.path().join("name")).is_ok_and(|text| text.trim_end() == name) {
            return Ok(Path::new("/dev").join(entry.file_name()));
        }
    }
    Err(io::ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::Port;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::{future::poll_fn, time::Duration};

    #[tokio::test]
    async fn reads_and_writes_wake_in_both_directions() {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let port = Port::new(ours).unwrap();
        let mut theirs = std::os::unix::net::UnixStream::from(theirs);
        theirs.set_nonblocking(false).unwrap();
        let peer = std::thread::spawn(move || {
            use std::io::{Read, Write};
            std::thread::sleep(Duration::from_millis(30));
            theirs.write_all(b"one").unwrap();
            let mut all = vec![0; 1 << 20];
            theirs.read_exact(&mut all).unwrap();
            all
        });
        let mut buffer = [0; 8];
        let got = poll_fn(|cx| port.poll_read(cx, &mut buffer)).await.unwrap();
        assert_eq!(&buffer[..got], b"one");
        let mut left = 1usize << 20;
        while left > 0 {
            left -= poll_fn(|cx| port.poll_write(cx, &vec![7; left])).await.unwrap();
        }
        assert!(peer.join().unwrap().iter().all(|&byte| byte == 7));
        assert_eq!(poll_fn(|cx| port.poll_read(cx, &mut buffer)).await.unwrap(), 0);
    }
}
