//! Whether KVM on this host is worth using.
//!
//! A `/dev/kvm` may interpret every instruction: then QEMU's translator is faster, and Linux takes
//! too long to boot. So the monitor measures, in a separate process, and the engine decides.

use super::host::{Host, KvmConfig};
use crate::{Capabilities, EngineError, Result, cgroup, files::probe_store, process::blocking, users::USERS};
use keiki_sys::error_chain;
use keiki_types::EngineKind;
use std::{
    io::Read,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// Guest instructions a second that only hardware reaches.
const NATIVE: u64 = 100_000_000;
/// How long the measurement may take.
const PATIENCE: Duration = Duration::from_secs(15);
/// The longest answer.
const ANSWER: u64 = 1024;

pub(super) async fn probe(host: &Arc<Host>) -> Capabilities {
    let of = Arc::clone(host);
    let measured = blocking(move || {
        probe_store(&of.config.common)?;
        measure(&of.config.binary)
    });
    let (usable, version, note) = match measured.await {
        Ok((version, speed)) => judge(&host.config, version, speed),
        Err(error) => (false, String::new(), error_chain(&error)),
    };
    Capabilities { kind: EngineKind::Kvm, usable, version, note }
}

fn judge(config: &KvmConfig, version: String, speed: u64) -> (bool, String, String) {
    let jail = match config.common.first_user {
        Some(first) => format!("jailed, as users {first} to {}", first + (USERS - 1)),
        None => "its processes are not jailed, because the node is not root".into(),
    };
    let usable = speed >= NATIVE || config.forced;
    let note = match usable {
        true => format!("{}; {jail}; {}", words(speed), cgroup::note()),
        false => format!("{}: it is emulated", words(speed)),
    };
    (usable, version, note)
}

/// Does KVM run guests at the speed of the processor here? And a sentence about it. Blocks.
#[must_use]
pub fn is_native(binary: &Path) -> (bool, String) {
    match measure(binary) {
        Ok((_, speed)) if speed >= NATIVE => (true, words(speed)),
        Ok((_, speed)) => (false, format!("{}: it is emulated", words(speed))),
        Err(error) => (false, error_chain(&error)),
    }
}

fn words(speed: u64) -> String {
    let (millions, native) = (speed / 1_000_000, NATIVE / 1_000_000);
    format!(
        "a guest runs {millions} million instructions a second on KVM; hardware reaches at least {native}"
    )
}

/// Version and speed, as the monitor prints them.
fn measure(binary: &Path) -> Result<(String, u64)> {
    let mut command = Command::new(binary);
    command.arg("--probe").env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(EngineError::at("run", binary))?;
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(EngineError::at("wait for", binary))? {
            Some(status) => break status,
            None if started.elapsed() > PATIENCE => {
                child.kill().and_then(|()| child.wait()).map_err(EngineError::at("end", binary))?;
                return Err(EngineError::Monitor(
                    "cannot run a guest on KVM here: it makes no progress".into(),
                ));
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let read = |pipe: Option<&mut dyn Read>| {
        let mut text = String::new();
        // Without text there is no answer.
        let _ = pipe.map(|pipe| pipe.take(ANSWER).read_to_string(&mut text));
        text.trim().to_owned()
    };
    if !status.success() {
        let why = read(child.stderr.as_mut().map(|pipe| pipe as &mut dyn Read));
        return Err(EngineError::Monitor(format!("cannot run a guest here: {why}")));
    }
    let answer = read(child.stdout.as_mut().map(|pipe| pipe as &mut dyn Read));
    parse(&answer).ok_or_else(|| EngineError::Monitor("does not print its version and speed".into()))
}

/// `keiki-vmm VERSION SPEED`.
fn parse(answer: &str) -> Option<(String, u64)> {
    let mut words = answer.split_whitespace();
    let (name, version, speed) = (words.next()?, words.next()?, words.next()?);
    (name == "keiki-vmm" && words.next().is_none()).then_some(())?;
    Some((version.chars().take(100).collect(), speed.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::{judge, measure, parse};
    use crate::{Common, kvm::KvmConfig};

    fn config(binary: &str, forced: bool) -> KvmConfig {
        KvmConfig { binary: binary.into(), forced, common: Common::new("/nowhere".into()) }
    }

    #[test]
    fn only_a_fast_guest_or_a_setting_makes_it_usable() {
        assert_eq!(parse("keiki-vmm 0.1.0 2400000"), Some(("0.1.0".into(), 2_400_000)));
        for bad in ["", "keiki-vmm 0.1.0", "qemu 1 2", "keiki-vmm 1 two", "keiki-vmm 1 2 3"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let usable = |speed, forced| judge(&config("x", forced), "1".into(), speed).0;
        assert!(usable(100_000_000, false) && usable(2_400_000, true) && !usable(2_400_000, false));
        let (_, _, note) = judge(&config("x", false), "1".into(), 2_400_000);
        assert!(note.starts_with("a guest runs 2 million instructions a second"), "{note}");
    }

    #[test]
    fn a_program_that_does_not_answer_is_reported() {
        let why = |binary: &str| measure(binary.as_ref()).map_err(|error| error.to_string());
        assert!(why("/nowhere/keiki-vmm").is_err_and(|why| why.contains("cannot run /nowhere/keiki-vmm")));
        assert!(why("/bin/true").is_err_and(|why| why.contains("does not print")));
        assert!(why("/bin/false").is_err_and(|why| why.contains("cannot run a guest here")));
    }
}
