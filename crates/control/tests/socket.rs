//! Both ends of a control socket, and messages that do not belong on it.

use keiki_control::{
    Client, ControlError, Hello, Reply, Request, Role, Server, Stage, accept, listen, packet,
};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};
use std::{
    fs::File,
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    thread,
    time::Duration,
};

const PATIENCE: Duration = Duration::from_secs(5);
type Tested = Result<(), Box<dyn std::error::Error>>;

fn hello() -> Reply {
    Reply::Hello(Hello { stage: Stage::Blank, paused: false, generation: 3, layers: 0 })
}

/// Sends raw bytes and descriptors, as no client does.
fn send_raw(socket: &OwnedFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(files)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL)
}

fn raw_pair() -> std::io::Result<(OwnedFd, Server)> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    Ok((ours, Server::new(theirs).map_err(std::io::Error::other)?))
}

/// A descriptor to send, which tells whether every copy of it has been closed.
struct Traced(std::io::PipeReader, std::io::PipeWriter);

impl Traced {
    fn new() -> std::io::Result<Self> {
        let (reader, writer) = std::io::pipe()?;
        rustix::io::ioctl_fionbio(&reader, true)?;
        Ok(Self(reader, writer))
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.1.as_fd()
    }

    fn closed_everywhere(self) -> bool {
        let Self(mut reader, writer) = self;
        drop(writer);
        // It would block while a writer is left.
        reader.read(&mut [0]).is_ok_and(|count| count == 0)
    }
}

#[test]
fn a_request_brings_its_descriptors_and_the_reply_its_sender() -> Tested {
    let (mut client, theirs) = Client::pair()?;
    let mut server = Server::new(theirs)?;
    let monitor = thread::spawn(move || -> Result<(), ControlError> {
        let (request, mut files) = server.receive()?.ok_or(ControlError::Closed)?;
        assert_eq!(request, Request::Freeze);
        let mut top = File::from(files.take(Role::Top)?);
        assert!(
            rustix::io::fcntl_getfd(&top)
                .map_err(std::io::Error::from)?
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        top.write_all(b"seen")?;
        assert!(files.take(Role::Top).is_err(), "it is there once");
        server.answer(&hello())?;
        assert!(server.receive()?.is_none(), "the node hangs up");
        Ok(())
    });
    let (mut reader, writer) = std::io::pipe()?;
    let (control, _other) = std::io::pipe()?;
    let files = [(Role::Top, writer.as_fd()), (Role::Control, control.as_fd())];
    let answer = client.call(&Request::Freeze, &files, PATIENCE)?;
    assert_eq!((answer.reply, answer.pid), (hello(), std::process::id()));
    drop((client, writer));
    monitor.join().map_err(|_| "the monitor's side failed")??;
    let mut text = String::new();
    reader.read_to_string(&mut text)?;
    assert_eq!(text, "seen", "and every copy of the descriptor is closed");
    Ok(())
}

#[test]
fn a_later_node_connects_to_the_same_path() -> Tested {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("control.sock");
    let listener = listen(&path)?;
    let monitor = thread::spawn(move || -> Result<(), ControlError> {
        for _ in 0..2 {
            let mut server = accept(&listener)?;
            while server.receive()?.is_some() {
                server.answer(&Reply::Done)?;
            }
        }
        Ok(())
    });
    for _ in 0..2 {
        assert_eq!(Client::connect(&path)?.call(&Request::Pause, &[], PATIENCE)?.reply, Reply::Done);
    }
    monitor.join().map_err(|_| "the monitor's side failed")??;
    assert!(matches!(Client::connect(&path), Err(ControlError::Io(_))), "the listener is gone");
    Ok(())
}

/// Both sides check: the client its own requests, the server all of them.
#[test]
fn roles_that_are_missing_unknown_or_too_many_are_refused_by_name() -> Tested {
    let (mut client, _theirs) = Client::pair()?;
    let null = File::open("/dev/null")?;
    let refused = |files: &[Role], client: &mut Client| {
        let files: Vec<_> = files.iter().map(|role| (*role, null.as_fd())).collect();
        client.call(&Request::Freeze, &files, PATIENCE).expect_err("it was sent").to_string()
    };
    assert_eq!(
        refused(&[Role::Top], &mut client),
        "Freeze needs a descriptor for a control connection, and has none"
    );
    let twice = [Role::Top, Role::Control, Role::Top];
    assert_eq!(
        refused(&twice, &mut client),
        "Freeze takes at most 1 descriptors for the top disk layer, and has 2"
    );
    let foreign = [Role::Top, Role::Control, Role::Tap];
    assert_eq!(refused(&foreign, &mut client), "Freeze takes at most 0 descriptors for the tap, and has 1");

    let (raw, mut server) = raw_pair()?;
    let null = Traced::new()?;
    for (roles, count, clause) in [
        (vec![Role::Top], 1, "needs a descriptor for a control connection"),
        (vec![Role::Top, Role::Control, Role::Kvm], 3, "at most 0 descriptors for /dev/kvm"),
        (vec![Role::Top, Role::Control], 1, "names 2 descriptors and has 1"),
        (vec![Role::Top, Role::Control], 3, "names 2 descriptors and has 3"),
        (vec![Role::Top; 97], 1, "more than 96 descriptors"),
    ] {
        let packet = packet::encode_request(&Request::Freeze, &roles)?;
        send_raw(&raw, &packet, &vec![null.as_fd(); count])?;
        let error = server.receive().expect_err("it was taken").to_string();
        assert!(error.contains(clause), "{error}");
        let mut answer = [0; 1024];
        let length = rustix::io::read(&raw, &mut answer)?;
        let answer = packet::decode_reply(&answer[..length])?;
        assert!(matches!(answer, Reply::Failed { sentence, .. } if sentence.contains(clause)));
    }
    assert!(null.closed_everywhere(), "what came with a refused request is closed");
    Ok(())
}

#[test]
fn floods_are_refused_and_leave_nothing_open() -> Tested {
    let (raw, mut server) = raw_pair()?;
    let null = Traced::new()?;
    let packet = packet::encode_request(&Request::Hello, &[])?;
    send_raw(&raw, &packet, &vec![null.as_fd(); 253])?;
    let error = server.receive().expect_err("it was taken").to_string();
    assert!(error.contains("more than 96 descriptors"), "{error}");
    send_raw(&raw, &vec![0; packet::MAX_PACKET + 1], &[])?;
    let error = server.receive().expect_err("it was taken").to_string();
    assert!(error.contains("more than 65536 bytes"), "{error}");
    assert!(null.closed_everywhere());
    send_raw(&raw, &packet, &[])?;
    assert!(matches!(server.receive()?, Some((Request::Hello, _))), "and the connection stays usable");
    Ok(())
}

#[test]
fn another_version_is_answered_with_a_sentence() -> Tested {
    let (raw, mut server) = raw_pair()?;
    let mut packet = packet::encode_request(&Request::Hello, &[])?;
    packet[4] = 200;
    send_raw(&raw, &packet, &[])?;
    assert!(matches!(server.receive(), Err(ControlError::Version { theirs: 200 })));
    let mut answer = [0; 1024];
    let length = rustix::io::read(&raw, &mut answer)?;
    let Reply::Failed { sentence, .. } = packet::decode_reply(&answer[..length])? else {
        panic!("no refusal")
    };
    let here = keiki_control::VERSION;
    let said =
        format!("the other side of the control socket speaks version 200, this program version {here}");
    assert_eq!(sentence, said);
    Ok(())
}

/// A monitor is not trusted either.
#[test]
fn a_reply_with_descriptors_another_version_or_none_at_all_is_refused() -> Tested {
    let null = Traced::new()?;
    let done = packet::encode_reply(&Reply::Done)?;
    let mut newer = done.clone();
    newer[4] = 99;
    let error = answered_with(&done, &[null.as_fd()])?.expect_err("it was taken").to_string();
    assert!(error.contains("descriptors"), "{error}");
    assert!(matches!(answered_with(&newer, &[])?, Err(ControlError::Version { theirs: 99 })));
    assert!(null.closed_everywhere());
    let (mut client, theirs) = Client::pair()?;
    let silent = client.call(&Request::Hello, &[], Duration::from_millis(20));
    assert!(matches!(silent, Err(ControlError::TimedOut)), "{silent:?}");
    drop(theirs);
    assert!(matches!(client.call(&Request::Hello, &[], PATIENCE), Err(ControlError::Closed)));
    Ok(())
}

/// How a client takes these bytes as an answer.
fn answered_with(
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> Result<Result<keiki_control::Answer, ControlError>, Box<dyn std::error::Error>> {
    let (mut client, theirs) = Client::pair()?;
    send_raw(&theirs, bytes, files)?;
    Ok(client.call(&Request::Hello, &[], PATIENCE))
}
