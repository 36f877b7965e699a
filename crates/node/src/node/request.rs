//! What callers may ask for, checked before anything is made. Every refusal names the field.

use crate::error::{Error, Result};
use keiki_types::api::{BuildTemplate, CreateSandbox, ExecRequest};
use std::collections::BTreeMap;

/// TTL of a sandbox that names none, in seconds.
pub const DEFAULT_TTL: u64 = 3600;
/// Longest TTL: ten years.
const MAX_TTL: u64 = 10 * 365 * 24 * 3600;
/// Most children of one fork.
pub const MAX_FORK: usize = 64;
/// Linux takes no longer argument of a program (`MAX_ARG_STRLEN`, its end included).
const LONGEST_ARGUMENT: usize = (128 << 10) - 1;
const MAX_METADATA: usize = 64;
const MAX_METADATA_KEY: usize = 256;
const MAX_METADATA_VALUE: usize = 4096;

/// A TTL, or the default.
///
/// # Errors
/// 400 if it is not at least a second or too long.
pub fn ttl(asked: Option<i64>, default: u64) -> Result<u64> {
    let Some(asked) = asked else { return Ok(default) };
    match u64::try_from(asked) {
        Ok(seconds @ 1..=MAX_TTL) => Ok(seconds),
        _ => Err(Error::Invalid(format!("ttl_seconds must be from 1 to {MAX_TTL}, not {asked}"))),
    }
}

/// How many children.
///
/// # Errors
/// 400 if it is out of range.
pub fn fork_count(asked: Option<i64>) -> Result<usize> {
    match usize::try_from(asked.unwrap_or(1)) {
        Ok(count @ 1..=MAX_FORK) => Ok(count),
        _ => Err(Error::Invalid(format!("count must be from 1 to {MAX_FORK}, not {}", asked.unwrap_or(1)))),
    }
}

/// Labels within bounds.
///
/// # Errors
/// 400 if there are too many or one is too long.
pub fn metadata(labels: BTreeMap<String, String>) -> Result<BTreeMap<String, String>> {
    if labels.len() > MAX_METADATA {
        return Err(Error::Invalid(format!(
            "metadata must have at most {MAX_METADATA} entries, not {}",
            labels.len()
        )));
    }
    for (key, value) in &labels {
        if key.is_empty() || key.len() > MAX_METADATA_KEY || value.len() > MAX_METADATA_VALUE {
            let shown: String = key.chars().take(40).collect();
            return Err(Error::Invalid(format!(
                "metadata {shown:?} must have a key of 1 to {MAX_METADATA_KEY} bytes and a value of at most {MAX_METADATA_VALUE}"
            )));
        }
    }
    Ok(labels)
}

/// The asked-for shape is the baked one, or the error says how to get another.
///
/// # Errors
/// 400 if it is not.
pub fn shape(request: &CreateSandbox, name: &str, baked: keiki_types::Shape) -> Result<()> {
    // Shapes that cannot be built either must not be told how.
    let wanted = BuildTemplate {
        cpu: request.cpu,
        memory_mb: request.memory_mb,
        size_mb: request.disk_mb,
        ..BuildTemplate::default()
    };
    let wanted = build_shape(&wanted, baked)?;
    let field = match () {
        () if wanted.vcpus != baked.vcpus => "cpu",
        () if wanted.memory_mib != baked.memory_mib => "memory_mb",
        () if wanted.disk_mib != baked.disk_mib => "disk_mb",
        () => return Ok(()),
    };
    Err(Error::Invalid(format!(
        "{field}: template {name} is baked with {} vCPUs, {} MiB of RAM and {} MiB of disk; for another shape run \
         `keiki template build {name} --cpu {} --memory {} --disk {}` first",
        baked.vcpus, baked.memory_mib, baked.disk_mib, wanted.vcpus, wanted.memory_mib, wanted.disk_mib
    )))
}

/// A template's wanted shape.
///
/// # Errors
/// 400 if it is out of range.
pub fn build_shape(request: &BuildTemplate, default: keiki_types::Shape) -> Result<keiki_types::Shape> {
    let within = |field: &str, asked: Option<u64>, default: u64, range: std::ops::RangeInclusive<u64>| {
        let value = asked.unwrap_or(default);
        if range.contains(&value) {
            Ok(value)
        } else {
            let (low, high) = (range.start(), range.end());
            Err(Error::Invalid(format!("{field} must be from {low} to {high}, not {value}")))
        }
    };
    let vcpus = within("cpu", request.cpu, default.vcpus.into(), 1..=8)?;
    let memory = within("memory_mb", request.memory_mb, default.memory_mib.into(), 128..=3072)?;
    let disk = within("size_mb", request.size_mb, default.disk_mib.into(), 1024..=65_536)?;
    Ok(keiki_types::Shape {
        vcpus: u8::try_from(vcpus).unwrap_or(1),
        memory_mib: u32::try_from(memory).unwrap_or(256),
        disk_mib: u32::try_from(disk).unwrap_or(2048),
    })
}

/// What a create asks for besides its shape: TTL and labels.
///
/// # Errors
/// 400 if they are out of bounds, or if it asks for what this node has nothing of.
pub fn create(request: &CreateSandbox) -> Result<(u64, BTreeMap<String, String>)> {
    if !request.volumes.is_empty() {
        return Err(Error::Invalid(
            "volumes: this node has none; keep files in the sandbox, or in a snapshot of it".into(),
        ));
    }
    Ok((ttl(request.ttl_seconds, DEFAULT_TTL)?, metadata(request.metadata.clone().unwrap_or_default())?))
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// A line for the shell.
    Shell(String),
    /// Program and arguments.
    Argv(Vec<String>),
}

/// The command of an exec.
///
/// # Errors
/// 400 unless exactly one of `cmd` and `argv` is given and runnable.
pub fn command(request: &ExecRequest) -> Result<Command> {
    let command = match (&request.cmd, &request.argv) {
        (Some(cmd), None) if !cmd.is_empty() => Command::Shell(cmd.clone()),
        (None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => {
            Command::Argv(argv.clone())
        }
        (Some(_), Some(_)) => return Err(Error::Invalid("give cmd or argv, not both".into())),
        (Some(_), None) => return Err(Error::Invalid("cmd must not be empty".into())),
        (None, Some(_)) => return Err(Error::Invalid("argv must name a program".into())),
        (None, None) => {
            return Err(Error::Invalid(
                "cmd (a shell line) or argv (program and arguments) is required".into(),
            ));
        }
    };
    let longest = match &command {
        Command::Shell(line) => line.len(),
        Command::Argv(argv) => argv.iter().map(String::len).max().unwrap_or(0),
    };
    if longest > LONGEST_ARGUMENT {
        return Err(Error::TooLarge(format!(
            "cmd and each of argv must have at most {LONGEST_ARGUMENT} bytes, not {longest}: write a file and run that"
        )));
    }
    let has_nul = match &command {
        Command::Shell(line) => line.contains('\0'),
        Command::Argv(argv) => argv.iter().any(|arg| arg.contains('\0')),
    };
    if has_nul {
        return Err(Error::Invalid("cmd and argv must not contain NUL bytes".into()));
    }
    for (name, value) in &request.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Error::Invalid(format!("env: {name:?} is no usable variable")));
        }
    }
    Ok(command)
}

/// The time limit of an exec in ms, 0 for none.
///
/// # Errors
/// 400 if it is not a positive number.
pub fn timeout_ms(seconds: Option<f64>) -> Result<u64> {
    const LONGEST: f64 = 10.0 * 365.0 * 86_400.0;
    match seconds {
        None => Ok(0),
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // within the checked range
        Some(seconds) if seconds > 0.0 && seconds <= LONGEST => Ok(((seconds * 1000.0).ceil() as u64).max(1)),
        Some(seconds) => {
            Err(Error::Invalid(format!("timeout_seconds must be greater than 0, not {seconds}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Command, LONGEST_ARGUMENT, MAX_TTL, command, fork_count, metadata, shape, timeout_ms, ttl};
    use crate::error::Error;
    use keiki_types::{
        Shape,
        api::{CreateSandbox, ExecRequest},
    };
    use std::collections::BTreeMap;

    #[test]
    fn ttl_bounds() {
        assert_eq!(ttl(None, 7).ok(), Some(7));
        assert_eq!(ttl(Some(1), 7).ok(), Some(1));
        for bad in [0, -1, i64::MIN, i64::MAX] {
            let refused = ttl(Some(bad), 7).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(refused.starts_with("ttl_seconds must be from 1"), "{refused}");
        }
        assert!(ttl(i64::try_from(MAX_TTL).ok(), 7).is_ok());
    }

    #[test]
    fn counts_and_labels_are_bounded() {
        assert_eq!(fork_count(None).ok(), Some(1));
        assert!(fork_count(Some(0)).is_err());
        assert!(fork_count(Some(65)).is_err());
        assert!(metadata((0..65).map(|n| (n.to_string(), String::new())).collect()).is_err());
        assert!(metadata(BTreeMap::from([(String::new(), String::new())])).is_err());
        assert!(metadata(BTreeMap::from([("k".into(), "v".repeat(4097))])).is_err());
    }

    #[test]
    fn another_shape_is_refused_with_the_way_to_get_it() {
        let baked = Shape { vcpus: 1, memory_mib: 256, disk_mib: 2048 };
        let asked = CreateSandbox { memory_mb: Some(512), ..CreateSandbox::default() };
        let refused = shape(&asked, "base", baked).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            refused.contains("memory_mb")
                && refused.contains("template build base --cpu 1 --memory 512 --disk 2048")
        );
        let never = CreateSandbox { cpu: Some(0), ..CreateSandbox::default() };
        let refused = shape(&never, "base", baked).err().map(|error| error.to_string()).unwrap_or_default();
        assert_eq!(refused, "cpu must be from 1 to 8, not 0");
        assert!(shape(&CreateSandbox { cpu: Some(1), ..CreateSandbox::default() }, "base", baked).is_ok());
    }

    #[test]
    fn exactly_one_command() {
        let of = |cmd: Option<&str>, argv: Option<Vec<&str>>| {
            command(&ExecRequest {
                cmd: cmd.map(Into::into),
                argv: argv.map(|argv| argv.into_iter().map(Into::into).collect()),
                ..ExecRequest::default()
            })
        };
        assert_eq!(of(Some("ls"), None).ok(), Some(Command::Shell("ls".into())));
        assert!(of(Some("ls"), Some(vec!["ls"])).is_err());
        assert!(of(None, None).is_err());
        assert!(of(Some(""), None).is_err());
        assert!(of(None, Some(vec![])).is_err());
        assert!(of(None, Some(vec![""])).is_err());
        assert!(of(Some("a\0b"), None).is_err());
        assert!(of(Some(&"x".repeat(LONGEST_ARGUMENT)), None).is_ok());
        assert!(matches!(of(Some(&"x".repeat(LONGEST_ARGUMENT + 1)), None), Err(Error::TooLarge(_))));
    }

    #[test]
    fn timeouts_are_positive_and_never_round_to_none() {
        assert_eq!(timeout_ms(None).ok(), Some(0));
        assert_eq!(timeout_ms(Some(0.000_01)).ok(), Some(1));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(timeout_ms(Some(bad)).is_err(), "{bad}");
        }
    }
}
