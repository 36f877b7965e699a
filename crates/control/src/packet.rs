//! Bytes of a packet.
//!
//! ```text
//!   0     4        8         12
//!   KMON  version  length    body: postcard
//!         u32      u32       (numbers little-endian)
//! ```
//!
//! The header is the same in every version, so each side can tell the version of the other from any
//! packet.

use crate::{ControlError, Reply, Request, Result, Role, VERSION, error::malformed};
use keiki_sys::frame::{Frame, FrameError, Length};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The longest packet.
pub const MAX_PACKET: usize = 64 * 1024;
/// The most descriptors of a packet.
pub const MAX_DESCRIPTORS: usize = 96;

const FRAME: Frame = Frame { magic: b"KMON", version: VERSION, length: Length::U32, checksum: None };

#[derive(Serialize, Deserialize)]
struct Envelope {
    request: Request,
    /// One for each descriptor, in their order.
    roles: Vec<Role>,
}

/// A request with the roles of its descriptors.
pub fn encode_request(request: &Request, roles: &[Role]) -> Result<Vec<u8>> {
    // Cloned: a request is small, and one schema for both directions cannot drift.
    encode(&Envelope { request: request.clone(), roles: roles.to_vec() })
}

/// The reverse of [`encode_request`]. Accepts any bytes.
pub fn decode_request(packet: &[u8]) -> Result<(Request, Vec<Role>)> {
    let Envelope { request, roles } = decode(packet)?;
    if roles.len() > MAX_DESCRIPTORS {
        return malformed(format!("it names more than {MAX_DESCRIPTORS} descriptors"));
    }
    Ok((request, roles))
}

pub fn encode_reply(reply: &Reply) -> Result<Vec<u8>> {
    encode(reply)
}

/// The reverse of [`encode_reply`]. Accepts any bytes.
pub fn decode_reply(packet: &[u8]) -> Result<Reply> {
    decode(packet)
}

fn encode(message: &impl Serialize) -> Result<Vec<u8>> {
    let body = postcard::to_stdvec(message).map_err(|error| ControlError::Malformed(error.to_string()))?;
    let packet = FRAME.encode(&body);
    if packet.len() > MAX_PACKET {
        return malformed(format!("it has {} bytes, more than {MAX_PACKET}", packet.len()));
    }
    Ok(packet)
}

fn decode<T: DeserializeOwned>(packet: &[u8]) -> Result<T> {
    let body = FRAME.decode(packet).map_err(|error| match error {
        FrameError::Version { theirs, .. } => ControlError::Version { theirs },
        error => ControlError::Malformed(format!("it {error}")),
    })?;
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        Ok((_, rest)) => malformed(format!("{} bytes are left over", rest.len())),
        Err(error) => malformed(format!("it does not fit the schema ({error})")),
    }
}

#[cfg(test)]
mod tests;
