//! `keiki attach`.

use super::exec::show;
use crate::{
    context::Context,
    exit::{Failure, Outcome, io_error},
    signals::unless_interrupted,
};
use bytes::Bytes;
use keiki_client::{Client, From, SandboxId};
use std::io::{self, Read};
use tokio::sync::mpsc;

/// Bytes of standard input sent at once.
const PIECE: usize = 64 << 10;

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

/// A read of standard input cannot be called off, so it has a thread; the process ends over it.
async fn send_input(client: Client, id: SandboxId, exec: String) -> Result<(), Failure> {
    let (pieces, mut inbox) = mpsc::channel::<io::Result<Bytes>>(4);
    let read_all = move || {
        let mut buffer = vec![0; PIECE];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => Ok(Bytes::copy_from_slice(&buffer[..count])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => Err(error),
            };
            let failed = read.is_err();
            if pieces.blocking_send(read).is_err() || failed {
                return;
            }
        }
    };
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(read_all)
        .map_err(io_error("starting the input thread"))?;
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
