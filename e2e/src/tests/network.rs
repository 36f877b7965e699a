//! Network: every copy has one, and none can reach what is blocked.

use crate::{World, patience, sandbox::Sandbox, within};
use anyhow::{Context, Result, ensure};
use std::{process::Stdio, sync::Arc};
use tokio::{
    net::{TcpListener, TcpStream},
    process::{Child, Command},
};

/// A host for the tests, at a public-looking address (TEST-NET-2, RFC 5737), with a web server.
struct Elsewhere {
    server: Child,
}

const NETNS: &str = "keiki-e2e-web";
const SERVER: &str = "198.51.100.2";

async fn ip(args: &str) -> Result<()> {
    let done = Command::new("ip").args(args.split(' ')).stdin(Stdio::null()).output().await?;
    ensure!(done.status.success(), "ip {args}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(())
}

impl Elsewhere {
    async fn open() -> Result<Self> {
        let _ = ip(&format!("netns del {NETNS}")).await;
        let _ = ip("link del kke2e0").await;
        for step in [
            format!("netns add {NETNS}"),
            "link add kke2e0 type veth peer name kke2e1".into(),
            format!("link set kke2e1 netns {NETNS}"),
            "addr add 198.51.100.1/30 dev kke2e0".into(),
            "link set kke2e0 up".into(),
            format!("-n {NETNS} addr add {SERVER}/30 dev kke2e1"),
            format!("-n {NETNS} link set kke2e1 up"),
            format!("-n {NETNS} link set lo up"),
            format!("-n {NETNS} addr add 10.99.99.99/32 dev lo"),
            format!("-n {NETNS} addr add 169.254.169.254/32 dev lo"),
            format!("-n {NETNS} route add default via 198.51.100.1"),
            "route add 10.99.99.99/32 via 198.51.100.2 dev kke2e0".into(),
            "route add 169.254.169.254/32 via 198.51.100.2 dev kke2e0".into(),
        ] {
            ip(&step).await?;
        }
        // Responses arrive there and are forwarded to the slots.
        std::fs::write("/proc/sys/net/ipv4/conf/kke2e0/forwarding", "1")?;
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            NETNS,
            "python3",
            "-m",
            "http.server",
            "80",
            "--directory",
            "/proc/self",
        ]);
        let server = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .context("no server")?;
        Ok(Self { server })
    }

    async fn close(mut self) {
        let _ = self.server.kill().await;
        let _ = ip("link del kke2e0").await;
        let _ = ip(&format!("netns del {NETNS}")).await;
    }
}

/// A guest's attempt to open a TCP connection, as the guest reports it.
async fn dial(sandbox: &Sandbox, host: &str, port: u16) -> Result<bool> {
    let line = format!(
        "python3 -c 'import socket; socket.create_connection((\"{host}\", {port}), 2).close()' 2>/dev/null && echo yes || echo no"
    );
    Ok(sandbox.sh(&line).await? == "yes")
}

async fn until_served(sandbox: &Sandbox) -> Result<()> {
    for _ in 0..20 * patience() {
        if dial(sandbox, SERVER, 80).await? {
            return Ok(());
        }
    }
    anyhow::bail!("the public address cannot be reached")
}

pub async fn two_restores_at_once_have_network_and_names(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let elsewhere = Elsewhere::open().await?;
    let checked = async {
        let first = Sandbox::create(client).await?;
        let snapshot = first.snapshot().await?;
        let copies =
            [Sandbox::restore(client, &snapshot).await?, Sandbox::restore(client, &snapshot).await?, first];
        let mut outside = Vec::new();
        for copy in &copies {
            until_served(copy).await?;
            let asked = copy
                .sh("python3 -c 'import socket; print(socket.gethostbyname(\"named.keiki.test\"))'")
                .await?;
            ensure!(asked == SERVER, "the name server said {asked}");
            outside.push(copy.view().await?.guest_ip);
        }
        outside.sort();
        outside.dedup();
        ensure!(outside.len() == copies.len(), "two copies share an outside address");
        // At the same time, from both.
        let line = format!(
            "for i in 1 2 3 4 5; do python3 -c 'import urllib.request as u; u.urlopen(\"http://{SERVER}/status\").read()' || exit 1; done"
        );
        futures::try_join!(copies[0].sh(&line), copies[1].sh(&line))?;
        Ok(())
    };
    let done = checked.await;
    elsewhere.close().await;
    done
}

pub async fn egress_defaults(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let elsewhere = Elsewhere::open().await?;
    let checked = async {
        let sandbox = Sandbox::create(client).await?;
        let other = Sandbox::create(client).await?;
        until_served(&sandbox).await?;
        other.background("python3 -m http.server 8080").await?;
        other.sh("for i in $(seq 50); do python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8080))' 2>/dev/null && exit 0; sleep 0.2; done; exit 1").await?;
        // A server on every address of the host; the host itself can reach everything that is
        // blocked for guests.
        let listener = TcpListener::bind("0.0.0.0:0").await?;
        let port = listener.local_addr()?.port();
        for (host, port) in [("10.99.99.99", 80), ("169.254.169.254", 80), ("198.51.100.1", port)] {
            let dialled = tokio::time::timeout(within(5), TcpStream::connect((host, port))).await;
            dialled.with_context(|| format!("the host cannot reach {host}:{port}"))??;
        }
        let neighbour = other.view().await?.guest_ip;
        for (what, host, port) in [
            ("a private network", "10.99.99.99", 80),
            ("cloud metadata", "169.254.169.254", 80),
            ("the host, by its own address there", "198.51.100.1", port),
            ("another sandbox", neighbour.as_str(), 8080),
            ("the slot's gateway, beside names", "172.31.255.1", port),
        ] {
            ensure!(!dial(&sandbox, host, port).await?, "{what} ({host}:{port}) can be reached");
        }
        Ok(())
    };
    let done = checked.await;
    elsewhere.close().await;
    done
}
