//! What opens a preview: the names of its cookies and parameters.

/// The pass in a link.
pub(crate) const PASS: &str = "keiki_pass";
/// The pass after its first use. Over TLS a browser accepts the second name from this host only, so that no other host of
/// the domain can replace it.
pub(super) const PASS_COOKIE: &str = "keiki_preview";
pub(super) const PASS_COOKIE_TLS: &str = "__Host-keiki_preview";
/// A key in a query, where the API takes one.
const ACCESS_TOKEN: &str = "access_token";

/// What opened a preview.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Credentials {
    /// A key, at the API.
    ByPath,
    /// A key in `Authorization`, at the preview's host.
    Key,
    /// Something else: `Authorization` is the guest's.
    Pass,
}

impl Credentials {
    /// The query parameter to hide from the guest.
    pub(super) fn hides(self) -> &'static str {
        if self == Self::ByPath { ACCESS_TOKEN } else { PASS }
    }
}

/// Does this cookie belong to the node?
pub(super) fn is_pass(pair: &str) -> bool {
    [PASS_COOKIE, PASS_COOKIE_TLS].contains(&cookie_name(pair))
}

/// A cookie's name in `name=value`.
pub(super) fn cookie_name(pair: &str) -> &str {
    pair.split_once('=').map_or(pair, |(name, _)| name).trim()
}
