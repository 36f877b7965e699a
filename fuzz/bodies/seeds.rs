//! A fuzz target without a fuzzer: every seed of `fuzz/seeds`, and a few thousand mutations of them
//! that are the same each time. Others, or more, by hand: `KEIKI_FUZZ_SEED`, `KEIKI_FUZZ_ROUNDS`.

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

pub fn seeds(target: &str) -> Vec<Vec<u8>> {
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

pub fn run(target: &str, body: fn(&[u8]), mutations: usize) {
    let seeds = seeds(target);
    seeds.iter().for_each(|seed| body(seed));
    let setting =
        |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let mut random = Random(setting("KEIKI_FUZZ_SEED", 0x6b65_696b_6921));
    for _ in 0..mutations as u64 * setting("KEIKI_FUZZ_ROUNDS", 1) {
        let data = mutated(&seeds, &mut random);
        if let Err(panic) = std::panic::catch_unwind(|| body(&data)) {
            let hex: String = data.iter().map(|byte| format!("{byte:02x}")).collect();
            eprintln!("{target} fails on {hex}");
            std::panic::resume_unwind(panic);
        }
    }
}
