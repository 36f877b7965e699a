use crate::{Counts, Error, Options, pack, unpack, unpack::unpack_named};
use std::{
    ffi::OsStr,
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink},
    path::Path,
};
use tar::{Builder, EntryType, Header};

fn packed(source: &Path, top: &str) -> Vec<u8> {
    let mut out = Vec::new();
    pack(source, OsStr::new(top), &mut out).unwrap();
    out
}

/// Every path below, with what it is.
fn tree(at: &Path) -> Vec<String> {
    let mut all = Vec::new();
    let mut waiting = vec![at.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = fs::symlink_metadata(&path).unwrap();
            let what = match () {
                () if meta.is_dir() => {
                    waiting.push(path.clone());
                    "dir".to_owned()
                }
                () if meta.is_symlink() => format!("-> {}", fs::read_link(&path).unwrap().display()),
                () => format!(
                    "{:?}",
                    String::from_utf8_lossy(&fs::read(&path).unwrap()[..meta.len().min(9) as usize])
                ),
            };
            let name = path.strip_prefix(at).unwrap().display().to_string();
            all.push(format!("{name} {:o} {} {what}", meta.mode() & 0o7777, meta.mtime()));
        }
    }
    all.sort();
    all
}

#[test]
fn a_tree_comes_out_as_it_went_in() {
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("from");
    let deep = from.join("a b/é\n").join("x".repeat(200)).join("y".repeat(200));
    fs::create_dir_all(&deep).unwrap();
    fs::write(deep.join("z".repeat(255)), "long").unwrap();
    fs::write(from.join("run"), "#!/bin/sh").unwrap();
    fs::set_permissions(from.join("run"), fs::Permissions::from_mode(0o4751)).unwrap();
    fs::hard_link(from.join("run"), from.join("again")).unwrap();
    symlink("/nowhere/".repeat(20), from.join("link")).unwrap();
    symlink("a b", from.join("inner")).unwrap();
    fs::create_dir(from.join("empty")).unwrap();
    fs::set_permissions(from.join("empty"), fs::Permissions::from_mode(0o1500)).unwrap();
    fs::write(from.join("nothing"), "").unwrap();
    let holes = File::create(from.join("holes")).unwrap();
    holes.set_len(64 << 20).unwrap();
    holes.write_all_at(b"end", (64 << 20) - 3).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, from.join("pipe"), rustix::fs::Mode::RWXU).unwrap();
    let old = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec { tv_sec: 5, tv_nsec: 0 },
        last_modification: rustix::fs::Timespec { tv_sec: 1_000_000, tv_nsec: 0 },
    };
    rustix::fs::futimens(File::open(from.join("empty")).unwrap(), &old).unwrap();

    let mut tar = Vec::new();
    let counts = pack(&from, OsStr::new("top"), &mut tar).unwrap();
    assert_eq!((counts.files, counts.symlinks, counts.skipped), (5, 2, 1));
    assert!(tar.len() < 1 << 20, "holes were stored: {} bytes", tar.len());
    let to = dir.path().join("to");
    fs::create_dir(&to).unwrap();
    let options = Options { special_bits: true, strip_top: true, owners: true };
    let again = unpack(tar.as_slice(), &to, options).unwrap();
    assert_eq!(Counts { skipped: 1, ..again }, counts);
    fs::remove_file(from.join("pipe")).unwrap();
    let plain = |tree: Vec<String>| {
        // The time of a symlink is not kept.
        tree.into_iter()
            .map(|line| if line.contains("->") { line.split(' ').next().unwrap().to_owned() } else { line })
            .collect::<Vec<_>>()
    };
    // Removing the pipe changed the top's time, which is not in the tree.
    assert_eq!(plain(tree(&to)), plain(tree(&from)));
    let meta = |name: &str| fs::metadata(to.join(name)).unwrap();
    assert_eq!(meta("run").ino(), meta("again").ino());
    assert!(meta("holes").blocks() * 512 < 1 << 20, "the holes were filled");

    // Once more on top, without what does not leave a sandbox.
    unpack(tar.as_slice(), dir.path(), Options::default()).unwrap();
    let top = dir.path().join("top");
    assert_eq!(fs::metadata(top.join("run")).unwrap().mode() & 0o7777, 0o751);
    unpack(tar.as_slice(), dir.path(), Options::default()).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3, "something is left beside");
}

/// An archive of entries made by hand.
fn archive(entries: &[(&str, EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (name, kind, link, data) in entries {
        let mut header = Header::new_gnu();
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_size(data.len() as u64);
        // Set raw: the library itself would refuse some of these names.
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_gnu_mut().unwrap().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        builder.append(&header, *data).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn hostile_archives_are_refused_and_leave_nothing() {
    use EntryType::{Block, Char, Directory, Fifo, Link, Regular, Symlink};
    let good = ("good", Regular, "", b"x".as_slice());
    for (entries, why) in [
        (vec![good, ("../out", Regular, "", b"x")], "leads out"),
        (vec![good, ("a/../../out", Regular, "", b"x")], "leads out"),
        (vec![good, ("/out", Regular, "", b"x")], "absolute"),
        (vec![("s", Symlink, "/OUT", b""), ("s/out", Regular, "", b"x")], "symbolic link"),
        (vec![("s", Symlink, "..", b""), ("s/out", Regular, "", b"x")], "symbolic link"),
        (vec![("s", Symlink, ".", b""), ("s/in", Regular, "", b"x")], "symbolic link"),
        (
            vec![("a", Symlink, "b", b""), ("b", Symlink, "/OUT", b""), ("a/x/y", Directory, "", b"")],
            "symbolic link",
        ),
        (vec![("s", Symlink, "/OUT", b""), ("s", Directory, "", b""), ("s/out", Regular, "", b"x")], "twice"),
        (vec![("l", Link, "/OUT/secret", b"")], "absolute"),
        (vec![("l", Link, "../secret", b"")], "leads out"),
        (vec![("s", Symlink, "/OUT/secret", b""), ("l", Link, "s", b"")], "not an earlier file"),
        (vec![("s", Symlink, "/OUT", b""), ("l", Link, "s/secret", b"")], "symbolic link"),
        (vec![("l", Link, "missing", b"")], "not an earlier file"),
        (vec![("l", Link, ".", b"")], "directory"),
        (vec![("d", Directory, "", b""), ("l", Link, "d", b"")], "not an earlier file"),
        (vec![good, ("null", Char, "", b"")], "device"),
        (vec![good, ("disk", Block, "", b"")], "device"),
        (vec![good, ("pipe", Fifo, "", b"")], "pipe"),
        (vec![good, ("odd", EntryType::new(b'9'), "", b"")], "unknown type"),
        (vec![("good", Regular, "", b"x"), ("good/x", Regular, "", b"x")], "not a directory"),
        (vec![("s", Symlink, "", b"")], "link without a target"),
        (vec![(".", Regular, "", b"x")], "must be"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (into, out) = (dir.path().join("into"), dir.path().join("OUT"));
        fs::create_dir(&into).unwrap();
        fs::create_dir(&out).unwrap();
        fs::write(out.join("secret"), "secret").unwrap();
        let named: Vec<_> = entries
            .iter()
            .map(|(name, kind, link, data)| {
                (*name, *kind, link.replace("/OUT", &out.display().to_string()), *data)
            })
            .collect();
        let entries: Vec<_> =
            named.iter().map(|(name, kind, link, data)| (*name, *kind, link.as_str(), *data)).collect();
        let said = unpack(archive(&entries).as_slice(), &into, Options::default()).unwrap_err();
        assert!(matches!(said, Error::Refused(_)), "{entries:?}: {said}");
        assert!(said.to_string().contains(why), "{entries:?}: {said}");
        assert_eq!(tree(&into), Vec::<String>::new(), "{entries:?}");
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1, "{entries:?}");
        assert_eq!(fs::metadata(out.join("secret")).unwrap().nlink(), 1, "{entries:?}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2, "{entries:?}");
    }
}

#[test]
fn links_that_were_there_before_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (into, out) = (dir.path().join("into"), dir.path().join("out"));
    fs::create_dir(&into).unwrap();
    fs::create_dir(&out).unwrap();
    fs::write(out.join("file"), "theirs").unwrap();
    symlink(&out, into.join("dir")).unwrap();
    symlink(out.join("file"), into.join("file")).unwrap();
    let inside = archive(&[("dir", EntryType::Directory, "", b""), ("dir/x", EntryType::Regular, "", b"x")]);
    let said = unpack(inside.as_slice(), &into, Options::default()).unwrap_err().to_string();
    assert!(said.contains("in the way"), "{said}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    // A file replaces a link, not what it points at.
    unpack(archive(&[("file", EntryType::Regular, "", b"ours")]).as_slice(), &into, Options::default())
        .unwrap();
    assert_eq!(fs::read(out.join("file")).unwrap(), b"theirs");
    assert_eq!(fs::read(into.join("file")).unwrap(), b"ours");
    // And a file that is where a directory is stays out.
    fs::create_dir(into.join("full")).unwrap();
    let over = archive(&[("first", EntryType::Regular, "", b"x"), ("full", EntryType::Regular, "", b"x")]);
    let said = unpack(over.as_slice(), &into, Options::default()).unwrap_err().to_string();
    assert!(said.contains("it is a directory here"), "{said}");
    assert!(!into.join("first").exists(), "half of it is left");
}

#[test]
fn what_is_not_whole_or_too_much_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), vec![7; 3000]).unwrap();
    fs::write(source.join("b"), vec![8; 3000]).unwrap();
    let whole = packed(&source, "top");
    let into = dir.path().join("into");
    fs::create_dir(&into).unwrap();
    let ends = (0..whole.len() - 1024).step_by(37).chain([0, 512, 1024, whole.len() - 1025]);
    for end in ends {
        let said = unpack(&whole[..end], &into, Options::default()).unwrap_err();
        assert!(matches!(said, Error::Damaged(_)), "{end}: {said}");
        assert_eq!(fs::read_dir(&into).unwrap().count(), 0, "{end}");
    }
    let noise: Vec<u8> = (0..5000u32).map(|n| (n * 7919 % 251) as u8).collect();
    assert!(matches!(unpack(noise.as_slice(), &into, Options::default()), Err(Error::Damaged(_))));
    // A name that never ends.
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNULongName);
    header.set_size(1 << 40);
    header.set_cksum();
    let endless = io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(b'x'));
    let said = unpack(endless, &into, Options::default()).unwrap_err();
    assert!(said.to_string().contains("headers of one entry"), "{said}");
    // A file that never ends.
    let mut header = Header::new_gnu();
    header.set_path("bomb").unwrap();
    header.set_size(1 << 60);
    header.set_mode(0o644);
    header.set_cksum();
    let refused = on_a_small_disk(c"size=20M", |disk| {
        let bomb = io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(b'x'));
        (unpack(bomb, disk, Options::default()).unwrap_err(), fs::read_dir(disk).unwrap().count())
    });
    if let Some((said, left)) = refused {
        assert!(matches!(said, Error::NoRoom { free_mib: 12 }), "{said}");
        assert_eq!(left, 0);
    }
}

/// A file system of this size for one test, and what comes of `work` in it.
fn on_a_small_disk<T>(size: &std::ffi::CStr, work: impl FnOnce(&Path) -> T) -> Option<T> {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    rustix::mount::mount("none", dir.path(), "tmpfs", rustix::mount::MountFlags::empty(), Some(size))
        .unwrap();
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(dir.path())));
    rustix::mount::unmount(dir.path(), rustix::mount::UnmountFlags::empty()).unwrap();
    Some(done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
}

/// Holes take no room, but whoever reads them reads zeros, for as long as they are large.
#[test]
fn more_holes_than_the_disk_is_large_are_refused() {
    let from = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        let file = File::create(from.path().join(name)).unwrap();
        file.set_len(40 << 20).unwrap();
        file.write_all_at(b"x", 0).unwrap();
    }
    let tar = packed(from.path(), "top");
    assert!(tar.len() < 64 << 10, "holes were stored: {} bytes", tar.len());
    let unpacked = |size| {
        on_a_small_disk(size, |disk| {
            let done = unpack(tar.as_slice(), disk, Options::default());
            done.map_err(|error| (error.to_string(), fs::read_dir(disk).unwrap().count()))
        })
    };
    let Some(done) = unpacked(c"size=64M") else { return };
    let (said, left) = done.unwrap_err();
    assert!(said.contains("larger holes than"), "{said}");
    assert_eq!(left, 0);
    assert_eq!(unpacked(c"size=96M").unwrap().unwrap().bytes, 80 << 20);
}

#[test]
fn other_file_systems_are_neither_packed_nor_unpacked_into() {
    let from = tempfile::tempdir().unwrap();
    fs::create_dir_all(from.path().join("mounted")).unwrap();
    fs::write(from.path().join("own"), "x").unwrap();
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let mount = from.path().join("mounted");
    rustix::mount::mount("none", &mount, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=1M"))
        .unwrap();
    fs::write(mount.join("other"), "x").unwrap();
    let mut tar = Vec::new();
    let counts = pack(from.path(), OsStr::new("top"), &mut tar);
    // A mount point itself is packed with what is in it.
    let inner = pack(&mount, OsStr::new("top"), io::sink());
    let into =
        archive(&[("own2", EntryType::Regular, "", b"x"), ("mounted/y", EntryType::Regular, "", b"x")]);
    let said = unpack(into.as_slice(), from.path(), Options::default());
    let left: Vec<_> = tree(from.path());
    rustix::mount::unmount(&mount, rustix::mount::UnmountFlags::empty()).unwrap();
    let counts = counts.unwrap();
    assert_eq!((counts.files, counts.dirs), (1, 2));
    assert_eq!(inner.unwrap().files, 1);
    let said = said.unwrap_err().to_string();
    assert!(said.contains("another file system"), "{said}");
    assert!(!left.iter().any(|line| line.starts_with("own2") || line.starts_with("mounted/y")), "{left:?}");
}

/// Names are held in memory: too many long ones are refused.
#[test]
fn more_names_than_memory_are_refused() {
    let long = vec!["x".repeat(250); 15].join("/");
    let mut names = (0..).map(|n| {
        let mut out = Builder::new(Vec::new());
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Directory);
        header.set_mode(0o755);
        header.set_size(0);
        out.append_data(&mut header, format!("{long}/{n}"), io::empty()).unwrap();
        let whole = out.into_inner().unwrap();
        whole[..whole.len() - 1024].to_vec()
    });
    let endless = crate::Receiver::new(move || names.next().map(|entry| (entry.into(), false)));
    let dir = tempfile::tempdir().unwrap();
    let said = unpack_named(endless, dir.path(), Options::default(), 1 << 20).unwrap_err().to_string();
    assert!(said.contains("limit for all names"), "{said}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

/// More directories beside each other, and below each other, than there are descriptors.
#[test]
fn wide_and_deep_trees_need_few_descriptors() {
    let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let few = rustix::process::Rlimit { current: Some(descriptors() as u64 + 150), maximum: most.maximum };
    let from = tempfile::tempdir().unwrap();
    fs::create_dir_all(from.path().join(vec!["d"; 400].join("/"))).unwrap();
    for n in 0..400 {
        fs::create_dir_all(from.path().join(format!("w/{n}"))).unwrap();
    }
    let whole = packed(from.path(), "top");
    let dir = tempfile::tempdir().unwrap();
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    let first = unpack(whole.as_slice(), dir.path(), Options::default());
    // Onto what is there: every directory is joined.
    let again = unpack(whole.as_slice(), dir.path(), Options::default());
    // One that is refused at its end is removed again.
    let broken = unpack(&whole[..whole.len() - 1024], dir.path(), Options::default());
    let left = fs::read_dir(dir.path()).map(Iterator::count);
    rustix::process::setrlimit(rustix::process::Resource::Nofile, most).unwrap();
    assert_eq!(first.unwrap().dirs, 802);
    assert_eq!(again.unwrap().dirs, 802);
    assert!(matches!(broken, Err(Error::Damaged(_))), "{broken:?}");
    assert_eq!(left.unwrap(), 1, "only the top");
}

/// Files come and go while a tree is packed: what is gone is left out.
#[test]
fn what_goes_while_it_is_packed_is_left_out() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("stays"), "x").unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let come_and_go = || {
            while !over.load(Ordering::Relaxed) {
                for n in 0..64 {
                    let name = |what: &str| dir.path().join(format!("{what}{n}"));
                    fs::write(name("file"), "x").unwrap();
                    symlink("file", name("link")).unwrap();
                    fs::create_dir(name("dir")).unwrap();
                    fs::write(name("dir").join("in"), "x").unwrap();
                }
                for n in 0..64 {
                    let name = |what: &str| dir.path().join(format!("{what}{n}"));
                    fs::remove_file(name("file")).unwrap();
                    fs::remove_file(name("link")).unwrap();
                    fs::remove_dir_all(name("dir")).unwrap();
                }
            }
        };
        let working = scope.spawn(come_and_go);
        let packed: Vec<_> = (0..400).map(|_| pack(dir.path(), OsStr::new("top"), io::sink())).collect();
        over.store(true, Ordering::Relaxed);
        working.join().unwrap();
        for counts in packed {
            assert!(counts.unwrap().files >= 1);
        }
    });
}

#[test]
fn a_writer_that_ends_early_ends_the_packing() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("x"), "x").unwrap();
    assert!(pack(dir.path(), OsStr::new("top"), Full).is_err());
    assert!(pack(&dir.path().join("none"), OsStr::new("top"), io::sink()).is_err());
}

proptest::proptest! {
    #[test]
    fn any_bytes_stay_inside(noise: Vec<u8>, name in "[./a]{1,12}", link in "[./a]{0,12}", kind in 0u8..8) {
        let dir = tempfile::tempdir().unwrap();
        let into = dir.path().join("into");
        fs::create_dir(&into).unwrap();
        let made = archive(&[
            ("a", EntryType::Symlink, "..", b""),
            (&name, EntryType::new(b'0' + kind), &link, &noise[..if kind == 0 { noise.len() } else { 0 }]),
            (&name, EntryType::Regular, "", b"x"),
        ]);
        let _ = unpack(made.as_slice(), &into, Options::default());
        let _ = unpack([&made[..512], &noise].concat().as_slice(), &into, Options::default());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(fs::read_dir(&into).unwrap().all(|entry| !entry.unwrap().file_name().to_string_lossy().starts_with(".keiki")));
    }
}
