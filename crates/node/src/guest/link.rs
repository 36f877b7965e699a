//! The node's end of the agent channel: a connection to a released machine, and calls that survive
//! its loss.

use crate::error::{Error, Result};
use keiki_protocol::{
    client::{ConnectError, Met, Opened},
    guest::{
        FlushRequest, FreezeUserRequest, ReadSecretsRequest, SealedSecrets, SecretKeyReply, SecretKeyRequest,
        ThawUserRequest, WipeSecretsRequest, guest_client::GuestClient,
    },
    seal::{Key, Plain, SealError, seal},
};
use rand::RngCore;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::{Code, Status, transport::Channel};

/// Time limit for a guest to answer a hello.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Each call of the release gate and of the freeze order is bounded by this.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// Any other call with a single answer: a caller's request may take the guest a while.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Concurrent calls of unknown length; the rest are for short calls.
const MAX_STREAMS: usize = keiki_protocol::MAX_CALLS as usize * 3 / 4;
/// Characters of a guest's message that are passed on in an error.
const SAID: usize = 300;
/// User processes must be frozen within this time, or the freeze fails.
const FREEZE_LIMIT_MS: u32 = 5_000;
/// Bytes of fresh entropy that each copy gets.
const ENTROPY_BYTES: usize = 256;

/// How long a guest may take.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub connect: Duration,
    pub call: Duration,
    pub answer: Duration,
}

pub(super) const LIMITS: Limits = Limits { connect: CONNECT_LIMIT, call: CALL_LIMIT, answer: ANSWER_LIMIT };

/// A connection to the agent of one machine; renewed when it breaks.
pub struct GuestLink {
    socket: PathBuf,
    generation: u64,
    limits: Limits,
    client: tokio::sync::Mutex<GuestClient<Channel>>,
    streams: Arc<Semaphore>,
    closed: AtomicBool,
}

impl GuestLink {
    /// To a machine that was released before, for example after a restart of the node. A new copy
    /// comes through its [`Gate`].
    pub async fn connect(socket: &Path, generation: u64) -> Result<Self> {
        let opened = open_released(socket, generation, LIMITS.connect).await?;
        Self::over(opened, socket.into(), generation, LIMITS).await
    }

    pub(super) async fn over(
        opened: Opened,
        socket: PathBuf,
        generation: u64,
        limits: Limits,
    ) -> Result<Self> {
        let client = tokio::sync::Mutex::new(opened.client().await.map_err(unreached)?);
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        Ok(Self { socket, generation, limits, client, streams, closed: AtomicBool::new(false) })
    }

    /// A client to call with. Cheap; streams of several clients share the connection.
    pub async fn client(&self) -> GuestClient<Channel> {
        self.client.lock().await.clone()
    }

    /// A place among the calls that last as long as their caller likes, so that others always find
    /// one.
    pub fn stream(&self) -> Result<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().map_err(|_| Error::Busy {
            why: format!("{MAX_STREAMS} commands, connections and streams are open in this sandbox"),
            retry_after: Duration::from_secs(1),
        })
    }

    /// Replaces a broken connection.
    pub async fn reconnect(&self) -> Result<GuestClient<Channel>> {
        let mut client = self.client.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::internal(
                "the guest's agent does not answer",
                anyhow::anyhow!("it has ended"),
            ));
        }
        let opened = open_released(&self.socket, self.generation, self.limits.connect).await?;
        *client = opened.client().await.map_err(unreached)?;
        Ok(client.clone())
    }

    /// Never connects again: the machine ends, and the next one of this sandbox listens at the same
    /// place.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Calls the agent; on a broken connection once more over a new one. For calls that may be
    /// repeated. Whatever the guest does, it ends within a time: a deadline in the request alone
    /// would leave that to the guest.
    pub async fn call<R, T, F>(
        &self,
        request: R,
        send: impl Fn(GuestClient<Channel>, R) -> F,
    ) -> Result<T, Status>
    where
        R: Clone,
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let answer = async {
            match send(self.client().await, request.clone()).await {
                Err(status) if is_broken(&status) => {
                    let client = self.reconnect().await;
                    let client = client.map_err(|error| Status::unavailable(error.to_string()))?;
                    send(client, request).await
                }
                answer => answer,
            }
        };
        within(self.limits.answer, answer).await.map(tonic::Response::into_inner)
    }

    /// Writes dirty disk data out ahead of a freeze, so that the pause need not.
    pub async fn flush(&self) -> Result<()> {
        let call = self
            .call(FlushRequest {}, |mut guest, request| async move { guest.flush(limited(request)).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("flush its disk", status))
    }

    /// Freezes all user processes.
    pub async fn freeze_user(&self) -> Result<()> {
        let request = FreezeUserRequest { timeout_ms: FREEZE_LIMIT_MS };
        let call =
            self.call(request, |mut guest, request| async move { guest.freeze_user(limited(request)).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("freeze its processes", status))
    }

    /// Reads secrets of the machine, while its user processes are frozen.
    pub async fn read_secrets(&self, names: &[String]) -> Result<Vec<Plain>> {
        let (key, public_key) = Key::new();
        let request = ReadSecretsRequest { names: names.to_vec(), public_key: public_key.into() };
        // Not repeated: a second answer would be sealed to the same key, which opens only one.
        let mut client = self.client().await;
        let read = within(self.limits.call, client.read_secrets(limited(request))).await;
        let read = read.map_err(|status| failed("hand over its secrets", status))?.into_inner();
        key.open(&read).map_err(|error| unsealed("hand over its secrets", error))
    }

    /// Overwrites them in place.
    pub async fn wipe_secrets(&self, names: &[String]) -> Result<()> {
        let request = WipeSecretsRequest { names: names.to_vec() };
        let call = self
            .call(request, |mut guest, request| async move { guest.wipe_secrets(limited(request)).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("wipe its secrets", status))
    }

    /// Writes them into their files again.
    pub async fn put_secrets(&self, secrets: &[Plain]) -> Result<()> {
        let sealed = self.sealed(secrets).await?;
        // Not repeated over a new connection: the guest's key opens only one message.
        let mut client = self.client().await;
        let done = within(self.limits.call, client.put_secrets(limited(sealed))).await;
        done.map(drop).map_err(|status| failed("restore its secrets", status))
    }

    /// Secrets as they may cross the channel: sealed to a key that the guest makes for them.
    async fn sealed(&self, secrets: &[Plain]) -> Result<SealedSecrets> {
        let mut client = self.client().await;
        let asked = client.secret_key(limited(key_request()));
        sealed_to(within(self.limits.call, asked).await.map(tonic::Response::into_inner), secrets)
    }

    /// Thaws them.
    pub async fn thaw_user(&self) -> Result<()> {
        let request = ThawUserRequest {};
        let call =
            self.call(request, |mut guest, request| async move { guest.thaw_user(limited(request)).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("thaw its processes", status))
    }
}

/// Whether the connection is gone, as opposed to a refusal by the agent.
pub fn is_broken(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled)
        || (status.code() == Code::Unknown && std::error::Error::source(status).is_some())
}

/// What the agent's answer to a request of the API's caller means to that caller.
pub fn refusal(status: &Status) -> Error {
    let said = plain(status.message());
    match status.code() {
        Code::NotFound => Error::NotFound(said),
        Code::AlreadyExists | Code::FailedPrecondition => Error::Conflict(said),
        Code::InvalidArgument | Code::PermissionDenied | Code::OutOfRange => Error::Invalid(said),
        Code::ResourceExhausted => Error::NoRoom(said),
        // Reported by the agent, not by the transport: something in the guest cannot be read,
        // opened or started.
        Code::Internal if !said.is_empty() && std::error::Error::source(status).is_none() => {
            Error::Conflict(said)
        }
        Code::Unimplemented => other_age(),
        Code::DeadlineExceeded => Error::Timeout(format!("timeout: {said}")),
        _ => Error::internal("the sandbox's agent failed", anyhow::Error::new(quoted(status))),
    }
}

/// A guest's message, fit for a terminal and a log: short, and without control characters.
pub fn plain(said: &str) -> String {
    let mut characters = said.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut text: String = characters.by_ref().take(SAID).collect();
    if characters.next().is_some() {
        text.push('…');
    }
    text
}

/// The same status in such words, and without what else came with it.
fn quoted(status: &Status) -> Status {
    Status::new(status.code(), plain(status.message()))
}

/// Gives up after `limit`.
pub async fn within<T>(limit: Duration, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = || Status::deadline_exceeded(format!("no answer within {} ms", limit.as_millis()));
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(late()))
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_LIMIT);
    request
}

pub(super) fn failed(what: &str, status: Status) -> Error {
    let why = plain(status.message());
    Error::internal(format!("the guest did not {what}: {why}"), anyhow::Error::new(quoted(&status)))
}

fn unsealed(what: &str, error: SealError) -> Error {
    failed(what, Status::internal(error.to_string()))
}

/// Asks for a key that secrets are sealed to.
pub(super) fn key_request() -> SecretKeyRequest {
    SecretKeyRequest { entropy: entropy().into() }
}

/// Seals them to the key that the guest answered with.
pub(super) fn sealed_to(key: Result<SecretKeyReply, Status>, secrets: &[Plain]) -> Result<SealedSecrets> {
    let key = key.map_err(|status| failed("create a key for its secrets", status))?;
    seal(&key.public_key, secrets).map_err(|error| unsealed("create a key for its secrets", error))
}

/// Randomness for a guest.
pub(super) fn entropy() -> Vec<u8> {
    let mut bytes = vec![0; ENTROPY_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    bytes
}

/// Performs the handshake with the agent behind a socket.
pub(super) async fn open(socket: &Path, generation: u64, limit: Duration) -> Result<(Opened, Met)> {
    let stream = UnixStream::connect(socket).await.map_err(|error| unreached(error.into()))?;
    Opened::open(stream, generation, limit).await.map_err(unreached)
}

/// Also checks that the machine has the identity of this generation.
async fn open_released(socket: &Path, generation: u64, limit: Duration) -> Result<Opened> {
    let (opened, met) = open(socket, generation, limit).await?;
    if met.hello.generation == generation {
        return Ok(opened);
    }
    let why = format!("it has generation {} instead of {generation}", met.hello.generation);
    Err(Error::internal("the machine was not released", anyhow::anyhow!(why)))
}

pub(super) fn unreached(error: ConnectError) -> Error {
    match error {
        ConnectError::Version { .. } => other_age(),
        error => Error::internal("the guest's agent does not answer", error),
    }
}

/// An agent is as old as the template that its machine comes from.
fn other_age() -> Error {
    Error::Conflict(
        "the agent in this machine has a different version than this node: bake its template again (`keiki template rebake \
         NAME`), and create the sandbox or snapshot from it"
            .into(),
    )
}
