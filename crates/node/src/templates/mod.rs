//! Templates: built from packages, baked by one cold boot, then restored for every create.
//!
//! ```text
//!   build: packages ──> kernel, initramfs, root disk      (keiki-image, cached)
//!   bake:  boot ──> agent ready ──> warm ──> freeze ──> persist ──> record
//!   use:   load once, keep VMs prepared ahead for creates
//! ```
//!
//! One build per template at a time: another build request joins it, and a create gets a 503 with
//! `Retry-After`.

mod bake;
mod build;
mod keep;

use crate::{
    error::Result,
    fleet::Prepared,
    records::{TemplateRecord, rfc3339},
};
use futures::{StreamExt, stream::BoxStream};
use keiki_engine::Frozen;
use keiki_types::{SandboxId, api::Build};
use parking_lot::Mutex;
use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use time::OffsetDateTime;
use tokio::{sync::watch, task::JoinSet};

/// The error of a create while its template is being built.
const RETRY_AFTER: Duration = Duration::from_secs(3);
/// Builds remembered, with their logs.
const BUILDS_KEPT: usize = 32;
/// Lines of a build's log that are kept.
const LOG_LINES: usize = 2000;
/// Refilling waits this long, so that it does not compete with the create that took a VM.
const REFILL_PAUSE: Duration = Duration::from_millis(250);
/// The templates of a node.
#[derive(Default)]
pub(crate) struct Templates {
    state: Mutex<State>,
    building: tokio::sync::Mutex<JoinSet<()>>,
}

#[derive(Default)]
struct State {
    baked: HashMap<String, Arc<Baked>>,
    builds: VecDeque<Arc<Building>>,
}

/// A template ready for use.
pub(crate) struct Baked {
    pub record: TemplateRecord,
    pub frozen: Arc<dyn Frozen>,
    ahead: Mutex<Ahead>,
}

/// VMs prepared ahead of creates.
#[derive(Default)]
struct Ahead {
    ready: VecDeque<Prepared>,
    making: usize,
    closed: bool,
}

pub(crate) struct Building {
    id: String,
    name: String,
    progress: watch::Sender<Progress>,
}

#[derive(Clone)]
struct Progress {
    view: Build,
    lines: Vec<String>,
}

impl Baked {
    fn new(record: TemplateRecord, frozen: Arc<dyn Frozen>) -> Arc<Self> {
        Arc::new(Self { record, frozen, ahead: Mutex::default() })
    }

    /// A VM that was prepared ahead, if one is there.
    pub fn take_ahead(&self) -> Option<Prepared> {
        let mut ahead = self.ahead.lock();
        while let Some(prepared) = ahead.ready.pop_front() {
            if prepared.vm.is_alive() {
                return Some(prepared);
            }
            tracing::warn!(id = %prepared.id, "a VM that was prepared ahead has ended");
        }
        None
    }

    /// Keeps a VM for a create; gives it back if none is wanted any more.
    fn keep_ahead(&self, prepared: Result<Prepared>) -> Option<Prepared> {
        let mut ahead = self.ahead.lock();
        ahead.making -= 1;
        match prepared {
            Ok(prepared) if ahead.closed => return Some(prepared),
            Ok(prepared) => ahead.ready.push_back(prepared),
            Err(error) => {
                tracing::warn!(
                    error = &error as &dyn std::error::Error,
                    "cannot prepare a VM ahead of creates"
                );
            }
        }
        None
    }
}

impl Building {
    pub fn say(&self, line: &str) {
        tracing::info!(template = self.name, line, "build");
        self.progress.send_modify(|progress| {
            line.clone_into(&mut progress.view.step);
            if progress.lines.len() < LOG_LINES {
                progress.lines.push(line.into());
            }
        });
    }

    fn is_running(&self) -> bool {
        self.progress.borrow().view.ended_at.is_empty()
    }
}

impl Templates {
    /// Newest first.
    pub fn builds(&self) -> Vec<Build> {
        self.state.lock().builds.iter().rev().map(|build| build.progress.borrow().view.clone()).collect()
    }

    /// Lines of a build from its start, ending with it.
    pub fn log(&self, id: &str) -> Option<BoxStream<'static, String>> {
        let build = self.state.lock().builds.iter().find(|build| build.id == id).cloned()?;
        let progress = build.progress.subscribe();
        let lines =
            futures::stream::unfold((progress, 0, Some(build)), |(mut progress, sent, keep)| async move {
                loop {
                    let (fresh, ended) = {
                        let now = progress.borrow_and_update();
                        (now.lines.get(sent..).unwrap_or_default().to_vec(), !now.view.ended_at.is_empty())
                    };
                    if !fresh.is_empty() {
                        let sent = sent + fresh.len();
                        return Some((futures::stream::iter(fresh), (progress, sent, keep)));
                    }
                    if ended || progress.changed().await.is_err() {
                        return None;
                    }
                }
            });
        Some(lines.flatten().boxed())
    }

    /// VMs prepared ahead of creates, by template.
    pub(crate) fn prestarted(&self) -> Vec<(String, usize)> {
        let state = self.state.lock();
        let mut all: Vec<_> = state
            .baked
            .values()
            .map(|baked| (baked.record.name.clone(), baked.ahead.lock().ready.len()))
            .collect();
        all.sort();
        all
    }

    fn current(&self, name: &str) -> Option<Arc<Baked>> {
        self.state.lock().baked.get(name).cloned()
    }

    fn running(&self, name: &str) -> Option<Arc<Building>> {
        self.state.lock().builds.iter().find(|build| build.name == name && build.is_running()).cloned()
    }

    /// Joins the running build of this template, or begins one.
    fn begin(&self, name: &str) -> (Arc<Building>, bool) {
        let mut state = self.state.lock();
        if let Some(running) = state.builds.iter().find(|build| build.name == name && build.is_running()) {
            return (Arc::clone(running), false);
        }
        let view = Build {
            id: SandboxId::new().to_string(),
            name: name.into(),
            status: "running".into(),
            error: String::new(),
            started_at: rfc3339(OffsetDateTime::now_utc()),
            ended_at: String::new(),
            step: String::new(),
        };
        let id = view.id.clone();
        let progress = watch::Sender::new(Progress { view, lines: Vec::new() });
        let build = Arc::new(Building { id, name: name.into(), progress });
        state.builds.push_back(Arc::clone(&build));
        while state.builds.len() > BUILDS_KEPT && !state.builds[0].is_running() {
            state.builds.pop_front();
        }
        (build, true)
    }
}
