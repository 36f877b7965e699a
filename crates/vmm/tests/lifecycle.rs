//! The life of a machine over its control socket: everything a node does, on a guest of a few
//! bytes.

mod monitor;

use keiki_control::{Reply, Request, Stage};
use monitor::{COUNT, CRASH, LETTERS, Monitor, OFF, SILENT, TestHost, host, until};
use std::os::unix::fs::FileExt;

fn letters(monitor: &Monitor) -> Vec<u8> {
    monitor.console().bytes().filter(u8::is_ascii_uppercase).collect()
}

/// Whether these are consecutive letters, starting after `last`.
fn follows(last: u8, letters: &[u8]) -> bool {
    let next = |letter: u8| if letter == b'Z' { b'A' } else { letter + 1 };
    letters.iter().try_fold(last, |last, letter| (*letter == next(last)).then_some(*letter)).is_some()
}

fn frozen(host: &TestHost, machine: &mut Monitor) -> Monitor {
    host.freeze(machine).0
}

#[test]
fn a_machine_boots_and_says_what_it_is() {
    let Some(host) = host() else { return };
    let mut blank = host.blank();
    let Reply::Hello(hello) = blank.call(&Request::Hello) else { panic!() };
    assert_eq!((hello.stage, hello.generation), (Stage::Blank, 0));
    let mut machine = host.boot(LETTERS);
    let Reply::Hello(hello) = machine.call(&Request::Hello) else { panic!() };
    assert_eq!((hello.stage, hello.paused, hello.generation, hello.layers), (Stage::Machine, false, 0, 1));
    until("it prints", || letters(&machine).len() > 5);
    assert!(follows(b'A', &letters(&machine)), "{:?}", machine.console());
}

#[test]
fn paused_stands_still() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
    let count = machine.peek(COUNT);
    let Reply::Hello(hello) = machine.call(&Request::Hello) else { panic!() };
    assert!(hello.paused);
    let mut zygote = frozen(&host, &mut machine);
    assert_eq!(machine.peek(COUNT), count, "a freeze does not let a paused machine run");
    let copy = host.thaw(&mut zygote);
    copy.counts();
    assert_eq!(machine.call(&Request::Resume), Reply::Done);
    assert_eq!(machine.call(&Request::Resume), Reply::Done);
    machine.counts();
}

/// Every copy prints the letter after the last one of the frozen machine, and so does the parent.
#[test]
fn many_copies_go_on_from_one_instant() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(LETTERS);
    until("it prints", || letters(&machine).len() > 3);
    assert_eq!(machine.call(&Request::Pause), Reply::Done);
    let before = letters(&machine);
    let mut zygote = frozen(&host, &mut machine);
    assert_eq!(machine.call(&Request::Resume), Reply::Done);
    let mut copies: Vec<_> = (0..4).map(|_| host.thaw(&mut zygote)).collect();
    for copy in copies.iter_mut().chain([&mut machine]) {
        copy.counts();
        until("it prints on", || letters(copy).len() > before.len() + 3);
    }
    assert!(follows(before[0] - 1, &letters(&machine)));
    for copy in &copies {
        // The parent may have printed a letter but not its line end before the freeze. Then the
        // line belongs to the parent.
        assert!(follows(*before.last().unwrap(), &letters(copy)), "{before:?} {:?}", copy.console());
    }
    let Reply::Hello(hello) = copies[0].call(&Request::Hello) else { panic!() };
    assert_eq!((hello.stage, hello.generation, hello.layers), (Stage::Machine, 2, 2));
    let Reply::Hello(hello) = machine.call(&Request::Hello) else { panic!() };
    assert_eq!(hello.layers, 2, "the old top is a lower layer of the parent too");
}

#[test]
fn copies_do_not_see_each_other() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    machine.poke(0x80_0000, 1);
    let mut zygote = frozen(&host, &mut machine);
    machine.poke(0x80_0000, 2);
    let (a, b) = (host.thaw(&mut zygote), host.thaw(&mut zygote));
    assert_eq!((a.peek(0x80_0000), b.peek(0x80_0000)), (1, 1));
    a.poke(0x80_0000, 3);
    b.poke(0x80_0000, 4);
    let c = host.thaw(&mut zygote);
    assert_eq!([&machine, &a, &b, &c].map(|m| m.peek(0x80_0000)), [2, 3, 4, 1]);
    assert_eq!(zygote.peek(0x80_0000), 1);
    for machine in [&machine, &a, &b, &c] {
        machine.counts();
    }
    let stood = zygote.peek(COUNT);
    a.counts();
    assert_eq!(zygote.peek(COUNT), stood, "a zygote runs");
}

/// Memory on both sides of the hole, and vCPUs that wait for their start.
#[test]
fn five_gib_and_four_vcpus() {
    let Some(host) = host() else { return };
    let mut machine = host.try_boot(SILENT, 4, 5 << 10).unwrap();
    machine.remember_ram(5 << 10);
    // Above the hole, which a memory file does not contain.
    let high = |machine: &Monitor| machine.ram_at(5 << 10, 4 << 30);
    machine.mem().write_all_at(b"high", high(&machine)).unwrap();
    let mut zygote = frozen(&host, &mut machine);
    zygote.ram = machine.ram;
    machine.kill();
    let (mut stored, persisted) = host.persist(&mut zygote, None);
    assert!(persisted.pages < 1000, "{persisted:?}");
    stored.shape = keiki_control::Shape { vcpus: 4, memory_mib: 5 << 10 };
    let mut loaded = host.load(&stored);
    let mut copy = host.thaw(&mut loaded);
    copy.remember_ram(5 << 10);
    let before = copy.peek_at(COUNT);
    until("it counts", || copy.peek_at(COUNT) != before);
    let mut found = [0; 4];
    copy.mem().read_exact_at(&mut found, high(&copy)).unwrap();
    assert_eq!(&found, b"high");
}

#[test]
fn machines_of_one_to_four_vcpus_are_copied_and_stored() {
    let Some(host) = host() else { return };
    for vcpus in 1..=4 {
        let mut machine = host.try_boot(SILENT, vcpus, 16).unwrap();
        machine.counts();
        let mut zygote = frozen(&host, &mut machine);
        host.thaw(&mut zygote).counts();
        let (mut stored, _) = host.persist(&mut zygote, None);
        stored.shape.vcpus = vcpus;
        host.thaw(&mut host.load(&stored)).counts();
        machine.counts();
    }
}

/// Several thaws under way on one connection: each answers for itself.
#[test]
fn copies_are_made_at_once() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    machine.counts();
    let mut zygote = frozen(&host, &mut machine);
    let mut wanted = std::collections::BTreeMap::new();
    let prepared: Vec<_> = (0..6).map(|_| (monitor::thaw_request(), host.copy_files(&zygote))).collect();
    for (request, (files, fds)) in &prepared {
        let Request::Thaw(thaw) = request else { panic!() };
        wanted.insert(thaw.generation, files.clone());
        zygote.client.ask(request, &monitor::borrow(fds)).unwrap();
    }
    for _ in &prepared {
        let answer = zygote.client.answer(monitor::PATIENCE).unwrap();
        let Reply::Thawed(thawed) = answer.reply else { panic!("{answer:?}") };
        assert_eq!(answer.pid, thawed.pid);
        let files = wanted.remove(&thawed.generation).expect("it answers once");
        host.adopt(thawed.pid, files).counts();
    }
    assert_eq!(wanted.len(), 0);
}

/// Orders of five: each is first once, and last once. All orders with `KEIKI_TEST_ALL`.
fn orders() -> Vec<Vec<usize>> {
    if std::env::var_os("KEIKI_TEST_ALL").is_none() {
        let few = [[0, 1, 2, 3, 4], [1, 3, 0, 4, 2], [2, 0, 4, 1, 3], [3, 4, 1, 2, 0], [4, 2, 3, 0, 1]];
        return few.map(Vec::from).into();
    }
    let mut orders = vec![Vec::new()];
    for next in 0..5 {
        let longer = |order: Vec<usize>| {
            (0..=order.len()).map(move |at| [&order[..at], &[next], &order[at..]].concat())
        };
        orders = orders.into_iter().flat_map(longer).collect();
    }
    orders
}

/// Invariant 3: relatives may be killed in any order. The others do not notice: machines run and
/// zygotes make machines.
#[test]
fn nobody_depends_on_a_relative() {
    let Some(host) = host() else { return };
    // Parent, its zygote, the child, the child's zygote, the grandchild.
    for order in orders() {
        let mut parent = host.boot(SILENT);
        parent.counts();
        let mut zygote = frozen(&host, &mut parent);
        let mut child = host.thaw(&mut zygote);
        let mut second = frozen(&host, &mut child);
        let grandchild = host.thaw(&mut second);
        let mut all = [parent, zygote, child, second, grandchild];
        for (at, index) in order.iter().copied().enumerate() {
            all[index].kill();
            for other in order[at + 1..].iter().copied() {
                assert!(all[other].lives(), "{other} ended with {index}, in {order:?}");
                if other % 2 == 0 {
                    all[other].counts();
                } else if at % 2 == 0 {
                    host.thaw(&mut all[other]).counts();
                }
            }
        }
    }
}

/// A blank and a zygote end with their connection to the node. A machine does not.
#[test]
fn what_outlives_the_node() {
    let Some(host) = host() else { return };
    let mut machine = host.boot(SILENT);
    let mut zygote = frozen(&host, &mut machine);
    let mut copy = host.thaw(&mut zygote);
    let mut blank = host.blank();
    for monitor in [&mut machine, &mut zygote, &mut copy] {
        drop(monitor.disconnect());
    }
    drop(blank.disconnect());
    blank.wait();
    zygote.wait();
    for monitor in [&mut machine, &mut copy] {
        monitor.counts();
        monitor.client = keiki_control::Client::connect(&monitor.files.as_ref().unwrap().socket).unwrap();
        let Reply::Hello(hello) = monitor.call(&Request::Hello) else { panic!() };
        assert_eq!(hello.stage, Stage::Machine);
    }
}

#[test]
fn a_machine_that_ends_says_why() {
    let Some(host) = host() else { return };
    for (code, word) in [(OFF, "guest-shutdown"), (CRASH, "guest-reset")] {
        let machine = host.boot(code);
        machine.wait();
        let console = machine.console();
        assert!(console.lines().any(|line| line == format!("keiki-vmm: {word}")), "{console}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_and_changes_nothing() {
    let Some(host) = host() else { return };
    let refused = |monitor: &mut Monitor, request: &Request| {
        monitor.client.call(request, &[], monitor::PATIENCE).expect_err("it was taken").to_string()
    };
    let mut blank = host.blank();
    assert_eq!(refused(&mut blank, &Request::Pause), "a blank monitor does not accept Pause");
    let mut machine = host.boot(SILENT);
    assert!(refused(&mut machine, &Request::Persist).contains("Persist needs a descriptor"));
    let mut zygote = frozen(&host, &mut machine);
    assert_eq!(refused(&mut zygote, &Request::Resume), "a zygote does not accept Resume");
    machine.counts();
    host.thaw(&mut zygote).counts();
    for (vcpus, mib, why) in
        [(0, 16, "1 to 32 vCPUs, not 0"), (33, 16, "not 33"), (1, 0, "guest memory of 0 bytes")]
    {
        let error = host.try_boot(SILENT, vcpus, mib).err().expect("it was taken").to_string();
        assert!(error.contains(why), "{error}");
    }
    let error = host.try_boot(SILENT, 1, 1).err().expect("it was taken").to_string();
    assert!(error.contains("MiB"), "{error}");
}
