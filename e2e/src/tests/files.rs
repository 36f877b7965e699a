//! Files.

use super::refused;
use crate::{World, sandbox::Sandbox};
use anyhow::{Result, ensure};
use bytes::Bytes;
use futures::TryStreamExt;
use std::sync::Arc;

async fn read(sandbox: &Sandbox, path: &str) -> Result<Vec<u8>> {
    let reader = sandbox.client.read_file(sandbox.id, path).await?;
    Ok(reader
        .chunks
        .try_fold(Vec::new(), |mut all, chunk| async move {
            all.extend_from_slice(&chunk);
            Ok(all)
        })
        .await?)
}

pub async fn odd_names_and_modes_survive(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    for name in ["plain", "two words", "plus+and%41&x=1", "new\nline", "naïve-日本-😀", "-rf", "quote'\""]
    {
        let path = format!("/root/deep/er/{name}");
        let data: Vec<u8> = (0..=255).chain(name.bytes()).collect();
        client.write_bytes(id, &path, Some(0o751), data.clone()).await?;
        ensure!(read(&sandbox, &path).await? == data, "{name:?} reads back different");
        let entry = client.stat(id, &path).await?;
        ensure!(entry.mode == "0751" && entry.size == data.len() as u64 && !entry.is_dir, "{entry:?}");
        let renamed = format!("{path}.renamed");
        client.rename(id, &path, &renamed).await?;
        let listed = client.list_dir(id, "/root/deep/er").await?;
        ensure!(
            listed.iter().any(|entry| entry.path == renamed && entry.name == format!("{name}.renamed")),
            "{listed:?}"
        );
        client.remove_path(id, &renamed, false).await?;
    }
    client.symlink(id, "/etc/passwd", "/root/link").await?;
    let link = client.stat(id, "/root/link").await?;
    ensure!(link.kind == "symlink" && link.target.as_deref() == Some("/etc/passwd"), "{link:?}");
    client.write_bytes(id, "/root/script", None, Bytes::from_static(b"#!/bin/sh\necho ran\n")).await?;
    client.chmod(id, "/root/script", 0o755).await?;
    ensure!(sandbox.sh("/root/script").await? == "ran", "a script made executable");
    client.write_bytes(id, "/root/script", None, Bytes::from_static(b"#!/bin/sh\necho again\n")).await?;
    ensure!(sandbox.sh("/root/script").await? == "again", "writing again keeps the mode");
    Ok(())
}

pub async fn big_files_round_trip(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let data: Vec<u8> =
        (0..40u32 << 20 >> 2).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    sandbox.client.write_bytes(sandbox.id, "/root/big", None, data.clone()).await?;
    ensure!(sandbox.sh("stat -c %s /root/big").await? == data.len().to_string(), "its size");
    ensure!(read(&sandbox, "/root/big").await? == data, "it reads back different");
    ensure!(read(&sandbox, "/proc/self/status").await?.starts_with(b"Name:"), "a file without a size");
    sandbox.client.write_bytes(sandbox.id, "/root/empty", None, Bytes::new()).await?;
    ensure!(read(&sandbox, "/root/empty").await?.is_empty(), "an empty file");
    Ok(())
}

pub async fn errors_say_what_is_wrong(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    refused(client.stat(id, "/nope").await, 404, "/nope")?;
    refused(client.read_file(id, "/nope").await.map(drop), 404, "/nope")?;
    refused(client.read_file(id, "/root").await.map(drop), 400, "directory")?;
    refused(client.list_dir(id, "/etc/passwd").await, 400, "directory")?;
    refused(client.stat(id, "relative").await, 400, "absolute")?;
    client.write_bytes(id, "/root/d/f", None, Bytes::from_static(b"x")).await?;
    refused(client.remove_path(id, "/root/d", false).await, 409, "empty")?;
    client.remove_path(id, "/root/d", true).await?;
    let nowhere = client.write_bytes(id, "/proc/nope", None, Bytes::from_static(b"x")).await;
    ensure!(
        nowhere.is_err_and(|error| error.status().is_some_and(|status| status < 500)),
        "a file was made in /proc"
    );
    let left = sandbox.sh("ls -A /root").await?;
    ensure!(!left.contains(".keiki") && !left.contains("tmp"), "left behind: {left}");
    Ok(())
}
