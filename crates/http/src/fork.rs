//! Forks, and trees of them: a fan-out whose children carry its id, of which one can be promoted.

use super::{
    App,
    errors::Answer,
    extract::{self, SandboxPath},
    once::RequestKey,
    responses::{Any, Keyed, Maker, Named, Stateful, Told},
};
use axum::{Json, extract::State, http::StatusCode};
use keiki_api::{Error, Result};
use keiki_types::api::{ForkSandbox, ForkTree, Forked, ForkedTree, Promote, Promoted};
use std::collections::BTreeMap;
use uuid::Uuid;

/// The label that names a child's tree.
const TREE: &str = "fork_tree_id";
/// Most children of one fork.
const MOST: i64 = 64;

/// Branches a running sandbox: its children continue from this instant, and it goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "forks", operation_id = "fork_sandbox",
    params(("id" = String, Path, description = "The sandbox"),
        RequestKey),
    request_body = Option<ForkSandbox>,
    responses((status = 201, description = "The children, ready", body = Forked), Any, Told, Named, Stateful, Maker,
        Keyed))]
pub(super) async fn fork(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    key: RequestKey,
    extract::Json(request): extract::Json<ForkSandbox>,
) -> Answer<(StatusCode, Json<Forked>)> {
    check_count(request.count.unwrap_or(1))?;
    let once = key.of(&request);
    Ok((StatusCode::CREATED, Json(app.api.fork(id, request, BTreeMap::new(), once).await?)))
}

/// Branches a running sandbox into a tree that [`promote`] ends.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork-tree", tag = "forks", operation_id = "fork_tree",
    params(("id" = String, Path, description = "The sandbox"),
        RequestKey),
    request_body = ForkTree,
    responses((status = 201, description = "The children, ready", body = ForkedTree), Any, Told, Named, Stateful, Maker,
        Keyed))]
pub(super) async fn fork_tree(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    key: RequestKey,
    extract::Json(request): extract::Json<ForkTree>,
) -> Answer<(StatusCode, Json<ForkedTree>)> {
    check_count(request.count)?;
    let once = key.of(&request);
    let ttl_seconds =
        request.ttl_seconds.map_or_else(|| explore_ttl(&request), |seconds| Ok(Some(seconds)))?;
    let new_tree = Uuid::now_v7().to_string();
    let labels =
        BTreeMap::from([(TREE.to_owned(), new_tree.clone()), ("fork_parent_id".to_owned(), id.to_string())]);
    let request =
        ForkSandbox { count: Some(request.count), metadata: request.metadata, ttl_seconds, secrets: None };
    let Forked { parent_id, children, timings, .. } = app.api.fork(id, request, labels, once).await?;
    // Of a request that was carried out before, the tree is the one made then.
    let tree_id = children.first().and_then(|child| child.metadata.get(TREE).cloned()).unwrap_or(new_tree);
    Ok((StatusCode::CREATED, Json(ForkedTree { tree_id, parent_id, children, timings })))
}

/// Chooses one child of a tree, and deletes its siblings where asked to.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/promote", tag = "forks", operation_id = "promote_sandbox",
    params(("id" = String, Path, description = "The child that stays")), request_body = Option<Promote>,
    responses((status = 200, description = "What became of the tree", body = Promoted), Any, Told, Named, Stateful))]
pub(super) async fn promote(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    extract::Json(request): extract::Json<Promote>,
) -> Answer<Json<Promoted>> {
    Ok(Json(app.api.promote(id, request).await?))
}

fn check_count(count: i64) -> Result<()> {
    if (1..=MOST).contains(&count) {
        return Ok(());
    }
    Err(Error::Invalid(format!("count is {count}; it must be 1 to {MOST}")))
}

/// The TTL that the exploring client asks for through its children's labels.
fn explore_ttl(request: &ForkTree) -> Result<Option<i64>> {
    let text = request.metadata.as_ref().and_then(|metadata| metadata.get("explore_ttl"));
    let wrong = |text: &String| {
        Error::Invalid(format!(
            "metadata.explore_ttl is {text:?}; it must be a whole number of seconds above 0"
        ))
    };
    text.map(|text| text.parse().ok().filter(|seconds| *seconds > 0).ok_or_else(|| wrong(text))).transpose()
}
