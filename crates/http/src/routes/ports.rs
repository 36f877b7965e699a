//! Ports of a sandbox, and preview links to them.

use crate::{
    App,
    errors::Answer,
    extract::{self, SandboxPath},
    proxy::{Outside, PASS},
    responses::{AuthErrors, BodyErrors, GuestErrors, NotFound},
};
use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode, uri::Authority},
};
use keiki_api::{Error, Target, rfc3339};
use keiki_types::api::{CreatePreview, PortList, Preview};
use std::time::{Duration, SystemTime};

/// Default lifetime of a link, in seconds.
const USUAL: i64 = 3600;
/// Longest lifetime of a link, in seconds.
const LONGEST: i64 = 7 * 24 * 3600;

/// List listening TCP ports in the sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ports", tag = "previews", operation_id = "list_ports",
    params(("id" = String, Path, description = "The sandbox")),
    responses((status = 200, description = "The ports", body = PortList), AuthErrors, NotFound, GuestErrors))]
pub(super) async fn list(State(app): State<App>, SandboxPath(id): SandboxPath) -> Answer<Json<PortList>> {
    Ok(Json(PortList { items: app.api.ports(id).await? }))
}

/// Create a preview link to a port, for a browser. It opens this port of this sandbox and nothing else, until it expires.
/// The port does not need a listener yet.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/previews", tag = "previews", operation_id = "create_preview",
    params(("id" = String, Path, description = "The sandbox")), request_body = CreatePreview,
    responses((status = 201, description = "The link", body = Preview), AuthErrors, BodyErrors, NotFound))]
pub(super) async fn create(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    headers: HeaderMap,
    extract::Json(request): extract::Json<CreatePreview>,
) -> Answer<(StatusCode, Json<Preview>)> {
    let seconds = request.ttl_seconds.unwrap_or(USUAL);
    if request.port == 0 {
        return Err(Error::Invalid("port must be from 1 to 65535, not 0".into()).into());
    }
    if !(1..=LONGEST).contains(&seconds) {
        return Err(Error::Invalid(format!("ttl_seconds must be from 1 to {LONGEST}, not {seconds}")).into());
    }
    app.api.lifecycle(id).await?;
    let previews = app.api.previews();
    let target = Target { id, port: request.port };
    let outside = Outside::of(&headers, String::new());
    let port = outside.host.parse::<Authority>().ok().and_then(|host| host.port_u16());
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    let base = format!("{}://{}{port}/", outside.scheme, previews.host(target));
    let preview = if previews.is_open {
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
