//! A machine: it runs, it is paused, and it forks zygotes.
//!
//! There are two kinds of threads. Each vCPU has one, which runs the guest and serves register
//! accesses. The main thread does everything else, one thing at a time: device backends, queue
//! notifications, and the control socket. It sleeps in one `poll`.

use crate::{
    Error, Result, boot,
    device_manager::{DeviceManager, mmio_devices},
    exit::{EXIT_END, EXIT_THAW, exit_with, is_broken, redirect_stderr},
    fds::{VmFds, layers},
    frozen::{Config, Frozen},
    working_set::WorkingSet,
    zygote::{ForkAncestry, Zygote},
};
use keiki_control::{self as control, Boot, Descriptors, Reply, Request, Role, Server, Stage, Step};
use keiki_devices::{Event, disk::Top, power::GuestExit};
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

/// How long vCPUs may take to stop. They mostly take a tenth of a millisecond. On a host that is
/// far too busy, a slow freeze is better than a failed one.
const PARK: Duration = Duration::from_secs(2);
/// How long devices may take to finish what is in flight.
const DRAIN: Duration = Duration::from_millis(200);

/// A running or paused machine.
pub struct Machine {
    kvm: Arc<Kvm>,
    vm: Vm,
    cpus: Cpus,
    devices: DeviceManager,
    config: Config,
    cpu: CpuModel,
    /// Signalled when a vCPU cannot continue.
    end: Arc<Event>,
    listener: OwnedFd,
    server: Option<Server>,
    paused: bool,
    ancestry: ForkAncestry,
    /// Console log, which receives the exit reason.
    log: File,
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Machine {
    /// Boots a kernel.
    pub fn boot(boot: &Boot, descriptors: &mut Descriptors) -> Result<Self> {
        let cpu_count = vcpu_count(boot.shape.vcpus)?;
        let kvm = Arc::new(Kvm::new(descriptors.take(Role::Kvm)?)?);
        let mut kernel = File::from(descriptors.take(Role::Kernel)?);
        let mut initrd = File::from(descriptors.take(Role::Initrd)?);
        let devices = mmio_devices(&boot.devices)?;
        let fds = VmFds::take(descriptors, &boot.devices.disks)?;
        let ram = GuestRam::anonymous(u64::from(boot.shape.memory_mib) << 20, HugePages::Advise)?;
        let config = Config { shape: boot.shape, devices: boot.devices.clone() };
        let cpu = CpuModel::new(&kvm.supported_cpuid()?, Baseline::Baseline, cpu_count);
        let mut machine =
            Self::assemble(kvm, &ram, config, cpu, fds, ForkAncestry::default(), |_, manager, vcpus| {
                let spec = boot::Spec {
                    kernel: &mut kernel,
                    initramfs: Some(&mut initrd),
                    command_line: &boot.cmdline,
                    vcpus: cpu_count,
                    devices,
                };
                let entry = boot::load(&ram, spec)?;
                manager.set_generation(boot.generation)?;
                vcpus.iter().try_for_each(|vcpu| entry.apply(vcpu))?;
                Ok(())
            })?;
        machine.run()?;
        Ok(machine)
    }

    /// Continues a frozen machine on the memory of this process.
    pub fn thaw(
        kvm: Arc<Kvm>,
        ram: &GuestRam,
        frozen: &Frozen,
        fds: VmFds,
        generation: [u8; 16],
        mut ancestry: ForkAncestry,
        watch: &mut Stopwatch,
    ) -> Result<Self> {
        let (config, cpu) = (frozen.config.clone(), frozen.cpu.clone());
        if let Some(list) = &fds.pages {
            ancestry.working_set = Some(Arc::new(WorkingSet::read(list)));
        }
        let working_set = ancestry.working_set.clone();
        let mut machine = Self::assemble(kvm, ram, config, cpu, fds, ancestry, |vm, manager, vcpus| {
            watch.lap("kvm");
            for (vcpu, state) in vcpus.iter().zip(&frozen.vcpus) {
                vcpu.restore(state)?;
            }
            vm.restore(&frozen.vm)?;
            watch.lap("vcpus");
            manager.restore(&frozen.devices)?;
            manager.set_generation(generation)?;
            watch.lap("devices");
            if let Some((working_set, vcpu)) = working_set.as_ref().zip(vcpus.first()) {
                // An error costs speed only.
                let _ = working_set.map_into(ram, vcpu);
                watch.lap("pages");
            }
            Ok(())
        })?;
        machine.vm.set_clock(&frozen.vm)?;
        machine.run()?;
        watch.lap("run");
        Ok(machine)
    }

    /// Makes a machine. `fill` sets the initial state of devices and vCPUs.
    fn assemble(
        kvm: Arc<Kvm>,
        ram: &GuestRam,
        config: Config,
        cpu: CpuModel,
        fds: VmFds,
        ancestry: ForkAncestry,
        fill: impl FnOnce(&Vm, &DeviceManager, &[keiki_hv::Vcpu]) -> Result<()>,
    ) -> Result<Self> {
        let vm = kvm.create_vm(ram)?;
        let end = Arc::new(Event::new().map_err(Error::host("creating an event"))?);
        let fd = |fd: &OwnedFd| fd.try_clone().map_err(Error::host("copying a descriptor"));
        let (listener, log) = (fd(&fds.listener)?, File::from(fd(&fds.console)?));
        let devices = DeviceManager::new(&vm, &config, fds)?;
        let vcpus: Vec<_> =
            (0..cpu.vcpus).map(|id| vm.create_vcpu(id, &cpu)).collect::<keiki_hv::Result<_>>()?;
        fill(&vm, &devices, &vcpus)?;
        let on_end = end.clone();
        let cpus = Cpus::start(vcpus, devices.bus(), move || {
            // The counter is nowhere near full.
            let _ = on_end.signal();
        })?;
        let (server, paused) = (None, true);
        Ok(Self { kvm, vm, cpus, devices, config, cpu, end, listener, server, paused, ancestry, log })
    }

    fn run(&mut self) -> Result<()> {
        self.devices.resume()?;
        self.cpus.run();
        self.paused = false;
        Ok(())
    }

    /// Serves requests and devices. Returns only in the copy that a freeze forks, as its zygote.
    pub fn serve(mut self) -> Box<Zygote> {
        let events = self.devices.events();
        loop {
            let (ready, control) = match self.wait(&events) {
                Ok(found) => found,
                Err(error) => self.finish(&format!("the event loop cannot wait ({error})")),
            };
            for device in ready {
                self.devices.process(device);
            }
            self.check_guest_exit();
            // `control.server` is about the previous connection: a new one has its turn in the next
            // round.
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
                // Drops nothing of the parent: its threads do not exist here, and its descriptors
                // are closed.
                std::mem::forget(self);
                std::mem::forget(events);
                return zygote;
            }
        }
    }

    /// Waits until there is something to do: which devices are ready, and which control sockets.
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

    fn check_guest_exit(&mut self) {
        match self.devices.guest_exit() {
            Some(GuestExit::Off) => self.finish("guest-shutdown"),
            Some(GuestExit::Reset) => self.finish("guest-reset"),
            None => {}
        }
        match self.cpus.ended() {
            Some(End::PowerOff) => self.finish("guest-shutdown"),
            // A kernel that finds no other way reboots by a triple fault.
            Some(End::Reset | End::Shutdown) => self.finish("guest-reset"),
            Some(End::Failed(why)) => self.finish(&format!("failed: {why}")),
            None => {}
        }
    }

    /// Ends the process. Writes the reason to the console log: there may be no parent that reads an
    /// exit status.
    fn finish(&mut self, reason: &str) -> ! {
        use std::io::{Seek, SeekFrom, Write};
        let _ = self.devices.pause(Instant::now() + DRAIN);
        for disk in 0..self.devices.disks() {
            let _ = self.devices.with_disk(disk, |disk| disk.flush());
        }
        let _ = self.log.seek(SeekFrom::End(0));
        let _ = writeln!(self.log, "\n{}{reason}", control::EXIT_REASON);
        exit_with(EXIT_END)
    }

    /// Serves one request. Returns the zygote in the copy that a freeze forks.
    fn request(&mut self) -> Option<Box<Zygote>> {
        let received = self.server.as_mut().map(Server::receive)?;
        let (request, mut descriptors) = match received {
            Ok(Some(received)) => received,
            Err(error) if is_broken(&error) => {
                self.server = None;
                return None;
            }
            // `receive` has answered already.
            Err(_) => return None,
            // The node is gone. The machine stays.
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
                Ok(FreezeOutcome::Zygote(zygote)) => return Some(zygote),
                Ok(FreezeOutcome::Machine(reply)) => Ok(reply),
                Err(error) => Err(error),
            },
            other => Err(Error::Invalid(format!("a machine does not accept {}", other.name()))),
        };
        let reply = reply.unwrap_or_else(|error| error.reply());
        if self.server.as_mut().is_some_and(|server| server.answer(&reply).is_err()) {
            self.server = None;
        }
        None
    }

    fn hello(&self) -> Result<Reply> {
        let layers = self.devices.with_disk(0, |disk| disk.lower_layers())?;
        Ok(Reply::Hello(control::Hello {
            stage: Stage::Machine,
            paused: self.paused,
            generation: self.ancestry.forks,
            layers: u32::try_from(layers).unwrap_or(u32::MAX),
        }))
    }

    fn pause(&mut self) -> Result<()> {
        if !self.paused {
            self.cpus.park(PARK)?;
            if let Err(error) = self.devices.pause(Instant::now() + DRAIN) {
                self.cpus.run();
                return Err(error);
            }
            self.paused = true;
        }
        Ok(())
    }

    fn resume(&mut self) -> Result<()> {
        if self.paused {
            // Otherwise watchdogs in the guest take the pause for a vCPU that hangs.
            self.cpus.each(|vcpu| vcpu.notify_pause())?;
            self.run()?;
        }
        Ok(())
    }

    fn layers(&mut self, descriptors: &mut Descriptors) -> Result<()> {
        let root = std::iter::once(Role::Layer);
        for (number, role) in root.chain((0..).map(Role::DiskLayer)).take(self.devices.disks()).enumerate() {
            let files = descriptors.take_all(role);
            if !files.is_empty() {
                self.devices.with_disk(number, |disk| disk.rebase(layers(files)))??;
            }
        }
        Ok(descriptors.no_other_disks()?)
    }

    /// Forks a zygote. The documentation of the crate describes the order.
    fn freeze(&mut self, descriptors: &mut Descriptors) -> Result<FreezeOutcome> {
        let control = descriptors.take(Role::Control)?;
        let stderr = descriptors.take_if_any(Role::Stderr);
        let files = self.new_tops(descriptors)?;
        let mut watch = Stopwatch::start();
        let was_paused = self.paused;
        // Writes what the guest has not flushed, before the pause begins.
        let mut tops = Vec::new();
        for (number, file) in files {
            let flushed = self.devices.with_disk(number, |disk| disk.flush())?;
            flushed.map_err(Error::host("flushing the disk"))?;
            tops.push((number, self.devices.with_disk(number, |disk| disk.prepare_top(file))??));
        }
        watch.lap("flush");
        let parked = Instant::now();
        self.pause()?;
        watch.lap("park");
        let done = self.copy(control, stderr.as_ref(), tops, &mut watch);
        if matches!(done, Ok(FreezeOutcome::Zygote(_))) {
            return done;
        }
        let resumed = if was_paused { Ok(()) } else { self.resume() };
        let running = if was_paused { None } else { self.cpus.running_since(PARK) };
        let pause = running.map_or_else(|| parked.elapsed(), |at| at.saturating_duration_since(parked));
        watch.lap("resume");
        match (done, resumed) {
            (Ok(FreezeOutcome::Machine(Reply::Frozen(mut frozen))), Ok(())) => {
                frozen.vcpu_pause_ns = nanoseconds(pause);
                frozen.steps = Step::list(watch.steps());
                Ok(FreezeOutcome::Machine(Reply::Frozen(frozen)))
            }
            (Ok(_), Err(error)) | (Err(error), _) => Err(error),
            (Ok(done), Ok(())) => Ok(done),
        }
    }

    /// The next top of each writable disk, with the number of the disk.
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

    /// Switches all disks to their new tops. On error none has switched.
    fn switch_tops(&mut self, tops: Vec<(usize, Top)>) -> Result<()> {
        // Everything that can fail is done for all disks before the first one switches.
        for (number, _) in &tops {
            self.devices.with_disk(*number, |disk| disk.finish_top())??;
        }
        for (done, (number, top)) in tops.into_iter().enumerate() {
            match self.devices.with_disk(number, |disk| disk.switch_top(top))? {
                // The disks are now of different instants, and no copy has what was written to the
                // others.
                Err(error) if done > 0 => {
                    self.finish(&format!("failed: a freeze could not switch disk {number}: {error}"));
                }
                switched => switched?,
            }
        }
        Ok(())
    }

    /// The part of a freeze between park and resume.
    fn copy(
        &mut self,
        control: OwnedFd,
        stderr: Option<&OwnedFd>,
        tops: Vec<(usize, Top)>,
        watch: &mut Stopwatch,
    ) -> Result<FreezeOutcome> {
        // The guest may have ended since the event loop checked. The vCPUs of a copy would never
        // run, and nothing would report that.
        if self.devices.guest_exit().is_some() || self.cpus.ended().is_some() {
            return Err(Error::Invalid("its guest has just ended".into()));
        }
        let frozen = Frozen {
            config: self.config.clone(),
            cpu: self.cpu.clone(),
            vm: self.vm.save()?,
            vcpus: self.cpus.save()?,
            devices: self.devices.save()?,
        };
        watch.lap("save");
        let keep = [control.as_fd(), self.kvm.as_fd()].into_iter().chain(stderr.map(AsFd::as_fd));
        match fork(&keep.collect::<Vec<_>>()).map_err(Error::host("forking"))? {
            Side::Child => {
                // The fork has closed these descriptors, which are the parent's.
                std::mem::forget(tops);
                let (kvm, ram) = (self.kvm.clone(), self.vm.ram().clone());
                // An error must not be answered here: this process is not the machine.
                let zygote = redirect_stderr(stderr)
                    .and_then(|()| Zygote::new(kvm, ram, frozen, control, self.ancestry.of_copy()));
                match zygote {
                    Ok(zygote) => Ok(FreezeOutcome::Zygote(Box::new(zygote))),
                    Err(_) => exit_with(EXIT_THAW),
                }
            }
            Side::Parent { child } => {
                watch.lap("fork");
                // If this fails, the freeze fails: the node closes its connection to the zygote,
                // which ends it.
                self.switch_tops(tops)?;
                watch.lap("disk");
                Ok(FreezeOutcome::Machine(Reply::Frozen(control::Frozen {
                    pid: child,
                    vcpu_pause_ns: 0,
                    private_bytes: 0,
                    steps: Vec::new(),
                })))
            }
        }
    }
}

/// Which control sockets are ready.
struct Ready {
    listener: bool,
    server: bool,
}

/// Which process this is after a freeze has forked.
enum FreezeOutcome {
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
