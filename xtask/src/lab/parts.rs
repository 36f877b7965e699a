//! What every run of the lab shares: kernel, root disk and first RAM disk, made once.

use anyhow::{Context, Result};
use keiki_image::{Builder, Kernel, Rootfs, RootfsSpec, cpio, modules};
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::BufWriter,
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a node runs, and what tests look with.
const PACKAGES: [&str; 15] = [
    "busybox-static",
    "ca-certificates",
    "curl",
    "e2fsprogs",
    "iproute2",
    "iputils-ping",
    "kmod",
    "mount",
    "nftables",
    "procps",
    "python3",
    "qemu-utils",
    "strace",
    "xfsprogs",
    "xz-utils",
];
const DISK_MIB: u32 = 3072;
/// Has the commands of [`INIT`].
const BUSYBOX: &str = "/bin/busybox";
/// What mounts the root disk: the rest of the kernel's drivers for it is built in.
const DISK_DRIVER: &str = "virtio_blk";
const INIT: &str = include_str!("initrd-init.sh");

/// Kernel, root disk and first RAM disk.
pub(super) struct Parts {
    pub(super) kernel: Kernel,
    pub(super) rootfs: Rootfs,
    pub(super) initrd: PathBuf,
    /// Where kernels and root disks of all kinds are kept.
    pub(super) cache: PathBuf,
}

impl Parts {
    /// Takes them from the cache or makes them.
    pub(super) fn build(state: &Path) -> Result<Self> {
        fs::create_dir_all(state).with_context(|| format!("making {}", state.display()))?;
        let here = state.parent().context("the lab's directory has no parent")?;
        let cache = std::env::var_os("KEIKI_IMAGE_CACHE").map_or_else(|| here.join("cache"), PathBuf::from);
        let builder = Builder::new(&cache, Arc::new(|line: &str| eprintln!("lab: {line}")));
        let kernel = builder.kernel().context("cannot build the lab's kernel")?;
        let spec = RootfsSpec {
            name: "lab".to_owned(),
            suite: suite(),
            packages: PACKAGES.map(str::to_owned).to_vec(),
            disk_mib: DISK_MIB,
            wheels: Vec::new(),
            env: BTreeMap::new(),
            files: BTreeMap::new(),
        };
        let rootfs = builder.rootfs(&spec).context("cannot build the lab's root disk")?;
        let initrd = state.join("initrd");
        write_initrd(&kernel, &initrd).context("cannot build the lab's initramfs")?;
        Ok(Self { kernel, rootfs, initrd, cache })
    }
}

/// The host's own release where it is a Debian, so that what was built here runs there.
fn suite() -> String {
    let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        line.map(|value| value.trim_matches('"').to_owned())
    };
    field("VERSION_CODENAME")
        .filter(|_| field("ID").as_deref() == Some("debian"))
        .unwrap_or("bookworm".into())
}

/// Quicker than finding out whether it is there already.
fn write_initrd(kernel: &Kernel, path: &Path) -> Result<()> {
    let read = |name: &str| {
        let path = kernel.modules_dir.join(name);
        fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
    };
    let index = modules::Index::parse(&read("modules.dep")?, &read("modules.builtin")?);
    let order = index
        .order(&[(DISK_DRIVER, true)])
        .map_err(|missing| anyhow::anyhow!("{} has no module {missing}", kernel.release))?;
    let busybox = fs::read(BUSYBOX).context("busybox is missing: install the package busybox-static")?;
    let unfinished = path.with_extension(format!("{}.new", std::process::id()));
    let mut archive = cpio::Archive::new(BufWriter::new(File::create(&unfinished)?));
    for dir in ["bin", "dev", "proc", "modules", "new"] {
        archive.directory(dir, 0o755)?;
    }
    archive.file("bin/busybox", 0o755, &busybox)?;
    archive.file("init", 0o755, INIT.as_bytes())?;
    for (place, module) in order.iter().enumerate() {
        let code = modules::unpack(&kernel.modules_dir.join(module))?;
        archive.file(&format!("modules/{place:02}.ko"), 0o644, &code)?;
    }
    archive.finish()?;
    fs::rename(&unfinished, path)?;
    Ok(())
}
