//! `keiki logs`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    printer::{Output, Target},
    signals::unless_interrupted,
};
use bytes::Bytes;
use futures::StreamExt;
use keiki_client::LogStream;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// Follow new output
    #[arg(short, long)]
    pub follow: bool,
    /// Stream to show
    #[arg(long, value_enum, default_value_t)]
    pub stream: Stream,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
pub enum Stream {
    /// Both streams
    #[default]
    Both,
    /// Standard output
    Stdout,
    /// Standard error
    Stderr,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let stream = match args.stream {
        Stream::Both => LogStream::Both,
        Stream::Stdout => LogStream::Stdout,
        Stream::Stderr => LogStream::Stderr,
    };
    let json = context.out.is_json();
    let output = Output::start()?;
    unless_interrupted(async {
        let mut chunks = if args.follow {
            let lines = context.client.follow_logs(id, stream).await?;
            lines.map(move |line| line.map(|line| line_bytes(&line, json))).boxed()
        } else {
            context.client.logs(id, stream).await?
        };
        let mut all = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if json && !args.follow {
                all.extend_from_slice(&chunk);
            } else if !output.write(Target::Stdout, chunk).await {
                break;
            }
        }
        if json && !args.follow {
            let text = String::from_utf8_lossy(&all);
            context.out.json(&text.lines().collect::<Vec<_>>())?;
        }
        Ok(())
    })
    .await?;
    output.finish().await?;
    Ok(ExitCode::Success as i32)
}

/// One line, of text or JSON.
fn line_bytes(line: &str, json: bool) -> Bytes {
    let text = if json { serde_json::json!({ "line": line }).to_string() } else { line.to_owned() };
    format!("{text}\n").into()
}
