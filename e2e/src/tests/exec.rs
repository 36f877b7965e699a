//! Commands.

use super::refused;
use crate::{World, sandbox::Sandbox, within};
use anyhow::{Result, ensure};
use futures::{StreamExt, future::try_join_all};
use keiki_client::ExecEvent;
use keiki_types::api::ExecRequest;
use std::{collections::BTreeMap, sync::Arc, time::Instant};

pub async fn streams_exit_codes_and_surroundings(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let done = sandbox.exec("echo out; echo err >&2; exit 3").await?;
    ensure!(
        (done.stdout.as_str(), done.stderr.as_str(), done.exit_code) == ("out\n", "err\n", 3),
        "{done:?}"
    );
    for (line, code) in
        [("kill -9 $$", 137), ("kill -TERM $$", 143), ("no-such-command", 127), ("/etc/passwd", 126)]
    {
        ensure!(sandbox.exec(line).await?.exit_code == code, "`{line}` must exit with {code}");
    }
    let argv = |argv: &[&str]| ExecRequest {
        argv: Some(argv.iter().map(|arg| (*arg).into()).collect()),
        ..ExecRequest::default()
    };
    for (program, code) in [("/nowhere", 127), ("/etc/passwd", 126), ("true", 0)] {
        ensure!(sandbox.client.exec(sandbox.id, &argv(&[program])).await?.exit_code == code, "{program}");
    }
    let odd = sandbox.client.exec(sandbox.id, &argv(&["printf", "%s|", "a b", "$HOME", "é\n"])).await?;
    ensure!(odd.stdout == "a b|$HOME|é\n|", "{odd:?}");

    let request = ExecRequest {
        cmd: Some("echo $GREETING; pwd; id -un; id -Gn".into()),
        env: BTreeMap::from([("GREETING".into(), "hello world".into())]),
        cwd: Some("/usr/lib".into()),
        user: Some("nobody".into()),
        ..ExecRequest::default()
    };
    let done = sandbox.client.exec(sandbox.id, &request).await?;
    ensure!(done.stdout == "hello world\n/usr/lib\nnobody\nnogroup\n", "{done:?}");
    let nowhere = ExecRequest { cwd: Some("/no/such/dir".into()), user: None, ..request.clone() };
    let done = sandbox.client.exec(sandbox.id, &nowhere).await?;
    ensure!(done.exit_code == 126 && done.stderr.contains("/no/such/dir"), "{done:?}");
    let missing = ExecRequest { user: Some("nobody-at-all".into()), ..request.clone() };
    refused(sandbox.client.exec(sandbox.id, &missing).await, 400, "nobody-at-all")?;

    let binary = sandbox.exec("printf '\\000\\377\\376x'").await?;
    ensure!(binary.stdout_base64.as_deref() == Some("AP/+eA=="), "{binary:?}");
    Ok(())
}

pub async fn a_timeout_kills_everything_it_started(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let begun = Instant::now();
    let request = ExecRequest {
        cmd: Some("sleep 98765 & setsid sleep 98765 & sleep 98765".into()),
        timeout_seconds: Some(1.0),
        ..ExecRequest::default()
    };
    let answer = sandbox.client.exec(sandbox.id, &request).await;
    ensure!(answer.as_ref().is_err_and(keiki_client::Error::is_timeout), "{answer:?}");
    ensure!(begun.elapsed() < within(4), "it took {:?}", begun.elapsed());
    ensure!(sandbox.exec("pgrep -f 'sleep 9876[5]'").await?.exit_code == 1, "something survived the timeout");
    Ok(())
}

pub async fn a_background_child_does_not_hold_the_call(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let begun = Instant::now();
    ensure!(sandbox.sh("sleep 4321 & echo started").await? == "started", "its output");
    ensure!(begun.elapsed() < within(3), "the child held the call for {:?}", begun.elapsed());
    ensure!(sandbox.exec("pgrep -f 'sleep 432[1]'").await?.exit_code == 0, "the child was killed");
    Ok(())
}

pub async fn long_output_is_whole_in_the_stream_and_cut_in_the_buffer(world: Arc<World>) -> Result<()> {
    const MIB: usize = 20;
    let sandbox = Sandbox::create(&world.node.client).await?;
    let line = format!("head -c {MIB}M /dev/zero | tr '\\0' 'k'; echo end >&2");
    let done = sandbox.exec(&line).await?;
    ensure!(
        done.truncated && done.stdout.len() == 16 << 20 && done.stderr == "end\n",
        "{} bytes",
        done.stdout.len()
    );
    let request = ExecRequest { cmd: Some(line), ..ExecRequest::default() };
    let mut events = sandbox.client.exec_stream(sandbox.id, &request).await?;
    let (mut bytes, mut exit) = (0, None);
    while let Some(event) = events.next().await {
        match event? {
            ExecEvent::Stdout(data) => {
                ensure!(data.iter().all(|&byte| byte == b'k'), "a byte was mangled");
                bytes += data.len();
            }
            ExecEvent::Stderr(data) => ensure!(data.as_ref() == b"end\n", "{data:?}"),
            ExecEvent::Exit(code) => exit = Some(code),
        }
    }
    ensure!(bytes == MIB << 20 && exit == Some(0), "{bytes} bytes, exit {exit:?}");
    Ok(())
}

pub async fn input_reaches_the_command(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let text = "line\n".repeat(200_000);
    let request =
        ExecRequest { cmd: Some("wc -c".into()), stdin: Some(text.clone()), ..ExecRequest::default() };
    let done = sandbox.client.exec(sandbox.id, &request).await?;
    ensure!(done.stdout.trim() == text.len().to_string(), "{done:?}");
    // Unread input blocks nothing; no input is empty input.
    let ignored = ExecRequest { cmd: Some("exit 0".into()), stdin: Some(text), ..ExecRequest::default() };
    ensure!(sandbox.client.exec(sandbox.id, &ignored).await?.exit_code == 0, "unread input");
    ensure!(sandbox.sh("cat | wc -c").await?.trim() == "0", "no input");
    Ok(())
}

pub async fn many_at_once(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let slow = tokio::spawn({
        let sandbox = sandbox.clone();
        async move { sandbox.sh("sleep 3; echo slow").await }
    });
    let quick = try_join_all((0..20).map(|n| {
        let sandbox = sandbox.clone();
        async move { sandbox.sh(&format!("echo {n}")).await }
    }))
    .await?;
    ensure!(quick.iter().enumerate().all(|(n, said)| *said == n.to_string()), "{quick:?}");
    ensure!(slow.await?? == "slow", "the slow one");
    Ok(())
}
