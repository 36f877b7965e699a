//! `keiki watch`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
    signals::unless_interrupted,
};
use futures::StreamExt;
use keiki_client::api::FsEvent;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Include everything below
    #[arg(short, long)]
    pub recursive: bool,
    /// Sandbox id
    pub sandbox: String,
    /// File or directory in the sandbox
    pub path: String,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    unless_interrupted(async {
        let mut events = context.client.watch(id, &args.path, args.recursive).await?;
        while let Some(event) = events.next().await {
            let event = event?;
            if event.kind == "ready" && !context.out.is_json() {
                context.out.note(&format!("watching {}", plain(&event.path)));
            } else {
                context.out.item(&event, || line(&event))?;
            }
        }
        Ok(())
    })
    .await?;
    Ok(ExitCode::Success as i32)
}

/// A name without characters that control a terminal.
fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn line(event: &FsEvent) -> String {
    let mark = if event.is_dir { "/" } else { "" };
    match &event.from {
        Some(from) => format!("{:<10} {} -> {}{mark}", event.kind, plain(from), plain(&event.path)),
        None => format!("{:<10} {}{mark}", event.kind, plain(&event.path)),
    }
}

#[cfg(test)]
mod tests {
    use super::line;
    use keiki_client::api::FsEvent;

    #[test]
    fn lines_are_plain() {
        let event = |path: &str, from: Option<&str>| FsEvent {
            kind: "moved".into(),
            path: path.into(),
            from: from.map(Into::into),
            is_dir: true,
        };
        assert_eq!(line(&event("/b\u{1b}[2J", Some("/a"))), "moved      /a -> /b?[2J/");
    }
}
