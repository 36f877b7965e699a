//! The page scan against ground truth: pages are private exactly when they were written.
#![allow(unsafe_code)]

use keiki_sys::pages::{PAGE, file_pages, private_pages, private_pages_by_entry, read_memory};
use proptest::prelude::{ProptestConfig, any, prop, prop_assert_eq, proptest};
use std::{collections::BTreeSet, fs::File, io::Write, ops::Range};

const PAGES: usize = 300;

/// A mapping that is unmapped at the end.
struct Mapping {
    at: *mut u8,
    len: usize,
}

impl Mapping {
    fn new(file: Option<&File>) -> Self {
        Self::of(PAGES, file)
    }

    fn of(pages: usize, file: Option<&File>) -> Self {
        let len = pages * 4096;
        let (flags, fd) = match file {
            Some(file) => (libc::MAP_PRIVATE, std::os::fd::AsRawFd::as_raw_fd(file)),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0)
        };
        assert_ne!(at, libc::MAP_FAILED, "mmap failed");
        Self { at: at.cast(), len }
    }

    fn range(&self) -> Range<u64> {
        self.at as u64..self.at as u64 + self.len as u64
    }

    fn write(&self, page: usize, value: u8) {
        assert!(page * 4096 < self.len);
        // SAFETY: the page lies in the mapping, which is writable and ours alone.
        unsafe { self.at.add(page * 4096 + 7).write_volatile(value) };
    }

    fn read(&self, page: usize) -> u8 {
        assert!(page < PAGES);
        // SAFETY: the page lies in the mapping, which is readable.
        unsafe { self.at.add(page * 4096).read_volatile() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nothing points into it any more.
        unsafe { libc::munmap(self.at.cast(), self.len) };
    }
}

fn pages(mapping: &Mapping, ranges: &[Range<u64>]) -> BTreeSet<usize> {
    let base = mapping.range().start;
    let page = |address: u64| ((address - base) / PAGE) as usize;
    ranges.iter().flat_map(|range| page(range.start)..page(range.end)).collect()
}

/// Whether the ranges are joined and in order, as documented.
fn tidy(ranges: &[Range<u64>]) -> bool {
    ranges.iter().all(|range| range.start < range.end)
        && ranges.windows(2).all(|pair| matches!(pair, [a, b] if a.end < b.start))
}

fn ones() -> File {
    let mut file = tempfile::tempfile().expect("a temporary file");
    file.write_all(&vec![1; PAGES * 4096]).expect("room for it");
    file
}

/// Forks a child that touches pages of its inherited mapping and waits; calls `look` meanwhile.
fn with_child(mapping: &Mapping, writes: &BTreeSet<usize>, look: impl FnOnce(u32)) {
    let mut ready = [0; 2];
    // SAFETY: `ready` has room for the two descriptors.
    assert_eq!(unsafe { libc::pipe(ready.as_mut_ptr()) }, 0);
    // SAFETY: the child only writes to memory it has and makes system calls.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        for page in writes {
            mapping.write(*page, 3);
        }
        // SAFETY: the byte lives; then the child waits for its end.
        unsafe {
            libc::write(ready[1], [1_u8].as_ptr().cast(), 1);
            loop {
                libc::pause();
            }
        }
    }
    let mut byte = [0_u8];
    // SAFETY: the buffer has room for one byte.
    assert_eq!(unsafe { libc::read(ready[0], byte.as_mut_ptr().cast(), 1) }, 1);
    look(pid as u32);
    // SAFETY: the child is ours; its number cannot be another's before it is waited for.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
        libc::close(ready[0]);
        libc::close(ready[1]);
    }
}

/// Pages that were only read. Their neighbours may be mapped too.
#[test]
fn what_was_read_of_a_file_is_found() {
    let own = File::open("/proc/self/pagemap").expect("our own");
    let of_file = |mapping: &Mapping| {
        let found = file_pages(&own, mapping.range()).expect("our own");
        assert!(tidy(&found));
        pages(mapping, &found)
    };
    let anonymous = Mapping::new(None);
    [3, 4, 200].iter().for_each(|page| anonymous.write(*page, 1));
    assert_eq!(of_file(&anonymous), BTreeSet::new());
    let file = ones();
    let mapping = Mapping::new(Some(&file));
    assert_eq!(of_file(&mapping), BTreeSet::new());
    mapping.write(5, 2);
    assert_eq!(mapping.read(250), 1);
    let found = of_file(&mapping);
    // The kernel decides how many neighbours it maps.
    assert!(found.contains(&250) && !found.contains(&5), "{found:?}");
    let private = private_pages(&own, mapping.range()).expect("our own");
    assert_eq!(pages(&mapping, &private), BTreeSet::from([5]));
}

/// The kernel returns ranges by the hundred, and does not always report correctly where it stopped.
#[test]
fn many_ranges_are_each_found_once() {
    for ranges in [511, 512, 513, 768, 1024, 4095, 4096, 4097, 9000] {
        let mapping = Mapping::of(ranges * 3, None);
        let writes: Vec<usize> = (0..ranges).map(|range| range * 3).collect();
        writes.iter().for_each(|page| mapping.write(*page, 2));
        let pagemap = File::open("/proc/self/pagemap").expect("our own");
        let scanned = private_pages(&pagemap, mapping.range()).expect("a scan");
        assert_eq!(scanned.len(), ranges);
        assert!(tidy(&scanned));
        assert_eq!(pages(&mapping, &scanned), writes.into_iter().collect());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn written_pages_are_found_and_no_others(
        on_file: bool,
        reads in prop::collection::btree_set(0..PAGES, 0..PAGES),
        writes in prop::collection::btree_set(0..PAGES, 0..PAGES),
        later in prop::collection::btree_set(0..PAGES, 0..20),
    ) {
        let file = ones();
        let mapping = Mapping::new(on_file.then_some(&file));
        for page in &reads {
            prop_assert_eq!(mapping.read(*page), u8::from(on_file));
        }
        for page in &writes {
            mapping.write(*page, 2);
        }
        let pagemap = File::open("/proc/self/pagemap")?;
        let scanned = private_pages(&pagemap, mapping.range())?;
        assert!(tidy(&scanned));
        prop_assert_eq!(&pages(&mapping, &scanned), &writes);
        // The old way does not recognise the zero page, so it also reports read pages of anonymous
        // memory.
        let read = private_pages_by_entry(&pagemap, mapping.range())?;
        assert!(tidy(&read));
        let mut allowed = writes.clone();
        if !on_file {
            allowed.extend(&reads);
        }
        prop_assert_eq!(&pages(&mapping, &read), &allowed);
        // A forked child has the private pages of its parent and those that it writes.
        let mut of_child = writes.clone();
        of_child.extend(&later);
        let mut seen = (BTreeSet::new(), Vec::new());
        with_child(&mapping, &later, |pid| {
            let pagemap = File::open(format!("/proc/{pid}/pagemap")).expect("our child's pagemap");
            let scanned = private_pages(&pagemap, mapping.range()).expect("a scan");
            seen.0 = pages(&mapping, &scanned);
            for page in &later {
                let mut bytes = [0; 8];
                let address = mapping.range().start + (*page as u64) * PAGE;
                read_memory(pid, address, &mut bytes).expect("its memory");
                seen.1.push(bytes[7]);
            }
        });
        prop_assert_eq!(&seen.0, &of_child);
        prop_assert_eq!(seen.1, vec![3; later.len()]);
        let again = private_pages(&pagemap, mapping.range())?;
        prop_assert_eq!(&pages(&mapping, &again), &writes, "the child's writes are not ours");
    }

    #[test]
    fn a_part_of_a_mapping_can_be_asked_for(
        writes in prop::collection::btree_set(0..PAGES, 0..PAGES),
        ends in any::<(prop::sample::Index, prop::sample::Index)>(),
    ) {
        let file = ones();
        let mapping = Mapping::new(Some(&file));
        for page in &writes {
            mapping.write(*page, 2);
        }
        let (a, b) = (ends.0.index(PAGES + 1), ends.1.index(PAGES + 1));
        let (from, to) = (a.min(b), a.max(b));
        let base = mapping.range().start;
        let asked = base + from as u64 * PAGE..base + to as u64 * PAGE;
        let pagemap = File::open("/proc/self/pagemap")?;
        let wanted: BTreeSet<_> = writes.into_iter().filter(|page| (from..to).contains(page)).collect();
        prop_assert_eq!(&pages(&mapping, &private_pages(&pagemap, asked.clone())?), &wanted);
        prop_assert_eq!(&pages(&mapping, &private_pages_by_entry(&pagemap, asked)?), &wanted);
    }
}
