//! The messages: plain data. A change here raises [`crate::VERSION`].

use crate::role::{MAX_LAYERS, Role, Want};
use keiki_sys::stopwatch::Steps;
use serde::{Deserialize, Serialize};
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Which stage is the monitor in? Answered in every stage with [`Reply::Hello`].
    Hello,
    /// Blank: start a machine from its kernel. Answered with [`Reply::Done`] once its vCPUs run.
    Boot(Boot),
    /// Blank: become a zygote of stored files. Answered with [`Reply::Done`].
    Load(Load),
    /// Machine: park the vCPUs. No effect if they are parked.
    Pause,
    /// Machine: let the vCPUs run. No effect if they run.
    Resume,
    /// Machine: fork a zygote and continue on a new top layer. A paused machine stays paused.
    Freeze,
    /// Zygote: fork a machine. The copy answers [`Reply::Thawed`] once its vCPUs run. If the
    /// request has a connection for the copy, the copy answers there, and the zygote answers
    /// [`Reply::Done`] as soon as it has forked.
    Thaw(Thaw),
    /// Zygote: write memory and state. A copy does that, and answers like a thawed copy.
    Persist,
    /// Machine: replace the layers below the top, of each disk that layers are sent for. They come
    /// bottom first and have the same contents.
    Layers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub vcpus: u32,
    pub memory_mib: u32,
}

/// The processor that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cpu {
    /// The baseline that many hosts share.
    Baseline,
}

/// What the node chooses about devices. Their order is fixed; additional disks come last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// Address of the network device, which exists even without a tap.
    pub mac: [u8; 6],
    /// Name of the console port that the agent opens.
    pub agent_port: String,
    /// Disks besides the root disk, at most [`crate::MAX_DISKS`], in the order in which the guest
    /// finds them.
    pub disks: Vec<Disk>,
}

/// A disk besides the root disk. Its files come with [`Role::DiskLayer`] and [`Role::DiskTop`] of
/// its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// It has no top layer.
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    pub shape: Shape,
    pub cmdline: String,
    pub cpu: Cpu,
    pub devices: Devices,
    /// First VM generation ID.
    pub generation: [u8; 16],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// The shape that the state must have.
    pub shape: Shape,
    /// BLAKE3 of the state file.
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thaw {
    /// VM generation ID, unique to this copy.
    pub generation: [u8; 16],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Hello`].
    Hello(Hello),
    Done,
    /// To [`Request::Freeze`].
    Frozen(Frozen),
    /// To [`Request::Thaw`].
    Thawed(Thawed),
    /// To [`Request::Persist`]. A copy with its own connection also answers [`Reply::Done`] when it
    /// begins.
    Persisted(Persisted),
    /// No longer sent. It keeps the number of [`Reply::Failed`], for machines of earlier releases.
    Stats,
    /// The request failed and changed nothing.
    Failed {
        kind: FailureKind,
        /// For people.
        sentence: String,
    },
}

/// Kinds of failure that the node treats differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// The message is wrong, or not for this stage.
    Invalid,
    /// The files are damaged, or belong to another version or processor.
    Refused,
    /// The store is full.
    NoSpace,
    /// The host failed: memory, KVM, descriptors.
    Host,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Started, without a machine.
    Blank,
    /// Runs or is paused.
    Machine,
    /// Holds a frozen machine.
    Zygote,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub stage: Stage,
    /// The vCPUs of this machine are parked by request.
    pub paused: bool,
    /// Number of forks since the process that was executed.
    pub generation: u32,
    /// Number of lower layers of the root disk. After a crash of the node it tells whether a freeze
    /// was complete.
    pub layers: u32,
}

/// A step of an operation and the time it took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub name: String,
    pub ns: u64,
}

impl Step {
    #[must_use]
    pub fn list(steps: &Steps) -> Vec<Self> {
        let nanoseconds = |took: &Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        steps.0.iter().map(|(name, took)| Self { name: name.to_string(), ns: nanoseconds(took) }).collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Process id of the zygote.
    pub pid: u32,
    /// Time from the vCPUs parked to the vCPUs running again.
    pub vcpu_pause_ns: u64,
    /// Not used, always 0. Machines of earlier releases send it.
    pub private_bytes: u64,
    pub steps: Vec<Step>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thawed {
    /// Process id of the machine.
    pub pid: u32,
    /// The generation of the request: tells which of several thaws this is.
    pub generation: [u8; 16],
    pub steps: Vec<Step>,
}

/// Memory and state are written, not flushed: the node flushes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Persisted {
    /// Pages written over the base.
    pub pages: u64,
    /// Pages punched out of the base.
    pub zeroed: u64,
    /// Size of the state file.
    pub state_bytes: u64,
    /// BLAKE3 of the state file.
    pub digest: [u8; 32],
}

impl Request {
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Hello => "Hello",
            Self::Boot(_) => "Boot",
            Self::Load(_) => "Load",
            Self::Pause => "Pause",
            Self::Resume => "Resume",
            Self::Freeze => "Freeze",
            Self::Thaw(_) => "Thaw",
            Self::Persist => "Persist",
            Self::Layers => "Layers",
        }
    }

    /// The descriptors that the request must and may have.
    #[must_use]
    pub fn wants(&self) -> Vec<Want> {
        const fn one(role: Role) -> Want {
            Want { role, least: 1, most: 1 }
        }
        const fn maybe(role: Role) -> Want {
            Want { role, least: 0, most: 1 }
        }
        const LAYERS: Want = Want { role: Role::Layer, least: 1, most: MAX_LAYERS };
        const TAP: Want = maybe(Role::Tap);
        // Only the machine knows its additional disks. It refuses missing and extra descriptors.
        let tops = Role::of_disks(Role::DiskTop).map(maybe);
        let layers = Role::of_disks(Role::DiskLayer).map(|role| Want { role, least: 0, most: MAX_LAYERS });
        let mut wants = match self {
            Self::Boot(_) => vec![
                one(Role::Kvm),
                one(Role::Kernel),
                one(Role::Initrd),
                one(Role::Listener),
                LAYERS,
                one(Role::Top),
                TAP,
                one(Role::Agent),
                one(Role::Console),
            ],
            Self::Load(_) => vec![one(Role::Kvm), one(Role::Memory), one(Role::State)],
            Self::Freeze => vec![one(Role::Control), one(Role::Top), maybe(Role::Stderr)],
            Self::Thaw(_) => vec![
                one(Role::Listener),
                LAYERS,
                one(Role::Top),
                TAP,
                one(Role::Agent),
                one(Role::Console),
                maybe(Role::Control),
                maybe(Role::Stderr),
                maybe(Role::Pages),
            ],
            Self::Persist => {
                vec![one(Role::Memory), one(Role::State), one(Role::Pagemap), maybe(Role::Control)]
            }
            Self::Layers => vec![Want { least: 0, ..LAYERS }],
            Self::Hello | Self::Pause | Self::Resume => vec![],
        };
        if matches!(self, Self::Boot(_) | Self::Thaw(_) | Self::Freeze) {
            wants.extend(tops);
        }
        if matches!(self, Self::Boot(_) | Self::Thaw(_) | Self::Layers) {
            wants.extend(layers);
        }
        wants
    }
}
