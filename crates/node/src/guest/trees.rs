//! Whole trees of a sandbox: as tar streams, and watched.

use crate::{
    daemon::Node,
    error::Result,
    guest::{
        download::{begun, download},
        files::checked,
        plain, upload,
    },
};
use async_trait::async_trait;
use bytes::Bytes;
use futures::{StreamExt, stream::BoxStream};
use keiki_api::{ByteStream, Trees, Unpacking};
use keiki_protocol::guest::{PathRequest, UnpackChunk, UnpackReply, WatchEvent, WatchRequest};
use keiki_types::{
    SandboxId,
    api::{FsEvent, FsUnpacked},
};

#[async_trait]
impl Trees for Node {
    async fn pack(&self, id: SandboxId, path: &str) -> Result<ByteStream> {
        let request = PathRequest { path: checked(path)? };
        let using = self.inner.begin(id).await?;
        let chunks = download(using, request, |mut guest, request| async move { guest.pack(request).await });
        Ok(begun(chunks.await?).await?.map(|chunk| Ok(chunk?.data)).boxed())
    }

    async fn unpack(
        &self,
        id: SandboxId,
        path: &str,
        how: Unpacking,
        data: ByteStream,
    ) -> Result<FsUnpacked> {
        let mut first = Some(checked(path)?);
        let using = self.inner.begin(id).await?;
        let _stream = using.live.guest.stream()?;
        let chunk = move |piece: Option<Bytes>| UnpackChunk {
            path: first.take().unwrap_or_default(),
            owners: how.owners,
            strip_top: how.strip_top,
            commit: piece.is_none(),
            data: piece.unwrap_or_default(),
        };
        let (chunks, broken) = upload::messages(data, chunk);
        let answer = using.live.guest.client().await.unpack(chunks).await;
        let UnpackReply { files, dirs, symlinks, bytes } = upload::finish(&using, broken, answer).await?;
        Ok(FsUnpacked { path: path.into(), files, dirs, symlinks, bytes })
    }

    async fn watch(
        &self,
        id: SandboxId,
        path: &str,
        recursive: bool,
    ) -> Result<BoxStream<'static, Result<FsEvent>>> {
        let request = WatchRequest { path: checked(path)?, recursive };
        let using = self.inner.begin(id).await?;
        let events = download(using, request, |mut guest, request| async move { guest.watch(request).await });
        Ok(begun(events.await?).await?.map(|event| Ok(view(event?))).boxed())
    }
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
