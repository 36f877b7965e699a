//! `keiki shell`.
//!
//! The local terminal is in raw mode: every key goes to the sandbox, every byte from there to the
//! screen. A guard restores it on every exit path, signals included.
//!
//! The remote command survives a lost connection. As under `ssh`, it ends with the local terminal,
//! unless the user detached from it or attached to it.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome, io_error},
    ids::short,
    input,
    printer::Output,
    signals::interrupted,
};
use keiki_client::{Pty, PtyEvent, PtyOutput, PtyRequest, SandboxId};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use std::io::{self, IsTerminal};
use tokio::signal::unix::{SignalKind, signal};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Working directory [default: the user's home]
    #[arg(short = 'w', long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// User to run as: a name or uid[:gid] [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Reattach to the latest terminal, or to --attach=EXEC (see `keiki ps`)
    #[arg(long, value_name = "EXEC", num_args = 0..=1, require_equals = true, default_missing_value = "",
        conflicts_with_all = ["cwd", "user", "line"])]
    pub attach: Option<String>,
    /// Keys that detach from the terminal
    #[arg(long, value_name = "KEYS", default_value = "ctrl-],d", value_parser = parse_keys)]
    pub detach_keys: Keys,
    /// Shell command line to run instead of a login shell
    #[arg(value_name = "LINE", trailing_var_arg = true, allow_hyphen_values = true)]
    pub line: Vec<String>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(Failure::Usage(
            "`keiki shell` needs a terminal: use `keiki exec --stdin` for pipes".into(),
        ));
    }
    let id = context.sandbox_id(&args.sandbox).await?;
    let (cols, rows) = window()?;
    let stays = args.attach.is_some();
    let mut pty = match args.attach {
        Some(text) => {
            let exec = terminal(&context, id, &text).await?;
            context.client.attach_pty(id, &exec, TAIL).await?
        }
        None => {
            let cmd = (!args.line.is_empty()).then(|| args.line.join(" "));
            let request = PtyRequest { cols, rows, cmd, cwd: args.cwd, user: args.user, keep: true };
            context.client.pty(id, &request).await?
        }
    };
    if stays {
        // A change of size makes full-screen programs redraw.
        pty.input.resize(cols, rows.saturating_sub(1).max(1)).await?;
        pty.input.resize(cols, rows).await?;
    }
    let exec = pty.exec.clone();
    let raw = RawTerminal::enter()?;
    let outcome = carry(pty, Matcher::new(args.detach_keys), stays).await;
    drop(raw);
    match outcome? {
        End::Exit(code) => Ok(code),
        End::Detached => {
            context.out.note(&format!(
                "detached; reattach with: keiki shell --attach={} {}",
                short(exec),
                short(id)
            ));
            Ok(ExitCode::Success as i32)
        }
    }
}

/// Bytes of missed output to show.
const TAIL: u64 = 64 << 10;

/// The command that `text` names; if empty, the latest one that runs on a terminal.
async fn terminal(context: &Context, id: SandboxId, text: &str) -> Result<String, Failure> {
    if !text.is_empty() {
        return context.exec_id(id, text).await;
    }
    let execs = context.client.execs(id).await?;
    let latest = execs.into_iter().rev().find(|exec| exec.pty && exec.exit_code.is_none());
    latest.map(|exec| exec.id).ok_or_else(|| Failure::Usage("no terminal is running in this sandbox".into()))
}

enum End {
    Exit(i32),
    Detached,
}

async fn carry(pty: Pty, mut matcher: Matcher, stays: bool) -> Result<End, Failure> {
    let mut keys = input::pieces()?;
    let Pty { mut input, output, .. } = pty;
    let mut resized =
        signal(SignalKind::window_change()).map_err(io_error("cannot watch the window size"))?;
    let shown = show(output);
    let ending = interrupted();
    tokio::pin!(shown, ending);
    loop {
        tokio::select! {
            ended = &mut shown => return ended,
            signal = &mut ending => {
                if !stays {
                    // As when a terminal closes: a command may ignore it.
                    let _ = input.signal(SIGHUP).await;
                }
                return Err(Failure::Signal(signal));
            }
            Some(Ok(bytes)) = keys.recv() => {
                let (typed, detach) = matcher.feed(&bytes);
                if !typed.is_empty() {
                    input.send(typed.into()).await?;
                }
                if detach {
                    input.detach().await?;
                }
            }
            _ = resized.recv() => {
                let (cols, rows) = window()?;
                input.resize(cols, rows).await?;
            }
        }
    }
}

const SIGHUP: i32 = 1;

/// Keys that detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keys(Vec<u8>);

fn parse_keys(text: &str) -> Result<Keys, String> {
    let key = |name: &str| match (name.strip_prefix("ctrl-"), name.as_bytes()) {
        (Some(rest), _) => match rest.as_bytes() {
            [letter @ (b'a'..=b'z' | b'@' | b'[' | b'\\' | b']' | b'^' | b'_')] => Some(letter & 0x1f),
            _ => None,
        },
        (None, [byte]) if byte.is_ascii_graphic() => Some(*byte),
        _ => None,
    };
    let keys: Option<Vec<u8>> = text.split(',').map(key).collect();
    keys.map(Keys).ok_or_else(|| format!("{text:?} is not a list of keys: use ctrl-],d or ctrl-p,ctrl-q"))
}

/// Finds the keys in typed input, across reads.
struct Matcher {
    keys: Keys,
    matched: usize,
}

impl Matcher {
    fn new(keys: Keys) -> Self {
        Self { keys, matched: 0 }
    }

    /// What to pass on, and whether the keys were typed. Holds back a possible beginning of them.
    fn feed(&mut self, bytes: &[u8]) -> (Vec<u8>, bool) {
        let mut typed = Vec::with_capacity(bytes.len() + self.matched);
        for &byte in bytes {
            let keys = &self.keys.0;
            if keys.get(self.matched) == Some(&byte) {
                self.matched += 1;
                if self.matched == keys.len() {
                    self.matched = 0;
                    return (typed, true);
                }
                continue;
            }
            typed.extend_from_slice(&keys[..self.matched]);
            self.matched = usize::from(keys.first() == Some(&byte));
            if self.matched == 0 {
                typed.push(byte);
            }
        }
        (typed, false)
    }
}

async fn show(mut pty: PtyOutput) -> Result<End, Failure> {
    let mut screen = Output::stdout()?;
    loop {
        match pty.next().await? {
            PtyEvent::Output(bytes) => screen.write(&bytes).await?,
            PtyEvent::Exit(code) => return Ok(End::Exit(code)),
            PtyEvent::Detached => return Ok(End::Detached),
        }
    }
}

fn window() -> Result<(u32, u32), Failure> {
    let size = tcgetwinsize(io::stdout()).map_err(io_error("cannot read the window size"))?;
    // A terminal that does not know its size reports 0; the node takes at most 1000.
    let or = |value: u16, default: u32| if value == 0 { default } else { u32::from(value).min(1000) };
    Ok((or(size.ws_col, 80), or(size.ws_row, 24)))
}

/// Keeps the terminal in raw mode.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self, Failure> {
        let failed = || io_error("cannot set up the terminal");
        let before = tcgetattr(io::stdin()).map_err(failed())?;
        let mut raw = before.clone();
        raw.make_raw();
        let guard = Self { before };
        // Keys already typed are for the sandbox.
        tcsetattr(io::stdin(), OptionalActions::Drain, &raw).map_err(failed())?;
        Ok(guard)
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), OptionalActions::Flush, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::{Keys, Matcher, parse_keys};

    #[test]
    fn keys_are_named() {
        assert_eq!(parse_keys("ctrl-],d"), Ok(Keys(vec![0x1d, b'd'])));
        assert_eq!(parse_keys("ctrl-p,ctrl-q"), Ok(Keys(vec![16, 17])));
        assert_eq!(parse_keys("ctrl-\\"), Ok(Keys(vec![0x1c])));
        for bad in ["", "ctrl-", "ctrl-1", "dd", "a,", "é", "ctrl-A"] {
            assert!(parse_keys(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn keys_are_found_and_everything_else_is_passed_on() {
        let run = |keys: &str, typed: &[&[u8]]| {
            let mut matcher = Matcher::new(parse_keys(keys).unwrap());
            let mut all = Vec::new();
            for piece in typed {
                let (passed, left) = matcher.feed(piece);
                all.extend(passed);
                if left {
                    return (all, true);
                }
            }
            (all, false)
        };
        assert_eq!(run("ctrl-],d", &[b"ab\x1ddc"]), (b"ab".to_vec(), true));
        assert_eq!(run("ctrl-],d", &[b"ab\x1d", b"d"]), (b"ab".to_vec(), true));
        assert_eq!(run("ctrl-],d", &[b"\x1d", b"x", b"d"]), (b"\x1dxd".to_vec(), false));
        assert_eq!(run("ctrl-],d", &[b"\x1d\x1dd"]), (b"\x1d".to_vec(), true));
        assert_eq!(run("q", &[b"abq"]), (b"ab".to_vec(), true));
    }
}
