//! Failures that routes have in common, for the OpenAPI document.

use std::collections::BTreeMap;
use utoipa::{
    IntoResponses,
    openapi::{Content, HeaderBuilder, ObjectBuilder, Ref, RefOr, Response, ResponseBuilder, Type},
};

/// Failures that routes share, named so that each route lists its own.
macro_rules! failures {
    ($($(#[$doc:meta])* $name:ident { $($status:literal: $text:literal),* })*) => {
        $($(#[$doc])* pub(super) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                [$(failure($status, $text)),*].into()
            }
        })*
    };
}

failures! {
    /// Any route with a key.
    Any { 401: "Missing or wrong API key", 403: "A page of another origin, at a node without keys", 500: "The node failed" }
    /// A route that reads a query.
    Asked { 400: "A parameter is wrong; the sentence names it" }
    /// A route that reads a body.
    Told { 400: "A field is wrong; the sentence names it", 408: "The body stopped arriving", 413: "The body is too large" }
    /// A route that names something.
    Named { 404: "There is no such thing" }
    /// A route that wants a state.
    Stateful { 409: "The state does not allow it" }
    /// A route whose requests may have a name.
    Keyed { 400: "A field, or the Idempotency-Key, is wrong; the sentence names it", 422: "The Idempotency-Key was used for another request" }
    /// A route that moves a machine from state to state.
    Mover { 409: "The state does not allow it", 504: "The machine took too long" }
    /// A route that may be told to come back.
    Later { 503: "Nothing was done; try again after `Retry-After` seconds" }
    /// A route that reaches into a guest, waking it where it sleeps.
    Guest {
        409: "The sandbox is not running and does not wake by itself",
        503: "Try again after `Retry-After` seconds",
        504: "The guest, or the command, took too long",
        507: "Not enough memory or disk to wake it"
    }
    /// A route that makes machines. Nothing was made when it answers so.
    Maker {
        503: "Nothing was made; try again after `Retry-After` seconds",
        504: "The guest did not become ready in time; nothing was made",
        507: "Not enough memory or disk for the whole request; nothing was made"
    }
}

fn failure(status: u16, text: &str) -> (String, RefOr<Response>) {
    let body = Content::new(Some(RefOr::Ref(Ref::from_schema_name("ErrorBody"))));
    let mut response = ResponseBuilder::new().description(text).content("application/json", body);
    if status == 503 {
        let seconds = ObjectBuilder::new().schema_type(Type::Integer).build();
        let header = HeaderBuilder::new().schema(seconds).description(Some("Whole seconds, at least 1"));
        response = response.header("Retry-After", header.build());
    }
    (status.to_string(), RefOr::T(response.build()))
}
