//! Failures that routes have in common, for the OpenAPI document.

use std::collections::BTreeMap;
use utoipa::{
    IntoResponses,
    openapi::{Content, HeaderBuilder, ObjectBuilder, Ref, RefOr, Response, ResponseBuilder, Type},
};

/// Groups of failures; each route lists its own.
macro_rules! failures {
    ($($(#[$doc:meta])* $name:ident { $($status:literal: $text:literal),* })*) => {
        $($(#[$doc])* pub(crate) struct $name;

        impl IntoResponses for $name {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                [$(failure($status, $text)),*].into()
            }
        })*
    };
}

failures! {
    /// Of any route with a key.
    AuthErrors { 401: "Missing or wrong API key", 403: "A web page of another origin called a node without keys", 500: "The node failed" }
    /// Of a route that reads a query.
    QueryErrors { 400: "A parameter is invalid; the message names it" }
    /// Of a route that reads a body.
    BodyErrors { 400: "A field is invalid; the message names it", 408: "The body stopped arriving", 413: "The body is too large" }
    /// Of a route that names something.
    NotFound { 404: "Not found" }
    /// Of a route that requires a state.
    Conflict { 409: "The current state does not allow this" }
    /// Of a route that takes an `Idempotency-Key`.
    IdempotencyErrors { 400: "A field or the Idempotency-Key is invalid; the message names it", 422: "The Idempotency-Key was used for another request" }
    /// Of a route that changes the state of a machine.
    TransitionErrors { 409: "The current state does not allow this", 504: "The machine took too long" }
    /// Of a route that may be busy.
    RetryLater { 503: "Nothing was done; try again after `Retry-After` seconds" }
    /// Of a route that reaches into a guest and wakes it.
    GuestErrors {
        409: "The sandbox is not running and cannot be woken",
        503: "Try again after `Retry-After` seconds",
        504: "The guest or the command took too long",
        507: "Not enough memory or disk to wake it"
    }
    /// Of a route that makes machines. Nothing was created.
    CapacityErrors {
        503: "Nothing was created; try again after `Retry-After` seconds",
        504: "The guest did not become ready in time; nothing was created",
        507: "Not enough memory or disk for the whole request; nothing was created"
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
