//! The host side of all slots of a node: locks, the claim on the range, firewall rules, cleanup.

use crate::{
    cidr::Cidr,
    error::{Error, Result},
    netfilter,
    netlink::Net,
    range::{NodeTag, Range},
    rules,
    slot::{self, Plan},
};
use keiki_sys::netns;
use rustix::fs::{FlockOperation, flock};
use std::{
    collections::BTreeSet,
    fs::{File, OpenOptions},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

/// One node at a time looks for collisions and claims its range.
const CLAIM_LOCK: &str = "/run/keiki-slots.lock";

/// How often to try before another process is taken to hold the lock: a program that is being
/// started inherits the descriptor and holds the lock until its exec.
const TRIES: usize = 20;
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// Locks a node's slots as long as the returned file lives.
pub(crate) async fn lock(dir: &Path) -> Result<File> {
    let path = dir.join("slots.lock");
    let doing = || format!("lock {}", path.display());
    std::fs::create_dir_all(dir).map_err(Error::io(doing()))?;
    let file = open_lock(&path).map_err(Error::io(doing()))?;
    for _ in 0..TRIES {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => tokio::time::sleep(TRY_AGAIN).await,
            Err(errno) => return Err(Error::io(doing())(errno.into())),
        }
    }
    Err(Error::Locked)
}

fn open_lock(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).truncate(false).write(true).open(path)
}

/// Prepares the host for these slots.
pub(crate) async fn prepare(
    plan: &Plan,
    net: &Net,
    in_use: &BTreeSet<u16>,
    resolvers: &[SocketAddr],
) -> Result<()> {
    let _claim_lock = tokio::task::spawn_blocking(lock_claims)
        .await
        .map_err(|error| error.into())
        .flatten()
        .map_err(Error::io(format!("lock {CLAIM_LOCK}")))?;
    clean(plan, net, in_use).await?;
    if let Some(with) = collision(net, plan.range, &plan.tag, resolvers).await? {
        return Err(Error::Collision { range: plan.range.cidr(), with });
    }
    let opened = open(plan, net).await;
    if opened.is_err()
        && in_use.is_empty()
        && let Err(error) = clear(plan, net).await
    {
        tracing::warn!(
            error = &error as &dyn std::error::Error,
            "the host side of the slots could not be removed and is incomplete"
        );
    }
    opened
}

/// Restores what other programs removed: the restart of a firewall flushes all tables, and a new
/// default route may use a link that does not forward. Cheap when nothing is missing.
pub(crate) async fn mend(plan: &Plan, net: &Net) -> Result<()> {
    let there =
        netfilter::has_table(&plan.tag.table()).map_err(Error::io("check the node's firewall rules"))?;
    if !there {
        tracing::warn!(tag = %plan.tag, "the node's firewall rules are gone; restoring them");
        apply(plan, rules::host(&plan.tag, plan.range, &plan.egress)).await?;
    }
    match net.exit().await? {
        Some(exit) => slot::forward(&exit.link),
        None => Ok(()),
    }
}

async fn open(plan: &Plan, net: &Net) -> Result<()> {
    net.claim(plan.range.cidr(), &plan.tag).await?;
    apply(plan, rules::host(&plan.tag, plan.range, &plan.egress)).await?;
    match net.exit().await? {
        Some(exit) => slot::forward(&exit.link),
        None => Ok(()),
    }
}

/// Removes a node's rules and its claim from the host. Its slots are gone already.
pub(crate) async fn clear(plan: &Plan, net: &Net) -> Result<()> {
    let claimed = net.unclaim(plan.range.cidr(), &plan.tag).await;
    apply(plan, rules::no_host(&plan.tag)).await.and(claimed)
}

/// Removes what a node with this tag left on the host: slots, rules, claims. For nodes that will
/// never start again; a node that starts cleans up after itself.
pub async fn purge(tag: &NodeTag) -> Result<()> {
    let net = Net::open()?;
    let claims = claims_of(&net, tag).await?;
    // The range matters only to the connection table, and is unknown if the claim is gone.
    let any = Cidr::of(std::net::Ipv4Addr::new(10, 200, 0, 0), 16);
    let ranges = claims.iter().copied().chain(any).filter_map(|cidr| Range::new(cidr).ok());
    for range in ranges.take(claims.len().max(1)) {
        let plan = Plan { tag: tag.clone(), range, egress: rules::EgressPolicy::default() };
        clean(&plan, &net, &BTreeSet::new()).await?;
        clear(&plan, &net).await?;
    }
    Ok(())
}

fn lock_claims() -> std::io::Result<File> {
    let file = open_lock(Path::new(CLAIM_LOCK))?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

async fn apply(plan: &Plan, ruleset: String) -> Result<()> {
    let of = format!("node {}", plan.tag);
    tokio::task::spawn_blocking(move || rules::apply(&of, &ruleset))
        .await
        .map_err(|error| Error::io("run nft")(error.into()))?
}

/// Removes slots of this tag that are not in use, complete or not, and claims on other ranges.
async fn clean(plan: &Plan, net: &Net, in_use: &BTreeSet<u16>) -> Result<()> {
    let mut found = BTreeSet::new();
    let prefix = plan.tag.netns_prefix();
    let names = netns::list(&prefix).map_err(Error::io("list network namespaces"))?;
    found.extend(names.iter().filter_map(|name| index(name, &prefix)));
    let prefix = plan.tag.link_prefix();
    found.extend(net.links().await?.iter().filter_map(|(_, name, _)| index(name, &prefix)));
    for index in found.difference(in_use) {
        tracing::info!(index, tag = %plan.tag, "removing a slot of an earlier run");
        plan.take_down(net, *index).await?;
    }
    for range in claims_of(net, &plan.tag).await? {
        if range != plan.range.cidr() {
            net.unclaim(range, &plan.tag).await?;
        }
    }
    Ok(())
}

fn index(name: &str, prefix: &str) -> Option<u16> {
    name.strip_prefix(prefix)?.parse().ok()
}

async fn claims_of(net: &Net, tag: &NodeTag) -> Result<Vec<Cidr>> {
    let routes = net.routes().await?.into_iter();
    Ok(routes.filter(|route| route.claim.as_ref() == Some(tag)).map(|route| route.to).collect())
}

/// What on this host overlaps the range and does not belong to this node, as a phrase.
pub(crate) async fn collision(
    net: &Net,
    range: Range,
    tag: &NodeTag,
    resolvers: &[SocketAddr],
) -> Result<Option<String>> {
    let range = range.cidr();
    let links = net.links().await?;
    let name_of =
        |index| links.iter().find(|(other, ..)| Some(*other) == index).map(|(_, name, _)| name.as_str());
    let mut routes = net.routes().await?;
    // A claim says more than the routes of its slots.
    routes.sort_by_key(|route| route.claim.is_none());
    for route in routes {
        let link = name_of(route.link).unwrap_or("no link");
        let ours = route.claim.as_ref() == Some(tag) || link.starts_with(&tag.link_prefix());
        if ours || route.to.prefix_len() == 0 || !route.to.overlaps(range) {
            continue;
        }
        return Ok(Some(match &route.claim {
            Some(other) => format!("the slots of node {other} on this host ({})", route.to),
            None => format!("the route to {} through {link}", route.to),
        }));
    }
    let hit = resolvers.iter().find(|resolver| match resolver.ip() {
        IpAddr::V4(address) => range.contains(&address),
        IpAddr::V6(_) => false,
    });
    Ok(hit.map(|resolver| format!("the name server {}", resolver.ip())))
}
