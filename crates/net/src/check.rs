//! The network checks of `keiki doctor`.

use crate::{
    cidr::Cidr,
    dns::Upstream,
    host,
    netlink::Net,
    range::{NodeTag, Range},
    rules,
    slot::on_own_runtime,
};
use keiki_sys::{netns, tap};

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What was checked.
    pub name: &'static str,
    /// Whether it is as it should be.
    pub ok: bool,
    /// What was found.
    pub detail: String,
    /// What to do if it is not.
    pub remedy: Option<String>,
}

/// Checks everything that slots in `range` need, as node `tag` if it is known. Removes what it
/// creates for that. Blocks.
#[must_use]
pub fn check(range: Cidr, tag: Option<&NodeTag>) -> Vec<Check> {
    vec![nftables(), namespaces(), taps(), forwarding(), forward_policy(), collision(range, tag)]
}

fn fine(name: &'static str, detail: impl Into<String>) -> Check {
    Check { name, ok: true, detail: detail.into(), remedy: None }
}

fn bad(name: &'static str, detail: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { name, ok: false, detail: detail.into(), remedy: Some(remedy.into()) }
}

fn nftables() -> Check {
    const NAME: &str = "nftables";
    let remedy = "install the nftables package and run as root on a kernel with nf_tables";
    match rules::nft(&["list", "tables"], "") {
        Ok(output) if output.status.success() => fine(NAME, "nft works"),
        Ok(output) => bad(NAME, String::from_utf8_lossy(&output.stderr).trim(), remedy),
        Err(error) => bad(NAME, format!("nft does not start: {error}"), remedy),
    }
}

fn namespaces() -> Check {
    const NAME: &str = "network namespaces";
    let name = format!("keiki-check-{}", std::process::id());
    let made = netns::on_own_thread(|| netns::create(&name));
    let removed = netns::remove(&name);
    match made.and(removed) {
        Ok(()) => fine(NAME, "can be created"),
        Err(error) => bad(NAME, error.to_string(), "run as root (CAP_SYS_ADMIN and CAP_NET_ADMIN)"),
    }
}

fn taps() -> Check {
    const NAME: &str = "tap devices";
    match tap::open(&format!("kkchk{}", std::process::id() % 100_000)) {
        Ok(_) => fine(NAME, "can be created"),
        Err(error) => {
            bad(NAME, error.to_string(), "run `modprobe tun`; run as root; in a container, pass /dev/net/tun")
        }
    }
}

/// Keiki turns forwarding on per link: for its own links and for the link of the default route.
fn forwarding() -> Check {
    const NAME: &str = "forwarding";
    let exit = on_own_runtime(|| async { Net::open()?.exit().await });
    let link = match exit {
        Ok(Some(exit)) => exit.link,
        Ok(None) => {
            return bad(
                NAME,
                "the host has no default route",
                "add a default route; without it sandboxes cannot reach the internet",
            );
        }
        Err(error) => return bad(NAME, error.to_string(), "run as root"),
    };
    let path = format!("/proc/sys/net/ipv4/conf/{link}/forwarding");
    match std::fs::read_to_string(&path).as_deref().map(str::trim) {
        Ok("1") => fine(NAME, format!("on for {link}")),
        Ok(_) => match std::fs::OpenOptions::new().write(true).open(&path) {
            Ok(_) => fine(NAME, format!("off for {link}; the node turns it on when it starts")),
            Err(error) => bad(
                NAME,
                format!("off for {link}, and {path} is not writable: {error}"),
                format!("sysctl -w net.ipv4.conf.{link}.forwarding=1"),
            ),
        },
        Err(error) => bad(NAME, error.to_string(), "mount /proc/sys read-write"),
    }
}

/// A firewall whose forward chain drops by default drops our packets too: nftables has no final
/// accept.
fn forward_policy() -> Check {
    const NAME: &str = "forward policy";
    let listed = match rules::nft(&["-j", "list", "chains"], "") {
        Ok(output) if output.status.success() => output.stdout,
        _ => return bad(NAME, "unknown, because nft does not work", "see the nftables check"),
    };
    let dropping = dropping_chains(&listed);
    if dropping.is_empty() {
        return fine(NAME, "no firewall drops forwarded packets by default");
    }
    bad(
        NAME,
        format!("forwarded packets are dropped by default in {}", dropping.join(", ")),
        "allow the slots there: with Docker, `iptables -I DOCKER-USER -i 'kk-+' -j ACCEPT` and \
         `iptables -I DOCKER-USER -o 'kk-+' -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT`; with another \
         firewall, add the same two rules to its forward chain",
    )
}

/// The chains at the forward hook with policy drop, from `nft -j list chains`.
fn dropping_chains(json: &[u8]) -> Vec<String> {
    let listed: serde_json::Value = serde_json::from_slice(json).unwrap_or_default();
    let chains = listed["nftables"].as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    chains
        .iter()
        .map(|item| &item["chain"])
        .filter(|chain| chain["hook"] == "forward" && chain["policy"] == "drop")
        .map(|chain| format!("{} {} {}", text(&chain["family"]), text(&chain["table"]), text(&chain["name"])))
        .collect()
}

fn collision(range: Cidr, tag: Option<&NodeTag>) -> Check {
    const NAME: &str = "slot range";
    let other = "set slot_range to another private range";
    let Ok(slots) = Range::new(range) else {
        return bad(NAME, format!("{range} cannot hold slots: a /8 to /28 network is needed"), other);
    };
    let placeholder = "ffff".parse::<NodeTag>();
    let Some(tag) = tag.or(placeholder.as_ref().ok()) else { return bad(NAME, "unknown", other) };
    let found = on_own_runtime(|| async {
        let resolvers = Upstream::new(None).resolvers().await;
        host::collision(&Net::open()?, slots, tag, &resolvers).await
    });
    match found {
        Ok(None) => fine(NAME, format!("{range} is free: {} slots", slots.slots())),
        Ok(Some(with)) => bad(NAME, format!("{range} collides with {with}"), other),
        Err(error) => bad(NAME, error.to_string(), "run as root"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_forward_chains_are_found() {
        let json = br#"{"nftables": [{"metainfo": {}},
            {"chain": {"family": "ip", "table": "filter", "name": "FORWARD", "hook": "forward", "policy": "drop"}},
            {"chain": {"family": "ip", "table": "filter", "name": "INPUT", "hook": "input", "policy": "drop"}},
            {"chain": {"family": "inet", "table": "keiki_1a2b", "name": "forward", "hook": "forward", "policy": "accept"}}]}"#;
        assert_eq!(dropping_chains(json), ["ip filter FORWARD"]);
        assert!(dropping_chains(b"rubbish").is_empty());
    }
}
