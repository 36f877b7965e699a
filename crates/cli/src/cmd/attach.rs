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

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox
    #[arg(value_name = "SANDBOX")]
    pub sandbox: String,
    /// Command, as `keiki ps` lists it
    #[arg(value_name = "EXEC")]
    pub exec: String,
    /// Pass over so many bytes of its standard output
    #[arg(long, value_name = "BYTES", conflicts_with = "tail")]
    pub offset: Option<u64>,
    /// Begin so many bytes before the end of its output
    #[arg(long, value_name = "BYTES")]
    pub tail: Option<u64>,
    /// Send it this program's standard input as it comes, and its end
    #[arg(short = 'i', long)]
    pub stdin: bool,
}

/// Runs the command. Ctrl-C leaves the remote command as it is.
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
            // The command's end is what counts now, unless it never got its input.
            sent?;
            shown.await
        }
    }
}

/// Sends standard input to the command until one of them ends.
async fn send_input(client: Client, id: SandboxId, exec: String) -> Result<(), Failure> {
    let mut inbox = input::pieces()?;
    while let Some(piece) = inbox.recv().await {
        let piece = piece.map_err(io_error("reading standard input"))?;
        let all = piece.len() as u64;
        if client.write_exec(id, &exec, piece, false).await? < all {
            // It has ended, or closed its input.
            return Ok(());
        }
    }
    client.write_exec(id, &exec, Bytes::new(), true).await?;
    Ok(())
}
