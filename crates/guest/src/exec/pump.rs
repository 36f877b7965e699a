//! The tasks of a session: one per output stream, one for its end.
//!
//! A command has ended when its leader has exited and everything in its pipes at that moment has
//! been read. A child in the background may hold the pipes open for ever: it gets a short grace
//! period for output on its way. After that its output is still read, so that it never blocks, but
//! dropped.

use super::session::{Channel, Session};
use crate::cgroup::Group;
use keiki_protocol::guest::Exit;
use rustix::{io::Errno, process::WaitStatus};
use std::{
    cell::RefCell,
    io,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::ExitStatus,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{io::unix::AsyncFd, sync::oneshot, time::timeout};

const SCRATCH: usize = 64 << 10;
/// For output on its way when the leader has exited but another process holds the pipe.
const GRACE: Duration = Duration::from_millis(30);

thread_local! {
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; SCRATCH]);
}

/// An output stream of a command.
#[derive(Debug, Clone)]
pub struct Source {
    channel: Channel,
    file: Arc<AsyncFd<OwnedFd>>,
    over: Arc<AtomicBool>,
}

impl Source {
    /// `file` is the agent's end of `channel`.
    pub fn new(channel: Channel, file: Arc<AsyncFd<OwnedFd>>) -> Self {
        Self { channel, file, over: Arc::default() }
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }

    /// Bytes waiting in the pipe.
    fn waiting(&self) -> u64 {
        rustix::io::ioctl_fionread(self.file.get_ref()).unwrap_or(0)
    }
}

/// Reads a stream to its end.
pub async fn pump(session: Arc<Session>, source: Source) {
    loop {
        let room = match session.room(source.channel) {
            Ok(room) => room,
            Err(limit) => {
                session.wait_for(limit, |session| session.room(source.channel).ok()).await;
                continue;
            }
        };
        match read_some(&session, &source, room) {
            Ok(0) => break,
            Ok(_) => tokio::task::yield_now().await,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => match source.file.readable().await {
                Ok(mut ready) => {
                    // Clears readiness only if it still has nothing: data may have come since the
                    // read.
                    let _ = ready.try_io(|_| match read_some(&session, &source, room) {
                        Ok(0) => {
                            source.over.store(true, Ordering::Relaxed);
                            Ok(())
                        }
                        result => result.map(drop),
                    });
                    if source.is_over() {
                        break;
                    }
                }
                Err(_) => break,
            },
            Err(_) => break,
        }
    }
    source.over.store(true, Ordering::Relaxed);
    session.touch();
}

/// Reads once. 0 at the end. A terminal without holders reads as an error.
fn read_some(session: &Session, source: &Source, room: usize) -> io::Result<usize> {
    BUFFER.with_borrow_mut(|buffer| {
        let size = buffer.len().min(room);
        let got = match rustix::io::read(source.file.get_ref(), &mut buffer[..size]) {
            Err(Errno::IO) => 0,
            Err(Errno::INTR) => return Err(io::ErrorKind::WouldBlock.into()),
            result => result?,
        };
        if got > 0 {
            session.push(source.channel, &buffer[..got]);
        }
        Ok(got)
    })
}

/// Waits until the leader exits, and kills the whole group after `limit`. Finishes the session when
/// all output is read.
pub async fn supervise(
    session: Arc<Session>,
    sources: Vec<Source>,
    mut leader: oneshot::Receiver<WaitStatus>,
    limit: Option<Duration>,
) {
    let mut timed_out = false;
    let status = match limit {
        None => leader.await,
        Some(limit) => match timeout(limit, &mut leader).await {
            Ok(status) => status,
            Err(_) => {
                timed_out = true;
                // A group that cannot be killed is empty.
                let _ = session.with_group(Group::kill);
                leader.await
            }
        },
    };
    session.leader_ended();
    let duration = session.started.elapsed();
    let due: Vec<u64> = sources.iter().map(|source| session.end(source.channel) + source.waiting()).collect();
    session
        .wait_for(None, |session| {
            let mut left = sources.iter().zip(&due);
            left.all(|(source, &due)| source.is_over() || session.end(source.channel) >= due).then_some(())
        })
        .await;
    let all_over = |_: &Session| sources.iter().all(Source::is_over).then_some(());
    session.wait_for(Some(GRACE), all_over).await;
    let code = status.map_or(255, |status| exit_code(ExitStatus::from_raw(status.as_raw())));
    let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    session.finish(Exit { code, timed_out, message: String::new(), duration_ms });
}

/// The exit code, as a shell reports it.
fn exit_code(status: ExitStatus) -> i32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 255,
    }
}

#[cfg(test)]
mod tests {
    use super::exit_code;
    use std::process::Command;

    #[test]
    fn codes_are_those_of_a_shell() {
        // Statuses come from the kernel, so the test does not repeat their encoding.
        for (line, code) in [("exit 0", 0), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)] {
            let status = Command::new("/bin/sh").args(["-c", line]).status().unwrap();
            assert_eq!(exit_code(status), code, "{line}");
        }
    }
}
