//! A zygote: a frozen machine in memory. It never runs a vCPU; it forks machines, or writes itself down.

use crate::{
    Error, Result,
    board::Resources,
    frozen::Frozen,
    machine::{Clock, Machine},
    process::{EXIT_THAW, Life, exit_with, failed},
};
use keiki_control::{self as control, Descriptors, Load, Reply, Request, Role, Server, Stage, Thaw};
use keiki_hv::{
    GuestRam, Kvm,
    fork::{Side, fork},
};
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    os::unix::fs::FileExt,
    sync::Arc,
};

/// A frozen machine.
pub struct Zygote {
    kvm: Arc<Kvm>,
    ram: GuestRam,
    frozen: Frozen,
    server: Server,
    generation: u32,
}

impl Zygote {
    /// What a freeze left in the copy of the process.
    ///
    /// # Errors
    /// If the control connection is none.
    pub fn new(
        kvm: Arc<Kvm>,
        ram: GuestRam,
        frozen: Frozen,
        control: OwnedFd,
        generation: u32,
    ) -> Result<Self> {
        Ok(Self { kvm, ram, frozen, server: Server::new(control)?, generation })
    }

    /// A stored machine. Everything that can be checked without starting it is checked here.
    ///
    /// # Errors
    /// A sentence that says what is not as it should be.
    pub fn load(load: &Load, descriptors: &mut Descriptors, server: Server) -> Result<Self, (Error, Server)> {
        match Self::read(load, descriptors) {
            Ok((kvm, ram, frozen)) => Ok(Self { kvm, ram, frozen, server, generation: 0 }),
            Err(error) => Err((error, server)),
        }
    }

    fn read(load: &Load, descriptors: &mut Descriptors) -> Result<(Arc<Kvm>, GuestRam, Frozen)> {
        let kvm = Kvm::new(descriptors.take(Role::Kvm)?)?;
        let frozen = Frozen::read(&mut File::from(descriptors.take(Role::State)?), &load.digest)?;
        let (is, wanted) = (frozen.config.shape, load.shape);
        if is != wanted {
            return Err(Error::Refused(format!(
                "the state file is of a machine with {} vCPUs and {} MiB, not {} and {}",
                is.vcpus, is.memory_mib, wanted.vcpus, wanted.memory_mib
            )));
        }
        frozen.cpu.check(&kvm)?;
        let memory = File::from(descriptors.take(Role::Memory)?);
        let size = memory.metadata().map_err(Error::host("looking at the memory file"))?.len();
        if size != u64::from(is.memory_mib) << 20 {
            let text = format!("the memory file has {size} bytes, the machine has {} MiB", is.memory_mib);
            return Err(Error::Refused(text));
        }
        Ok((Arc::new(kvm), GuestRam::over(&memory)?, frozen))
    }

    /// Says that it is there.
    pub fn loaded(&mut self) {
        if self.server.answer(&Reply::Done).is_err() {
            exit_with(0);
        }
    }

    /// Serves until it is a machine, in the copy that a thaw makes. The zygote itself ends with its connection.
    pub fn serve(mut self) -> Life {
        loop {
            let (request, mut descriptors) = match self.server.receive() {
                Ok(Some(received)) => received,
                Ok(None) => exit_with(0),
                Err(error) if failed(&error) => exit_with(0),
                // Answered already.
                Err(_) => continue,
            };
            let reply = match request {
                Request::Hello => Ok(self.hello()),
                Request::Persist => self.persist(&mut descriptors),
                Request::Stats => Ok(Reply::Stats(control::Stats { exits: 0, console_dropped: 0 })),
                Request::Stop => exit_with(0),
                Request::Thaw(thaw) => {
                    let mut clock = Clock::start();
                    let disks = &self.frozen.config.devices.disks;
                    let forked = Resources::take(&mut descriptors, disks).and_then(|resources| {
                        let side = self.fork(&resources)?;
                        Ok((side, resources))
                    });
                    match forked {
                        Ok((Side::Child, resources)) => return self.become_machine(&thaw, resources, clock),
                        // The copy answers, when it runs.
                        Ok((Side::Parent { .. }, _)) => {
                            clock.step("fork");
                            continue;
                        }
                        Err(error) => Err(error),
                    }
                }
                other => Err(Error::Invalid(format!("{} is not for a zygote", other.name()))),
            };
            let reply = reply.unwrap_or_else(|error| error.reply());
            if self.server.answer(&reply).is_err() {
                exit_with(0);
            }
        }
    }

    fn hello(&self) -> Reply {
        Reply::Hello(control::Hello {
            stage: Stage::Zygote,
            paused: true,
            generation: self.generation,
            layers: 0,
        })
    }

    fn fork(&self, resources: &Resources) -> Result<Side> {
        let mut keep = resources.descriptors();
        keep.extend([self.kvm.as_fd(), self.server.as_fd()]);
        fork(&keep).map_err(Error::host("forking"))
    }

    /// In the copy. It answers itself: the kernel tells the node who it is.
    fn become_machine(self, thaw: &Thaw, resources: Resources, mut clock: Clock) -> Life {
        clock.step("fork");
        let Self { kvm, ram, frozen, mut server, generation } = self;
        let machine =
            Machine::thaw(kvm, &ram, &frozen, resources, thaw.generation, generation + 1, &mut clock);
        match machine {
            Ok(machine) => {
                let reply = control::Thawed {
                    pid: std::process::id(),
                    generation: thaw.generation,
                    steps: clock.steps(),
                };
                if server.answer(&Reply::Thawed(reply)).is_err() {
                    exit_with(EXIT_THAW);
                }
                Life::Machine(Box::new(machine))
            }
            Err(error) => {
                let _ = server.answer(&error.reply());
                exit_with(EXIT_THAW)
            }
        }
    }

    fn persist(&self, descriptors: &mut Descriptors) -> Result<Reply> {
        let memory = File::from(descriptors.take(Role::Memory)?);
        let state = File::from(descriptors.take(Role::State)?);
        let pagemap = File::from(descriptors.take(Role::Pagemap)?);
        let written = self.ram.write_private(&pagemap, &memory)?;
        let bytes = self.frozen.to_bytes()?;
        state.set_len(0).map_err(Error::host("writing the state file"))?;
        state.write_all_at(&bytes, 0).map_err(Error::host("writing the state file"))?;
        Ok(Reply::Persisted(control::Persisted {
            pages: written.pages,
            zeroed: written.zeroed + written.discarded / keiki_sys::pages::PAGE,
            state_bytes: bytes.len() as u64,
            digest: *blake3::hash(&bytes).as_bytes(),
        }))
    }
}
