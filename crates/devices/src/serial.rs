//! The serial port (16550A, from `vm-superio`). What the guest prints goes to a [`ConsoleLog`]. It
//! has no input.

use crate::{Device, Interrupt, State, StateError, console_log::ConsoleLog};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Write},
    sync::Arc,
    time::Instant,
};
use vm_superio::{
    Serial as Uart, SerialState, Trigger,
    serial::{Error, NoEvents},
};

const KIND: &str = "serial";
const VERSION: u16 = 1;

struct Line(Arc<dyn Interrupt>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.raise()
    }
}

/// The log of a UART. A restore makes a new UART and moves the log into it.
struct Output(Option<ConsoleLog>);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(log) = &mut self.0 {
            log.write_all(bytes)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub struct Serial {
    uart: Uart<Line, NoEvents, Output>,
    interrupt: Arc<dyn Interrupt>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Registers {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    /// Bytes that the guest sent itself in loop mode and has not read yet.
    input: Vec<u8>,
}

impl Serial {
    pub fn new(log: ConsoleLog, interrupt: Arc<dyn Interrupt>) -> Self {
        let uart = Uart::new(Line(Arc::clone(&interrupt)), Output(Some(log)));
        Self { uart, interrupt }
    }
}

impl Device for Serial {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            *byte = self.uart.read(offset);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let (Ok(offset), [byte]) = (u8::try_from(offset), data) {
            match self.uart.write(offset, *byte) {
                // In loop mode the guest has filled a buffer that only the guest empties.
                Ok(()) | Err(Error::FullFifo) => {}
                // The driver of the guest polls too.
                Err(Error::Trigger(_) | Error::IOError(_)) => {}
            }
        }
    }

    fn pause(&mut self, _deadline: Instant) -> io::Result<()> {
        Ok(())
    }

    fn save(&self) -> Result<State, StateError> {
        let state = self.uart.state();
        let registers = Registers {
            baud_divisor_low: state.baud_divisor_low,
            baud_divisor_high: state.baud_divisor_high,
            interrupt_enable: state.interrupt_enable,
            interrupt_identification: state.interrupt_identification,
            line_control: state.line_control,
            line_status: state.line_status,
            modem_control: state.modem_control,
            modem_status: state.modem_status,
            scratch: state.scratch,
            input: state.in_buffer,
        };
        State::pack(KIND, VERSION, &registers)
    }

    fn restore(&mut self, state: &State) -> Result<(), StateError> {
        let from: Registers = state.unpack(KIND, VERSION)?;
        let state = SerialState {
            baud_divisor_low: from.baud_divisor_low,
            baud_divisor_high: from.baud_divisor_high,
            interrupt_enable: from.interrupt_enable,
            interrupt_identification: from.interrupt_identification,
            line_control: from.line_control,
            line_status: from.line_status,
            modem_control: from.modem_control,
            modem_status: from.modem_status,
            scratch: from.scratch,
            in_buffer: from.input,
        };
        let log = self.uart.writer_mut().0.take();
        self.uart =
            Uart::from_state(&state, Line(Arc::clone(&self.interrupt)), NoEvents, Output(log)).map_err(
                |_| StateError::Field { kind: KIND, field: "input", why: "is longer than its buffer" },
            )?;
        Ok(())
    }

    fn resume(&mut self) -> io::Result<()> {
        // The restore has raised a pending interrupt, and none is lost between pause and resume.
        Ok(())
    }
}
