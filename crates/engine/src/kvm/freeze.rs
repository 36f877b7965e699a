//! Freeze: the monitor forks itself.
//!
//! ```text
//!   node      an empty top layer is made; what the guest wrote to the old one is flushed
//!   monitor   parks its vCPUs, forks a zygote, goes on with the new top
//!   node      the old top becomes a base file, as a copy that shares its blocks: the monitor can still write the
//!             file that it has open
//! ```
//!
//! Memory is written nowhere. A crash of ours anywhere in it is mended by whoever adopts the machine: the record
//! names the top that was about to be switched to, and the machine knows how many layers it has.

use super::{
    control::{Control, failed},
    frozen::{BASE, KvmFrozen},
    machine::{Running, expect},
    monitor::{Monitor, complaints},
};
use crate::{
    EngineError, FreezeReport, Image, Result,
    files::clear_image,
    layers::{layer_path, link_layers},
    process::{blocking, remove_file},
    record::{Layer, Record},
    steps::Stopwatch,
};
use keiki_control::{Client, Reply, Request, Role, Stage};
use keiki_snapshot::{Format, MEMORY_FILE};
use std::{fs, fs::File, path::Path, sync::Arc, time::Duration};

/// Freezes the machine into `image`. On error the image's directory is empty and the machine goes on.
pub(super) async fn freeze(machine: &Arc<Running>, image: Image) -> Result<(KvmFrozen, FreezeReport)> {
    let mut record = machine.record.lock().await;
    if image.shape != machine.shape {
        return Err(EngineError::Monitor("has another shape than the image".into()));
    }
    let frozen = try_freeze(machine, &mut record, &image).await;
    if frozen.is_err() {
        settle(machine, &mut record).await;
        let dir = image.dir.clone();
        blocking(move || {
            remove_file(&dir.join(BASE))?;
            clear_image(&dir)
        })
        .await?;
    }
    frozen.map_err(super::control::about(&image.dir))
}

async fn try_freeze(
    machine: &Arc<Running>,
    record: &mut Record,
    image: &Image,
) -> Result<(KvmFrozen, FreezeReport)> {
    let mut watch = Stopwatch::start();
    // One whose outcome is not known would be overwritten, and with it a layer forgotten.
    settle(machine, record).await;
    if record.next_top.is_some() || record.unsure {
        return Err(EngineError::Monitor("does not say which layers its disk has".into()));
    }
    super::chain::settle(machine, record).await?;
    let top = prepare(machine, record).await?;
    let (client, theirs) = Client::pair().map_err(failed)?;
    // Admitted before it is made: at worst it keeps every page that the machine rewrites.
    let member = machine.monitor.lineage.admit(&image.dir, image.shape.memory_mib);
    watch.step("prepare");
    let (complaints, stderr) = complaints()?;
    let files = vec![(Role::Top, top.into()), (Role::Control, theirs), stderr];
    let (report, _) = expect(&machine.monitor.control, Request::Freeze, files, |reply| match reply {
        Reply::Frozen(frozen) => Some(frozen),
        _ => None,
    })
    .await?;
    promote(record);
    record.save(&machine.paths)?;
    watch.step("freeze");
    super::note(&mut watch, &report.steps);
    let control = Control::over(client);
    let (zygote, hello) = Monitor::forked(report.pid, control, member, Stage::Zygote, complaints).await?;
    let (from, dir, layers) = (machine.paths.dir.clone(), image.dir.clone(), record.layers.clone());
    let disk_mib = machine.shape.disk_mib;
    let layers = blocking(move || {
        link(&from.join(MEMORY_FILE), &dir.join(BASE))?;
        link_layers(&from, &dir, &layers, disk_mib)
    })
    .await?;
    watch.step("layers");
    let frozen = KvmFrozen::fresh(&machine.host, image.clone(), layers, zygote, hello.generation);
    super::chain::shorten(machine, record);
    let pause = Duration::from_nanos(report.vcpu_pause_ns);
    Ok((frozen, FreezeReport { vcpu_pause: pause, steps: watch.done() }))
}

/// What is done before the stop: the new top, and what the pause would have to flush otherwise.
async fn prepare(machine: &Running, record: &mut Record) -> Result<File> {
    let (host, dir) = (Arc::clone(&machine.host), machine.paths.dir.clone());
    let (old, disk_mib) = (layer_path(&dir, &record.top), machine.shape.disk_mib);
    let (next, file) = blocking(move || {
        let made = super::fds::new_top(&host, &dir, disk_mib)?;
        File::open(&old).and_then(|file| file.sync_data()).map_err(EngineError::at("flush", &old))?;
        Ok(made)
    })
    .await?;
    record.next_top = Some(next);
    record.save(&machine.paths)?;
    Ok(file)
}

/// The disk has switched: the old top is a lower layer now.
fn promote(record: &mut Record) {
    let Some(next) = record.next_top.take() else { return };
    let name = std::mem::replace(&mut record.top, next);
    record.layers.push(Layer { name, format: Format::Qcow2 });
}

/// Finds out whether a freeze that failed had switched the disk, and makes the record say so. The number of layers tells,
/// so machine and record must agree on the others first.
pub(super) async fn settle(machine: &Running, record: &mut Record) {
    if let Err(error) = super::chain::insist(machine, record).await {
        return tracing::debug!(%error, "the layers of a disk are not known");
    }
    if record.next_top.is_none() {
        return;
    }
    match machine.monitor.control.hello().await {
        Ok((hello, _)) if hello.layers as usize > record.layers.len() => promote(record),
        Ok(_) => {
            let next = record.next_top.take().unwrap_or_default();
            // A file that stays is removed with the machine.
            if let Err(error) = remove_file(&layer_path(&machine.paths.dir, &next)) {
                tracing::debug!(%error, "after a failed freeze");
            }
        }
        // The next one asks again, or the machine has ended.
        Err(error) => tracing::debug!(%error, "after a failed freeze"),
    }
    if let Err(error) = record.save(&machine.paths) {
        tracing::warn!(%error, "after a failed freeze");
    }
}

/// Another name for a base file.
pub(super) fn link(from: &Path, to: &Path) -> Result<()> {
    fs::hard_link(from, to).map_err(EngineError::at("link", to))
}
