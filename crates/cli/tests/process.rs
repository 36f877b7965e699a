//! The program as a process: exit codes, and what goes to which stream.

use std::process::{Command, Output};

fn keiki(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_keiki"))
        .args(arguments)
        // Nothing listens on port 1, and no setting of whoever runs this test counts.
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
