//! A first boot.

use super::{
    args::{Launch, TOP_NODE},
    host::Host,
    jail,
    monitor::Monitor,
    running::{QemuPart, QemuVm, Record, assemble},
};
use crate::{
    BootSpec, Result, VmPaths,
    common::tsc_khz,
    files::make_memory,
    layers::{layer_path, make_layers_dir, make_top, new_name, take_disk},
    process::blocking,
    record::Layer,
    users::{User, chmod_readable},
};
use keiki_snapshot::Format;
use std::sync::Arc;

/// After an error the caller clears the paths.
pub(super) async fn boot(host: &Arc<Host>, spec: &BootSpec, paths: &VmPaths) -> Result<Arc<QemuVm>> {
    let user = jail::user(host, paths)?;
    let id = user.as_ref().map(User::id);
    let (bottom, top) = (new_name(Format::Raw), new_name(Format::Qcow2));
    let bottom_path = layer_path(&paths.dir, &bottom);
    let top_path = layer_path(&paths.dir, &top);
    let job = (Arc::clone(host), spec.clone(), paths.dir.clone(), bottom_path, top_path);
    blocking(move || {
        let (host, spec, dir, bottom, top) = job;
        make_layers_dir(&dir)?;
        make_memory(&dir, spec.shape)?;
        take_disk(&spec.disk, &bottom)?;
        if id.is_some() {
            chmod_readable(&bottom)?;
        }
        make_top(&host.config.common, spec.shape.disk_mib, &top, id)
    })
    .await?;
    let boot = Some((spec, bottom.as_str()));
    let tsc_khz = tsc_khz().await;
    let launch = Launch { shape: spec.shape, paths, user: id, top: &top, boot, tsc_khz };
    let monitor = Monitor::start(host, &launch, user).await?;
    let layers = vec![Layer { name: bottom, format: Format::Raw }];
    let part = QemuPart { top_node: TOP_NODE.into() };
    let record = Record::new(monitor.process(), id, spec.shape, layers, top, part);
    match assemble(host, monitor, paths, record).await {
        Ok(vm) => Ok(vm),
        Err((monitor, error)) => {
            monitor.kill().await?;
            Err(error)
        }
    }
}
