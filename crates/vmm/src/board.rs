//! The board: which devices a machine has, where the guest finds them, and who serves an access.
//!
//! Their order is fixed, and address and interrupt follow from it ([`layout::place`]): a frozen machine records
//! neither. A thaw makes all devices anew, from descriptors of its own, and gives each its state.

use crate::{
    Error, Result,
    boot::layout::{self, Place},
    frozen::Config,
};
use keiki_control::{self as control, Descriptors, Devices, MAX_DISKS, Role};
use keiki_devices::{
    Device, Interrupt, State,
    virtio::{InterruptStatus, VirtioDevice},
};
use keiki_devices::{
    balloon::{Balloon, Discard},
    block::Block,
    console::Console,
    console_log::ConsoleLog,
    disk::{Disk, Format, Layer},
    mmio::{Mmio, NOTIFY},
    net::Net,
    power::{self, Ending, Power},
    rng::Rng,
    serial::Serial,
    vmgenid::VmGenId,
};
use keiki_hv::{GuestRam, Vm};
use std::{
    fs::File,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use vm_memory::GuestAddress;

/// Devices with a window that every machine has: root disk, network, console, entropy, balloon. Further disks come behind them.
const WINDOWS: usize = 5;

/// There is no such clock. Ones would look like one that is always busy, for which Linux waits.
const CMOS_CLOCK: [u16; 2] = [0x70, 0x71];

/// What one machine is given for itself alone.
#[derive(Debug)]
pub struct Resources {
    /// Lower layers, bottom first.
    pub layers: Vec<OwnedFd>,
    /// The writable layer.
    pub top: OwnedFd,
    /// Network.
    pub tap: Option<OwnedFd>,
    /// Agent port.
    pub agent: OwnedFd,
    /// Console log.
    pub console: OwnedFd,
    /// Control connections.
    pub listener: OwnedFd,
    /// Those of further disks.
    pub disks: Vec<DiskFiles>,
    /// Standard error, where it is to be another than before.
    pub stderr: Option<OwnedFd>,
    /// What is read first.
    pub pages: Option<OwnedFd>,
}

/// The files of a further disk.
#[derive(Debug)]
pub struct DiskFiles {
    /// Lower layers, bottom first.
    pub layers: Vec<OwnedFd>,
    /// The writable layer. None: it is only read.
    pub top: Option<OwnedFd>,
}

impl Resources {
    /// Those of a request, for a machine with these disks besides its root disk.
    ///
    /// # Errors
    /// If one is missing, or too much.
    pub fn take(descriptors: &mut Descriptors, disks: &[control::Disk]) -> Result<Self> {
        let further = |(number, disk): (u8, &control::Disk)| -> Result<DiskFiles> {
            let mut layers = vec![descriptors.take(Role::DiskLayer(number))?];
            layers.extend(descriptors.take_all(Role::DiskLayer(number)));
            let top = (!disk.read_only).then(|| descriptors.take(Role::DiskTop(number))).transpose()?;
            Ok(DiskFiles { layers, top })
        };
        let disks = (0..).zip(disks).map(further).collect::<Result<_>>()?;
        let taken = Self {
            disks,
            layers: descriptors.take_all(Role::Layer),
            top: descriptors.take(Role::Top)?,
            tap: descriptors.take_if_any(Role::Tap),
            agent: descriptors.take(Role::Agent)?,
            console: descriptors.take(Role::Console)?,
            listener: descriptors.take(Role::Listener)?,
            stderr: descriptors.take_if_any(Role::Stderr),
            pages: descriptors.take_if_any(Role::Pages),
        };
        descriptors.no_other_disks()?;
        Ok(taken)
    }

    /// All of them: what a copy keeps.
    #[must_use]
    pub fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let mut all: Vec<_> = self.layers.iter().map(AsFd::as_fd).collect();
        all.extend(self.disks.iter().flat_map(|disk| disk.layers.iter().chain(&disk.top)).map(AsFd::as_fd));
        all.extend([&self.tap, &self.stderr, &self.pages].into_iter().flatten().map(AsFd::as_fd));
        all.extend([&self.top, &self.agent, &self.console, &self.listener].map(AsFd::as_fd));
        all
    }
}

/// Files as disk layers: the bottom is raw, the others are qcow2.
#[must_use]
pub fn layers(files: Vec<OwnedFd>) -> Vec<Layer> {
    let format = |index| if index == 0 { Format::Raw } else { Format::Qcow2 };
    let layer = |(index, file)| Layer { format: format(index), file: File::from(file) };
    files.into_iter().enumerate().map(layer).collect()
}

type Shared = Arc<Mutex<dyn Device>>;

/// The devices of a machine.
pub struct Board {
    /// All of them, in order: those with windows, serial console, power, generation ID.
    devices: Vec<Shared>,
    /// The root disk, then further ones.
    disks: Vec<Arc<Mutex<Mmio<Block>>>>,
    power: Arc<Mutex<Power>>,
    generation: Arc<Mutex<VmGenId>>,
    bus: Arc<Bus>,
}

impl Board {
    /// All devices, paused, as new.
    ///
    /// # Errors
    /// If the disk is not what it should be, and those of the host.
    pub fn new(vm: &Vm, config: &Config, resources: Resources) -> Result<Self> {
        let Resources { layers: files, top, tap, agent, console, disks: further, .. } = resources;
        let memory = vm.ram().memory().clone();
        let disk = Disk::open(layers(files), Some(top.into()))?;
        let (disk, first) = virtio(vm, 0, Block::new(disk, "root"))?;
        let net = Net::new(tap, config.devices.mac).map_err(Error::host("setting up the tap"))?;
        let agent = Console::new(agent, &config.devices.agent_port)
            .map_err(Error::host("listening for the agent"))?;
        let rng = Rng::new().map_err(Error::host("making the entropy device"))?;
        let mut windows = vec![
            first,
            virtio(vm, 1, net)?.1,
            virtio(vm, 2, agent)?.1,
            virtio(vm, 3, rng)?.1,
            virtio(vm, 4, Balloon::new(Box::new(Give(vm.ram().clone()))))?.1,
        ];
        let mut disks = vec![disk];
        for (number, files) in further.into_iter().enumerate() {
            let disk = Disk::open(layers(files.layers), files.top.map(File::from))?;
            let (disk, window) = virtio(vm, WINDOWS + number, Block::new(disk, &format!("disk{number}")))?;
            disks.push(disk);
            windows.push(window);
        }
        let log = ConsoleLog::new(Some(console.into())).map_err(Error::host("opening the console log"))?;
        let serial = shared(Serial::new(log, Arc::new(Line { vm: vm.clone(), gsi: layout::SERIAL_GSI })));
        let power = shared(Power::new().map_err(Error::host("making the power registers"))?);
        let line = Box::new(Line { vm: vm.clone(), gsi: layout::GENERATION_GSI });
        let generation = VmGenId::new(memory, GuestAddress(layout::GENERATION_ID), line)
            .map_err(Error::host("making the generation ID"))?;
        let generation = shared(generation);
        let mut devices: Vec<Shared> = windows.iter().map(|window| window.device.clone()).collect();
        devices.extend([serial.clone() as Shared, power.clone(), generation.clone()]);
        let ports: Vec<Ports> = vec![
            Ports {
                first: layout::SERIAL_PORT,
                last: layout::SERIAL_PORT + 7,
                offset: 0,
                device: serial.clone(),
            },
            Ports {
                first: layout::SLEEP_PORT,
                last: layout::RESET_PORT,
                offset: power::SLEEP_CONTROL,
                device: power.clone(),
            },
            Ports {
                first: power::KEYBOARD_PORT,
                last: power::KEYBOARD_PORT,
                offset: power::KEYBOARD,
                device: power.clone(),
            },
        ];
        let bus = Arc::new(Bus { windows, ports });
        Ok(Self { devices, disks, power, generation, bus })
    }

    /// What the guest wants of its machine, if it said so.
    #[must_use]
    pub fn ending(&self) -> Option<Ending> {
        lock(&self.power).ending()
    }

    /// Gives the guest an ID of its own. It is told at the next [`Board::resume`].
    ///
    /// # Errors
    /// Those of memory.
    pub fn renew(&self, generation: [u8; 16]) -> Result<()> {
        lock(&self.generation).renew(generation).map_err(Error::host("writing the generation ID"))
    }

    /// What vCPUs call.
    #[must_use]
    pub fn bus(&self) -> Arc<Bus> {
        self.bus.clone()
    }

    /// Descriptors to wait for, and the device of each.
    #[must_use]
    pub fn events(&self) -> Vec<(usize, OwnedFd)> {
        let clone = |device: &Shared| lock(device).events().and_then(|fd| fd.try_clone_to_owned().ok());
        self.devices.iter().enumerate().filter_map(|(i, device)| Some((i, clone(device)?))).collect()
    }

    /// A device has something to do.
    pub fn process(&self, device: usize) {
        if let Some(device) = self.devices.get(device) {
            lock(device).process();
        }
    }

    /// Stops all devices, with nothing in flight. On error those that stopped go on.
    ///
    /// # Errors
    /// If one cannot.
    pub fn pause(&self, deadline: Instant) -> Result<()> {
        for (done, device) in self.devices.iter().enumerate() {
            let paused = lock(device).pause(deadline);
            if let Err(error) = paused {
                for device in self.devices.iter().take(done) {
                    let _ = lock(device).resume();
                }
                return Err(Error::Host("a device does not stop", error));
            }
        }
        Ok(())
    }

    /// Lets all devices go on.
    ///
    /// # Errors
    /// Those of devices.
    pub fn resume(&self) -> Result<()> {
        for device in &self.devices {
            lock(device).resume().map_err(Error::host("a device does not go on"))?;
        }
        Ok(())
    }

    /// The state of each.
    ///
    /// # Errors
    /// Those of devices.
    pub fn save(&self) -> Result<Vec<State>> {
        self.devices.iter().map(|device| Ok(lock(device).save()?)).collect()
    }

    /// Puts the state of each into devices that are as new.
    ///
    /// # Errors
    /// If there are too few or too many, and those of devices.
    pub fn restore(&self, states: &[State]) -> Result<()> {
        if states.len() != self.devices.len() {
            let text =
                format!("the state has {} devices, this machine has {}", states.len(), self.devices.len());
            return Err(Error::Refused(text));
        }
        for (device, state) in self.devices.iter().zip(states) {
            lock(device).restore(state)?;
        }
        Ok(())
    }

    /// How many disks there are, the root disk included.
    #[must_use]
    pub fn disks(&self) -> usize {
        self.disks.len()
    }

    /// A disk by its number: 0 is the root disk.
    ///
    /// # Errors
    /// If there is none.
    pub fn with_disk<T>(&self, number: usize, what: impl FnOnce(&mut Disk) -> T) -> Result<T> {
        let disk = self.disks.get(number);
        let disk = disk.ok_or_else(|| Error::Invalid(format!("the machine has no disk {number}")))?;
        Ok(what(lock(disk).device_mut().disk_mut()))
    }
}

/// How many devices with a window a machine has.
///
/// # Errors
/// If there is no room for so many disks.
pub fn windows(devices: &Devices) -> Result<usize> {
    match devices.disks.len() {
        count @ 0..=MAX_DISKS => Ok(WINDOWS + count),
        count => Err(Error::Invalid(format!(
            "a machine has at most {MAX_DISKS} disks besides its root disk, not {count}"
        ))),
    }
}

fn shared<D>(device: D) -> Arc<Mutex<D>> {
    Arc::new(Mutex::new(device))
}

/// Puts a device on its transport, and its queues' notifications on events instead of exits.
fn virtio<D: VirtioDevice + 'static>(
    vm: &Vm,
    number: usize,
    device: D,
) -> Result<(Arc<Mutex<Mmio<D>>>, Window)> {
    let Place { window, gsi } = layout::place(number).ok_or(Error::Invalid("too many devices".into()))?;
    let line = Box::new(Line { vm: vm.clone(), gsi });
    let device = Mmio::new(device, vm.ram().memory().clone(), line);
    let device = device.map_err(Error::host("making a device"))?;
    for (queue, event) in (0..).zip(device.queue_events()) {
        vm.notify(event.as_fd(), window + NOTIFY, queue)?;
    }
    let interrupt = device.interrupt_status();
    let device = shared(device);
    Ok((device.clone(), Window { device, interrupt }))
}

/// An interrupt line of the machine.
struct Line {
    vm: Vm,
    gsi: u32,
}

impl Interrupt for Line {
    fn raise(&self) -> io::Result<()> {
        self.vm.pulse(self.gsi).map_err(io::Error::other)
    }
}

/// Gives memory back to the host.
struct Give(GuestRam);

impl Discard for Give {
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()> {
        self.0.discard(start.0, bytes).map(|_| ())
    }
}

/// A window of a device.
struct Window {
    device: Shared,
    /// Served without the device's lock: an interrupt handler must not wait for I/O of the event loop.
    interrupt: Arc<InterruptStatus>,
}

/// Ports of a device.
struct Ports {
    first: u16,
    last: u16,
    /// Of the first, among the device's registers.
    offset: u64,
    device: Shared,
}

/// Who serves an access. What belongs to nobody reads as ones, as on a real bus, and takes any write.
pub struct Bus {
    windows: Vec<Window>,
    ports: Vec<Ports>,
}

impl Bus {
    fn at_address(&self, address: u64, len: usize) -> Option<(&Window, u64)> {
        let (device, offset) = layout::device_at(address)?;
        // An access that reaches into the next window belongs to nobody.
        let inside = offset + len as u64 <= layout::WINDOW;
        self.windows.get(device).filter(|_| inside).map(|device| (device, offset))
    }

    fn at_port(&self, port: u16) -> Option<(&Shared, u64)> {
        let ports = self.ports.iter().find(|ports| (ports.first..=ports.last).contains(&port))?;
        Some((&ports.device, ports.offset + u64::from(port - ports.first)))
    }
}

impl keiki_hv::Bus for Bus {
    fn port_read(&self, port: u16, data: &mut [u8]) {
        match self.at_port(port) {
            Some((device, offset)) => lock(device).read(offset, data),
            None => data.fill(if CMOS_CLOCK.contains(&port) { 0 } else { 0xff }),
        }
    }

    fn port_write(&self, port: u16, data: &[u8]) {
        if let Some((device, offset)) = self.at_port(port) {
            lock(device).write(offset, data);
        }
    }

    fn read(&self, address: u64, data: &mut [u8]) {
        match self.at_address(address, data.len()) {
            Some((window, offset)) => {
                if !window.interrupt.read(offset, data) {
                    lock(&window.device).read(offset, data);
                }
            }
            None => data.fill(0xff),
        }
    }

    fn write(&self, address: u64, data: &[u8]) {
        if let Some((window, offset)) = self.at_address(address, data.len())
            && !window.interrupt.write(offset, data)
        {
            lock(&window.device).write(offset, data);
        }
    }
}

/// A guard whatever happened to its last holder: a panic ends the process.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
