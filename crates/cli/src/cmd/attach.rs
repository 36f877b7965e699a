//! `keiki attach`.

use super::exec::show;
use crate::{
    context::Context,
    exit::{Failure, Outcome, io_error},
    input,
    signals::unless_interrupted,
};
use bytes::Bytes;
use keiki_client::{Client, From, SandboxId};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// Command id, from `keiki ps`
    pub exec: String,
    /// Skip this many bytes of standard output
    #[arg(long, value_name = "BYTES", conflicts_with = "tail")]
    pub offset: Option<u64>,
    /// Start this many bytes before the end of the output
    #[arg(long, value_name = "BYTES")]
    pub tail: Option<u64>,
    /// Send standard input to the command as it arrives
    #[arg(short = 'i', long)]
    pub stdin: bool,
}

/// Ctrl-C leaves the remote command running.
pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let exec = context.exec_id(id, &args.exec).await?;
    let from = match args.tail {
        Some(tail) => From::Tail(tail),
        None => From::Offsets(args.offset.unwrap_or(0), 0),
    };
    let events = unless_interrupted(async { Ok(context.client.attach_exec(id, &exec, from).await?) }).await?;
    if !args.stdin {
        return show(events).await;
    }
    let typed = send_input(context.client.clone(), id, exec);
    let shown = show(events);
    tokio::pin!(typed, shown);
    tokio::select! {
        code = &mut shown => code,
        sent = &mut typed => {
            // From here on only the end of the command matters, unless its input never arrived.
            sent?;
            shown.await
        }
    }
}

/// Sends standard input to the command until one of them ends.
async fn send_input(client: Client, id: SandboxId, exec: String) -> Result<(), Failure> {
    let mut inbox = input::pieces()?;
    while let Some(piece) = inbox.recv().await {
        let piece = piece.map_err(io_error("cannot read standard input"))?;
        let all = piece.len() as u64;
        if client.write_exec(id, &exec, piece, false).await? < all {
            // It exited, or closed its input.
            return Ok(());
        }
    }
    client.write_exec(id, &exec, Bytes::new(), true).await?;
    Ok(())
}
