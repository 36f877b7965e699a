//! A cold page cache: what a node finds after its host has booted, or was busy elsewhere.

use keiki_client::Client;
use std::{fs, path::Path};

const DROP: &str = "/proc/sys/vm/drop_caches";

/// Can this program empty the page cache of the node's host? An error says why not.
pub fn can_be_emptied(client: &Client) -> Result<(), String> {
    if !is_here(client.url()) {
        return Err(format!("the page cache of {} is on another machine", client.url()));
    }
    match fs::OpenOptions::new().write(true).open(DROP) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("cannot empty the page cache: {DROP}: {error}")),
    }
}

/// Empties the page cache, except for mapped pages in use. Blocks until dirty data is written.
pub fn empty() -> std::io::Result<()> {
    rustix::fs::sync();
    fs::write(Path::new(DROP), "3\n")
}

fn is_here(url: &str) -> bool {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = authority.split('/').next().unwrap_or_default();
    let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::is_here;

    #[test]
    fn only_loopback_is_this_machine() {
        for url in ["http://127.0.0.1:7777", "http://localhost", "http://[::1]:1", "http://localhost:7/x"] {
            assert!(is_here(url), "{url}");
        }
        for url in ["http://10.0.0.1:7777", "http://node.example", "http://localhost.example:1"] {
            assert!(!is_here(url), "{url}");
        }
    }
}
