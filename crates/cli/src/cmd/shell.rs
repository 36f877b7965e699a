//! `keiki shell`.
//!
//! The local terminal becomes a mere carrier: raw, every key goes to the sandbox, every byte from there to the
//! screen. It is put back as it was however this ends: the guard does it on every way out, signals included.

use crate::{
    context::Context,
    exit::{Failure, Outcome, io_error},
    printer::{Output, Target},
    signals::interrupted,
};
use bytes::Bytes;
use keiki_client::{Pty, PtyEvent, PtyOutput, PtyRequest};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::{
    io::{self, IsTerminal, Read},
    time::Duration,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// Working directory [default: the user's home]
    #[arg(short = 'w', long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// Who: a name or uid[:gid] [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// A shell line to run instead of a login shell
    #[arg(value_name = "LINE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub line: Vec<String>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::Usage(
            "`shell` needs a terminal; use `keiki exec` with --stdin for pipes".into(),
        ));
    }
    let id = context.sandbox_id(&args.sandbox).await?;
    let (cols, rows) = window()?;
    let cmd = (!args.line.is_empty()).then(|| args.line.join(" "));
    let request = PtyRequest { cols, rows, cmd, cwd: args.cwd, user: args.user };
    let pty = context.client.pty(id, &request).await?;
    let raw = RawTerminal::enter()?;
    let outcome = carry(pty).await;
    drop(raw);
    outcome
}

async fn carry(pty: Pty) -> Outcome {
    let Pty { mut input, output } = pty;
    let mut keys = read_keys()?;
    let mut resized = signal(SignalKind::window_change()).map_err(io_error("watching the window's size"))?;
    let type_keys = async {
        loop {
            tokio::select! {
                key = keys.recv() => match key {
                    Some(bytes) => input.send(bytes).await?,
                    // The terminal is gone; the command's end is what counts now.
                    None => std::future::pending().await,
                },
                _ = resized.recv() => {
                    let (cols, rows) = window()?;
                    input.resize(cols, rows).await?;
                }
            }
        }
    };
    tokio::select! {
        code = show(output) => code,
        failure = type_keys => failure,
        signal = interrupted() => Err(Failure::Signal(signal)),
    }
}

async fn show(mut pty: PtyOutput) -> Outcome {
    let screen = Output::start()?;
    let code = loop {
        match pty.next().await? {
            PtyEvent::Output(bytes) => {
                if !screen.write(Target::Stdout, bytes).await {
                    break None;
                }
            }
            PtyEvent::Exit(code) => break Some(code),
        }
    };
    screen.finish().await?;
    code.ok_or_else(|| keiki_client::Error::Interrupted.into())
}

/// Reads the keyboard on a thread: a read of a terminal cannot be called off, the process ends over it.
fn read_keys() -> Result<mpsc::Receiver<Bytes>, Failure> {
    let (keys, inbox) = mpsc::channel(16);
    let read_all = move || {
        let mut buffer = [0; 4096];
        loop {
            match io::stdin().lock().read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if keys.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(_) => break,
            }
        }
    };
    std::thread::Builder::new()
        .name("keys".into())
        .spawn(read_all)
        .map_err(io_error("starting the keyboard thread"))?;
    Ok(inbox)
}

fn window() -> Result<(u32, u32), Failure> {
    let size = tcgetwinsize(io::stdout())
        .map_err(|error| Failure::Io { what: "asking for the window's size".into(), source: error.into() })?;
    // A terminal that does not know says 0; the node takes at most 1000.
    let or = |value: u16, default: u32| if value == 0 { default } else { u32::from(value).min(1000) };
    Ok((or(size.ws_col, 80), or(size.ws_row, 24)))
}

/// Holds the terminal in raw mode.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self, Failure> {
        let failed = |error: rustix::io::Errno| Failure::Io {
            what: "preparing the terminal".into(),
            source: error.into(),
        };
        let before = tcgetattr(io::stdin()).map_err(failed)?;
        let mut raw = before.clone();
        raw.make_raw();
        let guard = Self { before };
        tcsetattr(io::stdin(), OptionalActions::Flush, &raw).map_err(failed)?;
        Ok(guard)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}
