//! The freeze order around a running guest, and the verbs that begin with it: snapshot, fork, hibernate.
//!
//! 1. the guest flushes its disk, running;
//! 2. it holds its user processes still;
//! 3. the engine parks the vCPUs, takes RAM, device state and disk at one instant, and lets them go;
//! 4. the guest thaws its user processes.
//!
//! Whatever fails, the last step happens to the original.

use super::{
    Inner,
    machine::{Place, engine_error, identity_of},
    request,
    secrets::{self, Out},
};
use crate::{
    admission::Ticket,
    clock::{Clock, ms},
    error::{Error, Result},
    guest::Secrets,
    lifecycle::{Decision, Verb},
    once::Once,
    records::{SandboxRecord, SnapshotRecord},
    sandbox::{Live, Sandbox},
    store::{make_dir, tree_bytes},
};
use futures::future::join_all;
use keiki_engine::{Frozen, Image};
use keiki_protocol::guest::Identity;
use keiki_sys::failpoint::arm;
use keiki_types::{
    Origin, SandboxId, Shape, SnapshotId, Status,
    api::{self, EventKind, ForkSandbox, Forked, Timings},
};
use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};
use time::OffsetDateTime;

/// Disk that one more running machine needs before it writes anything of its own.
const MACHINE_DISK_BYTES: u64 = 8 << 20;

/// What a freeze gave.
struct Taken {
    frozen: Arc<dyn Frozen>,
    pause: Pause,
}

/// How long the original stood still.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pause {
    vcpu: Duration,
    user: Option<Duration>,
}

/// Whether the original goes on after the freeze.
#[derive(Clone, Copy, PartialEq, Eq)]
enum After<'a> {
    /// These secrets are not in what is frozen; the original has them again.
    GoesOn(&'a [String]),
    Ends,
}

impl Inner {
    /// Freezes a running or paused sandbox into `image`. Call with its verb held.
    async fn freeze(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        image: Image,
        after: After<'_>,
        clock: &mut Clock,
    ) -> Result<Taken> {
        // A paused sandbox was frozen in the same order when it was paused.
        let running = sandbox.record().status == Status::Running;
        let mut user_stopped = None;
        if running {
            live.guest.flush().await?;
            clock.lap("flush");
            user_stopped = Some(Instant::now());
            live.guest.freeze_user().await?;
            clock.lap("freeze_user");
        }
        let out = match after {
            After::GoesOn([]) | After::Ends => Ok(None),
            After::GoesOn(out) if running => {
                let out = Out::take(&live.guest, out, &self.store.run(sandbox.id)).await;
                clock.lap("take_secrets");
                out.map(Some)
            }
            // Nobody in it answers.
            After::GoesOn(_) => Err(Error::Conflict(format!(
                "sandbox {} is paused and has secrets that a snapshot must not have: resume it first",
                sandbox.id
            ))),
        };
        let (taken, out) = match out {
            Ok(out) => (
                live.machine
                    .freeze(image)
                    .await
                    .map_err(|error| engine_error("the machine cannot be frozen", error)),
                out,
            ),
            Err(error) => (Err(error), None),
        };
        clock.lap("freeze");
        let mut user_pause = None;
        if running && (taken.is_err() || after != After::Ends) {
            let put = match out {
                Some(out) => {
                    let put = out.put_back(&live.guest).await;
                    clock.lap("put_secrets");
                    put
                }
                None => Ok(()),
            };
            let thawed = live.guest.thaw_user().await;
            user_pause = user_stopped.map(|at| at.elapsed());
            clock.lap("thaw_user");
            thawed.and(put)?;
        }
        let (frozen, report) = taken?;
        for (step, took) in &report.steps.0 {
            clock.note(&format!("freeze:{step}"), *took);
        }
        self.tell(sandbox.id, EventKind::Frozen, |event| event.ms = Some(ms(report.vcpu_pause)));
        Ok(Taken { frozen, pause: Pause { vcpu: report.vcpu_pause, user: user_pause } })
    }

    /// Room for a frozen machine whose RAM is all private, and for its copies.
    fn room_for(&self, shape: Shape, copies: usize) -> Result<Ticket> {
        self.reserve_disk((u64::from(shape.memory_mib) << 20) + MACHINE_DISK_BYTES * (copies as u64 + 1))
    }

    /// Room on the store, for as long as the operation runs.
    pub(super) fn reserve_disk(&self, wanted: u64) -> Result<Ticket> {
        self.room.reserve(wanted, || self.store.free_bytes())
    }

    /// A sandbox with a machine, its verb held: woken first if it is hibernated.
    async fn frozen_verb<'a>(
        self: &Arc<Self>,
        sandbox: &'a Arc<Sandbox>,
        verb: Verb,
    ) -> Result<(tokio::sync::MutexGuard<'a, ()>, Option<Arc<Live>>)> {
        let guard = sandbox.verb.lock().await;
        match sandbox.decide(verb)? {
            Decision::WakeFirst => self.wake_locked(sandbox).await?,
            Decision::Already => return Ok((guard, None)),
            Decision::Go | Decision::Refuse(_) => {}
        }
        sandbox.touch();
        let live = sandbox
            .live()
            .ok_or_else(|| Error::Conflict(format!("sandbox {} has no machine", sandbox.id)))?;
        Ok((guard, Some(live)))
    }

    pub(super) async fn snapshot(
        self: &Arc<Self>,
        id: SandboxId,
        once: Option<&Once>,
    ) -> Result<api::Snapshot> {
        let _armed = arm("snapshot");
        let mut clock = Clock::start();
        let sandbox = self.sandbox(id)?;
        let (_verb, live) = self.frozen_verb(&sandbox, Verb::Freeze).await?;
        let Some(live) = live else { return Err(Error::Conflict(format!("sandbox {id} has no machine"))) };
        let record = sandbox.record();
        let _room = self.room_for(record.shape, 0)?;
        let snapshot = SnapshotId::new();
        let dir = self.store.snapshot(snapshot);
        let made = self.take_snapshot(&sandbox, &live, snapshot, once, &mut clock).await;
        match made {
            Ok((snapshot_record, taken)) => {
                let timings = frozen_timings(&clock, &taken);
                self.done("snapshot", &id.to_string(), &timings);
                self.tell(id, EventKind::Snapshotted, |event| {
                    event.snapshot_id = Some(snapshot);
                    event.ms = Some(timings.total_ms);
                });
                Ok(api::Snapshot { timings: Some(timings), ..self.snapshot_view(&snapshot_record) })
            }
            Err(error) => {
                self.store.remove_or_log(dir).await;
                Err(error)
            }
        }
    }

    async fn take_snapshot(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        id: SnapshotId,
        once: Option<&Once>,
        clock: &mut Clock,
    ) -> Result<(SnapshotRecord, Taken)> {
        let record = sandbox.record();
        let dir = self.store.snapshot(id);
        let image = self.image(&dir, record.shape).await?;
        let out = secrets::not_in_snapshots(&record);
        let taken = self.freeze(sandbox, live, image, After::GoesOn(&out), clock).await?;
        self.persist(taken.frozen.as_ref()).await?;
        clock.lap("persist");
        let snapshot = SnapshotRecord {
            id,
            sandbox_id: record.id,
            template: record.template,
            template_version: record.template_version,
            shape: record.shape,
            created_at: OffsetDateTime::now_utc(),
            size_bytes: tree_bytes(&dir),
            parent_snapshot_id: record.parent_snapshot_id,
            generation: record.generation,
            engine: record.engine,
            metadata: record.metadata,
            secrets: record.secrets,
            kernel: record.kernel,
        };
        // From here on the sandbox descends from this snapshot as far as its later copies are concerned.
        let descended = SandboxRecord { parent_snapshot_id: Some(id), ..sandbox.record() };
        let request = once.map(|once| crate::once::record(once, [id]));
        self.records.put_all(vec![snapshot.clone()], vec![descended], request).await?;
        sandbox.update(|record| record.parent_snapshot_id = Some(id));
        clock.lap("record");
        Ok((snapshot, taken))
    }

    pub(super) async fn fork(
        self: &Arc<Self>,
        id: SandboxId,
        fork: ForkSandbox,
        labels: BTreeMap<String, String>,
        once: Option<&Once>,
    ) -> Result<Forked> {
        let _armed = arm("fork");
        let mut clock = Clock::start();
        let count = request::fork_count(fork.count)?;
        let sandbox = self.sandbox(id)?;
        let (verb, live) = self.frozen_verb(&sandbox, Verb::Freeze).await?;
        let Some(live) = live else { return Err(Error::Conflict(format!("sandbox {id} has no machine"))) };
        let parent = sandbox.record();
        let mut metadata = fork.metadata.unwrap_or_else(|| parent.metadata.clone());
        metadata.extend(labels);
        let metadata = request::metadata(metadata)?;
        let ttl_seconds = request::ttl(fork.ttl_seconds, parent.ttl_seconds)?;
        let (secrets, has) = secrets::of_copy(&parent.secrets, |fates| fates.on_fork, fork.secrets)?;
        let tickets = self.admission.admit(parent.shape, count)?;
        let _room = self.room_for(parent.shape, count)?;

        let children: Vec<SandboxRecord> = join_all((0..count).map(|_| async {
            let generation = self.records.generation().await?;
            Ok(SandboxRecord {
                id: SandboxId::new(),
                status: Status::Creating,
                created_at: OffsetDateTime::now_utc(),
                metadata: metadata.clone(),
                ttl_seconds,
                secrets: has.clone(),
                parent_sandbox_id: Some(parent.id),
                from_snapshot: None,
                origin: Origin::Fork,
                generation,
                slot: None,
                timings: None,
                error: None,
                boot_ms: 0,
                ..parent.clone()
            })
        }))
        .await
        .into_iter()
        .collect::<Result<_>>()?;
        self.records.put(children.clone()).await?;
        for child in &children {
            self.announce(child);
        }
        clock.lap("admit");

        let scratch = self.store.scratch();
        let who = children.iter().zip(tickets);
        let who = who.map(|(child, ticket)| (identity_of(child), secrets.clone(), ticket)).collect();
        let made = self.fork_into(&sandbox, &live, &scratch, &children, who, &mut clock).await;
        drop(verb);
        self.store.remove_or_log(scratch).await;
        let (lives, taken) = match made {
            Ok(made) => made,
            Err(error) => {
                self.forget(&children, &error).await;
                return Err(error);
            }
        };
        self.finish_fork(&parent, children, lives, &taken, once, &mut clock).await
    }

    /// Monitors first, while the parent runs; then one freeze; then all thaws. All or nothing.
    async fn fork_into(
        &self,
        sandbox: &Sandbox,
        live: &Live,
        scratch: &std::path::Path,
        children: &[SandboxRecord],
        who: Vec<(Identity, Secrets, Ticket)>,
        clock: &mut Clock,
    ) -> Result<(Vec<(Live, Clock)>, Taken)> {
        let image = self.image(scratch, children[0].shape).await?;
        let (places, failed) =
            split(join_all(children.iter().map(|child| self.place(child.id, &image))).await);
        clock.lap("places");
        if let Some(error) = failed {
            self.vacate_all(places).await;
            return Err(error);
        }
        let taken = match self.freeze(sandbox, live, image, After::GoesOn(&[]), clock).await {
            Ok(taken) => taken,
            Err(error) => {
                self.vacate_all(places).await;
                return Err(error);
            }
        };
        let thaws = places.into_iter().zip(who).map(|(place, (identity, secrets, ticket))| {
            let mut clock = clock.clone();
            let frozen = Arc::clone(&taken.frozen);
            async move {
                let live = self.thaw(frozen.as_ref(), place, identity, secrets, ticket, &mut clock).await?;
                Ok((live, clock))
            }
        });
        let (lives, failed) = split(join_all(thaws).await);
        clock.lap("thaws");
        if let Some(error) = failed {
            join_all(lives.iter().zip(children).map(|((live, _), _)| self.end_unnamed(live))).await;
            return Err(error);
        }
        Ok((lives, taken))
    }

    async fn finish_fork(
        self: &Arc<Self>,
        parent: &SandboxRecord,
        children: Vec<SandboxRecord>,
        lives: Vec<(Live, Clock)>,
        taken: &Taken,
        once: Option<&Once>,
        clock: &mut Clock,
    ) -> Result<Forked> {
        // A child's clock goes on from the fork's own, which has one step more by now: `thaws`.
        let before = clock.timings().steps.len().saturating_sub(1);
        let mut records = Vec::with_capacity(children.len());
        for (mut record, (live, own_clock)) in children.into_iter().zip(&lives) {
            record.status = Status::Running;
            record.slot = live.slot_index();
            record.boot_ms = u64::try_from(own_clock.elapsed().as_millis()).unwrap_or(u64::MAX);
            record.timings = Some(released_timings(own_clock, Some(taken.pause)));
            records.push(record);
        }
        let request = once.map(|once| crate::once::record(once, records.iter().map(|record| record.id)));
        if let Err(error) = self.records.put_made(records.clone(), request).await {
            join_all(lives.iter().map(|(live, _)| self.end_unnamed(live))).await;
            self.forget(&records, &error).await;
            return Err(error);
        }
        clock.lap("record");
        let mut views = Vec::with_capacity(records.len());
        for (record, (live, own_clock)) in records.into_iter().zip(lives) {
            let own = own_clock.timings();
            self.metrics.steps("fork", own.steps.get(before..).unwrap_or_default());
            self.tell(record.id, EventKind::Running, |event| event.ms = Some(own.total_ms));
            views.push(self.adopt_live(record, live).view());
        }
        let timings = frozen_timings(clock, taken);
        self.done("fork", &parent.id.to_string(), &timings);
        self.tell(parent.id, EventKind::Forked, |event| {
            event.children = views.iter().map(|child| child.id).collect();
            event.ms = Some(timings.total_ms);
        });
        let sandbox = views.first().cloned();
        let sandbox = sandbox.ok_or_else(|| Error::Invalid("count must be at least 1".into()))?;
        Ok(Forked { parent_id: parent.id, sandbox, children: views, timings })
    }

    pub(super) async fn hibernate(self: &Arc<Self>, id: SandboxId) -> Result<api::Sandbox> {
        let sandbox = self.sandbox(id)?;
        let (_verb, live) = self.frozen_verb(&sandbox, Verb::Hibernate).await?;
        if let Some(live) = live {
            self.hibernate_locked(&sandbox, &live).await?;
        }
        Ok(sandbox.view())
    }

    /// Hibernates; call with the verb held and the decision made.
    pub(super) async fn hibernate_locked(&self, sandbox: &Sandbox, live: &Live) -> Result<()> {
        sandbox.set_leaving(true);
        let done = self.hibernate_leaving(sandbox, live).await;
        sandbox.set_leaving(false);
        done
    }

    async fn hibernate_leaving(&self, sandbox: &Sandbox, live: &Live) -> Result<()> {
        let _armed = arm("hibernate");
        let mut clock = Clock::start();
        let record = sandbox.record();
        let _room = self.room_for(record.shape, 0)?;
        let dir = self.store.hibernated(record.id, record.generation);
        let made = async {
            let image = self.image(&dir, record.shape).await?;
            let taken = self.freeze(sandbox, live, image, After::Ends, &mut clock).await?;
            self.persist(taken.frozen.as_ref()).await?;
            let change = SandboxRecord { status: Status::Hibernated, slot: None, ..record.clone() };
            self.records.put(vec![change]).await?;
            Ok(taken)
        };
        match made.await {
            Ok(taken) => {
                // Recorded: from here on it is hibernated whatever happens to the machine.
                sandbox.set_live(None, |record| {
                    record.status = Status::Hibernated;
                    record.slot = None;
                });
                self.end_live(record.id, live).await;
                clock.lap("stop");
                let timings = frozen_timings(&clock, &taken);
                self.done("hibernate", &record.id.to_string(), &timings);
                self.tell(record.id, EventKind::Hibernated, |event| event.ms = Some(timings.total_ms));
                Ok(())
            }
            Err(error) => {
                self.store.remove_or_log(dir).await;
                if record.status == Status::Running {
                    live.guest.thaw_user().await?;
                }
                Err(error)
            }
        }
    }

    async fn image(&self, dir: &std::path::Path, shape: Shape) -> Result<Image> {
        make_dir(dir)?;
        self.engine.image(dir, shape).await.map_err(|error| engine_error("cannot make a memory image", error))
    }

    pub(super) async fn persist(&self, frozen: &dyn Frozen) -> Result<()> {
        frozen
            .persist()
            .await
            .map(drop)
            .map_err(|error| engine_error("the snapshot cannot be written", error))
    }

    async fn vacate_all(&self, places: Vec<Place>) {
        join_all(places.into_iter().map(|place| self.vacate(place))).await;
    }

    /// Ends a machine that no sandbox has been told about.
    async fn end_unnamed(&self, live: &Live) {
        let dir = &live.machine.paths().dir;
        let id = dir.file_name().and_then(|name| name.to_str()).and_then(|name| name.parse().ok());
        if let Some(id) = id {
            self.end_live(id, live).await;
        }
    }

    /// Removes the records of sandboxes that never came to be.
    pub(super) async fn forget(&self, records: &[SandboxRecord], why: &Error) {
        for record in records {
            self.unlist(record.id);
            self.tell(record.id, EventKind::Failed, |event| event.reason = Some(why.to_string()));
        }
        let keys = records.iter().map(|record| record.id.to_string()).collect();
        if let Err(error) = self.records.remove::<SandboxRecord>(keys).await {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "records of a failed operation stay until restart"
            );
        }
    }
}

/// The successes, and the first failure.
fn split<T>(results: Vec<Result<T>>) -> (Vec<T>, Option<Error>) {
    let mut good = Vec::with_capacity(results.len());
    let mut failed = None;
    for result in results {
        match result {
            Ok(value) => good.push(value),
            Err(error) if failed.is_none() => failed = Some(error),
            Err(error) => tracing::warn!(error = &error as &dyn std::error::Error, "another copy failed too"),
        }
    }
    (good, failed)
}

fn frozen_timings(clock: &Clock, taken: &Taken) -> Timings {
    Timings {
        vcpu_pause_ms: Some(ms(taken.pause.vcpu)),
        user_pause_ms: taken.pause.user.map(ms),
        ..clock.timings()
    }
}

/// Timings of a thawing verb: `thaw_ms` ends where the release gate begins.
pub(super) fn released_timings(clock: &Clock, pause: Option<Pause>) -> Timings {
    let timings = clock.timings();
    // A fork's own freeze has a step of the same name; the gate is what follows the thaw.
    let after_thaw = timings.steps.iter().rposition(|step| step.name == "thaw").unwrap_or(0);
    let steps = timings.steps.get(after_thaw..).unwrap_or_default();
    let release: f64 =
        steps.iter().filter(|step| Timings::GATE.contains(&step.name.as_str())).map(|step| step.ms).sum();
    Timings {
        vcpu_pause_ms: pause.map(|pause| ms(pause.vcpu)),
        user_pause_ms: pause.and_then(|pause| pause.user).map(ms),
        thaw_ms: Some(timings.total_ms - release),
        release_ms: Some(release),
        ..timings
    }
}
