//! The registers by which a guest ends its machine: sleep and reset as ACPI describes them, and the
//! reset line of the keyboard controller.

use crate::{Device, Event, State, StateError};
use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

/// Offset of the sleep control register (`SLEEP_CONTROL_REG`).
pub const SLEEP_CONTROL: u64 = 0;
/// Offset of the reset register (`RESET_REG`).
pub const RESET: u64 = 2;
/// Offset of the keyboard controller's command port, which the monitor maps at [`KEYBOARD_PORT`].
pub const KEYBOARD: u64 = 3;
/// The keyboard controller's command port.
pub const KEYBOARD_PORT: u16 = 0x64;
/// Value that resets the machine when written to [`RESET`] (`RESET_VALUE`).
pub const RESET_VALUE: u8 = 1;
/// Sleep type of "off" in `\_S5`.
pub const SLEEP_TYPE_OFF: u8 = 5;

/// Bit of the sleep control register that starts the sleep.
const SLEEP_ENABLE: u8 = 1 << 5;
/// Command of the keyboard controller that pulses the reset line.
const PULSE_RESET: u8 = 0xfe;

const KIND: &str = "power";
const VERSION: u16 = 1;

/// How the guest has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GuestExit {
    Off,
    /// The guest wants to restart. Machines do not: the monitor ends.
    Reset,
}

/// The registers. [`Device::events`] is readable once the guest has used one, and
/// [`Power::guest_exit`] tells which.
#[derive(Debug)]
pub struct Power {
    event: Event,
    exit: Option<GuestExit>,
}

impl Power {
    pub fn new() -> io::Result<Self> {
        Ok(Self { event: Event::new()?, exit: None })
    }

    /// How the guest has ended, if it has. This never changes again.
    pub fn guest_exit(&self) -> Option<GuestExit> {
        self.exit
    }
}

impl Device for Power {
    fn read(&mut self, _offset: u64, data: &mut [u8]) {
        // Zero is also a status of the keyboard controller: no byte is waiting, and it is ready for
        // a command.
        data.fill(0);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        let [value] = *data else { return };
        let exit = match offset {
            SLEEP_CONTROL if value == SLEEP_TYPE_OFF << 2 | SLEEP_ENABLE => GuestExit::Off,
            RESET if value == RESET_VALUE => GuestExit::Reset,
            KEYBOARD if value == PULSE_RESET => GuestExit::Reset,
            _ => return,
        };
        self.exit.get_or_insert(exit);
        // The counter is nowhere near full.
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
    use super::{GuestExit, KEYBOARD, Power, RESET, SLEEP_CONTROL};
    use crate::Device;

    #[test]
    fn only_the_right_write_ends_a_machine() {
        for (offset, value, ending) in [
            (SLEEP_CONTROL, 0x34, Some(GuestExit::Off)),
            (SLEEP_CONTROL, 0x14, None),
            (SLEEP_CONTROL, 0x20, None),
            (RESET, 1, Some(GuestExit::Reset)),
            (RESET, 0, None),
            (KEYBOARD, 0xfe, Some(GuestExit::Reset)),
            (KEYBOARD, 0xd1, None),
            (9, 0xfe, None),
        ] {
            let mut power = Power::new().unwrap();
            power.write(offset, &[value, 0]);
            assert_eq!(power.guest_exit(), None, "a write of two bytes is none");
            power.write(offset, &[value]);
            assert_eq!(power.guest_exit(), ending, "{value:#x} to {offset}");
            assert_eq!(power.event.take(), ending.is_some());
        }
    }
}
