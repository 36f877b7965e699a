//! Compiles the library that is loaded into QEMU. The engine carries it, so that a node is one file.

use std::{env, path::PathBuf, process::Command};

fn main() {
    let source = "preload/ram.rs";
    println!("cargo::rerun-if-changed={source}");
    let var = |name: &str| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let out = PathBuf::from(var("OUT_DIR")).join("ram.so");
    let mut rustc = Command::new(var("RUSTC"));
    rustc.args(["--edition=2024", "--crate-type=cdylib", "--crate-name=keiki_ram"]);
    rustc.args(["-Cpanic=abort", "-Copt-level=2", "-Cstrip=symbols", "-Dwarnings"]);
    rustc.args(["--target", &var("TARGET"), source, "-o"]).arg(out);
    let status = rustc.status().expect("rustc runs: cargo has just done so");
    assert!(status.success(), "{source} does not compile");
}
