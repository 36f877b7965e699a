//! Previews: ports of a sandbox, served through the node.
//!
//! ```text
//!   /v1/sandboxes/ID/proxy/PORT/…   by path: on the API's own origin, with a key      for programs
//!   PORT-ID.SUFFIX/…                by host: an origin of its own, with a pass        for browsers
//!        │ access: allowed?   headers: what each side sees   forward: dial, send, stream
//!        ▼
//!   HTTP/1.1 over a connection to the guest's port (`Ports::dial`), one for each request; wakes the sandbox
//! ```
//!
//! A guest is hostile, and so is the page it serves. The guest never gets the node's key or a pass, and its page never acts
//! on the API with the credentials of its user's browser. By path the page would share the API's origin, so every answer
//! carries `Content-Security-Policy: sandbox`, which gives it an opaque origin. By host it has its own origin, where the
//! API is not served. docs/SECURITY.md has the details.

mod access;
mod forward;
mod headers;
mod pass;

pub(super) use forward::{FromGuest, Peer};
pub(super) use headers::Outside;
pub(super) use pass::PASS;

use super::{
    App,
    errors::{Answer, Failure},
    extract::{PortPath, SandboxPath},
    responses::{AuthErrors, GuestErrors, NotFound},
};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, Uri, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use keiki_api::Target;
use keiki_types::api::ErrorBody;

/// The paths of the router, for the documented one.
pub(super) const BY_PATH: [&str; 3] = [
    "/v1/sandboxes/{id}/proxy/{port}",
    "/v1/sandboxes/{id}/proxy/{port}/",
    "/v1/sandboxes/{id}/proxy/{port}/{*path}",
];
/// The route that requests by host are counted under.
pub(super) const BY_HOST: &str = "preview";
/// Slashes before the guest's part of the path.
const SLASHES: usize = 6;

/// Marks a response to a request that was sent to a preview's own host.
#[derive(Debug, Clone, Copy)]
pub(super) struct ByHost;

/// Forward a request to a port of a sandbox and return its answer: any method, streamed both ways, WebSockets too. Wakes a
/// hibernated sandbox. The answer is the guest's; 401, 403, 502 and 503 with an `error` are usually the node's.
#[utoipa::path(method(get, post, put, patch, delete), path = "/v1/sandboxes/{id}/proxy/{port}/{path}",
    tag = "previews", operation_id = "proxy",
    params(("id" = String, Path, description = "The sandbox"), ("port" = u16, Path, description = "1 to 65535"),
        ("path" = String, Path, description = "The path in the guest")),
    responses((status = "default", description = "The guest's answer"), AuthErrors, NotFound, GuestErrors,
        (status = 400, description = "The port is invalid", body = ErrorBody),
        (status = 502, description = "The port has no listener, or it does not speak HTTP", body = ErrorBody)))]
pub(super) async fn by_path(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    PortPath(port): PortPath,
    request: Request,
) -> Answer<Response> {
    let path = request.uri().path();
    let Some((at, _)) = path.match_indices('/').nth(SLASHES - 1) else {
        // Without the slash, relative links of a page would lead elsewhere.
        let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
        return Ok(access::onward(StatusCode::PERMANENT_REDIRECT, &format!("{path}/{query}")));
    };
    let prefix = path[..at].to_owned();
    let outside = Outside::of(request.headers(), prefix);
    Ok(forward::forward(&app, Target { id, port }, outside, request, pass::Credentials::ByPath).await?)
}

/// Handles requests to the hosts of previews; all others go to the API.
pub(super) async fn by_host(State(app): State<App>, request: Request, next: Next) -> Response {
    let previews = app.api.previews();
    let Some(target) = host_of(request.headers(), request.uri()).and_then(|host| previews.named(host)) else {
        return next.run(request).await;
    };
    let answered = match access::by_host(&app, previews, target, &request) {
        Ok(access::Verdict::Come(credentials)) => {
            let outside = Outside::of(request.headers(), String::new());
            forward::forward(&app, target, outside, request, credentials).await
        }
        Ok(access::Verdict::Answer(answer)) => Ok(answer),
        Err(error) => Err(error),
    };
    let mut response = answered.unwrap_or_else(|error| Failure::from(error).into_response());
    response.extensions_mut().insert(ByHost);
    response
}

/// The host of a request, without the port.
fn host_of<'a>(headers: &'a HeaderMap, uri: &'a Uri) -> Option<&'a str> {
    let whole = match headers.get(header::HOST) {
        Some(host) => host.to_str().ok()?,
        None => uri.authority()?.as_str(),
    };
    Some(whole.rsplit_once(':').map_or(whole, |(host, _)| host))
}
