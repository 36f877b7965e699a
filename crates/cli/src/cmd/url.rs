//! `keiki url` and `keiki open`.

use crate::{
    context::Context,
    exit::{Failure, Outcome, io_error},
    text::parse_ttl,
};
use keiki_client::api::{CreatePreview, Preview};
use std::process::Stdio;

/// Programs that open a link; the first one found is used.
const OPENERS: [&str; 3] = ["xdg-open", "wslview", "open"];

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Port in the sandbox
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub port: u16,
    /// How long the link is valid, at most a week [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
}

/// Prints a link.
pub async fn run(context: Context, args: Args) -> Outcome {
    let preview = make(&context, &args).await?;
    context.out.result(&preview, || preview.url.clone())
}

/// Opens a link in a browser.
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
                return context.out.result(&preview, || preview.url.clone());
            }
            // It found no browser.
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(io_error(format!("cannot start {opener}"))(error)),
        }
    }
    context.out.show(&preview, || preview.url.clone())?;
    Err(Failure::Wrong(format!(
        "cannot open a browser (tried {}): open the link yourself",
        OPENERS.join(", ")
    )))
}

async fn make(context: &Context, args: &Args) -> Result<Preview, Failure> {
    let id = context.sandbox_id(&args.sandbox).await?;
    let request = CreatePreview { port: args.port, ttl_seconds: args.ttl };
    Ok(context.client.create_preview(id, &request).await?)
}
