//! One check and how it went.

use serde::Serialize;

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// As it should be.
    Ok,
    /// Works, but less well, or could not be told.
    Warn,
    /// Must be mended.
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// How it went.
    pub ok: Verdict,
    /// What was found.
    pub detail: String,
    /// What to do about it; empty if nothing.
    pub remedy: String,
}

impl Check {
    /// All is well.
    pub fn ok(name: &str, detail: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Ok, detail: detail.into(), remedy: String::new() }
    }

    /// Look at it.
    pub fn warn(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Warn, detail: detail.into(), remedy: remedy.into() }
    }

    /// Mend it.
    pub fn fail(name: &str, detail: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name: name.into(), ok: Verdict::Fail, detail: detail.into(), remedy: remedy.into() }
    }
}

/// A small file of the kernel, trimmed.
pub fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}
