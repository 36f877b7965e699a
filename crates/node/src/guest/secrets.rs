//! Secrets: which secrets of its original a copy gets. The node knows their names and what copies
//! get; only the guest has the values.
//!
//! The exception is a freeze whose copy must not have them: then the node holds them, in its memory
//! and in files next to the machine's sockets, so that the next node can restore them if this one
//! dies meanwhile ([`Out`]).

use crate::{
    error::{Error, Result},
    guest::{GuestLink, Secrets},
    records::SandboxRecord,
};
use keiki_protocol::{
    seal::Plain,
    secrets::{MAX, MAX_BYTES, MAX_NAME, is_name},
};
use keiki_sys::failpoint;
use keiki_types::api::secrets::{self, Fate, Fates};
use std::{
    collections::BTreeMap,
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use zeroize::Zeroizing;

/// Files of what is out of its machine, in the machine's run directory; and what they are called
/// until all are there.
const OUT: &str = "secrets";
const OUT_NEW: &str = "secrets.new";

/// Secrets as a request gives them.
pub(crate) type GivenSecrets = BTreeMap<String, secrets::Secret>;

/// What a copy gets: the secrets of its original, and those in the request. Returns what is sent to
/// the guest, and what is recorded.
pub(crate) fn of_copy(
    had: &BTreeMap<String, Fates>,
    fate: impl Fn(&Fates) -> Fate,
    given: Option<GivenSecrets>,
) -> Result<(Secrets, BTreeMap<String, Fates>)> {
    let given = given.unwrap_or_default();
    let mut has = BTreeMap::new();
    let mut keep = Vec::new();
    for (name, fates) in had.iter().filter(|(name, _)| !given.contains_key(*name)) {
        match fate(fates) {
            Fate::Inherit => {
                keep.push(name.clone());
                has.insert(name.clone(), *fates);
            }
            Fate::Drop => {}
            Fate::Replace => {
                return Err(Error::Invalid(format!(
                    "secrets: {name} needs a new value for this copy, because it is declared `replace`"
                )));
            }
        }
    }
    let mut give = Vec::new();
    for (name, secret) in given {
        check_secret(&name, &secret)?;
        // An existing secret keeps its `on_fork` and `on_restore` unless the request sets others.
        let before = had.get(&name).copied();
        let asked = secret.fates();
        let fates = before.map_or(asked, |before| Fates {
            on_fork: secret.on_fork.unwrap_or(before.on_fork),
            on_restore: secret.on_restore.unwrap_or(before.on_restore),
        });
        has.insert(name.clone(), fates);
        give.push(Plain {
            name,
            value: Zeroizing::new(secret.value.into_bytes()),
            owner: secret.owner.unwrap_or_default(),
        });
    }
    if has.len() > MAX {
        return Err(Error::Invalid(format!("secrets: at most {MAX}, not {}", has.len())));
    }
    Ok((Secrets { give, keep }, has))
}

fn check_secret(name: &str, secret: &secrets::Secret) -> Result<()> {
    if !is_name(name) {
        return Err(Error::Invalid(format!(
            "secrets: {name:?} is not a valid name: use 1 to {MAX_NAME} letters, digits, '_', '-' and '.', not starting with '.'"
        )));
    }
    if secret.value.len() > MAX_BYTES {
        return Err(Error::Invalid(format!(
            "secrets: {name} has {} bytes, at most {MAX_BYTES} are allowed",
            secret.value.len()
        )));
    }
    Ok(())
}

/// All of them: it is the same sandbox.
pub(crate) fn of_woken(record: &SandboxRecord) -> Secrets {
    Secrets { give: Vec::new(), keep: record.secrets.keys().cloned().collect() }
}

/// Those that a snapshot must not have.
pub(crate) fn not_in_snapshots(record: &SandboxRecord) -> Vec<String> {
    let stays_out = |fates: &Fates| fates.on_restore != Fate::Inherit;
    record.secrets.iter().filter(|(_, fates)| stays_out(fates)).map(|(name, _)| name.clone()).collect()
}

/// Secrets that are out of their machine.
pub(crate) struct Out {
    secrets: Vec<Plain>,
    dir: PathBuf,
}

impl Out {
    /// Removes these from a machine whose user processes are frozen. On error they are still in it.
    pub async fn take(guest: &GuestLink, names: &[String], run: &Path) -> Result<Self> {
        let secrets = guest.read_secrets(names).await?;
        let out = Self::keep(run, secrets).map_err(|cause| Error::internal("cannot keep secrets", cause))?;
        failpoint::reach("secrets:kept");
        match guest.wipe_secrets(names).await {
            Ok(()) => {
                failpoint::reach("secrets:wiped");
                Ok(out)
            }
            Err(error) => {
                out.put_back(guest).await?;
                Err(error)
            }
        }
    }

    /// Puts them back. If that fails the files stay, for the next node.
    pub async fn put_back(self, guest: &GuestLink) -> Result<()> {
        guest.put_secrets(&self.secrets).await?;
        failpoint::reach("secrets:back");
        wipe(&self.dir)
            .map_err(|cause| Error::internal("cannot remove secrets from the run directory", cause))
    }

    fn keep(run: &Path, secrets: Vec<Plain>) -> io::Result<Self> {
        let (new, dir) = (run.join(OUT_NEW), run.join(OUT));
        wipe(&new)?;
        wipe(&dir)?;
        DirBuilder::new().mode(0o700).create(&new)?;
        for secret in &secrets {
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(new.join(&secret.name))?;
            file.write_all(&secret.value)?;
        }
        fs::rename(new, &dir)?;
        Ok(Self { secrets, dir })
    }

    /// The secrets that an earlier node removed from the machine with this run directory, and did
    /// not put back.
    pub fn left(run: &Path) -> Result<Option<Self>> {
        let read = || -> io::Result<Option<Self>> {
            // The list is incomplete: then none has been wiped yet.
            wipe(&run.join(OUT_NEW))?;
            let dir = run.join(OUT);
            let Some(names) = listed(&dir)? else { return Ok(None) };
            let mut secrets = Vec::new();
            for name in names {
                let file = fs::File::open(dir.join(&name))?;
                let mut value = Zeroizing::new(Vec::with_capacity(MAX_BYTES));
                file.take(MAX_BYTES as u64).read_to_end(&mut value)?;
                secrets.push(Plain { name, owner: String::new(), value });
            }
            Ok(Some(Self { secrets, dir }))
        };
        read().map_err(|cause| Error::internal("cannot read the secrets that an earlier node kept", cause))
    }
}

fn listed(dir: &Path) -> io::Result<Option<Vec<String>>> {
    match fs::read_dir(dir) {
        Ok(entries) => entries
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<io::Result<_>>()
            .map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Overwrites the files of such a directory, and removes it.
fn wipe(dir: &Path) -> io::Result<()> {
    let Some(names) = listed(dir)? else { return Ok(()) };
    for name in names {
        let path = dir.join(name);
        let size = usize::try_from(fs::metadata(&path)?.len()).unwrap_or(MAX_BYTES).min(MAX_BYTES);
        OpenOptions::new().write(true).open(&path)?.write_all(&vec![0; size])?;
        fs::remove_file(path)?;
    }
    fs::remove_dir(dir)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_out_is_found_by_the_next_node_and_by_nobody_else() {
        let run = tempfile::tempdir().unwrap();
        assert!(Out::left(run.path()).unwrap().is_none());
        let secret =
            Plain { name: "KEY".into(), owner: String::new(), value: Zeroizing::new(b"hush".to_vec()) };
        let out = Out::keep(run.path(), vec![secret.clone()]).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&out.dir), mode(&out.dir.join("KEY"))), (0o700, 0o600));
        // Half of the next ones, of a node that died in the middle.
        fs::create_dir(run.path().join(OUT_NEW)).unwrap();
        fs::write(run.path().join(OUT_NEW).join("KEY"), "hu").unwrap();
        let left = Out::left(run.path()).unwrap().unwrap();
        assert_eq!(left.secrets, [secret]);
        wipe(&left.dir).unwrap();
        assert_eq!(fs::read_dir(run.path()).unwrap().count(), 0);
    }

    fn given(name: &str, on_fork: Option<Fate>) -> GivenSecrets {
        let secret = secrets::Secret { value: "v".into(), owner: None, on_fork, on_restore: None };
        BTreeMap::from([(name.to_owned(), secret)])
    }

    fn had(fate: Fate) -> BTreeMap<String, Fates> {
        BTreeMap::from([("KEY".to_owned(), Fates { on_fork: fate, on_restore: Fate::Drop })])
    }

    #[test]
    fn a_copy_has_what_its_fate_says() {
        let on_fork = |fates: &Fates| fates.on_fork;
        let (told, has) = of_copy(&had(Fate::Inherit), on_fork, None).unwrap();
        assert_eq!((told.keep, has.len()), (vec!["KEY".to_owned()], 1));
        let (told, has) = of_copy(&had(Fate::Drop), on_fork, None).unwrap();
        assert!(told.keep.is_empty() && told.give.is_empty() && has.is_empty());
        let error = of_copy(&had(Fate::Replace), on_fork, None).unwrap_err();
        assert!(error.to_string().contains("KEY needs a new value"), "{error}");
        let (told, has) = of_copy(&had(Fate::Replace), on_fork, Some(given("KEY", None))).unwrap();
        assert_eq!(told.give.len(), 1);
        assert_eq!(has["KEY"].on_fork, Fate::Replace);
        let (_, has) = of_copy(&had(Fate::Drop), on_fork, Some(given("NEW", Some(Fate::Drop)))).unwrap();
        assert_eq!(has["NEW"], Fates { on_fork: Fate::Drop, on_restore: Fate::Drop });
    }

    #[test]
    fn names_and_sizes_are_bounded() {
        let on_fork = |fates: &Fates| fates.on_fork;
        for name in ["", ".x", "a/b", "..", &"x".repeat(65)] {
            let error = of_copy(&BTreeMap::new(), on_fork, Some(given(name, None))).unwrap_err();
            assert!(error.to_string().starts_with("secrets: "), "{error}");
        }
        let mut big = given("BIG", None);
        big.insert(
            "BIG".into(),
            secrets::Secret { value: "x".repeat(65 << 10), ..given("BIG", None).remove("BIG").unwrap() },
        );
        assert!(of_copy(&BTreeMap::new(), on_fork, Some(big)).is_err());
    }
}
