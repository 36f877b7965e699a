//! Makes the parts of a built-in template ahead of time: `build CACHE GUEST [TEMPLATE]`.

use keiki_image::{Builder, Catalog};
use std::{error::Error, path::Path, process::ExitCode, sync::Arc};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (cache, guest, name) = match args.as_slice() {
        [cache, guest] => (cache, guest, "base"),
        [cache, guest, name] => (cache, guest, name.as_str()),
        _ => {
            eprintln!("usage: build CACHE GUEST [TEMPLATE]");
            return ExitCode::from(2);
        }
    };
    let spec = match Catalog::new(None).get(name) {
        Ok(Some(spec)) => spec,
        Ok(None) => {
            eprintln!("no template `{name}` comes with the product");
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
