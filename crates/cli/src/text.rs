//! Ages, sizes, durations and pairs, as typed and as shown.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use keiki_client::api::secrets::Secret;
use serde::de::{DeserializeOwned, IntoDeserializer, value};
use std::{collections::BTreeMap, time::Duration};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// `12s`, `5m`, `3h`, `2d`.
pub fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m", seconds / 60),
        3600..86_400 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// How long ago an RFC 3339 time was; `-` if it cannot be parsed.
pub fn age(created_at: &str, now: OffsetDateTime) -> String {
    match OffsetDateTime::parse(created_at, &Rfc3339) {
        Ok(then) => span((now - then).whole_seconds().try_into().unwrap_or(0)),
        Err(_) => "-".into(),
    }
}

/// `512 B`, `1.5 MiB`.
pub fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A guest's text on one line, without characters that control a terminal.
pub fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// `12.3`, or `-`.
pub fn ms(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), |ms| format!("{ms:.1}"))
}

/// Seconds, or with units: `90`, `1.5`, `500ms`, `30s`, `5m`, `2h`, `1h30m`, `7d`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let parsed = match text.parse() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    let duration = parsed.ok_or_else(|| format!("{text:?} is not a duration: use 90s, 10m, 2h"))?;
    if duration.is_zero() { Err("must be longer than zero".into()) } else { Ok(duration) }
}

/// A TTL in whole seconds.
pub fn parse_ttl(text: &str) -> Result<i64, String> {
    let seconds = parse_duration(text)?.as_secs();
    if seconds == 0 {
        return Err("must be at least one second".into());
    }
    i64::try_from(seconds).map_err(|_| format!("{text:?} is too long"))
}

/// Values that are written alike on the command line and in the file, each with its help.
pub fn one_of<T, const N: usize>(words: [(&'static str, &'static str); N]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    let words = words.map(|(word, help)| PossibleValue::new(word).help(help));
    PossibleValuesParser::new(words).try_map(|word| {
        let word: value::StringDeserializer<value::Error> = word.into_deserializer();
        T::deserialize(word)
    })
}

/// `KEY=VALUE`.
pub fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.into(), value.into())),
        _ => Err(format!("{text:?} is not KEY=VALUE")),
    }
}

/// Pairs as a map; None if there are none.
pub fn map<T>(pairs: Vec<(String, T)>) -> Option<BTreeMap<String, T>> {
    (!pairs.is_empty()).then(|| pairs.into_iter().collect())
}

/// `NAME=@FILE`, or `NAME` for the value of that variable. Never the value itself: any user of this
/// host can read command lines.
pub fn parse_secret(text: &str) -> Result<(String, Secret), String> {
    let (name, value) = match text.split_once('=') {
        Some((name, source)) => {
            let path = source.strip_prefix('@').ok_or_else(|| {
                format!(
                    "a value on the command line is visible to every user of this host: use {name}=@FILE, \
                     or {name} for an environment variable"
                )
            })?;
            let value =
                std::fs::read_to_string(path).map_err(|error| format!("cannot read {path}: {error}"))?;
            (name, value)
        }
        None => {
            let value = std::env::var(text).map_err(|_| {
                format!("environment variable {text} is not set; use {text}=@FILE to read a file")
            })?;
            (text, value)
        }
    };
    Ok((name.into(), Secret { value, owner: None, on_fork: None, on_restore: None }))
}

/// `KEY=VALUE`, or `KEY` for the value of that variable.
pub fn parse_env(text: &str) -> Result<(String, String), String> {
    if text.contains('=') {
        return parse_pair(text);
    }
    match std::env::var(text) {
        Ok(value) if !text.is_empty() => Ok((text.into(), value)),
        _ => Err(format!("{text:?} is neither KEY=VALUE nor a variable that is set here")),
    }
}

#[cfg(test)]
mod tests {
    use super::{age, bytes, parse_duration, parse_env, parse_pair, parse_ttl, span};
    use std::time::Duration;
    use time::macros::datetime;

    #[test]
    fn spans_and_ages() {
        assert_eq!([span(0), span(59), span(60), span(7200), span(200_000)], ["0s", "59s", "1m", "2h", "2d"]);
        let now = datetime!(2026-01-02 00:00 UTC);
        assert_eq!(age("2026-01-01T23:59:30Z", now), "30s");
        // A clock that is ahead gives no negative age.
        assert_eq!(age("2026-01-02T00:00:30.5Z", now), "0s");
        assert_eq!(age("yesterday", now), "-");
    }

    #[test]
    fn sizes() {
        assert_eq!(
            [bytes(0), bytes(1023), bytes(1536), bytes(3 << 30)],
            ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
        );
    }

    #[test]
    fn durations() {
        let hours = 3_600_000;
        for (text, ms) in [
            ("90", 90_000),
            ("1.5", 1500),
            (".5", 500),
            ("500ms", 500),
            ("1.5s", 1500),
            ("5m", 300_000),
            ("2h", 2 * hours),
            ("1.5h", 90 * 60_000),
            ("30d", 30 * 24 * hours),
            ("1h30m", 90 * 60_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-1", "5x", "5 x", "0", "0s", "nan", "inf", "1e300", "é"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        assert_eq!(parse_ttl("1h"), Ok(3600));
        assert!(parse_ttl("10ms").is_err());
    }

    #[test]
    fn pairs() {
        assert_eq!(parse_pair("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(parse_pair("A="), Ok(("A".into(), String::new())));
        assert!(parse_pair("=b").is_err());
        assert!(parse_env("KEIKI_NO_SUCH_VARIABLE_AT_ALL").is_err());
        assert!(parse_env("PATH").is_ok());
    }
}
