//! Requests, the sweeper and verbs at the same time, in thousands of orders.
//!
//! The decisions are the real ones, with the real locks; what a verb does between them (a freeze, a thaw, files) is some
//! steps that take their time and may fail. A scheduler of one thread gives turns in an order that proptest chooses: each
//! step of each task is one poll. Time is up as soon as nothing is in flight, so the sweeper always wants it.

use super::{Claim, Sandbox};
use crate::{
    error::{Error, Result},
    lifecycle::{Arrival, Decision, Sweep, Verb},
    records::SandboxRecord,
};
use futures::future::LocalBoxFuture;
use keiki_types::{EngineKind, Origin, SandboxId, Shape, Status};
use proptest::{
    prelude::{ProptestConfig, any, prop},
    prop_assert, proptest,
    strategy::Strategy,
};
use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Instant,
};

/// More turns than any run needs: one that needs more stands still.
const TURNS: usize = 20_000;

/// A machine, and whether it still runs.
struct Machine(AtomicBool);

/// What one task does.
#[derive(Debug, Clone, Copy)]
enum Role {
    /// A request that lasts so many turns.
    Request(u8),
    /// The sweeper looks; what it does may fail.
    Sweeper(bool),
    /// Somebody asks for a hibernation, a wake, a pause and resume, or the deletion.
    Hibernate(bool),
    Wake,
    Pause,
    Delete,
}

/// One sandbox and what was seen of it.
struct Trial {
    sandbox: Arc<Sandbox<Machine>>,
    /// Machines that run: never two of one sandbox.
    running: Rc<Cell<i32>>,
    /// Only the sweeper may end anything, and it must cut off nobody.
    gentle: bool,
    seen: RefCell<Vec<String>>,
}

impl Trial {
    fn new(persistent: bool, gentle: bool) -> Rc<Self> {
        let sandbox = Sandbox::new(record(persistent), Some(Arc::new(Machine(AtomicBool::new(true)))));
        let trial = Self { sandbox, running: Rc::new(Cell::new(1)), gentle, seen: RefCell::default() };
        Rc::new(trial)
    }

    fn wrong(&self, what: impl Into<String>) {
        self.seen.borrow_mut().push(what.into());
    }

    fn stop(&self, machine: Option<Arc<Machine>>) {
        if machine.is_some_and(|machine| machine.0.swap(false, Ordering::SeqCst)) {
            self.running.set(self.running.get() - 1);
        }
    }

    /// As `Inner::wake`.
    async fn wake(&self, fails: bool) -> Result<()> {
        let _verb = self.sandbox.verb.lock().await;
        if self.sandbox.decide(Verb::Wake)? == Decision::Go {
            turns(2).await;
            if fails {
                return Err(Error::NoRoom("no room to wake".into()));
            }
            self.running.set(self.running.get() + 1);
            let machine = Arc::new(Machine(AtomicBool::new(true)));
            self.sandbox.set_live(Some(machine), |record| record.status = Status::Running);
        }
        Ok(())
    }

    /// As `Inner::hibernate_locked`.
    async fn hibernate_locked(&self, fails: bool) -> Result<()> {
        self.sandbox.set_leaving(true);
        turns(3).await;
        let done = if fails {
            Err(Error::NoRoom("no room to hibernate".into()))
        } else {
            let machine = self.sandbox.live();
            self.sandbox.set_live(None, |record| record.status = Status::Hibernated);
            turns(1).await;
            self.stop(machine);
            Ok(())
        };
        self.sandbox.set_leaving(false);
        done
    }

    /// As `Inner::delete_claimed`.
    async fn delete_claimed(&self, before: Status, fails: bool) -> Result<()> {
        turns(1).await;
        if fails {
            self.sandbox.update(|record| record.status = before);
            return Err(Error::NoRoom("the record stays".into()));
        }
        self.stop(self.sandbox.live());
        turns(1).await;
        self.sandbox.set_live(None, |record| record.status = Status::Deleted);
        Ok(())
    }

    async fn play(&self, role: Role) -> Result<()> {
        match role {
            Role::Request(lasts) => self.request(lasts).await,
            Role::Sweeper(fails) => self.sweep(fails).await,
            Role::Wake => self.wake(false).await,
            Role::Hibernate(fails) => {
                let verb = self.sandbox.verb.lock().await;
                if self.sandbox.decide(Verb::Hibernate)? == Decision::Go {
                    self.hibernate_locked(fails).await?;
                }
                drop(verb);
                Ok(())
            }
            Role::Pause => {
                for (verb, to) in [(Verb::Pause, Status::Paused), (Verb::Resume, Status::Running)] {
                    let _verb = self.sandbox.verb.lock().await;
                    if self.sandbox.decide(verb)? == Decision::Go {
                        turns(1).await;
                        self.sandbox.update(|record| record.status = to);
                        self.sandbox.touch();
                    }
                }
                Ok(())
            }
            Role::Delete => {
                let _verb = self.sandbox.verb.lock().await;
                self.sandbox.decide(Verb::Delete)?;
                let before = self.sandbox.record().status;
                self.sandbox.update(|record| record.status = Status::Stopping);
                self.delete_claimed(before, false).await
            }
        }
    }

    async fn request(&self, lasts: u8) -> Result<()> {
        let using = self.sandbox.begin(|| self.wake(false)).await?;
        for _ in 0..=lasts {
            if self.gentle && !using.live.0.load(Ordering::SeqCst) {
                self.wrong("a request that had begun lost its machine");
            }
            if self.gentle && self.sandbox.record().status != Status::Running {
                self.wrong(format!("in use, and {}", self.sandbox.record().status));
            }
            turns(1).await;
        }
        Ok(())
    }

    async fn sweep(&self, fails: bool) -> Result<()> {
        for _ in 0..4 {
            if let Some(Claim { verdict, before, verb }) = self.sandbox.claim_if_idle() {
                // In a task of its own, which may begin late.
                turns(1).await;
                let done = match verdict {
                    Sweep::Delete => self.delete_claimed(before, fails).await,
                    Sweep::Hibernate if self.sandbox.live().is_some() => self.hibernate_locked(fails).await,
                    Sweep::Hibernate | Sweep::Keep => Ok(()),
                };
                drop(verb);
                if done.is_err() {
                    self.sandbox.touch();
                }
            }
            turns(1).await;
        }
        Ok(())
    }
}

/// Gives others so many turns.
async fn turns(count: usize) {
    for _ in 0..count {
        let mut waited = false;
        std::future::poll_fn(|_| {
            if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// Gives each task its turns in this order, then over and over until all have ended. What each ended with, or none if
/// they stand still.
fn schedule(trial: &Rc<Trial>, roles: &[Role], order: &[u8]) -> Option<Vec<(Role, Result<()>)>> {
    let mut tasks: Vec<(Role, LocalBoxFuture<'_, Result<()>>)> =
        roles.iter().map(|&role| (role, Box::pin(trial.play(role)) as LocalBoxFuture<'_, _>)).collect();
    let mut ended = Vec::new();
    let mut context = Context::from_waker(Waker::noop());
    for turn in 0..TURNS {
        if tasks.is_empty() {
            return Some(ended);
        }
        let at = order.get(turn).map_or(turn, |&choice| usize::from(choice)) % tasks.len();
        if let Poll::Ready(done) = tasks[at].1.as_mut().poll(&mut context) {
            ended.push((tasks.swap_remove(at).0, done));
        }
        if !(0..=1).contains(&trial.running.get()) {
            trial.wrong(format!("{} machines of one sandbox", trial.running.get()));
        }
    }
    None
}

fn record(persistent: bool) -> SandboxRecord {
    SandboxRecord {
        id: SandboxId::new(),
        template: "base".into(),
        template_version: String::new(),
        shape: Shape { vcpus: 1, memory_mib: 256, disk_mib: 1024 },
        status: Status::Running,
        created_at: time::OffsetDateTime::UNIX_EPOCH,
        metadata: BTreeMap::new(),
        from_snapshot: None,
        parent_sandbox_id: None,
        parent_snapshot_id: None,
        origin: Origin::Create,
        boot_ms: 0,
        persistent,
        ttl_seconds: 0,
        generation: 1,
        engine: EngineKind::Qemu,
        kernel: String::new(),
        slot: None,
        timings: None,
        error: None,
        secrets: BTreeMap::new(),
    }
}

fn roles(gentle: bool) -> impl Strategy<Value = Vec<Role>> {
    let role =
        (0u8..if gentle { 3 } else { 7 }, any::<bool>(), 0u8..4).prop_map(
            |(which, fails, lasts)| match which {
                0 | 1 => Role::Request(lasts),
                2 => Role::Sweeper(fails),
                3 => Role::Hibernate(fails),
                4 => Role::Wake,
                5 => Role::Pause,
                _ => Role::Delete,
            },
        );
    prop::collection::vec(role, 2..7)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6000))]

    /// The sweeper against requests: whoever arrives first wins, and nobody who has begun is cut off.
    #[test]
    fn the_sweeper_cuts_off_nobody(
        roles in roles(true), order in prop::collection::vec(any::<u8>(), 60), persistent in any::<bool>(),
    ) {
        let trial = Trial::new(persistent, true);
        let ended = schedule(&trial, &roles, &order);
        prop_assert!(trial.seen.borrow().is_empty(), "{:?}", trial.seen.borrow());
        prop_assert!(ended.is_some(), "they stand still");
        let may_be_deleted = !persistent && roles.iter().any(|role| matches!(role, Role::Sweeper(_)));
        for (role, done) in ended.into_iter().flatten() {
            match done {
                Ok(()) => {}
                // It came after the sweeper had claimed it.
                Err(Error::Conflict(why)) if may_be_deleted => prop_assert!(why.contains("is being deleted"), "{}", why),
                Err(error) => prop_assert!(false, "{role:?} was told {error}"),
            }
        }
    }

    /// Everything at once: no two machines of one sandbox, nothing stands still, and its state and its machine agree.
    #[test]
    fn verbs_requests_and_the_sweeper_agree(
        roles in roles(false), order in prop::collection::vec(any::<u8>(), 90), persistent in any::<bool>(),
    ) {
        let trial = Trial::new(persistent, false);
        let ended = schedule(&trial, &roles, &order);
        prop_assert!(trial.seen.borrow().is_empty(), "{:?}", trial.seen.borrow());
        prop_assert!(ended.is_some(), "they stand still");
        for (role, done) in ended.into_iter().flatten() {
            let promised = match &done {
                Ok(()) => true,
                Err(Error::Conflict(_)) => true,
                Err(Error::NoRoom(_)) => matches!(role, Role::Hibernate(true)),
                Err(_) => false,
            };
            prop_assert!(promised, "{role:?}: {done:?}");
        }
        let (status, runs) = (trial.sandbox.record().status, trial.running.get() == 1);
        prop_assert!(runs == matches!(status, Status::Running | Status::Paused), "{status}, and a machine runs: {runs}");
        prop_assert!(runs == trial.sandbox.live().is_some(), "{status}");
        let mut state = trial.sandbox.state.lock();
        let status = state.record.status;
        prop_assert!(state.idle.arrive(status, Instant::now()) != Arrival::Wait, "requests wait for nobody");
    }
}
