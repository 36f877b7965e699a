//! A first boot.

use super::{
    control::{Control, generation, shape},
    fds::{VmFds, kvm},
    host::Host,
    monitor::Monitor,
    running::{KvmPart, KvmVm, Record, assemble},
};
use crate::{
    BootSpec, EngineError, Result, VmPaths,
    common::tsc_khz,
    files::make_memory,
    layers::{layer_path, new_name, take_disk},
    process::blocking,
    record::{CONTROL, Layer},
    users::chmod_readable,
};
use keiki_control::{Boot, Cpu, Devices, Request, Role};
use keiki_protocol::{AGENT_PORT, net::GUEST_MAC};
use keiki_snapshot::Format;
use std::{fs::File, os::fd::OwnedFd, sync::Arc};

/// After an error the caller clears the paths.
pub(super) async fn boot(host: &Arc<Host>, spec: &BootSpec, paths: &VmPaths) -> Result<Arc<KvmVm>> {
    let bottom = Layer { name: new_name(Format::Raw), format: Format::Raw };
    let job = (Arc::clone(host), spec.clone(), paths.clone(), bottom.clone());
    let (top, files) = blocking(move || {
        let (host, spec, paths, bottom) = job;
        let fds = VmFds::prepare(&host.config.common, &paths, spec.shape.disk_mib)?;
        make_memory(&paths.dir, spec.shape)?;
        let path = layer_path(&paths.dir, &bottom.name);
        take_disk(&spec.disk, &path)?;
        chmod_readable(&path)?;
        let top = fds.top.clone();
        let mut files = fds.with_layers(&paths.dir, &[bottom])?;
        files.push(kvm()?);
        for (role, path) in [(Role::Kernel, &spec.kernel), (Role::Initrd, &spec.initrd)] {
            files.push((role, OwnedFd::from(File::open(path).map_err(EngineError::at("open", path))?)));
        }
        Ok((top, files))
    })
    .await?;
    let lineage = host.lineages.create()?;
    let mut monitor = Monitor::blank(&host.config.binary, &lineage, spec.shape, &paths.dir).await?;
    let boot = Boot {
        shape: shape(spec.shape),
        cmdline: cmdline(spec, tsc_khz().await),
        cpu: Cpu::Baseline,
        devices: Devices { mac: mac(GUEST_MAC)?, agent_port: AGENT_PORT.into(), disks: Vec::new() },
        generation: generation(),
    };
    if let Err(error) = monitor.control.order(Request::Boot(boot), files).await {
        return Err(monitor.give_up(error).await);
    }
    monitor.control = Control::at(paths.run_dir.join(CONTROL));
    let monitor = monitor.answering(paths).await?;
    let process = &monitor.watched.process;
    let record = Record::new(process, lineage.user(), spec.shape, vec![bottom], top, KvmPart::default());
    assemble(host, monitor, paths, record).await
}

fn mac(text: &str) -> Result<[u8; 6]> {
    let bytes: Vec<_> = text.split(':').filter_map(|part| u8::from_str_radix(part, 16).ok()).collect();
    bytes.try_into().map_err(|_| EngineError::Monitor(format!("cannot have the address {text}")))
}

fn cmdline(spec: &BootSpec, tsc_khz: Option<u64>) -> String {
    let tsc = tsc_khz.map(|khz| format!(" tsc_early_khz={khz}")).unwrap_or_default();
    let quiet = "console=ttyS0 8250.nr_uarts=1 quiet panic=-1 reboot=t pci=off tsc=reliable no_timer_check";
    format!("{quiet}{tsc} {}", spec.cmdline)
}

#[cfg(test)]
mod tests {
    use super::mac;
    use keiki_protocol::net::GUEST_MAC;

    #[test]
    fn the_address_of_the_network_device_is_six_bytes() {
        assert!(mac(GUEST_MAC).is_ok());
        assert!(mac("02:00").is_err() && mac("02:00:00:00:00:zz").is_err());
    }
}
