//! What requests leave in the log.

use crate::fake::FakeNode;
use crate::{App, errors::Failure, router};
use axum::{body::Body, http::Request, response::IntoResponse};
use keiki_api::Error;
use std::{
    io,
    sync::{Arc, Mutex},
};
use tower::ServiceExt;

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Written {
    /// Listens to this thread until the guard is dropped.
    fn listen(&self) -> tracing::subscriber::DefaultGuard {
        let written = self.clone();
        let log = tracing_subscriber::fmt().json().with_writer(move || written.clone()).finish();
        tracing::subscriber::set_default(log)
    }

    fn lines(&self) -> Vec<serde_json::Value> {
        let text = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

#[tokio::test]
async fn a_request_is_one_line_with_its_route_and_no_query() {
    let ask = || {
        let request =
            Request::builder().uri("/v1/sandboxes/secret?access_token=secret").header("x-request-id", "r-1");
        let routes = router(App::new(Arc::new(FakeNode::default())));
        routes.oneshot(request.body(Body::empty()).unwrap())
    };
    // A line that a thread without a listener logs first is taken for silent until the next listener comes.
    let guard = Written::default().listen();
    ask().await.unwrap();
    drop(guard);
    let written = Written::default();
    let guard = written.listen();
    ask().await.unwrap();
    drop(guard);
    let lines = written.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    let fields = &lines[0]["fields"];
    assert_eq!((&fields["id"], &fields["method"]), (&"r-1".into(), &"GET".into()));
    assert_eq!((&fields["route"], &fields["status"]), (&"/v1/sandboxes/{id}".into(), &404.into()));
    assert_eq!(fields["error"], "no sandbox secret");
    assert!(fields["ms"].is_f64());
}

#[test]
fn an_internal_error_logs_its_causes_once() {
    let fail = || {
        let cause = anyhow::anyhow!("permission denied").context("could not open vm.mem");
        Failure::from(Error::internal("could not restore the snapshot", cause)).into_response()
    };
    let guard = Written::default().listen();
    drop(fail());
    drop(guard);
    let written = Written::default();
    let guard = written.listen();
    drop(fail());
    drop(guard);
    let lines = written.lines();
    assert_eq!(lines.len(), 1);
    assert_eq!(lines[0]["fields"]["cause"], "could not open vm.mem: permission denied");
}
