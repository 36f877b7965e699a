//! Racing requests, and callers that disconnect: clear responses, nothing lost, nothing left.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    patience,
    sandbox::Sandbox,
};
use anyhow::{Context, Result, bail, ensure};
use futures::future::join_all;
use keiki_client::{Client, Error};
use keiki_types::{
    Status, TemplateName,
    api::{BuildTemplate, CreateSandbox, ExecRequest, ForkSandbox, ForkTree},
};
use std::{sync::Arc, time::Duration};

fn shell(line: &str) -> ExecRequest {
    ExecRequest { cmd: Some(line.into()), ..ExecRequest::default() }
}

/// Only errors that the API documents.
fn documented<T>(answer: &keiki_client::Result<T>, statuses: &[u16]) -> Result<()> {
    match answer {
        Err(error) if !error.status().is_some_and(|status| statuses.contains(&status)) => {
            bail!("not one of {statuses:?}: {:?} {error}", error.status())
        }
        _ => Ok(()),
    }
}

pub async fn a_snapshot_deleted_while_it_is_restored(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let parent = Sandbox::create(client).await?;
    parent.sh("echo kept > /dev/shm/x").await?;
    for delay in [0, 20, 60, 120] {
        let snapshot = parent.snapshot().await?;
        let restores = join_all((0..2).map(|_| client.restore(snapshot.id, CreateSandbox::default())));
        let deletion = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            client.delete_snapshot(snapshot.id).await
        };
        let (restored, deleted) = tokio::join!(restores, deletion);
        deleted?;
        for restored in restored {
            documented(&restored, &[404])?;
            if let Ok(view) = restored {
                let sandbox = Sandbox { client: client.clone(), id: view.id };
                ensure!(sandbox.sh("cat /dev/shm/x").await? == "kept", "a restore lost its memory");
                sandbox.kill().await?;
            }
        }
        refused(client.get_snapshot(snapshot.id).await, 404, "no snapshot")?;
    }
    Ok(())
}

pub async fn a_named_request_is_carried_out_once(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("named")).await?;
    node.bake().await?;
    let named = |node: &Node, key: &str| node.client.clone().named(key);
    let two = ForkSandbox { count: Some(2), ..ForkSandbox::default() };
    // Concurrently, and after a caller disconnected: one sandbox.
    let first = named(&node, "create");
    let left = first.clone();
    let leaver = tokio::spawn(async move { left.create(&CreateSandbox::default()).await });
    tokio::time::sleep(Duration::from_millis(20)).await;
    leaver.abort();
    let request = CreateSandbox::default();
    let (one, other) = tokio::join!(first.create(&request), first.create(&request));
    let parent = one?.id;
    ensure!(parent == other?.id, "two sandboxes of one name");
    let children = named(&node, "fork").fork(parent, &two).await?.children;
    let snapshot = named(&node, "snapshot").snapshot(parent).await?;
    ensure!(node.client.list(false).await?.len() == 3, "not one parent and two children");

    // A crash changes nothing.
    node.kill().await?;
    let node = node.restart().await?;
    ensure!(named(&node, "create").create(&request).await?.id == parent, "another parent after a crash");
    let again = named(&node, "fork").fork(parent, &two).await?;
    let ids =
        |children: &[keiki_types::api::Sandbox]| children.iter().map(|child| child.id).collect::<Vec<_>>();
    ensure!(ids(&again.children) == ids(&children), "other children after a crash");
    ensure!(named(&node, "snapshot").snapshot(parent).await?.id == snapshot.id, "another snapshot");
    ensure!(node.client.list(false).await?.len() == 3, "something was made anew");

    // Another request under the same key is rejected; what was deleted stays deleted; a failed
    // request runs again.
    let other = CreateSandbox { ttl_seconds: Some(77), ..CreateSandbox::default() };
    refused(named(&node, "create").create(&other).await, 422, "used for another request")?;
    refused(named(&node, "fork").snapshot(parent).await, 422, "used for another request")?;
    node.client.delete(children[1].id).await?;
    refused(named(&node, "fork").fork(parent, &two).await, 409, "has been deleted since")?;
    let early = CreateSandbox { template: Some("nope".into()), ..CreateSandbox::default() };
    refused(named(&node, "early").create(&early).await, 404, "nope")?;
    ensure!(named(&node, "early").create(&request).await.is_ok(), "a request that failed kept its name");

    // Also when the parent, whose labels the child inherited, is gone.
    let tree = ForkTree { count: 1, ..ForkTree::default() };
    let made = named(&node, "tree").fork_tree(parent, &tree).await?;
    node.client.delete(parent).await?;
    let again = named(&node, "tree").fork_tree(parent, &tree).await?;
    ensure!(again.tree_id == made.tree_id && ids(&again.children) == ids(&made.children), "another tree");
    node.finish().await
}

pub async fn what_ends_under_a_command_says_so(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    let line = shell("sleep 30");
    let after = |verb: &'static str| {
        let (client, id) = (client.clone(), sandbox.id);
        async move {
            tokio::time::sleep(Duration::from_millis(500)).await;
            match verb {
                "hibernate" => client.hibernate(id).await.map(drop),
                _ => client.delete(id).await,
            }
        }
    };
    for (verb, words) in [("hibernate", "was hibernated while"), ("delete", "was deleted while")] {
        let (command, done) = tokio::join!(client.exec(sandbox.id, &line), after(verb));
        done?;
        refused(command, 409, words)?;
    }
    let sandbox = Sandbox::create(client).await?;
    let crash = shell("echo c > /proc/sysrq-trigger; sleep 30");
    refused(client.exec(sandbox.id, &crash).await, 409, "has failed while")
}

pub async fn twenty_commands_wake_it_once(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    sandbox.sh("echo kept > /dev/shm/x").await?;
    client.hibernate(sandbox.id).await?;
    let answers = join_all((0..20).map(|_| sandbox.sh("cat /dev/shm/x"))).await;
    for answer in answers {
        ensure!(answer? == "kept", "after the wake");
    }
    client.hibernate(sandbox.id).await?;
    let line = shell("cat /dev/shm/x");
    let commands = join_all((0..8).map(|_| client.exec(sandbox.id, &line)));
    let deletion = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        sandbox.kill().await
    };
    let (answers, deleted) = tokio::join!(commands, deletion);
    deleted?;
    for answer in answers {
        documented(&answer, &[404, 409])?;
    }
    Ok(())
}

pub async fn verbs_cross_a_deletion(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    for (round, delay) in [0, 60, 150].into_iter().enumerate() {
        let parent = Sandbox::create(client).await?;
        let fork = ForkSandbox { count: Some(2), ..ForkSandbox::default() };
        let deletion = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            client.delete(parent.id).await
        };
        let (forked, snapshot, asleep, deleted) = tokio::join!(
            client.fork(parent.id, &fork),
            client.snapshot(parent.id),
            client.hibernate(parent.id),
            deletion
        );
        deleted?;
        documented(&forked, &[404, 409])?;
        documented(&snapshot, &[404, 409])?;
        documented(&asleep, &[404, 409])?;
        refused(client.sandbox(parent.id).await, 404, "no sandbox")?;
        for child in forked.map(|forked| forked.children).unwrap_or_default() {
            let child = Sandbox { client: client.clone(), id: child.id };
            child.sh("true").await.with_context(|| format!("a child of round {round}"))?;
            child.kill().await?;
        }
    }
    ensure!(client.list(false).await?.is_empty(), "something is left");
    Ok(())
}

pub async fn a_command_ends_with_a_caller_who_leaves(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    for micros in [500, 2_000, 4_000, 8_000, 16_000, 100_000] {
        let left = (0..8).map(|_| async {
            let line = shell("sleep 77");
            let call = sandbox.client.exec(sandbox.id, &line);
            let _ = tokio::time::timeout(Duration::from_micros(micros), call).await;
        });
        join_all(left).await;
    }
    let mut left = String::new();
    for _ in 0..20 * patience() {
        tokio::time::sleep(Duration::from_millis(200)).await;
        left = sandbox.sh("ps axo args | grep -c '[s]leep 77' || true").await?;
        if left == "0" {
            return Ok(());
        }
    }
    bail!("{left} commands run for nobody")
}

pub async fn guest_errors_are_no_failures_of_the_node(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let client = &world.node.client;
    refused(client.read_file(sandbox.id, "/proc/self/mem").await.map(drop), 409, "/proc/self/mem")?;
    sandbox.sh("mknod /tmp/none b 7 99").await?;
    let read = client.read_file(sandbox.id, "/tmp/none").await.map(drop);
    ensure!(read.as_ref().is_err_and(|error| error.status().is_some_and(|s| s < 500)), "{read:?}");
    Ok(())
}

/// A create while the template is being built gets a 503 with Retry-After, and one build serves
/// all.
pub async fn building_is_single_flight(world: Arc<World>) -> Result<()> {
    let node = Node::start(&world.places, Options::named("building").store_gib(3)).await?;
    let done = single_flight(&node).await;
    node.finish().await?;
    done
}

async fn single_flight(node: &Node) -> Result<()> {
    let client = node.client.clone().with_retry_budget(Duration::ZERO);
    let request = CreateSandbox::default();
    for answer in join_all((0..6).map(|_| client.create(&request))).await {
        told_to_wait(answer)?;
    }
    let builds = client.builds().await?;
    ensure!(builds.len() == 1, "{} builds for six creates", builds.len());
    let base: TemplateName = "base".parse()?;
    refused(client.delete_template(&base).await, 409, "is being built")?;
    let wanted = BuildTemplate { name: "base".into(), ..BuildTemplate::default() };
    for joined in join_all((0..3).map(|_| client.build_template(&wanted))).await {
        ensure!(joined?.id == builds[0].id, "another build was begun");
    }
    node.bake().await?;
    ensure!(client.builds().await?.iter().all(|build| build.status == "done"), "a build failed");

    // Deleted while creates use it: each create succeeds or gets a 503, and the next build is
    // complete.
    for delay in [0, 60] {
        let creates = join_all((0..4).map(|_| client.create(&request)));
        let deletion = async {
            tokio::time::sleep(Duration::from_millis(delay)).await;
            client.delete_template(&base).await
        };
        let (creates, deleted) = tokio::join!(creates, deletion);
        deleted?;
        for create in creates {
            match create {
                Ok(view) => sound(&client, view.id).await?,
                refusal => told_to_wait(refusal)?,
            }
        }
        node.bake().await?;
        sound(&client, client.create(&request).await?.id).await?;
    }
    Ok(())
}

async fn sound(client: &Client, id: keiki_types::SandboxId) -> Result<()> {
    let sandbox = Sandbox { client: client.clone(), id };
    sandbox.sh("true").await?;
    sandbox.kill().await
}

fn told_to_wait<T>(answer: keiki_client::Result<T>) -> Result<()> {
    match answer {
        Err(Error::Api { status: 503, message, retry_after: Some(wait), .. }) => {
            ensure!(wait >= Duration::from_secs(1), "Retry-After {wait:?}");
            ensure!(message.contains("is being built"), "{message:?}");
            Ok(())
        }
        Ok(_) => bail!("it was made although the template was not there"),
        Err(error) => bail!("{:?} without Retry-After: {error}", error.status()),
    }
}

/// Two nodes would each remove what the other created.
pub async fn one_directory_has_one_node(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let said = match world.node.restart().await {
        Ok(_) => bail!("a second node started on the same directories"),
        Err(_) => world.node.log_tail(),
    };
    ensure!(said.contains("another node is running on"), "{said}");
    ensure!(sandbox.view().await?.status == Status::Running, "the first one suffered");
    sandbox.sh("true").await.map(drop)
}

/// An ephemeral node that is stopped in the middle of its work leaves nothing.
pub async fn a_stopping_node_lets_things_end(world: Arc<World>) -> Result<()> {
    let node = Node::start(&world.places, Options::named("stopping").store_gib(3)).await?;
    let wanted = BuildTemplate { name: "base".into(), ..BuildTemplate::default() };
    node.client.build_template(&wanted).await?;
    // The guest boots by now.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    node.finish().await.context("in the middle of a build")?;

    // A node that fails to start leaves nothing either.
    let options = Options::named("refused").store_gib(3).on_slots_of(&world.node);
    let before = std::fs::read_to_string("/proc/mounts")?.matches("/refused/").count();
    let said = Node::start(&world.places, options).await.err().map(|error| error.to_string());
    ensure!(said.as_ref().is_some_and(|said| said.contains("collides with")), "{said:?}");
    let after = std::fs::read_to_string("/proc/mounts")?.matches("/refused/").count();
    ensure!(before == after, "its store stays mounted");

    let node = Node::start(&world.places, Options::named("stopping").store_gib(3)).await?;
    node.bake().await?;
    let parent = Sandbox::create(&node.client).await?;
    let (client, id) = (node.client.clone(), parent.id);
    let under_way = tokio::spawn(async move {
        let (one, four) =
            (CreateSandbox::default(), ForkSandbox { count: Some(4), ..ForkSandbox::default() });
        tokio::join!(client.create(&one), client.create(&one), client.fork(id, &four))
    });
    tokio::time::sleep(Duration::from_millis(100)).await;
    node.finish().await.context("in the middle of creates and a fork")?;
    // Created and ended with the node, or rejected because it stops, or cut off.
    let (first, second, forked) = under_way.await?;
    for status in [first.err(), second.err(), forked.err()].iter().flatten().filter_map(Error::status) {
        ensure!(status == 503, "status {status} of a node that stops");
    }
    Ok(())
}
