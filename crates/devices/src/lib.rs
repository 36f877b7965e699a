//! What a guest of keiki-vmm sees: one file for each device.
