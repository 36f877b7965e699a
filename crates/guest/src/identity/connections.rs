//! Connections to the outside: the original keeps them, a copy loses them.
//!
//! The peer of a TCP connection knows one machine. If two machines used it, both would get resets
//! at best, and silence until a timeout at worst. So the agent disconnects every socket whose peer
//! is outside, as its own program could: `connect` to an unspecified address, after which reads and
//! writes fail with `ECONNRESET`. It reaches sockets of other processes with `pidfd_getfd`. This
//! works because user work is frozen: a program that was waiting in a system call has left it, and
//! sees the reset when it resumes.
//!
//! Connections inside the machine survive: loopback, the machine's own address, unix sockets,
//! pipes, listeners.

use crate::{exec::signal_all, sys, tcp_table};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, connect_unspec, socket_with},
    process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    net::IpAddr,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::OnceLock,
};

/// More descriptors than a process may have.
const MAX_FD: i32 = 1 << 20;

/// Resets all TCP connections of these processes to peers outside this machine; returns their
/// number.
pub fn reset_foreign(processes: &[i32]) -> io::Result<usize> {
    let mut namespaces = BTreeMap::new();
    for &pid in processes {
        if let Ok(name) = fs::read_link(format!("/proc/{pid}/ns/net")) {
            namespaces.entry(name).or_insert(pid);
        }
    }
    let mut foreign = BTreeSet::new();
    for pid in namespaces.into_values() {
        let mut found = vec![];
        for table in ["tcp", "tcp6"] {
            // Absent if the kernel has no IPv6 or the process has exited.
            if let Ok(text) = fs::read_to_string(format!("/proc/{pid}/net/{table}")) {
                found.extend(connections(&text));
            }
        }
        foreign.extend(outside(&found));
    }
    if foreign.is_empty() {
        return Ok(0);
    }
    let mut reset = BTreeSet::new();
    for &pid in processes {
        reset_in(pid, &foreign, &mut reset)?;
    }
    Ok(reset.len())
}

fn reset_in(pid: i32, foreign: &BTreeSet<u64>, reset: &mut BTreeSet<u64>) -> io::Result<()> {
    // The process may have exited.
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Ok(()) };
    let mut process = None;
    for entry in entries.flatten() {
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let Some(inode) = tcp_table::socket_inode(&target).filter(|inode| foreign.contains(inode)) else {
            continue;
        };
        if reset.contains(&inode) {
            continue;
        }
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(fd) = number.filter(|fd| (0..MAX_FD).contains(fd)) else { continue };
        let handle = match &process {
            Some(handle) => handle,
            None => {
                let Some(number) = Pid::from_raw(pid) else { return Ok(()) };
                process.insert(pidfd_open(number, PidfdFlags::empty())?)
            }
        };
        let socket = pidfd_getfd(handle, fd, PidfdGetfdFlags::empty())?;
        connect_unspec(&socket)?;
        reset.insert(inode);
    }
    Ok(())
}

/// A connection that a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Connection {
    local: IpAddr,
    peer: IpAddr,
    inode: u64,
}

/// The connections in one of the kernel's tables. IPv4-mapped addresses count as IPv4.
fn connections(table: &str) -> impl Iterator<Item = Connection> {
    let held = tcp_table::parse(table).filter(|socket| {
        socket.inode != 0
            && !matches!(socket.state, tcp_table::CLOSED | tcp_table::TIME_WAIT | tcp_table::LISTEN)
    });
    held.map(|socket| Connection {
        local: socket.local.0.to_canonical(),
        peer: socket.peer.0.to_canonical(),
        inode: socket.inode,
    })
}

/// Inodes of connections whose peer is outside: neither loopback nor a local address of any
/// connection.
fn outside(all: &[Connection]) -> Vec<u64> {
    let own: BTreeSet<IpAddr> = all.iter().map(|connection| connection.local).collect();
    all.iter().filter(|c| !c.peer.is_loopback() && !own.contains(&c.peer)).map(|c| c.inode).collect()
}

/// Forgets the link addresses of neighbours: they belong to another slot.
pub fn forget_neighbours() -> io::Result<()> {
    static TABLE: OnceLock<fs::File> = OnceLock::new();
    // Absent if the kernel has no IPv4.
    let Ok(table) = sys::kept_open(&TABLE, || fs::File::open("/proc/net/arp")) else { return Ok(()) };
    let text = read_from_start(table)?;
    let mut socket = None;
    for line in text.lines().skip(1) {
        let mut words = line.split_ascii_whitespace();
        let (Some(Ok(ip)), Some(device)) = (words.next().map(str::parse), words.last()) else { continue };
        let socket = match &socket {
            Some(socket) => socket,
            None => socket.insert(socket_with(
                AddressFamily::INET,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC,
                None,
            )?),
        };
        match sys::forget_neighbour(socket.as_fd(), ip, device) {
            // It has expired in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {}
            result => result?,
        }
    }
    Ok(())
}

/// Reads a kernel file that stays open: the kernel makes new text for a read at offset 0.
fn read_from_start(file: &fs::File) -> io::Result<String> {
    let mut text = vec![0; 4096];
    let mut length = 0;
    loop {
        match file.read_at(&mut text[length..], length as u64)? {
            0 => break,
            got => length += got,
        }
        if text.len() - length < 1024 {
            text.resize(text.len() * 2, 0);
        }
    }
    text.truncate(length);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Programs that cache answers of the old slot's name server, and the signal that clears each
/// cache.
const CACHES: [(&str, Signal); 2] = [("systemd-resolve", Signal::USR2), ("dnsmasq", Signal::HUP)];

/// Makes programs forget cached names as soon as they resume.
pub fn forget_names(processes: &[i32]) {
    for (name, signal) in CACHES {
        signal_all(&processes_named(processes, name), signal);
    }
}

/// The processes that run a program of this name.
pub fn processes_named(processes: &[i32], name: &str) -> Vec<i32> {
    /// The kernel truncates names to this length.
    const CUT: usize = 15;
    let wanted = &name.as_bytes()[..name.len().min(CUT)];
    let runs =
        |pid: &i32| fs::read(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim_ascii_end() == wanted);
    processes.iter().copied().filter(runs).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str =
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";

    fn line(local: &str, peer: &str, state: &str, inode: u64) -> String {
        format!("   0: {local} {peer} {state} 00000000:00000000 00:00000000 00000000  0 0 {inode} 1 0 0\n")
    }

    #[test]
    fn only_connections_that_leave_the_machine_are_outside() {
        let mapped = "0000000000000000FFFF0000";
        let text = [
            HEAD.to_owned(),
            line("0F02000A:1F90", "01010101:01BB", "01", 1),
            line("0100007F:1F90", "0100007F:A000", "01", 2),
            // With the machine's own address.
            line("0F02000A:1F90", "0F02000A:A000", "01", 3),
            line("00000000:1F90", "00000000:0000", "0A", 4),
            line("0F02000A:1F90", "01010101:01BB", "06", 5),
            line("0F02000A:1F90", "01010101:01BB", "02", 6),
            // Half closed, and held by no process.
            line("0F02000A:1F90", "01010101:01BB", "08", 7),
            line("0F02000A:1F90", "01010101:01BB", "04", 0),
            line(&format!("{mapped}0F02000A:1F90"), &format!("{mapped}08080808:0050"), "01", 8),
            line(&format!("{mapped}0100007F:1F90"), &format!("{mapped}0100007F:0050"), "01", 9),
        ]
        .concat();
        let all: Vec<_> = connections(&text).collect();
        assert_eq!(outside(&all), [1, 6, 7, 8]);
    }

    #[test]
    fn malformed_lines_are_skipped() {
        for odd in ["", "x", "0: zz:1 0100007F:1 01 0 0 0 0 0 5", "0: 0100007F:1 0:1 01 0 0 0 0 0 5"] {
            assert_eq!(connections(odd).next(), None, "{odd}");
        }
    }

    #[test]
    fn a_kernel_file_is_read_again_from_its_start() {
        let table = fs::File::open("/proc/self/maps").unwrap();
        for _ in 0..2 {
            // More than one read; the first and last lines are the same in every process.
            let text = read_from_start(&table).unwrap();
            assert!(text.contains("[stack]") && text.lines().next().unwrap().contains("r--p"), "{text}");
        }
    }

    /// On the machine that runs the tests: a disconnected socket reports a reset.
    #[test]
    fn a_disconnected_socket_reports_a_reset() {
        use std::{
            io::Read,
            net::{TcpListener, TcpStream},
        };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        connect_unspec(&client).unwrap();
        let error = client.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert_eq!(server.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
