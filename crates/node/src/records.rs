//! What the node must still know after a crash: sandboxes, snapshots, templates, and the generation
//! counter.
//!
//! One SQLite file. A row is an id, a few columns to find it by, and the record as JSON. Every
//! write is durable when it returns.

use crate::error::{Error, Result};
use keiki_sys::failpoint;
use keiki_types::{
    EngineKind, Origin, SandboxId, Shape, SnapshotId, Status,
    api::{self, Stale, Timings, secrets::Fates},
};
use parking_lot::Mutex;
use rusqlite::{Connection, OptionalExtension, params};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};
use time::OffsetDateTime;

pub use keiki_api::rfc3339;

/// Generations are taken from the database in blocks: one durable write serves this many copies.
const GENERATION_BLOCK: u64 = 1024;

/// How long, and how many, named requests are remembered.
const REQUESTS_KEPT_FOR: time::Duration = time::Duration::hours(24);
const REQUESTS_KEPT: i64 = 10_000;

/// A sandbox as recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SandboxRecord {
    pub id: SandboxId,
    /// Template of the lineage.
    pub template: String,
    pub template_version: String,
    pub shape: Shape,
    pub status: Status,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    pub metadata: BTreeMap<String, String>,
    /// Restored from.
    pub from_snapshot: Option<SnapshotId>,
    /// Forked from.
    pub parent_sandbox_id: Option<SandboxId>,
    /// Nearest snapshot in its ancestry.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// How it came to be.
    pub origin: Origin,
    /// Request to released.
    pub boot_ms: u64,
    /// Hibernate rather than delete.
    pub persistent: bool,
    /// Idle seconds it may live.
    pub ttl_seconds: u64,
    /// Unique number of this copy.
    pub generation: u64,
    /// What runs it.
    pub engine: EngineKind,
    /// Its network slot, while it has a machine.
    pub slot: Option<u16>,
    pub timings: Option<Timings>,
    /// Why it failed.
    pub error: Option<String>,
    /// Names of its secrets, and what copies get of each. Only the guest has the values.
    #[serde(default)]
    pub secrets: BTreeMap<String, Fates>,
    /// Release of the kernel in it.
    #[serde(default)]
    pub kernel: String,
}

/// A snapshot as recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SnapshotRecord {
    pub id: SnapshotId,
    /// Of which sandbox.
    pub sandbox_id: SandboxId,
    /// Template of the lineage.
    pub template: String,
    pub template_version: String,
    pub shape: Shape,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// Bytes in its files.
    pub size_bytes: u64,
    /// Nearest snapshot in its ancestry.
    pub parent_snapshot_id: Option<SnapshotId>,
    /// Generation of the machine it was taken from.
    pub generation: u64,
    /// Engine that can restore it.
    pub engine: EngineKind,
    /// Labels at that time.
    pub metadata: BTreeMap<String, String>,
    /// Secrets that the sandbox had, and what copies get of each.
    #[serde(default)]
    pub secrets: BTreeMap<String, Fates>,
    /// Release of the kernel in it.
    #[serde(default)]
    pub kernel: String,
}

impl SnapshotRecord {
    /// How long ago it was taken, by this host's clock.
    pub fn age(&self) -> Duration {
        (OffsetDateTime::now_utc() - self.created_at).try_into().unwrap_or_default()
    }

    /// As the API shows it.
    pub fn view(&self, stale: Vec<Stale>) -> api::Snapshot {
        api::Snapshot {
            id: self.id,
            sandbox_id: self.sandbox_id,
            template: self.template.clone(),
            template_version: self.template_version.clone(),
            size_bytes: self.size_bytes,
            created_at: rfc3339(self.created_at),
            shape: self.shape,
            parent_snapshot_id: self.parent_snapshot_id,
            engine: self.engine,
            metadata: self.metadata.clone(),
            age_seconds: self.age().as_secs(),
            kernel: self.kernel.clone(),
            stale,
            timings: None,
        }
    }
}

/// A baked template as recorded.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TemplateRecord {
    pub name: String,
    /// Content digest; also the name of its directory.
    pub version: String,
    pub shape: Shape,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// Bytes in its files.
    pub size_bytes: u64,
    /// What it holds.
    pub description: String,
    /// Generation of the machine it was baked from.
    pub generation: u64,
    /// Engine that can restore it.
    pub engine: EngineKind,
    /// Cold boot to ready when it was baked, in ms.
    pub cold_boot_ms: f64,
    /// Release of the kernel in it.
    #[serde(default)]
    pub kernel: String,
}

/// A request with a name from its caller, and what it created. It is written together with what was
/// made, so one is never there without the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// Digest of the caller and the name.
    pub key: String,
    /// Digest of what was asked for.
    pub asked: String,
    /// What was made.
    pub made: Vec<String>,
}

/// The database. Cheap to clone.
#[derive(Clone)]
pub struct Records {
    inner: Arc<Mutex<Inner>>,
}

struct Inner {
    connection: Connection,
    next_generation: u64,
    reserved_until: u64,
}

/// Something with a table.
pub trait Row: Serialize + DeserializeOwned + Send + 'static {
    const TABLE: &'static str;
    fn key(&self) -> String;
}

impl Row for SandboxRecord {
    const TABLE: &'static str = "sandboxes";
    fn key(&self) -> String {
        self.id.to_string()
    }
}

impl Row for SnapshotRecord {
    const TABLE: &'static str = "snapshots";
    fn key(&self) -> String {
        self.id.to_string()
    }
}

impl Row for TemplateRecord {
    const TABLE: &'static str = "templates";
    fn key(&self) -> String {
        self.name.clone()
    }
}

impl Records {
    pub fn open(path: &Path) -> Result<Self> {
        let open = || -> anyhow::Result<Inner> {
            let connection = open_database(
                path,
                "FULL",
                "CREATE TABLE IF NOT EXISTS sandboxes (key TEXT PRIMARY KEY, doc TEXT NOT NULL);
                 CREATE TABLE IF NOT EXISTS snapshots (key TEXT PRIMARY KEY, doc TEXT NOT NULL);
                 CREATE TABLE IF NOT EXISTS templates (key TEXT PRIMARY KEY, doc TEXT NOT NULL);
                 CREATE TABLE IF NOT EXISTS requests
                     (seq INTEGER PRIMARY KEY, key TEXT UNIQUE NOT NULL, at INTEGER NOT NULL, doc TEXT NOT NULL);
                 CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);",
            )?;
            let used: Option<i64> = connection
                .query_row("SELECT value FROM counters WHERE name = 'generation'", [], |row| row.get(0))
                .optional()?;
            let next = u64::try_from(used.unwrap_or(0))? + 1;
            Ok(Inner { connection, next_generation: next, reserved_until: next - 1 })
        };
        let inner = open().map_err(|cause| {
            Error::internal(format!("cannot open the records in {}", path.display()), cause)
        })?;
        Ok(Self { inner: Arc::new(Mutex::new(inner)) })
    }

    /// Writes records, all or none.
    pub async fn put<R: Row>(&self, rows: Vec<R>) -> Result<()> {
        self.put_made(rows, None).await
    }

    /// Writes records, and the named request that made them, all or none. Old requests are
    /// forgotten.
    pub async fn put_made<R: Row>(&self, rows: Vec<R>, request: Option<RequestRecord>) -> Result<()> {
        self.put_all(rows, Vec::<R>::new(), request).await
    }

    /// As [`Records::put_made`], with rows of two kinds.
    pub async fn put_all<R: Row, S: Row>(
        &self,
        rows: Vec<R>,
        more: Vec<S>,
        request: Option<RequestRecord>,
    ) -> Result<()> {
        self.run(move |inner| {
            let transaction = inner.connection.transaction()?;
            if let Some(request) = &request {
                remember(&transaction, request, OffsetDateTime::now_utc())?;
            }
            write(&transaction, &rows)?;
            write(&transaction, &more)?;
            transaction.commit()?;
            failpoint::reach(R::TABLE);
            Ok(())
        })
        .await
    }

    /// Removes records, all or none. A missing record is not an error.
    pub async fn remove<R: Row>(&self, keys: Vec<String>) -> Result<()> {
        self.run(move |inner| {
            let transaction = inner.connection.transaction()?;
            for key in &keys {
                transaction.execute(&format!("DELETE FROM {} WHERE key = ?1", R::TABLE), [key])?;
            }
            transaction.commit()?;
            failpoint::reach(R::TABLE);
            Ok(())
        })
        .await
    }

    /// All records of a kind, in the order of their keys.
    pub async fn all<R: Row>(&self) -> Result<Vec<R>> {
        self.run(move |inner| {
            let mut statement =
                inner.connection.prepare(&format!("SELECT doc FROM {} ORDER BY key", R::TABLE))?;
            let docs = statement.query_map([], |row| row.get::<_, String>(0))?;
            docs.map(|doc| Ok(serde_json::from_str(&doc?)?)).collect()
        })
        .await
    }

    /// How many records of a kind there are.
    pub async fn count<R: Row>(&self) -> Result<usize> {
        self.run(|inner| {
            let sql = format!("SELECT count(*) FROM {}", R::TABLE);
            Ok(usize::try_from(inner.connection.query_row(&sql, [], |row| row.get::<_, i64>(0))?)?)
        })
        .await
    }

    /// One record.
    pub async fn get<R: Row>(&self, key: &str) -> Result<Option<R>> {
        let key = key.to_owned();
        self.run(move |inner| {
            find(&inner.connection, &format!("SELECT doc FROM {} WHERE key = ?1", R::TABLE), [key])
        })
        .await
    }

    /// The request with this key, unless it is too old.
    pub async fn request(&self, key: &str) -> Result<Option<RequestRecord>> {
        let key = key.to_owned();
        let since = (OffsetDateTime::now_utc() - REQUESTS_KEPT_FOR).unix_timestamp();
        self.run(move |inner| {
            let sql = "SELECT doc FROM requests WHERE key = ?1 AND at >= ?2";
            find(&inner.connection, sql, params![key, since])
        })
        .await
    }

    /// A generation that no copy on this node has had or will have, greater than all before it.
    pub async fn generation(&self) -> Result<u64> {
        self.run(|inner| {
            if inner.next_generation > inner.reserved_until {
                let until = inner.next_generation + GENERATION_BLOCK - 1;
                inner.connection.execute(
                    "INSERT OR REPLACE INTO counters (name, value) VALUES ('generation', ?1)",
                    [i64::try_from(until)?],
                )?;
                inner.reserved_until = until;
            }
            inner.next_generation += 1;
            Ok(inner.next_generation - 1)
        })
        .await
    }

    async fn run<T, F>(&self, work: F) -> Result<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut Inner) -> anyhow::Result<T> + Send + 'static,
    {
        let inner = Arc::clone(&self.inner);
        let done = tokio::task::spawn_blocking(move || work(&mut inner.lock())).await;
        done.map_err(|cause| Error::internal("the thread that keeps the records failed", cause))?.map_err(
            |cause| match cause.downcast_ref::<rusqlite::Error>().and_then(rusqlite::Error::sqlite_error_code)
            {
                Some(rusqlite::ErrorCode::DiskFull) => {
                    Error::NoRoom("the disk with the node's records is full".into())
                }
                _ => Error::internal("the node's records cannot be read or written", cause),
            },
        )
    }
}

/// Opens or makes a database of the node; one that a newer version has written is refused.
pub fn open_database(path: &Path, synchronous: &str, tables: &str) -> anyhow::Result<Connection> {
    let database = Connection::open(path)?;
    database.pragma_update(None, "journal_mode", "WAL")?;
    database.pragma_update(None, "synchronous", synchronous)?;
    let version: i64 = database.pragma_query_value(None, "user_version", |row| row.get(0))?;
    anyhow::ensure!(version <= 1, "it was written by a newer version of keiki (schema {version})");
    database.execute_batch(tables)?;
    database.pragma_update(None, "user_version", 1)?;
    Ok(database)
}

fn find<T: DeserializeOwned>(
    database: &Connection,
    sql: &str,
    params: impl rusqlite::Params,
) -> anyhow::Result<Option<T>> {
    let doc: Option<String> = database.query_row(sql, params, |row| row.get(0)).optional()?;
    Ok(doc.map(|doc| serde_json::from_str(&doc)).transpose()?)
}

fn write<R: Row>(transaction: &rusqlite::Transaction, rows: &[R]) -> anyhow::Result<()> {
    for row in rows {
        transaction.execute(
            &format!("INSERT OR REPLACE INTO {} (key, doc) VALUES (?1, ?2)", R::TABLE),
            params![row.key(), serde_json::to_string(row)?],
        )?;
    }
    Ok(())
}

fn remember(
    transaction: &rusqlite::Transaction,
    request: &RequestRecord,
    now: OffsetDateTime,
) -> anyhow::Result<()> {
    let since = (now - REQUESTS_KEPT_FOR).unix_timestamp();
    transaction.execute("DELETE FROM requests WHERE at < ?1 OR key = ?2", params![since, request.key])?;
    transaction.execute(
        "INSERT INTO requests (key, at, doc) VALUES (?1, ?2, ?3)",
        params![request.key, now.unix_timestamp(), serde_json::to_string(request)?],
    )?;
    transaction
        .execute("DELETE FROM requests WHERE seq <= (SELECT MAX(seq) FROM requests) - ?1", [REQUESTS_KEPT])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{REQUESTS_KEPT, REQUESTS_KEPT_FOR, Records, RequestRecord, TemplateRecord, remember};
    use keiki_types::{EngineKind, Shape};
    use time::OffsetDateTime;

    fn template(name: &str) -> TemplateRecord {
        TemplateRecord {
            name: name.into(),
            version: "v".into(),
            shape: Shape { vcpus: 1, memory_mib: 256, disk_mib: 1024 },
            created_at: OffsetDateTime::UNIX_EPOCH,
            size_bytes: 1,
            description: String::new(),
            generation: 1,
            engine: EngineKind::Qemu,
            cold_boot_ms: 0.0,
            kernel: String::new(),
        }
    }

    #[tokio::test]
    async fn records_survive_reopening() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("keiki.db");
        let records = Records::open(&path)?;
        records.put(vec![template("a"), template("b")]).await?;
        records.remove::<TemplateRecord>(vec!["a".into(), "never".into()]).await?;
        drop(records);
        let records = Records::open(&path)?;
        let names: Vec<_> = records.all::<TemplateRecord>().await?.into_iter().map(|t| t.name).collect();
        assert_eq!(names, ["b"]);
        assert!(records.get::<TemplateRecord>("a").await?.is_none());
        Ok(())
    }

    fn named(key: &str) -> RequestRecord {
        RequestRecord { key: key.into(), asked: "a".into(), made: vec!["m".into()] }
    }

    #[tokio::test]
    async fn a_named_request_survives_reopening_and_is_forgotten_in_time() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("keiki.db");
        let records = Records::open(&path)?;
        records.put_made(vec![template("a")], Some(named("k"))).await?;
        drop(records);
        let records = Records::open(&path)?;
        assert_eq!(records.request("k").await?, Some(named("k")));
        assert_eq!(records.request("other").await?, None);

        let long_ago = OffsetDateTime::now_utc() - REQUESTS_KEPT_FOR - time::Duration::minutes(1);
        let old = move |inner: &mut super::Inner| {
            let transaction = inner.connection.transaction()?;
            remember(&transaction, &named("old"), long_ago)?;
            Ok(transaction.commit()?)
        };
        records.run(old).await?;
        assert_eq!(records.request("old").await?, None, "older than it is kept");
        Ok(())
    }

    #[tokio::test]
    async fn only_so_many_named_requests_are_kept() -> anyhow::Result<()> {
        let records = Records::open(std::path::Path::new(":memory:"))?;
        let many = |inner: &mut super::Inner| {
            let transaction = inner.connection.transaction()?;
            for number in 0..REQUESTS_KEPT + 5 {
                remember(&transaction, &named(&number.to_string()), OffsetDateTime::now_utc())?;
            }
            Ok(transaction.commit()?)
        };
        records.run(many).await?;
        assert_eq!(records.request("4").await?, None);
        assert!(records.request("5").await?.is_some());
        assert!(records.request(&(REQUESTS_KEPT + 4).to_string()).await?.is_some());
        Ok(())
    }

    #[tokio::test]
    async fn generations_only_grow_also_across_crashes() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("keiki.db");
        let mut last = 0;
        for _ in 0..3 {
            let records = Records::open(&path)?;
            for _ in 0..1500 {
                let next = records.generation().await?;
                assert!(next > last);
                last = next;
            }
        }
        Ok(())
    }

    #[test]
    fn a_newer_schema_is_refused() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("keiki.db");
        drop(Records::open(&path)?);
        rusqlite::Connection::open(&path)?.pragma_update(None, "user_version", 99)?;
        assert!(Records::open(&path).is_err());
        Ok(())
    }
}
