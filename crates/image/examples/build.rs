//! Builds the parts of a template ahead of time: `build CACHE GUEST [TEMPLATE [DIRECTORY]]`. The
//! template is a built-in one or one of that directory.

use keiki_image::{Builder, Catalog};
use std::{error::Error, path::Path, process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (cache, guest, name, own) = match args.as_slice() {
        [cache, guest] => (cache, guest, "base", None),
        [cache, guest, name] => (cache, guest, name.as_str(), None),
        [cache, guest, name, own] => (cache, guest, name.as_str(), Some(own.into())),
        _ => {
            eprintln!("usage: build CACHE GUEST [TEMPLATE [DIRECTORY]]");
            return ExitCode::from(2);
        }
    };
    let spec = match Catalog::new(own).get(name) {
        Ok(Some(spec)) => spec,
        Ok(None) => {
            eprintln!("no such template: {name}");
            return ExitCode::from(2);
        }
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let builder = Builder::new(cache, Arc::new(|line: &str| println!("{line}")));
    match builder.template(&spec.rootfs(), Path::new(guest)) {
        Ok(built) => {
            println!("kernel    {} {}", built.kernel.release, built.kernel.bzimage.display());
            println!("initramfs {}", built.initramfs.display());
            println!("rootfs    {} ({} MiB)", built.rootfs.raw.display(), built.rootfs.used_bytes >> 20);
            println!("version   {}", built.digest);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            let mut source = error.source();
            while let Some(cause) = source {
                eprintln!("  because: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}
