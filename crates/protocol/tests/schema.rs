//! `proto/guest.rs.in` is generated from `proto/guest.proto`. It is committed because its generator would take a third of
//! the time of a build.

use std::{error::Error, fs};

const GENERATED: &str = "proto/guest.rs.in";
const REFRESH: &str = "KEIKI_REFRESH_SCHEMA";

#[test]
fn the_committed_code_is_current() -> Result<(), Box<dyn Error>> {
    let out = tempfile::tempdir()?;
    let descriptors = protox::compile(["proto/guest.proto"], ["proto"])?;
    tonic_prost_build::configure().bytes(".").out_dir(out.path()).compile_fds(descriptors)?;
    let current = fs::read_to_string(out.path().join("keiki.guest.v1.rs"))?;
    if std::env::var_os(REFRESH).is_some() {
        fs::write(GENERATED, &current)?;
    }
    assert!(
        fs::read_to_string(GENERATED)? == current,
        "{GENERATED} is not current; refresh it with: {REFRESH}=1 cargo test -p keiki-protocol --test schema"
    );
    Ok(())
}
