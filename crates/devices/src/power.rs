//! How a guest ends its machine: the sleep and reset registers that ACPI names, and the keyboard controller's reset line.

use crate::{Device, Event, State, StateError};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

/// Offset of the sleep control register (`SLEEP_CONTROL_REG`).
pub const SLEEP_CONTROL: u64 = 0;
/// Offset of the sleep status register (`SLEEP_STATUS_REG`).
pub const SLEEP_STATUS: u64 = 1;
/// Offset of the reset register (`RESET_REG`).
pub const RESET: u64 = 2;
/// Offset of the keyboard controller's command port, which the monitor maps at [`KEYBOARD_PORT`].
pub const KEYBOARD: u64 = 3;
/// Registers.
pub const LEN: u64 = 4;
/// The keyboard controller's command port.
pub const KEYBOARD_PORT: u16 = 0x64;
/// What resets when written to [`RESET`] (`RESET_VALUE`).
pub const RESET_VALUE: u8 = 1;
/// Sleep type of "off" in `\_S5`.
pub const SLEEP_TYPE_OFF: u8 = 5;

/// Sleep now, in the sleep control register.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Pulse the reset line, a command of the keyboard controller.
const PULSE_RESET: u8 = 0xfe;

const KIND: &str = "power";
const VERSION: u16 = 1;

/// What the guest wants of its machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// To be off.
    Off,
    /// To start again, which a machine of ours does not: its monitor ends.
    Reset,
}

/// The registers. [`Device::events`] is readable once the guest wrote to one; [`Power::ending`] says which.
#[derive(Debug)]
pub struct Power {
    event: Event,
    ending: Option<Ending>,
}

impl Power {
    /// A machine that is on.
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: Event::new()?, ending: None })
    }

    /// What the guest wants, if anything. It stays: a machine ends once.
    pub fn ending(&self) -> Option<Ending> {
        self.ending
    }
}

impl Device for Power {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        // Also the keyboard controller's status: no byte waiting, ready for a command.
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let [value] = *data else { return };
        let ending = match offset {
            SLEEP_CONTROL if value == SLEEP_TYPE_OFF << 2 | SLEEP_ENABLE => Ending::Off,
            RESET if value == RESET_VALUE => Ending::Reset,
            KEYBOARD if value == PULSE_RESET => Ending::Reset,
            _ => return,
        };
        self.ending.get_or_insert(ending);
        // Its counter is nowhere near full.
        let _ = self.event.signal();
    }

    fn events(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn process(&mut self) {
        self.event.take();
    }

    fn pause(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        State::pack(KIND, VERSION, &())
    }

    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        state.unpack(KIND, VERSION)
    }

    fn resume(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Ending, KEYBOARD, Power, RESET, SLEEP_CONTROL};
    use crate::Device;

    #[test]
    fn only_the_right_write_ends_a_machine() {
        for (offset, value, ending) in [
            (SLEEP_CONTROL, 0x34, Some(Ending::Off)),
            (SLEEP_CONTROL, 0x14, None),
            (SLEEP_CONTROL, 0x20, None),
            (RESET, 1, Some(Ending::Reset)),
            (RESET, 0, None),
            (KEYBOARD, 0xfe, Some(Ending::Reset)),
            (KEYBOARD, 0xd1, None),
            (9, 0xfe, None),
        ] {
            let mut power = Power::new().unwrap();
            power.write(offset, &[value, 0]);
            assert_eq!(power.ending(), None, "a write of two bytes is none");
            power.write(offset, &[value]);
            assert_eq!(power.ending(), ending, "{value:#x} to {offset}");
            assert_eq!(power.event.take(), ending.is_some());
        }
    }
}
