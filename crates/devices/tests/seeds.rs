//! The fuzz targets of devices without a fuzzer.

#[path = "../../../fuzz/bodies/mod.rs"]
mod bodies;
#[path = "../../../fuzz/bodies/seeds.rs"]
mod seeds;

use bodies::{device, layer, state};
use seeds::{run, seeds};

#[test]
fn hostile_drivers() {
    run("device", device::run, 2000);
}

/// Otherwise they would not reach the code behind a queue.
#[test]
fn seeds_reach_the_devices() {
    let used: Vec<u64> = seeds("device").iter().map(|seed| device::used(seed)).collect();
    // Two of them break the ring before any chain is used.
    assert!(used.iter().filter(|&&used| used == 0).count() <= 2, "{used:?}");
    assert!(used.iter().sum::<u64>() >= 2 * used.len() as u64, "{used:?}");
}

#[test]
fn arbitrary_states() {
    run("state", state::run, 600);
}

/// States of version 1, as the first release saved them. Their devices still accept them.
#[test]
fn states_of_the_first_version_are_taken() {
    for seed in seeds("state") {
        if let Ok(saved) = postcard::from_bytes(&seed) {
            assert_eq!(state::taken(&saved), 1, "{saved:?}");
        }
    }
}

#[test]
fn arbitrary_layers() {
    run("layer", layer::run, 500);
}
