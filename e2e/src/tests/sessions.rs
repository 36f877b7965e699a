//! Background commands, and terminals.

use super::refused;
use crate::{
    World,
    node::{Node, Options},
    patience,
    sandbox::Sandbox,
    within,
};
use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use futures::{StreamExt, future::try_join_all};
use keiki_client::{Client, Error, ExecEvent, ExecStream, From, Pty, PtyEvent, PtyRequest, SandboxId};
use keiki_types::api::{
    ExecRequest,
    execs::{Exec, PtySize, Signal, StartExec},
};
use std::{sync::Arc, time::Duration};

fn start(line: &str) -> StartExec {
    let command = ExecRequest { cmd: Some(line.into()), ..ExecRequest::default() };
    StartExec { command, ..StartExec::default() }
}

/// Standard output to the end, and the exit code.
async fn to_the_end(mut events: ExecStream) -> Result<(String, i32)> {
    let mut out = Vec::new();
    while let Some(event) = events.next().await {
        match event? {
            ExecEvent::Stdout(bytes) => out.extend_from_slice(&bytes),
            ExecEvent::Stderr(_) => {}
            ExecEvent::Exit(code) => return Ok((String::from_utf8(out)?, code)),
        }
    }
    anyhow::bail!("no exit")
}

async fn ended(client: &Client, id: SandboxId, exec: &str) -> Result<Exec> {
    for _ in 0..100 * patience() {
        let now = client.get_exec(id, exec).await?;
        if now.exit_code.is_some() {
            return Ok(now);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    anyhow::bail!("{exec} still runs")
}

pub async fn a_background_command_is_found_again(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let exec = client.start_exec(id, &start("echo one; echo err >&2; sleep 1; echo two; exit 3")).await?;
    ensure!(exec.status == "running" && exec.background && !exec.attached && exec.pid > 1, "{exec:?}");
    ensure!(client.execs(id).await?.iter().any(|listed| listed.id == exec.id), "it is not listed");
    let (out, code) = to_the_end(client.attach_exec(id, &exec.id, From::Offsets(0, 0)).await?).await?;
    ensure!((out.as_str(), code) == ("one\ntwo\n", 3), "{out:?} {code}");
    // After it has ended, from any offset, and again.
    for (from, expected) in
        [(From::Offsets(4, 0), "two\n"), (From::Tail(2), "o\n"), (From::Tail(100), "one\ntwo\n")]
    {
        let (out, code) = to_the_end(client.attach_exec(id, &exec.id, from).await?).await?;
        ensure!((out.as_str(), code) == (expected, 3), "{from:?}: {out:?} {code}");
    }
    let over = client.get_exec(id, &exec.id).await?;
    ensure!(over.exit_code == Some(3) && over.stdout_bytes == 8 && over.stderr_bytes == 4, "{over:?}");
    refused(client.attach_exec(id, &exec.id, From::Offsets(9, 0)).await.map(drop), 400, "beyond")?;
    refused(client.signal_exec(id, &exec.id, Signal::Number(15)).await, 409, "has ended")?;
    client.remove_exec(id, &exec.id).await?;
    refused(client.get_exec(id, &exec.id).await, 404, "no command")?;
    refused(client.remove_exec(id, &exec.id).await, 404, "no such command")?;
    refused(client.start_exec(id, &start("")).await, 400, "cmd")?;
    let nothing = StartExec {
        command: ExecRequest { argv: Some(vec!["/nowhere".into()]), ..ExecRequest::default() },
        ..StartExec::default()
    };
    refused(client.start_exec(id, &nothing).await, 400, "/nowhere: not found")?;
    ensure!(client.execs(id).await?.is_empty(), "something is left");
    Ok(())
}

pub async fn input_and_signals_reach_it(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let sums = client.start_exec(id, &StartExec { stdin_open: true, ..start("md5sum; echo end") }).await?;
    let mut all = String::new();
    for n in 0..40 {
        let piece = format!("{n}").repeat(20_000);
        let taken = client.write_exec(id, &sums.id, piece.clone().into(), false).await?;
        ensure!(taken == piece.len() as u64, "it took {taken}");
        all.push_str(&piece);
    }
    client.write_exec(id, &sums.id, Bytes::new(), true).await?;
    let (out, _) = to_the_end(client.attach_exec(id, &sums.id, From::Offsets(0, 0)).await?).await?;
    client.write_bytes(id, "/root/all", None, all).await?;
    let expected = sandbox.sh("md5sum < /root/all").await?;
    ensure!(out == format!("{expected}\nend\n"), "its input came as {out:?}, not {expected:?}");
    refused(client.write_exec(id, &sums.id, "x".into(), false).await, 409, "input")?;

    let caught = client
        .start_exec(id, &start("trap 'echo caught; exit 7' USR1; while :; do sleep 0.1; done & wait"))
        .await?;
    // The trap may not be set yet.
    tokio::time::sleep(Duration::from_millis(500)).await;
    client.signal_exec(id, &caught.id, Signal::Name("SIGUSR1".into())).await?;
    let over = ended(client, id, &caught.id).await?;
    ensure!(over.exit_code == Some(7), "{over:?}");
    refused(client.signal_exec(id, &caught.id, Signal::Name("NONE".into())).await, 400, "signal must be")?;

    // Deleting a command kills everything it started.
    let tree = client.start_exec(id, &start("sleep 6543 & setsid sleep 6543 & sleep 6543")).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    client.remove_exec(id, &tree.id).await?;
    let left = sandbox
        .sh("for n in $(seq 50); do pgrep -f 'sleep 654[3]' >/dev/null || exit 0; sleep 0.1; done; exit 1")
        .await;
    ensure!(left.is_ok(), "something survived the removal: {left:?}");
    // A foreground command belongs to its caller.
    let request = ExecRequest { cmd: Some("echo mine; sleep 30".into()), ..ExecRequest::default() };
    let mut mine = client.exec_stream(id, &request).await?;
    ensure!(matches!(mine.next().await, Some(Ok(ExecEvent::Stdout(_)))), "its first words");
    let theirs = client.execs(id).await?.into_iter().find(|exec| !exec.background).context("not listed")?;
    refused(
        client.attach_exec(id, &theirs.id, From::Tail(0)).await.map(drop),
        409,
        "still reads its output",
    )?;
    drop(mine);
    // A new reader takes over; the old one gets an error.
    let long = client.start_exec(id, &start("while :; do echo tick; sleep 0.1; done")).await?;
    let mut first = client.attach_exec(id, &long.id, From::Offsets(0, 0)).await?;
    first.next().await.context("nothing came")??;
    let mut second = client.attach_exec(id, &long.id, From::Offsets(0, 0)).await?;
    second.next().await.context("nothing came")??;
    let told = loop {
        match first.next().await {
            Some(Ok(_)) => {}
            Some(Err(error)) => break error.to_string(),
            None => break "nothing".into(),
        }
    };
    ensure!(told.contains("another reader"), "the first reader was told {told:?}");
    Ok(())
}

/// A command that counts: one line every 50 ms.
const COUNT: &str = "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); echo $i; sleep 0.05; done";

/// Reads until this line has come; every line before it must be there, from `after` on.
async fn read_to(client: &Client, id: SandboxId, exec: &str, line: usize) -> Result<()> {
    let mut events = client.attach_exec(id, exec, From::Offsets(0, 0)).await?;
    let mut text = String::new();
    while let Some(event) = events.next().await {
        if let ExecEvent::Stdout(bytes) = event? {
            text.push_str(std::str::from_utf8(&bytes)?);
        }
        let lines: Vec<_> = text.lines().collect();
        let whole = if text.ends_with('\n') { lines.len() } else { lines.len().saturating_sub(1) };
        for (at, said) in lines.iter().take(whole).enumerate() {
            ensure!(*said == (at + 1).to_string(), "line {} is {said:?}", at + 1);
        }
        if whole >= line {
            return Ok(());
        }
    }
    anyhow::bail!("it ended")
}

pub async fn it_goes_on_in_a_fork_and_after_a_hibernation(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let exec = client.start_exec(id, &start(COUNT)).await?;
    read_to(client, id, &exec.id, 5).await?;
    let children = sandbox.fork(2).await?;
    // Each copy has its own: killing one does not affect the others.
    client.remove_exec(children[0].id, &exec.id).await?;
    let (parent, child) = (read_to(client, id, &exec.id, 15), read_to(client, children[1].id, &exec.id, 15));
    tokio::try_join!(parent, child)?;
    // Unread input is copied, too.
    let input: String = (0..300_000u32).map(|n| format!("{n} ")).collect();
    let late = ExecRequest { stdin: Some(input.clone()), ..start("sleep 2; md5sum").command };
    let late = client.start_exec(id, &StartExec { command: late, ..StartExec::default() }).await?;
    client.hibernate(id).await?;
    read_to(client, id, &exec.id, 25).await?;
    client.write_bytes(id, "/root/all", None, input).await?;
    let expected = sandbox.sh("md5sum < /root/all").await?;
    let (sum, _) = to_the_end(client.attach_exec(id, &late.id, From::Offsets(0, 0)).await?).await?;
    ensure!(sum.trim_end() == expected, "its input came as {sum:?}, not {expected:?}");
    ensure!(client.get_exec(id, &exec.id).await?.status == "running", "after a wake");
    // Also a command that lost its caller to a hibernation.
    let cut = ExecRequest { cmd: Some("sleep 3; echo late; sleep 300".into()), ..ExecRequest::default() };
    let mut stream = client.exec_stream(id, &cut).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let listed = client.execs(id).await?;
    let orphan = listed.iter().find(|exec| !exec.background).context("not listed")?.id.clone();
    client.hibernate(id).await?;
    let told = stream.next().await.context("the stream ended")?;
    ensure!(told.as_ref().is_err_and(|error| error.to_string().contains("was hibernated")), "{told:?}");
    let mut events = client.attach_exec(id, &orphan, From::Offsets(0, 0)).await?;
    let said = events.next().await.context("nothing came")??;
    ensure!(said == ExecEvent::Stdout("late\n".into()), "{said:?}");
    Ok(())
}

pub async fn it_goes_on_without_the_node(world: Arc<World>) -> Result<()> {
    let mut node = Node::start(&world.places, Options::named("sessions").store_gib(3)).await?;
    let done = across_a_crash(&mut node).await;
    node.finish().await?;
    done
}

async fn across_a_crash(node: &mut Node) -> Result<()> {
    node.bake().await?;
    let sandbox = Sandbox::create(&node.client).await?;
    let exec = node.client.start_exec(sandbox.id, &start(COUNT)).await?;
    read_to(&node.client, sandbox.id, &exec.id, 5).await?;
    node.kill().await?;
    *node = node.restart().await?;
    read_to(&node.client, sandbox.id, &exec.id, 20).await?;
    node.client.remove_exec(sandbox.id, &exec.id).await?;
    Ok(())
}

/// Output of a terminal until it contains these words.
async fn until(pty: &mut Pty, words: &str) -> Result<String> {
    let mut seen = Vec::new();
    let reading = async {
        loop {
            match pty.output.next().await? {
                PtyEvent::Output(bytes) => seen.extend_from_slice(&bytes),
                other => {
                    anyhow::bail!("{other:?} instead of {words:?}, after {}", String::from_utf8_lossy(&seen))
                }
            }
            if String::from_utf8_lossy(&seen).contains(words) {
                return Ok(());
            }
        }
    };
    let read = tokio::time::timeout(within(20), reading).await;
    let text = String::from_utf8_lossy(&seen).into_owned();
    read.with_context(|| format!("{words:?} did not come; {text:?} did"))??;
    Ok(text)
}

fn on(cmd: &str) -> PtyRequest {
    PtyRequest { cols: 80, rows: 24, cmd: Some(cmd.into()), ..PtyRequest::default() }
}

pub async fn a_terminal_is_left_and_come_back_to(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let mut pty = client.pty(id, &PtyRequest { cmd: None, ..on("") }).await?;
    pty.input.send("stty size; tput colors 2>/dev/null || echo $TERM; echo re''ady\n".into()).await?;
    let seen = until(&mut pty, "ready").await?;
    ensure!(seen.contains("24 80") && seen.contains("256"), "{seen:?}");
    pty.input.resize(132, 50).await?;
    pty.input.send("stty size; x=kept; echo si''zed\n".into()).await?;
    ensure!(until(&mut pty, "sized").await?.contains("50 132"), "its new size");
    // Ctrl-C ends the program in the shell, not the shell.
    pty.input.send("sleep 1000\n".into()).await?;
    tokio::time::sleep(Duration::from_millis(500)).await;
    pty.input.send(Bytes::from_static(&[3])).await?;
    pty.input.send("echo inter''rupted $?\n".into()).await?;
    until(&mut pty, "interrupted 130").await?;
    pty.input.detach().await?;
    let left = loop {
        match pty.output.next().await? {
            PtyEvent::Output(_) => {}
            other => break other,
        }
    };
    ensure!(left == PtyEvent::Detached, "{left:?}");
    let exec = pty.exec.clone();
    let listed = client.get_exec(id, &exec).await?;
    ensure!(listed.pty && listed.status == "running", "{listed:?}");
    // Here, in a fork, and after a hibernation it is the same shell.
    let child = sandbox.fork_one().await?;
    client.hibernate(id).await?;
    for of in [id, child.id] {
        let mut again = client.attach_pty(of, &exec, 10_000).await?;
        again.input.send("echo $x-$((40+2))\n".into()).await?;
        let seen = until(&mut again, "kept-42").await?;
        ensure!(seen.contains("interrupted 130"), "what it wrote last is not shown: {seen:?}");
        again.input.send("exit 5\n".into()).await?;
        let code = loop {
            match again.output.next().await? {
                PtyEvent::Output(_) => {}
                other => break other,
            }
        };
        ensure!(code == PtyEvent::Exit(5), "{code:?}");
    }
    // Without a detach it ends, unless it is kept.
    let gone = client.pty(id, &on("sleep 7001")).await?;
    let kept = client.pty(id, &PtyRequest { keep: true, ..on("sleep 7002") }).await?;
    let (gone_id, kept_id) = (gone.exec.clone(), kept.exec.clone());
    drop((gone, kept));
    ensure!(ended(client, id, &gone_id).await?.exit_code == Some(137), "it goes on for nobody");
    ensure!(client.get_exec(id, &kept_id).await?.status == "running", "it was not kept");
    client.signal_exec(id, &kept_id, Signal::Number(1)).await?;
    ensure!(ended(client, id, &kept_id).await?.exit_code == Some(129), "a hangup");
    Ok(())
}

pub async fn a_paste_of_a_mebibyte_is_intact(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let text: String = (0..40_000u32).map(|n| format!("{n:06} {:019}\n", u64::from(n) * 7_919)).collect();
    ensure!(text.len() > 1 << 20, "{} bytes", text.len());
    let paste = async |setup: &str| -> Result<()> {
        let line = format!("{setup}; rm -f /tmp/p; echo go; head -c {} > /tmp/p; echo do''ne", text.len());
        let mut pty = client.pty(id, &on(&line)).await?;
        until(&mut pty, "go").await?;
        let all = Bytes::from(text.clone());
        let Pty { input, output, .. } = &mut pty;
        let typing = async {
            for piece in all.chunks(10_000) {
                input.send(all.slice_ref(piece)).await?;
            }
            anyhow::Ok(())
        };
        // Reads the echo meanwhile, as a terminal does.
        let watching = async {
            let mut tail = Vec::new();
            loop {
                match output.next().await? {
                    PtyEvent::Output(bytes) => tail.extend_from_slice(&bytes),
                    PtyEvent::Exit(0) if String::from_utf8_lossy(&tail).contains("done") => {
                        return anyhow::Ok(());
                    }
                    other => anyhow::bail!("{other:?}"),
                }
            }
        };
        tokio::try_join!(typing, watching)?;
        let mut reader = client.read_file(id, "/tmp/p").await?;
        let mut got = Vec::new();
        while let Some(chunk) = reader.chunks.next().await {
            got.extend_from_slice(&chunk?);
        }
        let differs = got.iter().zip(text.as_bytes()).position(|(a, b)| a != b);
        ensure!(got == text.as_bytes(), "{} bytes came ({setup}), different from {differs:?} on", got.len());
        Ok(())
    };
    paste("true").await?;
    paste("stty raw -echo").await
}

pub async fn twenty_terminals_and_commands_beside_each_other(world: Arc<World>) -> Result<()> {
    let sandbox = Sandbox::create(&world.node.client).await?;
    let (client, id) = (&sandbox.client, sandbox.id);
    let size = Some(PtySize { cols: 80, rows: 24 });
    let talk = |n: usize| async move {
        if n.is_multiple_of(2) {
            let exec = client
                .start_exec(id, &StartExec { pty: size, ..start(&format!("stty size; echo {n}")) })
                .await?;
            let (out, code) =
                to_the_end(client.attach_exec(id, &exec.id, From::Offsets(0, 0)).await?).await?;
            ensure!(out == format!("24 80\r\n{n}\r\n") && code == 0, "{out:?} {code}");
        } else {
            let mut pty = client.pty(id, &on("cat")).await?;
            pty.input.send(format!("hello {n}\n").into()).await?;
            until(&mut pty, &format!("hello {n}\r\nhello {n}\r\n")).await?;
        }
        Ok(())
    };
    try_join_all((0..20).map(talk)).await?;
    // Commands without a reader do not block others.
    let flood = ExecRequest { cmd: Some("yes".into()), ..ExecRequest::default() };
    let stuck = try_join_all((0..24).map(|_| client.exec_stream(id, &flood))).await?;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let beside = tokio::time::timeout(within(30), sandbox.sh("echo fine")).await;
    ensure!(beside.context("stuck")?? == "fine", "a command beside unread ones");
    drop(stuck);
    output_that_nobody_reads_is_bounded(&sandbox).await
}

/// Many commands write without a reader; a command with a reader loses nothing.
async fn output_that_nobody_reads_is_bounded(sandbox: &Sandbox) -> Result<()> {
    const MIB: u64 = 1 << 20;
    let (client, id) = (&sandbox.client, sandbox.id);
    let agent = async || -> Result<u64> {
        let kib = sandbox.sh("awk '/^RssAnon/ { print $2 }' /proc/1/status").await?;
        Ok(kib.parse::<u64>()? << 10)
    };
    let before = agent().await?;
    let writes =
        start("head -c 1500000 /dev/zero | tr '\\0' x; echo; echo end; touch /tmp/wrote-$$; sleep 600");
    let all = try_join_all((0..40).map(|_| client.start_exec(id, &writes))).await?;
    sandbox.sh("until [ $(ls /tmp/wrote-* | wc -l) = 40 ]; do sleep 0.1; done").await?;
    let kept = agent().await?.saturating_sub(before);
    println!("        40 commands that wrote a MiB each cost the agent {} KiB", kept >> 10);
    ensure!(kept < 30 * MIB, "the agent keeps {kept} bytes for 40 commands");
    // The end of each output is kept.
    for exec in [&all[0], &all[39]] {
        let mut events = client.attach_exec(id, &exec.id, From::Tail(4)).await?;
        let last = events.next().await.context("nothing came")??;
        ensure!(last == ExecEvent::Stdout("end\n".into()), "{last:?}");
    }
    // A command with a reader still has all of its output.
    let long = ExecRequest { cmd: Some("seq 200000 | md5sum; seq 200000".into()), ..ExecRequest::default() };
    let done = client.exec(id, &long).await?;
    let (sum, numbers) = done.stdout.split_once('\n').context("one line")?;
    client.write_bytes(id, "/tmp/numbers", None, numbers.to_owned()).await?;
    ensure!(sandbox.sh("md5sum < /tmp/numbers").await? == sum, "a reader lost something");
    Ok(())
}

/// A stream whose sandbox is deleted ends at once and says why.
pub async fn a_deletion_ends_every_stream(world: Arc<World>) -> Result<()> {
    let client = &world.node.client;
    let sandbox = Sandbox::create(client).await?;
    let id = sandbox.id;
    let background = client.start_exec(id, &start("sleep 100")).await?;
    let sleep = ExecRequest { cmd: Some("sleep 100".into()), ..ExecRequest::default() };
    let mut streamed = client.exec_stream(id, &sleep).await?;
    let mut attached = client.attach_exec(id, &background.id, From::Offsets(0, 0)).await?;
    let mut pty = client.pty(id, &on("sleep 100")).await?;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let deletion = sandbox.kill();
    let ends = async {
        let said = [streamed.next().await, attached.next().await];
        (said, pty.output.next().await)
    };
    let within = tokio::time::timeout(Duration::from_secs(10), futures::future::join(deletion, ends));
    let (deleted, (said, terminal)) = within.await.context("a stream outlived its sandbox")?;
    deleted?;
    for end in said {
        let told = matches!(&end, Some(Err(Error::Command(why))) if why.contains("was deleted"));
        ensure!(told, "a stream ended with {end:?}");
    }
    ensure!(matches!(&terminal, Err(Error::Command(why)) if why.contains("was deleted")), "{terminal:?}");
    Ok(())
}
