//! Carries the events of one command from the guest to its listener.

use super::InGuest;
use crate::{
    error::{Error, Result},
    guest::link::{is_broken, plain, refusal, within},
};
use bytes::Bytes;
use keiki_api::{Control, ExecEvent};
use keiki_protocol::guest::{AttachRequest, ExecEvent as GuestEvent, ExecSpec, Output, exec_event::Event};
use keiki_sys::failpoint;
use std::{sync::Arc, time::Duration};
use tokio::sync::{mpsc, oneshot};
use tonic::{Code, Status, Streaming};

/// How many times in a row a session is reattached after a broken connection.
const REATTACH: usize = 3;
/// Time limit for the guest to report that a command has started; output has no time limit.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);
pub(super) const SIGKILL: i32 = 9;

/// Starts the session; if the connection turns out to be broken, over a new one.
pub(super) async fn start(session: &InGuest, spec: ExecSpec) -> Result<Streaming<GuestEvent>> {
    match try_start(session, spec).await {
        Ok(events) => Ok(events),
        Err(error) => Err(session.using.explain(error).await),
    }
}

async fn try_start(session: &InGuest, spec: ExecSpec) -> Result<Streaming<GuestEvent>> {
    let guest = &session.using.live.guest;
    let first = within(START_LIMIT, guest.client().await.exec(spec.clone())).await;
    let answer = match first {
        Err(status) if is_broken(&status) => {
            let mut client = guest.reconnect().await?;
            match within(START_LIMIT, client.exec(spec)).await {
                // The first request had arrived after all.
                Err(status) if status.code() == Code::AlreadyExists => {
                    within(START_LIMIT, client.attach(attach(&session.id, [0, 0], false))).await
                }
                answer => answer,
            }
        }
        answer => answer,
    };
    answer.map(tonic::Response::into_inner).map_err(|status| refusal(&status))
}

pub(super) fn attach(id: &str, [stdout_offset, stderr_offset]: [u64; 2], polite: bool) -> AttachRequest {
    AttachRequest { id: id.into(), stdout_offset, stderr_offset, polite }
}

/// Carries the events of one command.
pub(super) struct Pump {
    pub session: Arc<InGuest>,
    pub send: mpsc::Sender<Result<ExecEvent>>,
    /// What was carried so far of standard output and standard error.
    pub offsets: [u64; 2],
}

/// How one connection's stream ended.
enum Outcome {
    Exited,
    Unheard,
    Broken(Status),
}

impl Pump {
    /// Starts the command, reports that, and carries its events.
    pub async fn begin(self, spec: ExecSpec, stdin: Option<Bytes>, tell: oneshot::Sender<Result<()>>) {
        let _armed = failpoint::arm("exec");
        failpoint::reach("begin");
        let left = async {
            self.send.closed().await;
            tokio::time::sleep(START_LIMIT).await;
        };
        let started = tokio::select! {
            started = start(&self.session, spec) => started,
            () = left => {
                let _ = self.session.signal(SIGKILL).await;
                return;
            }
        };
        match started {
            Ok(stream) => {
                failpoint::reach("started");
                if let Some(stdin) = stdin {
                    let session = Arc::clone(&self.session);
                    // A command that does not read its input is not an error of the exec.
                    tokio::spawn(async move { session.input(stdin, true).await });
                }
                // If the listener is gone, the first look at the events kills the command.
                let _ = tell.send(Ok(()));
                self.run(stream).await;
            }
            Err(error) => drop(tell.send(Err(error))),
        }
    }

    pub async fn run(mut self, mut stream: Streaming<GuestEvent>) {
        let mut failures = 0;
        loop {
            let before = self.offsets;
            match self.carry(&mut stream).await {
                Outcome::Exited => return,
                Outcome::Unheard => {
                    // The listener is gone: a command ends with its caller, unless it runs in the
                    // background.
                    if self.session.ends_with_caller() {
                        let _ = self.session.signal(SIGKILL).await;
                    }
                    return;
                }
                Outcome::Broken(status) if status.code() == Code::Aborted => {
                    let error = Error::Conflict("another reader took over this command's output".into());
                    let _ = self.send.send(Err(error)).await;
                    return;
                }
                Outcome::Broken(status) => {
                    failures = if self.offsets == before { failures + 1 } else { 1 };
                    match self.again(failures).await {
                        Some(next) => stream = next,
                        None => {
                            let error = self.session.using.explain(lost(&status)).await;
                            let _ = self.send.send(Err(error)).await;
                            return;
                        }
                    }
                }
            }
        }
    }

    async fn carry(&mut self, stream: &mut Streaming<GuestEvent>) -> Outcome {
        loop {
            let next = tokio::select! {
                next = stream.message() => next,
                () = self.send.closed() => return Outcome::Unheard,
            };
            let event = match next {
                Ok(Some(event)) => event.event,
                Ok(None) => return Outcome::Broken(Status::unavailable("the stream ended early")),
                Err(status) => return Outcome::Broken(status),
            };
            let event = match event {
                None | Some(Event::Started(_)) => continue,
                Some(Event::Stdout(Output { offset, data })) => {
                    self.count(0, offset, &data).then_some(ExecEvent::Stdout { offset, data })
                }
                Some(Event::Stderr(Output { offset, data })) => {
                    self.count(1, offset, &data).then_some(ExecEvent::Stderr { offset, data })
                }
                Some(Event::Exit(exit)) => Some(ExecEvent::Exit {
                    code: exit.code,
                    timed_out: exit.timed_out,
                    message: plain(&exit.message),
                    duration_ms: exit.duration_ms,
                }),
            };
            let Some(event) = event else {
                return Outcome::Broken(Status::data_loss("the guest's agent sent output out of order"));
            };
            let last = matches!(event, ExecEvent::Exit { .. });
            failpoint::reach(if last { "exit" } else { "output" });
            let heard = self.send.send(Ok(event)).await.is_ok();
            if last {
                return Outcome::Exited;
            }
            if !heard {
                return Outcome::Unheard;
            }
        }
    }

    /// Advances a stream's offset over a piece. False if the guest reports something impossible.
    fn count(&mut self, stream: usize, offset: u64, data: &Bytes) -> bool {
        let next = after(self.offsets[stream], offset, data.len());
        self.offsets[stream] = next.unwrap_or(self.offsets[stream]);
        next.is_some()
    }

    /// The session over a new connection, unless the machine is gone.
    async fn again(&self, failures: usize) -> Option<Streaming<GuestEvent>> {
        let live = &self.session.using.live;
        if failures > REATTACH {
            return None;
        }
        let mut client = tokio::select! {
            client = live.guest.reconnect() => client.ok()?,
            _ = live.machine.ended() => return None,
        };
        let attach = attach(&self.session.id, self.offsets, false);
        let answer = within(START_LIMIT, client.attach(attach)).await;
        answer.ok().map(tonic::Response::into_inner)
    }
}

/// The offset of a stream after a piece of it. None if the guest reports something impossible.
fn after(now: u64, offset: u64, len: usize) -> Option<u64> {
    if offset < now {
        return None;
    }
    offset.checked_add(len as u64)
}

fn lost(status: &Status) -> Error {
    Error::internal("the sandbox ended while the command ran", anyhow::Error::new(status.clone()))
}

#[cfg(test)]
mod tests {
    use super::after;

    #[test]
    fn offsets_go_forward_and_never_over() {
        assert_eq!(after(0, 0, 5), Some(5));
        assert_eq!(after(5, 9, 1), Some(10), "what fell out of the guest's ring is skipped");
        assert_eq!(after(5, 4, 1), None);
        assert_eq!(after(5, u64::MAX, 1), None);
    }
}
