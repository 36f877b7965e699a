//! VM generation ID: 16 bytes of guest memory that tell a guest that it has become another machine.
//!
//! The guest finds their address through ACPI (`VM_Gen_Counter`, object `ADDR`). An interrupt of
//! the generic event device signals a change, and the kernel of the guest then reseeds. The bytes
//! lie in memory, so a freeze carries them. Each copy gets new ones before it runs.

use crate::{Device, Interrupt, Memory, State, StateError};
use std::{io, time::Instant};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

pub const LEN: usize = 16;

const KIND: &str = "vmgenid";
const VERSION: u16 = 1;

pub struct VmGenId {
    memory: Memory,
    address: GuestAddress,
    interrupt: Box<dyn Interrupt>,
    /// The guest has not been notified yet.
    changed: bool,
}

impl VmGenId {
    /// `address` is the address that ACPI gives and the memory map reserves.
    pub fn new(memory: Memory, address: GuestAddress, interrupt: Box<dyn Interrupt>) -> io::Result<Self> {
        if !GuestMemoryBackend::check_range(&memory, address, LEN) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the generation ID is outside of RAM"));
        }
        Ok(Self { memory, address, interrupt, changed: false })
    }

    /// Sets the ID. The next [`Device::resume`] notifies the guest.
    pub fn set(&mut self, id: [u8; LEN]) -> io::Result<()> {
        self.memory.write_slice(&id, self.address).map_err(io::Error::other)?;
        self.changed = true;
        Ok(())
    }
}

impl Device for VmGenId {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&mut self, _offset: u64, _data: &[u8]) {}

    fn pause(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        State::pack(KIND, VERSION, &(self.address.0, self.changed))
    }

    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        let (address, changed): (u64, bool) = state.unpack(KIND, VERSION)?;
        if address != self.address.0 {
            return Err(StateError::Field {
                kind: KIND,
                field: "address",
                why: "differs from this machine's",
            });
        }
        self.changed |= changed;
        Ok(())
    }

    fn resume(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.changed) { self.interrupt.raise() } else { Ok(()) }
    }
}
