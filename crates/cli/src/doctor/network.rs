//! Network access of sandboxes.

use super::check::Check;

/// The default range of `keiki node`, checked for collisions.
const RANGE: &str = "10.200.0.0/16";

pub(super) fn checks() -> Vec<Check> {
    match RANGE.parse() {
        Ok(range) => keiki_node::network_checks(range).into_iter().map(shown).collect(),
        Err(_) => Vec::new(),
    }
}

fn shown(check: keiki_node::NetworkCheck) -> Check {
    match check.remedy {
        None => Check::ok(check.name, check.detail),
        // Sandboxes also run without network access, which may be intended.
        Some(remedy) => Check::warn(check.name, check.detail, remedy),
    }
}
