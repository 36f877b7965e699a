//! Validation of requests, before anything is created. Every error names the field.

use crate::{Error, Result};
use base64::Engine as _;
use bytes::Bytes;
use keiki_types::api::{
    BuildTemplate, CreateSandbox, ExecRequest, MAX_FORK,
    execs::{PtySize, Signal},
};
use std::collections::BTreeMap;

/// Default TTL in seconds.
pub const DEFAULT_TTL: u64 = 3600;
/// Longest TTL: ten years.
const MAX_TTL: u64 = 10 * 365 * 24 * 3600;
/// Longest argument of a program in Linux (`MAX_ARG_STRLEN`, its terminator included).
const LONGEST_ARGUMENT: usize = (128 << 10) - 1;
const MAX_METADATA: usize = 64;
const MAX_METADATA_KEY: usize = 256;
const MAX_METADATA_VALUE: usize = 4096;

/// The TTL in seconds.
pub fn ttl(asked: Option<i64>, default: u64) -> Result<u64> {
    let Some(asked) = asked else { return Ok(default) };
    match u64::try_from(asked) {
        Ok(seconds @ 1..=MAX_TTL) => Ok(seconds),
        _ => Err(Error::Invalid(format!("ttl_seconds must be from 1 to {MAX_TTL}, not {asked}"))),
    }
}

/// The number of children.
pub fn fork_count(asked: Option<i64>) -> Result<usize> {
    let count = asked.unwrap_or(1);
    let fits = usize::try_from(count).ok().filter(|_| (1..=MAX_FORK).contains(&count));
    fits.ok_or_else(|| Error::Invalid(format!("count must be from 1 to {MAX_FORK}, not {count}")))
}

/// Bounds of labels.
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

/// The requested shape must be the baked one; the error says how to get another.
pub fn shape(request: &CreateSandbox, name: &str, baked: keiki_types::Shape) -> Result<()> {
    // No advice for a shape that cannot be built.
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

/// The shape of a template to build.
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

/// TTL and labels of a new sandbox.
pub fn create(request: &CreateSandbox) -> Result<(u64, BTreeMap<String, String>)> {
    if !request.volumes.is_empty() {
        return Err(Error::Invalid(
            "volumes: this node has no volumes; keep files in the sandbox or in a snapshot of it".into(),
        ));
    }
    Ok((ttl(request.ttl_seconds, DEFAULT_TTL)?, metadata(request.metadata.clone().unwrap_or_default())?))
}

/// The command of an exec: exactly one of `cmd` and `argv`.
pub fn check_command(request: &ExecRequest) -> Result<()> {
    match (&request.cmd, &request.argv) {
        (Some(cmd), None) if !cmd.is_empty() => {}
        (None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => {}
        (Some(_), Some(_)) => return Err(Error::Invalid("give cmd or argv, not both".into())),
        (Some(_), None) => return Err(Error::Invalid("cmd must not be empty".into())),
        (None, Some(_)) => return Err(Error::Invalid("argv must name a program".into())),
        (None, None) => {
            return Err(Error::Invalid(
                "cmd (a shell line) or argv (program and arguments) is required".into(),
            ));
        }
    }
    let words = request.cmd.iter().chain(request.argv.iter().flatten());
    let longest = words.map(String::len).max().unwrap_or(0);
    if longest > LONGEST_ARGUMENT {
        return Err(Error::TooLarge(format!(
            "cmd and each of argv must have at most {LONGEST_ARGUMENT} bytes, not {longest}: write a file and run it"
        )));
    }
    let nul = |text: &String| text.contains('\0');
    let fields = [
        ("cmd", request.cmd.as_ref().is_some_and(nul)),
        ("argv", request.argv.iter().flatten().any(nul)),
        ("cwd", request.cwd.as_ref().is_some_and(nul)),
        ("user", request.user.as_ref().is_some_and(nul)),
    ];
    if let Some((field, _)) = fields.iter().find(|(_, has_nul)| *has_nul) {
        return Err(Error::Invalid(format!("{field} must not contain a NUL byte")));
    }
    for (name, value) in &request.env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(Error::Invalid(format!("env: {name:?} is not a valid environment variable")));
        }
    }
    Ok(())
}

/// The input of a command; None if it has none.
pub fn stdin(request: &ExecRequest) -> Result<Option<Bytes>> {
    match (&request.stdin, &request.stdin_base64) {
        (Some(_), Some(_)) => Err(Error::Invalid("give stdin or stdin_base64, not both".into())),
        (Some(text), None) => Ok(Some(text.clone().into())),
        (None, Some(coded)) => match base64::engine::general_purpose::STANDARD.decode(coded) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) => Err(Error::Invalid(format!("stdin_base64 is not base64: {error}"))),
        },
        (None, None) => Ok(None),
    }
}

/// Permission bits from octal text.
pub fn mode(text: &str) -> Result<u32> {
    let digits = (1..=5).contains(&text.len()) && text.bytes().all(|digit| digit.is_ascii_digit());
    u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o7777).ok_or_else(|| {
        Error::Invalid(format!("mode must be octal permission bits such as 0755, not {text:?}"))
    })
}

/// The size of a terminal.
pub fn terminal(cols: u32, rows: u32) -> Result<PtySize> {
    for (name, value) in [("cols", cols), ("rows", rows)] {
        if !(1..=1000).contains(&value) {
            return Err(Error::Invalid(format!("{name} must be from 1 to 1000, not {value}")));
        }
    }
    Ok(PtySize { cols, rows })
}

/// Names of signals by number, from 1.
const SIGNALS: [&str; 31] = [
    "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2", "PIPE",
    "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG", "XCPU", "XFSZ",
    "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// The number of a signal.
pub fn signal(signal: &Signal) -> Result<i32> {
    let number = match signal {
        Signal::Number(number) => i32::try_from(*number).ok().filter(|number| (1..=64).contains(number)),
        Signal::Name(name) => {
            let upper = name.to_ascii_uppercase();
            let bare = upper.strip_prefix("SIG").unwrap_or(&upper);
            let place = SIGNALS.iter().position(|known| *known == bare);
            place.and_then(|place| i32::try_from(place + 1).ok())
        }
    };
    number.ok_or_else(|| {
        let said = match signal {
            Signal::Number(number) => number.to_string(),
            Signal::Name(name) => format!("{:?}", name.chars().take(40).collect::<String>()),
        };
        Error::Invalid(format!("signal must be a name such as TERM, or a number from 1 to 64, not {said}"))
    })
}

/// The time limit of an exec in ms, 0 for none.
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
    use super::{
        LONGEST_ARGUMENT, MAX_TTL, check_command, fork_count, metadata, mode, shape, signal, stdin, terminal,
        timeout_ms, ttl,
    };
    use crate::Error;
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
    fn what_could_not_be_run_is_refused_by_its_field() {
        let of = |json: &str| {
            let request: ExecRequest = serde_json::from_str(json).unwrap_or_default();
            let checked = check_command(&request).and_then(|_| stdin(&request));
            let checked = checked.and_then(|_| timeout_ms(request.timeout_seconds));
            checked.err().map(|error| error.to_string()).unwrap_or_default()
        };
        for good in [
            r#"{"cmd":"ls"}"#,
            r#"{"argv":["true",""]}"#,
            r#"{"cmd":"x","timeout_seconds":0.5,"env":{"A":"="},"stdin":"\u0000"}"#,
            r#"{"cmd":"x","stdin_base64":"AA=="}"#,
        ] {
            assert_eq!(of(good), "", "{good}");
        }
        for (bad, named) in [
            ("{}", "cmd (a shell line) or argv"),
            (r#"{"cmd":""}"#, "cmd must not be empty"),
            (r#"{"cmd":"x","argv":["x"]}"#, "cmd or argv, not both"),
            (r#"{"argv":[]}"#, "argv must name a program"),
            (r#"{"argv":[""]}"#, "argv must name a program"),
            (r#"{"cmd":"x","timeout_seconds":0}"#, "timeout_seconds"),
            (r#"{"cmd":"x","timeout_seconds":-1}"#, "timeout_seconds"),
            (r#"{"cmd":"x","timeout_seconds":1e300}"#, "timeout_seconds"),
            (r#"{"cmd":"x","stdin":"","stdin_base64":""}"#, "stdin or stdin_base64, not both"),
            (r#"{"cmd":"x","stdin_base64":"?"}"#, "stdin_base64 is not base64"),
            (r#"{"cmd":"x","env":{"":"x"}}"#, "env"),
            (r#"{"cmd":"x","env":{"A=B":"x"}}"#, "env"),
            (r#"{"cmd":"a\u0000b"}"#, "cmd must not contain a NUL"),
            (r#"{"argv":["a","\u0000"]}"#, "argv must not contain a NUL"),
            (r#"{"cmd":"x","cwd":"\u0000"}"#, "cwd must not contain a NUL"),
            (r#"{"cmd":"x","user":"\u0000"}"#, "user must not contain a NUL"),
        ] {
            assert!(of(bad).contains(named), "{bad}: {}", of(bad));
        }
        let long = |len| check_command(&ExecRequest { cmd: Some("x".repeat(len)), ..ExecRequest::default() });
        assert!(long(LONGEST_ARGUMENT).is_ok());
        assert!(matches!(long(LONGEST_ARGUMENT + 1), Err(Error::TooLarge(_))));
    }

    #[test]
    fn signals_have_names_and_numbers() {
        let of = |json: &str| serde_json::from_str(json).ok().and_then(|text| signal(&text).ok());
        for (json, number) in [
            ("15", 15),
            (r#""TERM""#, 15),
            (r#""sigkill""#, 9),
            (r#""SIGSYS""#, 31),
            ("64", 64),
            (r#""hup""#, 1),
        ] {
            assert_eq!(of(json), Some(number), "{json}");
        }
        for bad in ["0", "65", "-1", r#""""#, r#""SIG""#, r#""TERMINATE""#, r#""15x""#] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn modes_are_mode() {
        assert_eq!(mode("0755").ok(), Some(0o755));
        assert_eq!(mode("7").ok(), Some(7));
        assert_eq!(mode("04755").ok(), Some(0o4755));
        for bad in ["", "8", "-1", "+7", "0o755", "17777", "777777", "rwx"] {
            assert!(mode(bad).unwrap_err().to_string().starts_with("mode must be octal"), "{bad}");
        }
    }

    #[test]
    fn terminals_have_a_size() {
        assert!(terminal(1, 1000).is_ok());
        for (cols, rows, named) in [(0, 24, "cols"), (80, 0, "rows"), (80, 1001, "rows")] {
            let refused = terminal(cols, rows).err().map(|error| error.to_string()).unwrap_or_default();
            assert!(refused.starts_with(named), "{refused}");
        }
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
