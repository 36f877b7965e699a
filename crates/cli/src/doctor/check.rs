//! One check and its result.

use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Ok,
    /// Works, but worse than it could, or is unknown.
    Warn,
    /// Must be fixed.
    Fail,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: String,
    pub ok: Verdict,
    /// What was found.
    pub detail: String,
    /// What to do about it; empty if nothing.
    pub remedy: String,
}

impl Check {
    pub fn ok(name: &str, detail: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Ok, detail: detail.into(), remedy: String::new() }
    }

    pub fn warn(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Warn, detail: detail.into(), remedy: remedy.into() }
    }

    pub fn fail(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Fail, detail: detail.into(), remedy: remedy.into() }
    }
}

/// Reads a small kernel file, trimmed.
pub fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
