//! Runs a program for the agent while user work is frozen: in its own control group, with a time
//! limit, and with the end of its output kept.

use crate::{
    cgroup::Group,
    reaper::Reaper,
    sys::{self, Plan, SpawnError},
};
use rustix::{
    fs::{Mode, OFlags},
    pipe::{PipeFlags, pipe_with},
};
use std::{
    ffi::CString,
    io,
    os::{
        fd::OwnedFd,
        unix::{ffi::OsStrExt, process::ExitStatusExt},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::{io::Interest, sync::Notify, task::spawn_blocking, time::timeout};

const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Bytes kept from the end of its output.
const OUTPUT_TAIL: usize = 1024;

/// How a program exited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exited {
    /// The exit code, as a shell reports it.
    pub code: i32,
    /// The end of its output.
    pub output: String,
}

/// Runs a program as root until it exits. After `limit`, or on `stop`, it is killed with all its
/// children.
pub async fn run(
    reaper: &Arc<Reaper>,
    program: &Path,
    arguments: Vec<String>,
    env: &[(&str, String)],
    limit: Duration,
    stop: &Notify,
) -> io::Result<Exited> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let group = Group::of_agent(&format!("program-{}", COUNT.fetch_add(1, Ordering::Relaxed)))?;
    let (output, plan) = plan(program, arguments, env)?;
    let start = reaper.start();
    // On another thread: its file may be on a slow disk.
    let (spawned, group) = spawn_blocking(move || (sys::spawn(&plan, group.directory()), group)).await?;
    let done = match spawned {
        Ok(pid) => tokio::select! {
            ended = watch(start.started(pid), output, limit, program) => ended,
            () = stop.notified() => Err(io::ErrorKind::Interrupted.into()),
        },
        Err(SpawnError::Child { error, .. }) => Err(error),
        Err(SpawnError::Clone(error)) => Err(error),
    };
    // Its background processes would run in a machine that is not released.
    let _ = group.kill();
    let mut tries = 0;
    while !group.remove() && tries < 100 {
        tries += 1;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    done
}

fn plan(program: &Path, arguments: Vec<String>, env: &[(&str, String)]) -> io::Result<(OwnedFd, Plan)> {
    let nothing = || rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let (output, sink) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // The program's end of the pipe blocks, as programs expect.
    rustix::fs::fcntl_setfl(&sink, OFlags::empty())?;
    let path = CString::new(program.as_os_str().as_bytes())?;
    let mut words = vec![path.clone()];
    for argument in arguments {
        words.push(CString::new(argument)?);
    }
    let mut settings = vec![CString::new(PATH)?, c"HOME=/root".into(), c"LANG=C.UTF-8".into()];
    for (name, value) in env {
        settings.push(CString::new(format!("{name}={value}"))?);
    }
    let stdio = [sys::duplicate(nothing()?)?, sys::duplicate(&sink)?, sys::duplicate(&sink)?];
    let plan = Plan {
        paths: vec![path],
        argv: words,
        env: settings,
        cwd: c"/".into(),
        cwd_optional: false,
        uid: 0,
        gid: 0,
        groups: vec![0],
        stdio,
        terminal: false,
    };
    Ok((output, plan))
}

async fn watch(
    ended: tokio::sync::oneshot::Receiver<rustix::process::WaitStatus>,
    output: OwnedFd,
    limit: Duration,
    program: &Path,
) -> io::Result<Exited> {
    let output = sys::watch(output, Interest::READABLE)?;
    let mut tail = Vec::new();
    let listen = async {
        let mut buffer = [0; 4096];
        loop {
            let got =
                output.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut buffer)?)).await?;
            if got == 0 {
                return io::Result::Ok(());
            }
            tail.extend_from_slice(&buffer[..got]);
            let excess = tail.len().saturating_sub(OUTPUT_TAIL);
            tail.drain(..excess);
        }
    };
    let both = async {
        tokio::pin!(listen);
        tokio::pin!(ended);
        let status = tokio::select! {
            _ = &mut listen => ended.await,
            status = &mut ended => {
                // Its output is in the pipe already; a child of it may hold the pipe open for
                // longer.
                let _ = timeout(Duration::from_millis(5), &mut listen).await;
                status
            }
        };
        status.map_err(io::Error::other)
    };
    let status = timeout(limit, both).await.map_err(|_| {
        let text = format!("{} did not exit within {:.0} s", program.display(), limit.as_secs_f64());
        io::Error::new(io::ErrorKind::TimedOut, text)
    })??;
    let status = std::process::ExitStatus::from_raw(status.as_raw());
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1);
    Ok(Exited { code, output: String::from_utf8_lossy(&tail).trim().to_owned() })
}
