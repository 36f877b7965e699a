//! The node's end of the agent channel: connect, release, and calls that survive a broken connection.

use crate::error::{Error, Result};
use keiki_protocol::guest::{
    FlushRequest, FreezeUserRequest, Individual, ThawUserRequest, guest_client::GuestClient,
};
use keiki_types::Origin;
use rand::RngCore;
use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tokio::net::UnixStream;
use tonic::{Code, Status, transport::Channel};

/// A guest that does not say hello within this is given up.
const CONNECT_LIMIT: Duration = Duration::from_secs(20);
/// Each call of the release gate and of the freeze order is bounded by this.
const CALL_LIMIT: Duration = Duration::from_secs(20);
/// User processes must stand still within this, or the freeze is refused.
const FREEZE_LIMIT_MS: u32 = 5_000;
/// Bytes of fresh entropy each new individual gets.
const ENTROPY_BYTES: usize = 256;

/// A connection to the agent of one machine; renewed when it breaks.
pub struct GuestLink {
    socket: PathBuf,
    generation: u64,
    client: tokio::sync::Mutex<GuestClient<Channel>>,
    closed: AtomicBool,
}

impl GuestLink {
    /// Connects and shakes hands.
    ///
    /// # Errors
    /// If the guest does not answer in time or speaks no common version.
    pub async fn connect(socket: &Path, generation: u64) -> Result<Self> {
        let client = tokio::sync::Mutex::new(open(socket, generation).await?);
        Ok(Self { socket: socket.into(), generation, client, closed: AtomicBool::new(false) })
    }

    /// A client to call with. Cheap; streams of several clients share the connection.
    pub async fn client(&self) -> GuestClient<Channel> {
        self.client.lock().await.clone()
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
        *client = open(&self.socket, self.generation).await?;
        Ok(client.clone())
    }

    /// Never connects again: the machine ends, and the next one of this sandbox listens at the same place.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Calls the agent; on a broken connection once more over a new one. For calls that may be repeated.
    ///
    /// # Errors
    /// What the agent answered.
    pub async fn call<T, F>(&self, call: impl Fn(GuestClient<Channel>) -> F) -> Result<T, Status>
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
        call.await.map(drop).map_err(|status| failed("flush its disk", status))
    }

    /// Makes all user processes stand still.
    ///
    /// # Errors
    /// If they do not in time; they run on then.
    pub async fn freeze_user(&self) -> Result<()> {
        let request = FreezeUserRequest { timeout_ms: FREEZE_LIMIT_MS };
        let call = self.call(|mut guest| async move { guest.freeze_user(limited(request)).await });
        call.await.map(drop).map_err(|status| failed("freeze its processes", status))
    }

    /// Lets them go on.
    ///
    /// # Errors
    /// If the guest does not answer.
    pub async fn thaw_user(&self) -> Result<()> {
        let call = self.call(|mut guest| async move { guest.thaw_user(limited(ThawUserRequest {})).await });
        call.await.map(drop).map_err(|status| failed("thaw its processes", status))
    }

    /// Makes the copy a new individual; returns the guest's own step times once it acknowledged.
    ///
    /// # Errors
    /// If it does not acknowledge exactly this generation: the copy must not be released then.
    pub async fn individualize(&self, origin: Origin, hostname: &str) -> Result<Vec<(String, Duration)>> {
        let mut entropy = vec![0; ENTROPY_BYTES];
        rand::rng().fill_bytes(&mut entropy);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let individual = Individual {
            generation: self.generation,
            entropy: entropy.into(),
            unix_nanos: u64::try_from(now.as_nanos()).unwrap_or(u64::MAX),
            hostname: hostname.into(),
            reason: origin.as_str().into(),
        };
        // Not repeated over a new connection: the guest refuses a generation it already has.
        let ack = self.client().await.individualize(limited(individual)).await;
        let ack = ack.map_err(|status| failed("take on its new identity", status))?.into_inner();
        if ack.generation != self.generation {
            let what = format!("acknowledged generation {} instead of {}", ack.generation, self.generation);
            return Err(failed("take on its new identity", Status::internal(what)));
        }
        Ok(ack.steps.into_iter().map(|s| (s.step, Duration::from_micros(s.micros))).collect())
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
    let said = status.message().to_owned();
    match status.code() {
        Code::NotFound => Error::NotFound(said),
        Code::AlreadyExists | Code::FailedPrecondition => Error::Conflict(said),
        Code::InvalidArgument | Code::PermissionDenied | Code::OutOfRange => Error::Invalid(said),
        Code::ResourceExhausted => Error::NoRoom(said),
        // Said by the agent, not by the transport: something in the guest cannot be read, opened, started.
        Code::Internal if !said.is_empty() && std::error::Error::source(status).is_none() => {
            Error::Conflict(said)
        }
        Code::DeadlineExceeded => Error::Timeout(format!("timeout: {said}")),
        _ => Error::internal("the sandbox's agent failed", anyhow::Error::new(status.clone())),
    }
}

fn limited<T>(message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    request.set_timeout(CALL_LIMIT);
    request
}

fn failed(what: &str, status: Status) -> Error {
    let why = status.message().to_owned();
    Error::internal(format!("the guest did not {what}: {why}"), anyhow::Error::new(status))
}

async fn open(socket: &Path, generation: u64) -> Result<GuestClient<Channel>> {
    let connecting = async {
        let stream = UnixStream::connect(socket).await?;
        let (client, _) = keiki_protocol::client::connect(stream, generation, CONNECT_LIMIT).await?;
        anyhow::Ok(client)
    };
    connecting.await.map_err(|cause| Error::internal("the guest's agent does not answer", cause))
}

#[cfg(test)]
mod tests {
    use super::refusal;
    use crate::error::Error;
    use tonic::{Code, Status};

    #[test]
    fn what_fails_in_the_guest_is_no_failure_of_the_node() {
        let said = refusal(&Status::new(Code::Internal, "/proc/self/mem: Input/output error"));
        assert!(matches!(&said, Error::Conflict(text) if text.contains("/proc/self/mem")), "{said}");
        let transport = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert!(matches!(refusal(&transport), Error::Internal { .. }));
        assert!(matches!(refusal(&Status::new(Code::Internal, "")), Error::Internal { .. }));
    }
}
