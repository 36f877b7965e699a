//! `keiki demo`: the story of fork, told on a running node.
//!
//! A sandbox builds state that took work: a Python process with a table and a counter in its RAM, files on disk
//! and in a tmpfs. It is snapshotted and forked while it runs; the forks part ways; the snapshot is restored.
//! Every sentence that is printed has been checked: a value that is not what it must be fails the demo.

mod guest;
mod story;

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    owned::Owned,
    printer::table,
    signals::unless_interrupted,
    text,
};
use serde::Serialize;
use story::Story;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Template to start from; it needs python3
    #[arg(long, default_value = "base")]
    pub template: keiki_client::TemplateName,
}

/// How long one step took, in ms.
#[derive(Debug, Clone, Default, Serialize)]
struct Row {
    step: &'static str,
    total_ms: f64,
    vcpu_pause_ms: Option<f64>,
    user_pause_ms: Option<f64>,
    thaw_ms: Option<f64>,
    /// Request to the first output of a command in what was made; of several: the last one's.
    first_output_ms: Option<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    steps: &'a [Row],
}

/// Runs the command. What it made is removed however it ends.
pub async fn run(context: Context, args: Args) -> Outcome {
    let owned = Owned::new(context.client.clone(), "demo");
    let told = unless_interrupted(Story::new(&context, &owned, args.template).tell()).await;
    let cleared = owned.clear().await;
    let rows = told?;
    cleared?;
    context.out.show(&Report { ok: true, steps: &rows }, || {
        let next = "next: make install; keiki node; and in another terminal: keiki create, keiki exec ID COMMAND, keiki fork -n 4 ID, keiki tree";
        format!("\n{}\n\n{next}\ndemo: ok: {} steps, every claim checked, everything removed", times(&rows), rows.len())
    })?;
    Ok(ExitCode::Success as i32)
}

fn times(rows: &[Row]) -> String {
    let rows = rows.iter().map(|row| {
        [
            row.step.to_owned(),
            text::ms(Some(row.total_ms)),
            text::ms(row.vcpu_pause_ms),
            text::ms(row.user_pause_ms),
            text::ms(row.thaw_ms),
            text::ms(row.first_output_ms),
        ]
    });
    table(["STEP (ms)", "TOTAL", "VCPU_PAUSE", "USER_PAUSE", "THAW", "FIRST OUTPUT"], rows)
}
