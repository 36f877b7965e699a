//! Slots on a real host: namespaces, taps, rules and routes of the kernel, and real packets through
//! them. Needs root; skips without.

mod common;

use anyhow::{Result, ensure};
use common::{
    Guest, HOST, LINK_LOCAL, NEVER, PORT, PRIVATE, Reply, SERVER, SOON, Sender, World, ahead, mac, myself,
    packet, received, root, run, start,
};
use keiki_net::{EgressPolicy, Error, Slots, SlotsConfig, check};
use keiki_protocol::net::{GATEWAY, GUEST, GUEST_MAC};
use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

const ECHO: (Ipv4Addr, u16) = (SERVER, PORT);

fn heard(reply: Reply) -> Result<String> {
    match reply {
        Reply::Udp(data) => Ok(String::from_utf8(data)?),
        other => anyhow::bail!("no echo but {other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_internet_is_reached_and_nothing_else() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e1")?;
    let slots = start(world.config("10.211.0.0/24")?).await?;
    let slot = slots.take().await?;
    let mut guest = Guest::boot(&slot)?;

    // Both translations worked: the server heard the host.
    assert_eq!(heard(guest.udp(ECHO, b"hello", SOON)?)?, format!("{HOST} 5"));
    // The segment size follows the host's way out, not the 1460 that was asked for.
    let mtu: u16 =
        run("cat /sys/class/net/$(ip -o route show default | grep -o 'dev [^ ]*' | cut -d' ' -f2)/mtu")?
            .trim()
            .parse()?;
    assert_eq!(guest.syn(ECHO, SOON)?, Reply::Accepted(1460.min(mtu - 40)));

    for address in [PRIVATE, LINK_LOCAL, Ipv4Addr::new(172, 16, 0, 1), Ipv4Addr::new(100, 64, 0, 1)] {
        assert_eq!(guest.udp((address, PORT), b"x", SOON)?, Reply::Prohibited, "{address}");
        assert_eq!(guest.syn((address, PORT), SOON)?, Reply::Prohibited, "{address}");
    }
    // The host, by each of its addresses; and the gateway, beside its name server.
    let inner_end = Ipv4Addr::from_bits(slot.outside().to_bits() - 1);
    for address in [HOST, inner_end, GATEWAY] {
        let reply = guest.syn((address, PORT), NEVER)?;
        assert!(matches!(reply, Reply::Nothing | Reply::Prohibited), "{address}: {reply:?}");
        guest.udp((address, PORT), b"x", NEVER)?;
    }
    assert!(world.on_host.recv(&mut [0; 64]).is_err(), "the host heard a guest");

    for from in [
        Sender { address: Ipv4Addr::new(203, 0, 113, 5), ..myself() },
        Sender { address: slot.outside(), ..myself() },
        Sender { address: GATEWAY, ..myself() },
        Sender { mac: [2, 0, 0, 0, 0, 9], ..myself() },
    ] {
        let before = world.heard.load(Ordering::SeqCst);
        assert_eq!(guest.udp_as(&from, ECHO, b"spoofed", NEVER)?, Reply::Nothing);
        assert_eq!(world.heard.load(Ordering::SeqCst), before, "a spoofed packet left: {}", from.address);
    }
    assert_eq!(heard(guest.udp(ECHO, b"still", SOON)?)?, format!("{HOST} 5"));
    slots.stop(&[]).await;
    assert_eq!(world.traces()?, Vec::<String>::new());
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policy_opens_and_closes_networks_but_never_the_host() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e2")?;
    let mut config = world.config("10.212.0.0/24")?;
    config.egress = EgressPolicy {
        allow: vec!["10.0.0.0/8".parse()?, "198.51.100.0/24".parse()?],
        deny: vec!["198.51.100.2/32".parse()?],
    };
    let slots = start(config).await?;
    let (one, two) = (slots.take().await?, slots.take().await?);
    let (mut first, mut second) = (Guest::boot(&one)?, Guest::boot(&two)?);
    assert_eq!(heard(first.udp((PRIVATE, PORT), b"hello", SOON)?)?, format!("{HOST} 5"));
    assert_eq!(first.udp(ECHO, b"x", SOON)?, Reply::Prohibited);

    // Allowed by the slot's rules, stopped by the host's.
    let inner_end = Ipv4Addr::from_bits(one.outside().to_bits() - 1);
    for address in [HOST, inner_end] {
        assert_eq!(first.syn((address, PORT), NEVER)?, Reply::Nothing, "{address}");
    }
    let before = received(&two.netns_path(), "up0")?;
    assert_eq!(first.udp((two.outside(), PORT), b"neighbour?", NEVER)?, Reply::Nothing);
    assert_eq!(first.syn((two.outside(), 53), NEVER)?, Reply::Nothing);
    assert_eq!(received(&two.netns_path(), "up0")?, before, "a neighbour was reached");
    assert_eq!(second.udp((PRIVATE, PORT), b"x", SOON)?, Reply::Udp(format!("{HOST} 1").into()));

    // Another firewall starts anew and flushes everything.
    run(&format!("nft delete table inet keiki_{}", world.tag))?;
    let clock = Instant::now();
    while run(&format!("nft list table inet keiki_{}", world.tag)).is_err() {
        ensure!(clock.elapsed() < Duration::from_secs(10), "the rules did not come back");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(first.syn((HOST, PORT), NEVER)?, Reply::Nothing);
    assert_eq!(heard(first.udp((PRIVATE, PORT), b"again", SOON)?)?, format!("{HOST} 5"));
    slots.stop(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_guests_do_not_collide() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e3")?;
    let slots = start(world.config("10.213.0.0/24")?).await?;
    let (one, two) = (slots.take().await?, slots.take().await?);
    assert_ne!(one.outside(), two.outside());
    let (mut first, mut second) = (Guest::boot(&one)?, Guest::boot(&two)?);
    // The same address and the same ports, interleaved: each hears its own answers.
    for round in 1..=20usize {
        assert_eq!(heard(first.udp(ECHO, &vec![1; round], SOON)?)?, format!("{HOST} {round}"));
        assert_eq!(heard(second.udp(ECHO, &vec![2; 100 + round], SOON)?)?, format!("{HOST} {}", 100 + round));
    }
    slots.stop(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_resolved_by_the_upstream_of_the_host() -> Result<()> {
    use hickory_proto::{
        op::{Message, MessageType, OpCode, Query, ResponseCode},
        rr::{Name, RData, Record, RecordType},
    };
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e4")?;
    // On an address of the host that a guest cannot reach.
    let upstream = tokio::net::UdpSocket::bind("127.0.0.1:0").await?;
    let mut config = world.config("10.214.0.0/24")?;
    config.upstream = Some(vec![upstream.local_addr()?]);
    let server = tokio::spawn(async move {
        let mut buffer = [0; 1500];
        while let Ok((length, from)) = upstream.recv_from(&mut buffer).await {
            let Ok(message) = Message::from_vec(&buffer[..length]) else { continue };
            let mut answer = message.into_response();
            let name = answer.queries[0].name().clone();
            answer.add_answer(Record::from_rdata(name, 60, RData::A(Ipv4Addr::new(203, 0, 113, 9).into())));
            let _ = upstream.send_to(&answer.to_vec().unwrap_or_default(), from).await;
        }
    });
    let slots = start(config).await?;
    let slot = slots.take().await?;
    let mut guest = Guest::boot(&slot)?;
    let mut ask = |kind| -> Result<Message> {
        let mut message = Message::new(0x1234, MessageType::Query, OpCode::Query);
        message.add_query(Query::query(Name::from_ascii("example.com.")?, kind));
        match guest.udp((GATEWAY, 53), &message.to_vec()?, SOON)? {
            Reply::Udp(answer) => Ok(Message::from_vec(&answer)?),
            other => anyhow::bail!("{other:?}"),
        }
    };
    let answer = ask(RecordType::A)?;
    assert_eq!(answer.metadata.id, 0x1234);
    assert_eq!(answer.answers[0].data, RData::A(Ipv4Addr::new(203, 0, 113, 9).into()));
    assert_eq!(ask(RecordType::ANY)?.metadata.response_code, ResponseCode::Refused);
    // Over TCP at least the door is open; what is said there is tested beside the code.
    assert!(matches!(guest.syn((GATEWAY, 53), SOON)?, Reply::Accepted(_)));
    server.abort();
    slots.stop(&[]).await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_keeps_slots_in_use_and_removes_the_rest() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e5")?;
    let config = world.config("10.215.0.0/24")?;
    let slots = start(config.clone()).await?;
    let (kept, lost) = (slots.take().await?, slots.take().await?);
    ahead(&slots, 2).await?;
    let (kept_index, lost_path) = (kept.index(), lost.netns_path());
    let namespace = format!("ip -n keiki-{}-{}", world.tag, lost.index());
    run(&format!("{namespace} tuntap add mark mode tap"))?;
    let mut guest = Guest::boot(&kept)?;
    assert!(matches!(Slots::start(config.clone(), &[]).await, Err(Error::Locked)));
    // As after a crash: nothing is given back.
    drop((kept, lost, slots));
    // A half-built one: a name without a namespace.
    std::fs::write(format!("/run/netns/keiki-{}-99", world.tag), "")?;
    let slots = locked_start(&config, &[kept_index]).await?;
    // Its name may have a new namespace already.
    ahead(&slots, 2).await?;
    assert!(!lost_path.exists() || run(&format!("{namespace} link show mark")).is_err());
    // The guest never noticed.
    assert_eq!(heard(guest.udp(ECHO, b"between", SOON)?)?, format!("{HOST} 7"));
    run(&format!("ip link del kk-{}-{kept_index}", world.tag))?;
    let kept = slots.adopt(kept_index).await?;
    assert_eq!(heard(guest.udp(ECHO, b"after", SOON)?)?, format!("{HOST} 5"));
    assert!(matches!(guest.syn((GATEWAY, 53), SOON)?, Reply::Accepted(_)));
    assert!(matches!(slots.adopt(200).await, Err(Error::Taken(200))));

    // A graceful stop that keeps it; then its namespace is lost by other hands.
    slots.stop(&[kept_index]).await;
    drop((kept, slots));
    assert_eq!(heard(guest.udp(ECHO, b"kept", SOON)?)?, format!("{HOST} 4"));
    let slots = locked_start(&config, &[kept_index]).await?;
    run(&format!("umount /run/netns/keiki-{}-{kept_index}", world.tag))?;
    assert!(matches!(slots.adopt(kept_index).await, Err(Error::Gone(index)) if index == kept_index));
    slots.stop(&[]).await;
    assert_eq!(world.traces()?, Vec::<String>::new());
    Ok(())
}

/// The lock of the earlier run goes when its last build ends.
async fn locked_start(config: &SlotsConfig, in_use: &[u16]) -> Result<Slots> {
    let start = Instant::now();
    loop {
        match Slots::start(config.clone(), in_use).await {
            Err(Error::Locked) if start.elapsed() < Duration::from_secs(5) => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            done => return Ok(done?),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_users_leave_nothing() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e6")?;
    let config = world.config("10.216.0.0/24")?;
    let slots = start(config.clone()).await?;
    ahead(&slots, 2).await?;
    let before = world.traces()?.len();
    let (mut taking, mut giving, mut waiting) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..50 {
        let clock = Instant::now();
        ahead(&slots, 2).await?;
        waiting.push(clock.elapsed());
        let clock = Instant::now();
        let slot = slots.take().await?;
        taking.push(clock.elapsed());
        let mut guest = Guest::boot(&slot)?;
        assert_eq!(heard(guest.udp(ECHO, b"hello", SOON)?)?, format!("{HOST} 5"));
        drop(guest);
        let clock = Instant::now();
        let outside = slot.outside();
        slots.give_back(slot).await;
        giving.push(clock.elapsed());
        assert!(!flows(outside)?, "the host remembers flows of {outside}");
    }
    for (what, times) in [("refill", &mut waiting), ("take", &mut taking), ("give_back", &mut giving)] {
        times.sort();
        println!("{what}: p50 {:?} max {:?}", times[times.len() / 2], times[times.len() - 1]);
    }
    ahead(&slots, 2).await?;
    assert_eq!(world.traces()?.len(), before);
    let clock = Instant::now();
    let burst = futures::future::try_join_all((0..8).map(|_| slots.take())).await?;
    println!("8 at once, 2 of them ahead: {:?}", clock.elapsed());
    let mut outsides: Vec<_> = burst.iter().map(keiki_net::Slot::outside).collect();
    outsides.sort();
    outsides.dedup();
    ensure!(outsides.len() == 8, "two slots share an address");
    slots.stop(&[]).await;
    drop(slots);
    assert_eq!(world.traces()?, Vec::<String>::new());

    let slots = start(SlotsConfig { ahead: 0, ..config }).await?;
    let mut building = Vec::new();
    for _ in 0..10 {
        let clock = Instant::now();
        slots.take().await?;
        building.push(clock.elapsed());
    }
    building.sort();
    println!("build: p50 {:?} max {:?}", building[5], building[9]);
    // A caller that goes away: what was built for it is there for the next.
    let abandoned = tokio::time::timeout(Duration::from_millis(1), slots.take()).await;
    assert!(abandoned.is_err());
    ahead(&slots, 1).await?;
    slots.stop(&[]).await;
    assert_eq!(world.traces()?, Vec::<String>::new());
    Ok(())
}

/// Does the host's connection table hold flows of this address? False where the kernel does not
/// show it.
fn flows(address: Ipv4Addr) -> Result<bool> {
    match std::fs::read_to_string("/proc/net/nf_conntrack") {
        Ok(table) => Ok(table.contains(&format!("src={address} "))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_share_a_host_but_not_a_range() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e7")?;
    let slots = start(world.config("10.217.0.0/24")?).await?;
    let other = tempfile::tempdir()?;
    let mut config = world.config("10.217.0.0/16")?;
    config.node_tag = "a0e8".parse()?;
    config.state_dir = other.path().to_owned();
    let error =
        Slots::start(config.clone(), &[]).await.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("10.217.0.0/16 collides with the slots of node a0e7"), "{error}");
    config.range = "10.77.0.0/16".parse()?;
    let error =
        Slots::start(config.clone(), &[]).await.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("collides with the route to 10.77.77.77/32 through kt-outside"), "{error}");

    config.range = "10.218.0.0/24".parse()?;
    let second = Slots::start(config.clone(), &[]).await?;
    let (one, two) = (slots.take().await?, second.take().await?);
    let before = received(&two.netns_path(), "up0")?;
    let mut guest = Guest::boot(&one)?;
    assert_eq!(guest.udp((two.outside(), PORT), b"x", NEVER)?, Reply::Prohibited);
    assert_eq!(heard(guest.udp(ECHO, b"one", SOON)?)?, format!("{HOST} 3"));
    assert_eq!(heard(Guest::boot(&two)?.udp(ECHO, b"two", SOON)?)?, format!("{HOST} 3"));
    assert!(received(&two.netns_path(), "up0")? > before);
    second.stop(&[]).await;
    assert_eq!(heard(guest.udp(ECHO, b"on", SOON)?)?, format!("{HOST} 2"));

    let checks = check("10.217.0.0/24".parse()?, None);
    let range = checks.iter().find(|check| check.name == "slot range");
    assert!(range.is_some_and(|check| !check.ok && check.detail.contains("node a0e7")), "{checks:#?}");
    assert!(check("10.217.0.0/24".parse()?, Some(&world.tag)).iter().all(|check| check.ok));
    slots.stop(&[]).await;
    Ok(())
}

const IPV4: [u8; 2] = [8, 0];
const ARP: [u8; 2] = [8, 6];

/// A UDP datagram to the echo port.
fn datagram(content: &[u8]) -> Vec<u8> {
    let length = 8 + content.len() as u16;
    let head: Vec<u8> = [50_000, PORT, length, 0].into_iter().flat_map(u16::to_be_bytes).collect();
    [&head, content].concat()
}

/// A guest whose root makes its frames by hand.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_made_by_hand_get_nowhere() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0e9")?;
    let slots = start(world.config("10.219.0.0/24")?).await?;
    let (one, two) = (slots.take().await?, slots.take().await?);
    let (mut guest, mut other) = (Guest::boot(&one)?, Guest::boot(&two)?);
    let name = format!("keiki-{}-{}", world.tag, one.index());
    let state = || run(&format!("ip -n {name} route; ip -n {name} -4 neigh show dev tap0"));
    assert_eq!(heard(guest.udp(ECHO, b"hello", SOON)?)?, format!("{HOST} 5"));
    let (before, heard_before) = (state()?, world.heard.load(Ordering::SeqCst));
    let (me, gateway, all) = (myself().mac, mac(keiki_protocol::net::GATEWAY_MAC), [0xff; 6]);

    // ARP: as the gateway, as a neighbour, with another's hardware address inside.
    for (inside, address) in [(me, GATEWAY), (me, Ipv4Addr::new(9, 9, 9, 9)), ([2, 0, 0, 0, 0, 9], GUEST)] {
        for operation in [1, 2] {
            let head = [0, 1, 8, 0, 6, 4, 0, operation];
            let body = [&head[..], &inside, &address.octets(), &gateway, &GATEWAY.octets()].concat();
            guest.raw(&all, me, ARP, &body)?;
        }
    }
    // IPv6, tagged frames, frames of other kinds, and none at all.
    let mut six = vec![0x60, 0, 0, 0, 0, 0, 59, 64];
    six.extend([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    six.extend([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    let blocked = packet(PRIVATE, 17, 0, &[], &datagram(b"x"));
    guest.raw(&[0x33, 0x33, 0, 0, 0, 1], me, [0x86, 0xdd], &six)?;
    guest.raw(&gateway, me, [0x81, 0], &[&[0, 5, 8, 0][..], &blocked].concat())?;
    guest.raw(&gateway, me, [0x88, 0xa8], &[&[0, 5, 0x81, 0, 0, 5, 8, 0][..], &blocked].concat())?;
    guest.raw(&gateway, me, [0x88, 0x63], &blocked)?;
    guest.raw(&all, me, IPV4, &blocked)?;
    // In pieces: whole, the first alone, the last alone.
    let whole = datagram(&[7; 24]);
    for (fragment, part) in [(0x2000, &whole[..16]), (2, &whole[16..])] {
        for to in [PRIVATE, LINK_LOCAL, HOST, two.outside()] {
            guest.raw(&gateway, me, IPV4, &packet(to, 17, fragment, &[], part))?;
        }
    }
    // By way of an allowed address, or of the gateway: loose and strict source routes.
    for kind in [131, 137] {
        let route = [&[kind, 7, 4][..], &PRIVATE.octets(), &[0]].concat();
        for to in [SERVER, GATEWAY] {
            guest.raw(&gateway, me, IPV4, &packet(to, 17, 0, &route, &datagram(b"routed")))?;
        }
    }
    // Redirects, and answers to nothing.
    let about = packet(SERVER, 17, 0, &[], &datagram(b"x"));
    for (kind, code) in [(5, 1), (5, 0), (3, 4), (9, 0), (13, 0), (17, 0)] {
        let mut message = [&[kind, code, 0, 0][..], &GUEST.octets(), &about[..28]].concat();
        let sum =
            message.chunks(2).fold(0_u32, |sum, pair| sum + (u32::from(pair[0]) << 8 | u32::from(pair[1])));
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        for to in [GATEWAY, HOST] {
            guest.raw(&gateway, me, IPV4, &packet(to, 1, 0, &[], &message))?;
        }
    }
    // Cut short, and with lengths that lie.
    for length in [0, 1, 14, 20] {
        guest.raw(&gateway, me, IPV4, &blocked[..length])?;
    }
    tokio::time::sleep(NEVER).await;
    assert_eq!(world.heard.load(Ordering::SeqCst), heard_before, "something arrived");
    assert!(world.on_host.recv(&mut [0; 64]).is_err(), "the host heard a guest");
    assert_eq!(state()?, before, "routes or neighbours changed");
    // In pieces to where it may go: that is no attack, and works.
    for (fragment, part) in [(0x2000, &whole[..16]), (2, &whole[16..])] {
        guest.raw(&gateway, me, IPV4, &packet(SERVER, 17, fragment, &[], part))?;
    }
    let clock = Instant::now();
    while world.heard.load(Ordering::SeqCst) == heard_before {
        ensure!(clock.elapsed() < SOON, "a datagram in pieces was lost");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(heard(other.udp(ECHO, b"me too", SOON)?)?, format!("{HOST} 6"));
    slots.stop(&[]).await;
    Ok(())
}

/// More flows than a guest may have: they end at its bound, and its neighbour does not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flows_without_end_are_the_guests_own_trouble() -> Result<()> {
    if !root() {
        return Ok(());
    }
    let world = World::new("a0ea")?;
    let slots = start(world.config("10.220.0.0/24")?).await?;
    let (one, two) = (slots.take().await?, slots.take().await?);
    let (mut guest, mut other) = (Guest::boot(&one)?, Guest::boot(&two)?);
    let before = world.heard.load(Ordering::SeqCst);
    let gateway = mac(keiki_protocol::net::GATEWAY_MAC);
    let clock = Instant::now();
    let mut sent = 0;
    while clock.elapsed() < Duration::from_secs(4) {
        for _ in 0..100 {
            sent += 1;
            let mut flow = datagram(b"x");
            flow[..2].copy_from_slice(&(10_000 + sent as u16).to_be_bytes());
            guest.raw(&gateway, myself().mac, IPV4, &packet(SERVER, 17, 0, &[], &flow))?;
        }
        assert!(matches!(other.udp(ECHO, b"mine", SOON)?, Reply::Udp(_)), "the neighbour was cut off");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let others = run(&format!(
        "ip netns exec keiki-{}-{} cat /proc/sys/net/netfilter/nf_conntrack_count",
        world.tag,
        one.index()
    ))?;
    let open: u64 = others.trim().parse()?;
    println!("{sent} sent, {} heard, {open} flows open", world.heard.load(Ordering::SeqCst) - before);
    ensure!(sent > 4096, "only {sent} were tried");
    ensure!(open <= 2048 + 64, "{open} flows are open");
    slots.stop(&[]).await;
    Ok(())
}

#[test]
fn the_guest_of_these_tests_is_the_one_of_the_protocol() {
    assert_eq!((myself().address, myself().mac), (GUEST, mac(GUEST_MAC)));
    assert!(SocketAddr::from((SERVER, PORT)).is_ipv4());
}
