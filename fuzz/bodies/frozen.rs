//! Reads arbitrary state files, unchanged and with a correct length and checksum, so that their
//! parts are reached. An accepted file is written and read again.

use keiki_vmm::frozen::Frozen;

const HEADER: usize = 52;

pub fn run(data: &[u8]) {
    read(data);
    if data.len() > HEADER {
        let mut file = data.to_vec();
        let (length, sum) = ((data.len() - HEADER) as u64, blake3::hash(&data[HEADER..]));
        file[12..20].copy_from_slice(&length.to_le_bytes());
        file[20..HEADER].copy_from_slice(sum.as_bytes());
        read(&file);
    }
}

fn read(file: &[u8]) {
    match Frozen::from_bytes(file) {
        Ok(frozen) => {
            let again = frozen.to_bytes().expect("it came in one file");
            Frozen::from_bytes(&again).expect("it was read before");
        }
        Err(error) => assert!(error.to_string().len() > 20, "it says what is wrong"),
    }
}
