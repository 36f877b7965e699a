//! Templates: the built-in code interpreter, a user's template, and the examples that use them.

use crate::{World, node::Places, patience, sandbox::Sandbox};
use anyhow::{Context, Result, ensure};
use keiki_client::Client;
use keiki_types::api::{BuildTemplate, CreateSandbox, ExecRequest};
use std::{os::unix::fs::MetadataExt, path::Path, sync::Arc, time::Duration};

/// Larger than the disk of any built-in template.
const MOST_BYTES: u64 = 700_000_000;

/// A user's template.
const OWN: &str = include_str!("../../templates/own.toml");

/// The template of an example.
const PREFORK: &str = include_str!("../../../examples/prefork/prefork.toml");

/// The template of a machine with services.
const SERVICES: &str = include_str!("../../templates/services.toml");

/// The directory of the tests' own templates.
pub fn own(places: &Places) -> Result<String> {
    places.file("templates/own.toml", OWN)?;
    places.file("templates/prefork.toml", PREFORK)?;
    places.file("templates/services.toml", SERVICES)?;
    let broken = places.file("templates/broken.toml", "shape = 3")?;
    Ok(broken.trim_end_matches("/broken.toml").to_owned())
}

/// Builds it, unless it exists.
pub async fn build(client: &Client, request: &BuildTemplate) -> Result<()> {
    let mut build = client.build_template(request).await?;
    while build.ended_at.is_empty() {
        tokio::time::sleep(Duration::from_millis(200)).await;
        build = client.build(&build.id).await?;
    }
    ensure!(build.status == "done", "{} could not be built: {}", build.name, build.error);
    Ok(())
}

/// Size of a template's root disk.
fn root_disk(template: &Path) -> Result<u64> {
    let mut disks = Vec::new();
    let mut waiting = vec![template.to_owned()];
    while let Some(dir) = waiting.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let path = entry?.path();
            if path.is_dir() {
                waiting.push(path);
            } else if path.extension().is_some_and(|extension| extension == "raw") {
                disks.push(std::fs::metadata(&path)?.blocks() * 512);
            }
        }
    }
    ensure!(disks.len() == 1, "{} disks below {}", disks.len(), template.display());
    Ok(disks[0])
}

/// A sandbox of a built template.
pub async fn create(client: &Client, template: &str) -> Result<Sandbox> {
    let request = CreateSandbox { template: Some(template.into()), ..CreateSandbox::default() };
    Ok(Sandbox { client: client.clone(), id: client.create(&request).await?.id })
}

pub async fn a_code_interpreter_has_its_imports_done(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let name = "code-interpreter";
    build(client, &BuildTemplate { name: name.into(), ..BuildTemplate::default() }).await?;
    let disk = root_disk(&world.node.data.join("store/templates").join(name))?;
    ensure!(disk <= MOST_BYTES, "its disk takes {disk} bytes");

    let one = create(client, name).await?;
    ensure!(
        one.sh("command -v python; command -v pip").await? == "/opt/venv/bin/python\n/opt/venv/bin/pip",
        "not first on the path"
    );
    let code = "import sys, pandas, sklearn.linear_model; print(len(sys.modules) > 500, sys.argv[1:])";
    let run = ExecRequest {
        argv: Some(["warm-python", "-c", code, "a b"].map(String::from).to_vec()),
        user: Some("nobody".into()),
        ..ExecRequest::default()
    };
    let begun = std::time::Instant::now();
    let done = client.exec(one.id, &run).await?;
    ensure!(done.stdout == "True ['a b']\n", "{}{}", done.stdout, done.stderr);
    let warm = begun.elapsed();
    let begun = std::time::Instant::now();
    one.sh("python -c 'import pandas'").await?;
    let cold = begun.elapsed();
    // In an emulated machine the pages of a copy cost more than the imports.
    ensure!(warm * 2 < cold * patience(), "{warm:?} with all of it imported, {cold:?} for one import");

    // Plain `python` reads nothing from the disk either: what it imports is in the baked memory.
    let fresh = create(client, name).await?;
    let imports = "import numpy, pandas, matplotlib.pyplot, sklearn.linear_model, requests";
    let read = async |first: &str| -> Result<u64> {
        let line = format!(
            "{first}; set -- $(cat /sys/block/vda/stat); before=$3; python -c '{imports}' && set -- $(cat /sys/block/vda/stat) && echo $(($3 - before))"
        );
        Ok(fresh.sh(&line).await?.parse::<u64>()? * 512)
    };
    let (warm, cold) = (read("true").await?, read("sync; echo 3 >/proc/sys/vm/drop_caches").await?);
    println!("        importing everything reads {warm} bytes of the disk, {cold} with nothing in memory");
    ensure!(cold > 20 << 20 && warm * 20 < cold, "{warm} bytes are read, {cold} with nothing in memory");
    fresh.kill().await?;

    // The environment of a run: user, streams, directory, signals, exit.
    ensure!(
        one.sh("su nobody -s /bin/sh -c 'warm-python -c \"import os; print(os.getuid())\"'").await?
            == "65534",
        "user"
    );
    ensure!(
        one.sh("cd /var && echo 'import os; print(os.getcwd())' | X=1 warm-python").await? == "/var",
        "directory"
    );
    ensure!(one.exec("warm-python -c 'raise SystemExit(7)'").await?.exit_code == 7, "exit code");
    ensure!(
        one.exec("timeout 1 warm-python -c 'import time; time.sleep(7777)'").await?.exit_code == 124,
        "signal"
    );
    ensure!(one.exec("pgrep -f '777[7]'").await?.exit_code != 0, "a run outlived its caller");
    one.sh("pip --version && cd /tmp && su nobody -s /bin/sh -c 'pip --version && test -w /opt/venv/lib/python3*/site-packages'").await?;

    // Copies of one waiting process have different random state.
    let two = create(client, name).await?;
    let draw = "warm-python -c 'import random, numpy; print(random.random(), numpy.random.rand())'";
    let drawn = [one.sh(draw).await?, one.sh(draw).await?, two.sh(draw).await?];
    let all: std::collections::BTreeSet<&str> = drawn.iter().flat_map(|line| line.split(' ')).collect();
    ensure!(all.len() == 6, "{drawn:?}");
    Ok(())
}

pub async fn a_template_of_ones_own_is_a_file(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let refused =
        client.build_template(&BuildTemplate { name: "broken".into(), ..BuildTemplate::default() }).await;
    super::refused(refused, 400, "shape")?;
    let refused =
        client.build_template(&BuildTemplate { name: "nobodys".into(), ..BuildTemplate::default() }).await;
    super::refused(refused, 404, "own")?;
    build(client, &BuildTemplate { name: "own".into(), ..BuildTemplate::default() }).await?;
    let own = create(client, "own").await?;
    ensure!(
        own.sh("hello; echo $GREETING; cat /run/warm").await? == "hello\nto you\nwarm",
        "not as its file says"
    );
    // A login shell and another user have the environment too.
    ensure!(own.sh("su - nobody -s /bin/sh -c 'echo $GREETING'").await? == "to you", "not for a login");
    let before = client.template(&"own".parse()?).await?.version;
    build(client, &BuildTemplate { name: "own".into(), ..BuildTemplate::default() }).await?;
    ensure!(client.template(&"own".parse()?).await?.version == before, "baked again for nothing");
    build(client, &BuildTemplate { name: "own".into(), rebake: true, ..BuildTemplate::default() }).await?;
    ensure!(client.template(&"own".parse()?).await?.version != before, "not baked again");
    ensure!(own.sh("hello").await? == "hello", "a machine of the version before");
    client.delete_template(&"own".parse()?).await?;
    Ok(())
}

/// The programs of `examples/`, as users run them.
pub async fn the_examples_run(world: Arc<World>) -> Result<()> {
    // It would be built on first use, but a slow host takes longer than a request waits.
    let name = "code-interpreter".to_owned();
    build(&world.node.client, &BuildTemplate { name, ..BuildTemplate::default() }).await?;
    for name in ["tree_search", "warm_tests", "code_interpreter"] {
        example(&world, name, &format!("examples/{name}.py")).await?;
    }
    Ok(())
}

/// The example with its own template, which is built first.
pub async fn the_prefork_example_runs(world: Arc<World>) -> Result<()> {
    example(&world, "prefork", "examples/prefork/prefork.py").await
}

async fn example(world: &World, name: &str, path: &str) -> Result<()> {
    let run = tokio::process::Command::new("python3")
        .arg(path)
        .env("PYTHONPATH", "sdk/python/src")
        .env("KEIKI_URL", world.node.client.url())
        .kill_on_drop(true)
        .output();
    let done = run.await.context("python3")?;
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{}", out.trim_end().replace('\n', "\n        ").replacen("", "        ", 1));
    ensure!(done.status.success() && out.ends_with(&format!("{name}: ok\n")), "{name}: {out}{err}");
    ensure!(world.node.client.list(false).await?.is_empty(), "{name} left a sandbox");
    Ok(())
}
