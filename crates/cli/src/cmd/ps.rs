//! `keiki ps`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    ids::short,
    printer::table,
    text,
};
use keiki_client::api::execs::Exec;
use time::OffsetDateTime;

/// Characters of a command line in the table.
const SHOWN: usize = 60;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// Ids only
    #[arg(short, long)]
    pub quiet: bool,
    /// Those that have ended, too
    #[arg(short, long)]
    pub all: bool,
    /// Whole ids
    #[arg(long)]
    pub full: bool,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let mut execs = context.client.execs(id).await?;
    execs.retain(|exec| args.all || exec.exit_code.is_none());
    context.out.show(&execs, || {
        if args.quiet {
            return execs.iter().map(|exec| exec.id.clone()).collect::<Vec<_>>().join("\n");
        }
        let now = OffsetDateTime::now_utc();
        let headings = ["ID", "STATUS", "AGE", "TERMINAL", "ATTACHED", "OUTPUT", "COMMAND"];
        table(headings, execs.iter().map(|exec| row(exec, now, args.full)))
    })?;
    Ok(ExitCode::Success as i32)
}

fn row(exec: &Exec, now: OffsetDateTime, full: bool) -> [String; 7] {
    let yes = |is: bool| if is { "yes" } else { "-" }.to_owned();
    [
        if full { exec.id.clone() } else { short(&exec.id) },
        match exec.exit_code {
            None => "running".into(),
            Some(_) if exec.timed_out => "timed out".into(),
            Some(code) => format!("exited {code}"),
        },
        text::age(&exec.started_at, now),
        yes(exec.pty),
        yes(exec.attached),
        text::bytes(exec.stdout_bytes.saturating_add(exec.stderr_bytes)),
        line(&exec.argv),
    ]
}

/// A command line on one line, of characters that leave a terminal alone.
fn line(argv: &[String]) -> String {
    let words = argv.join(" ");
    let plain = words.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = plain.clone().take(SHOWN).collect();
    if plain.count() > SHOWN {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::{SHOWN, line};

    #[test]
    fn a_command_line_leaves_the_terminal_alone() {
        assert_eq!(line(&["a\u{1b}[2J".into(), "b\nc".into()]), "a [2J b c");
        assert_eq!(line(&["é".repeat(SHOWN)]), "é".repeat(SHOWN));
        assert!(line(&["é".repeat(SHOWN + 1)]).ends_with('…'));
    }
}
