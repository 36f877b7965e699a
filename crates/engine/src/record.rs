//! What a later process of the node must know to find a machine again: `machine.json`.

use crate::{
    EngineError, Result, VmPaths,
    fsutil::{remove_dir, remove_file},
    process::blocking,
};
use keiki_snapshot::Format;
use keiki_sys::process::Process;
use keiki_types::Shape;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::path::{Path, PathBuf};

/// Version of the schema.
const VERSION: u32 = 1;

/// Sockets in [`VmPaths::run_dir`]: the control socket of `keiki-vmm`.
pub(crate) const CONTROL: &str = "control.sock";
/// QEMU's.
pub(crate) const QMP: &str = "qmp.sock";
/// The agent port.
pub(crate) const AGENT: &str = "agent.sock";
/// The serial console, where the monitor does not log it.
pub(crate) const CONSOLE: &str = "console.sock";
/// Where QEMU writes its device state to, in [`VmPaths::dir`].
pub(crate) const SAVED: &str = "device.state";
/// Where a chain of layers is made shorter, in [`VmPaths::dir`].
pub(crate) const FLAT_DIR: &str = "flat";

/// One layer of a machine's disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layer {
    pub(crate) name: String,
    pub(crate) format: Format,
}

/// A machine as its directory has it. `P` is the engine's part.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record<P> {
    version: u32,
    pub(crate) pid: u32,
    /// Tells the process from a later owner of its number.
    pub(crate) start_time: u64,
    pub(crate) shape: Shape,
    /// Immutable layers, bottom first.
    pub(crate) layers: Vec<Layer>,
    /// The writable layer.
    pub(crate) top: String,
    /// A top that a freeze was about to switch to.
    pub(crate) next_top: Option<String>,
    /// Parked by its user; otherwise an adoption that finds it parked lets it run.
    pub(crate) paused: bool,
    /// A prepared VM: nothing was thawed into it yet.
    pub(crate) waiting: bool,
    /// The user its monitor runs as; none: it is not jailed.
    #[serde(default)]
    pub(crate) user: Option<u32>,
    #[serde(flatten)]
    pub(crate) engine: P,
}

impl<P> Record<P> {
    /// A machine that has just started.
    pub(crate) fn new(
        process: &Process,
        user: Option<u32>,
        shape: Shape,
        layers: Vec<Layer>,
        top: String,
        engine: P,
    ) -> Self {
        Self {
            version: VERSION,
            pid: process.pid(),
            start_time: process.start_time(),
            shape,
            layers,
            top,
            next_top: None,
            paused: false,
            waiting: false,
            user,
            engine,
        }
    }

    /// The disk has switched to its next top: the old one is a lower layer now.
    pub(crate) fn promote(&mut self) {
        let Some(next) = self.next_top.take() else { return };
        let name = std::mem::replace(&mut self.top, next);
        self.layers.push(Layer { name, format: Format::Qcow2 });
    }
}

impl<P: Serialize + DeserializeOwned> Record<P> {
    /// Replaces the record as a whole. Not flushed: a crash of the host ends the machine too.
    pub(crate) fn save(&self, paths: &VmPaths) -> Result<()> {
        let path = path(paths);
        let new = path.with_extension("json.new");
        let text = serde_json::to_vec(self)
            .map_err(std::io::Error::from)
            .map_err(EngineError::at("write", &path))?;
        std::fs::write(&new, text).map_err(EngineError::at("write", &new))?;
        std::fs::rename(&new, &path).map_err(EngineError::at("write", &path))?;
        keiki_sys::failpoint::reach("machine.json");
        Ok(())
    }

    /// None if there is no readable record, and so no machine.
    pub(crate) fn load(paths: &VmPaths) -> Option<Self> {
        let text = std::fs::read(path(paths)).ok()?;
        serde_json::from_slice::<Self>(&text).ok().filter(|record| record.version == VERSION)
    }
}

fn path(paths: &VmPaths) -> PathBuf {
    paths.dir.join("machine.json")
}

/// Makes something with these paths; an error leaves nothing in them.
pub(crate) async fn or_clear<T>(paths: &VmPaths, make: impl Future<Output = Result<T>>) -> Result<T> {
    let made = make.await;
    if made.is_err() {
        let paths = paths.clone();
        blocking(move || clear(&paths)).await?;
    }
    made
}

/// Removes everything that an engine keeps in a machine's directories.
pub(crate) fn clear(paths: &VmPaths) -> Result<()> {
    let record = path(paths);
    let [log, older] = crate::console::files(paths);
    let memory = paths.dir.join(keiki_snapshot::MEMORY_FILE);
    let [state, saved] = [keiki_snapshot::STATE_FILE, SAVED].map(|name| paths.dir.join(name));
    let files: [&Path; 6] = [&record.with_extension("json.new"), &log, &older, &memory, &state, &saved];
    for file in files {
        remove_file(file)?;
    }
    for socket in [CONTROL, QMP, AGENT, CONSOLE] {
        remove_file(&paths.run_dir.join(socket))?;
    }
    remove_dir(&paths.dir.join(FLAT_DIR))?;
    remove_dir(&paths.dir.join(keiki_snapshot::LAYERS_DIR))?;
    crate::cgroup::remove(paths);
    // Last: while it is there, something may be left.
    remove_file(&record)
}

#[cfg(test)]
mod tests {
    use super::Record;
    use crate::{VmPaths, kvm::KvmPart, qemu::QemuPart};
    use std::{error::Error, fs};

    /// As releases before the engine's part wrote them.
    const KVM: &str = r#"{"version":1,"pid":71,"start_time":9000,"shape":{"vcpus":1,"memory_mib":64,"disk_mib":16},
        "layers":[{"name":"a.raw","format":"raw"},{"name":"b.qcow2","format":"qcow2"}],"top":"c.qcow2","top_node":"",
        "next_top":"d.qcow2","unsure":true,"paused":true,"waiting":false,"user":1262026752}"#;
    const QEMU: &str = r#"{"version":1,"pid":71,"start_time":9000,"shape":{"vcpus":1,"memory_mib":64,"disk_mib":16},
        "layers":[],"top":"c.qcow2","top_node":"n28","next_top":null,"unsure":false,"paused":false,"waiting":true}"#;

    #[test]
    fn records_of_earlier_releases_are_read() -> Result<(), Box<dyn Error>> {
        let dir = tempfile::tempdir()?;
        let paths = VmPaths { dir: dir.path().into(), run_dir: dir.path().into(), netns: None };
        let file = dir.path().join("machine.json");
        fs::write(&file, KVM)?;
        let mut kvm = Record::<KvmPart>::load(&paths).ok_or("not read")?;
        assert_eq!((kvm.pid, kvm.engine.unsure, kvm.paused, kvm.user), (71, true, true, Some(1_262_026_752)));
        kvm.promote();
        assert_eq!((kvm.top.as_str(), kvm.layers.len(), &kvm.next_top), ("d.qcow2", 3, &None));
        kvm.save(&paths)?;
        assert_eq!(Record::load(&paths).as_ref(), Some(&kvm));
        // An earlier release reads it, too.
        let written: serde_json::Value = serde_json::from_slice(&fs::read(&file)?)?;
        assert!(written["unsure"] == true && written["waiting"] == false, "{written}");
        // Another engine finds the process in it.
        assert!(Record::<QemuPart>::load(&paths).is_some_and(|record| record.pid == 71));

        fs::write(&file, QEMU)?;
        let qemu = Record::<QemuPart>::load(&paths).ok_or("not read")?;
        assert_eq!((qemu.engine.top_node.as_str(), qemu.waiting, qemu.user), ("n28", true, None));
        qemu.save(&paths)?;
        assert_eq!(Record::load(&paths), Some(qemu));
        fs::write(&file, QEMU.replace(r#""version":1"#, r#""version":2"#))?;
        assert_eq!(Record::<QemuPart>::load(&paths), None);
        Ok(())
    }
}
