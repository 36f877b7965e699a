//! Memory that a monitor uses in addition to the guest's RAM.

/// What a monitor is expected to use, in MiB, for admission: a waiting QEMU holds 23, and translated guest code is added.
pub const MONITOR_MIB: u64 = 48;
/// Most that a `keiki-vmm` may use: device buffers, layers' tables, the program.
pub(crate) const KVM_LIMIT: u64 = 64 << 20;
/// Most that a QEMU may use: the same, and the translator's cache.
pub(crate) const QEMU_LIMIT: u64 = 512 << 20;
