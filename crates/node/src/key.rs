//! The node's own secrets: each in a file that only the node reads, created when first needed.

use crate::error::{Error, Result};
use anyhow::Context;
use keiki_api::Secret;
use rand::RngCore;
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// The secret in a file, which is made if it is missing.
pub fn secret(path: &Path, purpose: &str) -> Result<Secret> {
    read_or_create(path).map_err(|cause| {
        let what = format!("cannot read or create the key for {purpose} in {}", path.display());
        Error::internal(what, cause)
    })
}

fn read_or_create(path: &Path) -> anyhow::Result<Secret> {
    match fs::read(path) {
        Ok(bytes) => bytes
            .try_into()
            .ok()
            .context("it is damaged: remove it, which invalidates everything made with it"),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut secret = Secret::default();
            rand::rng().fill_bytes(&mut secret);
            let new = path.with_extension("new");
            let mut options = fs::OpenOptions::new();
            let mut file = options.create(true).truncate(true).write(true).mode(0o600).open(&new)?;
            file.write_all(&secret)?;
            file.sync_all()?;
            fs::rename(&new, path)?;
            Ok(secret)
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::secret;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_secret_stays_the_same_and_only_its_owner_reads_it() -> anyhow::Result<()> {
        let dir = tempfile::tempdir()?;
        let path = dir.path().join("preview.key");
        let made = secret(&path, "tests")?;
        assert_eq!(std::fs::metadata(&path)?.permissions().mode() & 0o777, 0o600);
        assert_eq!(secret(&path, "tests")?, made);
        assert_ne!(secret(&dir.path().join("other.key"), "tests")?, made);
        Ok(())
    }
}
