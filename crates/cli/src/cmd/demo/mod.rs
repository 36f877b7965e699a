//! `keiki demo`: fork, demonstrated on a running node.
//!
//! A sandbox builds state that takes work: a Python process with a table and a counter in RAM, and
//! files on disk and in a tmpfs. The demo snapshots and forks it while it runs, lets the forks
//! diverge, and restores the snapshot. It checks every claim before it prints it: any wrong value
//! fails the demo.

mod guest;
mod story;

use crate::{
    context::Context, exit::Outcome, owned::Owned, printer::table, signals::unless_interrupted, text,
};
use serde::Serialize;
use story::{Row, Story};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Template to start from; must have python3
    #[arg(long, default_value = "base")]
    pub template: keiki_client::TemplateName,
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    steps: &'a [Row],
}

/// However this ends, it deletes what it created.
pub async fn run(context: Context, args: Args) -> Outcome {
    let owned = Owned::new(context.client.clone(), "demo");
    let outcome = unless_interrupted(Story::new(&context, &owned, args.template).tell()).await;
    let cleared = owned.clear().await;
    let rows = outcome?;
    cleared?;
    context.out.result(&Report { ok: true, steps: &rows }, || {
        let (times, steps) = (times(&rows), rows.len());
        format!(
            "\n{times}\n\nNext: make install; keiki node; and in another terminal: keiki create, \
             keiki exec ID COMMAND, keiki fork -n 4 ID, keiki tree\n\
             demo: ok: {steps} steps, every claim checked, everything deleted"
        )
    })
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
