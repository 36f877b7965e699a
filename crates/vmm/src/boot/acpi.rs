//! ACPI tables, by which a guest finds its devices: the machine has no PCI and no firmware.
//!
//! ```text
//!   RSDP ── XSDT ─┬─ FADT ── DSDT    devices, power-off
//!                 └─ MADT            vCPUs, I/O APIC
//! ```
//!
//! The platform is "hardware-reduced": no fixed ACPI hardware, and no PIC, PIT or RTC that the
//! guest would probe and wait for. Events come as interrupts of a generic event device. All
//! interrupts are edge triggered.

use super::{
    Error,
    layout::{self, MAX_VCPUS, MmioWindow},
};
use acpi_tables::{
    Aml,
    aml::{
        Device, EISAName, IO, Interrupt, Memory32Fixed, Method, Name, Notify, ONE, Package, Path,
        ResourceTemplate, Scope, ZERO,
    },
    fadt::{FADTBuilder, Flags},
    gas::{AccessSize, AddressSpace, GAS},
    madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic},
    rsdp::Rsdp,
    sdt::Sdt,
    xsdt::XSDT,
};

const OEM: [u8; 6] = *b"KEIKI ";
const OEM_TABLE: [u8; 8] = *b"KEIKIVMM";
const OEM_REVISION: u32 = 1;
const DSDT_REVISION: u8 = 2;
const HEADER: u32 = 36;
const ALIGN: usize = 16;
/// No VGA, no MSI, no CMOS clock: nothing for a driver to probe.
const BOOT_ARCHITECTURE: u16 = 1 << 2 | 1 << 3 | 1 << 5;
/// Sleep type that means "off".
const SLEEP_TYPE_OFF: u8 = 5;
/// Notification that the generation ID changed.
const GENERATION_CHANGED: u8 = 0x80;

/// All tables, for [`layout::ACPI`]. The RSDP is first.
pub fn tables(vcpus: u8, devices: usize) -> Result<Vec<u8>, Error> {
    if vcpus == 0 || vcpus > MAX_VCPUS {
        return Err(Error::Vcpus(vcpus));
    }
    let windows: Option<Vec<MmioWindow>> = (0..devices).map(layout::mmio_window).collect();
    let windows = windows.ok_or(Error::Devices(devices))?;
    let mut area = Area { bytes: vec![0; Rsdp::len().next_multiple_of(ALIGN)] };
    let dsdt = area.add(&dsdt(&windows)?);
    let fadt = area.add(&fadt(dsdt));
    let madt = area.add(&madt(vcpus));
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = area.add(&xsdt);
    let rsdp = bytes(&Rsdp::new(OEM, xsdt));
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    if layout::ACPI + area.bytes.len() as u64 > layout::ACPI_END {
        return Err(Error::Devices(devices));
    }
    Ok(area.bytes)
}

/// Tables, one after the other.
struct Area {
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table and returns its address.
    fn add(&mut self, table: &dyn Aml) -> u64 {
        let at = self.bytes.len();
        table.to_aml_bytes(&mut self.bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(ALIGN), 0);
        layout::ACPI + at as u64
    }
}

fn bytes(aml: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    aml.to_aml_bytes(&mut bytes);
    bytes
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION).dsdt_64(dsdt);
    for flag in [
        Flags::HwReducedAcpi,
        Flags::Wbinvd,
        Flags::ResetRegSup,
        Flags::Headless,
        // Set: the fixed hardware has no such button.
        Flags::PwrButton,
        Flags::SlpButton,
    ] {
        fadt = fadt.flag(flag);
    }
    fadt.iapc_boot_arch = BOOT_ARCHITECTURE.into();
    fadt.reset_reg = port(layout::RESET_PORT);
    fadt.reset_value = layout::RESET_VALUE;
    fadt.sleep_control_reg = port(layout::SLEEP_PORT);
    fadt.sleep_status_reg = port(layout::SLEEP_PORT + 1);
    fadt.hypervisor_vendor_identity = u64::from_le_bytes(*b"KEIKI\0\0\0").into();
    fadt.finalize()
}

fn madt(vcpus: u8) -> MADT {
    let controller = LocalInterruptController::Address(layout::LOCAL_APIC);
    let mut madt = MADT::new(OEM, OEM_TABLE, OEM_REVISION, controller);
    for vcpu in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(vcpu, vcpu, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, layout::IO_APIC, 0));
    madt
}

fn dsdt(windows: &[MmioWindow]) -> Result<Sdt, Error> {
    let mut inner = Vec::new();
    for (device, window) in windows.iter().enumerate() {
        inner.extend(virtio(device, *window)?);
    }
    inner.extend(serial());
    inner.extend(generation());
    let mut dsdt = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, OEM_TABLE, OEM_REVISION);
    dsdt.append_slice(&Scope::raw("_SB_".into(), inner));
    let off = Package::new(vec![&SLEEP_TYPE_OFF]);
    dsdt.append_slice(&bytes(&Name::new("_S5_".into(), &off)));
    Ok(dsdt)
}

fn virtio(device: usize, window: MmioWindow) -> Result<Vec<u8>, Error> {
    let fail = |_| Error::Devices(device);
    let base = u32::try_from(window.base).map_err(fail)?;
    let size = u32::try_from(layout::WINDOW).map_err(fail)?;
    let number = u32::try_from(device).map_err(fail)?;
    let path: Path = format!("VR{number:02}").as_str().into();
    Ok(bytes(&Device::new(
        path,
        vec![
            &Name::new("_HID".into(), &"LNRO0005"),
            &Name::new("_UID".into(), &number),
            &Name::new("_CCA".into(), &ONE),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&Memory32Fixed::new(true, base, size), &interrupt(window.gsi)]),
            ),
        ],
    )))
}

fn serial() -> Vec<u8> {
    let port = layout::SERIAL_PORT;
    bytes(&Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &ZERO),
            &Name::new(
                "_CRS".into(),
                &ResourceTemplate::new(vec![&IO::new(port, port, 1, 8), &interrupt(layout::SERIAL_GSI)]),
            ),
        ],
    ))
}

/// The generation ID, and the event device that signals its change.
fn generation() -> Vec<u8> {
    let address = Package::new(vec![&layout::GENERATION_ID, &ZERO]);
    let generation = bytes(&Device::new(
        "VGEN".into(),
        vec![
            &Name::new("_HID".into(), &"KEIK0001"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Name::new("ADDR".into(), &address),
        ],
    ));
    let events = bytes(&Device::new(
        "GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&interrupt(layout::GENERATION_GSI)])),
            // The device has one interrupt, so the method need not look which it was.
            &Method::new("_EVT".into(), 1, true, vec![&Notify::new(&Path::new("VGEN"), &GENERATION_CHANGED)]),
        ],
    ));
    [generation, events].concat()
}

/// Edge triggered, active high, not shared.
fn interrupt(gsi: u32) -> Interrupt {
    Interrupt::new(true, true, false, false, gsi)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    fn long(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    }

    /// The table at an address, its checksum checked.
    fn table(area: &[u8], address: u64) -> &[u8] {
        let at = usize::try_from(address - layout::ACPI).unwrap();
        let table = &area[at..at + word(area, at + 4) as usize];
        assert_eq!(table.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0, "checksum");
        table
    }

    fn walk(vcpus: u8, devices: usize) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
        let area = tables(vcpus, devices).unwrap();
        assert_eq!(&area[..8], b"RSD PTR ");
        for len in [20, Rsdp::len()] {
            assert_eq!(area[..len].iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte)), 0);
        }
        let xsdt = table(&area, long(&area, 24));
        assert_eq!((&xsdt[..4], xsdt.len()), (b"XSDT".as_slice(), 36 + 16));
        let fadt = table(&area, long(xsdt, 36)).to_vec();
        let madt = table(&area, long(xsdt, 44)).to_vec();
        assert_eq!((&fadt[..4], &madt[..4]), (b"FACP".as_slice(), b"APIC".as_slice()));
        let dsdt = table(&area, long(&fadt, 140)).to_vec();
        assert_eq!(&dsdt[..4], b"DSDT");
        (fadt, madt, dsdt)
    }

    #[test]
    fn every_vcpu_is_listed() {
        for vcpus in [1, 4, MAX_VCPUS] {
            let (_, madt, _) = walk(vcpus, 5);
            let ids: Vec<u8> = madt[44..].chunks(8).take(vcpus.into()).map(|entry| entry[3]).collect();
            assert_eq!(ids, (0..vcpus).collect::<Vec<_>>());
            let io_apic = &madt[44 + 8 * usize::from(vcpus)..];
            assert_eq!((io_apic[0], word(io_apic, 4), word(io_apic, 8)), (1, layout::IO_APIC, 0));
        }
    }

    #[test]
    fn the_platform_has_no_fixed_hardware_but_can_be_switched_off() {
        let (fadt, _, dsdt) = walk(1, 5);
        let flags = word(&fadt, 112);
        assert_ne!(flags & 1 << 20, 0, "hardware-reduced");
        assert_ne!(flags & 1 << 10, 0, "can be reset");
        assert_eq!((fadt[116], long(&fadt, 120)), (1, layout::RESET_PORT.into()));
        assert_eq!((fadt[244], long(&fadt, 248)), (1, layout::SLEEP_PORT.into()));
        assert_eq!((fadt[256], long(&fadt, 260)), (1, u64::from(layout::SLEEP_PORT) + 1));
        assert!(dsdt.windows(4).any(|name| name == b"_S5_"));
    }

    #[test]
    fn every_device_is_described() {
        let (_, _, dsdt) = walk(1, layout::MAX_DEVICES);
        for device in 0..layout::MAX_DEVICES {
            let place = layout::mmio_window(device).unwrap();
            let window = [&[0x86, 9, 0, 1], &(place.base as u32).to_le_bytes()[..]].concat();
            let at = dsdt.windows(window.len()).position(|bytes| bytes == window).unwrap();
            let interrupt = [&[0x89, 6, 0, 3, 1], &place.gsi.to_le_bytes()[..]].concat();
            assert_eq!(dsdt[at + 12..at + 12 + interrupt.len()], interrupt);
        }
        for text in ["LNRO0005", "VM_Gen_Counter", "ACPI0013"] {
            assert!(dsdt.windows(text.len()).any(|bytes| bytes == text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn what_there_is_no_room_for_is_refused() {
        assert!(matches!(tables(0, 1), Err(Error::Vcpus(0))));
        assert!(matches!(tables(MAX_VCPUS + 1, 1), Err(Error::Vcpus(_))));
        assert!(matches!(tables(1, layout::MAX_DEVICES + 1), Err(Error::Devices(_))));
        assert!(tables(MAX_VCPUS, layout::MAX_DEVICES).is_ok());
    }
}
