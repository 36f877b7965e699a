//! The fuzz targets without a fuzzer: every seed of `fuzz/seeds`, and a few thousand mutations of them that are the same
//! each time.

#[path = "../../../fuzz/bodies/mod.rs"]
mod bodies;

use bodies::{device, layer, state};
use std::path::Path;

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % limit.max(1)
    }
}

fn seeds(target: &str) -> Vec<Vec<u8>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(target);
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    paths.iter().map(|path| std::fs::read(path).unwrap()).collect()
}

fn mutated(seeds: &[Vec<u8>], random: &mut Random) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(8) {
        let at = random.below(bytes.len() + 1);
        match random.below(5) {
            0 => bytes.insert(at, random.below(256) as u8),
            1 if at < bytes.len() => drop(bytes.remove(at)),
            2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            3 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            _ => {
                let other = &seeds[random.below(seeds.len())];
                let from = random.below(other.len());
                bytes.extend(&other[from..(from + 1 + random.below(40)).min(other.len())]);
            }
        }
    }
    bytes
}

fn run(target: &str, body: fn(&[u8]), mutations: usize) {
    let seeds = seeds(target);
    seeds.iter().for_each(|seed| body(seed));
    let mut random = Random(0x6b65_696b_6921);
    // More by hand: KEIKI_FUZZ_ROUNDS times as many.
    let rounds = std::env::var("KEIKI_FUZZ_ROUNDS").map_or(1, |text| text.parse().unwrap());
    for _ in 0..mutations * rounds {
        let data = mutated(&seeds, &mut random);
        if let Err(panic) = std::panic::catch_unwind(|| body(&data)) {
            let hex: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("{target} fails on {hex}");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn hostile_drivers() {
    run("device", device::run, 2000);
}

/// Otherwise they would say nothing about what happens behind a queue.
#[test]
fn seeds_reach_the_devices() {
    let used: Vec<u64> = seeds("device").iter().map(|seed| device::used(seed)).collect();
    // Two of them break the ring before anything is used.
    assert!(used.iter().filter(|&&used| used == 0).count() <= 2, "{used:?}");
    assert!(used.iter().sum::<u64>() >= 2 * used.len() as u64, "{used:?}");
}

#[test]
fn states_that_nobody_saved() {
    run("state", state::run, 600);
}

/// States of version 1, as the first release saved them: each is still taken by the device that it is of.
#[test]
fn states_of_the_first_version_are_taken() {
    for seed in seeds("state") {
        if let Ok(saved) = postcard::from_bytes(&seed) {
            assert_eq!(state::taken(&saved), 1, "{saved:?}");
        }
    }
}

#[test]
fn layers_that_nobody_wrote() {
    run("layer", layer::run, 500);
}
