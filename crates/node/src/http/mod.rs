//! `/v1` over HTTP.
