//! Guests that mean harm, and snapshots that do.

mod guest;

use anyhow::{Context, Result, bail, ensure};
use guest::{Lab, SHAPE, qemu_lab};
use keiki_engine::Machine;
use keiki_types::Sharing;
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};
use tokio::time::timeout;

/// Longer than anything here should take.
const HANG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_console_flood_fills_nothing() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let mut guest = lab.boot().await?;
    guest.sh("(while :; do dd if=/dev/zero of=/dev/ttyS0 bs=64k count=16; done) >/dev/null 2>&1 &").await?;
    let logs = |machine: &dyn Machine| -> Result<u64> {
        let mut bytes = 0;
        for entry in fs::read_dir(&machine.paths().dir)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with("console.log") {
                bytes += entry.metadata()?.len();
            }
        }
        Ok(bytes)
    };
    let started = Instant::now();
    let mut most = 0;
    while started.elapsed() < Duration::from_secs(6) {
        most = most.max(logs(guest.machine.as_ref())?);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    ensure!(most > 64 << 10, "the guest did not flood: {most} bytes");
    ensure!(most <= 320 << 10, "{most} bytes of console are kept");
    let (frozen, _) = timeout(HANG, lab.freeze(guest.machine.as_ref())).await??;
    let child = timeout(HANG, lab.thaw(frozen.as_ref())).await??;
    ensure!(child.machine.console(1000).await.len() <= 1000);
    child.machine.stop().await?;
    guest.machine.stop().await?;
    Ok(())
}

/// The guest ends while it is frozen: the freeze says so or is whole, and never hangs.
#[tokio::test(flavor = "multi_thread")]
async fn guests_that_die_in_a_freeze_are_reported() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let ends = ["echo b > /proc/sysrq-trigger", "poweroff -f", "echo c > /proc/sysrq-trigger"];
    for (end, after) in ends.into_iter().zip([0.0, 0.05, 0.15]) {
        let mut guest = lab.boot().await?;
        guest.sh(&format!("(sleep {after}; {end}) >/dev/null 2>&1 &")).await?;
        let mut frozen = Vec::new();
        let refused = loop {
            match timeout(HANG, lab.freeze(guest.machine.as_ref()))
                .await
                .with_context(|| format!("{end}: hangs"))?
            {
                Ok((one, _)) => frozen.push(one),
                Err(error) => break error,
            }
            ensure!(frozen.len() < 200, "{end}: it lives on");
        };
        eprintln!("{end}: {} freezes, then: {refused:#}", frozen.len());
        let how = timeout(HANG, guest.machine.ended()).await?;
        ensure!(!how.is_empty());
        guest.machine.stop().await?;
        ensure!(fs::read_dir(&guest.machine.paths().dir)?.count() == 1, "{end}: files are left");
        // What was frozen in time may hold a guest about to end. It starts, or is refused, and goes.
        if let Some(last) = frozen.pop() {
            let prepared = lab.engine.prepare(last.image(), lab.paths()?).await?;
            if let Ok((machine, _)) = timeout(HANG, last.thaw(prepared)).await? {
                machine.stop().await?;
            }
        }
    }
    Ok(())
}

/// A copy of a snapshot whose device state is this, and whose manifest says that it should be.
fn forged(lab: &Lab, good: &Path, state: &[u8]) -> Result<PathBuf> {
    let dir = lab.fresh("forged")?;
    let copied =
        Command::new("cp").args(["-a", "--reflink=always"]).arg(good.join(".")).arg(&dir).status()?;
    ensure!(copied.success());
    fs::write(dir.join("vm.state"), state)?;
    let path = dir.join("manifest.json");
    let mut manifest: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    manifest["state"] =
        serde_json::json!({"bytes": state.len(), "blake3": blake3::hash(state).to_hex().to_string()});
    fs::write(&path, serde_json::to_vec(&manifest)?)?;
    Ok(dir)
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_device_states_are_refused_by_the_monitor() -> Result<()> {
    let Some(lab) = qemu_lab()? else { return Ok(()) };
    let guest = lab.boot().await?;
    let (frozen, _) = lab.freeze(guest.machine.as_ref()).await?;
    frozen.persist().await?;
    guest.machine.stop().await?;
    let good = frozen.image().dir.clone();
    let state = fs::read(good.join("vm.state"))?;
    let noise: Vec<u8> = (1..40_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let cut = state.get(..state.len() / 2).context("too short")?;
    let headed = [state.get(..8).context("too short")?, &noise].concat();
    for (what, forgery) in
        [("nothing", &[][..]), ("noise", &noise), ("a beginning", cut), ("noise behind its head", &headed)]
    {
        let frozen = lab.engine.load(&forged(&lab, &good, forgery)?, Sharing::Node).await?;
        let paths = lab.paths()?;
        let prepared = lab.engine.prepare(frozen.image(), paths.clone()).await?;
        match timeout(HANG, frozen.thaw(prepared)).await.with_context(|| format!("{what}: hangs"))? {
            Ok(_) => bail!("{what}: it was believed"),
            Err(error) => {
                let said = format!("{error:#}");
                eprintln!("{what}: {said}");
                ensure!(
                    said.contains("load of migration failed") || said.contains("device state"),
                    "{what}: {said}"
                );
                ensure!(said.len() < 600 && !said.contains(char::is_control), "{what}: {said:?}");
            }
        }
        ensure!(fs::read_dir(&paths.dir)?.count() == 1, "{what}: files are left");
    }
    // Single bytes: some are free, as values of registers are. None may hang or harm the engine.
    for at in (0..state.len()).step_by(state.len() / 12 + 1) {
        let mut bent = state.clone();
        *bent.get_mut(at).context("too short")? ^= 0xff;
        let frozen = lab.engine.load(&forged(&lab, &good, &bent)?, Sharing::Node).await?;
        let prepared = lab.engine.prepare(frozen.image(), lab.paths()?).await?;
        if let Ok((machine, _)) =
            timeout(HANG, frozen.thaw(prepared)).await.with_context(|| format!("byte {at}: hangs"))?
        {
            machine.stop().await?;
        }
    }
    let frozen = lab.engine.load(&good, Sharing::Node).await?;
    let mut guest = lab.thaw(frozen.as_ref()).await?;
    assert_eq!(guest.sh("echo well").await?, "well");
    guest.machine.stop().await?;
    assert_eq!(frozen.image().shape, SHAPE);
    Ok(())
}
