//! A connection to a monitor's control socket (QMP: JSON, one message per line).

use crate::{EngineError, Result, process::Task};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{oneshot, watch},
    time::{sleep, timeout},
};

/// The longest message that is read.
const MAX_LINE: u64 = 4 << 20;
/// How long an answer may take: a snapshot of a disk flushes it.
const ANSWER: Duration = Duration::from_secs(60);

type Waiting = Arc<Mutex<Option<HashMap<u64, oneshot::Sender<Result<Value>>>>>>;

/// The connection. Dropping it closes it; the monitor keeps running.
pub(super) struct Qmp {
    writer: tokio::sync::Mutex<OwnedWriteHalf>,
    /// None once the connection has ended.
    waiting: Waiting,
    next: AtomicU64,
    /// Why the machine shut down, once it has reported that.
    shutdown: watch::Receiver<Option<String>>,
    _reader: Task,
}

impl Qmp {
    /// Connects, waiting up to `patience` for the monitor to listen. `alive` returns whether that
    /// may still happen.
    pub(super) async fn connect(path: &Path, patience: Duration, alive: impl Fn() -> bool) -> Result<Self> {
        let started = Instant::now();
        let stream = loop {
            match UnixStream::connect(path).await {
                Ok(stream) => break stream,
                Err(error) if !alive() => {
                    return Err(EngineError::Monitor(format!("ended while starting ({error})")));
                }
                Err(error) if started.elapsed() > patience => {
                    return Err(EngineError::Io {
                        what: format!("cannot reach the monitor at {}", path.display()),
                        source: error,
                    });
                }
                Err(_) => sleep(Duration::from_millis(1)).await,
            }
        };
        timeout(patience, Self::greet(stream))
            .await
            .map_err(|_| EngineError::Monitor("did not send its greeting in time".into()))?
    }

    async fn greet(stream: UnixStream) -> Result<Self> {
        let (reader, writer) = stream.into_split();
        let mut reader = BufReader::new(reader);
        let greeting = line(&mut reader).await.map_err(lost)?;
        if greeting.get("QMP").is_none() {
            return Err(EngineError::Monitor("does not speak QMP".into()));
        }
        let waiting: Waiting = Arc::new(Mutex::new(Some(HashMap::new())));
        let (set_shutdown, shutdown) = watch::channel(None);
        let task = tokio::spawn(read_all(reader, Arc::clone(&waiting), set_shutdown));
        let qmp = Self {
            writer: tokio::sync::Mutex::new(writer),
            waiting,
            next: AtomicU64::new(1),
            shutdown,
            _reader: Task(task),
        };
        qmp.run("qmp_capabilities", json!({})).await?;
        Ok(qmp)
    }

    /// Runs a command.
    pub(super) async fn run(&self, command: &str, arguments: Value) -> Result<Value> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        match self.waiting.lock().as_mut() {
            Some(waiting) => drop(waiting.insert(id, answer)),
            None => return Err(EngineError::Monitor("closed its control socket".into())),
        }
        let mut text = json!({"execute": command, "arguments": arguments, "id": id}).to_string();
        text.push('\n');
        self.writer.lock().await.write_all(text.as_bytes()).await.map_err(lost)?;
        match timeout(ANSWER, answered).await {
            Ok(Ok(answer)) => answer.map_err(|error| match error {
                EngineError::Monitor(why) => EngineError::Monitor(format!("refused {command}: {why}")),
                other => other,
            }),
            Ok(Err(_)) => Err(EngineError::Monitor(format!("closed its control socket during {command}"))),
            Err(_) => {
                if let Some(waiting) = self.waiting.lock().as_mut() {
                    waiting.remove(&id);
                }
                Err(EngineError::Monitor(format!("did not answer {command} within {} s", ANSWER.as_secs())))
            }
        }
    }

    /// Why the machine shut down, if it said so.
    pub(super) fn shutdown_reason(&self) -> Option<String> {
        self.shutdown.borrow().clone()
    }
}

fn lost(error: io::Error) -> EngineError {
    EngineError::Monitor(format!("lost its control socket ({error})"))
}

async fn line(reader: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Value> {
    let mut text = Vec::new();
    reader.take(MAX_LINE).read_until(b'\n', &mut text).await?;
    if text.last() != Some(&b'\n') {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_slice(&text)?)
}

/// Hands answers to their callers and keeps the reason of a shutdown, until the connection ends.
async fn read_all(
    mut reader: impl AsyncBufRead + Unpin,
    waiting: Waiting,
    shutdown: watch::Sender<Option<String>>,
) {
    while let Ok(mut message) = line(&mut reader).await {
        if let Some(event) = message.get("event").and_then(Value::as_str) {
            let reason = message.pointer("/data/reason").and_then(Value::as_str).unwrap_or("unknown reason");
            match event {
                "SHUTDOWN" => drop(shutdown.send_replace(Some(reason.into()))),
                "GUEST_PANICKED" => drop(shutdown.send_replace(Some("the guest panicked".into()))),
                _ => {}
            }
            continue;
        }
        let Some(id) = message.get("id").and_then(Value::as_u64) else { continue };
        let Some(answer) = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&id)) else { continue };
        let outcome = match message.pointer("/error/desc").and_then(Value::as_str) {
            Some(why) => Err(EngineError::Monitor(why.into())),
            None => Ok(message.get_mut("return").map(Value::take).unwrap_or_default()),
        };
        // The caller may have given up.
        let _ = answer.send(outcome);
    }
    *waiting.lock() = None;
}
