//! `Idempotency-Key`: a caller's name for a request that makes something, so that the request can be repeated.

use crate::{
    App,
    errors::{Answer, Failure},
    key,
};
use axum::{extract::FromRequestParts, http::request::Parts};
use keiki_api::{Error, Once, Secret};
use serde::Serialize;
use utoipa::{
    IntoParams,
    openapi::{
        ObjectBuilder, Required, Type,
        path::{Parameter, ParameterBuilder, ParameterIn},
    },
};

/// The header.
const KEY: &str = "Idempotency-Key";
/// Longest name.
const LONGEST: usize = 255;

/// The name of a request, if it has one.
pub(super) struct RequestKey(Option<Named>);

struct Named {
    secret: Secret,
    caller: String,
    name: String,
    path: String,
}

impl RequestKey {
    /// The request with these contents, to be carried out once.
    pub fn of(&self, contents: &impl Serialize) -> Option<Once> {
        self.0
            .as_ref()
            .map(|named| Once::new(&named.secret, &named.caller, &named.name, &named.path, contents))
    }
}

impl IntoParams for RequestKey {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let text =
            ObjectBuilder::new().schema_type(Type::String).min_length(Some(1)).max_length(Some(LONGEST));
        let key = ParameterBuilder::new()
            .name(KEY)
            .parameter_in(ParameterIn::Header)
            .required(Required::False)
            .description(Some(
                "A name for this request: repeated requests of the same name are carried out once",
            ))
            .schema(Some(text.build()));
        vec![key.build()]
    }
}

impl FromRequestParts<App> for RequestKey {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Answer<Self> {
        let Some(name) = parts.headers.get(KEY) else { return Ok(Self(None)) };
        let fit = (1..=LONGEST).contains(&name.len()) && name.as_bytes().iter().all(u8::is_ascii_graphic);
        let name = name.to_str().ok().filter(|_| fit);
        let name = name.ok_or_else(|| {
            Error::Invalid(format!("{KEY} must be 1 to {LONGEST} graphic ASCII characters"))
        })?;
        let caller = key::key(parts).unwrap_or_default();
        let secret = app.api.request_key();
        Ok(Self(Some(Named { secret, caller, name: name.into(), path: parts.uri.path().into() })))
    }
}
