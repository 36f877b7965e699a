//! The open descriptors of one copy: preparing a VM costs no process here.

use crate::{
    Common, EngineError, Result, VmPaths, console,
    fsutil::remove_file,
    layers::{layer_path, make_layers_dir, make_top, new_name},
    record::{AGENT, CONTROL, Layer},
    users::chmod_private,
};
use keiki_control::Role;
use keiki_protocol::net::TAP;
use keiki_snapshot::Format;
use keiki_sys::{netns, tap};
use std::{
    fs::{File, Permissions},
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, net::UnixListener},
    },
    path::Path,
};

/// What a monitor receives with a boot or a thaw, except the lower layers.
pub(crate) struct VmFds {
    /// Name of the empty top layer.
    pub(super) top: String,
    files: Vec<(Role, OwnedFd)>,
}

impl VmFds {
    /// Makes and opens them. After an error the caller clears the paths.
    pub(super) fn prepare(common: &Common, paths: &VmPaths, disk_mib: u32) -> Result<Self> {
        if common.first_user.is_some() {
            chmod_private(&paths.dir)?;
            chmod_private(&paths.run_dir)?;
        }
        make_layers_dir(&paths.dir)?;
        let (control, agent) = (paths.run_dir.join(CONTROL), paths.run_dir.join(AGENT));
        remove_file(&control)?;
        remove_file(&agent)?;
        let listener = keiki_control::listen(&control).map_err(super::control::failed)?;
        let agent = UnixListener::bind(&agent).map_err(EngineError::at("listen at", &agent))?;
        let (top, file) = new_top(common, &paths.dir, disk_mib)?;
        let [log, _] = console::files(paths);
        let console = File::options().read(true).write(true).create(true).truncate(false).open(&log);
        let console = console.map_err(EngineError::at("open", &log))?;
        let mut files = vec![
            (Role::Listener, listener),
            (Role::Top, file.into()),
            (Role::Agent, agent.into()),
            (Role::Console, console.into()),
        ];
        if let Some(netns) = &paths.netns {
            let tap = netns::inside(netns, || tap::open_offloading(TAP));
            files.push((Role::Tap, tap.map_err(EngineError::at("open the tap in", netns))?.into()));
        }
        Ok(Self { top, files })
    }

    /// All descriptors, including the lower layers in `dir`.
    pub(super) fn with_layers(self, dir: &Path, layers: &[Layer]) -> Result<Vec<(Role, OwnedFd)>> {
        let Self { mut files, .. } = self;
        files.extend(open_layers(dir, layers)?);
        Ok(files)
    }
}

/// The lower layers, bottom first, for reading.
pub(super) fn open_layers(dir: &Path, layers: &[Layer]) -> Result<Vec<(Role, OwnedFd)>> {
    let open = |layer: &Layer| {
        let path = layer_path(dir, &layer.name);
        let file = File::open(&path).map_err(EngineError::at("open", &path))?;
        Ok((Role::Layer, file.into()))
    };
    layers.iter().map(open).collect()
}

/// An empty top layer. It stays owned by root: the monitor writes it through the descriptor and
/// cannot open it.
pub(super) fn new_top(common: &Common, dir: &Path, disk_mib: u32) -> Result<(String, File)> {
    let name = new_name(Format::Qcow2);
    let path = layer_path(dir, &name);
    make_top(common, disk_mib, &path, None)?;
    let file = File::options().read(true).write(true).open(&path);
    let file = file.map_err(EngineError::at("open", &path))?;
    file.set_permissions(Permissions::from_mode(0o600)).map_err(EngineError::at("close", &path))?;
    Ok((name, file))
}

/// `/dev/kvm`, opened for a monitor.
pub(super) fn kvm() -> Result<(Role, OwnedFd)> {
    let path = Path::new("/dev/kvm");
    let file = File::options().read(true).write(true).open(path).map_err(EngineError::at("open", path))?;
    Ok((Role::Kvm, file.into()))
}
