//! The initial RAM file system: the guest agent and what it needs before it has a disk.
//!
//! ```text
//! /init                   keiki-guest
//! /keiki/modules          file names in load order, one per line
//! /keiki/modules.d/*.ko   uncompressed: unpacking is slower in a guest
//! /kernel/firmware/acpi   an ACPI table; the kernel reads it before it can unpack: no compression
//! ```

use crate::{
    Builder, Kernel, cache, cpio,
    error::{Error, Result, io_error},
    generation,
    modules::{Index, WANTED, unpack, unpacked_name},
};
use std::{
    fs::{self, File},
    io::BufWriter,
    path::{Path, PathBuf},
};

/// Largest guest agent that is accepted.
const GUEST_LIMIT: u64 = 64 << 20;

pub(crate) fn build(builder: &Builder, kernel: &Kernel, guest: &Path) -> Result<PathBuf> {
    let read = |name: &str| {
        let path = kernel.modules_dir.join(name);
        fs::read_to_string(&path).map_err(io_error("reading", &path))
    };
    let index = Index::parse(&read("modules.dep")?, &read("modules.builtin")?);
    let order = index.order(WANTED).map_err(|missing| {
        Error::BadKernel(format!("{} lacks the module {missing}, which every guest needs", kernel.release))
    })?;
    let table = generation::table();
    let (modules, agent) = (order.join("\n"), cache::file_digest(guest)?);
    let key =
        cache::key(&["initramfs", &kernel.release, &modules, &agent, blake3::hash(&table).to_hex().as_str()]);
    let part = builder.cache.part("initramfs", &key);
    if !builder.refresh && part.is_file() {
        return Ok(part);
    }
    builder.say(format!("initramfs: the guest agent and {} modules", order.len()));
    let path = builder.cache.scratch("initramfs")?;
    let agent = read_agent(guest)?;
    let mut modules = Vec::with_capacity(order.len());
    for module in &order {
        modules.push((unpacked_name(module), unpack(&kernel.modules_dir.join(module))?));
    }
    write(&path, &table, &agent, &modules).map_err(io_error("writing", &path))?;
    builder.cache.publish(&path, &part)?;
    Ok(part)
}

fn read_agent(guest: &Path) -> Result<Vec<u8>> {
    let size = fs::metadata(guest).map_err(io_error("reading the guest agent", guest))?.len();
    if size > GUEST_LIMIT {
        let source = std::io::ErrorKind::FileTooLarge.into();
        return Err(io_error("reading the guest agent", guest)(source));
    }
    fs::read(guest).map_err(io_error("reading the guest agent", guest))
}

fn write(path: &Path, table: &[u8], agent: &[u8], modules: &[(&str, Vec<u8>)]) -> std::io::Result<()> {
    let mut archive = cpio::Archive::new(BufWriter::new(File::create_new(path)?));
    for directory in generation::DIRECTORIES {
        archive.directory(directory, 0o755)?;
    }
    archive.file(&format!("{}/generation.aml", generation::DIRECTORIES[2]), 0o644, table)?;
    archive.file("init", 0o755, agent)?;
    archive.directory("keiki", 0o755)?;
    let names: String = modules.iter().map(|(name, _)| format!("{name}\n")).collect();
    archive.file("keiki/modules", 0o644, names.as_bytes())?;
    archive.directory("keiki/modules.d", 0o755)?;
    for (name, data) in modules {
        archive.file(&format!("keiki/modules.d/{name}"), 0o644, data)?;
    }
    archive.finish().map(drop)
}
