//! Messages that a guest sends as the answer to one call.

use crate::{error::Result, guest::refusal, sandbox::Use};
use futures::{StreamExt, stream, stream::BoxStream};
use keiki_protocol::guest::guest_client::GuestClient;
use tonic::{Response, Status, Streaming, transport::Channel};

/// The messages of a call. The sandbox is in use, and its place among the streams taken, as long as
/// they last.
pub async fn download<R, T, F>(
    using: Use,
    request: R,
    send: impl Fn(GuestClient<Channel>, R) -> F,
) -> Result<BoxStream<'static, Result<T>>>
where
    R: Clone,
    T: Send + 'static,
    F: Future<Output = Result<Response<Streaming<T>>, Status>>,
{
    let held = using.live.guest.stream()?;
    let messages = using.call(request, send).await?;
    let messages = stream::unfold(Some((using, held, messages)), |state| async move {
        let (using, held, mut messages) = state?;
        match messages.message().await.transpose()? {
            Ok(message) => Some((Ok(message), Some((using, held, messages)))),
            Err(status) => Some((Err(using.explain(refusal(&status)).await), None)),
        }
    });
    Ok(messages.boxed())
}

/// The same messages, once the first one has come: a guest refuses some calls by it.
pub async fn begun<T: Send + 'static>(
    mut messages: BoxStream<'static, Result<T>>,
) -> Result<BoxStream<'static, Result<T>>> {
    let first = messages.next().await.transpose()?;
    Ok(stream::iter(first.map(Ok)).chain(messages).boxed())
}
