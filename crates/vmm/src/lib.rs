//! keiki-vmm, the monitor whose fork is fork(2).
