//! Reflinks: a file that shares another one's blocks until either is written.

use rustix::fs::{Mode, OFlags, ioctl_ficlone};
use std::{
    fs::{self, File},
    io,
    os::fd::AsFd,
    path::Path,
};

/// Makes `to` a clone of `from`: same size, same blocks. Replaces the contents of `to`, keeps its inode.
///
/// # Errors
/// If the file system has no reflinks, or the files lie on two of them.
pub fn clone_into(from: impl AsFd, to: impl AsFd) -> io::Result<()> {
    Ok(ioctl_ficlone(to, from)?)
}

/// Makes a new file that is a clone of another.
///
/// # Errors
/// As [`clone_into`], or if `to` exists; nothing is left of it then.
pub fn clone_file(from: &Path, to: &Path) -> io::Result<File> {
    let source = File::open(from)?;
    let target = File::create_new(to)?;
    clone_into(&source, &target).inspect_err(|_| drop(fs::remove_file(to)))?;
    Ok(target)
}

/// Does the file system of this directory have reflinks? Tried with two nameless files.
///
/// # Errors
/// If the directory cannot be written.
pub fn supported(dir: &Path) -> io::Result<bool> {
    use std::io::Write;
    let nameless = || -> io::Result<File> {
        let fd = rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR)?;
        Ok(fd.into())
    };
    let (mut one, two) = (nameless()?, nameless()?);
    one.write_all(&[1; 4096])?;
    Ok(clone_into(&one, &two).is_ok())
}
