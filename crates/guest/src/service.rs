//! The RPC service: passes each call on to the module that does it, and maps errors to codes.

use crate::{
    archive, cgroup, dial,
    exec::{ExecError, Execs, Launched, Reader, Spooled, end_user_work, event},
    files::{self, FileError, Upload},
    identity::{IdentityError, IdentityState, announce, secrets, uptime},
    log, ports,
    reaper::Reaper,
    watch,
};
use bytes::Bytes;
use futures::{Stream, stream};
use keiki_archive::{Counts, Options};
use keiki_protocol::guest::{
    AttachRequest, ChmodRequest, DialChunk, Done, Entry, ExecEvent, ExecSpec, FileChunk, FlushReply,
    FlushRequest, ForgetRequest, FreezeUserReply, FreezeUserRequest, Identity, IdentityAck, InfoReply,
    InfoRequest, InputChunk, InputReply, ListDirReply, ListExecsReply, ListExecsRequest, ListPortsReply,
    ListPortsRequest, MkdirRequest, PathRequest, Pty, ReadFileRequest, ReadSecretsRequest, RemoveRequest,
    RenameRequest, ResizeReply, ResizeRequest, SealedSecrets, SecretKeyReply, SecretKeyRequest,
    ShutdownRequest, SignalReply, SignalRequest, SymlinkRequest, ThawUserReply, ThawUserRequest, UnpackChunk,
    UnpackReply, WatchEvent, WatchRequest, WipeSecretsRequest, WriteChunk, WriteReply, exec_event::Event,
    guest_server::Guest,
};
use keiki_protocol::{
    gate::{Call, reply},
    seal::{Key, Plain, seal},
};
use keiki_sys::error_chain;
use std::{
    fs, io,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{
    sync::{Mutex, OwnedRwLockWriteGuard, mpsc},
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

type Answer<T> = Result<Response<T>, Status>;
type Events = Pin<Box<dyn Stream<Item = Result<ExecEvent, Status>> + Send>>;

/// Pieces of a file queued between the connection and the thread that reads or writes it.
const PIECES: usize = 4;
/// Events of a watch queued between the kernel and the connection.
const WATCHED_AHEAD: usize = 64;
const DEFAULT_FREEZE: Duration = Duration::from_secs(1);
/// A copy's first command comes before its announcement.
const ANNOUNCE_AFTER: Duration = Duration::from_millis(300);
const MAX_GRACE: Duration = Duration::from_secs(60);

/// The agent, shared by all connections.
#[derive(Debug, Clone)]
pub struct Agent {
    execs: Arc<Execs>,
    identity: Arc<IdentityState>,
    /// Set while user work is frozen: proves that no process is being started.
    frozen: Arc<Mutex<Option<OwnedRwLockWriteGuard<()>>>>,
    /// Opens the next sealed secrets.
    key: Arc<parking_lot::Mutex<Option<Key>>>,
}

impl Agent {
    /// No commands yet, generation 0.
    pub fn new(execs: Arc<Execs>, reaper: Arc<Reaper>) -> Self {
        Self {
            execs,
            identity: Arc::new(IdentityState::new(reaper)),
            frozen: Arc::default(),
            key: Arc::default(),
        }
    }

    /// The generation of the identity that this machine has.
    pub fn generation(&self) -> u64 {
        self.identity.generation()
    }

    /// Opens secrets that were sealed to the last key. The key is used up.
    fn open(&self, sealed: &SealedSecrets) -> Result<Vec<Plain>, Status> {
        if sealed.secrets.is_empty() {
            return Ok(vec![]);
        }
        let key = self.key.lock().take();
        let key = key.ok_or_else(|| Status::failed_precondition("no key was created for these secrets"))?;
        key.open(sealed).map_err(|error| Status::invalid_argument(error.to_string()))
    }

    /// Accepts all input of a command at once.
    async fn spool(&self, first: InputChunk, mut chunks: Streaming<InputChunk>) -> Answer<InputReply> {
        let mut spooled = Spooled::default();
        let (id, mut eof, mut next) = (first.id.clone(), false, Some(first));
        while let Some(chunk) = next {
            spooled.push(&chunk.data).map_err(exec_status)?;
            eof |= chunk.eof;
            next = chunks.message().await?;
        }
        let accepted = spooled.len() as u64;
        self.execs.spool(&id, spooled, eof).await.map_err(exec_status)?;
        Ok(Response::new(InputReply { accepted }))
    }

    /// Carries out a call of the release gate and returns the encoded reply.
    pub async fn gate(&self, call: Call) -> Bytes {
        match call {
            Call::SecretKey(ask) => reply(&self.new_key(&ask)),
            Call::AssumeIdentity(identity) => reply(&self.assume_identity(*identity).await),
            Call::ThawUser(_) => reply(&self.thaw().await),
        }
    }

    fn new_key(&self, ask: &SecretKeyRequest) -> Result<SecretKeyReply, Status> {
        IdentityState::refresh(&ask.entropy).map_err(identity_status)?;
        let (key, public_key) = Key::new();
        *self.key.lock() = Some(key);
        Ok(SecretKeyReply { public_key: public_key.into() })
    }

    async fn assume_identity(&self, mut identity: Identity) -> Result<IdentityAck, Status> {
        let given = self.open(&identity.secrets.take().unwrap_or_default())?;
        let ack = self.identity.assume(&identity, &given).await.map_err(identity_status)?;
        drop(given);
        let state = self.identity.clone();
        tokio::spawn(async move {
            sleep(ANNOUNCE_AFTER).await;
            // A copy made in the meantime has another identity and announces that one itself.
            if state.generation() != identity.generation {
                return;
            }
            log::line(&format!("generation {} ({})", identity.generation, identity.reason));
            if !identity.hostname.is_empty() {
                spawn_blocking(move || announce(&identity.hostname));
            }
        });
        Ok(ack)
    }

    async fn thaw(&self) -> Result<ThawUserReply, Status> {
        let begin = Instant::now();
        let mut frozen = self.frozen.lock().await;
        cgroup::thaw_user().map_err(|error| failed("thaw", &error))?;
        *frozen = None;
        Ok(ThawUserReply { micros: micros(begin) })
    }
}

#[tonic::async_trait]
impl Guest for Agent {
    type ExecStream = Events;
    type AttachStream = Events;
    type ReadFileStream = ReceiverStream<Result<FileChunk, Status>>;
    type PackStream = ReceiverStream<Result<FileChunk, Status>>;
    type WatchStream = ReceiverStream<Result<WatchEvent, Status>>;
    type DialStream = ReceiverStream<Result<DialChunk, Status>>;

    async fn info(&self, _: Request<InfoRequest>) -> Answer<InfoReply> {
        let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        Ok(Response::new(InfoReply {
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            generation: self.generation(),
            uptime_ms: uptime(),
            boot_id: boot_id.trim_end().to_owned(),
            user_frozen: self.frozen.lock().await.is_some(),
            // There is no service before that.
            ready: true,
        }))
    }

    async fn flush(&self, _: Request<FlushRequest>) -> Answer<FlushReply> {
        let begin = Instant::now();
        blocking(|| {
            let root = fs::File::open("/").map_err(|error| failed("flush", &error))?;
            rustix::fs::syncfs(&root).map_err(|error| failed("flush", &error.into()))
        })
        .await?;
        Ok(Response::new(FlushReply { micros: micros(begin) }))
    }

    async fn freeze_user(&self, request: Request<FreezeUserRequest>) -> Answer<FreezeUserReply> {
        let begin = Instant::now();
        let limit = match request.into_inner().timeout_ms {
            0 => DEFAULT_FREEZE,
            ms => Duration::from_millis(ms.into()),
        };
        let late = || {
            Status::deadline_exceeded(format!(
                "user processes did not freeze within {} ms",
                limit.as_millis()
            ))
        };
        let mut frozen = self.frozen.lock().await;
        if frozen.is_none() {
            let guard = timeout(limit, self.execs.hold()).await.map_err(|_| late())?;
            let left = limit.saturating_sub(begin.elapsed());
            cgroup::freeze_user(left).await.map_err(|error| match error.kind() {
                io::ErrorKind::TimedOut => late(),
                _ => failed("freeze", &error),
            })?;
            *frozen = Some(guard);
        }
        Ok(Response::new(FreezeUserReply { micros: micros(begin) }))
    }

    async fn thaw_user(&self, _: Request<ThawUserRequest>) -> Answer<ThawUserReply> {
        self.thaw().await.map(Response::new)
    }

    async fn secret_key(&self, request: Request<SecretKeyRequest>) -> Answer<SecretKeyReply> {
        self.new_key(&request.into_inner()).map(Response::new)
    }

    async fn read_secrets(&self, request: Request<ReadSecretsRequest>) -> Answer<SealedSecrets> {
        let ReadSecretsRequest { names, public_key } = request.into_inner();
        let secrets = secrets::read(&names).map_err(|error| failed("read the secrets", &error))?;
        let sealed = seal(&public_key, &secrets);
        sealed.map(Response::new).map_err(|error| Status::invalid_argument(error.to_string()))
    }

    async fn wipe_secrets(&self, request: Request<WipeSecretsRequest>) -> Answer<Done> {
        secrets::wipe(&request.into_inner().names).map_err(|error| failed("wipe the secrets", &error))?;
        Ok(Response::new(Done {}))
    }

    async fn put_secrets(&self, request: Request<SealedSecrets>) -> Answer<Done> {
        let secrets = self.open(&request.into_inner())?;
        secrets::put_back(&secrets).map_err(|error| failed("restore the secrets", &error))?;
        Ok(Response::new(Done {}))
    }

    async fn exec(&self, request: Request<ExecSpec>) -> Answer<Events> {
        let events: Events = match self.execs.launch(request.into_inner()).await.map_err(exec_status)? {
            Launched::Running(reader) => follow(reader),
            Launched::Refused(exit) => Box::pin(stream::iter([Ok(event(Event::Exit(exit)))])),
        };
        Ok(Response::new(events))
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Answer<Events> {
        let AttachRequest { id, stdout_offset, stderr_offset, polite } = request.into_inner();
        let reader = self.execs.attach(&id, [stdout_offset, stderr_offset], polite).map_err(exec_status)?;
        Ok(Response::new(follow(reader)))
    }

    async fn input(&self, request: Request<Streaming<InputChunk>>) -> Answer<InputReply> {
        let mut chunks = request.into_inner();
        let (mut id, mut accepted) = (String::new(), 0u64);
        while let Some(chunk) = chunks.message().await? {
            if chunk.spool {
                return self.spool(chunk, chunks).await;
            }
            if id.is_empty() {
                id = chunk.id;
            }
            let taken = match chunk.data.is_empty() {
                true => 0,
                false => self.execs.input(&id, &chunk.data).await.map_err(exec_status)?,
            };
            accepted += taken as u64;
            if chunk.eof {
                self.execs.end_input(&id).await.map_err(exec_status)?;
            }
            if chunk.eof || taken < chunk.data.len() {
                break;
            }
        }
        Ok(Response::new(InputReply { accepted }))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Answer<SignalReply> {
        let SignalRequest { id, signal, whole_group } = request.into_inner();
        self.execs.signal(&id, signal, whole_group).map_err(exec_status)?;
        Ok(Response::new(SignalReply {}))
    }

    async fn resize(&self, request: Request<ResizeRequest>) -> Answer<ResizeReply> {
        let ResizeRequest { id, pty } = request.into_inner();
        self.execs.resize(&id, &pty.unwrap_or(Pty { cols: 0, rows: 0 })).map_err(exec_status)?;
        Ok(Response::new(ResizeReply {}))
    }

    async fn list_execs(&self, _: Request<ListExecsRequest>) -> Answer<ListExecsReply> {
        Ok(Response::new(ListExecsReply { execs: self.execs.list() }))
    }

    async fn forget(&self, request: Request<ForgetRequest>) -> Answer<Done> {
        self.execs.forget(&request.into_inner().id).map_err(exec_status)?;
        Ok(Response::new(Done {}))
    }

    async fn read_file(&self, request: Request<ReadFileRequest>) -> Answer<Self::ReadFileStream> {
        let ReadFileRequest { path, offset, limit } = request.into_inner();
        files::absolute(&path).map_err(file_status)?;
        let (sender, receiver) = mpsc::channel(PIECES);
        spawn_blocking(move || {
            let result = files::absolute(&path).and_then(|path| {
                files::read(path, offset, limit, |chunk| sender.blocking_send(Ok(chunk)).is_ok())
            });
            if let Err(error) = result {
                // If this fails, the caller is gone.
                let _ = sender.blocking_send(Err(file_status(error)));
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn write_file(&self, request: Request<Streaming<WriteChunk>>) -> Answer<WriteReply> {
        let mut chunks = request.into_inner();
        let Some(first) = chunks.message().await? else {
            return Err(Status::invalid_argument("the first chunk must name the file"));
        };
        let header =
            first.header.ok_or_else(|| Status::invalid_argument("the first chunk must name the file"))?;
        // A piece and whether it is the last. A stream that ends without a last piece was cut off.
        let (sender, mut receiver) = mpsc::channel::<(Bytes, bool)>(PIECES);
        let writer = spawn_blocking(move || {
            let mut upload = Upload::begin(&header)?;
            while let Some((data, commit)) = receiver.blocking_recv() {
                upload.write(&data)?;
                if commit {
                    return upload.commit();
                }
            }
            Err(FileError::CutOff)
        });
        feed((first.data, first.commit), chunks, |chunk| (chunk.data, chunk.commit), sender).await?;
        let bytes = writer.await.map_err(lost)?.map_err(file_status)?;
        Ok(Response::new(WriteReply { bytes }))
    }

    async fn list_dir(&self, request: Request<PathRequest>) -> Answer<ListDirReply> {
        let path = request.into_inner().path;
        file_work(move || files::list(files::absolute(&path)?).map(|entries| ListDirReply { entries })).await
    }

    async fn stat(&self, request: Request<PathRequest>) -> Answer<Entry> {
        let path = request.into_inner().path;
        file_work(move || files::stat(files::absolute(&path)?)).await
    }

    async fn mkdir(&self, request: Request<MkdirRequest>) -> Answer<Done> {
        let MkdirRequest { path, parents, mode } = request.into_inner();
        file_work(move || files::mkdir(files::absolute(&path)?, parents, mode).map(done)).await
    }

    async fn rename(&self, request: Request<RenameRequest>) -> Answer<Done> {
        let RenameRequest { from, to } = request.into_inner();
        file_work(move || files::rename(files::absolute(&from)?, files::absolute(&to)?).map(done)).await
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Answer<Done> {
        let RemoveRequest { path, recursive } = request.into_inner();
        file_work(move || files::remove(files::absolute(&path)?, recursive).map(done)).await
    }

    async fn chmod(&self, request: Request<ChmodRequest>) -> Answer<Done> {
        let ChmodRequest { path, mode } = request.into_inner();
        file_work(move || files::chmod(files::absolute(&path)?, mode).map(done)).await
    }

    async fn symlink(&self, request: Request<SymlinkRequest>) -> Answer<Done> {
        let SymlinkRequest { target, link } = request.into_inner();
        file_work(move || files::symlink(&target, files::absolute(&link)?).map(done)).await
    }

    async fn pack(&self, request: Request<PathRequest>) -> Answer<Self::PackStream> {
        let path = request.into_inner().path;
        let (sender, receiver) = mpsc::channel(PIECES);
        let failures = sender.clone();
        spawn_blocking(move || {
            if let Err(error) = archive::pack(&path, sender) {
                // If this fails, the caller is gone.
                let _ = failures.blocking_send(Err(file_status(error)));
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn unpack(&self, request: Request<Streaming<UnpackChunk>>) -> Answer<UnpackReply> {
        let mut chunks = request.into_inner();
        let Some(first) = chunks.message().await? else {
            return Err(Status::invalid_argument("the first chunk must name the directory"));
        };
        let options = Options { owners: first.owners, special_bits: true, strip_top: first.strip_top };
        let (sender, pieces) = mpsc::channel(PIECES);
        let path = first.path;
        let unpacking = spawn_blocking(move || archive::unpack(&path, options, pieces));
        feed((first.data, first.commit), chunks, |chunk| (chunk.data, chunk.commit), sender).await?;
        let Counts { files, dirs, symlinks, bytes, .. } =
            unpacking.await.map_err(lost)?.map_err(file_status)?;
        Ok(Response::new(UnpackReply { files, dirs, symlinks, bytes }))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Answer<Self::WatchStream> {
        let WatchRequest { path, recursive } = request.into_inner();
        let (sender, receiver) = mpsc::channel(WATCHED_AHEAD);
        let failures = sender.clone();
        tokio::spawn(async move {
            if let Err(error) = watch::watch(path.to_vec(), recursive, sender).await {
                let _ = failures.send(Err(file_status(error))).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn dial(&self, request: Request<Streaming<DialChunk>>) -> Answer<Self::DialStream> {
        let mut chunks = request.into_inner();
        let stream = dial::connect(&mut chunks).await?;
        let (sender, receiver) = mpsc::channel(1);
        tokio::spawn(dial::carry(stream, chunks, sender));
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn list_ports(&self, _: Request<ListPortsRequest>) -> Answer<ListPortsReply> {
        let found = spawn_blocking(ports::list).await.map_err(lost)?;
        found.map(Response::new).map_err(|error| failed("list ports", &error))
    }

    async fn shutdown(&self, request: Request<ShutdownRequest>) -> Answer<Done> {
        let grace = Duration::from_millis(request.into_inner().grace_ms.into()).min(MAX_GRACE);
        let agent = self.clone();
        tokio::spawn(async move {
            // Send the answer first, and let frozen processes get the signal.
            sleep(Duration::from_millis(20)).await;
            let _ = cgroup::thaw_user();
            *agent.frozen.lock().await = None;
            end_user_work(grace).await;
            power_off();
        });
        Ok(Response::new(Done {}))
    }
}

/// Powers the machine off.
pub fn power_off() {
    rustix::fs::sync();
    for how in [rustix::system::RebootCommand::PowerOff, rustix::system::RebootCommand::Restart] {
        // Returns only if it failed.
        if let Err(error) = rustix::system::reboot(how) {
            log::line(&format!("power off: {error}"));
        }
    }
}

fn follow(reader: Reader) -> Events {
    Box::pin(stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((event, reader))
    }))
}

/// Passes on the pieces of a stream, each with whether it is the last, until the last one.
async fn feed<T>(
    first: (Bytes, bool),
    mut chunks: Streaming<T>,
    piece: fn(T) -> (Bytes, bool),
    sender: mpsc::Sender<(Bytes, bool)>,
) -> Result<(), Status> {
    let mut next = Some(first);
    while let Some((data, commit)) = next {
        // If this fails, the receiver has failed and reports why.
        if sender.send((data, commit)).await.is_err() || commit {
            break;
        }
        next = chunks.message().await?.map(piece);
    }
    Ok(())
}

fn done((): ()) -> Done {
    Done {}
}

fn micros(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_micros()).unwrap_or(u64::MAX)
}

/// Runs blocking work on another thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    spawn_blocking(work).await.map_err(lost)?
}

async fn file_work<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, FileError> + Send + 'static,
) -> Answer<T> {
    blocking(|| work().map_err(file_status)).await.map(Response::new)
}

fn lost(error: tokio::task::JoinError) -> Status {
    Status::internal(format!("the agent failed: {error}"))
}

fn failed(what: &str, error: &io::Error) -> Status {
    Status::internal(format!("{what}: {error}"))
}

fn identity_status(error: IdentityError) -> Status {
    match error {
        IdentityError::Generation { .. } => Status::failed_precondition(error.to_string()),
        IdentityError::Entropy(_) | IdentityError::Hostname => Status::invalid_argument(error.to_string()),
        IdentityError::Step(..) => Status::internal(error_chain(&error)),
    }
}

fn exec_status(error: ExecError) -> Status {
    let code = match &error {
        ExecError::Invalid(_) => Code::InvalidArgument,
        ExecError::Unknown(_) => Code::NotFound,
        ExecError::Exists(_) => Code::AlreadyExists,
        ExecError::TooMany | ExecError::InputFull => Code::ResourceExhausted,
        ExecError::Ended | ExecError::Taken | ExecError::Without(_) => Code::FailedPrecondition,
        ExecError::Group(error) if error.kind() == io::ErrorKind::AlreadyExists => Code::AlreadyExists,
        ExecError::Streams(_) | ExecError::Group(_) | ExecError::Agent(_) => Code::Internal,
    };
    Status::new(code, error_chain(&error))
}

fn file_status(error: FileError) -> Status {
    let code = match &error {
        FileError::Invalid(_) => Code::InvalidArgument,
        FileError::TooLarge(_) | FileError::TooMany(_) => Code::ResourceExhausted,
        FileError::CutOff => Code::Aborted,
        FileError::System { error, .. } => match error.raw_os_error() {
            Some(libc::ENOENT) => Code::NotFound,
            Some(libc::EEXIST) => Code::AlreadyExists,
            Some(libc::EACCES | libc::EPERM) => Code::PermissionDenied,
            Some(
                libc::ENOTDIR | libc::EISDIR | libc::ENAMETOOLONG | libc::EINVAL | libc::ELOOP | libc::EXDEV,
            ) => Code::InvalidArgument,
            Some(libc::ENOSPC | libc::EDQUOT) => Code::ResourceExhausted,
            Some(libc::ENOTEMPTY | libc::EBUSY | libc::EROFS | libc::ETXTBSY) => Code::FailedPrecondition,
            _ => Code::Internal,
        },
    };
    Status::new(code, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::file_status;
    use crate::files;
    use std::path::Path;
    use tonic::Code;

    #[test]
    fn system_errors_become_their_codes() {
        let code = |path: &str| file_status(files::list(Path::new(path)).unwrap_err()).code();
        assert_eq!(code("/no/such"), Code::NotFound);
        assert_eq!(code("/etc/passwd"), Code::InvalidArgument);
        assert_eq!(code(&format!("/{}", "x".repeat(300))), Code::InvalidArgument);
    }
}
