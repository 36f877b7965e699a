//! The library that maps QEMU's guest RAM from its image, see `preload/ram.rs` and RFD 007.

use super::{
    args::{Launch, seen},
    host::Host,
    jail,
};
use crate::{EngineError, Result, users::chmod_readable};
use keiki_snapshot::MEMORY_FILE;
use std::{fs, path::PathBuf, process::Command};

static LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/ram.so"));
/// In the root of all jails.
const NAME: &str = "ram.so";

/// Puts the library where monitors find it. One that runs keeps the file it has.
fn install(host: &Host) -> Result<()> {
    let path = path(host);
    let failed = || EngineError::at("write", &path);
    if fs::read(&path).is_ok_and(|bytes| bytes == LIBRARY) {
        return Ok(());
    }
    fs::create_dir_all(jail::root(host)).map_err(failed())?;
    let new = path.with_extension(uuid::Uuid::now_v7().simple().to_string());
    fs::write(&new, LIBRARY).and_then(|()| fs::rename(&new, &path)).map_err(failed())?;
    chmod_readable(&path)
}

/// Makes the loader load it, and gives it the image.
pub(super) fn preload(host: &Host, launch: &Launch<'_>, command: &mut Command) -> Result<()> {
    install(host)?;
    let library = match launch.user {
        Some(_) => PathBuf::from("/").join(NAME),
        None => path(host),
    };
    let image = seen(launch.user, launch.paths).join(MEMORY_FILE);
    let bytes = u64::from(launch.shape.memory_mib) << 20;
    command.env("LD_PRELOAD", library).env("KEIKI_RAM", image).env("KEIKI_RAM_BYTES", bytes.to_string());
    Ok(())
}

fn path(host: &Host) -> PathBuf {
    jail::root(host).join(NAME)
}
