//! Previews: their host names, and the passes in links to them.
//!
//! A browser sends no key, so a link carries a *pass*: its expiry, sealed together with the sandbox
//! and the port by a secret of this node. A pass opens one port and gives no access to the API. It
//! is not recorded, so it cannot be revoked before it expires: keep its lifetime short.

use crate::{Error, Result, Secret};
use keiki_types::SandboxId;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// A host name has at most 253 characters; before the suffix come `65535-`, an id and a dot.
const LONGEST_SUFFIX: usize = 253 - 6 - 36 - 1;

/// The previews of a node.
pub struct Previews {
    suffix: String,
    secret: Secret,
    /// This node asks for no key.
    pub is_open: bool,
}

/// A port of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The sandbox.
    pub id: SandboxId,
    /// The port inside it.
    pub port: u16,
}

impl Previews {
    /// Previews in the domain `suffix`.
    pub fn new(secret: Secret, suffix: &str, is_open: bool) -> Result<Self> {
        Ok(Self { suffix: checked(suffix)?, secret, is_open })
    }

    /// The host name of a preview.
    pub fn host(&self, target: Target) -> String {
        format!("{}-{}.{}", target.port, target.id, self.suffix)
    }

    /// The preview of a host name `PORT-ID.SUFFIX`; None for any other.
    pub fn named(&self, host: &str) -> Option<Target> {
        let host = host.to_ascii_lowercase();
        let label = host.strip_suffix(&self.suffix)?.strip_suffix('.')?;
        let (port, id) = label.split_once('-')?;
        // One spelling only: to a browser, another is another origin.
        let port = port.parse().ok().filter(|number: &u16| *number > 0 && number.to_string() == port)?;
        let id = id.parse::<SandboxId>().ok().filter(|known| known.to_string() == id)?;
        Some(Target { id, port })
    }

    /// A pass for a preview.
    pub fn pass(&self, target: Target, until: SystemTime) -> String {
        let until = until.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        format!("{until}.{}", self.seal(target, until).to_hex())
    }

    /// How long a pass is still valid for this preview; None if it is not.
    pub fn admits(&self, target: Target, pass: &str) -> Option<Duration> {
        let (until, seal) = pass.split_once('.')?;
        let until = until.parse().ok()?;
        // Compared in constant time.
        let is_ours = blake3::Hash::from_hex(seal).is_ok_and(|seal| seal == self.seal(target, until));
        let end = UNIX_EPOCH.checked_add(Duration::from_secs(until))?;
        let left = end.duration_since(SystemTime::now()).ok()?;
        is_ours.then_some(left)
    }

    fn seal(&self, target: Target, until: u64) -> blake3::Hash {
        let what = format!("keiki preview {} {} {until}", target.id, target.port);
        blake3::keyed_hash(&self.secret, what.as_bytes())
    }
}

fn checked(suffix: &str) -> Result<String> {
    let suffix = suffix.to_ascii_lowercase();
    let is_label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
    };
    if suffix.len() <= LONGEST_SUFFIX && suffix.split('.').all(is_label) {
        return Ok(suffix);
    }
    Err(Error::Invalid(format!("preview suffix {suffix:?} is not a domain name such as preview.example.com")))
}

#[cfg(test)]
mod tests {
    use super::{Previews, Target, checked};
    use keiki_types::SandboxId;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_pass_opens_one_port_of_one_sandbox_for_a_while() -> anyhow::Result<()> {
        let previews = Previews::new([1; 32], "localhost", false)?;
        let target = Target { id: SandboxId::new(), port: 8000 };
        let pass = previews.pass(target, SystemTime::now() + Duration::from_secs(60));
        assert!(previews.admits(target, &pass).is_some_and(|left| left <= Duration::from_secs(60)));
        // The same after a restart, and of no other node.
        assert!(Previews::new([1; 32], "localhost", false)?.admits(target, &pass).is_some());
        let other = Previews::new([2; 32], "localhost", false)?;
        assert!(other.admits(target, &pass).is_none());
        assert!(previews.admits(Target { port: 8001, ..target }, &pass).is_none());
        assert!(previews.admits(Target { id: SandboxId::new(), ..target }, &pass).is_none());
        let late = pass.replacen(|c: char| c.is_ascii_digit(), "9", 1);
        for bad in ["", ".", "x", &late, &pass[..pass.len() - 1]] {
            assert!(previews.admits(target, bad).is_none(), "{bad}");
        }
        let over = previews.pass(target, SystemTime::now() - Duration::from_secs(2));
        assert!(previews.admits(target, &over).is_none());
        Ok(())
    }

    #[test]
    fn previews_have_one_name_each() -> anyhow::Result<()> {
        let previews = Previews::new([1; 32], "Preview.Example.com", false)?;
        let target = Target { id: "0190b7a0-0000-7000-8000-000000000001".parse()?, port: 80 };
        let host = previews.host(target);
        assert_eq!(host, "80-0190b7a0-0000-7000-8000-000000000001.preview.example.com");
        assert_eq!(previews.named(&host.to_ascii_uppercase()), Some(target));
        for bad in [
            "preview.example.com",
            ".preview.example.com",
            "80.preview.example.com",
            &host.replacen("80-", "080-", 1),
            &host.replacen("80-", "0-", 1),
            &host.replacen("80-", "65536-", 1),
            &host.replacen("80-", "80-x.", 1),
            &host.replace("-0000-7000-8000-", "000070008000"),
            &format!("{host}.evil.example"),
            &host.replace(".preview", "xpreview"),
        ] {
            assert_eq!(previews.named(bad), None, "{bad}");
        }
        Ok(())
    }

    #[test]
    fn a_suffix_is_a_domain() {
        for good in ["localhost", "a.b-c.d"] {
            assert!(checked(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "a..b", ".a", "a b", "a/b", "a:1", "*.a", &"a".repeat(64), &"a.".repeat(150)] {
            assert!(checked(bad).is_err(), "{bad}");
        }
    }
}
