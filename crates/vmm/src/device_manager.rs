//! The devices of a machine, where the guest finds them, and which of them serves an access.
//!
//! Their order is fixed. Address and interrupt follow from it ([`layout::mmio_window`]), so a
//! frozen machine records neither. A thaw creates new devices on its own descriptors and restores
//! the state of each.

use crate::{
    Error, Result,
    boot::layout::{self, MmioWindow},
    fds::{VmFds, layers},
    frozen::Config,
};
use keiki_control::{Devices, MAX_DISKS};
use keiki_devices::{
    Device, Interrupt, State,
    virtio::{InterruptStatus, VirtioDevice},
};
use keiki_devices::{
    balloon::{Balloon, Discard},
    block::Block,
    console::Console,
    console_log::ConsoleLog,
    disk::Disk,
    mmio::{Mmio, NOTIFY},
    net::Net,
    power::{self, GuestExit, Power},
    rng::Rng,
    serial::Serial,
    vmgenid::VmGenId,
};
use keiki_hv::{GuestRam, Vm};
use std::{
    fs::File,
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};
use vm_memory::GuestAddress;

/// MMIO devices of every machine: root disk, network, console, entropy, balloon. Additional disks
/// follow them.
const MMIO_DEVICES: usize = 5;

/// The machine has no CMOS clock. Its ports read as zeroes: ones would look like a clock that is
/// always busy, for which Linux waits.
const CMOS_CLOCK: [u16; 2] = [0x70, 0x71];

type Shared = Arc<Mutex<dyn Device>>;

/// All devices of a machine.
pub struct DeviceManager {
    /// In the order of their states: MMIO devices, serial console, power, generation ID.
    devices: Vec<Shared>,
    /// The root disk first.
    disks: Vec<Arc<Mutex<Mmio<Block>>>>,
    power: Arc<Mutex<Power>>,
    generation: Arc<Mutex<VmGenId>>,
    bus: Arc<Bus>,
}

impl DeviceManager {
    /// Makes all devices, new and paused.
    pub fn new(vm: &Vm, config: &Config, fds: VmFds) -> Result<Self> {
        let VmFds { layers: files, top, tap, agent, console, disks: further, .. } = fds;
        let memory = vm.ram().memory().clone();
        let disk = Disk::open(layers(files), Some(top.into()))?;
        let (disk, first) = virtio(vm, 0, Block::new(disk, "root"))?;
        let net = Net::new(tap, config.devices.mac).map_err(Error::host("setting up the tap"))?;
        let agent = Console::new(agent, &config.devices.agent_port)
            .map_err(Error::host("listening for the agent"))?;
        let rng = Rng::new().map_err(Error::host("creating the entropy device"))?;
        let mut windows = vec![
            first,
            virtio(vm, 1, net)?.1,
            virtio(vm, 2, agent)?.1,
            virtio(vm, 3, rng)?.1,
            virtio(vm, 4, Balloon::new(Box::new(Ram(vm.ram().clone()))))?.1,
        ];
        let mut disks = vec![disk];
        for (number, files) in further.into_iter().enumerate() {
            let disk = Disk::open(layers(files.layers), files.top.map(File::from))?;
            let (disk, window) =
                virtio(vm, MMIO_DEVICES + number, Block::new(disk, &format!("disk{number}")))?;
            disks.push(disk);
            windows.push(window);
        }
        let log = ConsoleLog::new(Some(console.into())).map_err(Error::host("opening the console log"))?;
        let serial = shared(Serial::new(log, Arc::new(Line { vm: vm.clone(), gsi: layout::SERIAL_GSI })));
        let power = shared(Power::new().map_err(Error::host("creating the power registers"))?);
        let line = Box::new(Line { vm: vm.clone(), gsi: layout::GENERATION_GSI });
        let generation = VmGenId::new(memory, GuestAddress(layout::GENERATION_ID), line)
            .map_err(Error::host("creating the generation ID"))?;
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

    /// How the guest has ended, if it has.
    #[must_use]
    pub fn guest_exit(&self) -> Option<GuestExit> {
        lock(&self.power).guest_exit()
    }

    /// Sets the VM generation ID. [`DeviceManager::resume`] notifies the guest.
    pub fn set_generation(&self, generation: [u8; 16]) -> Result<()> {
        lock(&self.generation).set(generation).map_err(Error::host("writing the generation ID"))
    }

    /// The bus on which vCPUs access the devices.
    #[must_use]
    pub fn bus(&self) -> Arc<Bus> {
        self.bus.clone()
    }

    /// Descriptors to poll, each with the index of its device.
    #[must_use]
    pub fn events(&self) -> Vec<(usize, OwnedFd)> {
        let clone = |device: &Shared| lock(device).events().and_then(|fd| fd.try_clone_to_owned().ok());
        self.devices.iter().enumerate().filter_map(|(i, device)| Some((i, clone(device)?))).collect()
    }

    /// Lets a device do what its descriptor is ready for.
    pub fn process(&self, device: usize) {
        if let Some(device) = self.devices.get(device) {
            lock(device).process();
        }
    }

    /// Pauses all devices, with nothing in flight. On error the devices that paused resume.
    pub fn pause(&self, deadline: Instant) -> Result<()> {
        for (done, device) in self.devices.iter().enumerate() {
            let paused = lock(device).pause(deadline);
            if let Err(error) = paused {
                for device in self.devices.iter().take(done) {
                    let _ = lock(device).resume();
                }
                return Err(Error::Host("a device does not pause", error));
            }
        }
        Ok(())
    }

    /// Resumes all devices.
    pub fn resume(&self) -> Result<()> {
        for device in &self.devices {
            lock(device).resume().map_err(Error::host("a device does not resume"))?;
        }
        Ok(())
    }

    /// Saves the state of each device.
    pub fn save(&self) -> Result<Vec<State>> {
        self.devices.iter().map(|device| Ok(lock(device).save()?)).collect()
    }

    /// Restores the state of each device. All of them must be new.
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

    /// Number of disks, the root disk included.
    #[must_use]
    pub fn disks(&self) -> usize {
        self.disks.len()
    }

    /// Calls `what` with the disk of this number. Disk 0 is the root disk.
    pub fn with_disk<T>(&self, number: usize, what: impl FnOnce(&mut Disk) -> T) -> Result<T> {
        let disk = self.disks.get(number);
        let disk = disk.ok_or_else(|| Error::Invalid(format!("the machine has no disk {number}")))?;
        Ok(what(lock(disk).device_mut().disk_mut()))
    }
}

/// Number of MMIO devices of a machine with these devices.
pub fn mmio_devices(devices: &Devices) -> Result<usize> {
    match devices.disks.len() {
        count @ 0..=MAX_DISKS => Ok(MMIO_DEVICES + count),
        count => Err(Error::Invalid(format!(
            "a machine has at most {MAX_DISKS} disks besides its root disk, not {count}"
        ))),
    }
}

fn shared<D>(device: D) -> Arc<Mutex<D>> {
    Arc::new(Mutex::new(device))
}

/// Puts a device on its transport. Queue notifications signal events instead of causing exits.
fn virtio<D: VirtioDevice + 'static>(
    vm: &Vm,
    number: usize,
    device: D,
) -> Result<(Arc<Mutex<Mmio<D>>>, MmioDevice)> {
    let MmioWindow { base, gsi } =
        layout::mmio_window(number).ok_or(Error::Invalid("too many devices".into()))?;
    let line = Box::new(Line { vm: vm.clone(), gsi });
    let device = Mmio::new(device, vm.ram().memory().clone(), line);
    let device = device.map_err(Error::host("creating a device"))?;
    for (queue, event) in (0..).zip(device.queue_events()) {
        vm.notify(event.as_fd(), base + NOTIFY, queue)?;
    }
    let interrupt = device.interrupt_status();
    let device = shared(device);
    Ok((device.clone(), MmioDevice { device, interrupt }))
}

struct Line {
    vm: Vm,
    gsi: u32,
}

impl Interrupt for Line {
    fn raise(&self) -> io::Result<()> {
        self.vm.pulse(self.gsi).map_err(io::Error::other)
    }
}

/// Guest memory that the balloon gives back to the host.
struct Ram(GuestRam);

impl Discard for Ram {
    fn discard(&self, start: GuestAddress, bytes: u64) -> io::Result<()> {
        self.0.discard(start.0, bytes).map(|_| ())
    }
}

struct MmioDevice {
    device: Shared,
    /// Served without the lock of the device: an interrupt handler must not wait for I/O of the
    /// event loop.
    interrupt: Arc<InterruptStatus>,
}

/// I/O ports of a device.
struct Ports {
    first: u16,
    last: u16,
    /// Offset of the first port in the registers of the device.
    offset: u64,
    device: Shared,
}

/// Finds the device of an access. As on a real bus, other addresses read as ones and ignore writes.
pub struct Bus {
    windows: Vec<MmioDevice>,
    ports: Vec<Ports>,
}

impl Bus {
    fn at_address(&self, address: u64, len: usize) -> Option<(&MmioDevice, u64)> {
        let (device, offset) = layout::device_at(address)?;
        // An access that reaches into the next window has no device.
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

/// Ignores poisoning: a panic ends the process.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
