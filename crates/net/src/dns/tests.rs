//! The forwarder between a client and an upstream, all on loopback.

use super::*;
use anyhow::{Result, ensure};
use hickory_proto::{
    op::{self, Message, MessageType, OpCode, ResponseCode},
    rr::{Name, RData, Record, RecordType, rdata::TXT},
};
use std::net::{Ipv4Addr, SocketAddr};

/// A resolver: `short.` answers, `long.` does not fit UDP, `medium.` fits ours but not a plain
/// client's, `dead.` says nothing, `forged.` sends another question's answer first.
async fn resolver() -> Result<SocketAddr> {
    let udp = UdpSocket::bind("127.0.0.1:0").await?;
    let address = udp.local_addr()?;
    let tcp = TcpListener::bind(address).await?;
    tokio::spawn(async move {
        let mut buffer = [0; 2048];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            let Some((mut answer, name)) = resolve(&buffer[..length]) else { continue };
            match name.as_str() {
                "dead." => continue,
                "long." => {
                    answer.answers.clear();
                    answer.metadata.truncation = true;
                }
                "forged." => {
                    let mut forged = answer.clone();
                    forged.metadata.id ^= 1;
                    forged.answers[0].data = RData::A(Ipv4Addr::new(6, 6, 6, 6).into());
                    let _ = udp.send_to(&forged.to_vec().unwrap(), from).await;
                }
                _ => {}
            }
            let _ = udp.send_to(&answer.to_vec().unwrap(), from).await;
        }
    });
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut query = vec![0; usize::from(stream.read_u16().await.unwrap())];
            stream.read_exact(&mut query).await.unwrap();
            let answer = resolve(&query).unwrap().0.to_vec().unwrap();
            stream.write_u16(answer.len() as u16).await.unwrap();
            stream.write_all(&answer).await.unwrap();
        }
    });
    Ok(address)
}

fn resolve(query: &[u8]) -> Option<(Message, String)> {
    let mut answer = Message::from_vec(query).ok()?.into_response();
    let name = answer.queries.first()?.name().clone();
    let text = name.to_string();
    answer.add_answer(Record::from_rdata(name.clone(), 1, RData::A(Ipv4Addr::new(203, 0, 113, 9).into())));
    let lines = match text.as_str() {
        "long." => 20,
        "medium." => 5,
        _ => 0,
    };
    for line in 0..lines {
        let text = RData::TXT(TXT::new(vec![format!("{line:0150}")]));
        answer.add_answer(Record::from_rdata(name.clone(), 1, text));
    }
    Some((answer, text))
}

struct Client {
    server: Server,
    udp: UdpSocket,
    at: SocketAddr,
}

impl Client {
    async fn of(upstream: Vec<SocketAddr>) -> Result<Self> {
        let udp = std::net::UdpSocket::bind("127.0.0.1:0")?;
        let at = udp.local_addr()?;
        let sockets = Sockets { udp, tcp: std::net::TcpListener::bind(at)? };
        let server = Server::start(0, sockets, Arc::new(Upstream::new(Some(upstream))))?;
        let udp = UdpSocket::bind("127.0.0.1:0").await?;
        udp.connect(at).await?;
        Ok(Self { server, udp, at })
    }

    async fn udp(&self, name: &str) -> Result<Message> {
        self.udp.send(&question(name)?).await?;
        let mut buffer = [0; 4096];
        let length = timeout(Duration::from_secs(10), self.udp.recv(&mut buffer)).await??;
        Ok(Message::from_vec(&buffer[..length])?)
    }

    async fn tcp(&self, names: &[&str]) -> Result<Vec<Message>> {
        let mut stream = TcpStream::connect(self.at).await?;
        let mut answers = Vec::new();
        for name in names {
            let query = question(name)?;
            stream.write_u16(query.len() as u16).await?;
            stream.write_all(&query).await?;
            let mut answer = vec![0; usize::from(stream.read_u16().await?)];
            stream.read_exact(&mut answer).await?;
            answers.push(Message::from_vec(&answer)?);
        }
        Ok(answers)
    }
}

fn question(name: &str) -> Result<Vec<u8>> {
    let mut message = Message::new(4711, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(op::Query::query(Name::from_ascii(name)?, RecordType::A));
    Ok(message.to_vec()?)
}

fn good(answer: &Message, records: usize) {
    assert_eq!(answer.metadata.id, 4711);
    assert_eq!(answer.metadata.response_code, ResponseCode::NoError);
    assert_eq!(answer.answers.len(), records);
    assert_eq!(answer.answers[0].data, RData::A(Ipv4Addr::new(203, 0, 113, 9).into()));
}

#[tokio::test]
async fn answers_come_whole_or_marked_as_cut() -> Result<()> {
    let client = Client::of(vec![resolver().await?]).await?;
    good(&client.udp("short.").await?, 1);
    good(&client.udp("forged.").await?, 1);
    for name in ["medium.", "long."] {
        let cut = client.udp(name).await?;
        assert!(cut.metadata.truncation && cut.answers.is_empty(), "{name}");
    }
    let answers = client.tcp(&["short.", "medium.", "long."]).await?;
    good(&answers[0], 1);
    good(&answers[1], 6);
    good(&answers[2], 21);
    client.server.stop().await;
    // Its port is free again at once.
    UdpSocket::bind(client.at).await?;
    Ok(())
}

#[tokio::test]
async fn a_dead_resolver_is_passed_over_and_none_is_a_failure() -> Result<()> {
    // Nobody listens on the first: the kernel says so, and the second is asked.
    let nobody = UdpSocket::bind("127.0.0.1:0").await?.local_addr()?;
    let client = Client::of(vec![nobody, resolver().await?]).await?;
    good(&client.udp("short.").await?, 1);
    assert_eq!(client.udp("dead.").await?.metadata.response_code, ResponseCode::ServFail);
    let client = Client::of(Vec::new()).await?;
    assert_eq!(client.udp("short.").await?.metadata.response_code, ResponseCode::ServFail);
    Ok(())
}

#[tokio::test]
async fn a_flood_is_cut_to_the_rate_and_the_server_lives_on() -> Result<()> {
    let client = Client::of(vec![resolver().await?]).await?;
    let query = question("short.")?;
    let mut answered = 0;
    let mut buffer = [0; 4096];
    for _ in 0..1000 {
        client.udp.send(&query).await?;
        // One at a time, so that only the rate limits.
        answered +=
            usize::from(timeout(Duration::from_millis(3), client.udp.recv(&mut buffer)).await.is_ok());
    }
    ensure!((200..900).contains(&answered), "{answered} of 1000 answered");
    tokio::time::sleep(Duration::from_millis(100)).await;
    while client.udp.try_recv(&mut buffer).is_ok() {}
    good(&client.udp("short.").await?, 1);

    // Oversized, malformed and half-said things change nothing.
    client.udp.send(&[0; 1400]).await?;
    client.udp.send(&[0xff; 40]).await?;
    let mut streams = Vec::new();
    for _ in 0..20 {
        let mut stream = TcpStream::connect(client.at).await?;
        stream.write_all(&[0xff, 0xff, 1]).await?;
        streams.push(stream);
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    good(&client.udp("short.").await?, 1);
    Ok(())
}

#[test]
fn the_bucket_allows_a_burst_and_then_the_rate() {
    let mut bucket = bucket();
    let start = Instant::now();
    let taken = (0..1000).filter(|_| bucket.take(start)).count();
    assert_eq!(taken, BURST as usize);
    let later = start + Duration::from_secs(1);
    let taken = (0..1000).filter(|_| bucket.take(later)).count();
    assert_eq!(taken, RATE as usize);
}
