//! What lets sandboxes reach the internet: the slots' own checks.

use super::check::Check;

/// Range that is checked for collisions: the default of `keiki node`.
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
        // Sandboxes run without a network that reaches outside; whether that is wanted is for people to say.
        Some(remedy) => Check::warn(check.name, check.detail, remedy),
    }
}
