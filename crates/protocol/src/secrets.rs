//! What a secret may be: the node refuses others with a sentence, the agent has the last word.

/// Secrets of one sandbox.
pub const MAX: usize = 64;
/// Bytes of one.
pub const MAX_BYTES: usize = 64 << 10;
/// Bytes of a name.
pub const MAX_NAME: usize = 64;

/// A plain name, as an environment variable or a file would have it.
#[must_use]
pub fn is_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
    (1..=MAX_NAME).contains(&name.len()) && !name.starts_with('.') && name.bytes().all(fits)
}
