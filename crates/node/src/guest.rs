//! The node's end of the agent channel: connect, release, and calls that survive a broken connection.

use crate::{
    clock::Clock,
    error::{Error, Result},
};
use keiki_protocol::{
    client::Met,
    guest::{
        FlushRequest, FreezeUserRequest, Individual, InfoRequest, ReadSecretsRequest, SealedSecrets,
        SecretKeyRequest, ThawUserRequest, WipeSecretsRequest, guest_client::GuestClient,
    },
    handshake::SEALED_SECRETS,
    seal::{Key, Plain, SealError, seal},
};
use keiki_types::Origin;
use rand::RngCore;
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::UnixStream,
    sync::{OwnedSemaphorePermit, Semaphore},
};
use tonic::{Code, Status, transport::Channel};

/// A guest that does not say hello within this is given up.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Each call of the release gate and of the freeze order is bounded by this.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// Any other call that is answered once: what a caller asked for may take the guest a while.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Calls of unknown length at once; the others are for what is answered soon.
const MAX_STREAMS: usize = keiki_protocol::MAX_CALLS as usize * 3 / 4;
/// Characters of what a guest says that are passed on in an error.
const SAID: usize = 300;
/// User processes must stand still within this, or the freeze is refused.
const FREEZE_LIMIT_MS: u32 = 5_000;
/// A round trip this short tells the guest's clock well enough; of longer ones, the shortest of so many.
const CLOCK_ROUND: Duration = Duration::from_millis(30);
const CLOCK_TRIES: usize = 4;
/// Steps of the gate that a guest may tell of.
const STEPS: usize = 16;
/// Bytes of fresh entropy each new individual gets.
const ENTROPY_BYTES: usize = 256;

/// Our wall clock and the guest's uptime, of one moment. The order to set its clock may take long to arrive on a busy
/// host; these are as far apart as half of a round trip at most.
#[derive(Debug, Clone, Copy)]
struct Clocks {
    unix: Duration,
    uptime_ms: u64,
}

impl Clocks {
    /// Of the middle of a round trip that has ended.
    fn between(asked: Instant, answered: Instant, uptime_ms: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self { unix: now.saturating_sub(answered.elapsed() + (answered - asked) / 2), uptime_ms }
    }
}

/// How long a guest may take.
#[derive(Debug, Clone, Copy)]
struct Limits {
    connect: Duration,
    call: Duration,
    answer: Duration,
}

const LIMITS: Limits = Limits { connect: CONNECT_LIMIT, call: CALL_LIMIT, answer: ANSWER_LIMIT };

/// What a copy is to new.
#[derive(Debug, Clone)]
pub struct NewIdentity {
    /// How it came to be.
    pub origin: Origin,
    /// Its name.
    pub hostname: String,
    /// Of the sandbox; told to hooks, as are its ancestors'.
    pub id: String,
    /// Forked from.
    pub parent_sandbox_id: String,
    /// Restored from, or the nearest in its ancestry.
    pub parent_snapshot_id: String,
    /// What it may read.
    pub secrets: Secrets,
    /// A template is being baked: not a copy that anybody meets, so no hooks.
    pub is_bake: bool,
}

impl NewIdentity {
    /// With nothing but a name.
    #[must_use]
    pub fn named(origin: Origin, hostname: &str) -> Self {
        Self {
            origin,
            hostname: hostname.into(),
            id: String::new(),
            parent_sandbox_id: String::new(),
            parent_snapshot_id: String::new(),
            secrets: Secrets::default(),
            is_bake: false,
        }
    }
}

/// The secrets of a copy: those it is given, and which it keeps of those it came with.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// New ones.
    pub give: Vec<Plain>,
    /// Names.
    pub keep: Vec<String>,
}

/// A connection to the agent of one machine; renewed when it breaks.
pub struct GuestLink {
    socket: PathBuf,
    generation: u64,
    /// Of the protocol: the older of the agent's and ours.
    version: u16,
    clocks: Option<Clocks>,
    limits: Limits,
    client: tokio::sync::Mutex<GuestClient<Channel>>,
    streams: Arc<Semaphore>,
    closed: AtomicBool,
}

impl GuestLink {
    /// Connects and shakes hands.
    ///
    /// # Errors
    /// If the guest does not answer in time or speaks no common version.
    pub async fn connect(socket: &Path, generation: u64) -> Result<Self> {
        Self::connect_within(LIMITS, socket, generation).await
    }

    async fn connect_within(limits: Limits, socket: &Path, generation: u64) -> Result<Self> {
        let (client, met) = open(socket, generation, limits.connect).await?;
        let is_quick = met.answered - met.asked < CLOCK_ROUND && met.hello.uptime_ms > 0;
        let clocks = is_quick.then(|| Clocks::between(met.asked, met.answered, met.hello.uptime_ms));
        let client = tokio::sync::Mutex::new(client);
        let streams = Arc::new(Semaphore::new(MAX_STREAMS));
        Ok(Self {
            socket: socket.into(),
            generation,
            version: met.hello.agree().unwrap_or_default(),
            clocks,
            limits,
            client,
            streams,
            closed: AtomicBool::new(false),
        })
    }

    /// A client to call with. Cheap; streams of several clients share the connection.
    pub async fn client(&self) -> GuestClient<Channel> {
        self.client.lock().await.clone()
    }

    /// A place among the calls that last as long as their caller likes, so that others always find one.
    ///
    /// # Errors
    /// 503 if all are taken.
    pub fn stream(&self) -> Result<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().map_err(|_| Error::Busy {
            why: format!("{MAX_STREAMS} commands, connections and streams are open in this sandbox"),
            retry_after: Duration::from_secs(1),
        })
    }

    /// Replaces a broken connection.
    ///
    /// # Errors
    /// As [`GuestLink::connect`].
    pub async fn reconnect(&self) -> Result<GuestClient<Channel>> {
        let mut client = self.client.lock().await;
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::internal(
                "the guest's agent does not answer",
                anyhow::anyhow!("it has ended"),
            ));
        }
        (*client, _) = open(&self.socket, self.generation, self.limits.connect).await?;
        Ok(client.clone())
    }

    /// Never connects again: the machine ends, and the next one of this sandbox listens at the same place.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Calls the agent; on a broken connection once more over a new one. For calls that may be repeated. Whatever
    /// the guest does, it ends within a time: a deadline in the request alone would leave that to the guest.
    ///
    /// # Errors
    /// What the agent answered.
    pub async fn call<T, F>(&self, call: impl Fn(GuestClient<Channel>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        within(self.limits.answer, self.call_unbounded(call)).await
    }

    async fn call_unbounded<T, F>(&self, call: impl Fn(GuestClient<Channel>) -> F) -> Result<T, Status>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let first = call(self.client().await).await;
        let answer = match first {
            Err(status) if is_broken(&status) => {
                let client =
                    self.reconnect().await.map_err(|error| Status::unavailable(error.to_string()))?;
                call(client).await
            }
            answer => answer,
        };
        answer.map(tonic::Response::into_inner)
    }

    /// Writes dirty disk data out ahead of a freeze, so that the pause need not.
    ///
    /// # Errors
    /// If the guest does not do it in time.
    pub async fn flush(&self) -> Result<()> {
        let call = self.call(|mut guest| async move { guest.flush(limited(FlushRequest {})).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("flush its disk", status))
    }

    /// Makes all user processes stand still.
    ///
    /// # Errors
    /// If they do not in time; they run on then.
    pub async fn freeze_user(&self) -> Result<()> {
        let request = FreezeUserRequest { timeout_ms: FREEZE_LIMIT_MS };
        let call = self.call(|mut guest| async move { guest.freeze_user(limited(request)).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("freeze its processes", status))
    }

    /// Reads secrets of the machine, while its user processes stand still.
    ///
    /// # Errors
    /// If the guest does not hand them over.
    pub async fn read_secrets(&self, names: &[String]) -> Result<Vec<Plain>> {
        self.seals()?;
        let (key, public_key) = Key::new();
        let request = ReadSecretsRequest { names: names.to_vec(), public_key: public_key.into() };
        // Not repeated: the answer of another time is sealed to the same key, which opens one.
        let mut client = self.client().await;
        let read = within(self.limits.call, client.read_secrets(limited(request))).await;
        let read = read.map_err(|status| failed("hand its secrets over", status))?.into_inner();
        key.open(&read).map_err(|error| unsealed("hand its secrets over", error))
    }

    /// Overwrites them where they lie.
    ///
    /// # Errors
    /// If the guest does not.
    pub async fn wipe_secrets(&self, names: &[String]) -> Result<()> {
        let call = self.call(|mut guest| {
            let request = limited(WipeSecretsRequest { names: names.to_vec() });
            async move { guest.wipe_secrets(request).await }
        });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("wipe its secrets", status))
    }

    /// Writes them into their files again.
    ///
    /// # Errors
    /// If the guest does not take them.
    pub async fn put_secrets(&self, secrets: &[Plain]) -> Result<()> {
        let sealed = self.sealed(secrets).await?;
        // Not repeated over a new connection: the guest's key opens one message.
        let mut client = self.client().await;
        let done = within(self.limits.call, client.put_secrets(limited(sealed))).await;
        done.map(drop).map_err(|status| failed("take its secrets back", status))
    }

    /// Secrets as they may cross the channel: sealed to a key that the guest makes for them. None: no call.
    async fn sealed(&self, secrets: &[Plain]) -> Result<SealedSecrets> {
        if secrets.is_empty() {
            return Ok(SealedSecrets::default());
        }
        self.seals()?;
        let mut client = self.client().await;
        let asked = client.secret_key(limited(SecretKeyRequest { entropy: entropy().into() }));
        let key = within(self.limits.call, asked).await;
        let key = key.map_err(|status| failed("make a key for its secrets", status))?.into_inner();
        seal(&key.public_key, secrets).map_err(|error| unsealed("make a key for its secrets", error))
    }

    fn seals(&self) -> Result<()> {
        if self.version >= SEALED_SECRETS {
            return Ok(());
        }
        Err(Error::Conflict(
            "the agent of this sandbox is older than this node and takes no secrets: make the sandbox anew from a \
             template built by this node"
                .into(),
        ))
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// If the guest does not answer.
    pub async fn thaw_user(&self) -> Result<()> {
        let call = self.call(|mut guest| async move { guest.thaw_user(limited(ThawUserRequest {})).await });
        let done = within(self.limits.call, call).await;
        done.map(drop).map_err(|status| failed("thaw its processes", status))
    }

    /// The clocks, as the handshake had them if that was quick. Else it is asked, which takes a guest that has just
    /// been thawed longer.
    async fn clocks(&self) -> Result<Clocks> {
        if let Some(clocks) = self.clocks {
            return Ok(clocks);
        }
        let mut best: Option<(Duration, Clocks)> = None;
        for _ in 0..CLOCK_TRIES {
            let mut client = self.client().await;
            let begun = Instant::now();
            let info = within(self.limits.call, client.info(limited(InfoRequest {}))).await;
            let ended = Instant::now();
            let round = ended - begun;
            let info = info.map_err(|status| failed("take on its new identity", status))?.into_inner();
            if best.is_none_or(|(quickest, _)| round < quickest) {
                best = Some((round, Clocks::between(begun, ended, info.uptime_ms)));
            }
            if round < CLOCK_ROUND {
                break;
            }
        }
        let now = Instant::now();
        Ok(best.map_or_else(|| Clocks::between(now, now, 0), |(_, clocks)| clocks))
    }

    /// Makes the copy a new individual, and lets its user processes go on once it has said so: in a call of their own, for
    /// a guest that does not say so is to run nothing.
    ///
    /// # Errors
    /// If it does not acknowledge exactly this generation, or does not go on: the copy must not be released then.
    pub async fn release(&self, new: NewIdentity, clock: &mut Clock) -> Result<()> {
        for (step, took) in self.individualize(new).await? {
            clock.note(&format!("guest:{step}"), took);
        }
        clock.lap("individualize");
        self.thaw_user().await?;
        clock.lap("thaw_user");
        Ok(())
    }

    /// Makes the copy a new individual; returns the guest's own step times once it acknowledged. User processes still stand.
    ///
    /// # Errors
    /// If it does not acknowledge exactly this generation: the copy must not be released then.
    pub async fn individualize(&self, new: NewIdentity) -> Result<Vec<(String, Duration)>> {
        let secrets = self.sealed(&new.secrets.give).await?;
        let clocks = self.clocks().await?;
        let individual = Individual {
            generation: self.generation,
            entropy: entropy().into(),
            unix_nanos: u64::try_from(clocks.unix.as_nanos()).unwrap_or(u64::MAX),
            hostname: new.hostname,
            reason: new.origin.as_str().into(),
            // Only once the acknowledgement was found right.
            thaw_user: false,
            sandbox_id: new.id,
            parent_sandbox_id: new.parent_sandbox_id,
            parent_snapshot_id: new.parent_snapshot_id,
            secrets: Some(secrets),
            keep_secrets: new.secrets.keep,
            is_new: new.origin != Origin::Wake,
            run_hooks: !new.is_bake,
            uptime_ms: clocks.uptime_ms,
        };
        // Not repeated over a new connection: the guest refuses a generation it already has.
        let mut client = self.client().await;
        let ack = within(self.limits.call, client.individualize(limited(individual))).await;
        let ack = ack.map_err(|status| failed("take on its new identity", status))?.into_inner();
        if ack.generation != self.generation {
            let what = format!("acknowledged generation {} instead of {}", ack.generation, self.generation);
            return Err(failed("take on its new identity", Status::internal(what)));
        }
        Ok(ack
            .steps
            .into_iter()
            .take(STEPS)
            .map(|s| (plain(&s.step), Duration::from_micros(s.micros)))
            .collect())
    }
}

/// The connection is gone, as opposed to: the agent said no.
#[must_use]
pub fn is_broken(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled)
        || (status.code() == Code::Unknown && std::error::Error::source(status).is_some())
}

/// What the agent's answer to a request of the API's caller means to that caller.
#[must_use]
pub fn refusal(status: &Status) -> Error {
    let said = plain(status.message());
    match status.code() {
        Code::NotFound => Error::NotFound(said),
        Code::AlreadyExists | Code::FailedPrecondition => Error::Conflict(said),
        Code::InvalidArgument | Code::PermissionDenied | Code::OutOfRange => Error::Invalid(said),
        Code::ResourceExhausted => Error::NoRoom(said),
        // Said by the agent, not by the transport: something in the guest cannot be read, opened, started.
        Code::Internal if !said.is_empty() && std::error::Error::source(status).is_none() => {
            Error::Conflict(said)
        }
        Code::Unimplemented => Error::Conflict(
            "the agent of this sandbox is older than this node and cannot do this: make the sandbox anew from a \
             template built by this node"
                .into(),
        ),
        Code::DeadlineExceeded => Error::Timeout(format!("timeout: {said}")),
        _ => Error::internal("the sandbox's agent failed", anyhow::Error::new(quoted(status))),
    }
}

/// A guest's words, fit for a terminal and a log: few, and without control characters.
#[must_use]
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
///
/// # Errors
/// Those of the call; [`Code::DeadlineExceeded`] if it does not end.
pub async fn within<T>(limit: Duration, call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = || Status::deadline_exceeded(format!("no answer within {} ms", limit.as_millis()));
    tokio::time::timeout(limit, call).await.unwrap_or_else(|_| Err(late()))
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_LIMIT);
    request
}

fn failed(what: &str, status: Status) -> Error {
    let why = plain(status.message());
    Error::internal(format!("the guest did not {what}: {why}"), anyhow::Error::new(quoted(&status)))
}

fn unsealed(what: &str, error: SealError) -> Error {
    failed(what, Status::internal(error.to_string()))
}

/// Randomness for a guest.
fn entropy() -> Vec<u8> {
    let mut bytes = vec![0; ENTROPY_BYTES];
    rand::rng().fill_bytes(&mut bytes);
    bytes
}

async fn open(socket: &Path, generation: u64, limit: Duration) -> Result<(GuestClient<Channel>, Met)> {
    let connecting = async {
        let stream = UnixStream::connect(socket).await?;
        anyhow::Ok(keiki_protocol::client::connect(stream, generation, limit).await?)
    };
    connecting.await.map_err(|cause| Error::internal("the guest's agent does not answer", cause))
}

#[cfg(test)]
mod tests;
