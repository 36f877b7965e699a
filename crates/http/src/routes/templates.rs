//! Templates and their builds.

use crate::{
    App,
    errors::Answer,
    extract::{self, BuildPath, SMALL, TemplatePath},
    key::pairs,
    responses::{AuthErrors, BodyErrors, CapacityErrors, Conflict, NotFound},
};
use axum::{
    Json,
    extract::{Request, State},
    http::{StatusCode, header},
};
use keiki_api::{Error, Result};
use keiki_types::api::{Build, BuildList, BuildTemplate, Template, TemplateList};

/// List all templates.
#[utoipa::path(get, path = "/v1/templates", tag = "templates", operation_id = "list_templates",
    responses((status = 200, description = "The templates", body = TemplateList), AuthErrors))]
pub(super) async fn list(State(app): State<App>) -> Answer<Json<TemplateList>> {
    Ok(Json(TemplateList { items: app.api.templates().await? }))
}

/// Get a template.
#[utoipa::path(get, path = "/v1/templates/{name}", tag = "templates", operation_id = "get_template",
    params(("name" = String, Path, description = "The template")),
    responses((status = 200, description = "The template", body = Template), AuthErrors, NotFound))]
pub(super) async fn get(State(app): State<App>, TemplatePath(name): TemplatePath) -> Answer<Json<Template>> {
    Ok(Json(app.api.get_template(&name).await?))
}

/// Delete a built template. Sandboxes and snapshots made from it stay.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates", operation_id = "delete_template",
    params(("name" = String, Path, description = "The template")),
    responses((status = 204, description = "Deleted"), AuthErrors, NotFound, Conflict))]
pub(super) async fn delete(State(app): State<App>, TemplatePath(name): TemplatePath) -> Answer<StatusCode> {
    app.api.delete_template(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Build a template, or join its running build.
#[utoipa::path(post, path = "/v1/templates/build", tag = "templates", operation_id = "build_template",
    request_body(content((BuildTemplate = "application/json"), (BuildTemplate = "application/x-www-form-urlencoded"))),
    responses((status = 202, description = "The build", body = Build), AuthErrors, BodyErrors, Conflict, CapacityErrors,
        (status = 404, description = "No such template", body = keiki_types::api::ErrorBody)))]
pub(super) async fn build(State(app): State<App>, request: Request) -> Answer<(StatusCode, Json<Build>)> {
    let (parts, body) = request.into_parts();
    let media =
        parts.headers.get(header::CONTENT_TYPE).and_then(|media| media.to_str().ok()).unwrap_or_default();
    let body = extract::read(&parts.headers, body, SMALL).await?;
    Ok((StatusCode::ACCEPTED, Json(app.api.build_template(wanted(media, &body)?).await?)))
}

/// Sources of a template that this node does not know. Ignoring them would build a different one.
const FOREIGN: [&str; 3] = ["image_ref", "dockerfile", "rootfs"];

fn wanted(media: &str, body: &[u8]) -> Result<BuildTemplate> {
    let media = media.to_ascii_lowercase();
    if media.starts_with("multipart/") {
        return Err(Error::Invalid("a template is built by its name; it takes no files".into()));
    }
    // Some tools declare every body a form.
    let json = body.trim_ascii_start().first().is_none_or(|first| *first == b'{');
    let fields: serde_json::Map<String, serde_json::Value> = if media.starts_with("application/x-www-form")
        && !json
    {
        let text = std::str::from_utf8(body).map_err(|_| Error::Invalid("the form is not UTF-8".into()))?;
        let pairs = pairs(text).ok_or_else(|| Error::Invalid("the form is not valid".into()))?;
        pairs.into_iter().map(|(name, value)| typed(name, value)).collect()
    } else {
        extract::parse(body)?
    };
    if let Some(field) = FOREIGN.iter().find(|field| fields.contains_key(**field)) {
        return Err(Error::Invalid(format!(
            "{field} is not supported: this node builds only the templates it knows by name"
        )));
    }
    extract::parse(serde_json::Value::Object(fields).to_string().as_bytes())
}

/// A field of a form with its JSON type.
fn typed(name: String, value: String) -> (String, serde_json::Value) {
    let value = match name.as_str() {
        "cpu" | "memory_mb" | "size_mb" => value.parse::<u64>().map_or(value.into(), Into::into),
        "force" | "rebake" => match value.as_str() {
            "true" | "1" => true.into(),
            "false" | "0" => false.into(),
            _ => value.into(),
        },
        _ => value.into(),
    };
    (name, value)
}

/// List builds since the node started, newest first.
#[utoipa::path(get, path = "/v1/templates/builds", tag = "templates", operation_id = "list_builds",
    responses((status = 200, description = "The builds", body = BuildList), AuthErrors))]
pub(super) async fn builds(State(app): State<App>) -> Answer<Json<BuildList>> {
    Ok(Json(BuildList { items: app.api.builds().await? }))
}

/// Get a build.
#[utoipa::path(get, path = "/v1/templates/builds/{id}", tag = "templates", operation_id = "get_build",
    params(("id" = String, Path, description = "The build")),
    responses((status = 200, description = "The build", body = Build), AuthErrors, NotFound))]
pub(super) async fn get_build(State(app): State<App>, BuildPath(id): BuildPath) -> Answer<Json<Build>> {
    Ok(Json(app.api.get_build(&id).await?))
}

#[cfg(test)]
mod tests {
    use super::wanted;

    #[test]
    fn a_build_is_asked_for_in_json_or_as_a_form() {
        for (media, body) in [
            ("application/json", r#"{"name":"base","cpu":2,"force":true,"later":1}"#),
            ("", r#"{"name":"base","cpu":2,"force":true}"#),
            ("application/x-www-form-urlencoded", r#" {"name":"base","cpu":2,"force":true}"#),
            ("application/x-www-form-urlencoded; charset=utf-8", "name=ba%73e&cpu=2&force=1&later="),
        ] {
            let build = wanted(media, body.as_bytes()).unwrap();
            assert_eq!((build.name.as_str(), build.cpu, build.force), ("base", Some(2), true), "{body}");
        }
    }

    #[test]
    fn what_it_cannot_build_is_refused_by_name() {
        let form = "application/x-www-form-urlencoded";
        for (media, body, named) in [
            (form, "name=x&image_ref=debian", "image_ref"),
            (form, "cpu=2", "name"),
            (form, "name=x&cpu=two", "cpu"),
            ("application/json", r#"{"name":"x","dockerfile":"FROM y"}"#, "dockerfile"),
            ("application/json", "", "name"),
            ("multipart/form-data; boundary=x", "--x", "files"),
        ] {
            let refusal = wanted(media, body.as_bytes()).unwrap_err().to_string();
            assert!(refusal.contains(named), "{refusal}");
        }
    }
}
