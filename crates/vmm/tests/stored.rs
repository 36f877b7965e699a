//! Machines written down and read again: whole cycles, and every way in which files can be wrong.

mod monitor;

use keiki_control::FailureKind;
use keiki_control::{ControlError, Shape};
use monitor::{COUNT, LETTERS, Monitor, Place, SILENT, Stored, place, until};
use std::{fs, os::unix::fs::FileExt, os::unix::fs::MetadataExt};

fn stored(place: &Place, code: &[u8]) -> (Monitor, Monitor, Stored) {
    let mut machine = place.boot(code);
    machine.counts();
    let (mut zygote, _) = place.freeze(&mut machine);
    let (stored, _) = place.persist(&mut zygote, None);
    (machine, zygote, stored)
}

#[test]
fn a_machine_goes_on_from_its_files_again_and_again() {
    let Some(place) = place() else { return };
    let mut machine = place.boot(SILENT);
    machine.poke(0x80_0000, 1);
    let mut base = None;
    for generation in 1..=3 {
        machine.counts();
        machine.poke(0x80_0000 + generation * 4096, generation as u32);
        // A page of the base that is zero again.
        machine.poke(0x80_0000 + (generation - 1) * 4096, 0);
        let (mut zygote, _) = place.freeze(&mut machine);
        machine.kill();
        let count = zygote.peek(COUNT);
        let (stored, persisted) = place.persist(&mut zygote, base.as_deref());
        if base.is_some() {
            assert!(persisted.pages < 64 && persisted.zeroed >= 1, "{persisted:?}");
        }
        zygote.stop();
        let mut loaded = place.load(&stored);
        assert_eq!(loaded.peek(COUNT), count);
        machine = place.thaw(&mut loaded);
        loaded.kill();
        for page in 0..3 {
            let value = if page == generation { page as u32 } else { 0 };
            assert_eq!(machine.peek(0x80_0000 + page * 4096), value, "page {page} of {generation}");
        }
        machine.counts();
        base = Some(stored.memory.clone());
    }
    // Only what has content takes room.
    let memory = fs::metadata(base.unwrap()).unwrap();
    assert_eq!(memory.len(), 16 << 20);
    assert!(memory.blocks() * 512 < 1 << 20, "{} KiB", memory.blocks() / 2);
}

/// The image is of the instant, whatever the parent does while it is written.
#[test]
fn the_file_is_of_one_instant() {
    let Some(place) = place() else { return };
    let mut machine = place.boot(LETTERS);
    until("it prints", || machine.console().len() > 4);
    let (mut zygote, _) = place.freeze(&mut machine);
    machine.counts();
    machine.poke(0x80_0000, 9);
    let copy = place.thaw(&mut zygote);
    copy.poke(0x80_0000, 8);
    let (stored, _) = place.persist(&mut zygote, None);
    let mut now = vec![0; 16 << 20];
    let file = fs::read(&stored.memory).unwrap();
    zygote.mem().read_exact_at(&mut now, zygote.ram_start()).unwrap();
    assert!(file == now, "the file is not what the zygote holds");
    assert_eq!(file[0x80_0000], 0);
}

/// Finding 3 once more, where it matters.
#[test]
fn the_page_map_of_a_relative_is_refused() {
    let Some(place) = place() else { return };
    let mut machine = place.boot(SILENT);
    machine.counts();
    let (mut zygote, _) = place.freeze(&mut machine);
    let stored = Stored {
        memory: place.path("mem"),
        state: place.path("state"),
        digest: [0; 32],
        layers: Vec::new(),
        shape: Shape { vcpus: 1, memory_mib: 16 },
    };
    let error = place.try_persist(&mut zygote, &stored, machine.pid()).unwrap_err();
    assert_eq!(error.to_string(), "the page map that was handed over is not this process's own");
    let own = zygote.pid();
    place.try_persist(&mut zygote, &stored, own).unwrap();
}

#[test]
fn files_that_are_wrong_are_refused_by_what_is_wrong() {
    let Some(place) = place() else { return };
    let (_machine, _zygote, stored) = stored(&place, SILENT);
    let state = fs::read(&stored.state).unwrap();
    let refused = |stored: &Stored| match place.try_load(stored) {
        Err(ControlError::Failed { kind: FailureKind::Refused, sentence }) => sentence,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    };
    let with_state = |bytes: &[u8], digest: bool| {
        let path = place.path("state");
        fs::write(&path, bytes).unwrap();
        let digest = if digest { *blake3::hash(bytes).as_bytes() } else { stored.digest };
        refused(&Stored { state: path, digest, ..stored.clone() })
    };
    assert!(with_state(&state[1..], false).contains("its digest differs"));
    assert_eq!(with_state(&[], true), "the state file is cut short: it has 0 bytes");
    assert!(with_state(&state[..state.len() - 1], true).contains("cut short or too long"));
    let mut bytes = state.clone();
    bytes[0] ^= 1;
    assert_eq!(with_state(&bytes, true), "the state file does not begin as one");
    let mut bytes = state.clone();
    bytes[8] = 2;
    assert_eq!(with_state(&bytes, true), "the state file has version 2, this monitor reads version 1");
    let mut bytes = state.clone();
    *bytes.last_mut().unwrap() ^= 1;
    assert_eq!(with_state(&bytes, true), "the state file is damaged: its checksum differs");
    let huge = place.path("state");
    fs::File::create(&huge).unwrap().set_len(17 << 20).unwrap();
    assert!(refused(&Stored { state: huge, ..stored.clone() }).contains("at most"));
    // The other file, and what the node says of both.
    let shape = Shape { vcpus: 2, memory_mib: 16 };
    let error = refused(&Stored { shape, ..stored.clone() });
    assert_eq!(error, "the state file is of a machine with 1 vCPUs and 16 MiB, not 2 and 16");
    let short = place.path("mem");
    fs::copy(&stored.memory, &short).unwrap();
    fs::OpenOptions::new().write(true).open(&short).unwrap().set_len(15 << 20).unwrap();
    let error = refused(&Stored { memory: short, ..stored.clone() });
    assert_eq!(error, "the memory file has 15728640 bytes, the machine has 16 MiB");
    // A blank that refused can still take what is right.
    place.thaw(&mut place.load(&stored)).counts();
}
