//! The nftables rules of a slot and of the host.
//!
//! Every decision is made twice. The slot's rules see the guest's true source address and answer a
//! forbidden destination at once with an ICMP error. The host's rules hold even if a slot's
//! namespace is taken over, and are the only ones that can tell the host's own addresses from
//! others.
//!
//! ```text
//!  guest ── tap0 │ guard ─ forward/egress ─ masquerade │ up0 ══ kk-TAG-N │ input: drop all               │
//!                │ input: DNS only                     │                 │ forward: egress ─ masquerade  │ ── eth0
//!                └───────────── slot namespace ────────┘                 └──────────── host ─────────────┘
//! ```
//!
//! `guard` is at the tap's ingress: a frame that does not come from the guest's MAC *and* address
//! never reaches the network stack. So a guest can neither spoof addresses, nor fill the neighbour
//! table that all namespaces share, nor use IPv6.
//!
//! The DNS forwarder does not filter names that resolve to a blocked address: these rules drop the
//! packets.
//!
//! A ruleset is one text, applied by one `nft -f -` in one transaction, and only while a slot is
//! built.

use crate::{
    cidr::Cidr,
    error::{Error, Result},
    range::{LINK_PREFIX, NodeTag, Range},
};
use keiki_protocol::net::{GATEWAY, GUEST, GUEST_MAC, TAP};
use std::{
    fmt::Write as _,
    io::Write as _,
    process::{Command, Stdio},
};

/// Name of the slot's end of its link, inside its namespace.
pub(crate) const UPLINK: &str = "up0";

/// Flows a guest may have open at once: each is an entry in the host's connection table too.
const MAX_FLOWS: u32 = 2048;
/// New flows per second.
const FLOW_RATE: u32 = 1000;
/// Refusals answered per second; beyond that, packets are dropped silently.
const REFUSAL_RATE: u32 = 100;

/// Networks that are not the internet: this host, private, carrier-grade NAT, link-local (with
/// cloud metadata), benchmarking, multicast, reserved, broadcast.
const BLOCKED: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, \
                       192.168.0.0/16, 198.18.0.0/15, 224.0.0.0/4, 240.0.0.0/4";

/// Exceptions from the rule that guests reach the public internet and nothing else. They never
/// reach the host's own addresses or other sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EgressPolicy {
    /// Private networks that guests may reach.
    pub allow: Vec<Cidr>,
    /// Networks that guests may not reach, even if they are public or allowed.
    pub deny: Vec<Cidr>,
}

fn set(name: &str, elements: &str) -> String {
    let elements =
        if elements.is_empty() { String::new() } else { format!("\n    elements = {{ {elements} }}") };
    format!("  set {name} {{\n    type ipv4_addr; flags interval; auto-merge;{elements}\n  }}\n")
}

fn sets(policy: &EgressPolicy) -> String {
    let join = |networks: &[Cidr]| networks.iter().map(Cidr::to_string).collect::<Vec<_>>().join(", ");
    set("blocked", BLOCKED) + &set("allowed", &join(&policy.allow)) + &set("denied", &join(&policy.deny))
}

/// A table that replaces one of the same name in the same transaction.
fn table(family: &str, name: &str, body: &str) -> String {
    format!("table {family} {name}\ndelete table {family} {name}\ntable {family} {name} {{\n{body}}}\n")
}

/// The rules inside a slot's namespace.
pub(crate) fn slot(policy: &EgressPolicy) -> String {
    let guard = format!(
        r#"  chain guard {{
    type filter hook ingress device "{TAP}" priority 0; policy drop;
    ether saddr != {GUEST_MAC} drop
    ether type arp arp saddr ether {GUEST_MAC} arp saddr ip {GUEST} arp daddr ip {GATEWAY} accept
    ether type ip ip saddr {GUEST} accept
  }}
"#
    );
    let mut body = sets(policy);
    let _ = write!(
        body,
        r#"  chain input {{
    type filter hook input priority filter; policy drop;
    iifname "{TAP}" ip saddr {GUEST} ip daddr {GATEWAY} meta l4proto {{ tcp, udp }} th dport 53 accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid drop
    tcp flags & (syn | rst) == syn tcp option maxseg size set rt mtu
    iifname "{UPLINK}" oifname "{TAP}" ct state established,related accept
    iifname "{TAP}" oifname "{UPLINK}" jump egress
  }}
  chain egress {{
    ip daddr @denied goto refuse
    ip daddr @allowed goto admit
    ip daddr @blocked goto refuse
    goto admit
  }}
  chain refuse {{
    limit rate {REFUSAL_RATE}/second burst {REFUSAL_RATE} packets reject with icmp type admin-prohibited
    drop
  }}
  chain admit {{
    ct state new ct count over {MAX_FLOWS} drop
    ct state new limit rate over {FLOW_RATE}/second burst {FLOW_RATE} packets drop
    meta nfproto ipv4 accept
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    oifname "{TAP}" accept
    oifname "{UPLINK}" ct state established,related accept
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" masquerade
  }}
"#
    );
    table("netdev", "keiki", &guard) + &table("inet", "keiki", &body)
}

/// The rules of the host for all slots of a node.
pub(crate) fn host(tag: &NodeTag, range: Range, policy: &EgressPolicy) -> String {
    let (ours, any, range) = (format!("{}*", tag.link_prefix()), format!("{LINK_PREFIX}*"), range.cidr());
    let mut body = sets(policy);
    let _ = write!(
        body,
        r#"  chain input {{
    type filter hook input priority filter - 5; policy accept;
    iifname "{ours}" drop
  }}
  chain forward {{
    type filter hook forward priority filter - 5; policy accept;
    iifname "{ours}" jump egress
    oifname "{ours}" ct state established,related accept
    oifname "{ours}" drop
  }}
  chain egress {{
    oifname "{any}" drop
    meta nfproto != ipv4 drop
    ct state invalid drop
    ip saddr != {range} drop
    ip daddr @denied drop
    ip daddr @allowed accept
    ip daddr @blocked drop
  }}
  chain postrouting {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {range} oifname != "{any}" masquerade
  }}
"#
    );
    table("inet", &tag.table(), &body)
}

/// Removes a node's table from the host, if it exists.
pub(crate) fn no_host(tag: &NodeTag) -> String {
    let name = tag.table();
    format!("table inet {name}\ndelete table inet {name}\n")
}

/// Runs `nft` with these arguments and this input, in the calling thread's namespace.
pub(crate) fn nft(arguments: &[&str], input: &str) -> std::io::Result<std::process::Output> {
    // Daemons and users without a login shell often lack the sbin directories.
    let found = ["/usr/sbin/nft", "/sbin/nft"].into_iter().find(|path| std::path::Path::new(path).exists());
    let mut child = Command::new(found.unwrap_or("nft"))
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    child.wait_with_output()
}

/// Applies a ruleset in the calling thread's namespace, all or nothing.
pub(crate) fn apply(of: &str, ruleset: &str) -> Result<()> {
    let output = nft(&["-f", "-"], ruleset).map_err(Error::io("run nft"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Rules { of: of.to_owned(), said: said.lines().next().unwrap_or("(nothing)").to_owned() })
}
