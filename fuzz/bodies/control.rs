//! Decodes arbitrary packets as a request and as a reply, unchanged and with a valid header. A
//! decoded message encodes to the same message again.

use keiki_control::packet::{decode_reply, decode_request, encode_reply, encode_request};

const HEADER: usize = 12;

pub fn run(data: &[u8]) {
    read(data);
    if let Some(body) = data.get(HEADER..) {
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        let version = keiki_control::VERSION.to_le_bytes();
        read(&[b"KMON", &version[..], &length.to_le_bytes(), body].concat());
    }
}

fn read(packet: &[u8]) {
    if let Ok((request, roles)) = decode_request(packet) {
        let again = encode_request(&request, &roles).expect("it came in one packet");
        assert_eq!(decode_request(&again).expect("it was read before"), (request, roles));
    }
    if let Ok(reply) = decode_reply(packet) {
        let again = encode_reply(&reply).expect("it came in one packet");
        assert_eq!(decode_reply(&again).expect("it was read before"), reply);
    }
}
