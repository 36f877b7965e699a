//! The disks that carry files into the lab and out of it.

use super::{Args, Put, parts::Parts};
use anyhow::{Context, Result, bail};
use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
};

/// Room for what the command writes below `/lab`.
const ROOM_MIB: u64 = 6144;
const INIT: &str = include_str!("lab-init.sh");

/// An ext4 file system that the lab sees as `/lab`:
///
/// ```text
/// init, modules/    makes a machine of it
/// in/               what was put
/// command, environment
/// out/, status      what came of it
/// ```
pub(super) struct WorkDisk {
    image: PathBuf,
}

impl WorkDisk {
    /// Fills one with everything that is to be in the lab, and with what was `left` by a machine before it.
    pub(super) fn build(place: &Path, args: &Args, parts: &Parts, left: Option<&Path>) -> Result<Self> {
        let tree = place.join("tree");
        for dir in ["in", "out"] {
            fs::create_dir_all(tree.join(dir))?;
        }
        if let Some(left) = left {
            copy(left, &tree.join("out"))?;
        }
        fs::write(tree.join("init"), INIT)?;
        let command: Vec<u8> =
            args.command.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
        fs::write(tree.join("command"), command)?;
        let environment: String = args.env.iter().map(|line| quoted(line)).collect();
        fs::write(tree.join("environment"), environment)?;
        copy(&parts.kernel.modules_dir, &tree.join("modules"))?;
        if args.cache {
            bring_cache(parts, &tree.join("cache"))?;
        }
        for put in &args.put {
            bring_in(put, &tree.join("in"))?;
        }
        let image = place.join("work.ext4");
        let used = used_mib(&tree)?;
        File::create(&image)?.set_len((used + used / 8 + ROOM_MIB) << 20)?;
        let image_arg = image.display().to_string();
        let tree_arg = tree.display().to_string();
        tool(
            "mkfs.ext4",
            &["-q", "-F", "-E", "lazy_itable_init=1,lazy_journal_init=1", "-d", &tree_arg, &image_arg],
        )?;
        fs::remove_dir_all(&tree)?;
        Ok(Self { image })
    }

    /// The file.
    pub(super) fn path(&self) -> &Path {
        &self.image
    }

    /// Copies what the command left in `/lab/out`.
    pub(super) fn copy_out(&self, to: &Path) -> Result<()> {
        fs::create_dir_all(to).with_context(|| format!("making {}", to.display()))?;
        // The journal of a machine that was ended in the middle holds what its tree does not say yet. e2fsck's
        // status is a set of bits: 4 and more means that something is wrong still.
        let mended =
            Command::new("e2fsck").args(["-fp"]).arg(&self.image).output().context("running e2fsck")?;
        if mended.status.code().is_none_or(|code| code >= 4) {
            eprintln!("lab: e2fsck: {}", String::from_utf8_lossy(&mended.stdout).trim_end());
        }
        for name in self.list("/out")? {
            remove(&to.join(&name))?;
            let request = format!("rdump /out/{name} {}", to.display());
            tool("debugfs", &["-R", &request, &self.image.display().to_string()])?;
        }
        Ok(())
    }

    /// How the command ended. None: the machine ended before it did.
    pub(super) fn status(&self) -> Result<Option<ExitCode>> {
        let image = self.image.display().to_string();
        let text = tool("debugfs", &["-R", "cat /status", &image])?;
        match text.trim().parse::<u8>() {
            Ok(125) => bail!("cannot prepare the lab's machine: see its last output above"),
            Ok(code) => Ok(Some(ExitCode::from(code))),
            Err(_) => Ok(None),
        }
    }

    fn list(&self, dir: &str) -> Result<Vec<String>> {
        let text = tool("debugfs", &["-R", &format!("ls -p {dir}"), &self.image.display().to_string()])?;
        // `/INODE/MODE/UID/GID/NAME/SIZE/`
        let names = text.lines().filter_map(|line| line.split('/').nth(5).map(str::to_owned));
        Ok(names.filter(|name| !matches!(name.as_str(), "" | "." | "..")).collect())
    }
}

/// An empty file system with reflinks.
pub(super) fn store(place: &Path, gib: u32) -> Result<PathBuf> {
    let path = place.join("store.xfs");
    File::create(&path)?.set_len(u64::from(gib) << 30)?;
    tool("mkfs.xfs", &["-q", "-f", "-m", "reflink=1", &path.display().to_string()])?;
    Ok(path)
}

/// `NAME=VALUE` as a shell reads it back unchanged.
fn quoted(line: &str) -> String {
    let (name, value) = line.split_once('=').unwrap_or((line, ""));
    format!("{name}='{}'\n", value.replace('\'', r"'\''"))
}

fn bring_in(put: &Put, tree: &Path) -> Result<()> {
    let source = fs::canonicalize(&put.source)
        .with_context(|| format!("{} cannot be put into the lab", put.source.display()))?;
    let target = tree.join(&put.name);
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    copy(&source, &target)
}

/// Finished parts of guests; what was downloaded and the lab's own root disk stay here.
fn bring_cache(parts: &Parts, target: &Path) -> Result<()> {
    fs::create_dir_all(target)?;
    let own = parts.rootfs.raw.parent();
    for kind in ["kernel", "initramfs", "rootfs"] {
        let (from, to) = (parts.cache.join(kind), target.join(kind));
        fs::create_dir_all(&to)?;
        for entry in fs::read_dir(&from).with_context(|| format!("listing {}", from.display()))? {
            let part = entry?.path();
            if own != Some(&part)
                && let Some(name) = part.file_name()
            {
                copy(&part, &to.join(name))?;
            }
        }
    }
    Ok(())
}

/// A copy for reading: hard links where the file system allows, else sparse copies. Links are kept as they are.
fn copy(from: &Path, to: &Path) -> Result<()> {
    let meta = fs::symlink_metadata(from).with_context(|| format!("reading {}", from.display()))?;
    if meta.is_dir() {
        fs::create_dir_all(to)?;
        for entry in fs::read_dir(from).with_context(|| format!("listing {}", from.display()))? {
            let entry = entry?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        Ok(())
    } else if meta.is_symlink() {
        Ok(symlink(fs::read_link(from)?, to)?)
    } else if !meta.is_file() || fs::hard_link(from, to).is_ok() {
        // Sockets and pipes mean nothing in another machine.
        Ok(())
    } else {
        let [from, to] = [from, to].map(|path| path.display().to_string());
        tool("cp", &["--sparse=auto", "--reflink=auto", "-p", &from, &to]).map(drop)
    }
}

/// A file or directory, if it is there.
fn remove(path: &Path) -> Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed
        .or_else(|error| if error.kind() == ErrorKind::NotFound { Ok(()) } else { Err(error) })
        .with_context(|| format!("removing {}", path.display()))
}

fn used_mib(tree: &Path) -> Result<u64> {
    let text = tool("du", &["-sm", &tree.display().to_string()])?;
    text.split_whitespace().next().and_then(|word| word.parse().ok()).context("du says no size")
}

fn tool(name: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(name)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("running {name}; scripts/setup.sh installs it"))?;
    if !output.status.success() {
        bail!("{name} failed: {}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_back_unchanged() {
        let value = "it's $HOME `x` \"y\" \\ ;";
        let script = format!("{}printf %s \"$NAME\"", quoted(&format!("NAME={value}")));
        assert_eq!(tool("sh", &["-c", &script]).unwrap(), value);
    }

    #[test]
    fn what_the_lab_left_is_copied_out_with_its_status() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("out/deep")).unwrap();
        fs::write(tree.join("out/deep/log"), "words").unwrap();
        fs::write(tree.join("status"), "7\n").unwrap();
        let image = dir.path().join("disk");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        let [tree, image_arg] = [&tree, &image].map(|path| path.display().to_string());
        tool("mkfs.ext4", &["-q", "-F", "-d", &tree, &image_arg]).unwrap();
        let disk = WorkDisk { image };
        let out = dir.path().join("back");
        disk.copy_out(&out).unwrap();
        assert_eq!(fs::read_to_string(out.join("deep/log")).unwrap(), "words");
        // Also over what an earlier machine left there.
        fs::write(out.join("deep/log"), "other words").unwrap();
        disk.copy_out(&out).unwrap();
        assert_eq!(fs::read_to_string(out.join("deep/log")).unwrap(), "words");
        assert_eq!(format!("{:?}", disk.status().unwrap()), format!("{:?}", Some(ExitCode::from(7))));
    }

    #[test]
    fn a_machine_that_left_no_status_ended_before_its_command() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk");
        File::create(&image).unwrap().set_len(16 << 20).unwrap();
        tool("mkfs.ext4", &["-q", "-F", &image.display().to_string()]).unwrap();
        assert!(WorkDisk { image }.status().unwrap().is_none());
    }
}
