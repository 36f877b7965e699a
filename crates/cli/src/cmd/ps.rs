//! `keiki ps`.

use crate::{context::Context, exit::Outcome, ids::Shown, printer::table, text};
use keiki_client::api::execs::Exec;
use time::OffsetDateTime;

/// Longest command line in the table, in characters.
const SHOWN: usize = 60;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Include commands that have exited
    #[arg(short, long)]
    pub all: bool,
    #[command(flatten)]
    pub shown: Shown,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let mut execs = context.client.execs(id).await?;
    execs.retain(|exec| args.all || exec.exit_code.is_none());
    context.out.result(&execs, || {
        args.shown.list(execs.iter().map(|exec| &exec.id), || {
            let now = OffsetDateTime::now_utc();
            let headings = ["ID", "STATUS", "AGE", "TERMINAL", "ATTACHED", "OUTPUT", "COMMAND"];
            table(headings, execs.iter().map(|exec| row(exec, now, &args.shown)))
        })
    })
}

fn row(exec: &Exec, now: OffsetDateTime, shown: &Shown) -> [String; 7] {
    let yes = |is: bool| if is { "yes" } else { "-" }.to_owned();
    [
        shown.id(&exec.id),
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

/// A command line, shortened, without characters that control a terminal.
fn line(argv: &[String]) -> String {
    let plain = text::plain(&argv.join(" "));
    let mut shown: String = plain.chars().take(SHOWN).collect();
    if plain.chars().count() > SHOWN {
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
