//! Bytes of a packet.
//!
//! ```text
//!   0     4        6         8         12
//!   KMON  version  reserved  length    body: postcard
//!         u16      0         u32       (numbers little-endian)
//! ```
//!
//! The header is the same in every version, so that each side can tell the other's version whatever follows.

use crate::{ControlError, Reply, Request, Result, descriptors::Role, error::malformed};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Version of the messages. Both sides must have the same.
pub const VERSION: u16 = 3;
/// The longest packet.
pub const MAX_PACKET: usize = 64 * 1024;
/// The most descriptors of a packet.
pub const MAX_DESCRIPTORS: usize = 96;

const MAGIC: [u8; 4] = *b"KMON";
const HEADER: usize = 12;

/// What a request's packet holds.
#[derive(Serialize, Deserialize)]
struct Envelope {
    request: Request,
    /// One for each descriptor, in their order.
    roles: Vec<Role>,
}

/// A request with the roles of its descriptors.
///
/// # Errors
/// If it is too long.
pub fn encode_request(request: &Request, roles: &[Role]) -> Result<Vec<u8>> {
    // Cloned: a request is small, and one schema for both directions cannot drift.
    encode(&Envelope { request: request.clone(), roles: roles.to_vec() })
}

/// The reverse. Any bytes may come.
///
/// # Errors
/// [`ControlError::Version`] and [`ControlError::Malformed`].
pub fn decode_request(packet: &[u8]) -> Result<(Request, Vec<Role>)> {
    let Envelope { request, roles } = decode(packet)?;
    if roles.len() > MAX_DESCRIPTORS {
        return malformed(format!("it names more than {MAX_DESCRIPTORS} descriptors"));
    }
    Ok((request, roles))
}

/// A reply.
///
/// # Errors
/// If it is too long.
pub fn encode_reply(reply: &Reply) -> Result<Vec<u8>> {
    encode(reply)
}

/// The reverse. Any bytes may come.
///
/// # Errors
/// [`ControlError::Version`] and [`ControlError::Malformed`].
pub fn decode_reply(packet: &[u8]) -> Result<Reply> {
    decode(packet)
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(|error| ControlError::Malformed(error.to_string()))?;
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    if body.len() > MAX_PACKET - HEADER {
        return malformed(format!("it has {length} bytes, more than {}", MAX_PACKET - HEADER));
    }
    let [version, reserved] = [VERSION, 0].map(u16::to_le_bytes);
    Ok([&MAGIC[..], &version, &reserved, &length.to_le_bytes(), &body].concat())
}

fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T> {
    let Some((header, body)) = packet.split_first_chunk::<HEADER>() else {
        return malformed(format!("it has {} bytes, fewer than its header", packet.len()));
    };
    let [m0, m1, m2, m3, v0, v1, r0, r1, l0, l1, l2, l3] = *header;
    if [m0, m1, m2, m3] != MAGIC {
        return malformed("it does not begin as one");
    }
    let theirs = u16::from_le_bytes([v0, v1]);
    if theirs != VERSION {
        return Err(ControlError::Version { theirs });
    }
    if [r0, r1] != [0, 0] {
        return malformed("its reserved bytes are not zero");
    }
    let length = u32::from_le_bytes([l0, l1, l2, l3]);
    if usize::try_from(length).ok() != Some(body.len()) {
        return malformed(format!("its header says {length} bytes, it has {}", body.len()));
    }
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => malformed(format!("{} bytes are left over", rest.len())),
        Err(error) => malformed(format!("it does not fit the schema ({error})")),
    }
}

#[cfg(test)]
mod tests;
