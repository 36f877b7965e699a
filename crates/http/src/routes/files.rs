//! Files of a sandbox.

use crate::{
    App,
    errors::Answer,
    extract::{self, Query, SandboxPath},
    responses::{AuthErrors, BodyErrors, GuestErrors, NotFound, QueryErrors},
    streaming::Upload,
};
use axum::{
    Json,
    body::Body,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use keiki_api::{Error, Reading, Result, request};
use keiki_types::api::{FsChange, FsEntry, FsList, FsWritten};
use serde::Deserialize;
use utoipa::IntoParams;

/// The file's permission bits.
const MODE: HeaderName = HeaderName::from_static("x-keiki-mode");
#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct PathQuery {
    /// Path in the sandbox.
    pub(super) path: String,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DirQuery {
    /// Path in the sandbox.
    #[serde(default = "root")]
    #[param(required = false)]
    path: String,
}

fn root() -> String {
    "/".into()
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WriteQuery {
    /// Path in the sandbox.
    path: String,
    /// Permission bits in octal; default: those of the replaced file, or 0644.
    mode: Option<String>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct DeleteQuery {
    /// Path in the sandbox.
    path: String,
    /// Delete a directory with its contents.
    #[serde(default, deserialize_with = "extract::flag")]
    #[param(required = false)]
    recursive: bool,
}

/// Read a file.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs", tag = "files", operation_id = "read_file",
    params(("id" = String, Path, description = "The sandbox"), PathQuery),
    responses((status = 200, description = "The contents", body = Vec<u8>, content_type = "application/octet-stream",
            headers(("X-Keiki-Mode" = String, description = "Permission bits in octal"))),
        AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn read(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<PathQuery>,
) -> Answer<Response> {
    check_path("path", &query.path)?;
    Ok(contents(app.api.read_file(id, &query.path).await?).await?)
}

async fn contents(file: Reading) -> Result<Response> {
    let Reading { size, mode, mut chunks } = file;
    let mut size = Some(size);
    // Files in /proc and /sys claim to be empty. Their length is known only at their end.
    if size == Some(0)
        && let Some(first) = chunks.next().await.transpose()?
    {
        size = None;
        chunks = stream::iter([Ok(first)]).chain(chunks).boxed();
    }
    let body = match size {
        Some(size) => Body::from_stream(exactly(size, chunks)),
        None => Body::from_stream(chunks),
    };
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.extend(size.map(|size| (header::CONTENT_LENGTH, HeaderValue::from(size))));
    headers.extend(HeaderValue::from_str(&format!("{:04o}", mode & 0o7777)).map(|mode| (MODE, mode)));
    Ok(response)
}

/// Exactly the announced number of bytes: a file that grows meanwhile is cut, one that shrinks is an error, so that the
/// client does not take a part for the whole.
fn exactly(
    size: u64,
    chunks: impl Stream<Item = Result<Bytes>> + Send + Unpin,
) -> impl Stream<Item = Result<Bytes>> + Send {
    stream::unfold((Some(size), chunks), |(left, mut chunks)| async move {
        let left = left.filter(|left| *left > 0)?;
        let next = match chunks.next().await {
            Some(Ok(mut chunk)) => {
                chunk.truncate(usize::try_from(left).unwrap_or(usize::MAX));
                let left = left - chunk.len() as u64;
                return Some((Ok(chunk), (Some(left), chunks)));
            }
            Some(Err(error)) => error,
            None => Error::Conflict("the file shrank while it was read".into()),
        };
        tracing::warn!("reading a file failed halfway: {}", crate::errors::sentence(&next));
        Some((Err(next), (None, chunks)))
    })
}

/// Write a file, with its missing parent directories. The old file stays until the new one is complete.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/fs", tag = "files", operation_id = "write_file",
    params(("id" = String, Path, description = "The sandbox"), WriteQuery),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses((status = 200, description = "The number of bytes written", body = FsWritten), AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn write(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<WriteQuery>,
    request: Request,
) -> Answer<Json<FsWritten>> {
    let path = query.path;
    let body = Upload::of(request);
    let written = async {
        check_path("path", &path)?;
        let mode = query.mode.as_deref().map(request::mode).transpose()?;
        app.api.write_file(id, &path, mode, body.chunks()).await
    };
    let written = written.await;
    let bytes = body.finish(written)?;
    Ok(Json(FsWritten { path, bytes }))
}

/// Delete a file or a directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/fs", tag = "files", operation_id = "delete_file",
    params(("id" = String, Path, description = "The sandbox"), DeleteQuery),
    responses((status = 204, description = "Deleted"), AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn delete(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(DeleteQuery { path, recursive }): Query<DeleteQuery>,
) -> Answer<StatusCode> {
    check_path("path", &path)?;
    app.api.remove(id, FsChange { path, recursive, ..FsChange::default() }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// List a directory.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/dir", tag = "files", operation_id = "list_dir",
    params(("id" = String, Path, description = "The sandbox"), DirQuery),
    responses((status = 200, description = "The entries", body = FsList), AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn list(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<DirQuery>,
) -> Answer<Json<FsList>> {
    check_path("path", &query.path)?;
    Ok(Json(FsList { entries: app.api.list_dir(id, &query.path).await? }))
}

/// Get the type, size, mode and times of a path, without following a symlink.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/stat", tag = "files", operation_id = "stat",
    params(("id" = String, Path, description = "The sandbox"), PathQuery),
    responses((status = 200, description = "The entry", body = FsEntry), AuthErrors, QueryErrors, NotFound, GuestErrors))]
pub(super) async fn stat(
    State(app): State<App>,
    SandboxPath(id): SandboxPath,
    Query(query): Query<PathQuery>,
) -> Answer<Json<FsEntry>> {
    check_path("path", &query.path)?;
    Ok(Json(app.api.stat(id, &query.path).await?))
}

/// A handler of a change; `$needs` are the optional fields that it requires.
macro_rules! change {
    ($(#[$doc:meta])* $name:ident, $path:literal, [$($needs:ident),*]) => {
        $(#[$doc])*
        #[utoipa::path(post, path = $path, tag = "files", operation_id = stringify!($name),
            params(("id" = String, Path, description = "The sandbox")), request_body = FsChange,
            responses((status = 204, description = "Done"), AuthErrors, BodyErrors, NotFound, GuestErrors))]
        pub(super) async fn $name(
            State(app): State<App>,
            SandboxPath(id): SandboxPath,
            extract::Json(change): extract::Json<FsChange>,
        ) -> Answer<StatusCode> {
            check_change(&change)?;
            $(if change.$needs.is_none() {
                return Err(Error::Invalid(concat!(stringify!($needs), " is required").into()).into());
            })*
            app.api.$name(id, change).await?;
            Ok(StatusCode::NO_CONTENT)
        }
    };
}

change!(
/// Create a directory.
    mkdir, "/v1/sandboxes/{id}/fs/mkdir", []
);
change!(
/// Rename `from` to `path`.
    rename, "/v1/sandboxes/{id}/fs/rename", [from]
);
change!(
    /// Delete a file or a directory.
    remove, "/v1/sandboxes/{id}/fs/remove", []
);
change!(
/// Set permission bits.
    chmod, "/v1/sandboxes/{id}/fs/chmod", [mode]
);
change!(
/// Create a symlink at `path` that points to `target`.
    symlink, "/v1/sandboxes/{id}/fs/symlink", [target]
);

fn check_change(change: &FsChange) -> Result<()> {
    check_path("path", &change.path)?;
    change.from.as_deref().map(|from| check_path("from", from)).transpose()?;
    change.target.as_deref().map(|target| check_path("target", target)).transpose()?;
    change.mode.as_deref().map(request::mode).transpose()?;
    Ok(())
}

pub(super) fn check_path(field: &str, path: &str) -> Result<()> {
    match path {
        "" => Err(Error::Invalid(format!("{field} is empty"))),
        _ if path.contains('\0') => Err(Error::Invalid(format!("{field} contains a NUL"))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::exactly;
    use bytes::Bytes;
    use futures::{StreamExt, stream};
    use keiki_api::Error;

    #[tokio::test]
    async fn a_file_that_changes_while_it_is_read_is_cut_or_an_error() {
        let of = |size, pieces: &'static [&'static str]| async move {
            let chunks = stream::iter(pieces.iter().map(|piece| Ok(Bytes::from_static(piece.as_bytes()))));
            exactly(size, chunks).map(|chunk| chunk.map_err(|_: Error| ())).collect::<Vec<_>>().await
        };
        let ok = |text: &'static str| Ok(Bytes::from_static(text.as_bytes()));
        assert_eq!(of(3, &["ab", "c"]).await, [ok("ab"), ok("c")]);
        assert_eq!(of(3, &["ab", "cd", "e"]).await, [ok("ab"), ok("c")]);
        assert_eq!(of(3, &["ab"]).await, [ok("ab"), Err(())]);
    }
}
