//! A body of any size, as messages of a call to the guest.

use crate::{
    error::{Error, Result},
    guest::refusal,
    sandbox::Use,
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use keiki_api::ByteStream;
use parking_lot::Mutex;
use std::sync::Arc;
use tonic::{Response, Status};

/// One message of it.
const PIECE: usize = 128 << 10;

/// Why an upload was cut off, if it was: that is a failure of its caller, not of the guest.
pub type Broken = Arc<Mutex<Option<Error>>>;

/// What the guest answered, or what interrupted the upload.
pub async fn finish<T>(using: &Use, broken: Broken, answer: Result<Response<T>, Status>) -> Result<T> {
    let broken = broken.lock().take();
    match (broken, answer) {
        (Some(error), _) => Err(error),
        (None, Ok(reply)) => Ok(reply.into_inner()),
        (None, Err(status)) => Err(using.explain(refusal(&status)).await),
    }
}

/// Messages made from each piece of `data`, and last one for its end. An upload that is cut off
/// never sends its end.
pub fn messages<T: Send + 'static>(
    data: ByteStream,
    mut make: impl FnMut(Option<Bytes>) -> T + Send + 'static,
) -> (impl Stream<Item = T> + Send + 'static, Broken) {
    let broken = Broken::default();
    let told = Arc::clone(&broken);
    let pieces = data.flat_map(|piece| {
        let parts: Vec<Result<Bytes>> = match piece {
            Ok(piece) => piece.chunks(PIECE).map(|part| Ok(piece.slice_ref(part))).collect(),
            Err(error) => vec![Err(error)],
        };
        futures::stream::iter(parts)
    });
    let messages =
        pieces.map(Some).chain(futures::stream::once(async { None })).scan(false, move |failed, piece| {
            let message = match piece {
                _ if *failed => None,
                Some(Ok(data)) => Some(make(Some(data))),
                Some(Err(error)) => {
                    *failed = true;
                    *told.lock() = Some(error);
                    None
                }
                None => Some(make(None)),
            };
            futures::future::ready(message)
        });
    (messages, broken)
}

#[cfg(test)]
mod tests {
    use super::{PIECE, messages};
    use crate::error::Error;
    use bytes::Bytes;
    use futures::StreamExt;

    #[tokio::test]
    async fn a_broken_upload_never_says_its_end() {
        let upload = |pieces: Vec<Result<Bytes, Error>>| async {
            let (messages, broken) = messages(futures::stream::iter(pieces).boxed(), |piece| piece);
            let all: Vec<_> = messages.collect().await;
            (all.iter().filter(|piece| piece.is_none()).count(), all.len(), broken.lock().is_some())
        };
        assert_eq!(upload(vec![Ok("ab".into()), Ok("c".into())]).await, (1, 3, false));
        assert_eq!(upload(vec![]).await, (1, 1, false));
        assert_eq!(upload(vec![Ok(vec![0; PIECE + 1].into())]).await, (1, 3, false));
        let bad = Err(Error::Invalid("cut".into()));
        assert_eq!(upload(vec![Ok("ab".into()), bad, Ok("c".into())]).await, (0, 1, true));
    }
}
