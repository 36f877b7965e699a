//! The messages: plain data. A change here raises [`crate::VERSION`].

use crate::role::{MAX_LAYERS, Role, Want};
use keiki_sys::stopwatch::Steps;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What the node asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Request {
    /// Who is there? Answered in every stage with [`Reply::Hello`].
    Hello,
    /// Blank: start a machine from its kernel. Answered with [`Reply::Done`] once its vCPUs run.
    Boot(Boot),
    /// Blank: become a zygote of stored files. Answered with [`Reply::Done`].
    Load(Load),
    /// Machine: park the vCPUs. Parked already: done.
    Pause,
    /// Machine: let the vCPUs run. Running already: done.
    Resume,
    /// Machine: fork a zygote off and go on, on a new top layer. A paused machine stays paused.
    Freeze,
    /// Zygote: fork a machine off. Its vCPUs run when [`Reply::Thawed`] comes, which the copy sends. With a connection
    /// for the copy, it answers there, and the zygote answers [`Reply::Done`] as soon as it has forked.
    Thaw(Thaw),
    /// Zygote: write memory and state. A copy does that, and answers as one that is thawed does.
    Persist,
    /// Machine: read these lower layers, bottom first, instead of those below the top: of each disk that layers are sent for.
    /// Same contents.
    Layers,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    pub vcpus: u32,
    pub memory_mib: u32,
}

/// What differs between users of the monitor in the devices a guest has. Their order never does; further disks come behind
/// all others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Devices {
    /// Of the network device, which is there also without a tap.
    pub mac: [u8; 6],
    /// Name of the console port that the agent opens.
    pub agent_port: String,
    /// Disks besides the root disk, at most [`crate::MAX_DISKS`], in the order in which the guest finds them.
    pub disks: Vec<Disk>,
}

/// A disk besides the root disk. Its files come with [`Role::DiskLayer`] and [`Role::DiskTop`] of its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// It has no top: the guest can only read it.
    pub read_only: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    pub shape: Shape,
    pub cmdline: String,
    pub devices: Devices,
    /// First VM generation ID.
    pub generation: [u8; 16],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Load {
    /// What the state must be of.
    pub shape: Shape,
    /// BLAKE3 that the state file must have.
    pub digest: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thaw {
    /// VM generation ID, of this copy alone.
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
    /// To [`Request::Persist`]. A copy that answers on a connection of its own says [`Reply::Done`] first, as it begins.
    Persisted(Persisted),
    /// Not done, and nothing changed.
    Failed {
        kind: FailureKind,
        /// One sentence for people.
        sentence: String,
    },
}

/// Kinds of failure, as far as the node does something different for each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    /// Not in this stage, or the message is wrong.
    Invalid,
    /// The files are damaged, of another version, or of another processor.
    Refused,
    /// No room on the store.
    NoSpace,
    /// The host: memory, KVM, descriptors.
    Host,
}

/// What a monitor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Started, and nothing in it.
    Blank,
    /// Runs or is paused.
    Machine,
    /// Holds a frozen machine.
    Zygote,
}

/// Who is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub stage: Stage,
    /// A machine whose vCPUs are parked by request.
    pub paused: bool,
    /// How many forks lie between it and the process that was executed.
    pub generation: u32,
    /// Lower layers of its root disk: tells after a crash of the node whether a freeze had come to its end.
    pub layers: u32,
}

/// A part of the work and what it took.
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

/// A zygote was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frozen {
    /// Process id of the zygote.
    pub pid: u32,
    /// From the vCPUs parked to the vCPUs running again.
    pub vcpu_pause_ns: u64,
    pub steps: Vec<Step>,
}

/// A machine was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Thawed {
    /// Process id of the machine.
    pub pid: u32,
    /// That of the request: which of several thaws this is.
    pub generation: [u8; 16],
    pub steps: Vec<Step>,
}

/// Memory and state are written, not flushed: that is left to the node, which has the files too.
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
    /// For messages to people.
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

    /// Which descriptors come with it.
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
        // Which further disks there are is known to the machine; it refuses what is missing or too much.
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
