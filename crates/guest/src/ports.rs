//! Listening TCP ports, read from `/proc`.
//!
//! The tables of sockets hold address, port and inode; the owner of a socket is found through the
//! descriptors of processes. That search is bounded: a port whose owner is not found has no process
//! name.

use crate::tcp_table;
use keiki_protocol::guest::{ListPortsReply, ListeningPort};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs, io,
    net::IpAddr,
};

/// Most ports in an answer.
const MOST: usize = 1024;
/// Descriptors checked to find owners.
const DESCRIPTORS: usize = 20_000;

/// A listening socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Socket {
    address: IpAddr,
    port: u16,
    inode: u64,
}

/// All listening ports, one entry for each port and address.
pub fn list() -> io::Result<ListPortsReply> {
    let mut sockets = parse(&fs::read_to_string("/proc/net/tcp")?);
    // A kernel without IPv6 has no such file.
    sockets.extend(parse(&fs::read_to_string("/proc/net/tcp6").unwrap_or_default()));
    let owners = owners(&sockets);
    let mut ports = BTreeMap::new();
    for socket in sockets {
        let (pid, process) = owners.get(&socket.inode).cloned().unwrap_or_default();
        // Workers may share a port: the first is enough.
        ports.entry((socket.port, socket.address)).or_insert(ListeningPort {
            port: socket.port.into(),
            address: socket.address.to_string(),
            pid,
            process,
        });
    }
    Ok(ListPortsReply { ports: ports.into_values().take(MOST).collect() })
}

fn parse(table: &str) -> Vec<Socket> {
    let listens = tcp_table::parse(table).filter(|socket| socket.state == tcp_table::LISTEN);
    listens
        .map(|socket| Socket { address: socket.local.0, port: socket.local.1, inode: socket.inode })
        .collect()
}

/// The pid and name of the process behind each socket.
fn owners(sockets: &[Socket]) -> HashMap<u64, (u32, String)> {
    let mut wanted: HashSet<u64> = sockets.iter().map(|socket| socket.inode).collect();
    let mut owners = HashMap::new();
    let mut left = DESCRIPTORS;
    let Ok(processes) = fs::read_dir("/proc") else { return owners };
    let pids = processes.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    for pid in pids {
        if wanted.is_empty() || left == 0 {
            break;
        }
        let Ok(descriptors) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        for descriptor in descriptors.flatten().take(left) {
            left -= 1;
            let target = fs::read_link(descriptor.path()).unwrap_or_default();
            if let Some(inode) = tcp_table::socket_inode(&target).filter(|inode| wanted.remove(inode)) {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                owners.insert(inode, (pid, name.trim_end().to_owned()));
            }
        }
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::{list, parse};
    use std::net::TcpListener;

    #[test]
    fn tables_are_read() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
            \x20  0: 0100007F:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 100\n\
            \x20  1: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 100\n\
            \x20  2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 9 1\n\
            \x20  3: 0100:0050 x 0A 0:0 0:0 0 0 0 9\n\
            nonsense\n";
        let found: Vec<_> = parse(table).iter().map(|s| (s.address.to_string(), s.port, s.inode)).collect();
        assert_eq!(found, [("127.0.0.1".to_owned(), 8000, 4711), ("::1".to_owned(), 80, 9)]);
    }

    #[test]
    fn a_listener_is_found_with_its_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let found = list().unwrap().ports;
        let ours = found.iter().find(|found| found.port == u32::from(port)).unwrap();
        assert_eq!((ours.address.as_str(), ours.pid), ("127.0.0.1", std::process::id()));
        assert!(!ours.process.is_empty());
    }
}
