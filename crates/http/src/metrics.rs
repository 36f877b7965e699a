//! What the HTTP layer counts, in the text format that Prometheus reads. docs/METRICS.md lists it.
//!
//! Labels have few values, whatever callers and guests do: no ids, and routes instead of paths.

use keiki_api::HISTOGRAM_BOUNDS;
use prometheus_client::{
    encoding::text,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Registry, Unit},
};
use std::{sync::Arc, time::Duration};

/// Methods that are counted by name; all others count as one.
const METHODS: [&str; 7] = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"];

type Labels<const N: usize> = [(&'static str, String); N];

/// Requests and connections. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Metrics {
    registry: Arc<Registry>,
    requests: Family<Labels<3>, Counter>,
    request_times: Family<Labels<1>, Histogram, fn() -> Histogram>,
    connections: Gauge,
    refused_connections: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Arc::default(),
            requests: Family::default(),
            request_times: Family::new_with_constructor(|| Histogram::new(HISTOGRAM_BOUNDS)),
            connections: Gauge::default(),
            refused_connections: Counter::default(),
        };
        let mut registry = Registry::default();
        let keiki = registry.sub_registry_with_prefix("keiki");
        keiki.register("http_requests", "Requests answered", metrics.requests.clone());
        keiki.register_with_unit(
            "http_request",
            "Time from request to response head",
            Unit::Seconds,
            metrics.request_times.clone(),
        );
        keiki.register("http_connections", "Open connections", metrics.connections.clone());
        keiki.register(
            "http_connections_refused",
            "Connections answered 503 because too many were open",
            metrics.refused_connections.clone(),
        );
        metrics.registry = Arc::new(registry);
        metrics
    }
}

impl Metrics {
    /// Counts a request. `from_guest`: a guest gave the answer.
    pub(crate) fn request(&self, method: &str, route: &str, status: u16, from_guest: bool, took: Duration) {
        let method = if METHODS.contains(&method) { method } else { "other" };
        let status = status_label(status, from_guest);
        let route = ("route", route.to_owned());
        let request = [("method", method.to_owned()), route.clone(), ("status", status)];
        self.requests.get_or_create(&request).inc();
        self.request_times.get_or_create(&[route]).observe(took.as_secs_f64());
    }

    /// A connection was opened (1) or has ended (-1).
    pub(crate) fn connection(&self, change: i64) {
        self.connections.inc_by(change);
    }

    /// A connection was turned away.
    pub(crate) fn connection_refused(&self) {
        self.refused_connections.inc();
    }

    /// The node's metrics, then these, then the end mark.
    pub(crate) fn text_after(&self, mut text: String) -> String {
        // Writing to a String cannot fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// What an answer's status counts as. A guest's is counted by its class only.
fn status_label(status: u16, from_guest: bool) -> String {
    match status {
        100..=599 if !from_guest => status.to_string(),
        100..=599 => format!("{}xx", status / 100),
        _ => "other".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::Metrics;
    use std::time::Duration;

    fn lines(metrics: &Metrics, of: &str) -> Vec<String> {
        let text = metrics.text_after(String::new());
        text.lines().filter(|line| line.starts_with(of)).map(String::from).collect()
    }

    #[test]
    fn whatever_is_asked_labels_are_few() {
        let metrics = Metrics::default();
        for status in 0..2000 {
            metrics.request(&format!("M{status}"), "preview", status, true, Duration::ZERO);
        }
        let counted = lines(&metrics, "keiki_http_requests_total");
        assert_eq!(counted.len(), 6, "{counted:?}");
        metrics.request("GET", "/healthz", 200, false, Duration::from_millis(2));
        let one = r#"keiki_http_requests_total{method="GET",route="/healthz",status="200"} 1"#;
        assert!(lines(&metrics, "keiki_http_requests_total").contains(&one.into()));
    }

    #[test]
    fn the_text_of_the_node_comes_first_and_one_mark_ends_all() {
        let text = Metrics::default().text_after("node 1\n".into());
        assert!(text.starts_with("node 1\n") && text.ends_with("# EOF\n"), "{text}");
        assert_eq!(text.matches("# EOF").count(), 1);
    }
}
