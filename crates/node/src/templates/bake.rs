//! Baking: one cold boot, frozen when its guest is ready, so that every later create is a restore.

use super::Building;
use crate::{
    daemon::Inner,
    error::{Error, Result},
    fleet::{Unreleased, with_console},
    freeze::{After, freeze},
    guest::{Gate, GuestLink, Secrets, plain, refusal},
    records::TemplateRecord,
    store::tree_bytes,
    timings::{ms, timings},
};
use anyhow::Context;
use keiki_engine::{BootSpec, Machine};
use keiki_image::TemplateSpec;
use keiki_protocol::guest::{ExecSpec, Identity, InfoRequest, exec_event::Event};
use keiki_sys::stopwatch::Stopwatch;
use keiki_types::{Origin, SandboxId, Shape};
use std::{path::Path, time::Duration};
use time::OffsetDateTime;

/// A cold boot under software emulation takes seconds, not minutes.
const BOOT_LIMIT: Duration = Duration::from_secs(90);
/// One command that a template is warmed with: heavy imports under software emulation take a
/// minute.
const WARM_LIMIT: Duration = Duration::from_secs(600);
/// Run once before the bake: their pages are then in every sandbox's memory from the start.
const WARM: [&str; 4] = [
    "true; ls / >/dev/null; cat /etc/passwd >/dev/null; id >/dev/null; sh -c true",
    "command -v python3 >/dev/null && python3 -c 'import json, os, subprocess, sys, time'; true",
    "command -v git >/dev/null && git --version >/dev/null; true",
    "true",
];
/// The guest's host name while it is baked.
const WARM_NAME: &str = "keiki";
/// After a change of host name and after a command, the agent postpones its own chores for less
/// than this.
const SETTLE: Duration = Duration::from_millis(500);
/// Room for the root disk's contents while it is copied.
const BAKE_DISK_BYTES: u64 = 1 << 30;

/// What is baked.
pub(super) struct Recipe<'a> {
    pub spec: &'a TemplateSpec,
    pub shape: Shape,
    pub version: &'a str,
    pub parts: &'a keiki_image::Template,
}

impl Inner {
    /// Boots the machine once and freezes it into `dir` when its guest is ready.
    pub(super) async fn bake(
        &self,
        recipe: &Recipe<'_>,
        dir: &Path,
        build: &Building,
    ) -> Result<TemplateRecord> {
        let _ticket = self.fleet.admission.admit([recipe.shape])?;
        let _room = self.fleet.reserve_disk((u64::from(recipe.shape.memory_mib) << 20) + BAKE_DISK_BYTES)?;
        let boot = BootSpec {
            shape: recipe.shape,
            kernel: recipe.parts.kernel.bzimage.clone(),
            initrd: recipe.parts.initramfs.clone(),
            disk: recipe.parts.rootfs.raw.clone(),
            cmdline: String::new(),
        };
        build.say("bake: cold boot");
        let mut watch = Stopwatch::start();
        let Unreleased { id, machine, slot } = self.fleet.boot(SandboxId::new(), &boot).await?;
        let record = match self.ripen(machine.as_ref(), recipe, dir, build, &mut watch).await {
            Ok(record) => Ok(record),
            Err(error) => Err(with_console(error, machine.as_ref()).await),
        };
        self.fleet.end_machine(id, machine.as_ref(), Some(slot)).await;
        watch.lap("stop");
        if record.is_ok() {
            self.journal.done("bake", &recipe.spec.name, &timings(&watch));
        }
        record
    }

    /// From a machine that boots to a snapshot on disk.
    async fn ripen(
        &self,
        machine: &dyn Machine,
        recipe: &Recipe<'_>,
        dir: &Path,
        build: &Building,
        watch: &mut Stopwatch,
    ) -> Result<TemplateRecord> {
        let generation = self.journal.records.generation().await?;
        let gate = self.wait_ready(machine, generation).await?;
        let cold_boot = ms(watch.lap("cold_boot"));
        build.say(&format!("bake: guest ready after {cold_boot:.0} ms; warming"));
        let (guest, kernel) = self.warm(machine, gate, generation, &recipe.spec.warm, build, watch).await?;
        watch.lap("warm");
        let image = self.fleet.image(dir, recipe.shape).await?;
        let taken = freeze(machine, &guest, image, After::Ends, watch).await?;
        build.say("bake: writing the snapshot");
        self.fleet.persist(taken.frozen.as_ref()).await?;
        watch.lap("persist");
        Ok(TemplateRecord {
            name: recipe.spec.name.clone(),
            version: recipe.version.into(),
            shape: recipe.shape,
            created_at: OffsetDateTime::now_utc(),
            size_bytes: tree_bytes(dir),
            description: recipe.spec.description.clone(),
            generation,
            engine: self.fleet.engine.kind(),
            cold_boot_ms: cold_boot,
            kernel,
        })
    }

    /// Waits until its agent answers the hello, which it does once everything else is ready.
    async fn wait_ready(&self, machine: &dyn Machine, generation: u64) -> Result<Gate> {
        let ready = async {
            loop {
                // Until the kernel is up there is no answer: each attempt has a deadline.
                match Gate::open(&machine.agent_socket(), generation).await {
                    Err(Error::Internal { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
                    gate => return gate,
                }
            }
        };
        tokio::select! {
            ready = ready => ready,
            how = machine.ended() => {
                Err(Error::internal("the guest ended while it booted", anyhow::anyhow!(how)))
            }
            () = tokio::time::sleep(BOOT_LIMIT) => {
                let cause = anyhow::anyhow!("its agent did not answer within {} s", BOOT_LIMIT.as_secs());
                Err(Error::internal("the guest did not become ready", cause))
            }
        }
    }

    /// Goes once through everything that a copy goes through between its thaw and its first
    /// command: what is mapped, opened and made by then need not be in each copy. Returns the
    /// second connection, and the release of the kernel.
    async fn warm(
        &self,
        machine: &dyn Machine,
        gate: Gate,
        generation: u64,
        own: &[String],
        build: &Building,
        watch: &mut Stopwatch,
    ) -> Result<(GuestLink, String)> {
        let identity = Identity {
            hostname: WARM_NAME.into(),
            reason: Origin::Create.as_str().into(),
            is_new: true,
            ..Identity::default()
        };
        let guest = gate.release(identity, Secrets::default(), watch).await?;
        let info =
            guest.call(InfoRequest {}, |mut guest, request| async move { guest.info(request).await }).await;
        let info = info.map_err(|status| refusal(&status))?;
        for line in WARM {
            run(&guest, line, BOOT_LIMIT).await?;
        }
        for (index, line) in own.iter().enumerate() {
            build.say(&format!("bake: warming, {} of {}", index + 1, own.len()));
            run(&guest, line, WARM_LIMIT).await?;
        }
        guest.freeze_user().await?;
        guest.thaw_user().await?;
        drop(guest);
        let guest = GuestLink::connect(&machine.agent_socket(), generation).await?;
        run(&guest, WARM[0], BOOT_LIMIT).await?;
        tokio::time::sleep(SETTLE).await;
        Ok((guest, plain(&info.kernel)))
    }
}

async fn run(guest: &GuestLink, line: &str, limit: Duration) -> Result<()> {
    let spec =
        ExecSpec { id: SandboxId::new().to_string(), shell: line.to_owned().into(), ..ExecSpec::default() };
    let run = async {
        let mut events = guest.client().await.exec(spec).await?.into_inner();
        let mut said = Vec::new();
        while let Some(event) = events.message().await? {
            match event.event {
                Some(Event::Exit(exit)) => {
                    let said = String::from_utf8_lossy(&said);
                    anyhow::ensure!(exit.code == 0, "`{line}` exited with {}: {}", exit.code, said.trim());
                    return Ok(());
                }
                Some(Event::Stderr(chunk)) => keep_tail(&mut said, &chunk.data),
                _ => {}
            }
        }
        anyhow::bail!("the guest stopped answering")
    };
    let done =
        tokio::time::timeout(limit, run).await.with_context(|| format!("`{line}` took too long")).flatten();
    done.map_err(|cause| Error::internal("the guest could not be warmed", cause))
}

/// Keeps the end of a command's output.
fn keep_tail(said: &mut Vec<u8>, chunk: &[u8]) {
    const KEPT: usize = 1000;
    said.extend_from_slice(chunk);
    let excess = said.len().saturating_sub(KEPT);
    said.drain(..excess);
}
