//! Freeze: the monitor forks itself.
//!
//! ```text
//!   node      an empty top layer is made; what the guest wrote to the old one is flushed
//!   monitor   parks its vCPUs, forks a zygote, continues with the new top
//!   node      the old top becomes a base file, as a copy that shares its blocks: the monitor can still write the
//!             file that it has open
//! ```
//!
//! No memory is written. If the node dies at any point of a freeze, adopting the machine repairs
//! it: the record names the top that was about to be switched to, and the machine knows how many
//! layers it has.

use super::{
    chain,
    control::{ANSWER, Control, about, failed, note, unexpected},
    fds::new_top,
    frozen::KvmFrozen,
    monitor::{Monitor, stderr_pipe},
    running::{KvmVm, Record, reconcile},
};
use crate::{
    EngineError, FreezeReport, Image, Result,
    files::BASE_FILE,
    fsutil::link,
    layers::{layer_path, link_layers},
    process::blocking,
};
use keiki_control::{Client, Reply, Request, Role, Stage};
use keiki_snapshot::MEMORY_FILE;
use keiki_sys::stopwatch::Stopwatch;
use std::{fs::File, sync::Arc, time::Duration};

/// Freezes the machine into `image`.
pub(super) async fn freeze(
    vm: &Arc<KvmVm>,
    record: &mut Record,
    image: &Image,
) -> Result<(KvmFrozen, FreezeReport)> {
    try_freeze(vm, record, image).await.map_err(about(&image.dir))
}

async fn try_freeze(
    vm: &Arc<KvmVm>,
    record: &mut Record,
    image: &Image,
) -> Result<(KvmFrozen, FreezeReport)> {
    let mut watch = Stopwatch::start();
    // A freeze whose outcome is not known would be overwritten, and with it a layer forgotten.
    reconcile(vm, record).await;
    if record.next_top.is_some() || record.engine.unsure {
        return Err(EngineError::Monitor("does not report which layers its disk has".into()));
    }
    chain::wait_short_enough(vm, record).await?;
    let top = prepare(vm, record).await?;
    let (client, theirs) = Client::pair().map_err(failed)?;
    let monitor = &vm.backend.monitor;
    // Admitted before it is created: in the worst case it keeps every page that the machine
    // rewrites.
    let member = monitor.lineage.admit(&image.dir, image.shape.memory_mib);
    watch.lap("prepare");
    let (stderr, their_stderr) = stderr_pipe()?;
    let files = vec![(Role::Top, top.into()), (Role::Control, theirs), their_stderr];
    let answer = monitor.control.ask(Request::Freeze, files, ANSWER).await?;
    let Reply::Frozen(report) = answer.reply else { return Err(unexpected("Freeze")) };
    record.promote();
    record.save(&vm.paths)?;
    watch.lap("freeze");
    note(&mut watch, &report.steps);
    let control = Control::over(client);
    let (zygote, hello) = Monitor::forked(report.pid, control, member, Stage::Zygote, stderr).await?;
    let (from, dir, layers) = (vm.paths.dir.clone(), image.dir.clone(), record.layers.clone());
    let disk_mib = vm.shape.disk_mib;
    let layers = blocking(move || {
        link(&from.join(MEMORY_FILE), &dir.join(BASE_FILE))?;
        link_layers(&from, &dir, &layers, disk_mib)
    })
    .await?;
    watch.lap("layers");
    let frozen = KvmFrozen::fresh(&vm.host, image.clone(), layers, zygote, hello.generation);
    chain::shorten(vm, record);
    let vcpu_pause = Duration::from_nanos(report.vcpu_pause_ns);
    Ok((frozen, FreezeReport { vcpu_pause, steps: watch.into_steps() }))
}

/// What is done before the vCPUs stop: makes the new top, and flushes what the pause would have to
/// flush otherwise.
async fn prepare(vm: &KvmVm, record: &mut Record) -> Result<File> {
    let (host, dir) = (Arc::clone(&vm.host), vm.paths.dir.clone());
    let (old, disk_mib) = (layer_path(&dir, &record.top), vm.shape.disk_mib);
    let (next, file) = blocking(move || {
        let made = new_top(&host.config.common, &dir, disk_mib)?;
        File::open(&old).and_then(|file| file.sync_data()).map_err(EngineError::at("flush", &old))?;
        Ok(made)
    })
    .await?;
    record.next_top = Some(next);
    record.save(&vm.paths)?;
    Ok(file)
}
