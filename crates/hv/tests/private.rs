//! Memory files against the contents of RAM: for every backing, after forks and discards.

#![allow(unsafe_code)]

mod tiny;

use keiki_hv::{BLOCK, Error, GuestRam, HugePages};
use proptest::prelude::{ProptestConfig, any, prop, prop_assert_eq, proptest};
use std::{fs::File, io::Write, os::fd::AsFd, os::unix::fs::FileExt};
use tiny::in_child;
use vm_memory::{Bytes, GuestAddress};

const MIB: u64 = 9;
const SIZE: u64 = MIB << 20;
const PAGES: u64 = SIZE / 4096;

fn base() -> File {
    filled(tempfile::tempfile().unwrap())
}

/// The backing of a memory file: nothing, a disk, memory.
#[derive(Debug, Clone, Copy)]
enum Backing {
    Nothing,
    Disk,
    Memory,
}

fn backing() -> impl prop::strategy::Strategy<Value = Backing> {
    prop::sample::select(vec![Backing::Nothing, Backing::Disk, Backing::Memory])
}

fn base_on(backing: Backing) -> Option<File> {
    match backing {
        Backing::Nothing => None,
        Backing::Disk => Some(base()),
        Backing::Memory => {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            Some(filled(rustix::fs::memfd_create("base", flags).unwrap().into()))
        }
    }
}

fn filled(mut file: File) -> File {
    file.write_all(&base_content()).unwrap();
    file
}

/// Holes in it, one of them a block and more.
fn punched(file: &File) {
    for (at, len) in [(4096, 8192), (BLOCK - 4096, BLOCK + 8192), (SIZE - 4096, 4096)] {
        keiki_sys::files::punch(file, at, len).unwrap();
    }
}

/// No page is empty.
fn base_content() -> Vec<u8> {
    (0..PAGES).flat_map(|page| [page as u8 | 1; 4096]).collect()
}

fn own_pagemap() -> File {
    File::open("/proc/self/pagemap").unwrap()
}

fn content(ram: &GuestRam) -> Vec<u8> {
    let mut all = vec![0; SIZE as usize];
    ram.memory().read_slice(&mut all, GuestAddress(0)).unwrap();
    all
}

fn read(file: &File) -> Vec<u8> {
    let mut all = vec![0; SIZE as usize];
    file.read_exact_at(&mut all, 0).unwrap();
    all
}

/// A memory file of RAM, over a copy of its base.
fn written(ram: &GuestRam, over: Option<&File>) -> (Vec<u8>, keiki_hv::Written) {
    let mut file = tempfile::tempfile().unwrap();
    if let Some(base) = over {
        file.write_all(&read(base)).unwrap();
    }
    let written = ram.write_private(&ram.private(&own_pagemap()).unwrap(), &file).unwrap();
    assert_eq!(file.metadata().unwrap().len(), SIZE);
    (read(&file), written)
}

/// A change of memory.
#[derive(Debug, Clone)]
enum Change {
    Fill(u64, u8),
    Read(u64),
    Discard(u64, u64),
}

fn apply(ram: &GuestRam, change: &Change) {
    match *change {
        Change::Fill(page, value) => {
            ram.memory().write_slice(&[value; 4096], GuestAddress(page * 4096)).unwrap()
        }
        Change::Read(page) => {
            ram.memory().read_obj::<u8>(GuestAddress(page * 4096)).unwrap();
        }
        Change::Discard(page, pages) => {
            ram.discard(page * 4096, pages * 4096).unwrap();
        }
    }
}

fn change() -> impl prop::strategy::Strategy<Value = Change> {
    use prop::strategy::Strategy;
    (0..5_u8, 0..PAGES, any::<u8>(), 0..1500_u64).prop_map(|(kind, page, value, pages)| match kind {
        0..=1 => Change::Fill(page, value),
        2 => Change::Fill(page, 0),
        3 => Change::Read(page),
        _ => Change::Discard(page, pages),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_file_is_what_memory_was(
        backing in backing(),
        huge: bool,
        holes: bool,
        changes in prop::collection::vec(change(), 0..60),
        later in prop::collection::vec(change(), 0..20),
    ) {
        let base = base_on(backing);
        let over = base.as_ref();
        over.filter(|_| holes).inspect(|base| punched(base));
        let before = over.map(read);
        let ram = match over {
            Some(base) => GuestRam::over(base).unwrap(),
            None => GuestRam::anonymous(SIZE, if huge { HugePages::Advise } else { HugePages::No }).unwrap(),
        };
        changes.iter().for_each(|change| apply(&ram, change));
        let wanted = content(&ram);
        let (file, _) = written(&ram, over);
        assert!(file == wanted, "the file differs from memory");
        // The same for a copy that writes more, and for its own copy. The parent does not notice.
        let kept: Vec<_> = over.map(File::as_fd).into_iter().collect();
        let child = in_child(&kept, || {
            later.iter().for_each(|change| apply(&ram, change));
            let grandchild = in_child(&kept, || {
                apply(&ram, &Change::Fill(3, 77));
                vec![u8::from(written(&ram, over).0 == content(&ram))]
            });
            vec![u8::from(written(&ram, over).0 == content(&ram)), u8::from(grandchild == Some(vec![1]))]
        });
        prop_assert_eq!(child, Some(vec![1, 1]), "a copy wrote something else");
        assert!(content(&ram) == wanted, "the copy's writes are not ours");
        assert!(over.map(read) == before, "the base changed");
    }
}

#[test]
fn what_is_written_is_what_was_written_to() {
    let base = base();
    let ram = GuestRam::over(&base).unwrap();
    for page in [1, 2, 3, 700, PAGES - 1] {
        apply(&ram, &Change::Fill(page, 200));
    }
    apply(&ram, &Change::Fill(50, 0));
    apply(&ram, &Change::Read(60));
    apply(&ram, &Change::Discard(BLOCK / 4096, BLOCK / 4096));
    apply(&ram, &Change::Fill(BLOCK / 4096 + 5, 9));
    let (_, counts) = written(&ram, Some(&base));
    // Page 700 was discarded, then one page near it written.
    assert_eq!((counts.pages, counts.zeroed, counts.discarded), (5, 1, BLOCK));
}

#[test]
fn memory_of_zeroes_takes_no_room() {
    use std::os::unix::fs::MetadataExt;
    let base = base();
    let ram = GuestRam::over(&base).unwrap();
    for page in 0..PAGES {
        apply(&ram, &Change::Fill(page, 0));
    }
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&read(&base)).unwrap();
    let counts = ram.write_private(&ram.private(&own_pagemap()).unwrap(), &file).unwrap();
    assert_eq!((counts.pages, counts.zeroed), (0, PAGES));
    assert_eq!(file.metadata().unwrap().blocks(), 0);
}

/// Finding 3: a page map that was opened before the fork scans the parent, without an error.
#[test]
fn a_page_map_of_another_process_is_refused() {
    let ram = GuestRam::anonymous(SIZE, HugePages::No).unwrap();
    apply(&ram, &Change::Fill(3, 3));
    let parents = own_pagemap();
    assert_eq!(ram.private(&parents).unwrap().len(), 1);
    let child = in_child(&[parents.as_fd()], || {
        apply(&ram, &Change::Fill(5, 5));
        let foreign = matches!(ram.private(&parents), Err(Error::ForeignPagemap));
        let own = ram.private(&own_pagemap()).is_ok_and(|found| found.len() == 2);
        vec![u8::from(foreign), u8::from(own)]
    });
    assert_eq!(child, Some(vec![1, 1]));
    let init = File::open("/proc/1/pagemap");
    if let Ok(init) = init {
        assert!(matches!(ram.private(&init), Err(Error::ForeignPagemap)));
    }
}

/// Finding 8: populated pages are present in a copy too, without a fault for each.
#[test]
fn populated_pages_are_populated_in_a_copy() {
    let base = base();
    let faults = || {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let after = stat.rsplit_once(')').unwrap().1;
        after.split_whitespace().nth(7).unwrap().parse::<u64>().unwrap()
    };
    let in_copy = |ram: &GuestRam| {
        let child = in_child(&[], || {
            let before = faults();
            let sum: u64 = (0..PAGES).map(|page| u64::from(tiny::read_u32(ram, page * 4096))).sum();
            let taken = faults() - before;
            assert!(sum > 0);
            taken.to_le_bytes().to_vec()
        });
        u64::from_le_bytes(child.expect("the copy failed").try_into().unwrap())
    };
    let (plain, populated) = (GuestRam::over(&base).unwrap(), GuestRam::over(&base).unwrap());
    #[allow(clippy::single_range_in_vec_init)]
    populated.populate(&[0..SIZE]).unwrap();
    let (without, with) = (in_copy(&plain), in_copy(&populated));
    assert!(with * 4 < without, "{with} faults with, {without} without");
}

/// Swapped-out pages are still private. Needs root and a temporary swap file.
#[test]
fn swapped_pages_are_found() {
    if std::env::var_os("KEIKI_TEST_ALL").is_none() || !rustix::process::geteuid().is_root() {
        keiki_testing::skip("swap", "a swap file is switched on with KEIKI_TEST_ALL and as root only");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("swap");
    File::create(&path).unwrap().write_all(&vec![0; 64 << 20]).unwrap();
    let run = |program: &str| {
        std::process::Command::new(program).arg(&path).output().is_ok_and(|output| output.status.success())
    };
    if !run("mkswap") || !run("swapon") {
        keiki_testing::skip("swap", "no swap can be switched on here");
        return;
    }
    let off = SwapOff(&run);
    let base = base();
    for over in [None, Some(&base)] {
        let ram = over.map_or_else(|| GuestRam::anonymous(SIZE, HugePages::No), GuestRam::over).unwrap();
        for page in (0..PAGES).step_by(3) {
            apply(&ram, &Change::Fill(page, 5));
        }
        let span = ram.spans()[0];
        // SAFETY: the range is the RAM of this test; the advice moves pages and changes none.
        let done = unsafe { libc::madvise(span.host as *mut _, span.len as usize, libc::MADV_PAGEOUT) };
        assert_eq!(done, 0);
        let mut swapped = 0;
        for page in (0..PAGES).step_by(3) {
            let mut entry = [0; 8];
            own_pagemap().read_exact_at(&mut entry, (span.host / 4096 + page) * 8).unwrap();
            swapped += u64::from_ne_bytes(entry) >> 62 & 1;
        }
        let (mut file, private) = (tempfile::tempfile().unwrap(), ram.private(&own_pagemap()).unwrap());
        if let Some(base) = over {
            file.write_all(&read(base)).unwrap();
        }
        let counts = ram.write_private(&ram.private(&own_pagemap()).unwrap(), &file).unwrap();
        let same = read(&file) == content(&ram);
        assert!(swapped > 0, "nothing was swapped out");
        assert_eq!((private.len() as u64, counts.pages), (PAGES.div_ceil(3), PAGES.div_ceil(3)));
        assert!(same, "the file differs from memory");
    }
    drop(off);
}

/// Switches swap off again in any case.
struct SwapOff<'a>(&'a dyn Fn(&str) -> bool);

impl Drop for SwapOff<'_> {
    fn drop(&mut self) {
        (self.0)("swapoff");
    }
}
