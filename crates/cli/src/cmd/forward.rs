//! `keiki forward`.

use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome, io_error},
    printer::Printer,
    signals::interrupted,
};
use bytes::Bytes;
use keiki_client::{Client, SandboxId, Tcp};
use serde::Serialize;
use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

/// Bytes per read from a local program.
const PIECE: usize = 32 << 10;
/// Wait after a failure to accept, e.g. for lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
    /// [[ADDRESS:]LOCAL:]REMOTE: forward local port LOCAL (0 picks one) to port REMOTE in the
    /// sandbox
    #[arg(value_name = "LOCAL:REMOTE", required = true, value_parser = parse_ports)]
    pub ports: Vec<Ports>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ports {
    local: SocketAddr,
    remote: u16,
}

fn parse_ports(text: &str) -> Result<Ports, String> {
    let wrong = || format!("{text:?} is not LOCAL:REMOTE: use 8080:80 or 0.0.0.0:8080:80");
    let port = |text: &str| text.parse::<u16>().map_err(|_| wrong());
    let (rest, remote) = text.rsplit_once(':').unwrap_or((text, text));
    let remote = port(remote)?;
    if remote == 0 {
        return Err("port 0 in a sandbox is not valid: name a listening port".into());
    }
    let (address, local) = match rest.rsplit_once(':') {
        None => (IpAddr::V4(Ipv4Addr::LOCALHOST), port(rest)?),
        Some((address, local)) => {
            let address = address.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(address);
            (address.parse().map_err(|_| wrong())?, port(local)?)
        }
    };
    Ok(Ports { local: SocketAddr::new(address, local), remote })
}

#[derive(Serialize)]
struct Forwarded {
    local: SocketAddr,
    remote: u16,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    // Report a wrong id now, not at the first connection.
    context.client.sandbox(id).await?;
    let mut listening = Vec::new();
    for Ports { local, remote } in args.ports {
        let listener =
            TcpListener::bind(local).await.map_err(io_error(format!("cannot listen on {local}")))?;
        let local = listener.local_addr().map_err(io_error(format!("cannot listen on {local}")))?;
        listening.push((listener, Forwarded { local, remote }));
    }
    let forwarded: Vec<&Forwarded> = listening.iter().map(|(_, forwarded)| forwarded).collect();
    context.out.show(&forwarded, || {
        let lines = forwarded.iter().map(|f| format!("{} -> {id}:{}", f.local, f.remote));
        lines.collect::<Vec<_>>().join("\n")
    })?;
    for (listener, Forwarded { remote, .. }) in listening {
        tokio::spawn(accept(listener, context.client.clone(), context.out, id, remote));
    }
    match interrupted().await {
        // The normal way to end.
        2 | 15 => Ok(ExitCode::Success as i32),
        signal => Err(Failure::Signal(signal)),
    }
}

async fn accept(listener: TcpListener, client: Client, out: Printer, id: SandboxId, remote: u16) {
    loop {
        match listener.accept().await {
            Ok((local, from)) => {
                let client = client.clone();
                tokio::spawn(async move {
                    if let Err(failure) = connection(&client, id, remote, local).await {
                        out.note(&format!("keiki: connection from {from}: {}", failure.sentence()));
                    }
                });
            }
            Err(error) => {
                out.note(&format!("keiki: cannot accept a connection: {error}"));
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

/// Carries one connection to its end.
async fn connection(
    client: &Client,
    id: SandboxId,
    remote: u16,
    mut local: TcpStream,
) -> Result<(), Failure> {
    // Interactive programs want every key to arrive at once.
    let _ = local.set_nodelay(true);
    let carried = carry(client, id, remote, &mut local).await;
    if carried.is_err() {
        // A broken connection must not look like an orderly end: reset it.
        let _ = rustix::net::sockopt::set_socket_linger(&local, Some(Duration::ZERO));
    }
    carried
}

async fn carry(client: &Client, id: SandboxId, remote: u16, local: &mut TcpStream) -> Result<(), Failure> {
    let Tcp { mut input, mut output } = client.tcp(id, remote).await?;
    let (mut from, mut to) = local.split();
    let inward = async {
        loop {
            let mut data = Vec::with_capacity(PIECE);
            if from.read_buf(&mut data).await.map_err(io_error("cannot read"))? == 0 {
                input.finish().await?;
                return Ok::<(), Failure>(());
            }
            input.send(Bytes::from(data)).await?;
        }
    };
    let outward = async {
        while let Some(bytes) = output.next().await? {
            to.write_all(&bytes).await.map_err(io_error("cannot write"))?;
        }
        to.shutdown().await.map_err(io_error("cannot write"))?;
        output.closed().await;
        Ok(())
    };
    tokio::try_join!(inward, outward).map(drop)
}

#[cfg(test)]
mod tests {
    use super::{Ports, parse_ports};

    #[test]
    fn ports_as_they_are_typed() {
        let ports = |local: &str, remote| Ok(Ports { local: local.parse().unwrap(), remote });
        assert_eq!(parse_ports("8080:80"), ports("127.0.0.1:8080", 80));
        assert_eq!(parse_ports("3000"), ports("127.0.0.1:3000", 3000));
        assert_eq!(parse_ports("0:80"), ports("127.0.0.1:0", 80));
        assert_eq!(parse_ports("0.0.0.0:8080:80"), ports("0.0.0.0:8080", 80));
        assert_eq!(parse_ports("[::1]:8080:80"), ports("[::1]:8080", 80));
        for bad in ["", "x", "1:2:3:4", "80:0", "0", "70000:1", "1:70000", "-1:2", "a:1:2"] {
            assert!(parse_ports(bad).is_err(), "{bad:?}");
        }
    }
}
