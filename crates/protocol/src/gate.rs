//! The release gate on the wire: the few calls that give a copy its own identity and resume its
//! user work.
//!
//! They come after the handshake and before HTTP/2 on the same connection, in the simplest form
//! possible. A copy runs all of its guest's code for the first time: on an emulated processor
//! HTTP/2 would cost more than the calls.
//!
//! ```text
//!   call:   kind u8 | length u32 | message      kind 1: secret key, 2: assume identity, 3: thaw user
//!   reply:  code u8 | length u32 | message      code 0: the reply; else a gRPC code and the reason as text
//! ```
//!
//! Integers are little-endian, messages are those of `proto/guest.proto`. One call at a time, any
//! number of them. No kind equals the first byte of a hello or of HTTP/2 (`P`), so either may
//! follow and the gate needs no end mark. A node that reconnects to a released machine makes no
//! call.

use crate::{
    guest::{Identity, IdentityAck, SecretKeyReply, SecretKeyRequest, ThawUserReply, ThawUserRequest},
    secrets,
};
use prost::{
    Message,
    bytes::{Buf, Bytes, BytesMut},
};
use tonic::{Code, Status};

/// Bytes before each message.
pub const HEAD: usize = 5;
/// The largest message of a call: all secrets of a sandbox and the rest of an identity.
pub const MAX_CALL: usize = secrets::MAX * secrets::MAX_BYTES + (1 << 20);
/// The largest message of a reply.
pub const MAX_REPLY: usize = 64 << 10;
/// The longest reason.
const MAX_REASON: usize = 4 << 10;

/// A message that is a call of the gate.
pub trait Ask: Message {
    /// Its kind on the wire.
    const KIND: u8;
    /// The message that answers it.
    type Reply: Message + Default;
}

impl Ask for SecretKeyRequest {
    const KIND: u8 = 1;
    type Reply = SecretKeyReply;
}

impl Ask for Identity {
    const KIND: u8 = 2;
    type Reply = IdentityAck;
}

impl Ask for ThawUserRequest {
    const KIND: u8 = 3;
    type Reply = ThawUserReply;
}

/// A call of the node.
#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    /// A key for the secrets of the next call.
    SecretKey(SecretKeyRequest),
    /// Assume this identity.
    AssumeIdentity(Box<Identity>),
    /// Resume user work.
    ThawUser(ThawUserRequest),
}

/// The bytes are not a call or reply. Bytes after them mean nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GateError {
    /// No call has this kind.
    #[error("unknown call of the release gate: {0}")]
    Kind(u8),
    /// No reply has this code.
    #[error("unknown reply code: {0}")]
    Code(u8),
    /// Longer than allowed.
    #[error("a message of {0} bytes; at most {1} are allowed")]
    Length(usize, usize),
    /// Not a message of its kind.
    #[error("a malformed message")]
    Message,
}

/// Encodes a call.
#[must_use]
pub fn call<A: Ask>(ask: &A) -> Bytes {
    frame(A::KIND, ask)
}

/// Takes the call at the start of `bytes`. None if it is incomplete.
///
/// # Errors
/// If the bytes are not one.
pub fn take_call(bytes: &mut BytesMut) -> Result<Option<Call>, GateError> {
    let known = [SecretKeyRequest::KIND, Identity::KIND, ThawUserRequest::KIND];
    let Some(kind) = bytes.first().copied() else { return Ok(None) };
    if !known.contains(&kind) {
        return Err(GateError::Kind(kind));
    }
    let Some(message) = take_message(bytes, MAX_CALL)? else { return Ok(None) };
    Ok(Some(match kind {
        SecretKeyRequest::KIND => Call::SecretKey(read(message)?),
        Identity::KIND => Call::AssumeIdentity(Box::new(read(message)?)),
        _ => Call::ThawUser(read(message)?),
    }))
}

/// Encodes a reply.
#[must_use]
pub fn reply<R: Message>(answer: &Result<R, Status>) -> Bytes {
    match answer {
        Ok(message) => frame(Code::Ok as u8, message),
        Err(status) => {
            // A refusal never has the code of success.
            let code = if status.code() == Code::Ok { Code::Unknown } else { status.code() };
            let mut end = status.message().len().min(MAX_REASON);
            while !status.message().is_char_boundary(end) {
                end -= 1;
            }
            let mut out = head(code as u8, end);
            out.extend_from_slice(&status.message().as_bytes()[..end]);
            out.freeze()
        }
    }
}

/// Takes the reply at the start of `bytes`. None if it is incomplete.
///
/// # Errors
/// If the bytes are not one.
pub fn take_reply<R: Message + Default>(
    bytes: &mut BytesMut,
) -> Result<Option<Result<R, Status>>, GateError> {
    let Some(byte) = bytes.first().copied() else { return Ok(None) };
    // Unknown codes become `Unknown`.
    let code = Code::from(i32::from(byte));
    if code as u8 != byte {
        return Err(GateError::Code(byte));
    }
    let Some(message) = take_message(bytes, MAX_REPLY)? else { return Ok(None) };
    Ok(Some(match code {
        Code::Ok => Ok(read(message)?),
        code => Err(Status::new(code, String::from_utf8_lossy(&message))),
    }))
}

fn head(kind: u8, length: usize) -> BytesMut {
    let mut out = BytesMut::with_capacity(HEAD + length);
    out.extend_from_slice(&[kind]);
    // A message that is too long is refused by the other side.
    out.extend_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    out
}

fn frame(kind: u8, message: &impl Message) -> Bytes {
    let mut out = head(kind, message.encoded_len());
    out.extend_from_slice(&message.encode_to_vec());
    out.freeze()
}

fn take_message(bytes: &mut BytesMut, limit: usize) -> Result<Option<Bytes>, GateError> {
    let Some(&[a, b, c, d]) = bytes.get(1..HEAD) else { return Ok(None) };
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > limit {
        return Err(GateError::Length(length, limit));
    }
    if bytes.len() < HEAD + length {
        return Ok(None);
    }
    bytes.advance(HEAD);
    Ok(Some(bytes.split_to(length).freeze()))
}

fn read<M: Message + Default>(message: Bytes) -> Result<M, GateError> {
    M::decode(message).map_err(|_| GateError::Message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{guest::StepTime, handshake::MARKER};
    use proptest::prelude::{any, prop};

    fn identity(generation: u64, hostname: String, entropy: Vec<u8>) -> Identity {
        Identity { generation, hostname, entropy: entropy.into(), ..Identity::default() }
    }

    #[test]
    fn no_call_is_taken_for_a_hello_or_http2() {
        for first in [MARKER[0], b'P', 0, 4] {
            let mut bytes = BytesMut::from(&[first, 0, 0, 0, 0][..]);
            assert_eq!(take_call(&mut bytes), Err(GateError::Kind(first)));
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_bytes_come() {
        for (length, limit) in [(u32::MAX, MAX_REPLY), (MAX_REPLY as u32 + 1, MAX_REPLY)] {
            let wire = [&[0][..], &length.to_le_bytes()].concat();
            let refused = take_reply::<ThawUserReply>(&mut BytesMut::from(&wire[..])).unwrap_err();
            assert_eq!(refused, GateError::Length(length as usize, limit));
        }
        let wire = [&[2][..], &(MAX_CALL as u32 + 1).to_le_bytes()].concat();
        let refused = take_call(&mut BytesMut::from(&wire[..])).unwrap_err();
        assert_eq!(refused, GateError::Length(MAX_CALL + 1, MAX_CALL));
        let wire = [&[2][..], &(MAX_CALL as u32).to_le_bytes()].concat();
        assert_eq!(take_call(&mut BytesMut::from(&wire[..])), Ok(None));
    }

    #[test]
    fn what_is_no_message_of_its_kind_is_refused() {
        // Field 1 as bytes that extend beyond the end.
        let mut bytes = BytesMut::from(&[1, 2, 0, 0, 0, 0x0a, 9][..]);
        assert_eq!(take_call(&mut bytes), Err(GateError::Message));
        let mut bytes = BytesMut::from(&[0, 2, 0, 0, 0, 0x0a, 9][..]);
        assert_eq!(take_reply::<SecretKeyReply>(&mut bytes).unwrap_err(), GateError::Message);
        let mut bytes = BytesMut::from(&[17, 0, 0, 0, 0][..]);
        assert_eq!(take_reply::<ThawUserReply>(&mut bytes).unwrap_err(), GateError::Code(17));
    }

    #[test]
    fn a_reason_is_cut_and_is_never_a_success() {
        let long = "é".repeat(MAX_REASON);
        let mut bytes = BytesMut::from(&reply::<ThawUserReply>(&Err(Status::internal(&long)))[..]);
        let status = take_reply::<ThawUserReply>(&mut bytes).unwrap().unwrap().unwrap_err();
        assert_eq!((status.code(), status.message().len()), (Code::Internal, MAX_REASON));
        let odd = reply::<ThawUserReply>(&Err(Status::new(Code::Ok, "no")));
        assert_eq!(
            take_reply::<ThawUserReply>(&mut BytesMut::from(&odd[..])).unwrap().unwrap().unwrap_err().code(),
            Code::Unknown
        );
    }

    proptest::proptest! {
        #[test]
        fn calls_come_out_as_they_went_in_wherever_reads_end(
            generation in any::<u64>(),
            hostname in "[a-z.-]{0,20}",
            entropy in prop::collection::vec(any::<u8>(), 0..300),
            size in 1usize..400,
        ) {
            let order = identity(generation, hostname, entropy.clone());
            let key = SecretKeyRequest { entropy: entropy.into() };
            let wire = [&call(&key)[..], &call(&order), &call(&ThawUserRequest {})].concat();
            let (mut bytes, mut calls) = (BytesMut::new(), vec![]);
            for chunk in wire.chunks(size) {
                bytes.extend_from_slice(chunk);
                while let Some(call) = take_call(&mut bytes).unwrap() {
                    calls.push(call);
                }
            }
            let expected =
                [Call::SecretKey(key), Call::AssumeIdentity(order.into()), Call::ThawUser(ThawUserRequest {})];
            assert_eq!(calls, expected);
            assert!(bytes.is_empty());
        }

        #[test]
        fn replies_come_out_as_they_went_in_and_leave_what_follows(
            generation in any::<u64>(),
            micros in any::<u64>(),
            why in "\\PC{0,200}",
            code in 1i32..17,
            behind in prop::collection::vec(any::<u8>(), 0..20),
            cut in any::<prop::sample::Index>(),
        ) {
            let ack = IdentityAck { generation, steps: vec![StepTime { step: "x".into(), micros }] };
            for answer in [Ok(ack), Err(Status::new(Code::from(code), &why))] {
                let wire = reply(&answer);
                let mut part = BytesMut::from(&wire[..cut.index(wire.len())]);
                assert!(take_reply::<IdentityAck>(&mut part).unwrap().is_none());
                let mut bytes = BytesMut::from(&[&wire[..], &behind].concat()[..]);
                match (take_reply::<IdentityAck>(&mut bytes).unwrap().unwrap(), answer) {
                    (Ok(got), Ok(sent)) => assert_eq!(got, sent),
                    (Err(got), Err(sent)) => {
                        assert_eq!((got.code(), got.message()), (sent.code(), sent.message()));
                    }
                    (got, sent) => panic!("{got:?} for {sent:?}"),
                }
                assert_eq!(bytes, behind);
            }
        }

        #[test]
        fn rubbish_is_refused_or_waited_for_and_no_more(noise in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = BytesMut::from(&noise[..]);
            while let Ok(Some(_)) = take_call(&mut bytes) {}
            let mut bytes = BytesMut::from(&noise[..]);
            while let Ok(Some(_)) = take_reply::<IdentityAck>(&mut bytes) {}
        }
    }
}
