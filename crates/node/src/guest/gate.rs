//! The release gate: a thawed copy assumes its identity and acknowledges it; only then do its user
//! processes resume.

use super::link::{
    GuestLink, LIMITS, Limits, entropy, failed, key_request, open, plain, sealed_to, unreached, within,
};
use crate::error::Result;
use keiki_protocol::{
    client::{ConnectError, Met, Opened},
    gate::Ask,
    guest::{Identity, SealedSecrets, ThawUserRequest},
    seal::Plain,
};
use keiki_sys::stopwatch::Stopwatch;
use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tonic::Status;

/// A round trip this short measures the guest's clock well enough; otherwise the shortest of
/// several is used.
const CLOCK_ROUND: Duration = Duration::from_millis(30);
const CLOCK_TRIES: usize = 4;
/// Steps of the gate that a guest may report.
const STEPS: usize = 16;

/// The secrets of a copy: the new ones, and which of its present ones it keeps.
#[derive(Debug, Clone, Default)]
pub struct Secrets {
    /// New ones.
    pub give: Vec<Plain>,
    /// Names.
    pub keep: Vec<String>,
}

/// A machine whose user processes are frozen, and the connection to its agent.
pub struct Gate {
    opened: Opened,
    met: Met,
    socket: PathBuf,
    generation: u64,
    limits: Limits,
}

impl Gate {
    /// Connects and shakes hands.
    pub async fn open(socket: &Path, generation: u64) -> Result<Self> {
        Self::open_within(LIMITS, socket, generation).await
    }

    pub(super) async fn open_within(limits: Limits, socket: &Path, generation: u64) -> Result<Self> {
        let (opened, met) = open(socket, generation, limits.connect).await?;
        Ok(Self { opened, met, socket: socket.into(), generation, limits })
    }

    /// Gives the copy its identity and secrets, and resumes its user processes once it has
    /// acknowledged them. Two calls: a guest that does not acknowledge its identity must run
    /// nothing. On error the copy must not be released.
    pub async fn release(
        mut self,
        identity: Identity,
        secrets: Secrets,
        watch: &mut Stopwatch,
    ) -> Result<GuestLink> {
        for (step, took) in self.assume_identity(identity, secrets).await? {
            watch.note(format!("guest:{step}"), took);
        }
        watch.lap("individualize");
        self.call("thaw its processes", &ThawUserRequest {}).await?;
        let link = GuestLink::over(self.opened, self.socket, self.generation, self.limits).await?;
        watch.lap("thaw_user");
        Ok(link)
    }

    /// Returns the guest's own step times once it has acknowledged. User processes are still
    /// frozen.
    async fn assume_identity(
        &mut self,
        identity: Identity,
        secrets: Secrets,
    ) -> Result<Vec<(String, Duration)>> {
        const WHAT: &str = "assume its new identity";
        let sealed = self.sealed(&secrets.give).await?;
        let (unix, uptime_ms) = self.clocks().await?;
        let identity = Identity {
            generation: self.generation,
            entropy: entropy().into(),
            unix_nanos: u64::try_from(unix.as_nanos()).unwrap_or(u64::MAX),
            uptime_ms,
            secrets: Some(sealed),
            keep_secrets: secrets.keep,
            ..identity
        };
        let ack = self.call(WHAT, &identity).await?;
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

    /// Our wall clock and the guest's uptime, of one moment. The order to set its clock may take
    /// long to arrive on a busy host; these are as far apart as half of a round trip at most: the
    /// handshake's if that was quick. Else hello is said again: a guest that has just been thawed
    /// takes longer.
    async fn clocks(&mut self) -> Result<(Duration, u64)> {
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
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let since = best.answered.elapsed() + round(&best) / 2;
        Ok((now.saturating_sub(since), best.hello.uptime_ms))
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
