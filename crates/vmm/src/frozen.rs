//! A machine at one instant, without its memory and its disk: plain data, and the file `vm.state`.
//!
//! ```text
//!   0         8         12         20        52
//!   KEIKIVM\n version   length     BLAKE3    body: parts, each with kind and version (postcard)
//!             u32       u64        of body   (numbers little-endian)
//! ```
//!
//! A file is not believed. Its size is bounded before it is read, its checksum is compared before it is parsed, every
//! part says what it is, and what a part holds is checked where it is put to use: by `hv` for the processor and KVM's own
//! state, by each device for its own. **Promise**: a part never changes its meaning under the same version; a
//! monitor reads the versions it names and refuses others with a sentence.

use crate::{Error, Result};
use keiki_control::{Devices, Shape};
use keiki_devices::State;
use keiki_hv::{
    cpuid::{CPU_MODEL, CpuModel},
    state::{VCPU_STATE, VM_STATE, VcpuState, VmState},
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::{fs::File, io::Read};

const MAGIC: [u8; 8] = *b"KEIKIVM\n";
const VERSION: u32 = 1;
const HEADER: usize = 52;
/// A machine of 32 vCPUs has less than 1 MiB.
const MAX_BYTES: u64 = 16 << 20;
/// More parts than any machine has.
const MAX_PARTS: usize = 256;

const MACHINE: &str = "machine";
const MACHINE_VERSION: u16 = 1;
const CPU: &str = "processor";
const VM: &str = "kvm";
const VCPU: &str = "vcpu";

/// What a machine is, whatever it is doing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// vCPUs and RAM.
    pub shape: Shape,
    /// What differs in its devices.
    pub devices: Devices,
}

/// A machine at one instant.
#[derive(Debug)]
pub struct Frozen {
    /// What it is.
    pub config: Config,
    /// Which processor it sees.
    pub cpu: CpuModel,
    /// KVM's state.
    pub vm: VmState,
    /// Each vCPU's.
    pub vcpus: Vec<VcpuState>,
    /// Each device's, in the order of the board.
    pub devices: Vec<State>,
}

impl Frozen {
    /// The bytes of a state file.
    ///
    /// # Errors
    /// If it does not fit.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut parts = vec![
            part(MACHINE, MACHINE_VERSION, &self.config)?,
            part(CPU, number(CPU_MODEL), &self.cpu)?,
            part(VM, number(VM_STATE), &self.vm)?,
        ];
        for vcpu in &self.vcpus {
            parts.push(part(VCPU, number(VCPU_STATE), vcpu)?);
        }
        parts.extend(self.devices.iter().cloned());
        let body = postcard::to_stdvec(&parts).map_err(|error| Error::Invalid(format!("state: {error}")))?;
        let mut bytes = Vec::with_capacity(HEADER + body.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((body.len() as u64).to_le_bytes());
        bytes.extend(blake3::hash(&body).as_bytes());
        bytes.extend(body);
        Ok(bytes)
    }

    /// Reads a state file that must have this digest.
    ///
    /// # Errors
    /// If it cannot be read, or is anything else.
    pub fn read(file: &mut File, digest: &[u8; 32]) -> Result<Self> {
        let size = file.metadata().map_err(Error::host("looking at the state file"))?.len();
        if size > MAX_BYTES {
            return refused(format!("the state file has {size} bytes, at most {MAX_BYTES} are read"));
        }
        let mut bytes = Vec::new();
        // Bounded again: it may grow meanwhile.
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(Error::host("reading the state file"))?;
        if blake3::hash(&bytes) != *digest {
            return refused(
                "the state file is not the one that the snapshot names: its digest differs".into(),
            );
        }
        Self::from_bytes(&bytes)
    }

    /// The reverse of [`Frozen::to_bytes`]. Any bytes may come.
    ///
    /// # Errors
    /// A sentence that says what is wrong.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parts: Vec<State> = match postcard::take_from_bytes(body(bytes)?) {
            Ok((parts, [])) => parts,
            Ok(_) => return refused("the state file has bytes behind its last part".into()),
            Err(error) => {
                return refused(format!("the parts of the state file cannot be told apart ({error})"));
            }
        };
        if parts.len() > MAX_PARTS {
            return refused(format!(
                "the state file has {} parts, at most {MAX_PARTS} are read",
                parts.len()
            ));
        }
        let mut parts = parts.into_iter();
        let config: Config = unpack(parts.next(), MACHINE, MACHINE_VERSION)?;
        if !(1..=u32::from(crate::boot::layout::MAX_VCPUS)).contains(&config.shape.vcpus) {
            return refused(format!("the state file is of a machine with {} vCPUs", config.shape.vcpus));
        }
        let cpu: CpuModel = unpack(parts.next(), CPU, number(CPU_MODEL))?;
        if u32::from(cpu.vcpus) != config.shape.vcpus {
            let text = "the processor of the state file has another number of vCPUs than its machine";
            return refused(text.into());
        }
        let vm: VmState = unpack(parts.next(), VM, number(VM_STATE))?;
        let mut vcpus = Vec::new();
        for id in 0..config.shape.vcpus {
            let vcpu: VcpuState = unpack(parts.next(), VCPU, number(VCPU_STATE))?;
            if u32::from(vcpu.id) != id {
                return refused(format!("the state file has vCPU {} where vCPU {id} belongs", vcpu.id));
            }
            vcpus.push(vcpu);
        }
        Ok(Self { config, cpu, vm, vcpus, devices: parts.collect() })
    }
}

fn refused<T>(text: String) -> Result<T> {
    Err(Error::Refused(text))
}

/// Checks everything around the parts.
fn body(bytes: &[u8]) -> Result<&[u8]> {
    let Some((header, body)) = bytes.split_at_checked(HEADER) else {
        return refused(format!("the state file is cut short: it has {} bytes", bytes.len()));
    };
    let (magic, rest) = header.split_at(8);
    let (version, rest) = rest.split_at(4);
    let (length, sum) = rest.split_at(8);
    if magic != MAGIC {
        return refused("the state file does not begin as one".into());
    }
    let version = version.try_into().map_or(0, u32::from_le_bytes);
    if version != VERSION {
        return refused(format!(
            "the state file has version {version}, this monitor reads version {VERSION}"
        ));
    }
    let length = length.try_into().map_or(0, u64::from_le_bytes);
    if length != body.len() as u64 {
        return refused(format!(
            "the state file is cut short or too long: its header says {length} bytes, it has {}",
            body.len()
        ));
    }
    if blake3::hash(body).as_bytes().as_slice() != sum {
        return refused("the state file is damaged: its checksum differs".into());
    }
    Ok(body)
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
    // The kernel's structures are read as bytes, of which too few or too many would be taken.
    let again = postcard::to_stdvec(&fields).unwrap_or_default();
    if again != part.data {
        return refused(format!("the {kind} part of the state file has structures of another size"));
    }
    Ok(fields)
}

/// Versions are small.
const fn number(version: u32) -> u16 {
    assert!(version <= u16::MAX as u32);
    version as u16
}
