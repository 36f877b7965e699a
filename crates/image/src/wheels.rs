//! Python packages of a root disk: wheels in a virtual environment that comes first in every user's
//! PATH.
//!
//! The host's pip downloads them, with the host's index and proxies; the tree's pip installs them
//! without network and without the host's settings. Wheels only: nothing is compiled and no package
//! runs code. Downloads stay in the cache. If all requirements are pinned by hash, they are
//! downloaded one at a time, so that an interrupted download can continue; otherwise pip resolves
//! them together.

use crate::{
    Builder, cache,
    error::{Error, Result, io_error},
    spec::RootfsSpec,
    tool::Tool,
};
use std::{
    fs::{self, File},
    path::{Path, PathBuf},
};

/// The environment's path in a guest.
pub const VENV: &str = "/opt/venv";
/// The packages that a tree needs for it.
pub(crate) const PACKAGES: [&str; 2] = ["python3", "python3-venv"];
/// The C library of [`crate::spec::SUITE`]: wheels for newer ones do not run with it.
const GLIBC_MINOR: u32 = 36;
/// Where the wheels are in the tree during installation.
const INSIDE: &str = "tmp/wheels";
/// The environment of programs in the tree: nothing of the host's.
pub(crate) const TREE_ENV: [&str; 5] =
    ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"];

/// Creates the environment in `tree`.
pub(crate) fn install(
    builder: &Builder,
    spec: &RootfsSpec,
    pip: &Path,
    tree: &Path,
    lock: &File,
) -> Result<()> {
    let python = python_version(tree)?.ok_or_else(|| Error::BadSpec {
        name: spec.name.clone(),
        reason: format!("release {} has no Python 3 for the wheels", spec.suite),
    })?;
    let wheels = download(builder, spec, pip, &python, lock)?;
    let inside = tree.join(INSIDE);
    fs::create_dir_all(&inside).map_err(io_error("creating", &inside))?;
    for wheel in files(&wheels)? {
        let Some(name) = wheel.file_name() else { continue };
        let to = inside.join(name);
        fs::hard_link(&wheel, &to).map_err(io_error("linking", &to))?;
    }
    let list = inside.join("requirements.txt");
    fs::write(&list, spec.wheels.join("\n")).map_err(io_error("writing", &list))?;
    let action = || format!("installing the Python packages of `{}`", spec.name);
    let run = |args: &[&str]| {
        let tool = Tool::leashed("chroot", "chroot".as_ref(), action()).holding(lock)?;
        tool.args([tree]).args(TREE_ENV).args(args).lines(|_| ())
    };
    builder.say(format!("rootfs {}: installing {} Python packages", spec.name, spec.wheels.len()));
    run(&["python3", "-m", "venv", VENV])?;
    let (from, list) = (format!("/{INSIDE}"), format!("/{INSIDE}/requirements.txt"));
    let pip = format!("{VENV}/bin/pip");
    let mut args = vec![pip.as_str(), "install", "-q", "--no-index", "--no-cache-dir", "--find-links", &from];
    args.extend(["--disable-pip-version-check", "--root-user-action=ignore", "-r", &list]);
    if is_pinned(spec) {
        args.push("--require-hashes");
    }
    run(&args)?;
    let lib = tree.join(VENV.trim_start_matches('/')).join("lib");
    drop_tests(&lib, 0).map_err(io_error("arranging", &lib))?;
    // A sandbox belongs to one person: every user in it may add packages.
    run(&["chmod", "-R", "a+rwX", VENV])?;
    cache::remove(&inside)
}

/// Removes the tests of packages, a sixth of the whole. Files that begin with `_` are imported from
/// elsewhere.
fn drop_tests(dir: &Path, depth: usize) -> std::io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let (path, is_dir) = (entry.path(), entry.file_type()?.is_dir());
        if !is_dir {
            continue;
        }
        // At least LIB/pythonX/site-packages/PACKAGE/tests.
        if depth < 3 || entry.file_name() != "tests" {
            drop_tests(&path, depth + 1)?;
            continue;
        }
        for inner in fs::read_dir(&path)? {
            let inner = inner?;
            let is_dir = inner.file_type()?.is_dir();
            if is_dir {
                fs::remove_dir_all(inner.path())?;
            } else if !inner.file_name().to_string_lossy().starts_with('_') {
                fs::remove_file(inner.path())?;
            }
        }
    }
    Ok(())
}

/// The directory with all wheels.
fn download(builder: &Builder, spec: &RootfsSpec, pip: &Path, python: &str, lock: &File) -> Result<PathBuf> {
    let wheels = builder.cache.dir(&format!("wheels/{}", spec.name))?;
    let part = builder.cache.dir("tmp")?.join("wheels");
    let step = if is_pinned(spec) { 1 } else { spec.wheels.len() };
    if !is_pinned(spec) {
        // pip may resolve other versions than last time.
        cache::remove(&wheels)?;
        builder.cache.dir(&format!("wheels/{}", spec.name))?;
    }
    for (index, wanted) in spec.wheels.chunks(step).enumerate() {
        let [first, ..] = wanted else { continue };
        let name = first.split(' ').next().unwrap_or_default();
        if is_pinned(spec) && files(&wheels)?.iter().any(|file| is_wheel_of(file, name)) {
            continue;
        }
        builder.say(format!(
            "rootfs {}: downloading Python packages, {} of {}: {name}",
            spec.name,
            index * step + 1,
            spec.wheels.len()
        ));
        cache::remove(&part)?;
        fs::create_dir(&part).map_err(io_error("creating", &part))?;
        let list = part.join("requirements.txt");
        fs::write(&list, wanted.join("\n")).map_err(io_error("writing", &list))?;
        let action = format!("downloading the Python packages of `{}`", spec.name);
        let tool = Tool::leashed("python3", pip, action).holding(lock)?.dir(&part);
        let mut args: Vec<String> =
            ["-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary=:all:", "-d", "."]
                .map(str::to_owned)
                .to_vec();
        args.extend(["--implementation=cp".to_owned(), format!("--python-version={python}")]);
        args.extend((17..=GLIBC_MINOR).rev().map(|minor| format!("--platform=manylinux_2_{minor}_x86_64")));
        args.push("--platform=manylinux2014_x86_64".to_owned());
        if is_pinned(spec) {
            args.extend(["--no-deps", "--require-hashes"].map(str::to_owned));
        }
        args.extend(["-r".to_owned(), "requirements.txt".to_owned()]);
        tool.args(args).lines(|_| ())?;
        cache::remove(&list)?;
        for file in files(&part)? {
            let Some(name) = file.file_name() else { continue };
            let to = wheels.join(name);
            File::open(&file).and_then(|file| file.sync_all()).map_err(io_error("syncing", &file))?;
            fs::rename(&file, &to).map_err(io_error("moving", &to))?;
        }
    }
    Ok(wheels)
}

/// A Python with pip in the cache: the host's may have none. Call this before there are unfinished
/// parts, because this finishes one.
pub(crate) fn host_pip(builder: &Builder, lock: &File) -> Result<PathBuf> {
    let home = builder.cache.part("python", "pip");
    let python = home.join("bin/python3");
    if python.exists() {
        return Ok(python);
    }
    let scratch = builder.cache.scratch("python")?;
    let action = "creating a Python environment for the downloads";
    let tool = Tool::leashed("python3", "python3".as_ref(), action).holding(lock)?;
    tool.args(["-m", "venv"]).args([&scratch]).lines(|_| ())?;
    builder.cache.publish(&scratch, &home)?;
    Ok(python)
}

/// `3.11` if the tree has `/usr/lib/python3.11`.
pub(crate) fn python_version(tree: &Path) -> Result<Option<String>> {
    let lib = tree.join("usr/lib");
    let names = match fs::read_dir(&lib) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        names => names.map_err(io_error("listing", &lib))?,
    };
    let names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut versions = names.filter_map(|name| {
        let version = name.strip_prefix("python")?;
        version.starts_with("3.").then(|| version.to_owned())
    });
    Ok(versions.next())
}

/// Whether every requirement has a hash: then nothing else is installed.
fn is_pinned(spec: &RootfsSpec) -> bool {
    spec.wheels.iter().all(|wheel| wheel.contains(" --hash=") && wheel.contains("=="))
}

/// Whether `NAME-VERSION-….whl` is what `NAME==VERSION` asks for.
fn is_wheel_of(file: &Path, requirement: &str) -> bool {
    let plain = |text: &str| text.replace(['-', '.'], "_").to_ascii_lowercase();
    let Some((name, version)) = requirement.split_once("==") else { return false };
    let Some(file) = file.file_name().and_then(|name| name.to_str()) else { return false };
    let mut fields = file.split('-');
    fields.next().is_some_and(|field| plain(field) == plain(name)) && fields.next() == Some(version)
}

fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).map_err(io_error("listing", dir))?;
    let all: std::io::Result<Vec<PathBuf>> = entries.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut all = all.map_err(io_error("listing", dir))?;
    all.sort();
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_packages_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("python3.11/site-packages");
        let stay = ["tests/mod.py", "a/tests.py", "a/b/tests/_natype.py", "a/testing/x.py"];
        let go = ["a/tests/test_x.py", "a/b/tests/data/x.csv"];
        for file in stay.iter().chain(&go) {
            let path = packages.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        drop_tests(dir.path(), 0).unwrap();
        assert!(stay.iter().all(|file| packages.join(file).exists()));
        assert!(!go.iter().any(|file| packages.join(file).exists()));
    }

    #[test]
    fn a_wheel_is_known_by_its_name() {
        let file = Path::new("/w/scikit_learn-1.9.1-cp311-cp311-manylinux_2_28_x86_64.whl");
        assert!(is_wheel_of(file, "scikit-learn==1.9.1"));
        assert!(is_wheel_of(file, "Scikit.Learn==1.9.1"));
        for other in ["scikit-learn==1.9", "scikit-learn==1.9.10", "scikit==1.9.1", "scikit-learn"] {
            assert!(!is_wheel_of(file, other), "{other}");
        }
    }
}
