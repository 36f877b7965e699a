//! Kernel, initramfs, command line and boot parameters in guest memory.
//!
//! A bzImage unpacks itself to its preferred address, so the memory up to its end is kept free. The
//! initramfs goes to the end of low RAM, out of the way and below 4 GiB, as every kernel requires.

use super::{
    Entry, Error,
    layout::{self, Part},
    put,
};
use keiki_hv::GuestRam;
use linux_loader::{
    bootparam::{boot_e820_entry, boot_params, setup_header},
    configurator::{BootConfigurator, BootParams, linux::LinuxBootConfigurator, pvh::PvhBootConfigurator},
    loader::{BzImage, Elf, KernelLoader, elf::PvhBootCapability},
    start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info},
};
use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
};
use vm_memory::{Bytes, GuestAddress};

const ELF_MAGIC: [u8; 4] = *b"\x7fELF";
/// Boot protocol header for a kernel without one.
const BOOT_FLAG: u16 = 0xaa55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
const LOADER_UNKNOWN: u8 = 0xff;
const ELF_ALIGNMENT: u32 = 0x100_0000;
/// Flag of a kernel with a 64-bit entry.
const XLF_KERNEL_64: u16 = 1;
/// Offset of the 64-bit entry of a bzImage.
const ENTRY_64: u64 = 0x200;
/// Highest address of an initramfs, unless the kernel gives another.
const INITRAMFS_MAX: u64 = 0x37ff_ffff;
const START_INFO_MAGIC: u32 = 0x336e_c578;
const START_INFO_VERSION: u32 = 1;
const PAGE: u64 = 4096;

/// A kernel in memory.
struct Loaded {
    entry: Entry,
    /// First free address above the kernel.
    end: u64,
    header: setup_header,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Initramfs {
    at: u64,
    len: u64,
}

/// Loads everything and writes the parameters.
pub(super) fn load(
    ram: &GuestRam,
    kernel: &mut File,
    initramfs: Option<&mut File>,
    command_line: &str,
) -> Result<Entry, Error> {
    let loaded = load_kernel(ram, kernel)?;
    let line = check_command_line(command_line, &loaded.header)?;
    put(ram, layout::COMMAND_LINE, &line)?;
    let initramfs = initramfs.map(|file| load_initramfs(ram, file, &loaded)).transpose()?;
    let map = layout::memory_map(ram.spans());
    match loaded.entry {
        Entry::Linux64(_) => write_boot_params(ram, &loaded.header, initramfs, &map)?,
        Entry::Pvh(_) => write_start_info(ram, initramfs, &map)?,
    }
    Ok(loaded.entry)
}

fn load_kernel(ram: &GuestRam, kernel: &mut File) -> Result<Loaded, Error> {
    let mut magic = [0; 4];
    kernel
        .rewind()
        .and_then(|()| kernel.read_exact(&mut magic))
        .map_err(|_| Error::Kernel("it is empty or cannot be read".into()))?;
    if magic == ELF_MAGIC { load_elf(ram, kernel) } else { load_bzimage(ram, kernel) }
}

fn load_bzimage(ram: &GuestRam, kernel: &mut File) -> Result<Loaded, Error> {
    let high = Some(GuestAddress(layout::HIGH_RAM));
    let size = kernel.metadata().map_or(0, |meta| meta.len());
    let result =
        BzImage::load(ram.memory(), None, kernel, high).map_err(|error| explain(ram, size, &error))?;
    let header = result
        .setup_header
        .ok_or_else(|| Error::Kernel("it is neither a bzImage nor an ELF file of 64 bits".into()))?;
    if { header.xloadflags } & XLF_KERNEL_64 == 0 {
        return Err(Error::Kernel("it has no 64-bit entry: use a kernel for x86-64".into()));
    }
    let at = result.kernel_load.0;
    let unpacked = { header.pref_address }.saturating_add({ header.init_size }.into());
    let end = result.kernel_end.max(unpacked);
    check_fits(ram, end)?;
    Ok(Loaded { entry: Entry::Linux64(at + ENTRY_64), end, header })
}

fn load_elf(ram: &GuestRam, kernel: &mut File) -> Result<Loaded, Error> {
    let high = Some(GuestAddress(layout::HIGH_RAM));
    let size = kernel.metadata().map_or(0, |meta| meta.len());
    let result = Elf::load(ram.memory(), None, kernel, high).map_err(|error| explain(ram, size, &error))?;
    let entry = match result.pvh_boot_cap {
        PvhBootCapability::PvhEntryPresent(at) => Entry::Pvh(at.0),
        _ => Entry::Linux64(result.kernel_load.0),
    };
    check_fits(ram, result.kernel_end)?;
    let header = setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        kernel_alignment: ELF_ALIGNMENT,
        ..setup_header::default()
    };
    Ok(Loaded { entry, end: result.kernel_end, header })
}

/// The loader also reports "cannot read" if RAM is too small.
fn explain(ram: &GuestRam, size: u64, error: &linux_loader::loader::Error) -> Error {
    let needs = layout::HIGH_RAM.saturating_add(size);
    if layout::low_ram_end(ram.spans()) < needs {
        memory(ram, needs)
    } else {
        Error::Kernel(error.to_string())
    }
}

fn check_fits(ram: &GuestRam, end: u64) -> Result<(), Error> {
    if end > layout::low_ram_end(ram.spans()) { Err(memory(ram, end)) } else { Ok(()) }
}

fn memory(ram: &GuestRam, needs: u64) -> Error {
    Error::Memory { has_mib: ram.size() >> 20, needs_mib: needs.div_ceil(1 << 20) }
}

/// Returns the command line with a final zero byte.
fn check_command_line(text: &str, header: &setup_header) -> Result<Vec<u8>, Error> {
    let most = match header.cmdline_size {
        0 => layout::COMMAND_LINE_MAX,
        size => layout::COMMAND_LINE_MAX.min(usize::try_from(size).unwrap_or(usize::MAX)),
    };
    if text.len() > most {
        return Err(Error::CommandLine(format!("has {} bytes, the kernel takes {most}", text.len())));
    }
    if let Some(odd) = text.chars().find(|c| !matches!(c, ' '..='~')) {
        return Err(Error::CommandLine(format!("contains {odd:?}: it takes printable ASCII only")));
    }
    Ok([text.as_bytes(), &[0]].concat())
}

fn load_initramfs(ram: &GuestRam, file: &mut File, loaded: &Loaded) -> Result<Initramfs, Error> {
    let len = file.seek(SeekFrom::End(0)).map_err(Error::Initramfs)?;
    file.rewind().map_err(Error::Initramfs)?;
    let at = place_initramfs(layout::low_ram_end(ram.spans()), len, loaded)
        .ok_or_else(|| memory(ram, loaded.end.saturating_add(len).saturating_add(PAGE)))?;
    let count = usize::try_from(len).map_err(|_| Error::Write(at))?;
    ram.memory()
        .read_exact_volatile_from(GuestAddress(at), file, count)
        .map_err(|error| Error::Initramfs(io::Error::other(error)))?;
    Ok(Initramfs { at, len })
}

/// The highest address that RAM and kernel allow.
fn place_initramfs(ram_end: u64, len: u64, loaded: &Loaded) -> Option<u64> {
    let most = match loaded.header.initrd_addr_max {
        0 => INITRAMFS_MAX,
        most => most.into(),
    };
    let at = ram_end.min(most + 1).checked_sub(len)? / PAGE * PAGE;
    (at >= loaded.end).then_some(at)
}

fn write_boot_params(
    ram: &GuestRam,
    header: &setup_header,
    initramfs: Option<Initramfs>,
    map: &[Part],
) -> Result<(), Error> {
    let low = |address: u64| u32::try_from(address).map_err(|_| Error::Write(address));
    let mut params = boot_params { hdr: *header, acpi_rsdp_addr: layout::ACPI, ..boot_params::default() };
    params.hdr.type_of_loader = LOADER_UNKNOWN;
    params.hdr.cmd_line_ptr = low(layout::COMMAND_LINE)?;
    if let Some(initramfs) = initramfs {
        params.hdr.ramdisk_image = low(initramfs.at)?;
        params.hdr.ramdisk_size = low(initramfs.len)?;
    }
    let mut table = params.e820_table;
    for (entry, part) in table.iter_mut().zip(map) {
        *entry = boot_e820_entry { addr: part.start, size: part.len, r#type: part.kind as u32 };
        params.e820_entries += 1;
    }
    params.e820_table = table;
    let params = BootParams::new(&params, GuestAddress(layout::BOOT_PARAMS));
    LinuxBootConfigurator::write_bootparams(&params, ram.memory())
        .map_err(|_| Error::Write(layout::BOOT_PARAMS))
}

fn write_start_info(ram: &GuestRam, initramfs: Option<Initramfs>, map: &[Part]) -> Result<(), Error> {
    let entry = |part: &Part| hvm_memmap_table_entry {
        addr: part.start,
        size: part.len,
        type_: part.kind as u32,
        reserved: 0,
    };
    let map: Vec<hvm_memmap_table_entry> = map.iter().map(entry).collect();
    let modules: Vec<hvm_modlist_entry> = initramfs
        .iter()
        .map(|initramfs| hvm_modlist_entry {
            paddr: initramfs.at,
            size: initramfs.len,
            ..hvm_modlist_entry::default()
        })
        .collect();
    let modules_at = layout::START_INFO_TABLES + (map.len() * size_of::<hvm_memmap_table_entry>()) as u64;
    let count = |count: usize| u32::try_from(count).map_err(|_| Error::Write(layout::START_INFO));
    let info = hvm_start_info {
        magic: START_INFO_MAGIC,
        version: START_INFO_VERSION,
        nr_modules: count(modules.len())?,
        modlist_paddr: if modules.is_empty() { 0 } else { modules_at },
        cmdline_paddr: layout::COMMAND_LINE,
        rsdp_paddr: layout::ACPI,
        memmap_paddr: layout::START_INFO_TABLES,
        memmap_entries: count(map.len())?,
        ..hvm_start_info::default()
    };
    let mut params = BootParams::new(&info, GuestAddress(layout::START_INFO));
    params.set_sections(&map, GuestAddress(layout::START_INFO_TABLES));
    if !modules.is_empty() {
        params.set_modules(&modules, GuestAddress(modules_at));
    }
    PvhBootConfigurator::write_bootparams(&params, ram.memory()).map_err(|_| Error::Write(layout::START_INFO))
}

#[cfg(test)]
mod tests;
