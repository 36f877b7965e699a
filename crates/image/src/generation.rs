//! A VM generation ID for machines whose monitor has no such device: an ACPI table that Linux reads
//! from its initial RAM file system and adds to those of the machine.
//!
//! ```text
//!   agent ── new ID ──> memory at ADDRESS <── reads ── the kernel's driver, `vmgenid`
//!     └── reads the device's status ──> _STA ── notifies ──┘
//! ```
//!
//! The agent, not the monitor, writes the ID and announces the change. If the monitor has the
//! device, this one is not present.
//!
//! Sources: Microsoft, "Virtual Machine Generation ID", 2012; ACPI 6.5, sections 6.3.7 (`_STA`) and
//! 20 (AML); Linux, `Documentation/admin-guide/acpi/initrd_table_override.rst`.

use acpi_tables::{
    Aml, AmlSink,
    aml::{Device, If, Method, Name, Notify, Package, Path, Return, Scope, ZERO},
    sdt::Sdt,
};
use keiki_protocol::generation::{ADDRESS, DEVICE};

/// The directory where Linux looks for tables in the archive, after its parents.
pub(crate) const DIRECTORIES: [&str; 3] = ["kernel", "kernel/firmware", "kernel/firmware/acpi"];

const OEM: [u8; 6] = *b"KEIKI ";
const OEM_TABLE: [u8; 8] = *b"KEIKIGEN";
const OEM_REVISION: u32 = 1;
const REVISION: u8 = 2;
const HEADER: u32 = 36;
/// The notification for the driver.
const CHANGED: u8 = 0x80;
/// Present, enabled, shown, working.
const PRESENT: u8 = 0xf;
/// The device of a monitor that has one, as keiki-vmm does.
const MONITORS: &str = "\\_SB_.VGEN";

/// Makes the table.
pub(crate) fn table() -> Vec<u8> {
    let own: Path = "KGEN".into();
    let mut device = Vec::new();
    Device::new(
        "KGEN".into(),
        vec![
            &Name::new("_HID".into(), &DEVICE),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new("ADDR".into(), &Package::new(vec![&ADDRESS, &ZERO])),
            &Method::new(
                "_STA".into(),
                0,
                true,
                vec![
                    &If::new(&Exists(MONITORS.into()), vec![&Return::new(&ZERO)]),
                    &Notify::new(&own, &CHANGED),
                    &Return::new(&PRESENT),
                ],
            ),
        ],
    )
    .to_aml_bytes(&mut device);
    let mut table = Sdt::new(*b"SSDT", HEADER, REVISION, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&Scope::raw("_SB_".into(), device));
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

/// `CondRefOf` without a place for its result.
struct Exists(Path);

impl Aml for Exists {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        const COND_REF_OF: [u8; 2] = [0x5b, 0x12];
        const NOWHERE: u8 = 0;
        sink.vec(&COND_REF_OF);
        self.0.to_aml_bytes(sink);
        sink.byte(NOWHERE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_one_that_linux_takes() {
        let table = table();
        assert_eq!(&table[..4], b"SSDT");
        assert_eq!(u32::from_le_bytes(table[4..8].try_into().unwrap()) as usize, table.len());
        assert_eq!(table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0, "checksum");
        let address = [&[0x0c][..], &u32::try_from(ADDRESS).unwrap().to_le_bytes()].concat();
        let has = |wanted: &[u8]| table.windows(wanted.len()).any(|bytes| bytes == wanted);
        assert!(has(&address) && has(DEVICE.as_bytes()) && has(b"VM_Gen_Counter") && has(b"_SB_VGEN"));
    }
}
