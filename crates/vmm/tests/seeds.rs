//! The fuzz target of state files without a fuzzer.

#[path = "../../../fuzz/bodies/frozen.rs"]
mod frozen;
#[path = "../../../fuzz/bodies/seeds.rs"]
mod seeds;

#[test]
fn state_files_that_nobody_wrote() {
    seeds::run("frozen", frozen::run, 3000);
}
