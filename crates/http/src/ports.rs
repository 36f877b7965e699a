//! Ports of a sandbox, and links to them.

use super::{
    App,
    errors::Answer,
    extract::{self, SandboxPath},
    proxy::{Outside, PASS},
    responses::{Any, Guest, Named, Told},
};
use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, uri::Authority},
};
use keiki_api::{Error, Target, rfc3339};
use keiki_types::api::{CreatePreview, PortList, Preview};
use std::time::{Duration, SystemTime};

/// How long a link is good where nothing is asked for, in seconds.
const USUAL: i64 = 3600;
/// The longest.
const LONGEST: i64 = 7 * 24 * 3600;

/// TCP ports that something in the sandbox listens on.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports", tag = "previews", operation_id = "list_ports",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The ports", body = PortList), Any, Named, Guest))]
pub(super) async fn list(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<PortList>> {
    Ok(Json(PortList { items: app.api.ports(id).await? }))
}

/// Makes a link to a port, for a browser. It opens that port of that sandbox and nothing else, until its time is over.
/// Nothing has to listen there yet.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/previews", tag = "previews", operation_id = "create_preview",
    params(("id" = String, Path, description = "The sandbox")), request_body = CreatePreview,
    responses((status = 201, description = "The link", body = Preview), Any, Told, Named))]
pub(super) async fn create(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    headers: HeaderMap,
    extract::Json(request): extract::Json<CreatePreview>,
) -> Answer<(StatusCode, Json<Preview>)> {
    let seconds = request.ttl_seconds.unwrap_or(USUAL);
    if request.port == 0 {
        return Err(Error::Invalid("port is 0; it must be 1 to 65535".into()).into());
    }
    if !(1..=LONGEST).contains(&seconds) {
        return Err(Error::Invalid(format!("ttl_seconds is {seconds}; it must be 1 to {LONGEST}")).into());
    }
    app.api.lifecycle(id).await?;
    let previews = app.api.previews();
    let target = Target { id, port: request.port };
    let outside = Outside::of(&headers, String::new());
    let port = outside.host.parse::<Authority>().ok().and_then(|host| host.port_u16());
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    let base = format!("{}://{}{port}/", outside.scheme, previews.host(target));
    let preview = if previews.is_open() {
        Preview { url: base, port: request.port, expires_at: None }
    } else {
        let until = SystemTime::now() + Duration::from_secs(seconds.unsigned_abs());
        Preview {
            url: format!("{base}?{PASS}={}", previews.pass(target, until)),
            port: request.port,
            expires_at: Some(rfc3339(until.into())),
        }
    };
    Ok((StatusCode::CREATED, Json(preview)))
}
