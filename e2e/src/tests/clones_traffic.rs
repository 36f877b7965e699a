//! Traffic between a caller and a sandbox during a freeze belongs to the original, all of it.

use crate::{World, patience, sandbox::Sandbox};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{StreamExt, stream};
use keiki_client::ExecEvent;
use keiki_types::api::ExecRequest;
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

const PIECE: usize = 256 << 10;
const PIECES: usize = 64;
/// How long an upload may pause: the node aborts one after a minute.
const STILL: Duration = Duration::from_secs(20);
const LINES: usize = 150_000;

/// A piece of a file that differs from every other piece.
fn piece(n: usize) -> Bytes {
    (0..PIECE).map(|at| (at * 31 + at / 251 + n * 7) as u8).collect::<Vec<_>>().into()
}

/// Uploads at least while `goes_on` holds, then to the end.
async fn upload(sandbox: Sandbox, goes_on: Arc<AtomicBool>) -> Result<()> {
    let slow = stream::iter(0..PIECES).then(move |n| {
        let goes_on = goes_on.clone();
        async move {
            // The second half waits until the copies are made, but no piece waits so long that the
            // node aborts the upload.
            let begun = Instant::now();
            while n >= PIECES / 2 && goes_on.load(Ordering::Relaxed) && begun.elapsed() < STILL {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok(piece(n))
        }
    });
    let done = sandbox.client.write_file(sandbox.id, "/srv/big", None, slow).await?;
    ensure!(done.bytes == (PIECE * PIECES) as u64, "{} bytes were written", done.bytes);
    let mut back = sandbox.client.read_file(sandbox.id, "/srv/big").await?.chunks;
    let (mut at, mut expected) = (0, Bytes::new());
    while let Some(chunk) = back.next().await {
        for byte in chunk? {
            if at % PIECE == 0 {
                expected = piece(at / PIECE);
            }
            ensure!(expected[at % PIECE] == byte, "byte {at} is another");
            at += 1;
        }
    }
    ensure!(at == PIECE * PIECES, "it has {at} bytes");
    Ok(())
}

/// Reads a long output to its end: every line, once.
async fn read_output(sandbox: Sandbox, started: Arc<AtomicBool>) -> Result<()> {
    let line = format!(
        "for i in $(seq 10); do seq $(((i-1)*{0}+1)) $((i*{0})); sleep 0.3; done; exit 9",
        LINES / 10
    );
    let request = ExecRequest { cmd: Some(line), ..ExecRequest::default() };
    let mut events = sandbox.client.exec_stream(sandbox.id, &request).await?;
    let (mut text, mut code) = (Vec::new(), None);
    while let Some(event) = events.next().await {
        match event? {
            ExecEvent::Stdout(bytes) => text.extend_from_slice(&bytes),
            ExecEvent::Stderr(bytes) => anyhow::bail!("{}", String::from_utf8_lossy(&bytes)),
            ExecEvent::Exit(exit) => code = Some(exit),
        }
        started.store(true, Ordering::Relaxed);
    }
    ensure!(code == Some(9), "it ended with {code:?}");
    let text = String::from_utf8(text)?;
    let mut lines = text.lines();
    for n in 1..=LINES {
        ensure!(lines.next() == Some(&n.to_string()), "line {n} is missing or another");
    }
    ensure!(lines.next().is_none(), "there are more lines");
    Ok(())
}

/// Runs small commands one after the other.
async fn run_small(
    sandbox: Sandbox,
    who: usize,
    goes_on: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
) -> Result<()> {
    for n in 0.. {
        if !goes_on.load(Ordering::Relaxed) {
            break;
        }
        let out = sandbox.sh(&format!("echo {who}-{n}; echo {who}-{n} >>/root/small-{who}")).await?;
        ensure!(out == format!("{who}-{n}"), "command {n} of {who} said {out}");
        count.fetch_add(1, Ordering::Relaxed);
        // Each command ran once.
        let lines: usize = sandbox.sh(&format!("wc -l </root/small-{who}")).await?.parse()?;
        ensure!(lines == n + 1, "command {n} of {who}: {lines} were carried out");
    }
    Ok(())
}

pub async fn traffic_is_the_originals(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    parent.sh("echo mine >/run/keiki/own; echo old >/srv/big").await?;
    let request = ExecRequest {
        cmd: Some("while :; do sleep 0.1; done".into()),
        env: [("KEIKI_TEST_TOKEN".to_owned(), "hush".to_owned())].into(),
        ..ExecRequest::default()
    };
    let with_env = client.exec_stream(parent.id, &request).await?;
    let (goes_on, started, count) =
        (Arc::new(AtomicBool::new(true)), Arc::default(), Arc::new(AtomicUsize::new(0)));
    let uploading = tokio::spawn(upload(parent.clone(), Arc::clone(&goes_on)));
    let reading = tokio::spawn(read_output(parent.clone(), Arc::clone(&started)));
    let small: Vec<_> = (0..4)
        .map(|who| tokio::spawn(run_small(parent.clone(), who, Arc::clone(&goes_on), Arc::clone(&count))))
        .collect();
    for _ in 0..100 * patience() {
        if started.load(Ordering::Relaxed) && count.load(Ordering::Relaxed) > 4 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut copies = parent.fork(2).await?;
    let snapshot = parent.snapshot().await?;
    copies.push(Sandbox::restore(client, &snapshot).await?);
    ensure!(!uploading.is_finished(), "the upload was over: nothing is tried");
    for (n, copy) in copies.iter().enumerate() {
        no_ghosts(copy).await.with_context(|| format!("copy {n}"))?;
    }
    goes_on.store(false, Ordering::Relaxed);
    uploading.await?.context("the upload")?;
    reading.await?.context("the output")?;
    for task in small {
        task.await?.context("small commands")?;
    }
    ensure!(count.load(Ordering::Relaxed) > 8, "few commands were carried out");
    drop(with_env);
    // A wake is not a copy: everything is still there.
    client.hibernate(parent.id).await?;
    ensure!(parent.sh("cat /run/keiki/own").await? == "mine", "a wake lost a file of /run/keiki");
    Ok(())
}

/// A copy has the processes that its original's callers started, which are part of the machine, and
/// nothing else.
async fn no_ghosts(copy: &Sandbox) -> Result<()> {
    ensure!(copy.sh("cat /run/keiki/own").await? == "mine", "a file of /run/keiki");
    ensure!(
        copy.sh("cat /run/keiki/generation").await? == copy.view().await?.generation.to_string(),
        "generation"
    );
    // An upload without its caller has no effect: the old file stays.
    let gone = "for i in $(seq 50); do ls /srv/.keiki-* >/dev/null 2>&1 || exit 0; sleep 0.1; done; ls -la /srv; exit 1";
    copy.sh(gone).await?;
    ensure!(copy.sh("cat /srv/big").await? == "old", "half an upload was put in place");
    ensure!(copy.sh("env | grep KEIKI_TEST || true").await?.is_empty(), "a variable of another command's");
    // Small commands end. The long ones have no reader, and do not block this one.
    for exec in copy.client.execs(copy.id).await? {
        ensure!(!exec.attached, "somebody reads {exec:?}");
        copy.client.remove_exec(copy.id, &exec.id).await?;
    }
    let left = copy.client.execs(copy.id).await?;
    ensure!(left.is_empty(), "{left:?}");
    let counts = copy.sh("for f in /root/small-*; do tail -n1 $f; sort $f | uniq -d; done | wc -l").await?;
    ensure!(counts == "4", "a command was carried out twice: {counts}");
    Ok(())
}
