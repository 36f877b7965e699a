//! Bodies that do more than carry bytes: hold a value while they are sent, or record when data last
//! moved.

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{sync::watch, time::Instant};

/// A body, and a function to call whenever it has moved.
struct Beside<F> {
    body: Body,
    moved: F,
}

/// The same body; `held` is dropped with it.
pub(super) fn holding<T: Send + Unpin + 'static>(body: Body, held: T) -> Body {
    let moved = move || {
        let _held = &held;
    };
    Body::new(Beside { body, moved })
}

/// The same body, and when it last moved; its end is its last move.
pub(super) fn watched(body: Body) -> (Body, watch::Receiver<Instant>) {
    let (last, seen) = watch::channel(Instant::now());
    let moved = move || {
        last.send_replace(Instant::now());
    };
    (Body::new(Beside { body, moved }), seen)
}

impl<F: FnMut() + Unpin> HttpBody for Beside<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if polled.is_ready() {
            (self.moved)();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
