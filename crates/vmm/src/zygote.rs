//! A zygote: a frozen machine in memory. It never runs a vCPU; it forks machines, or writes itself down.

use crate::{
    Error, Result,
    board::Resources,
    frozen::Frozen,
    machine::{Heritage, Machine},
    process::{EXIT_THAW, Life, complain_on, exit_with, failed},
};
use keiki_control::{self as control, Descriptors, Load, Reply, Request, Role, Server, Stage, Step, Thaw};
use keiki_hv::{
    GuestRam, Kvm,
    fork::{Side, fork},
};
use keiki_sys::stopwatch::Stopwatch;
use std::{
    fs::File,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
    os::unix::fs::FileExt,
    sync::Arc,
};

/// Priority of what is written down in the background, in steps that `nice` counts.
const BACKGROUND: i32 = 10;

/// A frozen machine.
pub struct Zygote {
    kvm: Arc<Kvm>,
    ram: GuestRam,
    frozen: Frozen,
    server: Server,
    heritage: Heritage,
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
        heritage: Heritage,
    ) -> Result<Self> {
        Ok(Self { kvm, ram, frozen, server: Server::new(control)?, heritage })
    }

    /// A stored machine. Everything that can be checked without starting it is checked here.
    ///
    /// # Errors
    /// A sentence that says what is not as it should be.
    pub fn load(load: &Load, descriptors: &mut Descriptors, server: Server) -> Result<Self, (Error, Server)> {
        match Self::read(load, descriptors) {
            Ok((kvm, ram, frozen)) => Ok(Self { kvm, ram, frozen, server, heritage: Heritage::default() }),
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
                Request::Hello => Ok(Some(self.hello())),
                Request::Persist => self.persist(&mut descriptors),
                Request::Thaw(thaw) => {
                    let mut watch = Stopwatch::start();
                    match self.thaw(&mut descriptors) {
                        Ok(Thawing::Copy(resources, own)) => {
                            return self.become_machine(&thaw, *resources, own, watch);
                        }
                        Ok(Thawing::Zygote(reply)) => {
                            watch.lap("fork");
                            Ok(reply)
                        }
                        Err(error) => Err(error),
                    }
                }
                other => Err(Error::Invalid(format!("{} is not for a zygote", other.name()))),
            };
            // None: a copy answers.
            let Some(reply) = reply.unwrap_or_else(|error| Some(error.reply())) else { continue };
            if self.server.answer(&reply).is_err() {
                exit_with(0);
            }
        }
    }

    fn hello(&self) -> Reply {
        Reply::Hello(control::Hello {
            stage: Stage::Zygote,
            paused: true,
            generation: self.heritage.forks,
            layers: 0,
        })
    }

    fn thaw(&self, descriptors: &mut Descriptors) -> Result<Thawing> {
        let own = own_connection(descriptors)?;
        let resources = Resources::take(descriptors, &self.frozen.config.devices.disks)?;
        let mut keep = resources.descriptors();
        keep.extend([self.kvm.as_fd(), own.as_ref().unwrap_or(&self.server).as_fd()]);
        Ok(match fork(&keep).map_err(Error::host("forking"))? {
            Side::Child => Thawing::Copy(Box::new(resources), own),
            Side::Parent { .. } => Thawing::Zygote(own.map(|_| Reply::Done)),
        })
    }

    /// In the copy. It answers itself: the kernel tells the node who it is.
    fn become_machine(
        self,
        thaw: &Thaw,
        resources: Resources,
        own: Option<Server>,
        mut watch: Stopwatch,
    ) -> Life {
        watch.lap("fork");
        let Self { kvm, ram, frozen, server, heritage } = self;
        let mut server = match own {
            Some(own) => {
                // Its descriptor is the zygote's, closed here already.
                std::mem::forget(server);
                own
            }
            None => server,
        };
        if complain_on(resources.stderr.as_ref()).is_err() {
            exit_with(EXIT_THAW);
        }
        let heritage = heritage.of_copy();
        let machine = Machine::thaw(kvm, &ram, &frozen, resources, thaw.generation, heritage, &mut watch);
        match machine {
            Ok(machine) => {
                let reply = control::Thawed {
                    pid: std::process::id(),
                    generation: thaw.generation,
                    steps: Step::list(watch.steps()),
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

    /// A copy writes, so that machines can be thawed meanwhile. What it writes is what it was forked with.
    fn persist(&mut self, descriptors: &mut Descriptors) -> Result<Option<Reply>> {
        let memory = File::from(descriptors.take(Role::Memory)?);
        let state = File::from(descriptors.take(Role::State)?);
        // The page map is this process's: the copy could not use it.
        let private = self.ram.private(&File::from(descriptors.take(Role::Pagemap)?))?;
        let mut own = own_connection(descriptors)?;
        let keep = [memory.as_fd(), state.as_fd(), own.as_ref().unwrap_or(&self.server).as_fd()];
        match fork(&keep).map_err(Error::host("forking"))? {
            Side::Parent { .. } => Ok(own.map(|_| Reply::Done)),
            Side::Child => {
                // Where processors are short, machines come first, and freezes of them. At the same priority it is right too.
                let _ = rustix::process::setpriority_process(None, BACKGROUND);
                if let Some(own) = &mut own {
                    // The node learns which process it is, and can see to its priority as well.
                    let _ = own.answer(&Reply::Done);
                }
                let written = self.write(&private, &memory, &state);
                let server = own.as_mut().unwrap_or(&mut self.server);
                // Nobody may wait for it any more.
                let _ = server.answer(&written.unwrap_or_else(|error| error.reply()));
                exit_with(0)
            }
        }
    }

    fn write(&self, private: &[Range<u64>], memory: &File, state: &File) -> Result<Reply> {
        let written = self.ram.write_private(private, memory)?;
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

/// Who one is after a thaw has forked.
enum Thawing {
    /// The zygote, and what it answers if its copy does not.
    Zygote(Option<Reply>),
    /// The copy, what it is given, and where it answers if not on the zygote's connection.
    Copy(Box<Resources>, Option<Server>),
}

/// The connection on which a copy answers.
fn own_connection(descriptors: &mut Descriptors) -> Result<Option<Server>> {
    Ok(descriptors.take_if_any(Role::Control).map(Server::new).transpose()?)
}
