//! A machine: it runs, it is parked, a zygote is forked off it.
//!
//! Two kinds of threads. Each vCPU has one: it runs the guest and serves accesses to registers. The main thread does
//! everything else, one thing at a time: backends of devices, notifications of queues, the control socket. It
//! sleeps in one `poll`.

use crate::{
    Error, Result,
    board::{Board, Resources, layers, windows},
    boot,
    frozen::{Config, Frozen},
    pages::First,
    process::{EXIT_END, EXIT_THAW, Life, complain_on, exit_with, failed},
    zygote::Zygote,
};
use keiki_control::{self as control, Boot, Descriptors, Reply, Request, Role, Server, Stage, Step};
use keiki_devices::{Event, disk::Top, power::Ending};
use keiki_hv::{
    Cpus, End, GuestRam, HugePages, Kvm, Vm,
    cpuid::{Baseline, CpuModel},
    fork::{Side, fork},
};
use keiki_sys::stopwatch::Stopwatch;
use rustix::event::{PollFd, PollFlags, poll};
use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

/// How long vCPUs may take to stop. Mostly it is a tenth of a millisecond; on a host that is far too busy a freeze that takes long is
/// better than none.
const PARK: Duration = Duration::from_secs(2);
/// How long devices may take to finish what is in flight.
const DRAIN: Duration = Duration::from_millis(200);

/// A running or paused machine.
pub struct Machine {
    kvm: Arc<Kvm>,
    vm: Vm,
    cpus: Cpus,
    board: Board,
    config: Config,
    cpu: CpuModel,
    /// Signalled when a vCPU cannot go on.
    end: Arc<Event>,
    listener: OwnedFd,
    server: Option<Server>,
    paused: bool,
    heritage: Heritage,
    /// For last words.
    log: File,
}

/// What copies inherit beside memory and state.
#[derive(Debug, Clone, Default)]
pub struct Heritage {
    /// How many forks away from files, or from a boot.
    pub forks: u32,
    /// What is touched first.
    pub first: Option<Arc<First>>,
}

impl Heritage {
    /// That of a copy.
    #[must_use]
    pub fn of_copy(&self) -> Self {
        Self { forks: self.forks + 1, first: self.first.clone() }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Machine {
    /// Boots a kernel.
    ///
    /// # Errors
    /// If something of it is not possible here, or not what it should be.
    pub fn boot(boot: &Boot, descriptors: &mut Descriptors) -> Result<Self> {
        let cpu_count = vcpu_count(boot.shape.vcpus)?;
        let kvm = Arc::new(Kvm::new(descriptors.take(Role::Kvm)?)?);
        let mut kernel = File::from(descriptors.take(Role::Kernel)?);
        let mut initrd = File::from(descriptors.take(Role::Initrd)?);
        let devices = windows(&boot.devices)?;
        let resources = Resources::take(descriptors, &boot.devices.disks)?;
        let ram = GuestRam::anonymous(u64::from(boot.shape.memory_mib) << 20, HugePages::Advise)?;
        let config = Config { shape: boot.shape, devices: boot.devices.clone() };
        let cpu = CpuModel::new(&kvm, Baseline::Baseline, cpu_count)?;
        let mut machine =
            Self::assemble(kvm, &ram, config, cpu, resources, Heritage::default(), |_, board, vcpus| {
                let spec = boot::Spec {
                    kernel: &mut kernel,
                    initramfs: Some(&mut initrd),
                    command_line: &boot.cmdline,
                    vcpus: cpu_count,
                    devices,
                };
                let entry = boot::load(&ram, spec)?;
                board.renew(boot.generation)?;
                vcpus.iter().try_for_each(|vcpu| entry.apply(vcpu))?;
                Ok(())
            })?;
        machine.run()?;
        Ok(machine)
    }

    /// Continues a frozen machine on memory that is this process's own by now.
    ///
    /// # Errors
    /// If the state or the descriptors are not what they should be, and those of the host.
    pub fn thaw(
        kvm: Arc<Kvm>,
        ram: &GuestRam,
        frozen: &Frozen,
        resources: Resources,
        generation: [u8; 16],
        mut heritage: Heritage,
        watch: &mut Stopwatch,
    ) -> Result<Self> {
        let (config, cpu) = (frozen.config.clone(), frozen.cpu.clone());
        if let Some(list) = &resources.pages {
            heritage.first = Some(Arc::new(First::read(list)));
        }
        let first = heritage.first.clone();
        let mut machine = Self::assemble(kvm, ram, config, cpu, resources, heritage, |vm, board, vcpus| {
            watch.lap("kvm");
            for (vcpu, state) in vcpus.iter().zip(&frozen.vcpus) {
                vcpu.restore(state)?;
            }
            vm.restore(&frozen.vm)?;
            watch.lap("vcpus");
            board.restore(&frozen.devices)?;
            board.renew(generation)?;
            watch.lap("devices");
            if let Some((first, vcpu)) = first.as_ref().zip(vcpus.first()) {
                // Without them it is slower only.
                let _ = first.give(ram, vcpu);
                watch.lap("pages");
            }
            Ok(())
        })?;
        machine.vm.set_clock(&frozen.vm)?;
        machine.run()?;
        watch.lap("run");
        Ok(machine)
    }

    /// Puts a machine together; `fill` gives board and vCPUs what they begin with.
    fn assemble(
        kvm: Arc<Kvm>,
        ram: &GuestRam,
        config: Config,
        cpu: CpuModel,
        resources: Resources,
        heritage: Heritage,
        fill: impl FnOnce(&Vm, &Board, &[keiki_hv::Vcpu]) -> Result<()>,
    ) -> Result<Self> {
        let vm = kvm.create_vm(ram)?;
        let end = Arc::new(Event::new().map_err(Error::host("making an event"))?);
        let fd = |fd: &OwnedFd| fd.try_clone().map_err(Error::host("copying a descriptor"));
        let (listener, log) = (fd(&resources.listener)?, File::from(fd(&resources.console)?));
        let board = Board::new(&vm, &config, resources)?;
        let vcpus: Vec<_> =
            (0..cpu.vcpus).map(|id| vm.create_vcpu(id, &cpu)).collect::<keiki_hv::Result<_>>()?;
        fill(&vm, &board, &vcpus)?;
        let on_end = end.clone();
        let cpus = Cpus::start(vcpus, board.bus(), move || {
            // Its counter is nowhere near full.
            let _ = on_end.signal();
        })?;
        let (server, paused) = (None, true);
        Ok(Self { kvm, vm, cpus, board, config, cpu, end, listener, server, paused, heritage, log })
    }

    fn run(&mut self) -> Result<()> {
        self.board.resume()?;
        self.cpus.run();
        self.paused = false;
        Ok(())
    }

    /// Serves until it is a zygote, in the copy that a freeze makes; as a machine it never returns.
    pub fn serve(mut self) -> Life {
        let events = self.board.events();
        loop {
            let (ready, control) = match self.wait(&events) {
                Ok(found) => found,
                Err(error) => self.finish(&format!("the event loop cannot wait ({error})")),
            };
            for device in ready {
                self.board.process(device);
            }
            self.look_for_the_end();
            // What was ready was the one before: the new one is asked in the next round.
            let mut is_new = false;
            if control.listener
                && let Ok(server) = control::accept(&self.listener)
            {
                self.server = Some(server);
                is_new = true;
            }
            if control.server
                && !is_new
                && let Some(zygote) = self.request()
            {
                // Nothing of the parent's is dropped: threads that are not here, descriptors that are closed.
                std::mem::forget(self);
                std::mem::forget(events);
                return Life::Zygote(zygote);
            }
        }
    }

    /// Devices with something to do, and what there is on the control sockets.
    fn wait(&self, events: &[(usize, OwnedFd)]) -> rustix::io::Result<(Vec<usize>, Ready)> {
        let mut fds =
            vec![PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&*self.end, PollFlags::IN)];
        fds.extend(events.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
        fds.extend(self.server.as_ref().map(|server| PollFd::new(server, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let is_ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        let devices = events.iter().zip(fds.iter().skip(2));
        let devices = devices.filter(|(_, fd)| is_ready(Some(fd))).map(|((device, _), _)| *device).collect();
        let server = self.server.is_some() && is_ready(fds.last());
        Ok((devices, Ready { listener: is_ready(fds.first()), server }))
    }

    fn look_for_the_end(&mut self) {
        match self.board.ending() {
            Some(Ending::Off) => self.finish("guest-shutdown"),
            Some(Ending::Reset) => self.finish("guest-reset"),
            None => {}
        }
        match self.cpus.ended() {
            Some(End::PowerOff) => self.finish("guest-shutdown"),
            // How a kernel that finds no other way reboots.
            Some(End::Reset | End::Shutdown) => self.finish("guest-reset"),
            Some(End::Failed(why)) => self.finish(&format!("failed: {why}")),
            None => {}
        }
    }

    /// Last words, to the console log, since nobody need be there to read an exit status.
    fn finish(&mut self, words: &str) -> ! {
        use std::io::{Seek, SeekFrom, Write};
        let _ = self.board.pause(Instant::now() + DRAIN);
        for disk in 0..self.board.disks() {
            let _ = self.board.with_disk(disk, |disk| disk.flush());
        }
        let _ = self.log.seek(SeekFrom::End(0));
        let _ = writeln!(self.log, "\n{}{words}", control::LAST_WORDS);
        exit_with(EXIT_END)
    }

    /// One request. In the copy that a freeze makes: the zygote.
    fn request(&mut self) -> Option<Box<Zygote>> {
        let received = self.server.as_mut().map(Server::receive)?;
        let (request, mut descriptors) = match received {
            Ok(Some(received)) => received,
            Err(error) if failed(&error) => {
                self.server = None;
                return None;
            }
            // Answered already.
            Err(_) => return None,
            // The node is gone; this machine is not.
            Ok(None) => {
                self.server = None;
                return None;
            }
        };
        let reply = match request {
            Request::Hello => self.hello(),
            Request::Pause => self.pause().map(|()| Reply::Done),
            Request::Resume => self.resume().map(|()| Reply::Done),
            Request::Layers => self.layers(&mut descriptors).map(|()| Reply::Done),
            Request::Freeze => match self.freeze(&mut descriptors) {
                Ok(Frost::Zygote(zygote)) => return Some(zygote),
                Ok(Frost::Machine(reply)) => Ok(reply),
                Err(error) => Err(error),
            },
            other => Err(Error::Invalid(format!("{} is not for a machine", other.name()))),
        };
        let reply = reply.unwrap_or_else(|error| error.reply());
        if self.server.as_mut().is_some_and(|server| server.answer(&reply).is_err()) {
            self.server = None;
        }
        None
    }

    fn hello(&self) -> Result<Reply> {
        let layers = self.board.with_disk(0, |disk| disk.lower_layers())?;
        Ok(Reply::Hello(control::Hello {
            stage: Stage::Machine,
            paused: self.paused,
            generation: self.heritage.forks,
            layers: u32::try_from(layers).unwrap_or(u32::MAX),
        }))
    }

    fn pause(&mut self) -> Result<()> {
        if !self.paused {
            self.cpus.park(PARK)?;
            if let Err(error) = self.board.pause(Instant::now() + DRAIN) {
                self.cpus.run();
                return Err(error);
            }
            self.paused = true;
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        if self.paused {
            // The guest's watchdogs would take the pause for a vCPU that hangs.
            self.cpus.each(|vcpu| vcpu.was_paused())?;
            self.run()?;
        }
        Ok(())
    }

    fn layers(&mut self, descriptors: &mut Descriptors) -> Result<()> {
        let root = std::iter::once(Role::Layer);
        for (number, role) in root.chain((0..).map(Role::DiskLayer)).take(self.board.disks()).enumerate() {
            let files = descriptors.take_all(role);
            if !files.is_empty() {
                self.board.with_disk(number, |disk| disk.rebase(layers(files)))??;
            }
        }
        Ok(descriptors.no_other_disks()?)
    }

    /// Freezes: the copy is the zygote. See the module text of the crate for the order.
    fn freeze(&mut self, descriptors: &mut Descriptors) -> Result<Frost> {
        let control = descriptors.take(Role::Control)?;
        let stderr = descriptors.take_if_any(Role::Stderr);
        let files = self.new_tops(descriptors)?;
        let mut watch = Stopwatch::start();
        let was_paused = self.paused;
        // Ahead of the pause: what the guest wrote and did not flush.
        let mut tops = Vec::new();
        for (number, file) in files {
            let flushed = self.board.with_disk(number, |disk| disk.flush())?;
            flushed.map_err(Error::host("flushing the disk"))?;
            tops.push((number, self.board.with_disk(number, |disk| disk.prepare_top(file))??));
        }
        watch.lap("flush");
        let parked = Instant::now();
        self.pause()?;
        watch.lap("park");
        let done = self.copy(control, stderr.as_ref(), tops, &mut watch);
        if matches!(done, Ok(Frost::Zygote(_))) {
            return done;
        }
        let resumed = if was_paused { Ok(()) } else { self.resume() };
        let running = if was_paused { None } else { self.cpus.running_since(PARK) };
        let pause = running.map_or_else(|| parked.elapsed(), |at| at.saturating_duration_since(parked));
        watch.lap("resume");
        match (done, resumed) {
            (Ok(Frost::Machine(Reply::Frozen(mut frozen))), Ok(())) => {
                frozen.vcpu_pause_ns = nanoseconds(pause);
                frozen.steps = Step::list(watch.steps());
                Ok(Frost::Machine(Reply::Frozen(frozen)))
            }
            (Ok(_), Err(error)) | (Err(error), _) => Err(error),
            (Ok(done), Ok(())) => Ok(done),
        }
    }

    /// The next top of each disk that is written to, by the disk's number.
    fn new_tops(&self, descriptors: &mut Descriptors) -> Result<Vec<(usize, File)>> {
        let mut tops = vec![(0, descriptors.take(Role::Top)?.into())];
        for (number, disk) in (0..).zip(&self.config.devices.disks) {
            if !disk.read_only {
                tops.push((usize::from(number) + 1, descriptors.take(Role::DiskTop(number))?.into()));
            }
        }
        descriptors.no_other_disks()?;
        Ok(tops)
    }

    /// All disks go on, each on its new top; or, on error, none does.
    fn switch_tops(&mut self, tops: Vec<(usize, Top)>) -> Result<()> {
        // What can fail is done for all of them before the first one switches.
        for (number, _) in &tops {
            self.board.with_disk(*number, |disk| disk.finish_top())??;
        }
        for (done, (number, top)) in tops.into_iter().enumerate() {
            match self.board.with_disk(number, |disk| disk.switch_top(top))? {
                // Nothing of it is right from here on: what was written to the others would not be in any copy.
                Err(error) if done > 0 => {
                    self.finish(&format!("failed: a freeze could not switch disk {number}: {error}"));
                }
                switched => switched?,
            }
        }
        Ok(())
    }

    /// Between park and resume.
    fn copy(
        &mut self,
        control: OwnedFd,
        stderr: Option<&OwnedFd>,
        tops: Vec<(usize, Top)>,
        watch: &mut Stopwatch,
    ) -> Result<Frost> {
        // Since the event loop looked last. A copy would have vCPUs that never run again, and nobody to say so.
        if self.board.ending().is_some() || self.cpus.ended().is_some() {
            return Err(Error::Invalid("its guest has just ended".into()));
        }
        let frozen = Frozen {
            config: self.config.clone(),
            cpu: self.cpu.clone(),
            vm: self.vm.save()?,
            vcpus: self.cpus.save()?,
            devices: self.board.save()?,
        };
        watch.lap("save");
        let keep = [control.as_fd(), self.kvm.as_fd()].into_iter().chain(stderr.map(AsFd::as_fd));
        match fork(&keep.collect::<Vec<_>>()).map_err(Error::host("forking"))? {
            Side::Child => {
                // Its descriptors are the parent's, closed here already.
                std::mem::forget(tops);
                let (kvm, ram) = (self.kvm.clone(), self.vm.ram().clone());
                // An error must not be answered here: this process is not the machine.
                let zygote = complain_on(stderr)
                    .and_then(|()| Zygote::new(kvm, ram, frozen, control, self.heritage.of_copy()));
                match zygote {
                    Ok(zygote) => Ok(Frost::Zygote(Box::new(zygote))),
                    Err(_) => exit_with(EXIT_THAW),
                }
            }
            Side::Parent { child } => {
                watch.lap("fork");
                // If this fails, so does the freeze: the node drops its end of the zygote's connection, which ends it.
                self.switch_tops(tops)?;
                watch.lap("disk");
                Ok(Frost::Machine(Reply::Frozen(control::Frozen {
                    pid: child,
                    vcpu_pause_ns: 0,
                    steps: Vec::new(),
                })))
            }
        }
    }
}

/// What is ready besides devices.
struct Ready {
    listener: bool,
    server: bool,
}

/// Who one is after a freeze.
enum Frost {
    Machine(Reply),
    Zygote(Box<Zygote>),
}

fn vcpu_count(vcpus: u32) -> Result<u8> {
    let most = boot::layout::MAX_VCPUS;
    u8::try_from(vcpus)
        .ok()
        .filter(|count| (1..=most).contains(count))
        .ok_or_else(|| Error::Invalid(format!("a machine has 1 to {most} vCPUs, not {vcpus}")))
}
