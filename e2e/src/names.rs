//! A name server of the tests' own: knows one name, `named.keiki.test` (RFC 1035 messages, by hand).

use anyhow::Result;
use std::net::SocketAddr;
use tokio::net::UdpSocket;

/// Where the one name points.
pub const ADDRESS: [u8; 4] = [198, 51, 100, 2];
const NAME: &[u8] = b"\x05named\x05keiki\x04test\x00";
const HEADER: usize = 12;
const TYPE_A: [u8; 2] = [0, 1];

/// Serves for as long as the tests run; returns its address.
pub async fn serve() -> Result<SocketAddr> {
    let socket = UdpSocket::bind("127.0.0.1:0").await?;
    let address = socket.local_addr()?;
    tokio::spawn(async move {
        let mut query = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut query).await {
            if let Some(answer) = query.get(..length).and_then(answer) {
                let _ = socket.send_to(&answer, from).await;
            }
        }
    });
    Ok(address)
}

fn answer(query: &[u8]) -> Option<Vec<u8>> {
    let name_end = HEADER + query.get(HEADER..)?.iter().position(|&byte| byte == 0)? + 1;
    let question = query.get(HEADER..name_end + 4)?;
    let known = question.get(..NAME.len()).is_some_and(|name| name.eq_ignore_ascii_case(NAME));
    let has_address = known && question.get(NAME.len()..NAME.len() + 2)? == TYPE_A;
    // QR and RD and RA set; NXDOMAIN for every other name.
    let flags = [0x81, if known { 0x80 } else { 0x83 }];
    let mut answer = Vec::from(query.get(..2)?);
    answer.extend(flags);
    answer.extend([0, 1, 0, u8::from(has_address), 0, 0, 0, 0]);
    answer.extend(question);
    if has_address {
        // A pointer to the question's name, class IN, a TTL of a minute.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        answer.extend(ADDRESS);
    }
    Some(answer)
}
