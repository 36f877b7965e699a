//! What a monitor process is, and how one becomes another.
//!
//! ```text
//!            Boot                      Freeze: fork(2)
//!   blank ──────────> machine ─────────────────────────> zygote
//!     │                  ▲                                 ▲  │
//!     │                  └──────── Thaw: fork(2) ──────────│──┘
//!     └───────────────────────── Load ─────────────────────┘
//! ```

use crate::{
    Error,
    exit::{EXIT_PANIC, EXIT_START, EXIT_THAW, exit_with, is_broken, redirect_stderr},
    jail,
    machine::Machine,
    zygote::{ThawedCopy, Zygote},
};
use keiki_control::{self as control, Reply, Request, Server, Stage, Start, Step};
use keiki_hv::fork;
use std::{io::Write, os::fd::AsFd};

enum ProcessState {
    /// Started, and holds no machine yet.
    Blank(Server),
    /// Holds a machine that runs or is paused.
    Machine(Box<Machine>),
    /// Holds a frozen machine.
    Zygote(Box<Zygote>),
}

/// Runs a monitor until it ends.
pub fn run(start: &Start) -> ! {
    // Unwinding would run through frames that belong to another process after a fork.
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
    let mut state = ProcessState::Blank(server);
    loop {
        state = match state {
            ProcessState::Blank(server) => blank(server),
            ProcessState::Machine(machine) => ProcessState::Zygote(machine.serve()),
            ProcessState::Zygote(zygote) => ProcessState::Machine(Box::new(become_machine(zygote.serve()))),
        };
    }
}

fn begin(start: &Start) -> crate::Result<Server> {
    let control =
        keiki_sys::process::inherited(start.control).map_err(Error::host("the control descriptor"))?;
    fork::close_all_but(&[control.as_fd()]).map_err(Error::host("closing inherited descriptors"))?;
    fork::ignore_children().map_err(Error::host("having the kernel reap children"))?;
    keiki_hv::install_kick()?;
    if let Some(user) = start.user {
        jail::enter(user, start).map_err(Error::host("entering the jail"))?;
    }
    Ok(Server::new(control)?)
}

fn blank(mut server: Server) -> ProcessState {
    loop {
        let (request, mut descriptors) = match server.receive() {
            Ok(Some(received)) => received,
            Ok(None) => exit_with(0),
            Err(error) if is_broken(&error) => exit_with(0),
            // `receive` has answered already.
            Err(_) => continue,
        };
        let reply = match request {
            Request::Hello => hello(),
            Request::Boot(boot) => match Machine::boot(&boot, &mut descriptors) {
                Ok(machine) => {
                    // From now on any node process can find it by its listener.
                    if server.answer(&Reply::Done).is_err() {
                        exit_with(0);
                    }
                    return ProcessState::Machine(Box::new(machine));
                }
                Err(error) => error.reply(),
            },
            Request::Load(load) => match Zygote::load(&load, &mut descriptors, server) {
                Ok(mut zygote) => {
                    zygote.loaded();
                    return ProcessState::Zygote(Box::new(zygote));
                }
                Err((error, back)) => {
                    server = back;
                    error.reply()
                }
            },
            other => Error::Invalid(format!("a blank monitor does not accept {}", other.name())).reply(),
        };
        if server.answer(&reply).is_err() {
            exit_with(0);
        }
    }
}

fn hello() -> Reply {
    Reply::Hello(control::Hello { stage: Stage::Blank, paused: false, generation: 0, layers: 0 })
}

/// Makes a machine in the copy of a zygote. The copy answers for itself: the kernel tells the node
/// its process id.
fn become_machine(copy: ThawedCopy) -> Machine {
    let ThawedCopy { kvm, ram, frozen, fds, generation, ancestry, mut server, mut watch } = copy;
    if redirect_stderr(fds.stderr.as_ref()).is_err() {
        exit_with(EXIT_THAW);
    }
    match Machine::thaw(kvm, &ram, &frozen, fds, generation, ancestry, &mut watch) {
        Ok(machine) => {
            let steps = Step::list(watch.steps());
            let reply = control::Thawed { pid: std::process::id(), generation, steps };
            if server.answer(&Reply::Thawed(reply)).is_err() {
                exit_with(EXIT_THAW);
            }
            machine
        }
        Err(error) => {
            let _ = server.answer(&error.reply());
            exit_with(EXIT_THAW)
        }
    }
}
