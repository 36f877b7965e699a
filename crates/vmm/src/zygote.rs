//! A zygote: a frozen machine in memory. It never runs a vCPU. It forks machines, and copies that
//! write it to files.

use crate::{
    Error, Result,
    exit::{exit_with, is_broken},
    fds::VmFds,
    frozen::Frozen,
    working_set::WorkingSet,
};
use keiki_control::{self as control, Descriptors, Load, Reply, Request, Role, Server, Stage, Thaw};
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

/// Nice value of a copy that writes files.
const BACKGROUND: i32 = 10;

/// What copies inherit in addition to memory and state.
#[derive(Debug, Clone, Default)]
pub struct ForkAncestry {
    /// Number of forks since the process that booted or loaded the machine.
    pub forks: u32,
    pub working_set: Option<Arc<WorkingSet>>,
}

impl ForkAncestry {
    #[must_use]
    pub fn of_copy(&self) -> Self {
        Self { forks: self.forks + 1, working_set: self.working_set.clone() }
    }
}

pub struct Zygote {
    kvm: Arc<Kvm>,
    ram: GuestRam,
    frozen: Frozen,
    server: Server,
    ancestry: ForkAncestry,
}

/// A copy that is about to become a machine.
pub struct ThawedCopy {
    pub kvm: Arc<Kvm>,
    pub ram: GuestRam,
    pub frozen: Frozen,
    pub fds: VmFds,
    pub generation: [u8; 16],
    pub ancestry: ForkAncestry,
    /// Where the copy answers.
    pub server: Server,
    pub watch: Stopwatch,
}

impl Zygote {
    /// The zygote in the copy that a freeze forked.
    pub fn new(
        kvm: Arc<Kvm>,
        ram: GuestRam,
        frozen: Frozen,
        control: OwnedFd,
        ancestry: ForkAncestry,
    ) -> Result<Self> {
        Ok(Self { kvm, ram, frozen, server: Server::new(control)?, ancestry })
    }

    /// Loads a stored machine, and checks everything that can be checked before it runs.
    pub fn load(load: &Load, descriptors: &mut Descriptors, server: Server) -> Result<Self, (Error, Server)> {
        match Self::read(load, descriptors) {
            Ok((kvm, ram, frozen)) => {
                Ok(Self { kvm, ram, frozen, server, ancestry: ForkAncestry::default() })
            }
            Err(error) => Err((error, server)),
        }
    }

    fn read(load: &Load, descriptors: &mut Descriptors) -> Result<(Arc<Kvm>, GuestRam, Frozen)> {
        let kvm = Kvm::new(descriptors.take(Role::Kvm)?)?;
        let frozen = Frozen::read(&mut File::from(descriptors.take(Role::State)?), &load.digest)?;
        let (is, wanted) = (frozen.config.shape, load.shape);
        if is != wanted {
            return Err(Error::Refused(format!(
                "the state file is from a machine with {} vCPUs and {} MiB, not {} and {}",
                is.vcpus, is.memory_mib, wanted.vcpus, wanted.memory_mib
            )));
        }
        frozen.cpu.check(&kvm.supported_cpuid()?)?;
        let memory = File::from(descriptors.take(Role::Memory)?);
        let size = memory.metadata().map_err(Error::host("inspecting the memory file"))?.len();
        if size != u64::from(is.memory_mib) << 20 {
            let text = format!("the memory file has {size} bytes, the machine has {} MiB", is.memory_mib);
            return Err(Error::Refused(text));
        }
        Ok((Arc::new(kvm), GuestRam::over(&memory)?, frozen))
    }

    /// Answers the request that loaded it.
    pub fn loaded(&mut self) {
        if self.server.answer(&Reply::Done).is_err() {
            exit_with(0);
        }
    }

    /// Serves requests. Returns in the copy that a thaw forks; the zygote itself ends with its
    /// connection.
    pub fn serve(mut self) -> ThawedCopy {
        loop {
            let (request, mut descriptors) = match self.server.receive() {
                Ok(Some(received)) => received,
                Ok(None) => exit_with(0),
                Err(error) if is_broken(&error) => exit_with(0),
                // `receive` has answered already.
                Err(_) => continue,
            };
            let reply = match request {
                Request::Hello => Ok(Some(self.hello())),
                Request::Persist => self.persist(&mut descriptors),
                Request::Thaw(thaw) => {
                    let watch = Stopwatch::start();
                    match self.thaw(&mut descriptors) {
                        Ok(ThawOutcome::Copy(fds, own)) => {
                            return self.into_copy(&thaw, *fds, own, watch);
                        }
                        Ok(ThawOutcome::Zygote(reply)) => Ok(reply),
                        Err(error) => Err(error),
                    }
                }
                other => Err(Error::Invalid(format!("a zygote does not accept {}", other.name()))),
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
            generation: self.ancestry.forks,
            layers: 0,
        })
    }

    fn thaw(&self, descriptors: &mut Descriptors) -> Result<ThawOutcome> {
        let own = own_connection(descriptors)?;
        let fds = VmFds::take(descriptors, &self.frozen.config.devices.disks)?;
        let mut keep = fds.all();
        keep.extend([self.kvm.as_fd(), own.as_ref().unwrap_or(&self.server).as_fd()]);
        Ok(match fork(&keep).map_err(Error::host("forking"))? {
            Side::Child => ThawOutcome::Copy(Box::new(fds), own),
            Side::Parent { .. } => ThawOutcome::Zygote(own.map(|_| Reply::Done)),
        })
    }

    fn into_copy(self, thaw: &Thaw, fds: VmFds, own: Option<Server>, mut watch: Stopwatch) -> ThawedCopy {
        watch.lap("fork");
        let Self { kvm, ram, frozen, server, ancestry } = self;
        let server = match own {
            Some(own) => {
                // The fork has closed this descriptor, which is the zygote's.
                std::mem::forget(server);
                own
            }
            None => server,
        };
        let (generation, ancestry) = (thaw.generation, ancestry.of_copy());
        ThawedCopy { kvm, ram, frozen, fds, generation, ancestry, server, watch }
    }

    /// Forks a copy that writes memory and state, so that machines can be thawed meanwhile.
    fn persist(&mut self, descriptors: &mut Descriptors) -> Result<Option<Reply>> {
        let memory = File::from(descriptors.take(Role::Memory)?);
        let state = File::from(descriptors.take(Role::State)?);
        // The page map belongs to this process: the copy could not use it.
        let private = self.ram.private(&File::from(descriptors.take(Role::Pagemap)?))?;
        let mut own = own_connection(descriptors)?;
        let keep = [memory.as_fd(), state.as_fd(), own.as_ref().unwrap_or(&self.server).as_fd()];
        match fork(&keep).map_err(Error::host("forking"))? {
            Side::Parent { .. } => Ok(own.map(|_| Reply::Done)),
            Side::Child => {
                // Machines and freezes come first where processors are busy. An error costs speed
                // only.
                let _ = rustix::process::setpriority_process(None, BACKGROUND);
                if let Some(own) = &mut own {
                    // Tells the node which process writes, so that the node can lower its priority
                    // too.
                    let _ = own.answer(&Reply::Done);
                }
                let written = self.write(&private, &memory, &state);
                let server = own.as_mut().unwrap_or(&mut self.server);
                // The node may have stopped waiting.
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

/// Which process this is after a thaw has forked.
enum ThawOutcome {
    /// The zygote, and its answer unless the copy answers instead.
    Zygote(Option<Reply>),
    /// The copy, its descriptors, and where it answers if not on the zygote's connection.
    Copy(Box<VmFds>, Option<Server>),
}

/// The connection on which a copy answers.
fn own_connection(descriptors: &mut Descriptors) -> Result<Option<Server>> {
    Ok(descriptors.take_if_any(Role::Control).map(Server::new).transpose()?)
}
