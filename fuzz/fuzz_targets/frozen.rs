//! Fuzzes the reader of state files, behind the checksum. `cargo +nightly fuzz run frozen seeds/frozen`
#![no_main]

use keiki_vmm::frozen::Frozen;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    // As it is, and with the checksum put right, so that the parts are reached.
    let _ = Frozen::from_bytes(data);
    if data.len() > 52 {
        let mut file = data.to_vec();
        let sum = blake3::hash(&file[52..]);
        file[20..52].copy_from_slice(sum.as_bytes());
        let _ = Frozen::from_bytes(&file);
    }
});
