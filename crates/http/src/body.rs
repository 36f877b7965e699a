//! Bodies that do something beside: hold a thing as long as they are sent, say when they last moved.

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use std::{
    pin::Pin,
    task::{Context, Poll},
};
use tokio::{sync::watch, time::Instant};

/// A body, and what is done whenever it has moved.
struct Beside<F> {
    body: Body,
    moved: F,
}

/// The same body; `held` is dropped with it, when it was sent or given up.
pub(super) fn holding<T: Send + Unpin + 'static>(body: Body, held: T) -> Body {
    let moved = move || {
        let _held = &held;
    };
    Body::new(Beside { body, moved })
}

/// The same body, and when it last moved; it has moved at its end for the last time.
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
