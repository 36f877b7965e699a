//! Seals secrets for the transfer through the channel.
//!
//! Data that crosses the channel stays in the guest's memory long after it was read: in buffers of
//! its console, in rings, in memory that the agent freed. A snapshot would contain it. So secrets
//! are sealed to a key that the receiver makes for one message and then discards (HPKE, RFC 9180:
//! X25519, HKDF-SHA256, ChaCha20-Poly1305; base mode). They are in the clear only in [`Plain`] and
//! in the buffer that is sealed or opened, which are zeroed when dropped, and, while the cipher
//! runs, on the stack, which is overwritten afterwards.

use crate::guest::{SealedSecrets, Secret};
use hpke::{
    Deserializable, Kem, OpModeR, OpModeS, Serializable, aead::ChaCha20Poly1305, kdf::HkdfSha256,
    kem::X25519HkdfSha256, single_shot_open, single_shot_seal,
};
use zeroize::{Zeroize, Zeroizing};

type Suite = X25519HkdfSha256;

/// The purpose of a seal, as HPKE's info.
const INFO: &[u8] = b"keiki secrets 3";
/// More stack than the cipher needs.
const STACK: usize = 32 << 10;
/// Length of the encapsulated key at the start of the sealed values.
const ENCAPSULATED: usize = 32;

/// A secret in the clear.
#[derive(Clone, PartialEq, Eq)]
pub struct Plain {
    /// Its name.
    pub name: String,
    /// The user who may read it.
    pub owner: String,
    /// Its value.
    pub value: Zeroizing<Vec<u8>>,
}

/// Without the value.
impl std::fmt::Debug for Plain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plain").field("name", &self.name).field("owner", &self.owner).finish_non_exhaustive()
    }
}

/// Why secrets could not be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// Not a key.
    #[error("the key to seal secrets to is not valid")]
    Key,
    /// Sealed to another key, damaged, or of other sizes than it says.
    #[error("the secrets were not sealed to this key")]
    Sealed,
}

/// The private key that opens one message.
pub struct Key(Box<<Suite as Kem>::PrivateKey>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Key {
    /// A new key, and the public key for the sender.
    #[must_use]
    pub fn new() -> (Self, Vec<u8>) {
        let (private, public) = Suite::gen_keypair();
        (Self(Box::new(private)), public.to_bytes().to_vec())
    }

    /// Opens a message that was sealed to it.
    ///
    /// # Errors
    /// If it was sealed to another key or is damaged.
    pub fn open(self, sealed: &SealedSecrets) -> Result<Vec<Plain>, SealError> {
        if sealed.secrets.is_empty() {
            return Ok(vec![]);
        }
        let (encapsulated, values) = sealed.values.split_at_checked(ENCAPSULATED).ok_or(SealError::Sealed)?;
        let encapsulated =
            <Suite as Kem>::EncappedKey::from_bytes(encapsulated).map_err(|_| SealError::Sealed)?;
        let opened = decrypt(&self.0, &encapsulated, values);
        clear_stack();
        let values = opened.ok_or(SealError::Sealed)?;
        let mut rest: &[u8] = &values;
        let mut all = Vec::with_capacity(sealed.secrets.len());
        for Secret { name, owner, size } in &sealed.secrets {
            let (value, after) = rest.split_at_checked(*size as usize).ok_or(SealError::Sealed)?;
            rest = after;
            // Allocated at its full size: a buffer that grows leaves a copy behind.
            all.push(Plain {
                name: name.clone(),
                owner: owner.clone(),
                value: Zeroizing::new(value.to_vec()),
            });
        }
        if rest.is_empty() { Ok(all) } else { Err(SealError::Sealed) }
    }
}

/// Seals secrets to a key.
///
/// # Errors
/// If the key is not valid.
pub fn seal(public: &[u8], secrets: &[Plain]) -> Result<SealedSecrets, SealError> {
    if secrets.is_empty() {
        return Ok(SealedSecrets::default());
    }
    let public = <Suite as Kem>::PublicKey::from_bytes(public).map_err(|_| SealError::Key)?;
    let mut values =
        Zeroizing::new(Vec::with_capacity(secrets.iter().map(|secret| secret.value.len()).sum()));
    let mut named = Vec::with_capacity(secrets.len());
    for Plain { name, owner, value } in secrets {
        let size = u32::try_from(value.len()).map_err(|_| SealError::Sealed)?;
        named.push(Secret { name: name.clone(), owner: owner.clone(), size });
        values.extend_from_slice(value);
    }
    let sealed = encrypt(&public, &values);
    clear_stack();
    Ok(SealedSecrets { secrets: named, values: sealed.ok_or(SealError::Key)?.into() })
}

/// In its own stack frame, like [`encrypt`]: everything it leaves on the stack is below its caller.
#[inline(never)]
fn decrypt(
    key: &<Suite as Kem>::PrivateKey,
    encapsulated: &<Suite as Kem>::EncappedKey,
    values: &[u8],
) -> Option<Zeroizing<Vec<u8>>> {
    let mode = OpModeR::Base;
    single_shot_open::<ChaCha20Poly1305, HkdfSha256, Suite>(&mode, key, encapsulated, INFO, values, &[])
        .ok()
        .map(Zeroizing::new)
}

#[inline(never)]
fn encrypt(public: &<Suite as Kem>::PublicKey, values: &[u8]) -> Option<Vec<u8>> {
    let mode = OpModeS::Base;
    let (encapsulated, sealed) =
        single_shot_seal::<ChaCha20Poly1305, HkdfSha256, Suite>(&mode, public, INFO, values, &[]).ok()?;
    Some([encapsulated.to_bytes().as_slice(), &sealed].concat())
}

/// Overwrites what returned calls left on the stack.
#[inline(never)]
fn clear_stack() {
    let mut below = [0u8; STACK];
    below.zeroize();
}

#[cfg(test)]
mod tests {
    use super::{Key, Plain, SealError, seal};
    use crate::guest::SealedSecrets;
    use zeroize::Zeroizing;

    fn plain(name: &str, value: &str) -> Plain {
        Plain { name: name.into(), owner: "1".into(), value: Zeroizing::new(value.into()) }
    }

    #[test]
    fn only_its_key_opens_a_message_and_only_as_a_whole() {
        let secrets = [plain("a", "hush"), plain("empty", ""), plain("b", "quite loud")];
        let (key, public) = Key::new();
        let sealed = seal(&public, &secrets).unwrap();
        assert!(!sealed.values.windows(4).any(|four| four == b"hush"));
        assert_eq!(key.open(&sealed).unwrap(), secrets);
        assert_eq!(Key::new().0.open(&sealed), Err(SealError::Sealed));
        for change in [
            (|sealed| sealed.secrets[0].size += 1) as fn(&mut SealedSecrets),
            |sealed| sealed.secrets[2].size -= 1,
            |sealed| drop(sealed.secrets.pop()),
            |sealed| sealed.values.truncate(40),
            |sealed| sealed.values.truncate(3),
            |sealed| sealed.values = sealed.values.iter().map(|byte| byte ^ 1).collect(),
        ] {
            let (key, public) = Key::new();
            let mut sealed = seal(&public, &secrets).unwrap();
            change(&mut sealed);
            assert_eq!(key.open(&sealed), Err(SealError::Sealed), "{sealed:?}");
        }
    }

    #[test]
    fn none_need_no_key_and_no_key_seals_none() {
        assert_eq!(seal(b"", &[]), Ok(SealedSecrets::default()));
        assert_eq!(Key::new().0.open(&SealedSecrets::default()), Ok(vec![]));
        for bad in [&b"short"[..], &[0; 32], &[0; 33]] {
            assert_eq!(seal(bad, &[plain("a", "b")]), Err(SealError::Key), "{bad:?}");
        }
    }
}
