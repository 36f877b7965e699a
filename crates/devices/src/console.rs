//! virtio-console with one named port: the channel between the node and the guest agent.
//!
//! ```text
//!   node ── connects ──> listener (a Unix socket, already listening)
//!                           │ one connection at a time; the next waits in the backlog
//!                           ▼
//!   receive queue <── bytes ── connection ── bytes <── transmit queue
//!   control queues: port added, port name, host opened, host closed
//! ```
//!
//! Bytes wait where they are: if the guest has no room they stay in the socket, and if the socket
//! has no room they stay in the ring of the guest. So nothing is unbounded, and a slow side slows
//! the other. Without a connection the output of the guest is dropped, as on a serial port without
//! a cable.
//!
//! **After a thaw** the connection of the frozen machine does not exist. The device tells the guest
//! that the port is closed, and that it is open again when the node connects. Unsent output of the
//! guest is dropped, because it belonged to the old connection. The agent finds the start of the
//! new connection itself.
//!
//! Messages to the guest are a set, not a queue: each kind waits at most once, so a guest that asks
//! and never reads cannot make it grow.

use crate::{
    Memory, State, StateError,
    virtio::{Chain, Fault, Interest, Rings, Served, VirtioDevice},
    watch::Watcher,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::Errno,
    net::{RecvFlags, SendFlags, SocketFlags, accept_with, recv, send},
};
use serde::{Deserialize, Serialize};
use std::{io, os::fd::OwnedFd};
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;

/// Feature: several ports and a control queue.
const F_MULTIPORT: u64 = 1 << 1;

const QUEUE_SIZE: u16 = 128;
const RX: usize = 0;
const TX: usize = 1;
const CONTROL_RX: usize = 2;
const CONTROL_TX: usize = 3;

/// Events of `struct virtio_console_control`.
const DEVICE_READY: u16 = 0;
const PORT_ADD: u16 = 1;
const PORT_READY: u16 = 3;
const PORT_OPEN: u16 = 6;
const PORT_NAME: u16 = 7;
/// Our only port.
const PORT: u32 = 0;
const CONTROL: usize = 8;

const LISTENER: u64 = 0;
const CONNECTION: u64 = 1;
/// Bytes per system call.
const CHUNK: usize = 32 * 1024;
const MAX_NAME: usize = 64;

const KIND: &str = "console";
const VERSION: u16 = 1;

/// Messages that wait for room in the control queue, in sending order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Messages {
    add: bool,
    name: bool,
    close: bool,
    open: bool,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    interest: Interest,
}

#[derive(Debug)]
pub struct Console {
    listener: OwnedFd,
    name: String,
    connection: Option<Connection>,
    watcher: Option<Watcher>,
    messages: Messages,
    /// The driver knows the port and receives its state.
    port_ready: bool,
    /// A program in the guest has the port open. Linux discards earlier bytes.
    guest_open: bool,
    /// The state last reported to the guest.
    host_open: bool,
    /// The guest has no buffers for bytes from the host.
    starved: bool,
    /// The socket has no room.
    blocked: bool,
    /// Bytes already sent of the next chain of the guest.
    sent: u64,
    buffer: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ConsoleState {
    name: String,
    messages: Messages,
    port_ready: bool,
    guest_open: bool,
    host_open: bool,
}

impl Console {
    /// Makes a port of this name on a listening Unix socket.
    pub fn new(listener: OwnedFd, name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() > MAX_NAME {
            let text = format!("a port needs a name of 1 to {MAX_NAME} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        fcntl_setfl(&listener, fcntl_getfl(&listener)? | OFlags::NONBLOCK)?;
        Ok(Self {
            listener,
            name: name.into(),
            connection: None,
            watcher: None,
            messages: Messages::default(),
            port_ready: false,
            guest_open: false,
            host_open: false,
            starved: false,
            blocked: false,
            sent: 0,
            buffer: vec![0; CHUNK],
        })
    }

    fn accept(&mut self) -> io::Result<()> {
        let Some(watcher) = &self.watcher else { return Ok(()) };
        let socket = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => socket,
            // The client is gone already.
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let interest = Interest { read: true, write: false };
        watcher.add(&socket, CONNECTION, interest)?;
        watcher.remove(&self.listener)?;
        self.connection = Some(Connection { socket, interest });
        (self.starved, self.blocked) = (false, false);
        self.announce_state();
        Ok(())
    }

    fn disconnect(&mut self) -> io::Result<()> {
        let Some(connection) = self.connection.take() else { return Ok(()) };
        if let Some(watcher) = &self.watcher {
            watcher.remove(&connection.socket)?;
            watcher.add(&self.listener, LISTENER, Interest { read: true, write: false })?;
        }
        // The rest of a half-sent chain belonged to this connection.
        (self.blocked, self.starved) = (false, false);
        self.announce_state();
        Ok(())
    }

    /// Tells the guest whether the host is connected: each change once, a close before the next
    /// open.
    fn announce_state(&mut self) {
        if self.port_ready {
            self.messages.close |= self.host_open;
            self.messages.open = self.connection.is_some();
            self.host_open = false;
        }
    }

    fn set_interest(&mut self) -> io::Result<()> {
        let interest = Interest { read: self.may_receive() && !self.starved, write: self.blocked };
        if let (Some(connection), Some(watcher)) = (&mut self.connection, &self.watcher)
            && connection.interest != interest
        {
            // A hang-up is reported even without interest.
            watcher.set(&connection.socket, CONNECTION, interest)?;
            connection.interest = interest;
        }
        Ok(())
    }

    /// Whether the guest has been notified of the connection and has a reader.
    fn may_receive(&self) -> bool {
        self.guest_open && self.messages == Messages::default()
    }

    /// From the host to the guest.
    fn receive(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        if !self.may_receive() {
            return Ok(self.set_interest()?);
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        let (buffer, mut ended, mut starved) = (&mut self.buffer, false, true);
        rings.serve(RX, |memory, chain| {
            let room = usize::try_from(chain.writable_len()).unwrap_or(CHUNK).min(CHUNK);
            if room == 0 {
                return Served::Done(0);
            }
            let Some(into) = buffer.get_mut(..room) else { return Served::Done(0) };
            match recv(&connection.socket, into, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => (ended, starved) = (true, false),
                Ok((_, count)) => {
                    let bytes = buffer.get(..count).unwrap_or_default();
                    return Served::Done(chain.write(memory, 0, bytes) as u32);
                }
                Err(Errno::AGAIN | Errno::INTR) => starved = false,
                Err(_) => (ended, starved) = (true, false),
            }
            Served::Later
        })?;
        self.starved = starved;
        if ended {
            self.disconnect()?;
            self.control(rings)?;
            // Drops output that waited for room in the socket.
            self.transmit(rings)?;
        }
        Ok(self.set_interest()?)
    }

    /// From the guest to the host.
    fn transmit(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let Self { connection, buffer, sent, .. } = self;
        let (mut blocked, mut broken) = (false, false);
        rings.serve(TX, |memory, chain| {
            let Some(connection) = connection.as_ref().filter(|_| !broken) else {
                *sent = 0;
                return Served::Done(0);
            };
            match send_chain(connection, buffer, memory, chain, sent) {
                Ok(true) => {
                    *sent = 0;
                    Served::Done(0)
                }
                Ok(false) => {
                    blocked = true;
                    Served::Later
                }
                Err(_) => {
                    (*sent, broken) = (0, true);
                    Served::Done(0)
                }
            }
        })?;
        self.blocked = blocked;
        if broken {
            self.disconnect()?;
            self.control(rings)?;
        }
        Ok(self.set_interest()?)
    }

    /// Sends as many messages to the guest as there is room for.
    fn control(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let Self { messages, name, host_open, .. } = self;
        rings.serve(CONTROL_RX, |memory, chain| {
            let (event, value, tail) = match *messages {
                Messages { add: true, .. } => (PORT_ADD, 1, ""),
                Messages { name: true, .. } => (PORT_NAME, 1, name.as_str()),
                Messages { close: true, .. } => (PORT_OPEN, 0, ""),
                Messages { open: true, .. } => (PORT_OPEN, 1, ""),
                _ => return Served::Later,
            };
            let mut message = Vec::with_capacity(CONTROL + tail.len());
            message.extend(PORT.to_le_bytes());
            message.extend(event.to_le_bytes());
            message.extend(u16::to_le_bytes(value));
            message.extend(tail.as_bytes());
            if chain.writable_len() < message.len() as u64 {
                // Too small for a message. No driver of this device does that.
                return Served::Done(0);
            }
            match event {
                PORT_ADD => messages.add = false,
                PORT_NAME => messages.name = false,
                _ if messages.close => (messages.close, *host_open) = (false, false),
                _ => (messages.open, *host_open) = (false, true),
            }
            Served::Done(chain.write(memory, 0, &message) as u32)
        })?;
        // Bytes that waited until the guest knew of the connection may go now.
        if self.connection.is_some() { self.receive(rings) } else { Ok(()) }
    }

    /// Receives messages of the guest.
    fn handle_control(&mut self, rings: &mut Rings) -> Result<(), Fault> {
        let mut messages = self.messages;
        let (mut driver_ready, mut port_ready, mut guest_open) = (false, false, self.guest_open);
        rings.serve(CONTROL_TX, |memory, chain| {
            let mut message = [0; CONTROL];
            if chain.read(memory, 0, &mut message) == CONTROL {
                let [p0, p1, p2, p3, e0, e1, v0, v1] = message;
                let port = u32::from_le_bytes([p0, p1, p2, p3]);
                match (u16::from_le_bytes([e0, e1]), u16::from_le_bytes([v0, v1])) {
                    (DEVICE_READY, 1) => driver_ready = true,
                    (PORT_READY, 1) if port == PORT => port_ready = true,
                    (PORT_OPEN, open) if port == PORT => guest_open = open != 0,
                    _ => {}
                }
            }
            Served::Done(0)
        })?;
        messages.add |= driver_ready;
        messages.name |= port_ready;
        self.messages = messages;
        self.guest_open = guest_open;
        if port_ready {
            self.port_ready = true;
            self.announce_state();
        }
        self.control(rings)
    }
}

/// Sends the rest of a chain. False if the socket has no room for all of it.
fn send_chain(
    connection: &Connection,
    buffer: &mut [u8],
    memory: &Memory,
    chain: &Chain,
    sent: &mut u64,
) -> rustix::io::Result<bool> {
    loop {
        let count = chain.read(memory, *sent, buffer);
        let bytes = buffer.get(..count).unwrap_or_default();
        if bytes.is_empty() {
            return Ok(true);
        }
        match send(&connection.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => *sent += count as u64,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}

/// Whether the other side has closed the socket.
fn hung_up(socket: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(socket, PollFlags::empty())];
    // An error is not a hang-up: a read will report it.
    let _ = poll(&mut polled, Some(&Timespec::default()));
    polled.iter().any(|polled| polled.revents().intersects(PollFlags::HUP | PollFlags::ERR))
}

impl VirtioDevice for Console {
    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn kind(&self) -> &'static str {
        KIND
    }

    fn features(&self) -> u64 {
        F_MULTIPORT
    }

    fn queues(&self) -> &[u16] {
        &[QUEUE_SIZE; 4]
    }

    /// `struct virtio_console_config`: no screen size, and the number of ports.
    fn config(&self) -> Vec<u8> {
        let mut config = vec![0; 4];
        config.extend(1_u32.to_le_bytes());
        config.extend([0; 4]);
        config
    }

    fn activate(&mut self, _features: u64) {}

    fn reset(&mut self) {
        self.messages = Messages::default();
        (self.port_ready, self.guest_open, self.host_open) = (false, false, false);
        (self.starved, self.blocked, self.sent) = (false, false, 0);
    }

    fn start(&mut self, watcher: &Watcher, _rings: &mut Rings) -> io::Result<()> {
        watcher.add(&self.listener, LISTENER, Interest { read: true, write: false })?;
        self.watcher = Some(watcher.clone());
        Ok(())
    }

    fn process_queue(&mut self, queue: usize, rings: &mut Rings) -> Result<(), Fault> {
        match queue {
            RX => self.receive(rings),
            TX => self.transmit(rings),
            CONTROL_RX => self.control(rings),
            _ => self.handle_control(rings),
        }
    }

    fn on_ready(&mut self, token: u64, rings: &mut Rings) -> Result<(), Fault> {
        if token == LISTENER {
            self.accept()?;
            return self.control(rings);
        }
        let Some(connection) = &self.connection else { return Ok(()) };
        if !connection.interest.read && hung_up(&connection.socket) {
            self.disconnect()?;
            self.control(rings)?;
            return self.transmit(rings);
        }
        if self.blocked {
            self.transmit(rings)?;
        }
        self.receive(rings)
    }

    fn save(&self) -> Result<State, StateError> {
        let state = ConsoleState {
            name: self.name.clone(),
            messages: self.messages,
            port_ready: self.port_ready,
            guest_open: self.guest_open,
            host_open: self.host_open,
        };
        State::pack(KIND, VERSION, &state)
    }

    fn restore(&mut self, state: &State, _features: u64) -> Result<(), StateError> {
        let state: ConsoleState = state.unpack(KIND, VERSION)?;
        if state.name != self.name {
            return Err(StateError::Field { kind: KIND, field: "name", why: "is not the name of this port" });
        }
        (self.messages, self.port_ready) = (state.messages, state.port_ready);
        // A program that has the port open may not notice that it was closed for a moment, so it
        // does not open it again.
        (self.guest_open, self.host_open) = (state.guest_open, state.host_open);
        // The copy has no connection yet.
        self.announce_state();
        Ok(())
    }
}
