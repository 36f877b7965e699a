//! Secrets: what a copy may have of those of its original. The node knows names and fates; values are in the guest alone.

use crate::{
    error::{Error, Result},
    guest::Secrets,
    records::SandboxRecord,
};
use keiki_protocol::{
    guest::Secret,
    secrets::{MAX, MAX_BYTES, MAX_NAME, is_name},
};
use keiki_types::api::secrets::{self, Fate, Fates};
use std::collections::BTreeMap;

/// Secrets as a request gives them.
pub(super) type GivenSecrets = BTreeMap<String, secrets::Secret>;

/// What a copy gets of these secrets of its original, and of what its maker gives: what the guest is told, and what
/// is recorded of it.
///
/// # Errors
/// 400 if a name or value cannot be, or one that must be replaced is not given.
pub(super) fn of_copy(
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
                    "secrets: {name} must be given anew for this copy; its fate is replace"
                )));
            }
        }
    }
    let mut give = Vec::new();
    for (name, secret) in given {
        check_secret(&name, &secret)?;
        // One that was there keeps its fates unless others are given.
        let before = had.get(&name).copied();
        let asked = secret.fates();
        let fates = before.map_or(asked, |before| Fates {
            on_fork: secret.on_fork.unwrap_or(before.on_fork),
            on_restore: secret.on_restore.unwrap_or(before.on_restore),
        });
        has.insert(name.clone(), fates);
        give.push(Secret {
            name,
            value: secret.value.into_bytes().into(),
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
            "secrets: {name:?} is no name: 1 to {MAX_NAME} letters, digits, '_', '-' and '.', not '.' first"
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
pub(super) fn of_woken(record: &SandboxRecord) -> Secrets {
    Secrets { give: Vec::new(), keep: record.secrets.keys().cloned().collect() }
}

/// Those that a snapshot must not have.
pub(super) fn not_in_snapshots(record: &SandboxRecord) -> Vec<String> {
    let stays_out = |fates: &Fates| fates.on_restore != Fate::Inherit;
    record.secrets.iter().filter(|(_, fates)| stays_out(fates)).map(|(name, _)| name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(error.to_string().contains("KEY must be given anew"), "{error}");
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
