//! The OpenAPI document: generated from the handlers, committed as `openapi/v1.json`, and tested current.

use super::proxy;
use keiki_types::api::ErrorBody;
use utoipa::{
    Modify, OpenApi,
    openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme},
};

/// The document without routes, except the proxy, which the router serves under other paths.
pub(super) fn base() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Keiki",
        description = "fork() for whole machines. Every failure is `{\"error\": \"<one sentence>\"}`. Every answer has \
                       `X-Request-Id`: the caller's if it was 1 to 200 graphic ASCII characters, otherwise a new one."
    ),
    paths(proxy::by_path),
    components(schemas(ErrorBody)),
    security(("bearer" = []), ("key" = [])),
    modifiers(&Security)
)]
struct Document;

struct Security;

impl Modify for Security {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        let components = document.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let key = ApiKey::Header(ApiKeyValue::new("X-API-Key"));
        components.add_security_scheme("key", SecurityScheme::ApiKey(key));
    }
}

#[cfg(test)]
mod tests {
    use crate::openapi;
    use std::path::Path;

    /// Set to write the document instead of comparing it.
    const REFRESH: &str = "KEIKI_WRITE_OPENAPI";

    #[test]
    fn the_committed_openapi_document_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../openapi/v1.json");
        let current = openapi().to_pretty_json().unwrap() + "\n";
        if std::env::var_os(REFRESH).is_some() {
            std::fs::write(&path, &current).unwrap();
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == current,
            "openapi/v1.json is not current; refresh it with: {REFRESH}=1 cargo test -p keiki-http openapi"
        );
    }

    #[test]
    fn every_operation_declares_its_failures_and_one_success() {
        let document = serde_json::to_value(openapi()).unwrap();
        for (path, item) in document["paths"].as_object().unwrap() {
            for (method, operation) in item.as_object().unwrap() {
                let statuses = operation["responses"].as_object().unwrap();
                let good =
                    statuses.keys().filter(|status| !matches!(status.as_bytes()[0], b'4' | b'5')).count();
                assert_eq!(good, 1, "{method} {path}");
                let open = path == "/healthz";
                assert_eq!(statuses.contains_key("401"), !open, "{method} {path}");
                assert!(statuses.contains_key("404") || !path.contains('{'), "{method} {path}");
                assert!(operation["operationId"].is_string(), "{method} {path}");
            }
        }
    }
}
