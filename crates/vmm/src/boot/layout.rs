//! Addresses and interrupts of a machine. Pure.
//!
//! ```text
//!   0x0000_7000   boot parameters, page tables, command line (the guest may reuse this once it runs)
//!   0x000e_0000   ACPI tables ───────────── reserved, to 1 MiB
//!   0x000f_f000   generation ID
//!   0x0010_0000   kernel ...            initramfs (at the end of low RAM)
//!   0xc000_0000   device windows, 4 KiB each ── hole of RAM, to 4 GiB
//!   0xfec0_0000   I/O APIC, local APICs
//!   0xfffb_c000   KVM's own pages
//!   4 GiB         the rest of RAM
//! ```
//!
//! The window and the interrupt of a device follow from its number alone, so a frozen machine
//! records neither.

use keiki_hv::{HOLE, Span};

/// Boot parameters ("zero page").
pub const BOOT_PARAMS: u64 = 0x7000;
/// Start information of a kernel that starts by PVH.
pub const START_INFO: u64 = 0x6000;
/// Memory map and modules of [`START_INFO`].
pub const START_INFO_TABLES: u64 = 0x6100;
/// Segment descriptors of the start.
pub const GDT: u64 = 0x500;
/// Page tables of the start: one page, one page, four pages.
pub const PAGE_TABLES: u64 = 0x9000;
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line that x86 kernels accept, without its final zero byte.
pub const COMMAND_LINE_MAX: usize = 2047;
/// End of the RAM below the area that a BIOS would use.
const LOW_END: u64 = 0x9_f000;
/// ACPI tables; the RSDP is first.
pub const ACPI: u64 = 0xe_0000;
/// End of the ACPI tables.
pub const ACPI_END: u64 = GENERATION_ID;
/// The 16 bytes that change with every thaw.
pub const GENERATION_ID: u64 = 0xf_f000;
/// End of the reserved part. Kernels are loaded from here on.
pub const HIGH_RAM: u64 = 0x10_0000;
/// KVM's own pages below 4 GiB.
const KVM_PAGES: u64 = 0xfffb_c000;
pub const IO_APIC: u32 = 0xfec0_0000;
pub const LOCAL_APIC: u32 = 0xfee0_0000;

/// First port of the serial console.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// Sleep control register. The next port is the sleep status register.
pub const SLEEP_PORT: u16 = 0x600;
/// Writing [`RESET_VALUE`] here resets the machine, which ends it.
pub const RESET_PORT: u16 = 0x602;
pub const RESET_VALUE: u8 = 1;
/// Interrupt that signals a new generation ID.
pub const GENERATION_GSI: u32 = 5;

/// First window.
const WINDOWS: u64 = HOLE.start;
/// Bytes of a device's window.
pub const WINDOW: u64 = keiki_devices::mmio::WINDOW;
const FIRST_GSI: u32 = 6;
/// The I/O APIC has 24 lines.
const LAST_GSI: u32 = 23;
/// Most devices.
pub const MAX_DEVICES: usize = (LAST_GSI - FIRST_GSI + 1) as usize;
/// Most vCPUs.
pub const MAX_VCPUS: u8 = 32;

/// Address and interrupt of an MMIO device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmioWindow {
    pub base: u64,
    pub gsi: u32,
}

/// The window of the device with this number, counted from 0. None: the machine has no room for it.
#[must_use]
pub fn mmio_window(device: usize) -> Option<MmioWindow> {
    let number = u32::try_from(device).ok().filter(|_| device < MAX_DEVICES)?;
    Some(MmioWindow { base: WINDOWS + u64::from(number) * WINDOW, gsi: FIRST_GSI + number })
}

/// The device at this address, and the offset in its window.
#[must_use]
pub fn device_at(address: u64) -> Option<(usize, u64)> {
    let offset = address.checked_sub(WINDOWS)?;
    let device = usize::try_from(offset / WINDOW).ok().filter(|device| *device < MAX_DEVICES)?;
    Some((device, offset % WINDOW))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ram = 1,
    Reserved = 2,
}

/// One entry of the memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    pub start: u64,
    pub len: u64,
    pub kind: Kind,
}

impl Part {
    const fn new(start: u64, end: u64, kind: Kind) -> Self {
        Self { start, len: end - start, kind }
    }
}

/// The memory map of a guest with this RAM, in order.
#[must_use]
pub fn memory_map(ram: &[Span]) -> Vec<Part> {
    let mut map = vec![Part::new(0, LOW_END, Kind::Ram), Part::new(ACPI, HIGH_RAM, Kind::Reserved)];
    let high = ram.iter().filter(|span| span.guest + span.len > HIGH_RAM);
    map.extend(high.map(|span| Part::new(span.guest.max(HIGH_RAM), span.guest + span.len, Kind::Ram)));
    map.push(Part::new(KVM_PAGES, HOLE.end, Kind::Reserved));
    map.sort_by_key(|part| part.start);
    map
}

/// End of the RAM below the hole.
#[must_use]
pub fn low_ram_end(ram: &[Span]) -> u64 {
    ram.iter().map(|span| span.guest + span.len).filter(|end| *end <= HOLE.start).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn map(mib: u64) -> Vec<Part> {
        memory_map(&keiki_hv::layout(mib << 20).unwrap())
    }

    #[test]
    fn five_gib_are_split_by_the_hole() {
        let ram: Vec<_> = map(5 << 10).into_iter().filter(|part| part.kind == Kind::Ram).collect();
        assert_eq!(
            ram[1..],
            [Part::new(HIGH_RAM, 3 << 30, Kind::Ram), Part { start: 4 << 30, len: 2 << 30, kind: Kind::Ram }]
        );
        assert_eq!(low_ram_end(&keiki_hv::layout(5 << 30).unwrap()), 3 << 30);
        assert_eq!(low_ram_end(&keiki_hv::layout(64 << 20).unwrap()), 64 << 20);
    }

    #[test]
    fn every_device_has_its_own_window_in_the_hole() {
        let windows: Vec<MmioWindow> = (0..MAX_DEVICES).map(|device| mmio_window(device).unwrap()).collect();
        for (device, found) in windows.iter().enumerate() {
            assert!(HOLE.contains(&found.base) && found.base + WINDOW <= u64::from(IO_APIC));
            assert!((FIRST_GSI..=LAST_GSI).contains(&found.gsi));
            assert!(![SERIAL_GSI, GENERATION_GSI].contains(&found.gsi));
            assert_eq!(device_at(found.base), Some((device, 0)));
            assert_eq!(device_at(found.base + WINDOW - 1), Some((device, WINDOW - 1)));
            assert!(windows[..device].iter().all(|other| other.gsi != found.gsi));
        }
        assert_eq!(mmio_window(MAX_DEVICES), None);
        assert_eq!(mmio_window(usize::MAX), None);
        assert_eq!(device_at(WINDOWS - 1), None);
        assert_eq!(device_at(WINDOWS + MAX_DEVICES as u64 * WINDOW), None);
        assert_eq!(device_at(u64::MAX), None);
    }

    proptest! {
        #[test]
        fn the_map_is_ordered_and_has_all_ram_above_one_mib(mib in 2_u64..64 << 10) {
            let map = map(mib);
            for pair in map.windows(2) {
                prop_assert!(pair[0].start + pair[0].len <= pair[1].start, "{pair:?}");
            }
            for part in &map {
                prop_assert!(part.len > 0 && part.start % 4096 == 0 && part.len % 4096 == 0);
                let in_hole = part.start < HOLE.end && part.start + part.len > HOLE.start;
                prop_assert!(part.kind == Kind::Reserved || !in_hole);
            }
            let ram: u64 = map.iter().filter(|part| part.kind == Kind::Ram).map(|part| part.len).sum();
            prop_assert_eq!(ram, (mib << 20) - HIGH_RAM + LOW_END);
        }
    }
}
