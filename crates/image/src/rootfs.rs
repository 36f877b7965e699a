//! Root disks: a minimal distribution and some packages, as one sparse ext4 image.
//!
//! mmdebstrap creates the tree without mounts, and mkfs fills the image from the tree, so nothing
//! is mounted and no loop device is used. Nothing that identifies a machine or this host is in the
//! image: no machine ID, no SSH host keys, no `resolv.conf`.

use crate::{
    Builder, apt, cache,
    error::{Error, Result, io_error},
    spec::RootfsSpec,
    tool::Tool,
    wheels,
};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{MetadataExt, symlink},
    path::{Path, PathBuf},
    time::Instant,
};

/// No manuals and no translations. Licences stay.
const DPKG_OPTIONS: [&str; 6] = [
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/bug/*",
];

/// What mmdebstrap must not do: mount, and create device nodes (the guest's devtmpfs has them).
/// Packages stay in the tree's archive until they are copied out.
const SKIP: &str = "chroot/mount,output/dev,output/mknod,download/empty,essential/unlink";

/// Lines of mmdebstrap that start a step. Their number is fixed, so progress can be counted.
const STEPS: [&str; 6] = [
    "running apt-get update",
    "downloading packages",
    "extracting archives",
    "installing essential packages",
    "installing remaining packages",
    "cleaning package lists",
];

/// The same for all disks: equal recipes give equal disks.
const FS_UUID: &str = "6b65696b-6900-4000-8000-000000000001";
const HASH_SEED: &str = "6b65696b-6900-4000-8000-000000000002";
/// The time in all disks, in seconds since 1970: 2025-01-01.
const FS_TIME: &str = "1735689600";
/// Enough for a sandbox. The default for this size is four times as large, and all of it is written
/// eventually.
const JOURNAL_MIB: u32 = 16;

/// The default PATH of a guest.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Reseeds the random numbers of Python programs in copies.
const PYTHON_MODULE: &str = include_str!("../guest/keiki_generation.py");

/// A finished root disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rootfs {
    /// The sparse image.
    pub raw: PathBuf,
    /// `NAME VERSION` of each package, sorted.
    pub packages: Vec<String>,
    /// Digest of the recipe, all package versions and the builder.
    pub digest: String,
    /// Bytes allocated.
    pub used_bytes: u64,
}

/// Stored next to the image.
#[derive(Serialize, Deserialize)]
struct Record {
    packages: Vec<String>,
    digest: String,
}

pub(crate) fn build(builder: &Builder, spec: &RootfsSpec, lock: &File) -> Result<Rootfs> {
    spec.check()?;
    let recipe = serde_json::to_string(spec)
        .map_err(|e| Error::BadSpec { name: spec.name.clone(), reason: e.to_string() })?;
    // The module is part of every recipe.
    let recipe = format!("{recipe}\n{PYTHON_MODULE}");
    let part = builder.cache.part("rootfs", &cache::key(&["rootfs", &recipe]));
    if !builder.refresh && part.is_dir() {
        return open(&part);
    }
    let pip = if spec.wheels.is_empty() { None } else { Some(wheels::host_pip(builder, lock)?) };
    let scratch = builder.cache.scratch("rootfs")?;
    fs::create_dir(&scratch).map_err(io_error("creating", &scratch))?;
    if fs::metadata(&scratch).map_err(io_error("reading", &scratch))?.uid() != 0 {
        return Err(Error::NotRoot);
    }
    let tree = builder.cache.scratch("tree")?;
    bootstrap(builder, spec, &tree, lock)?;
    if let Some(pip) = pip {
        wheels::install(builder, spec, &pip, &tree, lock)?;
    }
    write_python_module(spec, &tree, lock)?;
    write_files(builder, spec, &tree, lock)?;
    write_environment(spec, &tree).map_err(io_error("arranging", &tree))?;
    finish_tree(&tree).map_err(io_error("arranging", &tree))?;
    let packages = installed(&tree)?;
    let digest = cache::key(&[&recipe, &packages.join("\n")]);
    let mib = tree_size(&tree).map_err(io_error("measuring", &tree))? >> 20;
    builder.say(format!("rootfs {}: writing the disk ({mib} MiB in {} packages)", spec.name, packages.len()));
    format_disk(spec, &tree, &scratch.join("root.ext4"))?;
    let record = serde_json::to_vec_pretty(&Record { packages, digest })
        .map_err(|e| io_error("writing the record of", &scratch)(e.into()))?;
    let path = scratch.join("record.json");
    fs::write(&path, record).map_err(io_error("writing", &path))?;
    builder.cache.publish(&scratch, &part)?;
    open(&part)
}

fn open(part: &Path) -> Result<Rootfs> {
    let path = part.join("record.json");
    let text = fs::read(&path).map_err(io_error("reading", &path))?;
    let record: Record = serde_json::from_slice(&text).map_err(|e| io_error("reading", &path)(e.into()))?;
    let raw = part.join("root.ext4");
    let used_bytes = fs::metadata(&raw).map_err(io_error("reading", &raw))?.blocks() * 512;
    Ok(Rootfs { raw, packages: record.packages, digest: record.digest, used_bytes })
}

fn bootstrap(builder: &Builder, spec: &RootfsSpec, tree: &Path, lock: &File) -> Result<()> {
    let started = Instant::now();
    let debs = builder.cache.dir("debs")?;
    let say = |step: usize, what: &str| {
        let seconds = started.elapsed().as_secs();
        builder.say(format!("rootfs {}: {what} (step {step} of {}, {seconds} s)", spec.name, STEPS.len()));
    };
    let mut args: Vec<String> =
        ["--mode=root", "--format=directory", "--variant=minbase"].map(str::to_owned).to_vec();
    args.push(format!("--skip={SKIP}"));
    let python: &[&str] = if spec.wheels.is_empty() { &[] } else { &wheels::PACKAGES };
    let packages: Vec<&str> =
        spec.packages.iter().map(String::as_str).chain(python.iter().copied()).collect();
    if !packages.is_empty() {
        args.push(format!("--include={}", packages.join(",")));
    }
    args.extend(DPKG_OPTIONS.map(|option| format!("--dpkgopt={option}")));
    args.push("--aptopt=APT::Install-Recommends \"false\"".to_owned());
    args.push("--aptopt=Acquire::Languages \"none\"".to_owned());
    args.extend(apt::keyring().map(|path| format!("--keyring={}", path.display())));
    // Packages are kept across builds, even interrupted ones: they are copied out before they are
    // installed.
    let copy_in = r#"mkdir -p "$1/var/cache/apt/archives"; cp -n "$KEIKI_DEBS"/*.deb "$1/var/cache/apt/archives/" 2>/dev/null || true"#;
    let copy_out = r#"for deb in "$1"/var/cache/apt/archives/*.deb; do new="$KEIKI_DEBS/${deb##*/}"; [ ! -e "$deb" ] || [ -e "$new" ] || { cp "$deb" "$new.part" && mv "$new.part" "$new"; }; done"#;
    args.push(format!("--setup-hook={copy_in}"));
    args.push(format!("--extract-hook={copy_out}"));
    args.push(format!("--customize-hook={copy_out}"));
    args.push(spec.suite.clone());
    args.push(tree.display().to_string());
    args.extend(sources(&spec.suite)?);
    say(1, "reading the package lists");
    // No SOURCE_DATE_EPOCH: with it, Python's compiled files would check their source by hash at
    // each import.
    let action = format!("creating the root disk of `{}`", spec.name);
    let tool = Tool::leashed("mmdebstrap", "mmdebstrap".as_ref(), action);
    let tmp = builder.cache.dir("tmp")?;
    tool.holding(lock)?.dir(&tmp).args(&args).env("TMPDIR", &tmp).env("KEIKI_DEBS", debs).lines(|line| {
        let line = line.trim_start_matches("I: ");
        if let Some(step) = STEPS.iter().position(|step| line.starts_with(step)).filter(|&step| step > 0) {
            say(step + 1, line.trim_end_matches('.'));
        }
    })
}

/// The sources, also for the guest's apt: the mirror of this host, with security updates if it has
/// them.
fn sources(suite: &str) -> Result<Vec<String>> {
    let mut sources = vec![format!("deb {} {suite} main", apt::host_mirror()?)];
    sources.extend(apt::host_security_mirror().map(|uri| format!("deb {uri} {suite}-security main")));
    Ok(sources)
}

/// If the tree has Python, adds a module that every interpreter loads, also those of virtual
/// environments.
fn write_python_module(spec: &RootfsSpec, tree: &Path, lock: &File) -> Result<()> {
    const NAME: &str = "keiki_generation";
    let Some(version) = wheels::python_version(tree)? else { return Ok(()) };
    let library = format!("usr/lib/python{version}");
    let module = tree.join(&library).join(NAME).with_extension("py");
    fs::write(&module, PYTHON_MODULE).map_err(io_error("writing", &module))?;
    // Debian keeps this file outside the library, behind an absolute link.
    let own = tree.join(format!("etc/python{version}/sitecustomize.py"));
    let site = if own.exists() { own } else { tree.join(&library).join("sitecustomize.py") };
    let mut file =
        File::options().append(true).create(true).open(&site).map_err(io_error("opening", &site))?;
    writeln!(file, "\nimport {NAME}").map_err(io_error("writing", &site))?;
    // Compiled now: users other than root would compile it at each start.
    let action = format!("compiling Python's site module of `{}`", spec.name);
    let tool = Tool::leashed("chroot", "chroot".as_ref(), action).holding(lock)?.args([tree]);
    let files = [NAME, "sitecustomize"].map(|name| format!("/{library}/{name}.py"));
    tool.args(wheels::TREE_ENV).args(["python3", "-m", "py_compile"]).args(&files).output().map(drop)
}

/// Writes the recipe's files into the tree. From inside, so that no link leads out of it.
fn write_files(builder: &Builder, spec: &RootfsSpec, tree: &Path, lock: &File) -> Result<()> {
    const INSIDE: &str = "tmp/file";
    let copy = tree.join(INSIDE);
    for (path, text) in &spec.files {
        builder.say(format!("rootfs {}: writing {path}", spec.name));
        fs::write(&copy, text).map_err(io_error("writing", &copy))?;
        let mode = if text.starts_with("#!") { "-m755" } else { "-m644" };
        let tool = Tool::leashed("chroot", "chroot".as_ref(), format!("writing {path} of `{}`", spec.name));
        let tool = tool.holding(lock)?.args([tree]);
        tool.args(["install", "-D", mode, "--", &format!("/{INSIDE}"), path]).output()?;
        cache::remove(&copy)?;
    }
    Ok(())
}

/// The environment of every command: read by the guest agent, PAM and login shells.
fn write_environment(spec: &RootfsSpec, tree: &Path) -> std::io::Result<()> {
    let mut env = spec.env.clone();
    if !spec.wheels.is_empty() {
        env.entry("PATH".into()).or_insert_with(|| format!("{}/bin:{PATH}", wheels::VENV));
        env.entry("VIRTUAL_ENV".into()).or_insert_with(|| wheels::VENV.into());
    }
    if env.is_empty() {
        return Ok(());
    }
    let lines = |before: &str| -> String {
        env.iter().map(|(name, value)| format!("{before}{name}=\"{value}\"\n")).collect()
    };
    fs::write(tree.join("etc/environment"), lines(""))?;
    fs::create_dir_all(tree.join("etc/profile.d"))?;
    fs::write(tree.join("etc/profile.d/keiki.sh"), lines("export "))
}

/// Removes everything that belongs to one machine or to this host, and adds what users expect.
fn finish_tree(tree: &Path) -> std::io::Result<()> {
    for file in ["etc/resolv.conf", "etc/machine-id", "var/lib/dbus/machine-id", "etc/hostname", "etc/hosts"]
    {
        remove_if_there(&tree.join(file))?;
    }
    if let Ok(entries) = fs::read_dir(tree.join("etc/ssh")) {
        for entry in entries.filter_map(Result::ok) {
            if entry.file_name().to_string_lossy().starts_with("ssh_host_") {
                fs::remove_file(entry.path())?;
            }
        }
    }
    // Empty: each machine gets its own.
    File::create(tree.join("etc/machine-id"))?;
    fs::write(tree.join("etc/hostname"), "keiki\n")?;
    let mut hosts = File::create(tree.join("etc/hosts"))?;
    hosts
        .write_all(b"127.0.0.1\tlocalhost\n127.0.1.1\tkeiki\n::1\tlocalhost ip6-localhost ip6-loopback\n")?;
    if tree.join("usr/bin/python3").exists() && !tree.join("usr/bin/python").exists() {
        symlink("python3", tree.join("usr/bin/python"))?;
    }
    for dir in ["dev", "var/cache/apt", "var/lib/apt/lists", "var/log", "tmp", "run"] {
        empty(&tree.join(dir))?;
    }
    Ok(())
}

fn remove_if_there(path: &Path) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes the files below `dir`. Directories stay.
fn empty(dir: &Path) -> std::io::Result<()> {
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() { empty(&entry.path())? } else { fs::remove_file(entry.path())? }
    }
    Ok(())
}

/// `NAME VERSION` of each installed package, from dpkg's status.
fn installed(tree: &Path) -> Result<Vec<String>> {
    let path = tree.join("var/lib/dpkg/status");
    let text = fs::read_to_string(&path).map_err(io_error("reading", &path))?;
    Ok(parse_status(&text))
}

fn parse_status(text: &str) -> Vec<String> {
    let mut packages: Vec<String> = text
        .split("\n\n")
        .filter(|paragraph| paragraph.lines().any(|line| line == "Status: install ok installed"))
        .filter_map(|paragraph| {
            let field = |name| paragraph.lines().find_map(|line| line.strip_prefix(name));
            Some(format!("{} {}", field("Package: ")?, field("Version: ")?))
        })
        .collect();
    packages.sort();
    packages
}

fn tree_size(dir: &Path) -> std::io::Result<u64> {
    let mut size = 0;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        size += if meta.is_dir() { tree_size(&entry.path())? } else { meta.blocks() * 512 };
    }
    Ok(size)
}

/// The image is new and reads as zeroes. So inode tables count as written: neither mkfs nor the
/// guest fills them.
fn format_disk(spec: &RootfsSpec, tree: &Path, raw: &Path) -> Result<()> {
    let extended = format!("assume_storage_prezeroed=1,hash_seed={HASH_SEED},root_owner=0:0");
    let journal = format!("size={JOURNAL_MIB}");
    let size = format!("{}M", spec.disk_mib);
    let tool = Tool::new("mkfs.ext4", format!("writing the root disk of `{}`", spec.name));
    let tool = tool
        .args([
            "-q",
            "-F",
            "-L",
            "keiki-root",
            "-m",
            "1",
            "-U",
            FS_UUID,
            "-J",
            &journal,
            "-E",
            &extended,
            "-d",
        ])
        .args([tree, raw])
        .args([&size]);
    tool.env("E2FSPROGS_FAKE_TIME", FS_TIME).env("SOURCE_DATE_EPOCH", FS_TIME).output().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn installed_packages_are_read() {
        let status = "Package: b\nStatus: install ok installed\nVersion: 2\n\n\
                      Package: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
                      Package: a\nStatus: install ok installed\nArchitecture: all\nVersion: 1:3-4\n";
        assert_eq!(parse_status(status), ["a 1:3-4", "b 2"]);
    }

    #[test]
    fn nothing_that_identifies_a_machine_stays() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path();
        for sub in ["etc/ssh", "usr/bin", "var/log/apt", "var/cache/apt/archives"] {
            fs::create_dir_all(tree.join(sub)).unwrap();
        }
        for file in ["etc/resolv.conf", "etc/ssh/ssh_host_rsa_key", "usr/bin/python3", "var/log/apt/term.log"]
        {
            fs::write(tree.join(file), "host").unwrap();
        }
        fs::write(tree.join("etc/machine-id"), "0123").unwrap();
        finish_tree(tree).unwrap();
        assert!(!tree.join("etc/resolv.conf").exists());
        assert!(!tree.join("etc/ssh/ssh_host_rsa_key").exists());
        assert!(!tree.join("var/log/apt/term.log").exists());
        assert!(tree.join("var/log/apt").is_dir());
        assert_eq!(fs::read(tree.join("etc/machine-id")).unwrap(), b"");
        assert_eq!(fs::read_link(tree.join("usr/bin/python")).unwrap(), Path::new("python3"));
        // A second run changes nothing.
        finish_tree(tree).unwrap();
    }

    #[test]
    fn the_environment_is_written_where_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path();
        fs::create_dir_all(tree.join("etc")).unwrap();
        let spec = RootfsSpec {
            wheels: vec!["numpy".into()],
            env: [("A".to_owned(), "1 2".to_owned())].into(),
            ..crate::Catalog::new(None).get(crate::BASE).unwrap().unwrap().rootfs()
        };
        write_environment(&spec, tree).unwrap();
        let text = fs::read_to_string(tree.join("etc/environment")).unwrap();
        assert!(text.starts_with("A=\"1 2\"\nPATH=\"/opt/venv/bin:/usr/local/sbin"), "{text}");
        let text = fs::read_to_string(tree.join("etc/profile.d/keiki.sh")).unwrap();
        assert!(text.starts_with("export A=\"1 2\"\nexport PATH=\"/opt/venv/bin:"), "{text}");
    }

    #[test]
    fn a_tree_becomes_a_clean_sparse_disk() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("hello"), "there").unwrap();
        let spec = crate::Catalog::new(None).get(crate::BASE).unwrap().unwrap().rootfs();
        let raw = dir.path().join("root.ext4");
        format_disk(&spec, &tree, &raw).unwrap();
        let meta = fs::metadata(&raw).unwrap();
        assert_eq!(meta.len(), 2048 << 20);
        assert!(meta.blocks() * 512 < 32 << 20, "sparse");
        Tool::new("e2fsck", "checking").args(["-fn".as_ref(), raw.as_os_str()]).output().unwrap();
        let shown = Tool::new("debugfs", "reading")
            .args(["-R".as_ref(), "cat /hello".as_ref(), raw.as_os_str()])
            .output()
            .unwrap();
        assert_eq!(shown, b"there");
    }
}
