//! A machine at one instant, without memory and disks: plain data, and the file `vm.state`.
//!
//! ```text
//!   0         8         12         20        52
//!   KEIKIVM\n version   length     BLAKE3    body: parts, each with kind and version (postcard)
//!             u32       u64        of body   (numbers little-endian)
//! ```
//!
//! A file is not trusted. Its size is bounded before it is read, and its checksum is compared
//! before it is parsed. Each part has a kind and a version. Its contents are checked where they are
//! used: by `hv` for the processor and the state of KVM, by each device for its own. **Promise**: a
//! part never changes its meaning under the same version. A monitor reads the versions that it
//! names and rejects others with a clear error.

use crate::{Error, Result};
use keiki_control::{Devices, Disk, MAX_DISKS, Shape};
use keiki_devices::State;
use keiki_hv::{
    cpuid::{CPU_MODEL, CpuModel},
    state::{VCPU_STATE, VM_STATE, VcpuState, VmState},
};
use keiki_sys::frame::{Frame, Length};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs::File, io::Read};

const FRAME: Frame = Frame {
    magic: b"KEIKIVM\n",
    version: 1,
    length: Length::U64,
    checksum: Some(|body| *blake3::hash(body).as_bytes()),
};
/// A machine with 32 vCPUs needs less than 1 MiB.
const MAX_BYTES: u64 = 16 << 20;
/// More parts than any machine has.
const MAX_PARTS: u64 = 256;

const MACHINE: &str = "machine";
const MACHINE_VERSION: u16 = 1;
const CPU: &str = "processor";
const VM: &str = "kvm";
const VCPU: &str = "vcpu";
/// Present only if the machine has additional disks.
const DISKS: &str = "disks";
const DISKS_VERSION: u16 = 1;

/// The configuration of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub shape: Shape,
    pub devices: Devices,
}

/// [`Config`] as a part of a file, without [`DISKS`].
#[derive(Serialize, Deserialize)]
struct Machine {
    shape: Shape,
    mac: [u8; 6],
    agent_port: String,
}

/// A machine at one instant.
#[derive(Debug)]
pub struct Frozen {
    pub config: Config,
    pub cpu: CpuModel,
    pub vm: VmState,
    pub vcpus: Vec<VcpuState>,
    /// In the order of the device manager.
    pub devices: Vec<State>,
}

impl Frozen {
    /// The bytes of a state file.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let Config { shape, devices: Devices { mac, agent_port, disks } } = self.config.clone();
        let mut parts = vec![
            part(MACHINE, MACHINE_VERSION, &Machine { shape, mac, agent_port })?,
            part(CPU, number(CPU_MODEL), &self.cpu)?,
            part(VM, number(VM_STATE), &self.vm)?,
        ];
        for vcpu in &self.vcpus {
            parts.push(part(VCPU, number(VCPU_STATE), vcpu)?);
        }
        if !disks.is_empty() {
            parts.push(part(DISKS, DISKS_VERSION, &disks)?);
        }
        parts.extend(self.devices.iter().cloned());
        let body = postcard::to_stdvec(&parts).map_err(|error| Error::Invalid(format!("state: {error}")))?;
        Ok(FRAME.encode(&body))
    }

    /// Reads a state file, which must have this digest.
    pub fn read(file: &mut File, digest: &[u8; 32]) -> Result<Self> {
        let size = file.metadata().map_err(Error::host("inspecting the state file"))?.len();
        if size > MAX_BYTES {
            return refused(format!("the state file has {size} bytes, at most {MAX_BYTES} are read"));
        }
        let mut bytes = Vec::new();
        // Bounded again, because the file may grow meanwhile.
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(Error::host("reading the state file"))?;
        if blake3::hash(&bytes) != *digest {
            return refused("the state file does not belong to the snapshot: its digest differs".into());
        }
        Self::from_bytes(&bytes)
    }

    /// The reverse of [`Frozen::to_bytes`]. Accepts any bytes.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let body = FRAME.decode(bytes).map_err(|error| Error::Refused(format!("the state file {error}")))?;
        // The number of parts comes first, and is checked before they are parsed.
        let count = postcard::take_from_bytes::<u64>(body).map_or(0, |(count, _)| count);
        if count > MAX_PARTS {
            return refused(format!("the state file has {count} parts, at most {MAX_PARTS} are read"));
        }
        let parts: Vec<State> = match postcard::take_from_bytes(body) {
            Ok((parts, [])) => parts,
            Ok(_) => return refused("the state file has bytes after its last part".into()),
            Err(error) => {
                return refused(format!("the parts of the state file cannot be parsed ({error})"));
            }
        };
        let mut parts = parts.into_iter().peekable();
        let Machine { shape, mac, agent_port } = unpack(parts.next(), MACHINE, MACHINE_VERSION)?;
        if !(1..=u32::from(crate::boot::layout::MAX_VCPUS)).contains(&shape.vcpus) {
            return refused(format!("the state file is from a machine with {} vCPUs", shape.vcpus));
        }
        let cpu: CpuModel = unpack(parts.next(), CPU, number(CPU_MODEL))?;
        if u32::from(cpu.vcpus) != shape.vcpus {
            let text = "the processor of the state file has a different number of vCPUs than its machine";
            return refused(text.into());
        }
        let vm: VmState = unpack(parts.next(), VM, number(VM_STATE))?;
        let mut vcpus = Vec::new();
        for id in 0..shape.vcpus {
            let vcpu: VcpuState = unpack(parts.next(), VCPU, number(VCPU_STATE))?;
            if u32::from(vcpu.id) != id {
                return refused(format!("the state file has vCPU {} where vCPU {id} is expected", vcpu.id));
            }
            vcpus.push(vcpu);
        }
        let further = parts.next_if(|part| part.kind == DISKS);
        let disks: Vec<Disk> =
            further.map_or(Ok(Vec::new()), |part| unpack(Some(part), DISKS, DISKS_VERSION))?;
        if disks.len() > MAX_DISKS {
            let text = format!("the state file is from a machine with {} additional disks", disks.len());
            return refused(text);
        }
        let config = Config { shape, devices: Devices { mac, agent_port, disks } };
        Ok(Self { config, cpu, vm, vcpus, devices: parts.collect() })
    }
}

fn refused<T>(text: String) -> Result<T> {
    Err(Error::Refused(text))
}

fn part(kind: &'static str, version: u16, fields: &impl Serialize) -> Result<State> {
    Ok(State::pack(kind, version, fields)?)
}

fn unpack<T: DeserializeOwned + Serialize>(
    part: Option<State>,
    kind: &'static str,
    version: u16,
) -> Result<T> {
    let Some(part) = part else {
        return refused(format!("the state file ends before its {kind} part"));
    };
    let fields: T = part.unpack(kind, version)?;
    // Structures of the kernel are read as bytes, and serde would accept too few or too many.
    let again = postcard::to_stdvec(&fields).unwrap_or_default();
    if again != part.data {
        return refused(format!("the {kind} part of the state file has structures of the wrong size"));
    }
    Ok(fields)
}

const fn number(version: u32) -> u16 {
    assert!(version <= u16::MAX as u32);
    version as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use keiki_hv::cpuid::Baseline;
    use proptest::prelude::*;

    /// A machine of two vCPUs, without KVM.
    fn frozen() -> Frozen {
        let vcpu = |id| VcpuState {
            version: VCPU_STATE,
            id,
            tsc_khz: 1_000_000,
            regs: Default::default(),
            sregs: Default::default(),
            msrs: vec![(0x10, 5)],
            xcrs: Default::default(),
            xsave: Default::default(),
            debug: Default::default(),
            lapic: Default::default(),
            events: Default::default(),
            mp_state: Default::default(),
        };
        Frozen {
            config: Config {
                shape: Shape { vcpus: 2, memory_mib: 64 },
                devices: Devices { mac: [1, 2, 3, 4, 5, 6], agent_port: "port".into(), disks: Vec::new() },
            },
            cpu: CpuModel {
                version: CPU_MODEL,
                baseline: Baseline::Host,
                vcpus: 2,
                entries: vec![[1, 0, 0, 1, 2, 3, 4]],
            },
            vm: VmState {
                version: VM_STATE,
                pic_master: Default::default(),
                pic_slave: Default::default(),
                ioapic: Default::default(),
                clock: Default::default(),
            },
            vcpus: vec![vcpu(0), vcpu(1)],
            devices: vec![State { kind: "thing".into(), version: 3, data: vec![1, 2, 3] }],
        }
    }

    /// A file whose checksum is right, whatever its parts.
    fn file(parts: &[State]) -> Vec<u8> {
        FRAME.encode(&postcard::to_stdvec(parts).unwrap())
    }

    fn parts() -> Vec<State> {
        postcard::from_bytes(&frozen().to_bytes().unwrap()[FRAME.header_len()..]).unwrap()
    }

    fn refused(parts: &[State]) -> String {
        Frozen::from_bytes(&file(parts)).expect_err("it was taken").to_string()
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = frozen().to_bytes().unwrap();
        let again = Frozen::from_bytes(&bytes).unwrap();
        assert_eq!(again.to_bytes().unwrap(), bytes);
        assert_eq!((again.config, again.devices), (frozen().config, frozen().devices));
        assert_eq!(file(&parts()), bytes);
    }

    /// A file that an earlier build wrote. A change that breaks it needs a new version of what it
    /// changes.
    #[test]
    fn the_first_version_is_still_read() {
        let file = include_bytes!("../../../fuzz/seeds/frozen/version-1");
        let frozen = Frozen::from_bytes(file).unwrap();
        assert_eq!(frozen.config.shape, Shape { vcpus: 2, memory_mib: 64 });
        assert_eq!((frozen.vcpus[1].id, &frozen.vcpus[1].msrs[..]), (1, &[(0x10, 5)][..]));
        assert_eq!(frozen.devices[0].kind, "thing");
        assert_eq!(frozen.to_bytes().unwrap(), file);
    }

    /// A machine with additional disks has a part more, which no older file has.
    #[test]
    fn further_disks_are_a_part_of_their_own() {
        let with = |disks: usize| {
            let mut frozen = frozen();
            frozen.config.devices.disks = (0..disks).map(|disk| Disk { read_only: disk % 2 == 0 }).collect();
            frozen
        };
        for disks in [1, MAX_DISKS] {
            let again = Frozen::from_bytes(&with(disks).to_bytes().unwrap()).unwrap();
            assert_eq!((again.config, again.devices.len()), (with(disks).config, 1));
        }
        let error = Frozen::from_bytes(&with(MAX_DISKS + 1).to_bytes().unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "the state file is from a machine with 9 additional disks");
        let mut parts: Vec<State> =
            postcard::from_bytes(&with(1).to_bytes().unwrap()[FRAME.header_len()..]).unwrap();
        parts[5].version = 77;
        assert!(refused(&parts).contains("version 77"));
        parts[5].version = DISKS_VERSION;
        parts[5].data.push(0);
        assert!(refused(&parts).contains(DISKS));
    }

    #[test]
    fn every_part_says_what_it_is() {
        let names = [MACHINE, CPU, VM, VCPU, VCPU];
        for (index, name) in names.into_iter().enumerate() {
            let change = |what: &dyn Fn(&mut State)| {
                let mut parts = parts();
                what(&mut parts[index]);
                refused(&parts)
            };
            assert!(change(&|part| part.kind = "other".into()).contains("other"), "{name}");
            assert!(change(&|part| part.version = 77).contains("version 77"), "{name}");
            assert!(change(&|part| part.data.push(0)).contains(name), "{name}");
            assert!(change(&|part| part.data.truncate(part.data.len() - 1)).contains(name), "{name}");
            let mut fewer = parts();
            fewer.truncate(index);
            assert_eq!(refused(&fewer), format!("the state file ends before its {name} part"));
        }
    }

    #[test]
    fn every_field_that_is_used_here_is_checked() {
        let changed = |change: &dyn Fn(&mut Frozen)| {
            let mut frozen = frozen();
            change(&mut frozen);
            Frozen::from_bytes(&frozen.to_bytes().unwrap()).expect_err("it was taken").to_string()
        };
        assert_eq!(changed(&|f| f.config.shape.vcpus = 0), "the state file is from a machine with 0 vCPUs");
        assert_eq!(changed(&|f| f.config.shape.vcpus = 99), "the state file is from a machine with 99 vCPUs");
        assert!(changed(&|f| f.cpu.vcpus = 1).contains("a different number of vCPUs"));
        assert!(changed(&|f| f.vcpus.swap(0, 1)).contains("vCPU 1 where vCPU 0 is expected"));
        assert!(changed(&|f| f.vcpus.truncate(1)).contains("state of a thing device where"));
        let many = vec![
            State { kind: "x".into(), version: 0, data: Vec::new() };
            usize::try_from(MAX_PARTS).unwrap() + 1
        ];
        assert!(refused(&many).contains("257 parts"));
        // A kernel structure that is one byte too short, with a matching length field.
        let mut parts = parts();
        let short = (VM_STATE, vec![0_u8; 5], vec![0_u8; 5], vec![0_u8; 5], vec![0_u8; 5]);
        parts[2].data = postcard::to_stdvec(&short).unwrap();
        assert!(refused(&parts).contains("kvm part of the state file has structures of the wrong size"));
    }

    proptest! {
        /// A byte changed anywhere, with and without the checksum put right: refused, or read as
        /// what it says.
        #[test]
        fn no_bytes_are_too_strange(at: prop::sample::Index, value: u8, cut: prop::sample::Index, sum: bool) {
            let mut bytes = frozen().to_bytes().unwrap();
            let at = at.index(bytes.len());
            let changed = bytes[at] != value;
            bytes[at] = value;
            bytes.truncate(if sum { bytes.len() } else { cut.index(bytes.len()) + 1 });
            if sum && bytes.len() > FRAME.header_len() {
                let body = blake3::hash(&bytes[FRAME.header_len()..]);
                bytes[20..FRAME.header_len()].copy_from_slice(body.as_bytes());
            }
            let read = Frozen::from_bytes(&bytes);
            if !sum && changed {
                prop_assert!(read.is_err());
            }
        }

        #[test]
        fn arbitrary_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(Frozen::from_bytes(&bytes).is_err());
        }
    }
}
