//! Request bodies of any size, passed on as they arrive.

use super::extract;
use axum::{body::BodyDataStream, extract::Request};
use bytes::Bytes;
use futures::{StreamExt, stream, stream::BoxStream};
use keiki_api::{Error, Result};
use std::{sync::Arc, time::Duration};
use tokio::sync::Mutex;

/// Bytes of a refused upload that are still read, so that the client sees the refusal.
const DRAIN_BYTES: usize = 64 << 20;
/// For at most this long.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// A body that is being passed on, and can be drained if that fails.
#[derive(Clone)]
pub(super) struct Upload {
    body: Arc<Mutex<BodyDataStream>>,
    length: Option<u64>,
}

impl Upload {
    pub(super) fn of(request: Request) -> Self {
        let (parts, body) = request.into_parts();
        let length = extract::content_length(&parts.headers);
        Self { body: Arc::new(Mutex::new(body.into_data_stream())), length }
    }

    /// Its chunks. The stream ends without an error only if everything announced has arrived.
    pub(super) fn chunks(&self) -> BoxStream<'static, Result<Bytes>> {
        let chunks = stream::unfold(Some((self.clone(), 0)), |state| async move {
            let (upload, got) = state?;
            let chunk = extract::next_chunk(&mut *upload.body.lock().await).await;
            match chunk {
                Some(Ok(chunk)) => {
                    let got = got + chunk.len() as u64;
                    Some((Ok(chunk), Some((upload, got))))
                }
                Some(Err(error)) => Some((Err(error), None)),
                None if upload.length.is_some_and(|length| length != got) => {
                    Some((Err(Error::Invalid("the request body ended early".into())), None))
                }
                None => None,
            }
        });
        chunks.boxed()
    }

    /// The result. After a failure, the rest of the body is read for a while, alongside the
    /// response.
    pub(super) fn finish<T>(self, done: Result<T>) -> Result<T> {
        if done.is_err() {
            tokio::spawn(async move { self.drain().await });
        }
        done
    }

    /// Continues to read for a while: otherwise a client in the middle of sending would see a reset
    /// before the answer.
    async fn drain(&self) {
        let read = async {
            let mut body = self.body.lock().await;
            let mut left = DRAIN_BYTES;
            while let Some(Ok(chunk)) = body.next().await {
                let Some(rest) = left.checked_sub(chunk.len()) else { return };
                left = rest;
            }
        };
        // After that the client is cut off.
        let _ = tokio::time::timeout(DRAIN_TIME, read).await;
    }
}
