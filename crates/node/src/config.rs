//! The configuration of a node.

use keiki_types::{EngineKind, Sharing};
use std::{path::PathBuf, time::Duration};

/// The configuration of a node.
#[derive(Debug, Clone)]
pub struct Config {
    /// Everything durable.
    pub data_dir: PathBuf,
    /// Sockets.
    pub run_dir: PathBuf,
    /// Kernels and root disks made from packages; None: in the data directory. Several nodes may
    /// share one.
    pub cache_dir: Option<PathBuf>,
    /// Directory of the user's templates, one `NAME.toml` each.
    pub templates_dir: Option<PathBuf>,
    /// Address of the API, e.g. `127.0.0.1:7777`; port 0 picks a free one.
    pub listen: String,
    /// Keys that may use the API. None: any key, which is allowed on loopback only.
    pub api_keys: Vec<String>,
    /// Which engine; None probes.
    pub engine: Option<EngineKind>,
    /// Where `keiki-vmm` is, the monitor of engine `kvm`. None: it was not found.
    pub vmm_binary: Option<PathBuf>,
    /// The widest scope in which memory may be shared.
    pub sharing: Sharing,
    /// Network of the slots, e.g. `10.200.0.0/16`.
    pub slot_range: String,
    /// Where the guest agent binary is; it goes into the initramfs of templates.
    pub guest_binary: PathBuf,
    /// Size of the store's own file system where one is needed, in GiB. None: half of what is free,
    /// 4 to 64.
    pub store_gib: Option<u64>,
    /// RAM available to all machines together, in MiB. None: nine tenths of the host's.
    pub memory_limit_mib: Option<u64>,
    /// Monitors started ahead for each template. Each takes a slot and some memory; a create that
    /// finds one saves its start.
    pub seats_ahead: usize,
    /// Networks that guests may reach although they are private or local, as CIDRs.
    pub egress_allow: Vec<String>,
    /// Domain of previews: port 8000 of a sandbox is at `8000-ID.SUFFIX`. Its names must lead to
    /// this node.
    pub preview_suffix: String,
    /// Name servers of the forwarder. Empty: the host's.
    pub dns: Vec<std::net::SocketAddr>,
    /// Snapshots older than this are marked as stale. None: age does not matter.
    pub snapshot_max_age: Option<Duration>,
    /// Snapshots older than this are not restored. None: age does not matter.
    pub snapshot_refuse_age: Option<Duration>,
    /// End every sandbox and unmount the store when the node stops.
    pub ephemeral: bool,
}
