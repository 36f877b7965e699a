//! `keiki logs`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    printer::Output,
    signals::unless_interrupted,
    text::one_of,
};
use bytes::Bytes;
use futures::StreamExt;
use keiki_client::LogStream;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Follow new output
    #[arg(short, long)]
    pub follow: bool,
    /// Stream to show
    #[arg(long, value_parser = one_of::<LogStream, 3>(STREAMS), default_value = "both")]
    pub stream: LogStream,
}

const STREAMS: [(&str, &str); 3] =
    [("both", "Both streams"), ("stdout", "Standard output"), ("stderr", "Standard error")];

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let json = context.out.is_json();
    let mut output = Output::stdout()?;
    unless_interrupted(async {
        let mut chunks = if args.follow {
            let lines = context.client.follow_logs(id, args.stream).await?;
            lines.map(move |line| line.map(|line| line_bytes(&line, json))).boxed()
        } else {
            context.client.logs(id, args.stream).await?
        };
        let mut all = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            if json && !args.follow {
                all.extend_from_slice(&chunk);
            } else {
                output.write(&chunk).await?;
            }
        }
        if json && !args.follow {
            let text = String::from_utf8_lossy(&all);
            context.out.json(&text.lines().collect::<Vec<_>>())?;
        }
        Ok(ExitCode::Success as i32)
    })
    .await
}

/// One line, of text or JSON.
fn line_bytes(line: &str, json: bool) -> Bytes {
    let text = if json { serde_json::json!({ "line": line }).to_string() } else { line.to_owned() };
    format!("{text}\n").into()
}
