//! The network card on a real tap, in a network namespace of the test. Needs root.

mod support;

use keiki_devices::{Device, StateError, net::Net};
use keiki_sys::{netns, tap};
use std::{
    fs::File,
    io,
    net::UdpSocket,
    process::Command,
    time::{Duration, Instant},
};
use support::{Driver, into, out};

const MAC: [u8; 6] = [6, 0x4b, 0x49, 0x4b, 0, 2];
const HOST_MAC: &str = "06:4b:49:4b:00:01";
const HOST: [u8; 4] = [10, 99, 0, 1];
const GUEST: [u8; 4] = [10, 99, 0, 2];
const RX: usize = 0;
const TX: usize = 1;
const HEADER: usize = 12;
const MRG_RXBUF: u64 = 1 << 15;

/// Removes the namespace, even if a test fails.
struct Namespace(String);

impl Drop for Namespace {
    fn drop(&mut self) {
        netns::remove(&self.0).unwrap();
    }
}

/// Runs `test` in a namespace with a tap that is up. Says so if there can be none.
fn with_tap(name: &str, test: impl FnOnce(File) + Send) {
    if !keiki_testing::is_root() {
        return;
    }
    if !std::path::Path::new("/dev/net/tun").exists() {
        keiki_testing::skip("tun", "there is no /dev/net/tun");
        return;
    }
    let namespace = Namespace(format!("keiki-devices-{name}-{}", std::process::id()));
    let result = netns::on_own_thread(|| {
        netns::create(&namespace.0)?;
        let tap = tap::open_offloading("tap0")?;
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        for line in [
            format!("link set tap0 address {HOST_MAC}"),
            "address add 10.99.0.1/24 dev tap0".into(),
            "link set tap0 up".into(),
            format!("neighbour add 10.99.0.2 lladdr {mac} nud permanent dev tap0"),
        ] {
            let done = Command::new("ip").args(line.split(' ')).status()?;
            assert!(done.success(), "ip {line}");
        }
        test(tap);
        Ok::<(), io::Error>(())
    });
    drop(namespace);
    result.unwrap();
}

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// A header and a frame. The checksum of its payload is left to the other side.
fn frame(protocol: u8, transport: &[u8], checksum_at: u16, gso: (u8, u16)) -> Vec<u8> {
    let mut ip = vec![0x45, 0];
    ip.extend((20 + transport.len() as u16).to_be_bytes());
    ip.extend([0, 0, 0x40, 0, 64, protocol, 0, 0]);
    ip.extend(GUEST);
    ip.extend(HOST);
    let check = !fold(sum(&ip));
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    let mut transport = transport.to_vec();
    let pseudo = fold(sum(&GUEST) + sum(&HOST) + u32::from(protocol) + transport.len() as u32);
    transport[usize::from(checksum_at)..usize::from(checksum_at) + 2].copy_from_slice(&pseudo.to_be_bytes());
    let mut bytes = vec![1, gso.0];
    let headers: u16 = if protocol == 17 { 42 } else { 54 };
    bytes.extend(headers.to_le_bytes());
    bytes.extend(gso.1.to_le_bytes());
    bytes.extend(34_u16.to_le_bytes());
    bytes.extend(checksum_at.to_le_bytes());
    bytes.extend([0, 0]);
    bytes.extend([6, 0x4b, 0x49, 0x4b, 0, 1]);
    bytes.extend(MAC);
    bytes.extend([8, 0]);
    bytes.extend(ip);
    bytes.extend(transport);
    bytes
}

fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = 4000_u16.to_be_bytes().to_vec();
    bytes.extend(port.to_be_bytes());
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}

/// A device in the namespace, with no frames of the kernel under way.
fn guest(tap: File, features: Option<u64>) -> Driver<Net> {
    let mut driver = Driver::new(Net::new(Some(tap.into()), MAC).unwrap());
    if let Some(features) = features {
        driver.negotiate(features);
    }
    driver
}

fn give(driver: &mut Driver<Net>, count: usize, len: u32) -> Vec<(u16, u64)> {
    let buffers = (0..count)
        .map(|_| {
            let at = driver.room(len as usize);
            (driver.add(RX, &[into(at, len)]), at)
        })
        .collect();
    driver.notify(RX as u32);
    buffers
}

/// Takes frames until one satisfies `wanted`. Returns its number of buffers, and its bytes with the
/// header.
fn receive(
    driver: &mut Driver<Net>,
    buffers: &[(u16, u64)],
    wanted: impl Fn(&[u8]) -> bool,
) -> (usize, Vec<u8>) {
    let (mut found, mut parts, mut left) = (None, Vec::new(), 0);
    driver.run_until(|driver| {
        while let Some((head, len)) = driver.used(RX) {
            let at = buffers.iter().find(|(each, _)| *each == head).unwrap().1;
            let bytes = driver.bytes(at, len as usize);
            if left == 0 {
                left = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
                parts.clear();
            }
            parts.push(bytes);
            left -= 1;
            let whole = parts.concat();
            if left == 0 && wanted(&whole) {
                found = Some((parts.len(), whole));
            }
        }
        found.is_some()
    });
    found.unwrap()
}

fn is_udp(frame: &[u8]) -> bool {
    frame.len() > HEADER + 23 && frame[HEADER + 12..HEADER + 14] == [8, 0] && frame[HEADER + 23] == 17
}

#[test]
fn datagrams_go_both_ways() {
    with_tap("datagrams", |tap| {
        let socket = UdpSocket::bind(("10.99.0.1", 5000)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut driver = guest(tap, None);
        assert_eq!(driver.get(support::CONFIG).to_le_bytes(), MAC[..4]);
        let sent = driver.data(&frame(17, &udp(5000, b"from the guest"), 6, (0, 0)));
        // The header in its own segment, as some drivers send it.
        driver.request(TX, &[out(sent.at, 12), out(sent.at + 12, sent.len - 12)]);
        let mut got = [0; 100];
        let (count, from) = socket.recv_from(&mut got).unwrap();
        assert_eq!((&got[..count], from.to_string().as_str()), (&b"from the guest"[..], "10.99.0.2:4000"));
        let payload = vec![0x5a; 1400];
        let buffers = give(&mut driver, 32, 4096);
        socket.send_to(&payload, "10.99.0.2:4000").unwrap();
        let (parts, bytes) = receive(&mut driver, &buffers, is_udp);
        assert_eq!(parts, 1);
        assert_eq!(bytes[0] & 1, 1, "its checksum is left to the guest, which said that it can");
        assert!(bytes.ends_with(&payload));
    });
}

#[test]
fn a_frame_spans_buffers_and_waits_for_room() {
    with_tap("spans", |tap| {
        let socket = UdpSocket::bind(("10.99.0.1", 5000)).unwrap();
        let mut driver = guest(tap, None);
        let payload: Vec<u8> = (0..1400_u16).map(|n| n as u8).collect();
        socket.send_to(&payload, "10.99.0.2:4000").unwrap();
        driver.notify(RX as u32);
        driver.run();
        assert!(!driver.is_ready(Duration::from_millis(2)), "with no room the event loop does not spin");
        // Too few buffers for it.
        let mut buffers = give(&mut driver, 2, 300);
        driver.run();
        buffers.extend(give(&mut driver, 60, 300));
        let (parts, bytes) = receive(&mut driver, &buffers, is_udp);
        assert_eq!(parts, (HEADER + 42 + 1400_usize).div_ceil(300));
        assert!(bytes.ends_with(&payload));
        // A driver that cannot merge buffers loses a frame that does not fit, and gets the next.
        let features = driver.offered() & !MRG_RXBUF;
        driver.negotiate(features);
        let buffers = give(&mut driver, 64, 300);
        driver.run();
        socket.send_to(&payload, "10.99.0.2:4000").unwrap();
        socket.send_to(b"short", "10.99.0.2:4000").unwrap();
        let (parts, bytes) = receive(&mut driver, &buffers, is_udp);
        assert_eq!(parts, 1);
        assert!(bytes.ends_with(b"short"));
    });
}

#[test]
fn segmentation_is_left_to_the_other_side() {
    with_tap("segments", |tap| {
        let mut driver = guest(tap, None);
        let buffers = give(&mut driver, 200, 2048);
        driver.run();
        // 60,000 bytes for a closed port: the kernel takes them as one segment and answers with a
        // reset.
        let mut tcp = 4000_u16.to_be_bytes().to_vec();
        tcp.extend(9_u16.to_be_bytes());
        tcp.extend([0, 0, 0, 1, 0, 0, 0, 1, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0]);
        tcp.extend(vec![7; 60_000]);
        let sent = driver.data(&frame(6, &tcp, 16, (1, 1448)));
        driver.request(TX, &[sent]);
        let is_tcp = |frame: &[u8]| frame.len() > HEADER + 47 && frame[HEADER + 23] == 6;
        let (_, bytes) = receive(&mut driver, &buffers, is_tcp);
        assert_eq!(bytes[HEADER + 47] & 4, 4, "a reset");
    });
}

#[test]
fn frames_that_make_no_sense_are_lost() {
    with_tap("nonsense", |tap| {
        let socket = UdpSocket::bind(("10.99.0.1", 5000)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut driver = guest(tap, None);
        let at = driver.room(200_000);
        for len in [0, 1, 11, 12, 13, 20, 65_600, 150_000] {
            driver.request(TX, &[out(at, len)]);
        }
        driver.request(TX, &[into(at, 100)]);
        let bad = driver.data(&frame(17, &udp(5000, b"x"), 0xfff0 % 8, (77, 0)));
        driver.request(TX, &[bad]);
        let good = driver.data(&frame(17, &udp(5000, b"after all"), 6, (0, 0)));
        driver.request(TX, &[good]);
        let mut got = [0; 100];
        let count = socket.recv(&mut got).unwrap();
        assert_eq!(&got[..count], b"after all");
        assert_eq!(driver.get(support::STATUS), support::RUNNING);
    });
}

#[test]
fn a_copy_stands_on_a_tap_of_its_own() {
    with_tap("copy", |tap| {
        let socket = UdpSocket::bind(("10.99.0.1", 5000)).unwrap();
        let mut driver = guest(tap, None);
        let buffers = give(&mut driver, 32, 2048);
        driver.run();
        let state = driver.frozen();
        // The copy uses the same slot once the original has left it.
        let other = driver.thawed(Net::new(None, [0; 6]).unwrap(), &state);
        assert!(matches!(other.err(), Some(StateError::Field { field: "mac", .. })));
        let no_cable = driver.thawed(Net::new(None, MAC).unwrap(), &state);
        let mut no_cable = no_cable.unwrap();
        assert_eq!(no_cable.get(support::CONFIG + 4) >> 16 & 1, 0, "the link is down");
        let lost = no_cable.data(&frame(17, &udp(5000, b"lost"), 6, (0, 0)));
        no_cable.request(TX, &[lost]);
        drop(no_cable);
        driver.mmio = Driver::bare(Net::new(None, MAC).unwrap(), support::memory()).mmio;
        // A child that another test is starting may hold a copy of the descriptor, until it is that
        // program.
        let end = Instant::now() + Duration::from_secs(10);
        let again = loop {
            match tap::open_offloading("tap0") {
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                tap => break tap.unwrap(),
            }
        };
        for line in ["address add 10.99.0.1/24 dev tap0", "link set tap0 up"] {
            // The device is gone with its descriptor.
            assert!(Command::new("ip").args(line.split(' ')).status().unwrap().success());
        }
        let mac = MAC.map(|byte| format!("{byte:02x}")).join(":");
        let neighbour = format!("neighbour replace 10.99.0.2 lladdr {mac} nud permanent dev tap0");
        assert!(Command::new("ip").args(neighbour.split(' ')).status().unwrap().success());
        let mut copy = driver.thawed(Net::new(Some(again.into()), MAC).unwrap(), &state).unwrap();
        let begun = Instant::now();
        socket.send_to(b"to the copy", "10.99.0.2:4000").unwrap();
        let (_, bytes) = receive(&mut copy, &buffers, is_udp);
        assert!(bytes.ends_with(b"to the copy"), "{:?}", begun.elapsed());
        assert_eq!(bytes[0] & 1, 1, "offloads are those that the guest agreed to");
        copy.mmio.pause(support::soon()).unwrap();
    });
}
