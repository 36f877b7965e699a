use super::*;
use crate::boot::{Spec, load};
use keiki_hv::HugePages;
use linux_loader::{
    elf::{Elf64_Ehdr, Elf64_Phdr},
    loader::bootparam::boot_params,
};
use proptest::prelude::*;
use std::io::Write;
use vm_memory::ByteValued;

const MIB: u64 = 1 << 20;
const INIT_SIZE: u32 = 24 << 20;
const BODY: &[u8] = b"compressed kernel";

fn ram(mib: u64) -> GuestRam {
    GuestRam::anonymous(mib * MIB, HugePages::No).unwrap()
}

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn header() -> setup_header {
    setup_header {
        setup_sects: 1,
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        version: 0x20f,
        loadflags: 1,
        code32_start: 0x10_0000,
        initrd_addr_max: 0x7fff_ffff,
        xloadflags: XLF_KERNEL_64,
        cmdline_size: 2047,
        pref_address: 0x100_0000,
        init_size: INIT_SIZE,
        ..setup_header::default()
    }
}

fn bzimage(header: &setup_header) -> Vec<u8> {
    let mut image = vec![0; 1024];
    let bytes = header.as_slice();
    image[0x1f1..0x1f1 + bytes.len()].copy_from_slice(bytes);
    image.extend(BODY);
    image
}

/// One segment at 16 MiB, with or without the note that names an entry for PVH.
fn elf(pvh: Option<u32>) -> Vec<u8> {
    let mut head = Elf64_Ehdr::default();
    head.e_ident[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    head.e_entry = 0x100_0000;
    head.e_phoff = 64;
    head.e_phentsize = 56;
    head.e_phnum = 2;
    let code = Elf64_Phdr {
        p_type: 1,
        p_offset: 512,
        p_paddr: 0x100_0000,
        p_filesz: BODY.len() as u64,
        p_memsz: 1 << 20,
        ..Elf64_Phdr::default()
    };
    let note: Vec<u8> = pvh
        .map(|entry| [4_u32, 4, 18, u32::from_le_bytes(*b"Xen\0"), entry].map(u32::to_le_bytes).concat())
        .unwrap_or_default();
    let notes = Elf64_Phdr { p_type: 4, p_offset: 256, p_filesz: note.len() as u64, ..Elf64_Phdr::default() };
    let mut image = [head.as_slice(), code.as_slice(), notes.as_slice()].concat();
    image.resize(256, 0);
    image.extend(note);
    image.resize(512, 0);
    image.extend(BODY);
    image
}

fn boot(ram: &GuestRam, kernel: &[u8], initramfs: Option<&[u8]>, line: &str) -> Result<Entry, Error> {
    let mut initramfs = initramfs.map(file);
    load(
        ram,
        Spec {
            kernel: &mut file(kernel),
            initramfs: initramfs.as_mut(),
            command_line: line,
            vcpus: 2,
            devices: 5,
        },
    )
}

fn bytes(ram: &GuestRam, at: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    ram.memory().read_slice(&mut bytes, GuestAddress(at)).unwrap();
    bytes
}

fn params(ram: &GuestRam) -> boot_params {
    *boot_params::from_slice(&bytes(ram, layout::BOOT_PARAMS, size_of::<boot_params>())).unwrap()
}

#[test]
fn a_bzimage_is_loaded_with_all_it_looks_for() {
    let ram = ram(128);
    let entry = boot(&ram, &bzimage(&header()), Some(b"archive"), "console=ttyS0").unwrap();
    assert_eq!(entry, Entry::Linux64(0x10_0200));
    assert_eq!(bytes(&ram, 0x10_0000, BODY.len()), BODY);
    let params = params(&ram);
    assert_eq!({ params.acpi_rsdp_addr }, layout::ACPI);
    let initramfs = { params.hdr.ramdisk_image };
    assert_eq!((u64::from(initramfs), { params.hdr.ramdisk_size }), (128 * MIB - PAGE, 7));
    assert_eq!(bytes(&ram, initramfs.into(), 7), b"archive");
    assert_eq!(bytes(&ram, { params.hdr.cmd_line_ptr }.into(), 14), b"console=ttyS0\0");
    assert_eq!(params.hdr.type_of_loader, LOADER_UNKNOWN);
    let map = layout::memory_map(ram.spans());
    assert_eq!(usize::from(params.e820_entries), map.len());
    let table = { params.e820_table };
    assert!(table.iter().zip(&map).all(|(entry, part)| { entry.addr } == part.start));
    assert_eq!(bytes(&ram, layout::ACPI, 8), b"RSD PTR ");
}

#[test]
fn an_elf_kernel_starts_by_pvh_where_it_can() {
    let ram = ram(64);
    let entry = boot(&ram, &elf(Some(0x123_4560)), Some(b"archive"), "quiet").unwrap();
    assert_eq!(entry, Entry::Pvh(0x123_4560));
    assert_eq!(bytes(&ram, 0x100_0000, BODY.len()), BODY);
    let word = |at: u64| u64::from_le_bytes(bytes(&ram, at, 8).try_into().unwrap());
    let info = layout::START_INFO;
    assert_eq!(word(info) & 0xffff_ffff, u64::from(START_INFO_MAGIC));
    assert_eq!((word(info + 24), word(info + 32)), (layout::COMMAND_LINE, layout::ACPI));
    let modules = word(info + 16);
    assert_eq!((word(modules), word(modules + 8)), (64 * MIB - PAGE, 7));
    let entries = word(info + 48) & 0xffff_ffff;
    assert_eq!(entries as usize, layout::memory_map(ram.spans()).len());

    assert_eq!(boot(&ram, &elf(None), None, "quiet").unwrap(), Entry::Linux64(0x100_0000));
    assert_eq!({ params(&ram).hdr.header }, HEADER_MAGIC);
}

#[test]
fn what_is_no_kernel_is_refused_in_words() {
    let ram = ram(64);
    let old = setup_header { xloadflags: 0, ..header() };
    let low = setup_header { code32_start: 0x1000, ..header() };
    let not_big = setup_header { loadflags: 0, ..header() };
    for (kernel, words) in [
        (vec![], "empty"),
        (b"#!/bin/sh".to_vec(), "kernel"),
        (bzimage(&old), "64-bit entry"),
        (bzimage(&low), "kernel"),
        (bzimage(&not_big), "bzImage"),
        (elf(None)[..80].to_vec(), "kernel"),
        (elf(None)[..515].to_vec(), "kernel"),
        (bzimage(&header())[..800].to_vec(), "kernel"),
    ] {
        let error = boot(&ram, &kernel, None, "quiet").unwrap_err();
        assert!(matches!(error, Error::Kernel(_)) && error.to_string().contains(words), "{error}");
    }
}

#[test]
fn too_little_memory_is_said_with_what_would_do() {
    let error = boot(&ram(32), &bzimage(&header()), None, "quiet").unwrap_err();
    assert_eq!(
        error.to_string(),
        "the machine has 32 MiB of memory, its kernel and initramfs need 40 MiB to start"
    );
    let big = vec![0; 30 << 20];
    assert!(matches!(
        boot(&ram(64), &bzimage(&header()), Some(&big), "quiet"),
        Err(Error::Memory { has_mib: 64, needs_mib: 71 })
    ));
    assert!(boot(&ram(71), &bzimage(&header()), Some(&big), "quiet").is_ok());
    let huge = setup_header { pref_address: u64::MAX - 5, ..header() };
    assert!(matches!(boot(&ram(64), &bzimage(&huge), None, "quiet"), Err(Error::Memory { .. })));
}

#[test]
fn an_odd_command_line_is_refused() {
    let ram = ram(64);
    let kernel = bzimage(&header());
    assert!(boot(&ram, &kernel, None, &"x".repeat(2047)).is_ok());
    for (line, words) in [("x".repeat(2048), "2048 bytes"), ("a\nb".into(), "'\\n'"), ("ä".into(), "'ä'")] {
        let error = boot(&ram, &kernel, None, &line).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
    let short = bzimage(&setup_header { cmdline_size: 5, ..header() });
    assert!(matches!(boot(&ram, &short, None, "123456"), Err(Error::CommandLine(_))));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_bytes_of_a_kernel_make_it_panic(
        pvh in any::<bool>(), at in 0_usize..700, value in any::<[u8; 8]>(), cut in 0_usize..1100,
    ) {
        let mut image = if pvh { elf(Some(1)) } else { bzimage(&header()) };
        let end = (at + 8).min(image.len());
        if at < end {
            image[at..end].copy_from_slice(&value[..end - at]);
        }
        image.truncate(cut.max(4));
        let _ = boot(&ram(48), &image, None, "quiet");
    }

    #[test]
    fn an_initramfs_lies_between_kernel_and_end(mib in 16_u64..3072, len in 0_u64..1 << 32, end in 0_u64..1 << 31) {
        let loaded = Loaded { entry: Entry::Linux64(0), end, header: header() };
        if let Some(at) = place_initramfs(mib * MIB, len, &loaded) {
            prop_assert!(at >= end && at + len <= mib * MIB && at % PAGE == 0);
            prop_assert!(at + len <= u64::from(loaded.header.initrd_addr_max) + 1);
        }
    }
}
