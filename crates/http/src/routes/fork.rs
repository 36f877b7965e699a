//! Forks, and fork trees: forks whose children carry the tree's id, so that one of them can be promoted.

use crate::{
    App,
    errors::Answer,
    extract::{self, SandboxPath},
    idempotency::RequestKey,
    responses::{AuthErrors, BodyErrors, CapacityErrors, Conflict, IdempotencyErrors, NotFound},
};
use axum::{Json, extract::State, http::StatusCode};
use keiki_api::{Error, Result};
use keiki_types::api::{ForkSandbox, ForkTree, Forked, ForkedTree, Promote, Promoted};
use std::collections::BTreeMap;
use uuid::Uuid;

/// Label with the id of a child's tree.
const TREE: &str = "fork_tree_id";

/// Fork a running sandbox: the children continue from this instant, and the parent keeps running.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "forks", operation_id = "fork_sandbox",
    params(("id" = String, Path, description = "The sandbox"),
        RequestKey),
    request_body = Option<ForkSandbox>,
    responses((status = 201, description = "The children, ready for commands", body = Forked), AuthErrors, BodyErrors, NotFound, Conflict, CapacityErrors,
        IdempotencyErrors))]
pub(super) async fn fork(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    key: RequestKey,
    extract::Json(request): extract::Json<ForkSandbox>,
) -> Answer<(StatusCode, Json<Forked>)> {
    let once = key.of(&request);
    Ok((StatusCode::CREATED, Json(app.api.fork(id, request, BTreeMap::new(), once).await?)))
}

/// Fork a running sandbox into a tree whose children can be promoted.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork-tree", tag = "forks", operation_id = "fork_tree",
    params(("id" = String, Path, description = "The sandbox"),
        RequestKey),
    request_body = ForkTree,
    responses((status = 201, description = "The children, ready for commands", body = ForkedTree), AuthErrors, BodyErrors, NotFound, Conflict, CapacityErrors,
        IdempotencyErrors))]
pub(super) async fn fork_tree(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    key: RequestKey,
    extract::Json(request): extract::Json<ForkTree>,
) -> Answer<(StatusCode, Json<ForkedTree>)> {
    let once = key.of(&request);
    let ttl_seconds =
        request.ttl_seconds.map_or_else(|| explore_ttl(&request), |seconds| Ok(Some(seconds)))?;
    let new_tree = Uuid::now_v7().to_string();
    let labels =
        BTreeMap::from([(TREE.to_owned(), new_tree.clone()), ("fork_parent_id".to_owned(), id.to_string())]);
    let request =
        ForkSandbox { count: Some(request.count), metadata: request.metadata, ttl_seconds, secrets: None };
    let Forked { parent_id, children, timings, .. } = app.api.fork(id, request, labels, once).await?;
    // A repeated request gets the tree that was made the first time.
    let tree_id = children.first().and_then(|child| child.metadata.get(TREE).cloned()).unwrap_or(new_tree);
    Ok((StatusCode::CREATED, Json(ForkedTree { tree_id, parent_id, children, timings })))
}

/// Keep one child of a fork tree and, on request, delete its siblings.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/promote", tag = "forks", operation_id = "promote_sandbox",
    params(("id" = String, Path, description = "The child to keep")), request_body = Option<Promote>,
    responses((status = 200, description = "The kept child, and its deleted siblings", body = Promoted), AuthErrors, BodyErrors, NotFound, Conflict))]
pub(super) async fn promote(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<Promote>,
) -> Answer<Json<Promoted>> {
    Ok(Json(app.api.promote(id, request).await?))
}

/// The TTL that a client asks for through the label `explore_ttl`.
fn explore_ttl(request: &ForkTree) -> Result<Option<i64>> {
    let text = request.metadata.as_ref().and_then(|metadata| metadata.get("explore_ttl"));
    let wrong = |text: &String| {
        Error::Invalid(format!(
            "metadata.explore_ttl must be a whole number of seconds above 0, not {text:?}"
        ))
    };
    text.map(|text| text.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| wrong(text))).transpose()
}
