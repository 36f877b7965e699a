//! The one way a sandbox gets a machine (RFD 014): create, fork, restore and wake differ only in
//! the frozen machine.
//!
//! ```text
//!   reserve ────> prepare ────> thaw ────> commit
//!   room in RAM   a slot,       the frozen   one durable write; then
//!   and on disk,  directories,  machine,     sandboxes can be used
//!   records say   a VM that     through the
//!   `creating`    waits         release gate
//! ```
//!
//! The births of one request take each step together, all or none: if one fails, the step undoes
//! all of them before it returns ([`Births::undo`]). A verb runs to its end even if its caller
//! disconnects, so only the death of the node drops births halfway; the next node removes what has
//! no record, and what is still `creating`.

use crate::{
    admission::Ticket,
    daemon::Inner,
    error::{Error, Result},
    fleet::{Fleet, Prepared, Unreleased, with_console},
    freeze::Pause,
    guest::{Gate, GuestLink, Secrets},
    once::{self, Once},
    records::SandboxRecord,
    sandbox::{Live, Sandbox},
    timings::{ms, steps, timings},
};
use futures::future::{join_all, try_join_all};
use keiki_engine::{EngineError, Frozen, Image, Machine};
use keiki_protocol::guest::Identity;
use keiki_sys::stopwatch::Stopwatch;
use keiki_types::{
    Origin, SandboxId, Status,
    api::{EventKind, Timings},
};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};

/// Sandboxes that are getting machines, all of them at stage `S`.
pub(crate) struct Births<S> {
    births: Vec<Birth<S>>,
    common: Common,
}

/// Shared by the births of one request.
struct Common {
    node: Arc<Inner>,
    secrets: Secrets,
    /// Sandboxes to remove on failure: new ones, but not one that wakes.
    uncommitted: Vec<SandboxId>,
    watch: Stopwatch,
    /// How long their original was paused.
    pause: Option<Pause>,
    room: Option<Ticket>,
}

struct Birth<S> {
    sandbox: Arc<Sandbox>,
    record: SandboxRecord,
    stage: S,
}

/// A stage of a birth. Everything it holds can be ended.
pub(crate) trait Stage: Send + Sized {
    fn end(self, fleet: &Fleet) -> impl Future<Output = ()> + Send;
}

/// Nothing is reserved. A VM may have been prepared ahead of the request.
pub(crate) struct Draft {
    ahead: Option<Prepared>,
}

/// It has a reservation, and is listed as `creating`.
pub(crate) struct Reserved {
    ticket: Ticket,
    ahead: Option<Prepared>,
}

/// It has a prepared VM.
pub(crate) struct Ready {
    ticket: Ticket,
    prepared: Prepared,
}

/// Its guest has acknowledged its new identity, and its user processes run.
pub(crate) struct Released {
    live: Live,
    /// Starts with the thaw.
    watch: Stopwatch,
    gate: Duration,
}

impl Stage for Draft {
    async fn end(self, fleet: &Fleet) {
        if let Some(prepared) = self.ahead {
            fleet.cancel(prepared).await;
        }
    }
}

impl Stage for Reserved {
    async fn end(self, fleet: &Fleet) {
        Draft { ahead: self.ahead }.end(fleet).await;
    }
}

impl Stage for Ready {
    async fn end(self, fleet: &Fleet) {
        fleet.cancel(self.prepared).await;
    }
}

impl Stage for Released {
    async fn end(self, fleet: &Fleet) {
        fleet.end(&self.live).await;
    }
}

impl Births<Draft> {
    /// Births of new sandboxes of one shape, with these secrets.
    pub fn new(node: &Arc<Inner>, sandboxes: &[Arc<Sandbox>], secrets: Secrets, watch: Stopwatch) -> Self {
        let draft = |sandbox: &Arc<Sandbox>| Birth::draft(sandbox, None);
        Self::of(node, sandboxes.iter().map(draft).collect(), secrets, watch)
    }

    /// The birth of a new sandbox, in the VM that was prepared ahead for its id, if there is one.
    pub fn ahead(
        node: &Arc<Inner>,
        sandbox: &Arc<Sandbox>,
        ahead: Option<Prepared>,
        secrets: Secrets,
        watch: Stopwatch,
    ) -> Self {
        Self::of(node, vec![Birth::draft(sandbox, ahead)], secrets, watch)
    }

    /// The birth of a new machine for a hibernated sandbox, which stays hibernated if this fails.
    pub fn again(node: &Arc<Inner>, sandbox: &Arc<Sandbox>, secrets: Secrets, watch: Stopwatch) -> Self {
        let mut birth = Birth::draft(sandbox, None);
        birth.record.origin = Origin::Wake;
        Self::of(node, vec![birth], secrets, watch)
    }

    fn of(node: &Arc<Inner>, births: Vec<Birth<Draft>>, secrets: Secrets, watch: Stopwatch) -> Self {
        let (node, uncommitted) = (Arc::clone(node), Vec::new());
        Self { births, common: Common { node, secrets, uncommitted, watch, pause: None, room: None } }
    }

    /// Reserves RAM for them, and keeps the disk that the verb has reserved; records and lists new
    /// sandboxes.
    pub async fn reserve(mut self, room: Ticket) -> Result<Births<Reserved>> {
        self.common.room = Some(room);
        let node = Arc::clone(&self.common.node);
        let shapes = self.births.iter().map(|birth| birth.record.shape);
        let ram = node.fleet.admission.admit(shapes);
        let (mut births, mut ram) = self.with(ram).await?;
        let recorded = births.record().await;
        let (births, ()) = births.with(recorded).await?;
        let reserve = |Birth { sandbox, record, stage: Draft { ahead } }| {
            let ticket = ram.split_off(record.shape);
            Birth { sandbox, record, stage: Reserved { ticket, ahead } }
        };
        Ok(Births { births: births.births.into_iter().map(reserve).collect(), common: births.common })
    }

    async fn record(&mut self) -> Result<()> {
        let node = &self.common.node;
        try_join_all(self.births.iter_mut().map(async |birth| {
            birth.record.generation = node.journal.records.generation().await?;
            Ok::<_, Error>(())
        }))
        .await?;
        let new = || self.births.iter().filter(|birth| birth.record.status == Status::Creating);
        node.journal.records.put(new().map(|birth| birth.record.clone()).collect()).await?;
        for birth in new() {
            birth.sandbox.update(|record| *record = birth.record.clone());
            node.sandboxes.insert(&birth.sandbox);
            node.journal.emit(birth.record.id, EventKind::Created, |event| {
                event.parent_sandbox_id = birth.record.parent_sandbox_id;
                event.snapshot_id = birth.record.from_snapshot;
            });
        }
        self.common.uncommitted = new().map(|birth| birth.record.id).collect();
        Ok(())
    }
}

impl Births<Reserved> {
    /// Prepares a VM for each, over a memory image that may not exist yet.
    pub async fn prepare(self, image: &Image) -> Result<Births<Ready>> {
        let node = Arc::clone(&self.common.node);
        self.each(|birth| birth.prepare(&node.fleet, image)).await
    }
}

impl Births<Ready> {
    /// Thaws a frozen machine into each, and releases it. `pause`: how long its original was
    /// paused.
    pub async fn thaw(mut self, frozen: &dyn Frozen, pause: Option<Pause>) -> Result<Births<Released>> {
        self.common.pause = pause;
        let (node, secrets) = (Arc::clone(&self.common.node), self.common.secrets.clone());
        let mut births = self.each(|birth| birth.thaw(&node.fleet, frozen, secrets.clone())).await?;
        if births.births.len() > 1 {
            births.lap("thaws");
        }
        Ok(births)
    }
}

impl Births<Released> {
    /// Makes them durable, together with the request's idempotency key: from then on the sandboxes
    /// can be used. Returns how long everything took.
    pub async fn commit(mut self, once: Option<&Once>) -> Result<Timings> {
        let common = &mut self.common;
        for birth in &mut self.births {
            birth.complete(common);
        }
        // The steps of a single machine are steps of the request; several machines are one step.
        if let [only] = self.births.as_slice() {
            common.watch.follow(&only.stage.watch);
        }
        let records: Vec<_> = self.births.iter().map(|birth| birth.record.clone()).collect();
        let request = once.map(|once| once::record(once, records.iter().map(|record| record.id)));
        if let Err(error) = common.node.journal.records.put_made(records, request).await {
            return Err(self.undo(error).await);
        }
        common.watch.lap("record");
        let Common { node, watch, pause, .. } = self.common;
        let several = self.births.len() > 1;
        for Birth { sandbox, record, stage } in self.births {
            let kind = if record.origin == Origin::Wake { EventKind::Woken } else { EventKind::Running };
            if several {
                node.journal.metrics.steps(record.origin.as_str(), &steps(stage.watch.steps()));
            }
            node.adopt(&sandbox, record, stage.live, || {
                node.journal.emit(sandbox.id, kind, |event| event.ms = Some(ms(watch.elapsed())));
            });
        }
        let timings = timings(&watch);
        Ok(pause.map_or(timings.clone(), |pause| pause.add_to(timings)))
    }
}

impl<S: Stage> Births<S> {
    /// Ends a step of the request.
    pub fn lap(&mut self, step: &'static str) {
        self.common.watch.lap(step);
    }

    pub fn watch(&mut self) -> &mut Stopwatch {
        &mut self.common.watch
    }

    /// Continues with the result of another operation, or undoes everything if that failed.
    pub async fn with<T>(self, given: Result<T>) -> Result<(Self, T)> {
        match given {
            Ok(given) => Ok((self, given)),
            Err(error) => Err(self.undo(error).await),
        }
    }

    /// Undoes everything: ends the machines, removes the new sandboxes. Returns the error, for the
    /// caller.
    pub async fn undo(self, why: Error) -> Error {
        let Common { node, uncommitted, .. } = self.common;
        join_all(self.births.into_iter().map(|birth| birth.stage.end(&node.fleet))).await;
        forget(&node, &uncommitted, &why).await;
        why
    }

    /// Takes all of them one step further. A birth that fails leaves nothing behind.
    async fn each<T: Stage, F>(self, step: impl Fn(Birth<S>) -> F) -> Result<Births<T>>
    where
        F: Future<Output = Result<Birth<T>>>,
    {
        let done = join_all(self.births.into_iter().map(step)).await;
        let mut further = Births { births: Vec::with_capacity(done.len()), common: self.common };
        let mut failed = None;
        for result in done {
            match result {
                Ok(birth) => further.births.push(birth),
                Err(error) if failed.is_none() => failed = Some(error),
                Err(error) => {
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "another machine of this request failed too"
                    )
                }
            }
        }
        match failed {
            None => Ok(further),
            Some(error) => Err(further.undo(error).await),
        }
    }
}

impl Birth<Draft> {
    fn draft(sandbox: &Arc<Sandbox>, ahead: Option<Prepared>) -> Self {
        Self { sandbox: Arc::clone(sandbox), record: sandbox.record(), stage: Draft { ahead } }
    }
}

impl Birth<Reserved> {
    async fn prepare(self, fleet: &Fleet, image: &Image) -> Result<Birth<Ready>> {
        let Self { sandbox, mut record, stage: Reserved { ticket, ahead } } = self;
        let prepared = match ahead {
            Some(prepared) => prepared,
            None => fleet.prepare(record.id, image).await?,
        };
        record.slot = Some(prepared.slot.index());
        Ok(Birth { sandbox, record, stage: Ready { ticket, prepared } })
    }
}

impl Birth<Ready> {
    async fn thaw(self, fleet: &Fleet, frozen: &dyn Frozen, secrets: Secrets) -> Result<Birth<Released>> {
        let Self { sandbox, record, stage: Ready { ticket, prepared } } = self;
        let mut watch = Stopwatch::start();
        let _permit = fleet.permit().await;
        let Unreleased { id, machine, slot } = fleet.thaw(frozen, prepared, &mut watch).await?;
        let thawed = watch.elapsed();
        match release(machine.as_ref(), &record, secrets, &mut watch).await {
            Ok(guest) => {
                let gate = watch.elapsed() - thawed;
                let live = Live { id, machine, guest, slot: Mutex::new(Some(slot)), _ticket: ticket };
                Ok(Birth { sandbox, record, stage: Released { live, watch, gate } })
            }
            Err(error) => {
                let error = with_console(error, machine.as_ref()).await;
                fleet.end_machine(id, machine.as_ref(), Some(slot)).await;
                Err(error)
            }
        }
    }
}

impl Birth<Released> {
    /// Completes its record.
    fn complete(&mut self, common: &Common) {
        let (took, gate) = (common.watch.elapsed(), self.stage.gate);
        self.record.status = Status::Running;
        self.record.boot_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        self.record.timings = Some(Timings {
            total_ms: ms(took),
            vcpu_pause_ms: common.pause.map(|pause| ms(pause.vcpu)),
            user_pause_ms: common.pause.and_then(|pause| pause.user).map(ms),
            thaw_ms: Some(ms(took.saturating_sub(gate))),
            release_ms: Some(ms(gate)),
            steps: [steps(common.watch.steps()), steps(self.stage.watch.steps())].concat(),
        });
    }
}

/// Removes new sandboxes whose creation failed.
async fn forget(node: &Inner, ids: &[SandboxId], why: &Error) {
    for &id in ids {
        node.sandboxes.remove(id);
        node.journal.emit(id, EventKind::Failed, |event| event.reason = Some(why.to_string()));
    }
    let keys = ids.iter().map(SandboxId::to_string).collect();
    if let Err(error) = node.journal.records.remove::<SandboxRecord>(keys).await {
        let error = &error as &dyn std::error::Error;
        tracing::error!(
            error,
            "cannot remove the records of a failed operation; the next start removes them"
        );
    }
}

/// The release gate: user processes run only once the guest has acknowledged its new generation.
async fn release(
    machine: &dyn Machine,
    record: &SandboxRecord,
    secrets: Secrets,
    watch: &mut Stopwatch,
) -> Result<GuestLink> {
    let socket = machine.agent_socket();
    let gate = tokio::select! {
        gate = Gate::open(&socket, record.generation) => gate?,
        how = machine.ended() => {
            return Err(Error::internal(
                "the machine ended before it could be released",
                EngineError::Ended(how),
            ));
        }
    };
    watch.lap("connect");
    gate.release(identity_of(record), secrets, watch).await
}

/// The identity of the machine in this record. The gate adds what changes with every release.
fn identity_of(record: &SandboxRecord) -> Identity {
    let text = |id: Option<String>| id.unwrap_or_default();
    Identity {
        generation: record.generation,
        hostname: hostname(record.id),
        reason: record.origin.as_str().into(),
        sandbox_id: record.id.to_string(),
        parent_sandbox_id: text(record.parent_sandbox_id.map(|id| id.to_string())),
        parent_snapshot_id: text(record.parent_snapshot_id.map(|id| id.to_string())),
        is_new: record.origin != Origin::Wake,
        run_hooks: true,
        ..Identity::default()
    }
}

/// The guest's host name: unique per sandbox, a valid DNS label.
fn hostname(id: SandboxId) -> String {
    let id = id.to_string();
    format!("keiki-{}", id.rsplit('-').next().unwrap_or(&id))
}
