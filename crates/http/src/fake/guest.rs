//! What is inside the sandboxes of a [`FakeNode`]: scripted commands, and files in memory.

use super::{FakeNode, lock};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use keiki_api::{
    ByteStream, Commands, Control, Dialed, Error, ExecEvent, Files, Ports, ReadFrom, Reading, Result,
    Session, Trees, Unpacking, request,
};
use keiki_types::{
    SandboxId,
    api::{
        ExecRequest, FsChange, FsEntry, FsEvent, FsUnpacked, Port,
        execs::{Exec, Signal, StartExec},
    },
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};

/// What the command `traps` prints: text whose bytes are line ends in other encodings.
pub(crate) const TRAPS: &str = "х…Å\u{2028}é";

/// Counts a session while it lives.
struct Living(Arc<AtomicUsize>);

impl Drop for Living {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Echoes input as output, and reports everything else that arrives.
struct Echo(mpsc::UnboundedSender<ExecEvent>);

#[async_trait]
impl Control for Echo {
    async fn input(&self, data: Bytes, eof: bool) -> Result<()> {
        self.0
            .send(if eof { exit(7) } else { ExecEvent::Stdout { offset: 0, data } })
            .map_err(|_| Error::Conflict("over".into()))
    }

    async fn signal(&self, signal: i32) -> Result<()> {
        self.input(format!("signal {signal};").into(), false).await
    }

    async fn resize(&self, cols: u32, rows: u32) -> Result<()> {
        self.input(format!("size {cols}x{rows};").into(), false).await
    }

    fn leave(&self) {
        let _ = self.0.send(ExecEvent::Stdout { offset: 0, data: "left;".into() });
    }
}

fn exit(code: i32) -> ExecEvent {
    ExecEvent::Exit { code, timed_out: false, message: String::new(), duration_ms: 3 }
}

fn out(bytes: &[u8]) -> ExecEvent {
    ExecEvent::Stdout { offset: 0, data: Bytes::copy_from_slice(bytes) }
}

/// What a command of this name sends; None: it echoes its input until that ends.
fn script(cmd: &str) -> Option<Vec<ExecEvent>> {
    Some(match cmd {
        "traps" => TRAPS.bytes().map(|byte| out(&[byte])).chain([exit(0)]).collect(),
        "binary" => vec![
            out(b"a\xff"),
            out(b"\xc3"),
            ExecEvent::Stderr { offset: 0, data: Bytes::from_static(b"e") },
            exit(3),
        ],
        "big" => std::iter::repeat_n(out(&vec![b'x'; 1 << 20]), 17).chain([exit(0)]).collect(),
        "late" => {
            vec![ExecEvent::Exit { code: 137, timed_out: true, message: String::new(), duration_ms: 5000 }]
        }
        "none" => {
            let message = "none: not found".into();
            vec![ExecEvent::Exit { code: 127, timed_out: false, message, duration_ms: 0 }]
        }
        "lost" => vec![out(b"half")],
        _ => match cmd.split_once(' ') {
            Some(("echo", words)) => vec![out(format!("{words}\n").as_bytes()), exit(0)],
            Some(("exit", code)) => vec![exit(code.parse().unwrap_or(2))],
            _ => return None,
        },
    })
}

/// The events of a command, each where it belongs in its stream.
fn placed(
    events: BoxStream<'static, Result<ExecEvent>>,
    [mut out, mut err]: [u64; 2],
) -> BoxStream<'static, Result<ExecEvent>> {
    let events = events.map(move |event| {
        Ok(match event? {
            ExecEvent::Stdout { data, .. } => {
                out += data.len() as u64;
                ExecEvent::Stdout { offset: out - data.len() as u64, data }
            }
            ExecEvent::Stderr { data, .. } => {
                err += data.len() as u64;
                ExecEvent::Stderr { offset: err - data.len() as u64, data }
            }
            exit => exit,
        })
    });
    events.boxed()
}

/// The one command that is known by its id.
fn known_exec() -> Exec {
    Exec {
        id: "x1".into(),
        status: "running".into(),
        argv: vec!["sleep".into()],
        pid: 7,
        started_at: "2026-01-01T00:00:00Z".into(),
        pty: false,
        background: true,
        attached: false,
        stdout_bytes: 10,
        stderr_bytes: 0,
        exit_code: None,
        timed_out: false,
        duration_ms: None,
    }
}

#[async_trait]
impl Commands for FakeNode {
    async fn exec(&self, id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Result<Session> {
        request::check_command(&request)?;
        pty.map(|(cols, rows)| request::terminal(cols, rows)).transpose()?;
        let cmd = request.cmd.unwrap_or_else(|| request.argv.unwrap_or_default().join(" "));
        self.done(id, format!("exec {cmd} {pty:?}"))?;
        self.sessions.fetch_add(1, Ordering::SeqCst);
        let living = Living(Arc::clone(&self.sessions));
        let (input, echoed) = mpsc::unbounded_channel();
        let control = Arc::new(Echo(input.clone()));
        let events = match script(&cmd) {
            Some(events) => stream::iter(events).boxed(),
            // It keeps its own input open, so it ends only by an exit.
            None => stream::unfold((echoed, input), |(mut echoed, input)| async {
                let event = echoed.recv().await?;
                Some((event, (echoed, input)))
            })
            .boxed(),
        };
        let events = events.map(move |event| {
            let _ = &living;
            Ok(event)
        });
        let events = placed(events.boxed(), [0, 0]);
        Ok(Session { id: "x1".into(), offsets: [0, 0], events, control })
    }

    async fn start_exec(&self, id: SandboxId, request: StartExec) -> Result<Exec> {
        self.done(id, format!("start {:?} {} {:?}", request.command.cmd, request.stdin_open, request.pty))?;
        Ok(known_exec())
    }

    async fn execs(&self, id: SandboxId) -> Result<Vec<Exec>> {
        self.known(id)?;
        Ok(vec![known_exec()])
    }

    async fn get_exec(&self, id: SandboxId, exec: &str) -> Result<Exec> {
        self.known(id)?;
        if exec == "x1" { Ok(known_exec()) } else { Err(Error::NotFound(format!("no command {exec:?}"))) }
    }

    async fn attach_exec(&self, id: SandboxId, exec: &str, from: ReadFrom) -> Result<Session> {
        self.get_exec(id, exec).await?;
        self.note(format!("attach {exec} {from:?}"));
        let ReadFrom::Offsets(offsets) = from else {
            return Err(Error::Conflict("a fake command has no tail".into()));
        };
        let events = placed(stream::iter(vec![Ok(out("é".as_bytes())), Ok(exit(0))]).boxed(), offsets);
        let control = Arc::new(Echo(mpsc::unbounded_channel().0));
        Ok(Session { id: exec.into(), offsets, events, control })
    }

    async fn signal_exec(&self, id: SandboxId, exec: &str, signal: Signal) -> Result<()> {
        self.get_exec(id, exec).await?;
        self.done(id, format!("signal {exec} {signal:?}"))
    }

    async fn write_exec(&self, id: SandboxId, exec: &str, mut data: ByteStream, eof: bool) -> Result<u64> {
        self.get_exec(id, exec).await?;
        let mut bytes = 0;
        while let Some(chunk) = data.next().await.transpose()? {
            bytes += chunk.len() as u64;
        }
        self.done(id, format!("stdin {exec} {bytes} {eof}"))?;
        Ok(bytes)
    }

    async fn remove_exec(&self, id: SandboxId, exec: &str) -> Result<()> {
        self.get_exec(id, exec).await.map(drop)
    }
}

#[async_trait]
impl Files for FakeNode {
    async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading> {
        self.known(id)?;
        let data = self.files_of(id).remove(path).ok_or_else(|| no_file(path))?;
        let size = if path.starts_with("/proc") { 0 } else { data.len() as u64 };
        let pieces = data.chunks(1000).map(|piece| Ok(Bytes::copy_from_slice(piece))).collect::<Vec<_>>();
        Ok(Reading { size, mode: 0o100_640, chunks: stream::iter(pieces).boxed() })
    }

    async fn write_file(
        &self,
        id: SandboxId,
        path: &str,
        mode: Option<u32>,
        mut data: ByteStream,
    ) -> Result<u64> {
        self.known(id)?;
        let mut whole = Vec::new();
        while let Some(chunk) = data.next().await.transpose()? {
            whole.extend_from_slice(&chunk);
        }
        self.note(format!("write {path} {mode:?}"));
        let length = whole.len() as u64;
        lock(&self.files).insert((id, path.into()), whole);
        Ok(length)
    }

    async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        self.done(id, format!("list_dir {path}"))?;
        let dir = format!("{}/", path.trim_end_matches('/'));
        let mut entries = BTreeMap::new();
        for (path, data) in self.files_of(id) {
            let Some((name, below)) = path
                .strip_prefix(&dir)
                .map(|rest| rest.split_once('/').map_or((rest, None), |(a, b)| (a, Some(b))))
            else {
                continue;
            };
            entries.insert(
                name.to_owned(),
                entry(&format!("{dir}{name}"), below.is_none().then_some(data.len())),
            );
        }
        if entries.is_empty() && path != "/" {
            Err(no_file(path))
        } else {
            Ok(entries.into_values().collect())
        }
    }

    async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        self.known(id)?;
        let data = self.files_of(id).remove(path).ok_or_else(|| no_file(path))?;
        Ok(entry(path, Some(data.len())))
    }

    async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("mkdir {change:?}"))
    }

    async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("rename {change:?}"))
    }

    async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()> {
        lock(&self.files).remove(&(id, change.path.clone()));
        self.done(id, format!("remove {} {}", change.path, change.recursive))
    }

    async fn chmod(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("chmod {change:?}"))
    }

    async fn symlink(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("symlink {change:?}"))
    }
}

#[async_trait]
impl Trees for FakeNode {
    async fn pack(&self, id: SandboxId, path: &str) -> Result<ByteStream> {
        self.done(id, format!("pack {path}"))?;
        let broken = Err(Error::Conflict("it shrank".into()));
        Ok(stream::iter([Ok(Bytes::from_static(b"tar")), broken])
            .take(1 + usize::from(path == "/broken"))
            .boxed())
    }

    async fn unpack(
        &self,
        id: SandboxId,
        path: &str,
        how: Unpacking,
        mut data: ByteStream,
    ) -> Result<FsUnpacked> {
        let mut bytes = 0;
        while let Some(chunk) = data.next().await.transpose()? {
            bytes += chunk.len() as u64;
        }
        self.done(id, format!("unpack {path} {how:?} {bytes}"))?;
        Ok(FsUnpacked { path: path.into(), files: 1, dirs: 0, symlinks: 0, bytes })
    }

    async fn watch(
        &self,
        id: SandboxId,
        path: &str,
        recursive: bool,
    ) -> Result<BoxStream<'static, Result<FsEvent>>> {
        self.done(id, format!("watch {path} {recursive}"))?;
        let event = FsEvent { kind: "ready".into(), path: "/é".into(), from: None, is_dir: true };
        Ok(stream::iter([Ok(event), Err(Error::Conflict("it was deleted".into()))]).boxed())
    }
}

#[async_trait]
impl Ports for FakeNode {
    async fn ports(&self, id: SandboxId) -> Result<Vec<Port>> {
        self.known(id)?;
        Ok(vec![Port { port: 7, address: "127.0.0.1".into(), pid: Some(9), process: Some("echo".into()) }])
    }

    async fn dial(&self, id: SandboxId, port: u16) -> Result<Dialed> {
        self.known(id)?;
        let (near, far) = tokio::io::duplex(1024);
        match port {
            // It gives back what it gets, and ends when that ends.
            7 => drop(tokio::spawn(async move {
                let (mut from, mut to) = tokio::io::split(far);
                let _ = tokio::io::copy(&mut from, &mut to).await;
                let _ = to.shutdown().await;
            })),
            // It sends something, closes its own side at once, and records what arrives afterwards.
            13 => {
                let noted = Arc::clone(&self.calls);
                tokio::spawn(async move {
                    let (mut from, mut to) = tokio::io::split(far);
                    let _ = to.write_all(b"now").await;
                    let _ = to.shutdown().await;
                    let mut all = Vec::new();
                    let ended = from.read_to_end(&mut all).await.is_ok();
                    lock(&noted).push(format!("port 13 got {} {ended}", all.len()));
                });
            }
            80 => super::web::serve(far),
            _ => return Err(Error::Unreachable(format!("nothing listens on port {port} in the sandbox"))),
        }
        Ok(Box::new(near))
    }
}

impl FakeNode {
    fn files_of(&self, id: SandboxId) -> BTreeMap<String, Vec<u8>> {
        let files = lock(&self.files);
        files
            .iter()
            .filter(|((of, _), _)| *of == id)
            .map(|((_, path), data)| (path.clone(), data.clone()))
            .collect()
    }
}

/// A file of this size, or a directory.
fn entry(path: &str, size: Option<usize>) -> FsEntry {
    FsEntry {
        name: path.rsplit('/').next().unwrap_or_default().into(),
        path: path.into(),
        kind: if size.is_some() { "file" } else { "dir" }.into(),
        is_dir: size.is_none(),
        size: size.unwrap_or(0) as u64,
        mode: "0640".into(),
        mtime: 0,
        target: None,
        uid: 0,
        gid: 0,
    }
}

fn no_file(path: &str) -> Error {
    Error::NotFound(format!("no file {path}"))
}
