//! keiki-vmm, the monitor whose fork is fork(2).

pub mod boot;
pub mod probe;
