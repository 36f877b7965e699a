//! The whole way with real packages. Needs root, the network and a minute, so only where
//! `KEIKI_TEST_IMAGE=1`.
#![allow(clippy::unwrap_used)]

use keiki_image::{BASE, Builder, Catalog};
use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
};

fn debugfs(raw: &Path, request: &str) -> String {
    let out = Command::new("/usr/sbin/debugfs").args(["-R", request]).arg(raw).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

#[test]
fn template_base() {
    if std::env::var_os("KEIKI_TEST_IMAGE").is_none() {
        keiki_testing::skip("image", "KEIKI_TEST_IMAGE is not set");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // Kept between runs where a place is named.
    let cache = std::env::var_os("KEIKI_TEST_CACHE").map_or_else(|| dir.path().join("cache"), Into::into);
    let guest = dir.path().join("guest");
    fs::write(&guest, "agent").unwrap();
    fs::set_permissions(&guest, fs::Permissions::from_mode(0o755)).unwrap();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let builder = Builder::new(
        &cache,
        Arc::new(move |line: &str| {
            eprintln!("{line}");
            sink.lock().unwrap().push(line.to_owned());
        }),
    );
    let base = Catalog::new(None).get(BASE).unwrap().unwrap().rootfs();
    let built = builder.template(&base, &guest).unwrap();

    assert!(built.kernel.release.contains("cloud-amd64"), "{}", built.kernel.release);
    assert!(built.kernel.modules_dir.join("modules.dep").is_file());
    assert_eq!(&fs::read(&built.kernel.bzimage).unwrap()[0x202..0x206], b"HdrS");
    assert!(built.rootfs.used_bytes < 350 << 20, "{} bytes", built.rootfs.used_bytes);
    assert!(built.rootfs.packages.iter().any(|package| package.starts_with("git ")));

    let raw = &built.rootfs.raw;
    assert!(Command::new("/usr/sbin/e2fsck").arg("-fn").arg(raw).status().unwrap().success());
    assert_eq!(debugfs(raw, "cat /etc/hostname"), "keiki\n");
    assert_eq!(debugfs(raw, "cat /etc/machine-id"), "");
    assert!(!debugfs(raw, "ls -p /etc").contains("/resolv.conf/"));
    assert!(debugfs(raw, "stat /usr/bin/python").contains("python3"));
    assert!(debugfs(raw, "cat /etc/python3.11/sitecustomize.py").ends_with("\nimport keiki_generation\n"));
    let compiled = debugfs(raw, "ls -p /usr/lib/python3.11/__pycache__");
    assert!(compiled.contains("/keiki_generation.cpython-311.pyc/"), "it is compiled at each start");
    // One line each, /INODE/MODE/…: nothing but directories there, the guest's devtmpfs has the
    // nodes.
    let devices = debugfs(raw, "ls -p /dev");
    assert!(
        devices.lines().filter_map(|line| line.split('/').nth(2)).all(|mode| mode.starts_with("04")),
        "{devices}"
    );

    // Again: every part is found, nothing is done, the name is the same.
    lines.lock().unwrap().clear();
    assert_eq!(builder.template(&base, &guest).unwrap(), built);
    assert!(lines.lock().unwrap().is_empty());
    // Another agent is another template, on the same disk.
    fs::write(&guest, "other").unwrap();
    let other = builder.template(&base, &guest).unwrap();
    assert_ne!(other.digest, built.digest);
    assert_eq!(other.rootfs, built.rootfs);
    assert!(!cache.join("tmp").exists());
}
