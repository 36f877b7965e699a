//! A node for these tests: it has one sandbox, a few files in memory, and commands that play a part.

use crate::metrics::Metrics;
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use keiki_api::{
    ByteStream, Commands, Control, Dialed, Error, ExecEvent, Files, Host, Once, Ports, Previews, ReadFrom,
    Reading, Result, Sandboxes, Secret, Session, Templates, Trees, Unpacking, request,
};
use keiki_types::{
    EngineKind, SandboxId, SnapshotId, Status, TemplateName,
    api::{
        Build, BuildTemplate, CreateSandbox, Event, EventKind, ExecRequest, ForkSandbox, Forked, FsChange,
        FsEntry, FsEvent, FsUnpacked, Lifecycle, Port, Promote, Promoted, Sandbox, SetLifecycle, Snapshot,
        Template, Timings, Version,
        execs::{Exec, Signal, StartExec},
    },
};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::mpsc,
};

/// Text whose bytes are line ends in other encodings.
pub(super) const TRAPS: &str = "х…Å\u{2028}é";

#[derive(Default)]
pub(super) struct Twin {
    pub key: Option<&'static str>,
    /// What was asked of it.
    pub calls: Arc<Mutex<Vec<String>>>,
    /// The names that requests came with.
    pub named: Mutex<Vec<Once>>,
    pub files: Mutex<BTreeMap<String, Vec<u8>>>,
    pub counters: Metrics,
    /// Sessions that live.
    pub sessions: Arc<AtomicUsize>,
}

pub(super) fn the_sandbox() -> SandboxId {
    "0190b7a0-0000-7000-8000-000000000001".parse().unwrap()
}

pub(super) fn sandbox(id: SandboxId) -> Sandbox {
    Sandbox {
        id,
        template: "base".into(),
        template_version: "v".into(),
        cpu: 1,
        memory_mb: 256,
        disk_mb: 2048,
        status: Status::Running,
        guest_ip: String::new(),
        created_at: "2026-01-01T00:00:00Z".into(),
        metadata: [("of".into(), "parent".into())].into(),
        from_snapshot: None,
        boot_ms: 1,
        boot_mode: "create".into(),
        persistent: false,
        ttl_seconds: 3600,
        idle_seconds: 0,
        parent_sandbox_id: None,
        parent_snapshot_id: None,
        generation: 1,
        engine: EngineKind::Qemu,
        memory: None,
        cpu_ms: None,
        timings: None,
        error: None,
    }
}

impl Twin {
    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn known(&self, id: SandboxId) -> Result<Sandbox> {
        if id == the_sandbox() { Ok(sandbox(id)) } else { Err(Error::NotFound(format!("no sandbox {id}"))) }
    }

    fn done(&self, id: SandboxId, call: String) -> Result<()> {
        self.known(id)?;
        self.note(call);
        Ok(())
    }
}

/// Counts a session while it lives.
struct Living(Arc<AtomicUsize>);

impl Drop for Living {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Gives input back as output, and says what else came.
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

/// What a command of this name sends; None: it goes on until its input ends.
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
        _ => return None,
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

fn event(seq: u64) -> Event {
    Event {
        seq,
        at: "2026-01-01T00:00:00Z".into(),
        sandbox_id: the_sandbox(),
        kind: EventKind::Paused,
        reason: None,
        ms: None,
        parent_sandbox_id: None,
        snapshot_id: None,
        children: Vec::new(),
    }
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
impl Host for Twin {
    fn version(&self) -> Version {
        Version { version: "0".into(), engine: "qemu".into() }
    }

    fn authorize(&self, key: Option<&str>) -> Result<()> {
        if self.key.is_none() || self.key == key { Ok(()) } else { Err(Error::Unauthorized) }
    }

    fn previews(&self) -> Previews {
        Previews::new([3; 32], "preview.test", self.key.is_none()).unwrap()
    }

    fn request_key(&self) -> Secret {
        [7; 32]
    }

    async fn metrics(&self) -> Result<String> {
        Ok(String::new())
    }

    async fn events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: Option<usize>,
    ) -> Result<Vec<Event>> {
        of.map_or(Ok(()), |id| self.known(id).map(drop))?;
        let all = (1..=5).map(event);
        let skipped = usize::try_from(since.unwrap_or(0)).unwrap();
        Ok(all.skip(skipped).take(limit.unwrap_or(usize::MAX)).collect())
    }

    async fn follow_events(
        &self,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> Result<BoxStream<'static, Event>> {
        Ok(stream::iter(self.events(of, since, None).await?).chain(stream::pending()).boxed())
    }
}

#[async_trait]
impl Sandboxes for Twin {
    async fn create(&self, request: CreateSandbox, once: Option<Once>) -> Result<Sandbox> {
        self.named.lock().unwrap().extend(once);
        match request.template.as_deref() {
            Some("busy") => {
                Err(Error::Busy { why: "base is being built".into(), retry_after: Duration::from_millis(1) })
            }
            Some("panic") => panic!("the twin was told to"),
            _ => Ok(sandbox(the_sandbox())),
        }
    }

    async fn list(&self, memory: bool) -> Result<Vec<Sandbox>> {
        self.note(format!("list {memory}"));
        Ok(vec![sandbox(the_sandbox())])
    }

    async fn get(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn delete(&self, id: SandboxId) -> Result<()> {
        self.known(id).map(drop)
    }

    async fn fork(
        &self,
        id: SandboxId,
        request: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<Once>,
    ) -> Result<Forked> {
        self.named.lock().unwrap().extend(once);
        let count = request::fork_count(request.count)?;
        self.done(id, format!("fork {request:?}"))?;
        let mut metadata = request.metadata.unwrap_or_else(|| sandbox(id).metadata);
        metadata.extend(labels);
        let child = Sandbox { metadata, ..sandbox(SandboxId::new()) };
        let children = vec![child; count];
        Ok(Forked { parent_id: id, sandbox: children[0].clone(), children, timings: Timings::default() })
    }

    async fn promote(&self, id: SandboxId, request: Promote) -> Result<Promoted> {
        self.done(id, format!("promote {request:?}"))?;
        Ok(Promoted { winner: id, tree_id: "t".into(), deleted: Vec::new(), failures: BTreeMap::new() })
    }

    async fn pause(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn resume(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn hibernate(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn wake(&self, id: SandboxId) -> Result<Sandbox> {
        self.known(id)
    }

    async fn lifecycle(&self, id: SandboxId) -> Result<Lifecycle> {
        self.known(id)?;
        Ok(Lifecycle { ttl_seconds: 3600, persistent: false, idle_seconds: 0 })
    }

    async fn set_lifecycle(&self, id: SandboxId, request: SetLifecycle) -> Result<Lifecycle> {
        self.done(id, format!("set_lifecycle {request:?}"))?;
        self.lifecycle(id).await
    }

    async fn console(&self, id: SandboxId, _: usize) -> Result<Bytes> {
        self.known(id)?;
        Ok("hello é\nworld\n".into())
    }

    async fn snapshot(&self, id: SandboxId, once: Option<Once>) -> Result<Snapshot> {
        self.named.lock().unwrap().extend(once);
        self.known(id)?;
        Err(Error::NoRoom("a snapshot needs 300 MiB; 10 MiB are free".into()))
    }

    async fn snapshots(&self, of: Option<SandboxId>) -> Result<Vec<Snapshot>> {
        self.note(format!("snapshots {of:?}"));
        Ok(Vec::new())
    }

    async fn get_snapshot(&self, id: SnapshotId) -> Result<Snapshot> {
        Err(Error::NotFound(format!("no snapshot {id}")))
    }

    async fn delete_snapshot(&self, id: SnapshotId) -> Result<()> {
        Err(Error::NotFound(format!("no snapshot {id}")))
    }
}

#[async_trait]
impl Templates for Twin {
    async fn templates(&self) -> Result<Vec<Template>> {
        Ok(Vec::new())
    }

    async fn get_template(&self, name: &TemplateName) -> Result<Template> {
        Err(Error::NotFound(format!("no template {name}")))
    }

    async fn delete_template(&self, name: &TemplateName) -> Result<()> {
        Err(Error::NotFound(format!("no template {name}")))
    }

    async fn build_template(&self, request: BuildTemplate) -> Result<Build> {
        self.note(format!("build {request:?}"));
        Ok(Build {
            id: "b".into(),
            name: request.name,
            status: "queued".into(),
            error: String::new(),
            started_at: String::new(),
            ended_at: String::new(),
            step: String::new(),
        })
    }

    async fn builds(&self) -> Result<Vec<Build>> {
        Ok(Vec::new())
    }

    async fn get_build(&self, id: &str) -> Result<Build> {
        Err(Error::NotFound(format!("no build {id}")))
    }

    async fn build_log(&self, id: &str) -> Result<BoxStream<'static, String>> {
        match id {
            "b" => Ok(stream::iter(["one".to_owned(), "end".to_owned()]).boxed()),
            "slow" => Ok(stream::iter(["one".to_owned()]).chain(stream::pending()).boxed()),
            _ => Err(Error::NotFound(format!("no build {id}"))),
        }
    }
}

#[async_trait]
impl Commands for Twin {
    async fn exec(&self, id: SandboxId, request: ExecRequest, pty: Option<(u32, u32)>) -> Result<Session> {
        request::command(&request)?;
        pty.map(|(cols, rows)| request::terminal(cols, rows)).transpose()?;
        let cmd = request.cmd.unwrap_or_default();
        self.done(id, format!("exec {cmd} {pty:?}"))?;
        self.sessions.fetch_add(1, Ordering::SeqCst);
        let living = Living(self.sessions.clone());
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
            return Err(Error::Conflict("the twin has no tail".into()));
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
impl Files for Twin {
    async fn read_file(&self, id: SandboxId, path: &str) -> Result<Reading> {
        self.known(id)?;
        let missing = || Error::NotFound(format!("no file {path}"));
        let data = self.files.lock().unwrap().get(path).cloned().ok_or_else(missing)?;
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
        self.files.lock().unwrap().insert(path.into(), whole);
        Ok(length)
    }

    async fn list_dir(&self, id: SandboxId, path: &str) -> Result<Vec<FsEntry>> {
        self.done(id, format!("list_dir {path}"))?;
        Ok(Vec::new())
    }

    async fn stat(&self, id: SandboxId, path: &str) -> Result<FsEntry> {
        self.known(id)?;
        Err(Error::NotFound(format!("no file {path}")))
    }

    async fn mkdir(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("mkdir {change:?}"))
    }

    async fn rename(&self, id: SandboxId, change: FsChange) -> Result<()> {
        self.done(id, format!("rename {change:?}"))
    }

    async fn remove(&self, id: SandboxId, change: FsChange) -> Result<()> {
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
impl Trees for Twin {
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
impl Ports for Twin {
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
            // It says something, ends its own side at once, and notes what comes then.
            13 => {
                let noted = Arc::clone(&self.calls);
                tokio::spawn(async move {
                    let (mut from, mut to) = tokio::io::split(far);
                    let _ = to.write_all(b"now").await;
                    let _ = to.shutdown().await;
                    let mut all = Vec::new();
                    let ended = from.read_to_end(&mut all).await.is_ok();
                    noted.lock().unwrap().push(format!("port 13 got {} {ended}", all.len()));
                });
            }
            80 => super::proxy::serve(far),
            _ => return Err(Error::Unreachable(format!("nothing listens on port {port} in the sandbox"))),
        }
        Ok(Box::new(near))
    }
}
