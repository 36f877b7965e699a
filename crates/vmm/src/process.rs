//! What a monitor process is at a time, and how it begins and ends.
//!
//! ```text
//!            Boot                      Freeze: fork(2)
//!   blank ──────────> machine ─────────────────────────> zygote
//!     │                  ▲                                 ▲  │
//!     │                  └──────── Thaw: fork(2) ──────────│──┘
//!     └───────────────────────── Load ─────────────────────┘
//! ```

use crate::{Error, jail, machine::Machine, zygote::Zygote};
use keiki_control::{self as control, ControlError, Reply, Request, Server, Stage, Start};
use keiki_hv::fork;
use std::{io::Write, os::fd::OwnedFd};

/// The machine has ended, and its last words say why.
pub const EXIT_END: i32 = 0;
/// It could not begin.
pub const EXIT_START: i32 = 64;
/// A copy could not become a machine; it has said why.
pub const EXIT_THAW: i32 = 65;
/// A mistake of ours.
pub const EXIT_PANIC: i32 = 70;

/// What a process is.
pub enum Life {
    /// Nothing in it.
    Blank(Server),
    /// Runs or is paused.
    Machine(Box<Machine>),
    /// Holds a frozen machine.
    Zygote(Box<Zygote>),
}

/// Lives, from what the node started it with.
pub fn live(start: &Start) -> ! {
    // Unwinding would go through frames that are another process's after a fork.
    std::panic::set_hook(Box::new(|what| {
        let _ = writeln!(std::io::stderr(), "keiki-vmm: {what}");
        exit_with(EXIT_PANIC)
    }));
    let server = match begin(start) {
        Ok(server) => server,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "keiki-vmm: {}", keiki_sys::error_chain(&error));
            exit_with(EXIT_START)
        }
    };
    let mut life = Life::Blank(server);
    loop {
        life = match life {
            Life::Blank(server) => blank(server),
            Life::Machine(machine) => machine.serve(),
            Life::Zygote(zygote) => zygote.serve(),
        };
    }
}

/// Ends the process at once.
pub fn exit_with(status: i32) -> ! {
    fork::exit(status)
}

/// In a copy: says on `pipe` from now on what goes wrong.
///
/// # Errors
/// That of the call.
pub fn complain_on(pipe: Option<&OwnedFd>) -> crate::Result<()> {
    let Some(pipe) = pipe else { return Ok(()) };
    rustix::stdio::dup2_stderr(pipe).map_err(|error| Error::Host("redirecting standard error", error.into()))
}

/// Can the connection not be used any more?
pub fn failed(error: &ControlError) -> bool {
    matches!(error, ControlError::Io(_) | ControlError::Closed | ControlError::TimedOut)
}

fn begin(start: &Start) -> crate::Result<Server> {
    let control =
        keiki_sys::process::inherited(start.control).map_err(Error::host("the control descriptor"))?;
    fork::close_all_but(&[std::os::fd::AsFd::as_fd(&control)])
        .map_err(Error::host("closing inherited descriptors"))?;
    fork::ignore_children().map_err(Error::host("leaving children to the kernel"))?;
    keiki_hv::install_kick()?;
    if let Some(user) = start.user {
        jail::enter(user, start).map_err(Error::host("entering the jail"))?;
    }
    Ok(Server::new(control)?)
}

fn blank(mut server: Server) -> Life {
    loop {
        let (request, mut descriptors) = match server.receive() {
            Ok(Some(received)) => received,
            Ok(None) => exit_with(0),
            Err(error) if failed(&error) => exit_with(0),
            // Answered already.
            Err(_) => continue,
        };
        let reply = match request {
            Request::Hello => hello(),
            Request::Boot(boot) => match Machine::boot(&boot, &mut descriptors) {
                Ok(machine) => {
                    // From now on it is found by its listener, whoever started it.
                    if server.answer(&Reply::Done).is_err() {
                        exit_with(0);
                    }
                    return Life::Machine(Box::new(machine));
                }
                Err(error) => error.reply(),
            },
            Request::Load(load) => match Zygote::load(&load, &mut descriptors, server) {
                Ok(mut zygote) => {
                    zygote.loaded();
                    return Life::Zygote(Box::new(zygote));
                }
                Err((error, back)) => {
                    server = back;
                    error.reply()
                }
            },
            other => Error::Invalid(format!("{} is not for a blank monitor", other.name())).reply(),
        };
        if server.answer(&reply).is_err() {
            exit_with(0);
        }
    }
}

fn hello() -> Reply {
    Reply::Hello(control::Hello { stage: Stage::Blank, paused: false, generation: 0, layers: 0 })
}
