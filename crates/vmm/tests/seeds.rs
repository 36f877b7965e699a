//! The fuzz target of state files without a fuzzer.

#[path = "../../../fuzz/bodies/frozen.rs"]
mod frozen;
#[path = "../../../fuzz/bodies/seeds.rs"]
mod seeds;

#[test]
fn arbitrary_state_files() {
    seeds::run("frozen", frozen::run, 3000);
}
