//! The program as a process: exit codes, and what goes to which stream.

use std::process::{Command, Output};

fn keiki(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keiki"))
        .args(arguments)
        // Nothing listens on port 1, and no setting of the environment counts.
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("KEIKI_URL", "http://127.0.0.1:1")
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn mistakes_and_absent_nodes_end_with_125_and_say_why_on_stderr() {
    for (arguments, named) in [
        (&["no-such-command"][..], "no-such-command"),
        (&["rm"], "SANDBOX"),
        (&["ls"], "no node answers at http://127.0.0.1:1"),
        (&["exec", "not-hex!", "ls"], "no node answers"),
        (&["--url", "https://x", "ls"], "must start with http://"),
        (&["cp", "a", "b"], "must be in a sandbox"),
        (&["shell", "0198f2a4"], "needs a terminal"),
        (&["node", "--config", "/no/such/file.toml"], "/no/such/file.toml"),
    ] {
        let output = keiki(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn help_goes_to_stdout() {
    for arguments in
        [&["help"][..], &["--help"], &["exec", "--help"], &["--version"], &["completion", "bash"]]
    {
        let output = keiki(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{arguments:?}");
    }
    assert!(text(&keiki(&["help"]).stdout).contains("Exit codes:"));
}

#[test]
fn version_and_doctor_need_no_node_and_speak_json() {
    let version = keiki(&["version", "-o", "json"]);
    assert_eq!(version.status.code(), Some(0));
    let version: serde_json::Value = serde_json::from_slice(&version.stdout).unwrap();
    assert!(version["node"].is_null());

    let doctor = keiki(&["doctor", "-o", "json", "--data-dir", "/tmp"]);
    let report: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    let failed = checks.iter().any(|check| check["ok"] == "fail");
    assert_eq!(doctor.status.code(), Some(i32::from(failed)));
    for check in checks {
        assert_eq!(check["ok"] == "ok", check["remedy"] == "", "every problem has a remedy: {check}");
    }
}

/// A report of one metric with this median.
fn report(dir: &std::path::Path, name: &str, median: f64) -> String {
    let path = dir.join(name);
    let percentiles = format!(r#""p50": {median}, "p90": {median}, "p99": {median}"#);
    let result = format!(r#"{{"name": "kill", "params": {{}}, "n": 3, {percentiles}, "unit": "ms"}}"#);
    let machine = r#"{"cpu": "x", "cores": 2, "ram_mib": 3, "kernel": "6"}"#;
    let report = format!(r#"{{"machine": {machine}, "engine": "qemu", "results": [{result}]}}"#);
    std::fs::write(&path, report).unwrap();
    path.to_string_lossy().into_owned()
}

#[test]
fn a_benchmark_that_became_worse_ends_with_1() {
    let dir = tempfile::tempdir().unwrap();
    let (old, new) = (report(dir.path(), "old.json", 10.0), report(dir.path(), "new.json", 14.0));
    let compared = |from: &str, with: &str, more: &[&str]| {
        let output = keiki(&[&["bench", "--from", from, "--compare", with][..], more].concat());
        (output.status.code(), text(&output.stdout))
    };
    let (code, said) = compared(&new, &old, &[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("1.40") && said.contains("worse"), "{said}");
    assert_eq!(compared(&new, &old, &["--threshold", "1.5"]).0, Some(0));
    let (code, said) = compared(&old, &new, &["-o", "json"]);
    assert_eq!(code, Some(0));
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        (&said["comparison"][0]["verdict"], &said["results"][0]["p50"]),
        (&"better".into(), &10.0.into())
    );

    let chart = dir.path().join("chart.svg");
    let drawn = keiki(&["bench", "--from", &new, "--chart", &chart.to_string_lossy()]);
    assert_eq!(drawn.status.code(), Some(0));
    assert!(std::fs::read_to_string(chart).unwrap().contains("kill"));
    let page = text(&keiki(&["bench", "--from", &new, "--markdown"]).stdout);
    assert!(page.ends_with("|---|\n| kill |  | 3 | 14.0 | 14.0 | 14.0 | ms |\n"), "{page}");
    for (wrong, named) in [("/no/such.json", "No such file"), ("Cargo.toml", "not a report")] {
        let output = keiki(&["bench", "--from", wrong]);
        assert_eq!(output.status.code(), Some(125));
        assert!(text(&output.stderr).contains(named), "{}", text(&output.stderr));
    }
}

/// Tools are started with what they need, whatever this program was started with.
#[test]
fn tools_inherit_no_descriptors() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let (tool, seen) = (dir.path().join("qemu-system-x86_64"), dir.path().join("seen"));
    let script =
        format!("#!/bin/sh\n[ ! -e /proc/self/fd/9 ] || echo 9 >>{0}\necho run >>{0}\n", seen.display());
    std::fs::write(&tool, script).unwrap();
    std::fs::set_permissions(&tool, std::fs::Permissions::from_mode(0o755)).unwrap();
    let keiki = env!("CARGO_BIN_EXE_keiki");
    let line = format!("exec 9</; PATH={}:$PATH exec {keiki} doctor", dir.path().display());
    Command::new("sh").args(["-c", &line]).output().unwrap();
    let seen = std::fs::read_to_string(&seen).unwrap();
    assert!(seen.lines().count() > 0 && seen.lines().all(|line| line == "run"), "{seen}");
}
