//! The history of sandboxes: stored for later queries, and streamed to listeners.
//!
//! ```text
//!   verb ──emit──> pending ──> writer task ──> events.db
//!             └──> live ──> listeners
//! ```
//!
//! An event does not make its verb wait for the disk: it gets a number, goes to listeners and into
//! a list, which a separate task writes. The file is separate from the records because it needs
//! less durability: written events survive the node, but a crash of the host may lose the last
//! second. A reader first writes what is pending, so it misses no event between the past and the
//! present.
//!
//! Bounded per sandbox and in total; the oldest events are removed first.

use crate::{
    error::{Error, Result},
    records::open_database,
};
use futures::{Stream, stream};
use keiki_types::{
    SandboxId,
    api::{Event, EventKind},
};
use parking_lot::Mutex;
use rusqlite::{Connection, params};
use std::{
    collections::{BTreeSet, VecDeque},
    path::Path,
    sync::Arc,
};
use tokio::sync::{Notify, broadcast, broadcast::error::RecvError};

/// Events kept of one sandbox.
const KEPT_OF_ONE: usize = 200;
/// Events kept in total, including those of deleted sandboxes.
const KEPT: usize = 20_000;
/// Most that one answer lists.
pub const MOST: usize = keiki_api::MAX_EVENTS;
/// Events that wait for a disk that cannot be written; beyond this the oldest are lost.
const PENDING: usize = 10_000;
/// A listener that is further behind reads from the file again.
const BEHIND: usize = 256;
/// Numbers skipped at a start: an earlier node may have sent events to listeners that it could no
/// longer write.
const SKIPPED: u64 = PENDING as u64;
/// Characters of a reason.
const REASON: usize = 2000;

/// The log of events.
pub struct Events {
    queue: Mutex<Queue>,
    database: Mutex<Connection>,
    wanted: Notify,
    live: broadcast::Sender<Event>,
}

struct Queue {
    next: u64,
    pending: VecDeque<Event>,
}

/// An event before the log adds number and time.
pub fn event(sandbox_id: SandboxId, kind: EventKind) -> Event {
    Event {
        seq: 0,
        at: String::new(),
        sandbox_id,
        kind,
        reason: None,
        ms: None,
        parent_sandbox_id: None,
        snapshot_id: None,
        children: Vec::new(),
    }
}

impl Events {
    pub fn open(path: &Path) -> Result<Arc<Self>> {
        let open = || -> anyhow::Result<(Connection, u64)> {
            // A commit waits for no disk: see above.
            let database = open_database(
                path,
                "NORMAL",
                "CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, sandbox TEXT NOT NULL, doc TEXT NOT NULL);
                 CREATE INDEX IF NOT EXISTS of_sandbox ON events (sandbox, seq);",
            )?;
            let last: i64 =
                database.query_row("SELECT coalesce(max(seq), 0) FROM events", [], |row| row.get(0))?;
            Ok((database, u64::try_from(last)?))
        };
        let (database, last) = open().map_err(|cause| {
            Error::internal(format!("cannot open the events in {}", path.display()), cause)
        })?;
        let next = if last == 0 { 1 } else { last + SKIPPED };
        Ok(Arc::new(Self {
            queue: Mutex::new(Queue { next, pending: VecDeque::new() }),
            database: Mutex::new(database),
            wanted: Notify::new(),
            live: broadcast::Sender::new(BEHIND),
        }))
    }

    /// Writes what is emitted, as long as it is polled.
    pub async fn keep_writing(self: Arc<Self>) {
        loop {
            self.wanted.notified().await;
            self.flush().await;
        }
    }

    /// Writes what is pending. A failure is logged: no verb fails for its event.
    pub async fn flush(self: &Arc<Self>) {
        let events = Arc::clone(self);
        let written = tokio::task::spawn_blocking(move || events.write(&mut events.database.lock()));
        if let Ok(Err(error)) = written.await {
            tracing::error!(error = &*error, "cannot write events; the next event retries");
        }
    }

    /// Numbers an event, sends it to listeners, and queues it for writing.
    pub fn emit(&self, mut event: Event) {
        event.at = crate::records::rfc3339(time::OffsetDateTime::now_utc());
        if let Some(reason) = &mut event.reason
            && let Some((end, _)) = reason.char_indices().nth(REASON)
        {
            reason.truncate(end);
        }
        {
            let mut queue = self.queue.lock();
            event.seq = queue.next;
            queue.next += 1;
            if queue.pending.len() >= PENDING {
                queue.pending.pop_front();
            }
            queue.pending.push_back(event.clone());
            // Sent in the order of their numbers. Having no listener is not an error.
            let _ = self.live.send(event);
        }
        self.wanted.notify_one();
    }

    /// Events after `since`, oldest first, at most `limit`; of one sandbox or of all. Without
    /// `since`: the last ones.
    pub async fn list(
        self: &Arc<Self>,
        of: Option<SandboxId>,
        since: Option<u64>,
        limit: usize,
    ) -> Result<Vec<Event>> {
        let events = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || {
            let mut database = events.database.lock();
            events.write(&mut database)?;
            read(&database, of, since, limit)
        });
        let read = read.await.map_err(|cause| Error::internal("reading events was interrupted", cause))?;
        read.map_err(|cause| Error::internal("the node's events cannot be read or written", cause))
    }

    /// Events after `since`, then new ones as they happen, without an end and without a gap. Ends
    /// only if the file cannot be read.
    pub fn follow(
        self: &Arc<Self>,
        of: Option<SandboxId>,
        since: Option<u64>,
    ) -> impl Stream<Item = Event> + Send + use<> {
        // Listens first, then reads: what happens in between is in both, and is returned once.
        let heard = self.live.subscribe();
        let (events, ready) = (Arc::clone(self), VecDeque::new());
        let begin = Follower { events, of, last: since, heard, behind: true, ready };
        stream::unfold(begin, |mut follower| async move {
            let event = follower.next().await?;
            Some((event, follower))
        })
    }

    /// Writes what is pending; what cannot be written stays pending. Call with the file held, so
    /// that the order of the file is that of the numbers.
    fn write(&self, database: &mut Connection) -> anyhow::Result<()> {
        let pending: Vec<Event> = self.queue.lock().pending.iter().cloned().collect();
        let Some(last) = pending.last().map(|event| event.seq) else { return Ok(()) };
        let transaction = database.transaction()?;
        for event in &pending {
            transaction.execute(
                "INSERT OR REPLACE INTO events (seq, sandbox, doc) VALUES (?1, ?2, ?3)",
                params![
                    i64::try_from(event.seq)?,
                    event.sandbox_id.to_string(),
                    serde_json::to_string(event)?
                ],
            )?;
        }
        for id in pending.iter().map(|event| event.sandbox_id).collect::<BTreeSet<_>>() {
            transaction.execute(
                "DELETE FROM events WHERE sandbox = ?1 AND seq <=
                    (SELECT seq FROM events WHERE sandbox = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
                params![id.to_string(), KEPT_OF_ONE],
            )?;
        }
        transaction.execute(
            "DELETE FROM events WHERE seq <= (SELECT seq FROM events ORDER BY seq DESC LIMIT 1 OFFSET ?1)",
            params![KEPT],
        )?;
        transaction.commit()?;
        self.queue.lock().pending.retain(|event| event.seq > last);
        Ok(())
    }
}

struct Follower {
    events: Arc<Events>,
    of: Option<SandboxId>,
    last: Option<u64>,
    heard: broadcast::Receiver<Event>,
    behind: bool,
    ready: VecDeque<Event>,
}

impl Follower {
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                self.last = Some(event.seq);
                return Some(event);
            }
            if self.behind {
                let read = self.events.list(self.of, self.last, MOST).await;
                let read = read.inspect_err(|error| {
                    tracing::error!(error = error as &dyn std::error::Error, "events cannot be followed");
                });
                self.ready = read.ok()?.into();
                self.behind = self.ready.len() == MOST;
                continue;
            }
            match self.heard.recv().await {
                Ok(event) => {
                    let is_new = self.last.is_none_or(|last| event.seq > last);
                    if is_new && self.of.is_none_or(|id| id == event.sandbox_id) {
                        self.ready.push_back(event);
                    }
                }
                Err(RecvError::Lagged(_)) => self.behind = true,
                Err(RecvError::Closed) => return None,
            }
        }
    }
}

fn read(
    database: &Connection,
    of: Option<SandboxId>,
    since: Option<u64>,
    limit: usize,
) -> anyhow::Result<Vec<Event>> {
    // With a number: the events after it. Without: the last ones, reversed.
    let order = if since.is_some() { "ASC" } else { "DESC" };
    let sql = format!(
        "SELECT doc FROM events WHERE seq > ?1 AND (?2 IS NULL OR sandbox = ?2) ORDER BY seq {order} LIMIT ?3"
    );
    let mut statement = database.prepare_cached(&sql)?;
    let since = i64::try_from(since.unwrap_or(0)).unwrap_or(i64::MAX);
    let docs = statement.query_map(params![since, of.map(|id| id.to_string()), limit.min(MOST)], |row| {
        row.get::<_, String>(0)
    })?;
    let mut events: Vec<Event> =
        docs.map(|doc| Ok(serde_json::from_str(&doc?)?)).collect::<anyhow::Result<_>>()?;
    events.sort_by_key(|event| event.seq);
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::{BEHIND, Events, KEPT_OF_ONE, MOST, REASON, event};
    use futures::StreamExt;
    use keiki_types::{SandboxId, api::EventKind};
    use std::{pin::pin, time::Duration};
    use tokio::time::timeout;

    #[tokio::test]
    async fn events_survive_and_are_bounded_for_each_sandbox() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("events.db");
        let (noisy, quiet) = (SandboxId::new(), SandboxId::new());
        let events = Events::open(&path)?;
        events.emit(event(quiet, EventKind::Created));
        for _ in 0..KEPT_OF_ONE + 50 {
            events.emit(event(noisy, EventKind::Paused));
        }
        events.emit(crate::events::event(noisy, EventKind::Failed));
        events.flush().await;
        drop(events);
        let events = Events::open(&path)?;
        let of_noisy = events.list(Some(noisy), None, MOST).await?;
        assert_eq!(of_noisy.len(), KEPT_OF_ONE);
        assert_eq!(of_noisy.last().map(|event| event.kind), Some(EventKind::Failed));
        assert!(of_noisy.is_sorted_by_key(|event| event.seq));
        let all = events.list(None, None, MOST).await?;
        assert_eq!(all.first().map(|event| event.sandbox_id), Some(quiet));
        // After a restart, numbers continue beyond all that were ever sent.
        let last = all.last().map_or(0, |event| event.seq);
        events.emit(event(quiet, EventKind::Deleted));
        let fresh = events.list(Some(quiet), Some(last), MOST).await?;
        assert_eq!(fresh.iter().map(|event| event.kind).collect::<Vec<_>>(), [EventKind::Deleted]);
        assert_eq!(events.list(None, None, 1).await?, fresh);
        assert!(events.list(None, Some(u64::MAX), MOST).await?.is_empty());
        Ok(())
    }

    #[tokio::test]
    async fn followers_see_each_event_once_also_when_they_fall_behind() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let events = Events::open(&dir.path().join("events.db"))?;
        let (mine, other) = (SandboxId::new(), SandboxId::new());
        events.emit(event(mine, EventKind::Created));
        events.emit(event(other, EventKind::Created));
        let mut follower = pin!(events.follow(Some(mine), Some(0)));
        assert_eq!(follower.next().await.map(|event| event.kind), Some(EventKind::Created));
        // More than a listener's queue holds, of both.
        let count = BEHIND / 2 + 20;
        for _ in 0..count {
            events.emit(event(mine, EventKind::Paused));
            events.emit(event(other, EventKind::Paused));
        }
        let mut seen = Vec::new();
        while let Ok(Some(event)) = timeout(Duration::from_millis(300), follower.next()).await {
            assert_eq!(event.sandbox_id, mine);
            seen.push(event.seq);
        }
        assert_eq!(seen.len(), count);
        assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
        events.emit(event(mine, EventKind::Deleted));
        let live = timeout(Duration::from_secs(5), follower.next()).await?;
        assert_eq!(live.map(|event| event.kind), Some(EventKind::Deleted));
        Ok(())
    }

    #[tokio::test]
    async fn a_long_reason_is_cut() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let events = Events::open(&dir.path().join("events.db"))?;
        let id = SandboxId::new();
        let mut failed = event(id, EventKind::Failed);
        failed.reason = Some("é".repeat(REASON * 3));
        events.emit(failed);
        let kept = events.list(Some(id), None, 1).await?;
        assert_eq!(kept[0].reason.as_ref().map(|reason| reason.chars().count()), Some(REASON));
        Ok(())
    }
}
