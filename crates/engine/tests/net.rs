//! A guest's network device at a tap in a namespace of its own.

mod guest;

use anyhow::{Result, ensure};
use guest::{Guest, lab};
use keiki_engine::VmPaths;
use keiki_protocol::net::{GATEWAY, GATEWAY_MAC, GUEST, PREFIX, TAP};
use std::{path::PathBuf, process::Command};

/// A namespace with a tap, removed at the end.
struct Slot(String);

impl Slot {
    fn new(index: u32) -> Result<Self> {
        let slot = Self(format!("keiki-engine-{}-{index}", std::process::id()));
        ip(&["netns", "add", &slot.0])?;
        ip(&["-n", &slot.0, "tuntap", "add", TAP, "mode", "tap"])?;
        ip(&["-n", &slot.0, "link", "set", TAP, "address", GATEWAY_MAC])?;
        ip(&["-n", &slot.0, "addr", "add", &format!("{GATEWAY}/{PREFIX}"), "dev", TAP])?;
        ip(&["-n", &slot.0, "link", "set", TAP, "up"])?;
        Ok(slot)
    }

    fn paths(&self, paths: VmPaths) -> VmPaths {
        VmPaths { netns: Some(PathBuf::from("/run/netns").join(&self.0)), ..paths }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Err(error) = ip(&["netns", "del", &self.0]) {
            eprintln!("{error}");
        }
    }
}

fn ip(args: &[&str]) -> Result<()> {
    let status = Command::new("ip").args(args).status()?;
    ensure!(status.success(), "ip {args:?} failed");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn parent_and_child_have_the_same_address_in_different_namespaces() -> Result<()> {
    let Some(lab) = lab()? else { return Ok(()) };
    if !keiki_testing::is_root() {
        return Ok(());
    }
    let (one, two) = (Slot::new(1)?, Slot::new(2)?);
    let machine = lab.engine.boot(&lab.spec(), one.paths(lab.paths()?)).await?;
    let mut parent = Guest::connect(machine).await?;
    parent.sh(&format!("ip addr add {GUEST}/{PREFIX} dev eth0; ip link set eth0 up; sleep 0.3")).await?;
    let ping = format!("ping -c 2 -W 2 {GATEWAY} > /dev/null && echo pong");
    assert_eq!(parent.sh(&ping).await?, "pong");
    let (frozen, _) = lab.freeze(parent.machine.as_ref()).await?;
    let prepared = lab.engine.prepare(frozen.image(), two.paths(lab.paths()?)).await?;
    let (machine, _) = frozen.thaw(prepared).await?;
    let mut child = Guest::connect(machine).await?;
    assert_eq!(child.sh(&ping).await?, "pong");
    parent.machine.stop().await?;
    assert_eq!(child.sh(&ping).await?, "pong");
    child.machine.stop().await?;
    Ok(())
}
