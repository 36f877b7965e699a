//! `keiki events`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    ids::short,
    signals::unless_interrupted,
    text,
};
use futures::StreamExt;
use keiki_client::api::Event;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id [default: all sandboxes]
    pub sandbox: Option<String>,
    /// Follow new events
    #[arg(short, long)]
    pub follow: bool,
    /// Only events after this number
    #[arg(long, value_name = "NUMBER")]
    pub since: Option<u64>,
    /// Show at most this many past events
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub last: u16,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    // A whole id may name a deleted sandbox.
    let of = match &args.sandbox {
        Some(text) => Some(context.sandbox_id(text).await?),
        None => None,
    };
    let past = context.client.events(of, args.since, Some(args.last.into())).await?;
    if !args.follow {
        return context.out.result(&past, || past.iter().map(line).collect::<Vec<_>>().join("\n"));
    }
    unless_interrupted(async {
        for event in &past {
            context.out.item(event, || line(event))?;
        }
        let since = past.last().map(|event| event.seq).or(args.since).unwrap_or(0);
        let mut events = context.client.follow_events(of, Some(since)).await?;
        while let Some(event) = events.next().await {
            let event = event?;
            context.out.item(&event, || line(&event))?;
        }
        Ok(())
    })
    .await?;
    Ok(ExitCode::Success as i32)
}

fn line(event: &Event) -> String {
    let mut more = Vec::new();
    if let Some(ms) = event.ms {
        more.push(format!("{ms:.1} ms"));
    }
    if let Some(parent) = event.parent_sandbox_id {
        more.push(format!("from {}", short(parent)));
    }
    if let Some(snapshot) = event.snapshot_id {
        more.push(format!("snapshot {}", short(snapshot)));
    }
    if !event.children.is_empty() {
        more.push(event.children.iter().map(short).collect::<Vec<_>>().join(" "));
    }
    if let Some(reason) = &event.reason {
        // It may quote the guest.
        more.push(text::plain(reason));
    }
    let line = format!(
        "{:<6} {}  {}  {:<11} {}",
        event.seq,
        event.at,
        short(event.sandbox_id),
        event.kind.as_str(),
        more.join(", ")
    );
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::line;
    use keiki_client::api::Event;
    use serde_json::json;

    #[test]
    fn an_event_is_one_line() {
        let event: Event = serde_json::from_value(json!({
            "seq": 7, "at": "2026-01-01T00:00:00Z", "sandbox_id": "0190b7a0-0000-7000-8000-000000000001",
            "kind": "failed", "reason": "it ended\nwith \u{1b}[31mred"
        }))
        .unwrap();
        assert_eq!(
            line(&event),
            "7      2026-01-01T00:00:00Z  000000000001  failed      it ended with  [31mred"
        );
    }
}
