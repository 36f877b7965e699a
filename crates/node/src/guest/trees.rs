//! Whole trees of a sandbox: as tar streams, and watched.

use crate::{
    daemon::Node,
    error::Result,
    guest::upload,
    guest::{files::checked, plain, refusal},
    sandbox::Use,
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use keiki_api::{Trees, Unpacking};
use keiki_protocol::guest::{PathRequest, UnpackChunk, WatchEvent, WatchRequest};
use keiki_types::{
    SandboxId,
    api::{FsEvent, FsUnpacked},
};
use tokio::sync::OwnedSemaphorePermit;
use tonic::Streaming;

#[async_trait]
impl Trees for Node {
    async fn pack(&self, id: SandboxId, path: &str) -> Result<BoxStream<'static, Result<Bytes>>> {
        let request = PathRequest { path: checked(path)? };
        let using = self.inner.begin(id).await?;
        let held = using.live.guest.stream()?;
        let stream =
            using.call(request, |mut guest, request| async move { guest.pack(request).await }).await?;
        let mut chunks = messages(using, held, stream).map(|chunk| Ok(chunk?.data)).boxed();
        // A rejection comes first, as a separate answer.
        match chunks.next().await {
            Some(first) => Ok(futures::stream::iter([Ok(first?)]).chain(chunks).boxed()),
            None => Ok(chunks),
        }
    }

    async fn unpack(
        &self,
        id: SandboxId,
        path: &str,
        how: Unpacking,
        data: BoxStream<'static, Result<Bytes>>,
    ) -> Result<FsUnpacked> {
        let mut first = Some(checked(path)?);
        let using = self.inner.begin(id).await?;
        let _held = using.live.guest.stream()?;
        let (chunks, broken) = upload::messages(data, move |piece| UnpackChunk {
            path: first.take().unwrap_or_default(),
            owners: how.owners,
            strip_top: how.strip_top,
            commit: piece.is_none(),
            data: piece.unwrap_or_default(),
        });
        let unpacked = using.live.guest.client().await.unpack(chunks).await;
        match broken.or(unpacked)? {
            Ok(reply) => {
                let reply = reply.into_inner();
                let (files, dirs, symlinks) = (reply.files, reply.dirs, reply.symlinks);
                Ok(FsUnpacked { path: path.into(), files, dirs, symlinks, bytes: reply.bytes })
            }
            Err(status) => Err(using.explain(refusal(&status)).await),
        }
    }

    async fn watch(
        &self,
        id: SandboxId,
        path: &str,
        recursive: bool,
    ) -> Result<BoxStream<'static, Result<FsEvent>>> {
        let request = WatchRequest { path: checked(path)?, recursive };
        let using = self.inner.begin(id).await?;
        let held = using.live.guest.stream()?;
        let stream =
            using.call(request, |mut guest, request| async move { guest.watch(request).await }).await?;
        let mut events = messages(using, held, stream).map(|event| Ok(view(event?))).boxed();
        // It says that it has begun, or why not.
        match events.next().await {
            Some(first) => Ok(futures::stream::iter([Ok(first?)]).chain(events).boxed()),
            None => Ok(events),
        }
    }
}

/// The messages of a call. The use lasts as long as they do.
fn messages<T: Send + 'static>(
    using: Use,
    held: OwnedSemaphorePermit,
    stream: Streaming<T>,
) -> impl futures::Stream<Item = Result<T>> + Send {
    futures::stream::unfold(Some((using, held, stream)), |state| async move {
        let (using, held, mut stream) = state?;
        match stream.message().await.transpose()? {
            Ok(message) => Some((Ok(message), Some((using, held, stream)))),
            Err(status) => Some((Err(using.explain(refusal(&status)).await), None)),
        }
    })
}

fn view(event: WatchEvent) -> FsEvent {
    let text = |bytes: &Bytes| String::from_utf8_lossy(bytes).into_owned();
    FsEvent {
        kind: plain(&event.kind),
        path: text(&event.path),
        from: (!event.from.is_empty()).then(|| text(&event.from)),
        is_dir: event.is_dir,
    }
}
