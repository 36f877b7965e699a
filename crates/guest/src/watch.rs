//! Reports changes below a path, as inotify sees them.
//!
//! The kernel's queue is the limit: it fills if the caller reads slowly, and `overflow` then says
//! that events are missing. Directories are watched one by one. A new directory is watched together
//! with its present contents, whose creation may be reported twice but is never missed. Contents
//! are reported in batches, each after the one before has been sent.

use crate::files::{FileError, absolute};
use keiki_protocol::guest::WatchEvent;
use rustix::{
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};
use std::{
    collections::HashMap,
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    os::{fd::OwnedFd, unix::ffi::OsStrExt},
    path::{Path, PathBuf},
    time::Duration,
};
use tokio::{io::Interest, sync::mpsc, task::spawn_blocking};
use tonic::Status;

/// Most directories of one watch; the kernel may allow fewer.
const MAX_DIRS: usize = 16_384;
/// Bytes of events read at once.
const READ: usize = 16 << 10;
/// Size of a batch of events about the contents of new directories.
const MAX_BATCH: usize = 256;
/// Longest time between the two halves of a move.
const MOVE: Duration = Duration::from_millis(10);

/// Watches until the caller is gone or the watched path is removed.
pub async fn watch(
    path: Vec<u8>,
    recursive: bool,
    sender: mpsc::Sender<Result<WatchEvent, Status>>,
) -> Result<(), FileError> {
    let begun = spawn_blocking(move || Watcher::begin(absolute(&path)?, recursive)).await;
    let mut watcher = begun.map_err(|error| FileError::Invalid(error.to_string()))??;
    let fd = watcher.fd.try_clone().map_err(|error| watcher.failed(error))?;
    let fd = crate::sys::watch(fd, Interest::READABLE).map_err(|error| watcher.failed(error))?;
    let mut events =
        vec![WatchEvent { kind: "ready".into(), path: bytes(&watcher.root), ..WatchEvent::default() }];
    loop {
        for event in events {
            if sender.send(Ok(event)).await.is_err() {
                return Ok(());
            }
        }
        if watcher.over {
            return Ok(());
        }
        // The descriptor becomes readable again only after everything was read.
        if watcher.drained {
            tokio::select! {
                ready = fd.readable() => ready.map_err(|error| watcher.failed(error))?.clear_ready(),
                () = sender.closed() => return Ok(()),
            }
        }
        // On another thread: it may walk new directories.
        let reading = spawn_blocking(move || {
            let events = watcher.read();
            (watcher, events)
        });
        let (same, read) = reading.await.map_err(|error| FileError::Invalid(error.to_string()))?;
        watcher = same;
        events = read?;
    }
}

struct Watcher {
    fd: OwnedFd,
    root: PathBuf,
    recursive: bool,
    dirs: HashMap<i32, PathBuf>,
    /// New directories that are not watched yet.
    fresh: Vec<PathBuf>,
    /// The directory that is being listed.
    listing: Option<fs::ReadDir>,
    over: bool,
    drained: bool,
}

fn bytes(path: &Path) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(path.as_os_str().as_bytes())
}

fn event(kind: &str, path: &Path, is_dir: bool) -> WatchEvent {
    WatchEvent { kind: kind.into(), path: bytes(path), is_dir, ..WatchEvent::default() }
}

const OF_ALL: WatchFlags = WatchFlags::MODIFY
    .union(WatchFlags::CLOSE_WRITE)
    .union(WatchFlags::ATTRIB)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF);
const OF_DIRS: WatchFlags = OF_ALL
    .union(WatchFlags::CREATE)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::ONLYDIR)
    .union(WatchFlags::DONT_FOLLOW);

impl Watcher {
    fn begin(path: &Path, recursive: bool) -> Result<Self, FileError> {
        let failed = |error: io::Error| FileError::System { path: path.display().to_string(), error };
        // The path itself may be a link; links below it are not followed.
        let root = fs::canonicalize(path).map_err(failed)?;
        let fd = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK);
        let fd = fd.map_err(|error| failed(error.into()))?;
        let mut watcher = Self {
            fd,
            root: root.clone(),
            recursive,
            dirs: HashMap::new(),
            fresh: Vec::new(),
            listing: None,
            over: false,
            drained: true,
        };
        if root.is_dir() {
            watcher.fresh.push(root);
            while watcher.scan(|_| true)? {}
        } else {
            let watch = inotify::add_watch(&watcher.fd, &root, OF_ALL);
            let watch = watch.map_err(|error| watcher.failed(error.into()))?;
            watcher.dirs.insert(watch, root);
        }
        Ok(watcher)
    }

    fn failed(&self, error: io::Error) -> FileError {
        FileError::System { path: self.root.display().to_string(), error }
    }

    /// Watches one more new directory and, if `recursive`, lists it for directories below. Calls
    /// `emit` for its contents until that returns false. False if there was nothing left to do.
    fn scan(&mut self, mut emit: impl FnMut(WatchEvent) -> bool) -> Result<bool, FileError> {
        if let Some(listing) = &mut self.listing {
            while let Some(Ok(entry)) = listing.next() {
                let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
                if is_dir {
                    if self.dirs.len() + self.fresh.len() >= MAX_DIRS {
                        return Err(self.too_many());
                    }
                    self.fresh.push(entry.path());
                }
                if !emit(event("created", &entry.path(), is_dir)) {
                    return Ok(true);
                }
            }
            self.listing = None;
        }
        let Some(dir) = self.fresh.pop() else { return Ok(false) };
        match inotify::add_watch(&self.fd, &dir, OF_DIRS) {
            Ok(watch) => drop(self.dirs.insert(watch, dir.clone())),
            // Gone again, or replaced.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) if dir != self.root => return Ok(true),
            Err(Errno::NOSPC) => return Err(self.too_many()),
            Err(error) => {
                return Err(FileError::System { path: dir.display().to_string(), error: error.into() });
            }
        }
        if self.recursive {
            self.listing = fs::read_dir(&dir).ok();
        }
        Ok(true)
    }

    fn too_many(&self) -> FileError {
        let name = self.root.display();
        FileError::TooMany(format!("{name}: too many directories to watch; watch a subdirectory"))
    }

    /// Forgets a directory that was moved or removed, and those below it.
    fn drop_tree(&mut self, top: &Path) {
        self.fresh.retain(|dir| !dir.starts_with(top));
        let gone = self.dirs.extract_if(|_, dir| dir.starts_with(top)).map(|(watch, _)| watch);
        for watch in gone.collect::<Vec<_>>() {
            // The kernel may have removed it.
            let _ = inotify::remove_watch(&self.fd, watch);
        }
    }

    /// The contents of new directories or, once all of them are reported, new events of the kernel.
    fn read(&mut self) -> Result<Vec<WatchEvent>, FileError> {
        let mut events = Vec::new();
        self.drained = false;
        loop {
            let more = self.scan(|event| {
                events.push(event);
                events.len() < MAX_BATCH
            })?;
            match (more, events.is_empty()) {
                (false, true) => break,
                (false, false) => return Ok(events),
                (true, _) if events.len() >= MAX_BATCH => return Ok(events),
                (true, _) => {}
            }
        }
        let mut buffer = vec![MaybeUninit::uninit(); READ];
        let fd = self.fd.try_clone().map_err(|error| self.failed(error))?;
        let mut reader = Reader::new(fd, &mut buffer);
        // The first half of a move.
        let mut departed = None;
        let mut retries = 1;
        loop {
            let raw = match reader.next() {
                Ok(raw) => raw,
                // The kernel reports a move in two steps: where from, and a moment later where to.
                Err(Errno::AGAIN) if departed.is_some() && retries > 0 => {
                    retries -= 1;
                    std::thread::sleep(MOVE);
                    continue;
                }
                Err(Errno::AGAIN) => {
                    self.drained = true;
                    break;
                }
                Err(Errno::INTR) => continue,
                Err(error) => return Err(self.failed(error.into())),
            };
            let raw = Raw {
                flags: raw.events(),
                watch: raw.wd(),
                cookie: raw.cookie(),
                name: raw.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).to_owned()),
            };
            self.translate(raw, &mut departed, &mut events)?;
            if self.over {
                return Ok(events);
            }
            if reader.is_buffer_empty() && departed.is_none() {
                break;
            }
        }
        if let Some(gone) = departed {
            events.push(event("removed", &gone.path, gone.is_dir));
        }
        Ok(events)
    }

    /// Translates one event of the kernel.
    fn translate(
        &mut self,
        raw: Raw,
        departed: &mut Option<Departed>,
        events: &mut Vec<WatchEvent>,
    ) -> Result<(), FileError> {
        let Raw { flags, watch, cookie, name } = raw;
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            return self.overflown(events);
        }
        let Some(dir) = self.dirs.get(&watch).cloned() else { return Ok(()) };
        let path = name.map_or_else(|| dir.clone(), |name| dir.join(name));
        let is_dir = flags.contains(ReadFlags::ISDIR);
        let arrives = |from: &mut Departed| flags.contains(ReadFlags::MOVED_TO) && from.cookie == cookie;
        if let Some(gone) = departed.take_if(|from| !arrives(from)) {
            events.push(event("removed", &gone.path, gone.is_dir));
        }
        match () {
            () if flags.contains(ReadFlags::IGNORED) => drop(self.dirs.remove(&watch)),
            () if flags.intersects(ReadFlags::DELETE_SELF | ReadFlags::MOVE_SELF) => {
                // For directories below, the parent reports it.
                if dir == self.root {
                    events.push(event("removed", &dir, is_dir));
                    self.over = true;
                }
            }
            () if flags.contains(ReadFlags::MOVED_FROM) => {
                self.drop_tree(&path);
                *departed = Some(Departed { cookie, path, is_dir });
            }
            () if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) => {
                events.push(match departed.take() {
                    Some(from) => WatchEvent { from: bytes(&from.path), ..event("moved", &path, is_dir) },
                    None => event("created", &path, is_dir),
                });
                if is_dir && self.recursive {
                    self.fresh.push(path);
                }
            }
            () if flags.contains(ReadFlags::DELETE) => events.push(event("removed", &path, is_dir)),
            () if flags.contains(ReadFlags::MODIFY) => events.push(event("modified", &path, is_dir)),
            () if flags.contains(ReadFlags::CLOSE_WRITE) => events.push(event("closed", &path, is_dir)),
            () if flags.contains(ReadFlags::ATTRIB) => events.push(event("attributes", &path, is_dir)),
            () => {}
        }
        Ok(())
    }

    /// The kernel has dropped events.
    fn overflown(&mut self, events: &mut Vec<WatchEvent>) -> Result<(), FileError> {
        let root = self.root.clone();
        events.push(event("overflow", &root, false));
        if !root.exists() {
            // The event of its removal is among the missing ones.
            events.push(event("removed", &root, false));
            self.over = true;
        } else if self.recursive {
            // Finds directories that appeared in the meantime; their contents are not reported
            // again.
            self.fresh.push(root);
            while self.scan(|_| true)? {}
        }
        Ok(())
    }
}

/// One event of the kernel.
struct Raw {
    flags: ReadFlags,
    watch: i32,
    cookie: u32,
    name: Option<std::ffi::OsString>,
}

/// The first half of a move.
struct Departed {
    cookie: u32,
    path: PathBuf,
    is_dir: bool,
}

#[cfg(test)]
mod tests {
    use super::watch;
    use std::{fs, os::unix::ffi::OsStrExt, path::Path, time::Duration};
    use tokio::sync::mpsc;

    /// The events during `work`, as `kind name` below the root.
    async fn events_of(root: &Path, recursive: bool, work: impl FnOnce(&Path)) -> Vec<String> {
        let (sender, mut events) = mpsc::channel(4);
        let path = root.as_os_str().as_bytes().to_vec();
        let watching = tokio::spawn(watch(path, recursive, sender));
        assert_eq!(events.recv().await.unwrap().unwrap().kind, "ready");
        work(root);
        let mut all = Vec::new();
        while let Ok(Some(event)) = tokio::time::timeout(Duration::from_millis(300), events.recv()).await {
            let event = event.unwrap();
            let name =
                |bytes: &[u8]| String::from_utf8_lossy(bytes).replacen(&root.display().to_string(), "", 1);
            let from =
                if event.from.is_empty() { String::new() } else { format!("{} -> ", name(&event.from)) };
            all.push(format!(
                "{} {from}{}{}",
                event.kind,
                name(&event.path),
                if event.is_dir { "/" } else { "" }
            ));
        }
        drop(events);
        watching.await.unwrap().unwrap();
        all
    }

    #[tokio::test]
    async fn changes_are_reported_by_kind_and_path() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let all = events_of(dir.path(), true, |root| {
            fs::write(root.join("sub/a"), "x").unwrap();
            fs::rename(root.join("sub/a"), root.join("b")).unwrap();
            fs::remove_file(root.join("b")).unwrap();
        });
        let all = all.await;
        assert_eq!(
            all,
            ["created /sub/a", "modified /sub/a", "closed /sub/a", "moved /sub/a -> /b", "removed /b"]
        );
        let flat = events_of(dir.path(), false, |root| {
            fs::write(root.join("sub/a"), "x").unwrap();
            fs::write(root.join("c"), "").unwrap();
        });
        assert_eq!(flat.await, ["created /c", "closed /c"]);
        let file = dir.path().join("c");
        let of_a_file = events_of(&file, true, |file| fs::write(file, "y").unwrap());
        assert_eq!(of_a_file.await.first().map(String::as_str), Some("modified "));
    }

    #[tokio::test]
    async fn new_and_moved_directories_are_watched() {
        let dir = tempfile::tempdir().unwrap();
        let all = events_of(dir.path(), true, |root| {
            fs::create_dir_all(root.join("x/y/z")).unwrap();
            fs::write(root.join("x/y/z/f"), "").unwrap();
        });
        let all = all.await;
        for wanted in ["created /x/", "created /x/y/", "created /x/y/z/", "created /x/y/z/f"] {
            assert!(all.iter().any(|event| event == wanted), "{wanted}: {all:?}");
        }
        let all = events_of(dir.path(), true, |root| {
            fs::rename(root.join("x/y"), root.join("w")).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            fs::write(root.join("w/z/g"), "").unwrap();
        });
        let all = all.await;
        assert!(all.contains(&"moved /x/y -> /w/".to_owned()), "{all:?}");
        assert!(all.contains(&"created /w/z/g".to_owned()), "{all:?}");
    }

    /// A large directory that is moved in is reported completely, in batches that wait for the
    /// receiver.
    #[tokio::test]
    async fn a_large_directory_is_reported_in_batches() {
        const FILES: usize = 20_000;
        let dir = tempfile::tempdir().unwrap();
        let (root, full) = (dir.path().join("root"), dir.path().join("full"));
        fs::create_dir(&root).unwrap();
        fs::create_dir_all(full.join("sub")).unwrap();
        for n in 0..FILES {
            fs::write(full.join(if n % 2 == 0 { "" } else { "sub" }).join(n.to_string()), "").unwrap();
        }
        let mut watcher = super::Watcher::begin(&root, true).unwrap();
        fs::rename(&full, root.join("full")).unwrap();
        let (mut reported, mut most) = (std::collections::HashSet::new(), 0);
        while reported.len() < FILES + 2 {
            let step = watcher.read().unwrap();
            most = most.max(step.len());
            assert!(!step.is_empty(), "only {} of {FILES} were reported", reported.len());
            reported.extend(step.into_iter().map(|event| event.path));
        }
        assert!(most <= super::MAX_BATCH, "{most} at once");
        assert!(watcher.read().unwrap().is_empty(), "something was reported twice");
        fs::write(root.join("full/sub/later"), "").unwrap();
        assert_eq!(watcher.read().unwrap().first().map(|event| event.kind.as_str()), Some("created"));
    }

    #[tokio::test]
    async fn an_overflow_is_reported_and_the_removal_ends_the_watch() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        let (sender, mut events) = mpsc::channel(1);
        let watching = tokio::spawn(watch(root.as_os_str().as_bytes().to_vec(), false, sender));
        events.recv().await.unwrap().unwrap();
        let limit = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap();
        let limit: usize = limit.trim().parse().unwrap();
        let inside = root.clone();
        let flood = move || {
            for n in 0..limit {
                fs::write(inside.join((n % 500).to_string()), "x").unwrap();
            }
        };
        tokio::task::spawn_blocking(flood).await.unwrap();
        fs::remove_dir_all(&root).unwrap();
        let mut kinds = Vec::new();
        let rest = async {
            while let Some(event) = events.recv().await {
                kinds.push(event.unwrap().kind);
            }
        };
        tokio::time::timeout(Duration::from_secs(20), rest).await.expect("it does not end");
        watching.await.unwrap().unwrap();
        assert!(kinds.iter().any(|kind| kind == "overflow"), "{} events and no overflow", kinds.len());
        assert!(kinds.len() <= limit * 2, "{} events were kept", kinds.len());
    }
}
