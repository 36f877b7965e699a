//! Tar streams on standard input and output.

use super::copier::Copier;
use crate::{
    exit::{ExitCode, Failure, Outcome},
    input,
    printer::Output,
    signals::unless_interrupted,
};
use futures::StreamExt;
use keiki_client::{Client, SandboxId, Unpacking};
use tokio_stream::wrappers::ReceiverStream;

/// Copies a path in a sandbox to standard output.
pub(super) async fn write(client: &Client, id: SandboxId, path: &str) -> Outcome {
    let mut output = Output::stdout()?;
    unless_interrupted(async {
        let mut pieces = client.read_archive(id, path).await?;
        while let Some(piece) = pieces.next().await {
            output.write(&piece?).await?;
        }
        Ok(ExitCode::Success as i32)
    })
    .await
}

/// Unpacks standard input into a directory in a sandbox.
pub(super) async fn read(copier: &mut Copier, path: &str) -> Result<(), Failure> {
    let pieces = ReceiverStream::new(input::pieces()?);
    let how = Unpacking { owners: copier.owners, strip_top: false };
    let unpacked = copier.client.write_archive(copier.id, path, how, pieces).await?;
    copier.copied.add(&unpacked);
    Ok(())
}
