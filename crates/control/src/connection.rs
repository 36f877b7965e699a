//! The two ends of a control socket.

use crate::{
    ControlError, Descriptors, FailureKind, Reply, Request, Result, Role,
    descriptors::check,
    error::malformed,
    packet::{MAX_DESCRIPTORS, MAX_PACKET, decode_reply, decode_request, encode_reply, encode_request},
};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
        SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
        accept_with, bind, connect, recvmsg, sendmsg, socket_with, socketpair,
        sockopt::{Timeout, set_socket_passcred, set_socket_timeout},
    },
};
use std::{
    io::{IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::Duration,
};

/// How long one side waits for the other to take a packet.
const SEND: Duration = Duration::from_secs(10);
const BACKLOG: i32 = 8;

/// The node's end.
#[derive(Debug)]
pub struct Client(OwnedFd);

#[derive(Debug)]
pub struct Answer {
    /// The reply; never [`Reply::Failed`].
    pub reply: Reply,
    /// Process id of the sender, from the kernel. 0 if unknown.
    pub pid: u32,
}

/// The monitor's end.
#[derive(Debug)]
pub struct Server(OwnedFd);

/// Makes a listener at `path`, which the node passes to a monitor as [`Role::Listener`].
///
/// # Errors
/// The path may have at most 107 bytes.
pub fn listen(path: &Path) -> Result<OwnedFd> {
    let socket = new_socket()?;
    bind(&socket, &SocketAddrUnix::new(path).map_err(io)?).map_err(io)?;
    rustix::net::listen(&socket, BACKLOG).map_err(io)?;
    Ok(socket)
}

/// Accepts the next connection to a listener.
pub fn accept(listener: impl AsFd) -> Result<Server> {
    Server::new(accept_with(listener, SocketFlags::CLOEXEC).map_err(io)?)
}

impl Client {
    /// Connects to a listener made by [`listen`].
    pub fn connect(path: &Path) -> Result<Self> {
        let socket = new_socket()?;
        connect(&socket, &SocketAddrUnix::new(path).map_err(io)?).map_err(io)?;
        Self::new(socket)
    }

    /// Makes a connection. The second part is the end for the monitor.
    pub fn pair() -> Result<(Self, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(io)?;
        Ok((Self::new(ours)?, theirs))
    }

    fn new(socket: OwnedFd) -> Result<Self> {
        // The kernel identifies the sender of a reply. What a monitor claims about itself is not
        // trusted.
        set_socket_passcred(&socket, true).map_err(io)?;
        set_socket_timeout(&socket, Timeout::Send, Some(SEND)).map_err(io)?;
        Ok(Self(socket))
    }

    /// Sends a request and waits for its answer, `patience` at most. After an error other than
    /// [`ControlError::Failed`] the connection must not be used again: a late answer would be taken
    /// for that of a later request.
    ///
    /// # Errors
    /// [`ControlError::Failed`] if the monitor refused; otherwise the message did not get through.
    pub fn call(
        &mut self,
        request: &Request,
        descriptors: &[(Role, BorrowedFd<'_>)],
        patience: Duration,
    ) -> Result<Answer> {
        self.ask(request, descriptors)?;
        self.answer(patience)
    }

    /// Sends a request without waiting. Several thaws may be under way at once: each copy answers
    /// for itself, in any order, and [`crate::Thawed::generation`] tells the answers apart.
    pub fn ask(&mut self, request: &Request, descriptors: &[(Role, BorrowedFd<'_>)]) -> Result<()> {
        let roles: Vec<_> = descriptors.iter().map(|(role, _)| *role).collect();
        let files: Vec<_> = descriptors.iter().map(|(_, file)| *file).collect();
        check(request, &roles)?;
        send(&self.0, &encode_request(request, &roles)?, &files)
    }

    /// Waits for an answer.
    pub fn answer(&mut self, patience: Duration) -> Result<Answer> {
        // Zero would mean no limit.
        let patience = patience.max(Duration::from_millis(1));
        set_socket_timeout(&self.0, Timeout::Recv, Some(patience)).map_err(io)?;
        let packet = receive(&self.0)?;
        if !packet.files.is_empty() {
            return malformed("a reply carries descriptors");
        }
        match decode_reply(&packet.bytes)? {
            Reply::Failed { kind, sentence } => Err(ControlError::Failed { kind, sentence }),
            reply => Ok(Answer { reply, pid: packet.pid }),
        }
    }
}

impl Server {
    /// Uses a connected socket: one end of a pair, or an accepted connection.
    pub fn new(socket: OwnedFd) -> Result<Self> {
        set_socket_timeout(&socket, Timeout::Send, Some(SEND)).map_err(io)?;
        Ok(Self(socket))
    }

    /// Waits for the next request. None: the node has closed the connection.
    ///
    /// # Errors
    /// This answers a request that it cannot understand. The connection stays usable unless the
    /// error is [`ControlError::Io`].
    pub fn receive(&mut self) -> Result<Option<(Request, Descriptors)>> {
        let packet = match receive(&self.0) {
            Err(ControlError::Closed) => return Ok(None),
            other => other,
        };
        let understood = packet.and_then(|packet| {
            let (request, roles) = decode_request(&packet.bytes)?;
            let descriptors = Descriptors::new(&request, roles, packet.files)?;
            Ok(Some((request, descriptors)))
        });
        if let Err(error) = &understood
            && !matches!(error, ControlError::Io(_) | ControlError::TimedOut)
        {
            self.answer(&Reply::Failed { kind: FailureKind::Invalid, sentence: error.to_string() })?;
        }
        understood
    }

    /// Answers the last request.
    ///
    /// # Errors
    /// [`ControlError::Closed`] if the node no longer waits.
    pub fn answer(&mut self, reply: &Reply) -> Result<()> {
        send(&self.0, &encode_reply(reply)?, &[])
    }
}

impl AsFd for Server {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsFd for Client {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

struct Packet {
    bytes: Vec<u8>,
    files: Vec<OwnedFd>,
    pid: u32,
}

fn io(errno: Errno) -> ControlError {
    match errno {
        Errno::PIPE | Errno::CONNRESET => ControlError::Closed,
        Errno::AGAIN => ControlError::TimedOut,
        _ => ControlError::Io(errno.into()),
    }
}

fn new_socket() -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).map_err(io)
}

fn send(socket: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
        return malformed(format!("it has more than {MAX_DESCRIPTORS} descriptors"));
    }
    let sent = retry(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL))?;
    if sent == bytes.len() { Ok(()) } else { malformed("only part of it was sent") }
}

fn receive(socket: &OwnedFd) -> Result<Packet> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS), ScmCredentials(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = vec![0; MAX_PACKET];
    let received = retry(|| {
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    })?;
    bytes.truncate(received.bytes);
    let mut packet = Packet { bytes, files: Vec::new(), pid: 0 };
    for message in ancillary.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(files) => packet.files.extend(files),
            RecvAncillaryMessage::ScmCredentials(sender) => {
                packet.pid = sender.pid.as_raw_pid().unsigned_abs()
            }
            _ => return malformed("it carries something other than descriptors"),
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return malformed(format!("it has more than {MAX_PACKET} bytes"));
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return malformed(format!("it has more than {MAX_DESCRIPTORS} descriptors"));
    }
    // The end of the connection looks like an empty packet, which neither side ever sends.
    if packet.bytes.is_empty() && packet.files.is_empty() { Err(ControlError::Closed) } else { Ok(packet) }
}

fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other.map_err(io),
        }
    }
}
