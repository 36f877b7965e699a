//! `keiki url` and `keiki open`.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome, io_error},
    text::parse_ttl,
};
use keiki_client::api::{CreatePreview, Preview};
use std::process::Stdio;

/// What opens a link, the first that is there.
const OPENERS: [&str; 3] = ["xdg-open", "wslview", "open"];

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// Port inside
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// How long the link may be used, at most a week [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
}

/// Prints a link.
pub async fn run(context: Context, args: Args) -> Outcome {
    let preview = make(&context, &args).await?;
    context.out.show(&preview, || preview.url.clone())?;
    Ok(ExitCode::Success as i32)
}

/// Makes a link and opens it in a browser.
pub async fn open(context: Context, args: Args) -> Outcome {
    let preview = make(&context, &args).await?;
    for opener in OPENERS {
        let mut command = tokio::process::Command::new(opener);
        let started = command
            .arg(&preview.url)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        match started.await {
            Ok(status) if status.success() => {
                context.out.show(&preview, || preview.url.clone())?;
                return Ok(ExitCode::Success as i32);
            }
            // It is there, and has no browser to open it with.
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error(format!("starting {opener}"))(error)),
        }
    }
    context.out.show(&preview, || preview.url.clone())?;
    Err(Failure::Wrong(format!(
        "no browser could be opened here (tried {}); open the link yourself",
        OPENERS.join(", ")
    )))
}

async fn make(context: &Context, args: &Args) -> Result<Preview, Failure> {
    let id = context.sandbox_id(&args.sandbox).await?;
    let request = CreatePreview { port: args.port, ttl_seconds: args.ttl };
    Ok(context.client.create_preview(id, &request).await?)
}
