//! Findings 6 and 7, counted, not timed: what a fork copies, what it costs the parent afterwards,
//! and which memory gets huge pages.

#![allow(unsafe_code)]

mod tiny;

use keiki_hv::{
    GuestRam, HugePages,
    fork::{Side, exit, fork},
};
use std::{
    fs::{self, File},
    io::Read,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{Mutex, MutexGuard, PoisonError},
};
use tiny::in_child;
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 32;
const PAGES: u64 = MIB << 8;
/// The size of a page in KiB.
const PAGE: u64 = 4;

/// The tests run one at a time: a fork of one copies the memory of the others.
static TURN: Mutex<()> = Mutex::new(());

fn my_turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&vec![1; (MIB << 20) as usize], 0).unwrap();
    file
}

fn write(ram: &GuestRam, pages: impl Iterator<Item = u64>) {
    for page in pages {
        ram.memory().write_obj(page | 1, GuestAddress(page * 4096)).unwrap();
    }
}

/// A value of smaps in KiB, summed over the mappings of this RAM.
fn kib(ram: &GuestRam, field: &str) -> u64 {
    let (from, to) = (ram.spans()[0].host, ram.spans()[0].host + ram.spans()[0].len);
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = first.split_once('-') {
            let number = |text| u64::from_str_radix(text, 16).unwrap();
            inside = number(start) < to && number(end) > from;
        } else if inside && first.strip_suffix(':') == Some(field) {
            sum += words.next().unwrap().parse::<u64>().unwrap();
        }
    }
    sum
}

/// KiB of page tables of this process.
fn tables() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmPTE:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn faults() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Returns one number from a copy.
fn asked_in_copy(what: impl FnOnce() -> u64) -> u64 {
    let answer = in_child(&[], || what().to_le_bytes().to_vec());
    u64::from_le_bytes(answer.expect("the copy failed").try_into().unwrap())
}

fn has_huge_pages() -> bool {
    let setting = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let has = setting.contains("[madvise]") || setting.contains("[always]");
    if !has {
        keiki_testing::skip("huge-pages", "this kernel gives no huge pages on request");
    }
    has
}

/// Finding 6: a copy has page tables for touched memory only.
#[test]
fn a_fork_copies_the_tables_of_what_was_touched() {
    let _turn = my_turn();
    let ram = GuestRam::anonymous(MIB << 20, HugePages::No).unwrap();
    let untouched = asked_in_copy(tables);
    write(&ram, 0..PAGES);
    let touched = asked_in_copy(tables);
    // One table for 512 pages.
    let wanted = PAGES / 512 * PAGE;
    assert!(
        touched >= untouched + wanted,
        "{touched} KiB of tables, {untouched} KiB before, {wanted} wanted"
    );
    assert!(touched < untouched + 3 * wanted, "{touched} KiB of tables, {untouched} KiB before");
    // A file mapping that was only read costs a copy nothing (the other side of finding 8).
    let read = GuestRam::over(&file()).unwrap();
    for page in 0..PAGES {
        read.memory().read_obj::<u8>(GuestAddress(page * 4096)).unwrap();
    }
    assert_eq!(kib(&read, "Rss"), PAGES * PAGE);
    assert_eq!(asked_in_copy(|| kib(&read, "Rss")), 0);
}

/// Finding 6: with huge pages a copy gets one entry where it would get 512.
#[test]
fn a_fork_copies_huge_pages_whole() {
    let _turn = my_turn();
    if !has_huge_pages() {
        return;
    }
    let huge = GuestRam::anonymous(MIB << 20, HugePages::Advise).unwrap();
    write(&huge, 0..PAGES);
    let have = kib(&huge, "AnonHugePages");
    assert!(have >= PAGES * PAGE / 2, "{have} KiB of huge pages");
    assert_eq!(asked_in_copy(|| kib(&huge, "AnonHugePages")), have, "the copy has others");
    let small = GuestRam::anonymous(MIB << 20, HugePages::No).unwrap();
    write(&small, 0..PAGES);
    // Its mapping may lie beside another one with huge pages. The advice distinguishes them.
    assert_eq!(asked_in_copy(|| kib(&small, "AnonHugePages")), 0);
}

/// Finding 6: after a fork the parent pays once for each page that it writes while the copy exists.
#[test]
fn each_page_that_is_written_after_a_fork_is_copied_once() {
    let _turn = my_turn();
    for base in [None, Some(file())] {
        let over = base.as_ref().map(GuestRam::over);
        let ram = over.unwrap_or_else(|| GuestRam::anonymous(MIB << 20, HugePages::No)).unwrap();
        write(&ram, 0..PAGES);
        let rewrite = || {
            let before = faults();
            write(&ram, (0..PAGES).step_by(2));
            faults() - before
        };
        let quiet = rewrite();
        let (hold, release) = std::io::pipe().unwrap();
        let copy = begin_waiting(hold);
        let (first, second) = (rewrite(), rewrite());
        let shared = kib(&ram, "Shared_Dirty");
        let own = kib(&ram, "Private_Dirty");
        drop(release);
        let _ = rustix::process::waitpid(Some(copy), rustix::process::WaitOptions::empty());
        assert!(quiet < 100 && second < 100, "{quiet} and {second} faults where there is nothing to copy");
        assert!((PAGES / 2..PAGES / 2 + 100).contains(&first), "{first} faults for {} pages", PAGES / 2);
        let half = PAGES / 2 * PAGE;
        assert!(is_about(shared, half) && is_about(own, half), "{shared} KiB are shared, {own} private");
        // Without the copy all memory belongs to the parent again, and nothing is copied.
        let (shared, own) = (kib(&ram, "Shared_Dirty"), kib(&ram, "Private_Dirty"));
        assert!(is_about(own, 2 * half) && is_about(shared, 0), "{shared} KiB are shared, {own} private");
    }
}

/// Anonymous memory may be one mapping with a stack, or whatever lies beside it.
fn is_about(kib: u64, wanted: u64) -> bool {
    (wanted..wanted + 100 * PAGE).contains(&kib)
}

/// A copy that ends when the pipe closes.
fn begin_waiting(mut hold: std::io::PipeReader) -> rustix::process::Pid {
    match fork(&[hold.as_fd()]).unwrap() {
        Side::Child => {
            let _ = hold.read(&mut [0]);
            exit(0)
        }
        Side::Parent { child } => rustix::process::Pid::from_raw(child as i32).unwrap(),
    }
}

/// Finding 7: pages written to a private file mapping are small, whatever the advice. So a machine
/// thawed from files has small pages where the file has data (RFD 009).
#[test]
fn over_data_of_a_file_there_are_no_huge_pages() {
    let _turn = my_turn();
    if !has_huge_pages() {
        return;
    }
    let base = file();
    let ram = GuestRam::over(&base).unwrap();
    let span = ram.spans()[0];
    // SAFETY: the range is the RAM of this test; the advice changes nothing that it holds.
    let done = unsafe { libc::madvise(span.host as *mut _, span.len as usize, libc::MADV_HUGEPAGE) };
    assert_eq!(done, 0);
    write(&ram, 0..PAGES);
    assert_eq!((kib(&ram, "AnonHugePages"), kib(&ram, "Private_Dirty")), (0, PAGES * PAGE));
    let anonymous = GuestRam::anonymous(MIB << 20, HugePages::Advise).unwrap();
    write(&anonymous, 0..PAGES);
    assert!(kib(&anonymous, "AnonHugePages") > 0, "no huge pages here: this test shows nothing");
}

/// Memory that a stored machine left free, and memory that the guest gave back later, has huge
/// pages in a thawed machine, and a fork copies them whole.
#[test]
fn holes_of_a_file_are_filled_with_huge_pages() {
    let _turn = my_turn();
    if !has_huge_pages() {
        return;
    }
    const HALF: u64 = MIB << 19;
    let base = file();
    keiki_sys::files::punch(&base, HALF, HALF).unwrap();
    let ram = GuestRam::over(&base).unwrap();
    write(&ram, PAGES / 2..PAGES);
    let half = PAGES / 2 * PAGE;
    assert!(kib(&ram, "AnonHugePages") >= half * 3 / 4, "{} KiB of huge pages", kib(&ram, "AnonHugePages"));
    assert!(is_about(kib(&ram, "Anonymous"), half));
    assert_eq!(ram.discard(0, HALF).unwrap(), HALF);
    write(&ram, 0..PAGES / 2);
    let all = kib(&ram, "AnonHugePages");
    assert!(all >= half * 3 / 2, "{all} KiB of huge pages");
    assert_eq!(asked_in_copy(|| kib(&ram, "AnonHugePages")), all, "the copy has others");
    let read: u64 = ram.memory().read_obj(GuestAddress(HALF)).unwrap();
    assert_eq!(read, (PAGES / 2) | 1);
}
