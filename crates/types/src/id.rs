//! Typed ids. Sandboxes and snapshots have UUIDs; templates have names.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};
use uuid::Uuid;

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    #[error("not a {what} id: {text}")]
    NotUuid { what: &'static str, text: String },
    #[error("not a template name: {0} (use 1 to 64 of a-z, 0-9 and '-', starting with a letter or digit)")]
    NotName(String),
}

macro_rules! uuid_id {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        #[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
        #[cfg_attr(feature = "schema", schema(value_type = String, format = Uuid))]
        pub struct $name(Uuid);

        impl $name {
            /// A new id. Ids sort by creation time.
            #[must_use]
            #[allow(clippy::new_without_default)]
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                Uuid::parse_str(text)
                    .map(Self)
                    .map_err(|_| IdError::NotUuid { what: $what, text: text.chars().take(80).collect() })
            }
        }
    };
}

uuid_id!(
    /// A sandbox.
    SandboxId,
    "sandbox"
);
uuid_id!(
    /// A snapshot.
    SnapshotId,
    "snapshot"
);

/// A template's name: safe as a file name and in a URL.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "schema", schema(value_type = String))]
pub struct TemplateName(String);

impl TemplateName {
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for TemplateName {
    type Err = IdError;

    fn from_str(text: &str) -> Result<Self, IdError> {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let fits = (1..=64).contains(&text.len())
            && text.starts_with(plain)
            && text.chars().all(|c| plain(c) || c == '-')
            && !matches!(text, "build" | "builds");
        if fits { Ok(Self(text.into())) } else { Err(IdError::NotName(text.chars().take(80).collect())) }
    }
}

impl TryFrom<String> for TemplateName {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<TemplateName> for String {
    fn from(name: TemplateName) -> Self {
        name.0
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{SandboxId, TemplateName};

    #[test]
    fn ids_round_trip_and_differ() {
        let (a, b) = (SandboxId::new(), SandboxId::new());
        assert_ne!(a, b);
        assert_eq!(a.to_string().parse(), Ok(a));
        assert!("no".parse::<SandboxId>().is_err());
    }

    #[test]
    fn template_names_are_safe_in_paths_and_urls() {
        for good in ["base", "code-interpreter", "py3"] {
            assert!(good.parse::<TemplateName>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "A", "../x", "a/b", "a b", "build", "builds", "é", &"x".repeat(65)] {
            assert!(bad.parse::<TemplateName>().is_err(), "{bad}");
        }
    }
}
