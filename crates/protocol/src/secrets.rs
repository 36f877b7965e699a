//! Limits of secrets. The node reports violations to callers; the agent checks again.

/// Most secrets of one sandbox.
pub const MAX: usize = 64;
/// Most bytes of one secret.
pub const MAX_BYTES: usize = 64 << 10;
/// Most bytes of a name.
pub const MAX_NAME: usize = 64;

/// Whether this is a valid name, as for an environment variable or a file.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(fits)
}
