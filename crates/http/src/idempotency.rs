//! `Idempotency-Key`: a caller's name for a request that makes something, so that the request can be repeated.

use crate::{
    App,
    errors::{Answer, Failure},
    key,
};
use axum::{extract::FromRequestParts, http::request::Parts};
use keiki_api::{Error, Once, Secret};
use serde::Serialize;
use utoipa::IntoParams;

/// The header.
const KEY: &str = "Idempotency-Key";
/// Longest name.
const LONGEST: usize = 255;

/// The name of a request, if it has one.
#[derive(IntoParams)]
#[into_params(parameter_in = Header)]
pub(super) struct RequestKey {
    /// A name for this request: repeated requests with the same name are carried out once
    #[param(rename = "Idempotency-Key", value_type = String, required = false, min_length = 1, max_length = 255)]
    named: Option<Named>,
}

struct Named {
    secret: Secret,
    caller: String,
    name: String,
    path: String,
}

impl RequestKey {
    /// The request with these contents, to be carried out once.
    pub fn of(&self, contents: &impl Serialize) -> Option<Once> {
        let Named { secret, caller, name, path } = self.named.as_ref()?;
        Some(Once::new(secret, caller, name, path, contents))
    }
}

impl FromRequestParts<App> for RequestKey {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Answer<Self> {
        let Some(name) = parts.headers.get(KEY) else { return Ok(Self { named: None }) };
        let fit = (1..=LONGEST).contains(&name.len()) && name.as_bytes().iter().all(u8::is_ascii_graphic);
        let name = name.to_str().ok().filter(|_| fit);
        let name = name.ok_or_else(|| {
            Error::Invalid(format!("{KEY} must be 1 to {LONGEST} graphic ASCII characters"))
        })?;
        let caller = key::key(parts).unwrap_or_default();
        let secret = app.api.request_key();
        let named = Named { secret, caller, name: name.into(), path: parts.uri.path().into() };
        Ok(Self { named: Some(named) })
    }
}
