//! `/run/keiki/secrets`: files in memory that a caller gave to one sandbox, each readable by one
//! user.
//!
//! A secret that must not be in a stored copy leaves the machine around the freeze: its bytes are
//! overwritten in place and written back afterwards, into the same file, so a program that has it
//! open or mapped does not notice. The agent holds secrets in the clear only in buffers that it
//! zeroes ([`Plain`]). Copies that a program made elsewhere are out of its reach.

use crate::users;
use keiki_protocol::{
    seal::Plain,
    secrets::{MAX, MAX_BYTES, is_name},
};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, fchown},
    path::{Path, PathBuf},
};
use zeroize::Zeroizing;

const DIRECTORY: &str = "/run/keiki/secrets";

/// Gives the machine these secrets; of its present ones only `keep` stay.
pub fn renew(give: &[Plain], keep: &[String]) -> io::Result<()> {
    renew_in(Path::new(DIRECTORY), give, keep)
}

fn renew_in(directory: &Path, give: &[Plain], keep: &[String]) -> io::Result<()> {
    for name in names(directory)? {
        let is_given = give.iter().any(|secret| secret.name == name);
        if is_given || !keep.contains(&name) {
            let path = directory.join(name);
            wipe_file(&open(&path)?)?;
            fs::remove_file(path)?;
        }
    }
    for secret in give {
        put(directory, secret)?;
    }
    Ok(())
}

/// Reads these secrets. Skips those that the machine does not have.
pub fn read(wanted: &[String]) -> io::Result<Vec<Plain>> {
    read_in(Path::new(DIRECTORY), wanted)
}

fn read_in(directory: &Path, wanted: &[String]) -> io::Result<Vec<Plain>> {
    let mut all = vec![];
    for name in names(directory)?.into_iter().filter(|name| wanted.contains(name)) {
        let file = File::open(directory.join(&name))?;
        // Allocated at its full size: a buffer that grows leaves a copy behind.
        let mut value = Zeroizing::new(vec![0; size(&file)?]);
        file.read_exact_at(&mut value, 0)?;
        all.push(Plain { name, owner: String::new(), value });
    }
    Ok(all)
}

/// Overwrites these secrets in place.
pub fn wipe(wanted: &[String]) -> io::Result<()> {
    wipe_in(Path::new(DIRECTORY), wanted)
}

fn wipe_in(directory: &Path, wanted: &[String]) -> io::Result<()> {
    let mut wiped = names(directory)?.into_iter().filter(|name| wanted.contains(name));
    wiped.try_for_each(|name| wipe_file(&open(&directory.join(name))?))
}

/// Writes wiped secrets back into their files.
pub fn put_back(secrets: &[Plain]) -> io::Result<()> {
    put_back_in(Path::new(DIRECTORY), secrets)
}

fn put_back_in(directory: &Path, secrets: &[Plain]) -> io::Result<()> {
    secrets
        .iter()
        .try_for_each(|secret| open(&path(directory, &secret.name)?)?.write_all_at(&secret.value, 0))
}

/// Names of the secrets. Anything but a regular file with a UTF-8 name is user work's.
fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(vec![]),
        Err(error) => return Err(error),
    };
    let mut names = vec![];
    for entry in entries {
        let entry = entry?;
        if let (true, Ok(name)) = (entry.file_type()?.is_file(), entry.file_name().into_string()) {
            names.push(name);
        }
    }
    Ok(names)
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn size(file: &File) -> io::Result<usize> {
    Ok(usize::try_from(file.metadata()?.len()).map_or(MAX_BYTES, |size| size.min(MAX_BYTES)))
}

/// Overwrites the bytes with zeroes.
fn wipe_file(file: &File) -> io::Result<()> {
    file.write_all_at(&vec![0; size(file)?], 0)
}

fn put(directory: &Path, secret: &Plain) -> io::Result<()> {
    let path = path(directory, &secret.name)?;
    if secret.value.len() > MAX_BYTES {
        return Err(io::Error::other(format!("secret {} is larger than {MAX_BYTES} bytes", secret.name)));
    }
    match fs::DirBuilder::new().mode(0o711).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    if names(directory)?.len() >= MAX {
        return Err(io::Error::other(format!("more than {MAX} secrets")));
    }
    let owner = users::lookup(&secret.owner).map_err(io::Error::other)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    fchown(&file, Some(owner.uid), Some(owner.gid))?;
    file.write_all_at(&secret.value, 0)
}

fn path(directory: &Path, name: &str) -> io::Result<PathBuf> {
    if !is_name(name) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("not a valid name for a secret: {name:?}"),
        ));
    }
    Ok(directory.join(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, value: &str) -> Plain {
        Plain { name: name.into(), owner: String::new(), value: Zeroizing::new(value.into()) }
    }

    #[test]
    fn only_what_is_kept_or_given_stays() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path().join("secrets");
        renew_in(&at, &[secret("a", "1"), secret("b", "2"), secret("c", "3")], &[]).unwrap();
        renew_in(&at, &[secret("b", "new")], &["a".into()]).unwrap();
        let mut left = names(&at).unwrap();
        left.sort();
        assert_eq!(left, ["a", "b"]);
        assert_eq!(fs::read(at.join("b")).unwrap(), b"new");
        renew_in(&at, &[], &[]).unwrap();
        assert!(names(&at).unwrap().is_empty());
    }

    #[test]
    fn a_taken_secret_is_zeroes_until_it_is_back() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        renew_in(at, &[secret("a", "hush"), secret("b", "loud")], &[]).unwrap();
        let open = File::open(at.join("a")).unwrap();
        let taken = read_in(at, &["a".into(), "none".into()]).unwrap();
        assert_eq!(taken, [secret("a", "hush")]);
        wipe_in(at, &["a".into(), "none".into()]).unwrap();
        let mut seen = [1; 4];
        open.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(seen, [0; 4]);
        put_back_in(at, &taken).unwrap();
        open.read_exact_at(&mut seen, 0).unwrap();
        assert_eq!(&seen, b"hush");
        assert_eq!(fs::read(at.join("b")).unwrap(), b"loud");
    }

    #[test]
    fn names_that_reach_elsewhere_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["", "..", ".x", "a/b", "a\0", &"x".repeat(65)] {
            let error = renew_in(directory.path(), &[secret(name, "")], &[]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }
}
