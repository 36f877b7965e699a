//! `keiki exec`.

use crate::{
    context::Context,
    exit::{Failure, Outcome, io_error},
    printer::Output,
    signals::unless_interrupted,
    text::{parse_duration, parse_env},
};
use base64::Engine as _;
use futures::StreamExt;
use keiki_client::{
    ExecEvent, ExecStream, SandboxId,
    api::{ExecRequest, execs::StartExec},
};
use std::{io::Read, time::Duration};

/// Standard input is part of the request; more than this belongs in a file (`keiki cp`).
const MAX_STDIN: u64 = 16 << 20;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub options: Options,
    /// Run in the background and print the command id, for `keiki attach`, `ps` and `kill`
    #[arg(short, long)]
    pub detach: bool,
    /// With --detach: keep standard input open, for `keiki attach --stdin`
    #[arg(long, requires = "detach")]
    pub stdin_open: bool,
    /// Sandbox id
    pub sandbox: String,
    #[command(flatten)]
    pub line: Line,
}

/// What to run.
#[derive(Debug, Clone, clap::Args)]
pub struct Line {
    /// Run a shell command line instead of COMMAND
    #[arg(short = 'c', long, value_name = "LINE", conflicts_with = "command")]
    pub shell: Option<String>,
    /// Program and arguments
    #[arg(
        value_name = "COMMAND",
        required_unless_present = "shell",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub command: Vec<String>,
}

/// Options of every command that runs one in a sandbox.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Options {
    /// Set an environment variable; without VALUE, take it from here
    #[arg(short, long, value_name = "KEY[=VALUE]", value_parser = parse_env)]
    pub env: Vec<(String, String)>,
    /// Kill the command and its children after this long, e.g. 30s, and exit with 124
    #[arg(short, long, value_name = "DURATION", value_parser = parse_duration)]
    pub timeout: Option<Duration>,
    /// Working directory [default: the user's home]
    #[arg(short = 'w', long, value_name = "DIR")]
    pub cwd: Option<String>,
    /// User to run as: a name or uid[:gid] [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Pass standard input to the command, after reading all of it
    #[arg(short = 'i', long)]
    pub stdin: bool,
}

impl Options {
    /// The request, with standard input if it is to be passed.
    pub async fn request(&self, line: Line) -> Result<ExecRequest, Failure> {
        let mut request = ExecRequest {
            argv: line.shell.is_none().then_some(line.command),
            cmd: line.shell,
            env: self.env.iter().cloned().collect(),
            cwd: self.cwd.clone(),
            user: self.user.clone(),
            timeout_seconds: self.timeout.map(|timeout| timeout.as_secs_f64()),
            ..Default::default()
        };
        if self.stdin {
            match String::from_utf8(read_stdin().await?) {
                Ok(text) => request.stdin = Some(text),
                Err(bytes) => {
                    let encoded = base64::engine::general_purpose::STANDARD.encode(bytes.into_bytes());
                    request.stdin_base64 = Some(encoded);
                }
            }
        }
        Ok(request)
    }
}

async fn read_stdin() -> Result<Vec<u8>, Failure> {
    let read = || {
        let mut bytes = Vec::new();
        std::io::stdin().lock().take(MAX_STDIN + 1).read_to_end(&mut bytes).map(|_| bytes)
    };
    let ended = |_| Failure::Wrong("the thread that reads standard input panicked".into());
    let bytes = unless_interrupted(async {
        tokio::task::spawn_blocking(read)
            .await
            .map_err(ended)?
            .map_err(io_error("cannot read standard input"))
    })
    .await?;
    if bytes.len() as u64 > MAX_STDIN {
        let limit = MAX_STDIN >> 20;
        return Err(Failure::Usage(format!(
            "standard input is larger than {limit} MiB: copy it with `keiki cp` first"
        )));
    }
    Ok(bytes)
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let request = args.options.request(args.line).await?;
    if args.detach {
        let request = StartExec { command: request, stdin_open: args.stdin_open, pty: None };
        let exec = unless_interrupted(async { Ok(context.client.start_exec(id, &request).await?) }).await?;
        return context.out.result(&exec, || exec.id.clone());
    }
    carry_out(&context, id, &request).await
}

/// Runs a command to its end, streamed or as one JSON result. Returns its exit code.
pub async fn carry_out(context: &Context, id: SandboxId, request: &ExecRequest) -> Outcome {
    if context.out.is_json() {
        let result = unless_interrupted(async { Ok(context.client.exec(id, request).await?) }).await?;
        context.out.json(&result)?;
        return Ok(result.exit_code);
    }
    // A signal drops the stream, which kills the command in the sandbox.
    show(unless_interrupted(async { Ok(context.client.exec_stream(id, request).await?) }).await?).await
}

/// Shows the output of a command. Returns its exit code.
pub async fn show(mut events: ExecStream) -> Outcome {
    let (mut stdout, mut stderr) = (Output::stdout()?, Output::stderr()?);
    unless_interrupted(async {
        while let Some(event) = events.next().await {
            match event? {
                ExecEvent::Stdout(chunk) => stdout.write(&chunk).await?,
                ExecEvent::Stderr(chunk) => stderr.write(&chunk).await?,
                ExecEvent::Exit(code) => return Ok(code),
            }
        }
        Err(keiki_client::Error::Interrupted.into())
    })
    .await
}
