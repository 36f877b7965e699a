//! The agent port, between a real Unix socket and real rings.

mod support;

use keiki_devices::{Device, StateError, console::Console};
use std::{
    io::{ErrorKind, Read, Write},
    os::{
        fd::OwnedFd,
        unix::net::{UnixListener, UnixStream},
    },
    path::PathBuf,
    time::Duration,
};
use support::{Driver, into};

const NAME: &str = "test.port.0";
const RX: usize = 0;
const TX: usize = 1;
const CONTROL_RX: usize = 2;
const CONTROL_TX: usize = 3;

struct Guest {
    driver: Driver<Console>,
    path: PathBuf,
    _dir: tempfile::TempDir,
    control: Vec<(u16, u64)>,
}

fn listen() -> (tempfile::TempDir, PathBuf, OwnedFd) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&path).unwrap();
    (dir, path, listener.into())
}

impl Guest {
    /// A guest whose driver found the port, and whose agent opened it.
    fn new() -> Self {
        let (dir, path, listener) = listen();
        let mut guest = Self {
            driver: Driver::new(Console::new(listener, NAME).unwrap()),
            path,
            _dir: dir,
            control: Vec::new(),
        };
        guest.give_control(8);
        guest.tell(0, 1);
        assert_eq!(guest.heard(), [(1, 1, String::new())]);
        guest.tell(3, 1);
        let heard = guest.heard();
        assert_eq!(heard[0], (7, 1, NAME.into()));
        guest.tell(6, 1);
        guest
    }

    fn give_control(&mut self, count: usize) {
        for _ in 0..count {
            let at = self.driver.room(128);
            let head = self.driver.add(CONTROL_RX, &[into(at, 128)]);
            self.control.push((head, at));
        }
        self.driver.notify(CONTROL_RX as u32);
        self.driver.run();
    }

    /// A control message of the guest.
    fn tell(&mut self, event: u16, value: u16) {
        let message = [&0_u32.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat();
        let piece = self.driver.data(&message);
        self.driver.request(CONTROL_TX, &[piece]);
        self.driver.run();
    }

    /// Control messages to the guest: event, value, name.
    fn heard(&mut self) -> Vec<(u16, u16, String)> {
        let mut heard = Vec::new();
        while let Some((head, len)) = self.driver.used(CONTROL_RX) {
            let at = self.control.iter().find(|(each, _)| *each == head).unwrap().1;
            let bytes = self.driver.bytes(at, len as usize);
            let number = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
            heard.push((number(4), number(6), String::from_utf8(bytes[8..].to_vec()).unwrap()));
        }
        let again = heard.len();
        self.give_control(again);
        heard
    }

    fn connect(&mut self) -> UnixStream {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.driver.run();
        stream
    }

    fn give_room(&mut self, len: u32) -> u64 {
        let at = self.driver.room(len as usize);
        self.driver.add(RX, &[into(at, len)]);
        self.driver.notify(RX as u32);
        self.driver.run();
        at
    }

    fn send(&mut self, bytes: &[u8]) {
        let piece = self.driver.data(bytes);
        self.driver.add(TX, &[piece]);
        self.driver.notify(TX as u32);
        self.driver.run();
    }
}

fn events(heard: &[(u16, u16, String)]) -> Vec<(u16, u16)> {
    heard.iter().map(|(event, value, _)| (*event, *value)).collect()
}

#[test]
fn bytes_go_both_ways_over_a_connection() {
    let mut guest = Guest::new();
    guest.send(b"to no one");
    assert!(guest.driver.used(TX).is_some(), "and is gone");
    let at = guest.give_room(64);
    let mut host = guest.connect();
    assert_eq!(events(&guest.heard()), [(6, 1)]);
    host.write_all(b"hello").unwrap();
    guest.driver.run();
    assert_eq!(guest.driver.used(RX).unwrap().1, 5);
    assert_eq!(guest.driver.bytes(at, 5), b"hello");
    guest.send(b"and back");
    let mut got = [0; 64];
    assert_eq!(host.read(&mut got).unwrap(), 8);
    assert_eq!(&got[..8], b"and back");
    drop(host);
    guest.give_room(64);
    guest.driver.run();
    assert_eq!(events(&guest.heard()), [(6, 0)], "it hears of the end");
    // The next connection is accepted, and the one after it waits.
    let mut next = guest.connect();
    assert_eq!(events(&guest.heard()), [(6, 1)]);
    let mut third = guest.connect();
    third.write_all(b"me too").unwrap();
    next.write_all(b"x").unwrap();
    guest.driver.run();
    assert_eq!(guest.driver.used(RX).unwrap().1, 1);
    assert!(guest.heard().is_empty());
    drop(next);
    guest.driver.run();
    let at = guest.give_room(64);
    let mut heard = events(&guest.heard());
    guest.driver.run();
    heard.extend(events(&guest.heard()));
    assert_eq!(heard, [(6, 0), (6, 1)], "closed before it is opened");
    guest.driver.run();
    assert_eq!(guest.driver.bytes(at, 6), b"me too");
}

#[test]
fn nothing_is_sent_before_the_guest_listens() {
    let mut guest = Guest::new();
    guest.tell(6, 0);
    let at = guest.give_room(16);
    let mut host = guest.connect();
    host.write_all(b"early").unwrap();
    guest.driver.run();
    assert!(guest.driver.used(RX).is_none());
    assert!(!guest.driver.is_ready(Duration::from_millis(1)), "and the event loop does not spin");
    guest.tell(6, 1);
    assert_eq!(guest.driver.used(RX).unwrap().1, 5);
    assert_eq!(guest.driver.bytes(at, 5), b"early");
}

#[test]
fn a_slow_side_slows_the_other_and_nothing_is_lost() {
    let mut guest = Guest::new();
    let mut host = guest.connect();
    // The host does not read: chains stay in the ring.
    let chunk: Vec<u8> = (0..60_000_u32).map(|n| (n % 251) as u8).collect();
    let (mut sent, mut done) = (0_usize, 0_usize);
    while sent < 20 {
        guest.send(&chunk);
        sent += 1;
        while guest.driver.used(TX).is_some() {
            done += 1;
        }
    }
    assert!(done < 10, "{done} chunks of 60 kB disappeared into a socket");
    assert!(!guest.driver.is_ready(Duration::from_millis(1)), "and the event loop does not spin");
    let mut got: Vec<u8> = Vec::new();
    let mut buffer = [0; 7777];
    while got.len() < sent * chunk.len() {
        match host.read(&mut buffer) {
            Ok(count) => got.extend(&buffer[..count]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => guest.driver.run(),
            Err(error) => panic!("{error}"),
        }
    }
    guest.driver.run();
    while guest.driver.used(TX).is_some() {
        done += 1;
    }
    assert_eq!(done, sent);
    assert!(got.chunks(chunk.len()).all(|each| each == chunk));
    // The guest does not read: bytes stay in the socket.
    let mut expected: Vec<u8> = Vec::new();
    let error = loop {
        match host.write(&chunk) {
            Ok(count) => expected.extend(&chunk[..count]),
            Err(error) => break error,
        }
        guest.driver.run();
    };
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    assert!(expected.len() < 1 << 20);
    assert!(!guest.driver.is_ready(Duration::from_millis(1)));
    let mut arrived = Vec::new();
    while arrived.len() < expected.len() {
        let at = guest.give_room(30_000);
        let (_, len) = guest.driver.used(RX).unwrap();
        arrived.extend(guest.driver.bytes(at, len as usize));
    }
    assert!(arrived == expected);
}

#[test]
fn a_host_that_goes_while_the_guest_is_stuck_is_noticed() {
    let mut guest = Guest::new();
    let mut host = guest.connect();
    guest.heard();
    host.write_all(b"no room for this").unwrap();
    guest.driver.run();
    drop(host);
    guest.driver.run();
    assert_eq!(events(&guest.heard()), [(6, 0)]);
    let host = guest.connect();
    for _ in 0..20 {
        guest.send(&[1; 60_000]);
    }
    drop(host);
    guest.driver.run();
    let mut done = 0;
    while guest.driver.used(TX).is_some() {
        done += 1;
    }
    assert_eq!(done, 20, "unread output is dropped");
}

#[test]
fn a_copy_has_a_closed_port_that_opens_for_its_own_host() {
    let mut guest = Guest::new();
    let mut host = guest.connect();
    guest.heard();
    for _ in 0..20 {
        guest.send(&[7; 60_000]);
    }
    let state = guest.driver.frozen();
    let (_dir, path, listener) = listen();
    let mut copy = Guest {
        driver: guest.driver.thawed(Console::new(listener, NAME).unwrap(), &state).unwrap(),
        path,
        _dir,
        control: guest.control.clone(),
    };
    copy.driver.run();
    assert_eq!(events(&copy.heard()), [(6, 0)]);
    let mut sent = 0;
    while copy.driver.used(TX).is_some() {
        sent += 1;
    }
    assert!(sent > 0, "the rest of the old connection is gone");
    let mut other = copy.connect();
    assert_eq!(events(&copy.heard()), [(6, 1)]);
    copy.send(b"mine");
    let mut got = [0; 16];
    assert_eq!(other.read(&mut got).unwrap(), 4);
    assert_eq!(&got[..4], b"mine");
    // A program that had the port open in the guest may not have noticed that it was closed.
    other.write_all(b"yours").unwrap();
    let at = copy.give_room(16);
    assert_eq!(copy.driver.used(RX).map(|used| used.1), Some(5));
    assert_eq!(copy.driver.bytes(at, 5), b"yours");
    assert!(host.read(&mut got).unwrap() > 0, "the original's connection is the original's");
}

#[test]
fn a_guest_that_asks_and_never_listens_makes_nothing_grow() {
    let mut guest = Guest::new();
    for _ in 0..2000 {
        guest.tell(0, 1);
        guest.tell(3, 1);
        guest.tell(6, 1);
        guest.tell(9, 77);
        drop(guest.connect());
    }
    assert!(guest.heard().len() <= 8, "as many as it gave buffers for");
    // Buffers that are too small for a message come back empty.
    let at = guest.driver.room(4);
    guest.tell(0, 1);
    guest.driver.add(CONTROL_RX, &[into(at, 4)]);
    guest.driver.notify(CONTROL_RX as u32);
    guest.driver.run();
    assert_eq!(guest.driver.get(support::STATUS), support::RUNNING);
}

#[test]
fn a_state_of_another_port_is_refused() {
    let mut guest = Guest::new();
    let state = guest.driver.frozen();
    let other = Console::new(listen().2, "another").unwrap();
    match guest.driver.thawed(other, &state).err() {
        Some(StateError::Field { field: "name", .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(Console::new(listen().2, "").is_err());
    assert!(Console::new(listen().2, &"x".repeat(65)).is_err());
    guest.driver.mmio.pause(support::soon()).unwrap();
}
