use super::{SnapshotError, open, write_manifest};
use crate::manifest::{
    DiskLayer, Format, KIND, LAYERS_DIR, MANIFEST_FILE, MEMORY_FILE, Made, Manifest, Memory, STATE_FILE,
    State, VERSION,
};
use keiki_types::{EngineKind, Shape};
use proptest::prelude::{ProptestConfig, any, proptest};
use std::{fs, path::Path};

type Outcome = Result<(), Box<dyn std::error::Error>>;

const STATE: &[u8] = b"registers and rings";

fn manifest() -> Manifest {
    let layer = |name: &str, format, bytes| DiskLayer { name: name.into(), format, bytes };
    Manifest {
        kind: KIND.into(),
        version: VERSION,
        created_at: "2026-01-02T03:04:05Z".into(),
        made_by: Made { engine: EngineKind::Qemu, version: "10.0.2".into(), machine: "00ff".into() },
        shape: Shape { vcpus: 1, memory_mib: 1, disk_mib: 1 },
        memory: Memory { bytes: 1 << 20 },
        state: State { bytes: STATE.len() as u64, blake3: blake3::hash(STATE).to_hex().to_string() },
        layers: vec![layer("a.raw", Format::Raw, 4096), layer("b.qcow2", Format::Qcow2, 8192)],
    }
}

fn make(dir: &Path) -> Outcome {
    fs::write(dir.join(MEMORY_FILE), vec![0; 1 << 20])?;
    fs::write(dir.join(STATE_FILE), STATE)?;
    fs::create_dir(dir.join(LAYERS_DIR))?;
    fs::write(dir.join(LAYERS_DIR).join("a.raw"), [0; 4096])?;
    fs::write(dir.join(LAYERS_DIR).join("b.qcow2"), [0; 8192])?;
    write_manifest(dir, &manifest())?;
    Ok(())
}

/// A good snapshot, damaged, must be refused with a sentence that holds `clue`.
fn refused(clue: &str, damage: impl FnOnce(&Path) -> std::io::Result<()>) -> Outcome {
    let dir = tempfile::tempdir()?;
    make(dir.path())?;
    damage(dir.path())?;
    match open(dir.path()) {
        Err(SnapshotError::Refused(why)) if why.contains(clue) => Ok(()),
        other => Err(format!("wanted a refusal with {clue:?}, got {other:?}").into()),
    }
}

/// The same, by changing the manifest's JSON.
fn refused_field(clue: &str, change: impl FnOnce(&mut serde_json::Value)) -> Outcome {
    refused(clue, |dir| {
        let path = dir.join(MANIFEST_FILE);
        let mut value = serde_json::from_slice(&fs::read(&path)?)?;
        change(&mut value);
        fs::write(path, serde_json::to_vec(&value)?)
    })
}

#[test]
fn a_good_one_opens_as_written() -> Outcome {
    let dir = tempfile::tempdir()?;
    make(dir.path())?;
    assert_eq!(open(dir.path())?, manifest());
    assert!(!dir.path().join(".manifest.new").exists());
    Ok(())
}

#[test]
fn damaged_files_are_refused() -> Outcome {
    refused("manifest.json is missing", |dir| fs::remove_file(dir.join(MANIFEST_FILE)))?;
    refused("vm.mem is missing", |dir| fs::remove_file(dir.join(MEMORY_FILE)))?;
    refused("vm.state is missing", |dir| fs::remove_file(dir.join(STATE_FILE)))?;
    refused("layers is missing", |dir| fs::remove_dir_all(dir.join(LAYERS_DIR)))?;
    refused("layers/b.qcow2 is missing", |dir| fs::remove_file(dir.join("layers/b.qcow2")))?;
    refused("vm.mem has 5 bytes", |dir| fs::write(dir.join(MEMORY_FILE), "short"))?;
    refused("vm.state has 5 bytes", |dir| fs::write(dir.join(STATE_FILE), "short"))?;
    refused("vm.state is damaged", |dir| fs::write(dir.join(STATE_FILE), b"registers and rinGs"))?;
    refused("more than", |dir| fs::File::create(dir.join(STATE_FILE))?.set_len(1 << 30))?;
    refused("layers/a.raw has 1 bytes", |dir| fs::write(dir.join("layers/a.raw"), "x"))?;
    refused("more than", |dir| fs::File::create(dir.join(MANIFEST_FILE))?.set_len(1 << 30))?;
    refused("is not JSON", |dir| fs::write(dir.join(MANIFEST_FILE), "{"))?;
    refused("is not JSON", |dir| fs::write(dir.join(MANIFEST_FILE), "[".repeat(10_000)))
}

#[test]
fn links_and_odd_files_are_refused() -> Outcome {
    let relink = |name: &'static str| {
        move |dir: &Path| {
            let path = dir.join(name);
            fs::rename(&path, dir.join("elsewhere"))?;
            std::os::unix::fs::symlink(dir.join("elsewhere"), path)
        }
    };
    refused("vm.mem is a symbolic link", relink(MEMORY_FILE))?;
    refused("vm.state is a symbolic link", relink(STATE_FILE))?;
    refused("manifest.json is a symbolic link", relink(MANIFEST_FILE))?;
    refused("layers/b.qcow2 is a symbolic link", relink("layers/b.qcow2"))?;
    refused("layers is not a directory", relink(LAYERS_DIR))?;
    refused("vm.mem is not a file", |dir| {
        fs::remove_file(dir.join(MEMORY_FILE))?;
        fs::create_dir(dir.join(MEMORY_FILE))
    })
}

#[test]
fn every_field_is_checked() -> Outcome {
    refused_field("kind", |v| v["kind"] = "other".into())?;
    refused_field("no version number", |v| v["version"] = "1".into())?;
    refused_field("its version is 2", |v| v["version"] = 2.into())?;
    refused_field("schema", |v| v["extra"] = 1.into())?;
    refused_field("schema", |v| v["made_by"]["engine"] = "xen".into())?;
    refused_field("schema", |v| v["layers"] = 7.into())?;
    refused_field("schema", |v| v["memory"]["bytes"] = (-1).into())?;
    refused_field("shape is out of bounds", |v| v["shape"]["vcpus"] = 0.into())?;
    refused_field("shape is out of bounds", |v| v["shape"]["disk_mib"] = 0.into())?;
    refused_field("shape is out of bounds", |v| v["shape"]["memory_mib"] = u32::MAX.into())?;
    refused_field("its memory is", |v| v["memory"]["bytes"] = 4096.into())?;
    refused_field("device state is larger", |v| v["state"]["bytes"] = u64::MAX.into())?;
    refused_field("is damaged", |v| v["state"]["blake3"] = "".into())?;
    refused_field("0 disk layers", |v| v["layers"] = serde_json::json!([]))?;
    refused_field("must be raw", |v| v["layers"][0]["format"] = "qcow2".into())?;
    refused_field("must be raw", |v| v["layers"][1]["format"] = "raw".into())?;
    refused_field("named twice", |v| v["layers"][1]["name"] = "a.raw".into())?;
    refused_field("larger than the largest disk", |v| v["layers"][1]["bytes"] = u64::MAX.into())?;
    for name in ["", ".", "..", "../a", "/etc/passwd", "a/b", ".hidden", "a b", "a\0", "é"] {
        refused_field("not a plain file name", |v| v["layers"][1]["name"] = name.into())?;
    }
    refused_field("65 disk layers", |v| {
        let layer = |n| serde_json::json!({"name": format!("l{n}"), "format": "qcow2", "bytes": 1});
        v["layers"] = (0..65).map(layer).collect();
    })
}

#[test]
fn a_bad_manifest_is_not_written() -> Outcome {
    let dir = tempfile::tempdir()?;
    assert!(write_manifest(dir.path(), &Manifest { layers: Vec::new(), ..manifest() }).is_err());
    assert!(!dir.path().join(MANIFEST_FILE).exists());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// What is written is read again, whatever the fields, and nothing that would not be read is written.
    #[test]
    fn any_manifest_makes_the_round_trip(
        (vcpus, memory_mib, disk_mib) in (0..4_u8, 0..4_u32, any::<u32>()),
        names in proptest::collection::vec("[ -~]{0,12}|[a-z0-9]{1,8}", 0..4),
        (version, created_at) in (".*", ".*"),
    ) {
        let dir = tempfile::tempdir()?;
        make(dir.path()).map_err(|e| proptest::test_runner::TestCaseError::fail(e.to_string()))?;
        let layers: Vec<_> = names.iter().enumerate().map(|(index, name)| {
            let format = if index == 0 { Format::Raw } else { Format::Qcow2 };
            DiskLayer { name: name.clone(), format, bytes: 3 }
        }).collect();
        let wanted = Manifest {
            created_at,
            made_by: Made { version, ..manifest().made_by },
            shape: Shape { vcpus, memory_mib, disk_mib },
            memory: Memory { bytes: u64::from(memory_mib) << 20 },
            layers,
            ..manifest()
        };
        if write_manifest(dir.path(), &wanted).is_ok() {
            fs::File::create(dir.path().join(MEMORY_FILE))?.set_len(wanted.memory.bytes)?;
            for layer in &wanted.layers {
                fs::write(dir.path().join(LAYERS_DIR).join(&layer.name), "abc")?;
            }
            let read = open(dir.path());
            proptest::prop_assert_eq!(read.ok(), Some(wanted));
        } else {
            // Nothing was replaced.
            proptest::prop_assert_eq!(open(dir.path()).ok(), Some(manifest()));
        }
    }

    /// A device state with any byte changed is refused.
    #[test]
    fn any_changed_state_is_refused(at in 0..STATE.len(), change in 1_u8..) {
        let dir = tempfile::tempdir()?;
        make(dir.path()).map_err(|e| proptest::test_runner::TestCaseError::fail(e.to_string()))?;
        let mut state = STATE.to_vec();
        state[at] ^= change;
        fs::write(dir.path().join(STATE_FILE), state)?;
        proptest::prop_assert!(matches!(open(dir.path()), Err(SnapshotError::Refused(_))));
    }

    /// No text panics the reader, and only the true one opens.
    #[test]
    fn any_changed_byte_is_survived(at in any::<proptest::sample::Index>(), byte: u8) {
        let dir = tempfile::tempdir()?;
        make(dir.path()).map_err(|e| proptest::test_runner::TestCaseError::fail(e.to_string()))?;
        let path = dir.path().join(MANIFEST_FILE);
        let mut text = fs::read(&path)?;
        let at = at.index(text.len());
        text[at] = byte;
        fs::write(&path, text)?;
        // A change of a free text (time, version) may open; it must say so in what it returns.
        if let Ok(opened) = open(dir.path()) {
            proptest::prop_assert_eq!(opened.layers, manifest().layers);
            proptest::prop_assert_eq!(opened.state, manifest().state);
            proptest::prop_assert_eq!(opened.memory, manifest().memory);
        }
    }
}
