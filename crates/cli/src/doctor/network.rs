//! What lets sandboxes reach the internet.

use super::{
    Check,
    programs::{find, output},
    read,
};

pub(super) fn checks() -> Vec<Check> {
    vec![forwarding(), firewall()]
}

fn forwarding() -> Check {
    let name = "ip_forward";
    match read("/proc/sys/net/ipv4/ip_forward").as_deref() {
        Some("1") => Check::ok(name, "on"),
        Some(_) => Check::warn(
            name,
            "off: sandboxes reach nothing outside",
            "sysctl -w net.ipv4.ip_forward=1 (and in /etc/sysctl.d to keep it)",
        ),
        None => Check::fail(name, "the kernel has no IPv4", "use a kernel with CONFIG_INET"),
    }
}

/// `ip filter FORWARD`: the chains on the forward hook that drop what no rule lets through.
fn dropping_chains(ruleset: &str) -> Vec<String> {
    let (mut table, mut chain, mut found) = (String::new(), String::new(), Vec::new());
    for line in ruleset.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix("table ") {
            table = name.trim_end_matches('{').trim().to_owned();
        } else if let Some(name) = line.strip_prefix("chain ") {
            chain = name.trim_end_matches('{').trim().to_owned();
        } else if line.contains("hook forward") && line.contains("policy drop") {
            found.push(format!("{table} {chain}"));
        }
    }
    found
}

fn firewall() -> Check {
    let name = "firewall";
    let Some(nft) = find("nft") else {
        let remedy = "apt-get install --no-install-recommends nftables";
        return Check::fail(name, "nft is not installed: rules can be neither made nor looked at", remedy);
    };
    let Some(ruleset) = output(&nft, &["list", "ruleset"]) else {
        return Check::warn(name, "nft does not list the rules", "run as root on a kernel with nf_tables");
    };
    let dropping = dropping_chains(&ruleset);
    if dropping.is_empty() {
        return Check::ok(name, "nftables; no chain drops forwarded traffic by policy");
    }
    let chains = dropping.join(", ");
    Check::warn(
        name,
        format!("{chains} drops forwarded traffic by policy: sandboxes may reach nothing outside"),
        "allow forwarding from and to the slot range there, e.g. iptables -I FORWARD -s 10.200.0.0/16 -j ACCEPT \
         and iptables -I FORWARD -d 10.200.0.0/16 -j ACCEPT",
    )
}

#[cfg(test)]
mod tests {
    use super::dropping_chains;

    #[test]
    fn chains_that_drop_are_named() {
        let rules = "table ip filter {\n\tchain FORWARD {\n\t\ttype filter hook forward priority filter; policy drop;\n\
                     \t}\n\tchain INPUT {\n\t\ttype filter hook input priority filter; policy drop;\n\t}\n}\n\
                     table inet keiki {\n\tchain forward {\n\t\ttype filter hook forward priority 0; policy accept;\n\t}\n}\n";
        assert_eq!(dropping_chains(rules), ["ip filter FORWARD"]);
        assert!(dropping_chains("").is_empty());
    }
}
