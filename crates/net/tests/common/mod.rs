//! A host with an outside, and a guest small enough to write in a test.

use anyhow::{Context, Result, ensure};
use keiki_net::{EgressPolicy, NodeTag, Slot, Slots, SlotsConfig, purge};
use keiki_protocol::net::{GATEWAY_MAC, GUEST, GUEST_MAC, TAP};
use keiki_sys::{netns, tap};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{FlockOperation, OFlags, fcntl_setfl, flock},
};
use std::{
    fs::File,
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket},
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The server's public-looking address, in another namespace.
pub const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
/// The host's address on the link to it.
pub const HOST: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Private and link-local addresses that the same server has, and the host has routes to.
pub const PRIVATE: Ipv4Addr = Ipv4Addr::new(10, 77, 77, 77);
pub const LINK_LOCAL: Ipv4Addr = Ipv4Addr::new(169, 254, 77, 77);
/// UDP echo and TCP listener, on all of them and on the host.
pub const PORT: u16 = 7007;

/// How long to wait for what should come, and for what should not.
pub const SOON: Duration = Duration::from_secs(5);
pub const NEVER: Duration = Duration::from_millis(300);

const OUTSIDE: &str = "kt-outside";

/// The outside world, and everything else that a test makes; removed when dropped. One at a time on
/// a host.
pub struct World {
    pub tag: NodeTag,
    pub state: tempfile::TempDir,
    /// Datagrams that the server received.
    pub heard: Arc<AtomicU64>,
    /// What the server on the host itself received.
    pub on_host: UdpSocket,
    _host_tcp: TcpListener,
    _turn: File,
}

pub use keiki_testing::is_root as root;

pub fn run(command: &str) -> Result<String> {
    let output = Command::new("sh").args(["-c", command]).output()?;
    ensure!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

impl World {
    pub fn new(tag: &str) -> Result<Self> {
        let turn = File::create(std::env::temp_dir().join("keiki-net-tests.lock"))?;
        flock(&turn, FlockOperation::LockExclusive)?;
        remove_outside();
        netns::on_own_thread(|| netns::create(OUTSIDE))?;
        run(&format!(
            "set -e; ip link add {OUTSIDE} type veth peer name out0 netns {OUTSIDE}
             ip addr add {HOST}/30 dev {OUTSIDE}; ip link set {OUTSIDE} up
             sysctl -qw net.ipv4.conf.{OUTSIDE}.forwarding=1
             ip -n {OUTSIDE} link set lo up
             ip -n {OUTSIDE} addr add {SERVER}/30 dev out0; ip -n {OUTSIDE} link set out0 up
             ip -n {OUTSIDE} addr add {PRIVATE}/32 dev lo; ip -n {OUTSIDE} addr add {LINK_LOCAL}/32 dev lo
             ip -n {OUTSIDE} route add default via {HOST}
             ip route add {PRIVATE}/32 via {SERVER}; ip route add {LINK_LOCAL}/32 via {SERVER}"
        ))?;
        let heard = Arc::new(AtomicU64::new(0));
        for address in [SERVER, PRIVATE, LINK_LOCAL] {
            let (udp, tcp) = netns::inside(&netns::path(OUTSIDE), || {
                Ok((UdpSocket::bind((address, PORT))?, TcpListener::bind((address, PORT))?))
            })?;
            let heard = Arc::clone(&heard);
            std::thread::spawn(move || echo(&udp, &heard, tcp));
        }
        let on_host = UdpSocket::bind(("0.0.0.0", PORT))?;
        on_host.set_read_timeout(Some(NEVER))?;
        Ok(Self {
            tag: tag.parse()?,
            heard,
            state: tempfile::tempdir()?,
            on_host,
            _host_tcp: TcpListener::bind(("0.0.0.0", PORT))?,
            _turn: turn,
        })
    }

    pub fn config(&self, range: &str) -> Result<SlotsConfig> {
        Ok(SlotsConfig {
            range: range.parse()?,
            ahead: 2,
            state_dir: self.state.path().to_owned(),
            node_tag: self.tag.clone(),
            upstream: Some(vec![SocketAddr::from(([127, 0, 0, 1], 9))]),
            egress: EgressPolicy::default(),
        })
    }

    /// Everything of this test's node that is on the host now, one a line.
    pub fn traces(&self) -> Result<Vec<String>> {
        let tag = &self.tag;
        let seen = run(&format!(
            "ls /run/netns | grep '^keiki-{tag}-'; ip -o link | grep -o 'kk-{tag}-[0-9]*'
             nft list tables | grep 'keiki_{tag}$'; ip route | grep 'proto 107 metric {}$'; true",
            (tag.to_string().len() << 24) | usize::from_str_radix(&tag.to_string(), 16)?
        ))?;
        Ok(seen.lines().map(str::to_owned).collect())
    }
}

fn echo(udp: &UdpSocket, heard: &AtomicU64, _tcp: TcpListener) {
    let mut buffer = [0; 2048];
    while let Ok((length, from)) = udp.recv_from(&mut buffer) {
        if &buffer[..length] == b"end" {
            break;
        }
        heard.fetch_add(1, Ordering::SeqCst);
        // Says whom it heard, so that a test sees the address translation.
        let _ = udp.send_to(format!("{} {length}", from.ip()).as_bytes(), from);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Ok(socket) = UdpSocket::bind("0.0.0.0:0") {
            for address in [SERVER, PRIVATE, LINK_LOCAL] {
                let _ = socket.send_to(b"end", (address, PORT));
            }
        }
        remove_outside();
        let tag = self.tag.clone();
        let purged = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map(|runtime| runtime.block_on(purge(&tag)))
        });
        if !matches!(purged.join(), Ok(Ok(Ok(())))) {
            eprintln!("what the test made was not removed");
        }
    }
}

fn remove_outside() {
    let _ = run(&format!("ip link del {OUTSIDE}"));
    let _ = netns::remove(OUTSIDE);
}

pub async fn start(config: SlotsConfig) -> Result<Slots> {
    Slots::start(config, &[]).await.context("start")
}

/// Waits until `count` slots are ahead.
pub async fn ahead(slots: &Slots, count: usize) -> Result<()> {
    let start = Instant::now();
    while slots.ready() < count {
        ensure!(start.elapsed() < Duration::from_secs(20), "slots are not built ahead");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// What came back for a packet.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    Udp(Vec<u8>),
    /// SYN-ACK with this maximum segment size.
    Accepted(u16),
    Reset,
    /// ICMP: administratively prohibited.
    Prohibited,
    Nothing,
}

/// A guest's network stack, at the tap of its slot.
pub struct Guest {
    tap: File,
    next_port: u16,
}

pub struct Sender {
    pub mac: [u8; 6],
    pub address: Ipv4Addr,
}

pub fn mac(text: &str) -> [u8; 6] {
    let bytes: Vec<u8> = text.split(':').filter_map(|part| u8::from_str_radix(part, 16).ok()).collect();
    bytes.try_into().unwrap_or_default()
}

pub fn myself() -> Sender {
    Sender { mac: mac(GUEST_MAC), address: GUEST }
}

impl Guest {
    pub fn boot(slot: &Slot) -> Result<Self> {
        let tap = netns::inside(&slot.netns_path(), || tap::open(TAP))?;
        fcntl_setfl(&tap, OFlags::NONBLOCK)?;
        // The kernel starts a link's queue some time after its carrier; until then what is sent to
        // it is lost.
        let name = slot.netns_path();
        let name = name.file_name().and_then(|name| name.to_str()).context("no name")?;
        while !run(&format!("ip -n {name} -br link"))?
            .lines()
            .all(|line| line.starts_with("lo ") || line.contains(" UP "))
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(Self { tap, next_port: 40_000 })
    }

    /// Puts a frame on the wire as it is.
    pub fn raw(&mut self, to: &[u8], from: [u8; 6], kind: [u8; 2], payload: &[u8]) -> Result<()> {
        Ok(self.tap.write_all(&[to, &from, &kind, payload].concat())?)
    }

    /// Sends a datagram and waits for the answer to it.
    pub fn udp(&mut self, to: (Ipv4Addr, u16), data: &[u8], wait: Duration) -> Result<Reply> {
        self.udp_as(&myself(), to, data, wait)
    }

    pub fn udp_as(
        &mut self,
        from: &Sender,
        to: (Ipv4Addr, u16),
        data: &[u8],
        wait: Duration,
    ) -> Result<Reply> {
        let port = self.port();
        let mut segment = Vec::new();
        for field in [port, to.1, 8 + data.len() as u16, 0] {
            segment.extend(field.to_be_bytes());
        }
        segment.extend(data);
        self.exchange(from, to.0, 17, &segment, port, wait)
    }

    /// Sends a SYN and waits for what comes back.
    pub fn syn(&mut self, to: (Ipv4Addr, u16), wait: Duration) -> Result<Reply> {
        let port = self.port();
        let mut segment = Vec::new();
        segment.extend(port.to_be_bytes());
        segment.extend(to.1.to_be_bytes());
        segment.extend([0, 0, 0, 1, 0, 0, 0, 0, 6 << 4, 0x02, 0xff, 0xff, 0, 0, 0, 0, 2, 4]);
        segment.extend(1460u16.to_be_bytes());
        let mut pseudo = [GUEST.octets(), to.0.octets()].concat();
        pseudo.extend([0, 6, 0, segment.len() as u8]);
        let sum = checksum(&[&pseudo[..], &segment].concat());
        segment[16..18].copy_from_slice(&sum.to_be_bytes());
        self.exchange(&myself(), to.0, 6, &segment, port, wait)
    }

    fn port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }

    fn exchange(
        &mut self,
        from: &Sender,
        to: Ipv4Addr,
        protocol: u8,
        segment: &[u8],
        port: u16,
        wait: Duration,
    ) -> Result<Reply> {
        let mut packet = vec![0x45, 0];
        packet.extend((20 + segment.len() as u16).to_be_bytes());
        packet.extend([0, 1, 0x40, 0, 64, protocol, 0, 0]);
        packet.extend(from.address.octets());
        packet.extend(to.octets());
        let sum = checksum(&packet);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend(segment);
        self.tap.write_all(&[&mac(GATEWAY_MAC)[..], &from.mac, &[8, 0], &packet].concat())?;
        self.wait_for(port, Instant::now() + wait)
    }

    fn wait_for(&mut self, port: u16, until: Instant) -> Result<Reply> {
        let mut frame = [0; 2048];
        loop {
            match self.tap.read(&mut frame) {
                Ok(length) => {
                    if let Some(reply) = read(&frame[..length], port) {
                        return Ok(reply);
                    }
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(Reply::Nothing);
                    }
                    let left = Timespec::try_from(left)?;
                    poll(&mut [PollFd::new(&self.tap, PollFlags::IN)], Some(&left))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What a frame says about what was sent from `port`.
fn read(frame: &[u8], port: u16) -> Option<Reply> {
    let packet = frame.strip_prefix(&[&mac(GUEST_MAC)[..], &mac(GATEWAY_MAC), &[8, 0]].concat()[..])?;
    let (protocol, segment) = (*packet.get(9)?, packet.get(20..usize::from(short(packet, 2)?))?);
    match protocol {
        17 if short(segment, 2)? == port => Some(Reply::Udp(segment.get(8..)?.to_vec())),
        6 if short(segment, 2)? == port => match segment.get(13)? & 0x16 {
            0x12 => Some(Reply::Accepted(short(segment, 22)?)),
            _ => Some(Reply::Reset),
        },
        // Destination unreachable, with the header of what it is about behind it.
        1 if short(segment, 8 + 20)? == port => match segment.get(..2)? {
            [3, 13] => Some(Reply::Prohibited),
            _ => None,
        },
        _ => None,
    }
}

fn short(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// An IPv4 packet of the guest with these flags and offset, options and content.
pub fn packet(to: Ipv4Addr, protocol: u8, fragment: u16, options: &[u8], content: &[u8]) -> Vec<u8> {
    let words = 5 + options.len() as u8 / 4;
    let mut packet = vec![0x40 | words, 0];
    packet.extend((u16::from(words) * 4 + content.len() as u16).to_be_bytes());
    packet.extend([0, 77]);
    packet.extend(fragment.to_be_bytes());
    packet.extend([64, protocol, 0, 0]);
    packet.extend(GUEST.octets());
    packet.extend(to.octets());
    packet.extend(options);
    let sum = checksum(&packet);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    packet.extend(content);
    packet
}

fn checksum(bytes: &[u8]) -> u16 {
    let sum: u32 = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

/// Packets that `link` received, inside the namespace at `path`.
pub fn received(path: &Path, link: &str) -> Result<u64> {
    let table = netns::inside(path, || std::fs::read_to_string("/proc/thread-self/net/dev"))?;
    let line = table.lines().find_map(|line| line.trim().strip_prefix(link)?.strip_prefix(':'));
    Ok(line.context("no such link")?.split_whitespace().nth(1).context("no counter")?.parse()?)
}
