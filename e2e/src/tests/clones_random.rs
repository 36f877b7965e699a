//! No two copies draw the same random numbers, neither new processes nor processes frozen while
//! drawing.
//!
//! Every value is recorded with the time before it was drawn. A value that two copies have with one
//! time was drawn before the freeze (or in the call that the freeze interrupted); with two times,
//! it came from copied state.

use super::templates;
use crate::{World, long, sandbox::Sandbox};
use anyhow::{Context, Result, bail, ensure};
use bytes::BytesMut;
use futures::{StreamExt, TryStreamExt, future::try_join_all, stream};
use keiki_types::api::BuildTemplate;
use std::{collections::HashMap, sync::Arc};

const SPIN: &str = include_str!("../../guest/spin.py");
/// Copies made at once: half of them forks, half restored.
const AT_ONCE: i64 = 8;
/// Records of the recorder: time, number and kind, what was drawn.
const RECORD: usize = 32;
const RING: usize = 1 << 17;
/// How many records before and after a copy's first ones to check.
const WINDOW: usize = 6_000;

/// Programs that are drawing when they are frozen, besides the recorder.
const SPINNING: [&str; 3] = ["kernel", "python", "tls"];

/// Values seen in all copies.
#[derive(Default)]
struct Seen {
    /// When, and first in which copy.
    values: HashMap<Vec<u8>, (u64, String)>,
    copies: usize,
}

impl Seen {
    /// True if it is new.
    fn add(&mut self, copy: &str, time: u64, value: &[u8]) -> Result<bool> {
        match self.values.get(value) {
            None => {
                self.values.insert(value.to_owned(), (time, copy.to_owned()));
                Ok(true)
            }
            Some((first, _)) if *first == time => Ok(false),
            Some((first, other)) => {
                bail!("{other} drew {} at {first}, {copy} drew it at {time}", value.escape_ascii())
            }
        }
    }

    /// Lines of `TIME VALUE…`; the first and the last may be cut. How many values are new and how
    /// many are not.
    fn add_lines(&mut self, copy: &str, text: &str) -> Result<(usize, usize)> {
        let (mut new, mut known) = (0, 0);
        let whole = text.lines().count().saturating_sub(1);
        for line in text.lines().take(whole).skip(1) {
            let mut words = line.split(' ');
            let time = words.next().unwrap_or_default().parse().with_context(|| format!("{line:?}"))?;
            for value in words {
                *if self.add(copy, time, value.as_bytes())? { &mut new } else { &mut known } += 1;
            }
        }
        Ok((new, known))
    }

    /// Values drawn by processes that exist only in this copy.
    fn add_fresh(&mut self, copy: &str, text: &str) -> Result<()> {
        self.copies += 1;
        for value in text.split_ascii_whitespace() {
            // Its time is unique: no other copy may have this value.
            let is_new = self.add(copy, self.copies as u64, value.as_bytes())?;
            ensure!(is_new, "{copy} drew {value} twice");
        }
        Ok(())
    }
}

/// Starts the drawing programs, and waits for their first values.
async fn spin(sandbox: &Sandbox, all: &[&str]) -> Result<()> {
    sandbox.client.write_bytes(sandbox.id, "/root/spin.py", None, SPIN).await?;
    sandbox.sh("pkill -KILL python; rm -f /dev/shm/*; true").await?;
    for what in all {
        sandbox.background(&format!("exec python3 /root/spin.py {what} /dev/shm/{what}")).await?;
    }
    for what in all {
        let wait = "for i in $(seq 400); do [ -s /dev/shm/WHAT ] && exit 0; sleep 0.1; done; exit 1";
        sandbox.sh(&wait.replace("WHAT", what)).await?;
    }
    Ok(())
}

/// The last values drawn.
async fn drawn(sandbox: &Sandbox, what: &str) -> Result<String> {
    sandbox.sh(&format!("tail -c 1000000 /dev/shm/{what}")).await
}

/// The values of a process that was frozen while drawing, from before and after, once it has
/// stopped.
async fn drawn_in_copy(copy: &Sandbox, what: &str) -> Result<String> {
    let ended = "for i in $(seq 400); do [ -e /dev/shm/WHAT.end ] && exit 0; sleep 0.1; done; exit 1";
    copy.sh(&ended.replace("WHAT", what)).await?;
    drawn(copy, what).await
}

/// The recorder's last records.
async fn recorded(copy: &Sandbox) -> Result<Vec<u8>> {
    let wait = "for i in $(seq 400); do [ -s /dev/shm/drawn.end ] && exec cat /dev/shm/drawn.end; sleep 0.1; done; exit 1";
    let end: usize = copy.sh(wait).await?.parse()?;
    let reader = copy.client.read_file(copy.id, "/dev/shm/drawn").await?;
    let ring: BytesMut = reader.chunks.try_collect().await?;
    let numbers = end.saturating_sub(WINDOW)..end;
    let records = numbers.map(|number| ring.get(number % RING * RECORD..(number % RING + 1) * RECORD));
    Ok(records.flatten().flatten().copied().collect())
}

/// What one copy drew.
struct Drawn {
    fresh: String,
    /// By each of [`SPINNING`].
    lines: Vec<String>,
    records: Vec<u8>,
    /// By a callback for copies.
    told: String,
}

impl Drawn {
    async fn of(copy: &Sandbox) -> Result<Self> {
        const FRESH: &str = "head -c 16 /dev/urandom | od -An -v -tx1 | tr -d ' '; \
            cat /proc/sys/kernel/random/uuid; python3 /root/spin.py";
        let fresh = copy.sh(FRESH).await?;
        let mut lines = Vec::new();
        for what in SPINNING {
            lines.push(drawn_in_copy(copy, what).await?);
        }
        let told = copy.sh("cat /dev/shm/told 2>/dev/null; true").await?;
        Ok(Self { fresh, lines, records: recorded(copy).await?, told })
    }
}

impl Seen {
    fn take(&mut self, name: &str, drawn: &Drawn) -> Result<()> {
        self.add_fresh(name, &drawn.fresh)?;
        for (what, lines) in SPINNING.iter().zip(&drawn.lines) {
            self.add_lines_of_both(name, what, lines)?;
        }
        ensure!(drawn.records.len() == WINDOW * RECORD, "{} bytes of records", drawn.records.len());
        for record in drawn.records.chunks_exact(RECORD) {
            let (time, value) = record.split_at(8);
            self.add(name, u64::from_le_bytes(time.try_into()?), &value[8..])?;
        }
        ensure!(drawn.told == "told", "{name}: a function was not called once, but: {:?}", drawn.told);
        Ok(())
    }

    /// Known lines from before the freeze, and lines after it.
    fn add_lines_of_both(&mut self, name: &str, what: &str, lines: &str) -> Result<()> {
        let (new, known) = self.add_lines(name, lines)?;
        ensure!(new > 5 && known > 0, "{name} drew {new} values of {what}, {known} of the original's");
        Ok(())
    }
}

pub async fn no_two_copies_draw_the_same(world: Arc<World>) -> Result<()> {
    let rounds = if long() { 8 } else { 1 };
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    let recorder = world.places.program("keiki-recorder");
    let recorder = std::fs::read(recorder).context("no keiki-recorder: `scripts/build.sh dev` makes it")?;
    client.write_bytes(parent.id, "/root/keiki-recorder", Some(0o755), recorder).await?;
    let mut seen = Seen::default();
    for round in 0..rounds {
        parent.sh("pkill -KILL keiki-recorder; true").await?;
        spin(&parent, &SPINNING).await?;
        parent.background("exec /root/keiki-recorder /dev/shm/drawn").await?;
        parent.sh("sleep 0.5; [ -s /dev/shm/drawn ]").await?;
        for what in SPINNING {
            seen.add_lines("the original", &drawn(&parent, what).await?)?;
        }
        let mut copies = parent.fork(AT_ONCE / 2).await?;
        let snapshot = parent.snapshot().await?;
        parent.sh("pkill -STOP python3; pkill -STOP keiki-recorder").await?;
        for what in SPINNING {
            let (new, _) = seen.add_lines("the original", &drawn(&parent, what).await?)?;
            ensure!(new > 5, "the original drew {new} values of {what} meanwhile");
        }
        let restored = (0..AT_ONCE / 2).map(|_| Sandbox::restore(client, &snapshot));
        copies.extend(try_join_all(restored).await?);
        let drawn = stream::iter(&copies).map(Drawn::of).buffered(2).try_collect::<Vec<_>>().await?;
        for (n, drawn) in drawn.iter().enumerate() {
            seen.take(&format!("copy {n} of round {round}"), drawn)?;
        }
        try_join_all(copies.iter().map(Sandbox::kill)).await?;
        client.delete_snapshot(snapshot.id).await?;
    }
    ensure!(seen.copies == AT_ONCE as usize * rounds, "{} copies", seen.copies);
    Ok(())
}

/// The module in Keiki's templates reseeds, also in a virtual environment.
pub async fn numpy_begins_anew_in_a_running_process(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let name = "code-interpreter";
    templates::build(client, &BuildTemplate { name: name.into(), ..BuildTemplate::default() }).await?;
    let parent = templates::create(client, name).await?;
    spin(&parent, &["numpy"]).await?;
    let mut seen = Seen::default();
    seen.add_lines("the original", &drawn(&parent, "numpy").await?)?;
    for (n, copy) in parent.fork(3).await?.iter().enumerate() {
        seen.add_lines_of_both(&format!("copy {n}"), "numpy", &drawn_in_copy(copy, "numpy").await?)?;
    }
    Ok(())
}
