//! `keiki snapshot`.

use super::create::took;
use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    progress::Progress,
    signals::unless_interrupted,
    text,
};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let progress = Progress::start(format!("taking a snapshot of {id}"));
    let snapshot = unless_interrupted(async { Ok(context.client.snapshot(id).await?) }).await?;
    drop(progress);
    context.out.show(&snapshot, || snapshot.id.to_string())?;
    if !context.out.is_json() {
        let timings = snapshot.timings.clone().unwrap_or_default();
        let size = text::bytes(snapshot.size_bytes);
        context.out.note(&format!("snapshot of {size} in {:.0} ms{}", timings.total_ms, took(&timings)));
    }
    Ok(ExitCode::Success as i32)
}
