//! The release gate: a copy that was thawed becomes a new individual, says so, and only then do its user processes go on.

use super::{
    GuestLink, LIMITS, Limits, entropy, failed, key_request, open, plain, sealed_to, unreached, within,
};
use crate::{clock::Clock, error::Result};
use keiki_protocol::{
    client::{ConnectError, Met, Opened},
    gate::Ask,
    guest::{Individual, SealedSecrets, ThawUserRequest},
    seal::Plain,
};
use keiki_types::Origin;
use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tonic::Status;

/// A round trip this short tells the guest's clock well enough; of longer ones, the shortest of so many.
const CLOCK_ROUND: Duration = Duration::from_millis(30);
const CLOCK_TRIES: usize = 4;
/// Steps of the gate that a guest may tell of.
const STEPS: usize = 16;

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

/// Our wall clock and the guest's uptime, of one moment. The order to set its clock may take long to arrive on a busy
/// host; these are as far apart as half of a round trip at most.
#[derive(Debug, Clone, Copy)]
struct Clocks {
    unix: Duration,
    uptime_ms: u64,
}

impl Clocks {
    /// Of the middle of a round trip that has ended.
    fn of(met: &Met) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            unix: now.saturating_sub(met.answered.elapsed() + round(met) / 2),
            uptime_ms: met.hello.uptime_ms,
        }
    }
}

/// A machine whose user processes stand still, and the connection to its agent.
pub struct Gate {
    opened: Opened,
    met: Met,
    socket: PathBuf,
    generation: u64,
    limits: Limits,
}

impl Gate {
    /// Connects and shakes hands.
    ///
    /// # Errors
    /// If the guest does not answer in time or its agent is of another age.
    pub async fn open(socket: &Path, generation: u64) -> Result<Self> {
        Self::open_within(LIMITS, socket, generation).await
    }

    pub(super) async fn open_within(limits: Limits, socket: &Path, generation: u64) -> Result<Self> {
        let (opened, met) = open(socket, generation, limits.connect).await?;
        Ok(Self { opened, met, socket: socket.into(), generation, limits })
    }

    /// Makes the copy a new individual, and lets its user processes go on once it has said so: in a call of their own, for
    /// a guest that does not say so is to run nothing.
    ///
    /// # Errors
    /// If it does not acknowledge exactly this generation, or does not go on: the copy must not be released then.
    pub async fn release(mut self, new: NewIdentity, clock: &mut Clock) -> Result<GuestLink> {
        for (step, took) in self.individualize(new).await? {
            clock.note(&format!("guest:{step}"), took);
        }
        clock.lap("individualize");
        self.call("thaw its processes", &ThawUserRequest {}).await?;
        let link = GuestLink::over(self.opened, self.socket, self.generation, self.limits).await?;
        clock.lap("thaw_user");
        Ok(link)
    }

    /// Returns the guest's own step times once it acknowledged. User processes still stand.
    async fn individualize(&mut self, new: NewIdentity) -> Result<Vec<(String, Duration)>> {
        const WHAT: &str = "take on its new identity";
        let secrets = self.sealed(&new.secrets.give).await?;
        let clocks = self.clocks().await?;
        let individual = Individual {
            generation: self.generation,
            entropy: entropy().into(),
            unix_nanos: u64::try_from(clocks.unix.as_nanos()).unwrap_or(u64::MAX),
            hostname: new.hostname,
            reason: new.origin.as_str().into(),
            sandbox_id: new.id,
            parent_sandbox_id: new.parent_sandbox_id,
            parent_snapshot_id: new.parent_snapshot_id,
            secrets: Some(secrets),
            keep_secrets: new.secrets.keep,
            is_new: new.origin != Origin::Wake,
            run_hooks: !new.is_bake,
            uptime_ms: clocks.uptime_ms,
        };
        let ack = self.call(WHAT, &individual).await?;
        if ack.generation != self.generation {
            let what = format!("acknowledged generation {} instead of {}", ack.generation, self.generation);
            return Err(failed(WHAT, Status::internal(what)));
        }
        Ok(ack
            .steps
            .into_iter()
            .take(STEPS)
            .map(|s| (plain(&s.step), Duration::from_micros(s.micros)))
            .collect())
    }

    /// Secrets as they may cross the channel. None: no call.
    async fn sealed(&mut self, secrets: &[Plain]) -> Result<SealedSecrets> {
        if secrets.is_empty() {
            return Ok(SealedSecrets::default());
        }
        sealed_to(within(self.limits.call, self.opened.call(&key_request())).await, secrets)
    }

    /// The clocks, as the handshake had them if that was quick. Else hello is said again: a guest that has just been
    /// thawed takes longer.
    async fn clocks(&mut self) -> Result<Clocks> {
        let mut best = self.met;
        for _ in 0..CLOCK_TRIES {
            if round(&best) < CLOCK_ROUND {
                break;
            }
            let met = tokio::time::timeout(self.limits.call, self.opened.meet()).await;
            let met = met.unwrap_or(Err(ConnectError::Timeout(self.limits.call))).map_err(unreached)?;
            if round(&met) < round(&best) {
                best = met;
            }
        }
        Ok(Clocks::of(&best))
    }

    async fn call<A: Ask>(&mut self, what: &str, ask: &A) -> Result<A::Reply> {
        let done = within(self.limits.call, self.opened.call(ask)).await;
        done.map_err(|status| failed(what, status))
    }
}

/// How long an answer took.
fn round(met: &Met) -> Duration {
    met.answered - met.asked
}
