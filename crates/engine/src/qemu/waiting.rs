//! A monitor started ahead: RAM mapped from the image (privately, no page of it touched), an empty top layer without
//! backing, sockets. It waits for a device state.

use super::{
    args::{Launch, TOP_NODE},
    host::Host,
    jail,
    monitor::Monitor,
    running::{QemuPart, Record},
};
use crate::{
    EngineError, Image, Result, VmPaths,
    files::take_memory,
    layers::{layer_path, make_layers_dir, make_top, new_name},
    process::blocking,
    users::User,
};
use keiki_snapshot::{Format, MEMORY_FILE};
use std::{path::Path, sync::Arc};

/// A monitor that waits for a state.
pub(crate) struct WaitingVm {
    pub(super) record: Record,
    pub(super) monitor: Monitor,
}

impl WaitingVm {
    /// After an error the caller clears the paths.
    pub(super) async fn start(host: &Arc<Host>, image: &Image, paths: &VmPaths) -> Result<Self> {
        let user = jail::user(host, paths)?;
        let id = user.as_ref().map(User::id);
        let top = new_name(Format::Qcow2);
        let path = layer_path(&paths.dir, &top);
        let memory = paths.dir.join(MEMORY_FILE);
        let job = (Arc::clone(host), image.clone(), paths.dir.clone(), path, memory);
        blocking(move || {
            let (host, image, dir, path, memory) = job;
            make_layers_dir(&dir)?;
            take_memory(&image, &memory)?;
            make_top(&host.config.common, image.shape.disk_mib, &path, id)
        })
        .await?;
        let launch = Launch { shape: image.shape, paths, user: id, top: &top, boot: None, tsc_khz: None };
        let monitor = Monitor::start(host, &launch, user).await?;
        let part = QemuPart { top_node: TOP_NODE.into() };
        let mut record = Record::new(monitor.process(), id, image.shape, Vec::new(), top, part);
        record.waiting = true;
        record.save(paths)?;
        Ok(Self { record, monitor })
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.monitor.has_ended().is_none()
    }

    pub(crate) fn kill(&self, dir: &Path) -> Result<()> {
        self.monitor.process().kill().map_err(EngineError::at("end the monitor of", dir))
    }

    /// Kills it and waits until it is gone.
    pub(crate) async fn end(&self) -> Result<()> {
        self.monitor.kill().await
    }
}
