//! The agent in a real guest: boots QEMU (software emulation) and drives it as the node would.
//!
//! Not run by default. `KEIKI_TEST_KERNEL` (bzImage), `KEIKI_TEST_INITRD` (initial RAM file system
//! with the agent and its modules) and `KEIKI_TEST_DISK` (raw ext4 image of a Debian rootfs with
//! python3) say what to boot; then `cargo test -p keiki-guest --test real_guest -- --ignored
//! --nocapture`.

#[path = "real/machine.rs"]
mod machine;

use bytes::Bytes;
use keiki_protocol::{
    client::Opened,
    gate::call,
    guest::{
        AttachRequest, EnvVar, ExecSpec, FreezeUserRequest, Identity, InfoRequest, InputChunk,
        ListExecsRequest, MkdirRequest, PathRequest, Pty, ReadFileRequest, ReadSecretsRequest, RemoveRequest,
        RenameRequest, ResizeRequest, SealedSecrets, SecretKeyRequest, ShutdownRequest, SignalRequest,
        SymlinkRequest, ThawUserRequest, WipeSecretsRequest, WriteChunk, WriteHeader, exec_event::Event,
    },
    handshake::Hello,
    seal::{Key, Plain, seal},
};
use machine::{Client, Machine, argv, collect, id, run, shell};
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tonic::{Code, Status};

#[tokio::test]
#[ignore = "needs a kernel, an initrd and a disk image"]
async fn everything_in_one_guest() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let begin = Instant::now();
    let mut machine = Machine::boot(dir.path());
    let (client, hello) = machine.connect(1).await;
    println!("boot to first connection: {} ms", begin.elapsed().as_millis());
    assert_eq!(hello.generation, 0);
    starting(&client).await;
    measure(&client).await;
    output(&client).await;
    endings(&client).await;
    input_and_terminal(&client).await;
    files(&client).await;
    let client = released(&machine, client).await;
    let client = renewal(&machine, client).await;
    freezing(&client).await;
    drop(client);
    reconnecting(&machine).await;
    let (client, _) = machine.connect(17).await;
    client.clone().shutdown(ShutdownRequest { grace_ms: 500 }).await.unwrap();
    assert!(machine.wait_end(20), "no power off\n{}", machine.console("a"));
    println!("{}", machine.console("a"));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs a kernel, an initrd and a disk image"]
async fn a_copy_in_another_process_listens_again() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let state = dir.path().join("state");
    let machine = Machine::boot(dir.path());
    let (client, _) = machine.connect(1).await;
    let counter =
        ExecSpec { id: "counter".into(), ..shell("i=0; while :; do i=$((i+1)); echo line $i; done") };
    let mut stream = client.clone().exec(counter).await.unwrap().into_inner();
    for _ in 0..20 {
        stream.message().await.unwrap();
    }
    // Frozen in the middle of an upload and of output that nobody takes: both directions are full.
    let chunks: Vec<_> = (0..200)
        .map(|n| WriteChunk {
            header: (n == 0).then(|| WriteHeader { path: "/root/cut".into(), ..WriteHeader::default() }),
            data: vec![0xff; 64 << 10].into(),
            commit: false,
        })
        .collect();
    let mut upload = client.clone();
    let writing = tokio::spawn(async move { upload.write_file(tokio_stream::iter(chunks)).await });
    tokio::time::sleep(Duration::from_millis(300)).await;
    machine.save("a", &state);
    drop((machine, client, stream));
    writing.abort();
    for (generation, name) in [(2, "b"), (3, "c")] {
        let copy = Machine::load(dir.path(), name, &state);
        let begin = Instant::now();
        // Once after the guest could see that its host was gone, once before: then it cannot.
        let (mut gate, _) = if name == "b" {
            copy.go_on(name);
            tokio::time::sleep(Duration::from_millis(300)).await;
            copy.open(generation).await
        } else {
            let (met, ()) = tokio::join!(copy.open(generation), async {
                tokio::time::sleep(Duration::from_millis(200)).await;
                copy.go_on(name);
            });
            met
        };
        println!("copy {name}: connected after {} ms", begin.elapsed().as_millis());
        let begin = Instant::now();
        become_new(&mut gate, generation).await;
        println!("copy {name}: released after {} ms", begin.elapsed().as_millis());
        let client = gate.client().await.unwrap();
        assert_eq!(run(&client, shell("cat /run/keiki/generation")).await.out(), generation.to_string());
        let request = AttachRequest { id: "counter".into(), ..AttachRequest::default() };
        let mut stream = client.clone().attach(request).await.unwrap().into_inner();
        let mut text = String::new();
        let mut first = None;
        while text.len() < 100_000 {
            match stream.message().await.unwrap().unwrap().event.unwrap() {
                Event::Stdout(output) => {
                    first.get_or_insert(output.offset);
                    text.push_str(std::str::from_utf8(&output.data).unwrap());
                }
                Event::Started(_) => {}
                other => panic!("{other:?}"),
            }
        }
        println!("copy {name}: output goes on from offset {first:?}");
        let missing = client.clone().stat(PathRequest { path: "/root/cut".into() }).await.unwrap_err();
        assert_eq!(missing.code(), Code::NotFound);
        assert_eq!(run(&client, shell("ls -A /root | grep -c keiki")).await.out(), "0\n");
    }
}

async fn starting(client: &Client) {
    let info = client.clone().info(InfoRequest {}).await.unwrap().into_inner();
    println!("{info:?}");
    assert!(info.ready && !info.user_frozen);
    let done = run(client, argv(&["echo", "a b", "\u{e9}\n"])).await;
    assert_eq!((done.out().as_str(), done.exit.code, done.started), ("a b \u{e9}\n\n", 0, true));
    let done = run(client, shell("echo out; echo err >&2; exit 3")).await;
    assert_eq!((done.stdout, done.stderr, done.exit.code), (b"out\n".to_vec(), b"err\n".to_vec(), 3));
    let done = run(client, argv(&["no-such-program"])).await;
    assert_eq!((done.exit.code, done.started), (127, false));
    assert!(done.exit.message.contains("not found"), "{:?}", done.exit);
    assert_eq!(run(client, argv(&["/etc/passwd"])).await.exit.code, 126);
    assert_eq!(run(client, argv(&["/etc"])).await.exit.code, 126);
    let nowhere = ExecSpec { cwd: "/no/where".into(), ..argv(&["true"]) };
    assert_eq!(run(client, nowhere).await.exit.code, 126);
    let var = EnvVar { name: "A".into(), value: "1 2".into() };
    let spec =
        ExecSpec { env: vec![var], cwd: "/usr".into(), ..shell("echo $A $PWD $HOME $USER $LANG; ulimit -n") };
    assert_eq!(run(client, spec).await.out(), "1 2 /usr /root root C.UTF-8\n65536\n");
    let spec =
        ExecSpec { user: "nobody".into(), ..shell("id -un; id -G; pwd; cat /proc/self/oom_score_adj") };
    assert_eq!(run(client, spec).await.out(), "nobody\n65534\n/\n0\n");
    let spec = ExecSpec { user: "1234:5".into(), ..shell("id -u; id -G") };
    assert_eq!(run(client, spec).await.out(), "1234\n5\n");
    let error = client.clone().exec(ExecSpec { user: "who".into(), ..shell("true") }).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    let spec = shell("true");
    run(client, spec.clone()).await;
    assert_eq!(client.clone().exec(spec).await.unwrap_err().code(), Code::AlreadyExists);
    let own = ExecSpec {
        id: "mine".into(),
        ..shell("cat /proc/self/cgroup; ls -l /proc/self/fd | wc -l; grep Sig[BI] /proc/self/status")
    };
    let text = run(client, own).await.out();
    assert!(text.starts_with("0::/user/") && !text.starts_with("0::/user/\n"), "{text}");
    assert!(text.contains("SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000"), "{text}");
    let net = run(client, shell("cat /proc/net/route | tail -n +2 | cut -f1,2,3 ; cat /etc/resolv.conf; grep -c . /proc/mounts; cat /sys/fs/cgroup/cgroup.subtree_control; ls /keiki; df -k /dev/shm / | tail -2; cat /sys/class/net/eth0/operstate /sys/devices/system/clocksource/clocksource0/current_clocksource")).await;
    println!("{}", net.out());
    assert!(net.out().contains("eth0\t00000000\t01FF1FAC"), "{}", net.out());
    assert_eq!(run(client, argv(&["python3", "-c", "print(6*7)"])).await.out(), "42\n");
    let policy = argv(&["python3", "-c", "import os; print(os.sched_getscheduler(0), os.nice(0))"]);
    assert_eq!(run(client, policy).await.out(), "0 0\n", "a command has the agent's priority");
    println!("starting: ok");
}

async fn measure(client: &Client) {
    for (name, words) in [("true", &["/bin/true"][..]), ("sh -c true", &["/bin/sh", "-c", "true"])] {
        let mut times = vec![];
        for _ in 0..60 {
            let begin = Instant::now();
            let done = run(client, argv(words)).await;
            assert_eq!(done.exit.code, 0);
            times.push(begin.elapsed());
        }
        times.sort();
        println!("exec {name}: p50 {:?} p90 {:?} min {:?}", times[30], times[54], times[0]);
    }
    let mut times = vec![];
    for _ in 0..60 {
        let begin = Instant::now();
        client.clone().info(InfoRequest {}).await.unwrap();
        times.push(begin.elapsed());
    }
    times.sort();
    println!("info: p50 {:?} min {:?}", times[30], times[0]);
}

async fn output(client: &Client) {
    let begin = Instant::now();
    let done = run(client, shell("head -c 12000000 /dev/zero | tr '\\0' 'x'; echo end >&2")).await;
    assert_eq!((done.stdout.len(), done.stderr), (12_000_000, b"end\n".to_vec()));
    assert!(done.stdout.iter().all(|&byte| byte == b'x'));
    println!("12 MB of output: {} ms", begin.elapsed().as_millis());
    let both = "head -c 3000000 /dev/zero & head -c 3000000 /dev/zero >&2; wait";
    let done = run(client, shell(both)).await;
    assert_eq!((done.stdout.len(), done.stderr.len()), (3_000_000, 3_000_000));
    let all: Vec<u8> = (0..=255).collect();
    let done =
        run(client, argv(&["python3", "-c", "import sys; sys.stdout.buffer.write(bytes(range(256)))"])).await;
    assert_eq!(done.stdout, all);
    // A reader that takes nothing holds the command back.
    let spec = ExecSpec { id: "slow".into(), ..shell("head -c 9000000 /dev/zero; echo done > /tmp/slow") };
    let stream = client.clone().exec(spec).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(run(client, shell("test -e /tmp/slow")).await.exit.code, 1, "it was not held back");
    assert_eq!(collect(stream).await.stdout.len(), 9_000_000);
    assert_eq!(run(client, shell("test -e /tmp/slow")).await.exit.code, 0);
    println!("output: ok");
}

async fn endings(client: &Client) {
    let begin = Instant::now();
    let done = run(client, shell("sleep 60 & echo started")).await;
    assert_eq!((done.out().as_str(), done.exit.code), ("started\n", 0));
    assert!(begin.elapsed() < Duration::from_secs(2), "waited for the background child");
    println!("background child: {} ms", begin.elapsed().as_millis());
    assert_eq!(
        run(client, shell("pgrep -c sleep || grep -l sleep /proc/[0-9]*/comm | wc -l")).await.out().trim(),
        "1"
    );
    let spec = shell("sleep 61 >/dev/null 2>&1 & exec sleep 61");
    let limited = ExecSpec { timeout_ms: 300, stdin_open: true, ..spec };
    let begin = Instant::now();
    let done = run(client, limited).await;
    assert!(done.exit.timed_out && done.exit.code == 137, "{:?}", done.exit);
    assert!(begin.elapsed() < Duration::from_secs(2));
    tokio::time::sleep(Duration::from_millis(200)).await;
    let living = run(client, shell("cat /proc/[0-9]*/cmdline | grep -ac 'slee[p].61'")).await;
    assert_eq!(living.out(), "0\n", "the children live: {:?}", living.exit);
    for (signal, code) in [(15, 143), (9, 137), (2, 130)] {
        let spec = argv(&["sleep", "60"]);
        let name = spec.id.clone();
        let stream = client.clone().exec(spec).await.unwrap().into_inner();
        client
            .clone()
            .signal(SignalRequest { id: name.clone(), signal, whole_group: signal == 9 })
            .await
            .unwrap();
        assert_eq!(collect(stream).await.exit.code, code);
        let late = client.clone().signal(SignalRequest { id: name, signal: 15, whole_group: false }).await;
        assert_eq!(late.unwrap_err().code(), Code::FailedPrecondition);
    }
    let orphans = run(
        client,
        shell(
            "for i in 1 2 3 4 5; do (sleep 0.1 &) ; done; sleep 0.5; cat /proc/[0-9]*/stat | grep -c ' Z '",
        ),
    )
    .await;
    assert_eq!(orphans.out(), "0\n", "zombies");
    // A group is used again: a late signal to a command that has ended must not meet its successor
    // there.
    let first = argv(&["true"]);
    let name = first.id.clone();
    assert_eq!(run(client, first).await.exit.code, 0);
    tokio::time::sleep(Duration::from_millis(200)).await;
    let next = client.clone().exec(shell("sleep 1; exit 6")).await.unwrap().into_inner();
    let late = client.clone().signal(SignalRequest { id: name, signal: 9, whole_group: true }).await;
    assert_eq!(late.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(collect(next).await.exit.code, 6);
    println!("endings: ok");
}

async fn input_and_terminal(client: &Client) {
    let spec = ExecSpec { stdin_open: true, ..argv(&["cat"]) };
    let name = spec.id.clone();
    let stream = client.clone().exec(spec).await.unwrap().into_inner();
    let big: Bytes = (0..1_000_000u32).map(|n| n as u8).collect::<Vec<_>>().into();
    let mut chunks: Vec<InputChunk> = big
        .chunks(50_000)
        .map(|data| InputChunk {
            id: name.clone(),
            data: Bytes::copy_from_slice(data),
            eof: false,
            spool: false,
        })
        .collect();
    chunks.push(InputChunk { id: name, data: Bytes::new(), eof: true, spool: false });
    let mut writer = client.clone();
    let (done, reply) = tokio::join!(collect(stream), writer.input(tokio_stream::iter(chunks)));
    assert_eq!(reply.unwrap().into_inner().accepted, 1_000_000);
    assert_eq!((done.stdout == big, done.exit.code), (true, 0));
    assert_eq!(run(client, argv(&["cat"])).await.exit.code, 0, "no input is an empty one");

    let pty = Some(Pty { cols: 100, rows: 30 });
    let spec = ExecSpec {
        pty,
        stdin_open: true,
        ..shell("tty; stty size; read line; echo got $line; stty size; echo $TERM; exit 4")
    };
    let name = spec.id.clone();
    let stream = client.clone().exec(spec).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_millis(700)).await;
    client
        .clone()
        .resize(ResizeRequest { id: name.clone(), pty: Some(Pty { cols: 120, rows: 40 }) })
        .await
        .unwrap();
    let typed = InputChunk { id: name, data: "hi\n".into(), eof: false, spool: false };
    client.clone().input(tokio_stream::iter([typed])).await.unwrap();
    let done = collect(stream).await;
    let text = done.out().replace('\r', "");
    assert_eq!(text, "/dev/pts/0\n30 100\nhi\ngot hi\n40 120\nxterm-256color\n");
    assert_eq!(done.exit.code, 4);
    let spec = ExecSpec { pty, stdin_open: true, ..shell("sleep 60") };
    let name = spec.id.clone();
    let stream = client.clone().exec(spec).await.unwrap().into_inner();
    tokio::time::sleep(Duration::from_millis(300)).await;
    client
        .clone()
        .input(tokio_stream::iter([InputChunk { id: name, data: vec![3].into(), eof: false, spool: false }]))
        .await
        .unwrap();
    assert_eq!(collect(stream).await.exit.code, 130, "Ctrl-C");
    println!("input and terminal: ok");
}

async fn write(
    client: &Client,
    path: &Bytes,
    data: &[u8],
    commit: bool,
    mode: u32,
) -> Result<u64, tonic::Status> {
    let header = WriteHeader { path: path.clone(), mode, parents: true, user: String::new() };
    let mut chunks = vec![WriteChunk { header: Some(header), ..WriteChunk::default() }];
    chunks.extend(
        data.chunks(60_000)
            .map(|data| WriteChunk { data: Bytes::copy_from_slice(data), ..WriteChunk::default() }),
    );
    chunks.push(WriteChunk { commit, ..WriteChunk::default() });
    Ok(client.clone().write_file(tokio_stream::iter(chunks)).await?.into_inner().bytes)
}

async fn read(client: &Client, path: &Bytes) -> Result<Vec<u8>, tonic::Status> {
    let request = ReadFileRequest { path: path.clone(), offset: 0, limit: 0 };
    let mut stream = client.clone().read_file(request).await?.into_inner();
    let mut all = vec![];
    while let Some(chunk) = stream.message().await? {
        all.extend_from_slice(&chunk.data);
    }
    Ok(all)
}

async fn files(client: &Client) {
    let data: Vec<u8> = (0..8_000_000u32).map(|n| (n * 7) as u8).collect();
    let dir = Bytes::from("/var/tmp/some dir/\u{fc}nter");
    for name in [&b"plain"[..], b"with space", b"new\nline", "\u{1f331}".as_bytes(), b"\xff\xfe"] {
        let path: Bytes = [&dir[..], b"/", name].concat().into();
        assert_eq!(write(client, &path, &data[..70_000], true, 0o640).await.unwrap(), 70_000);
        assert!(read(client, &path).await.unwrap() == data[..70_000], "{name:?}");
    }
    let big: Bytes = [&dir[..], b"/big"].concat().into();
    let begin = Instant::now();
    write(client, &big, &data, true, 0).await.unwrap();
    let wrote = begin.elapsed();
    assert!(read(client, &big).await.unwrap() == data);
    println!(
        "8 MB: written in {} ms, read in {} ms",
        wrote.as_millis(),
        (begin.elapsed() - wrote).as_millis()
    );
    assert_eq!(write(client, &big, b"x", false, 0).await.unwrap_err().code(), Code::Aborted);
    let list = client.clone().list_dir(PathRequest { path: dir.clone() }).await.unwrap().into_inner().entries;
    assert_eq!(list.len(), 6, "{list:?}");
    assert_eq!(list.iter().find(|entry| entry.name == "big").map(|entry| entry.size), Some(8_000_000));
    let link: Bytes = [&dir[..], b"/link"].concat().into();
    client.clone().symlink(SymlinkRequest { target: "big".into(), link: link.clone() }).await.unwrap();
    let stat = client.clone().stat(PathRequest { path: link.clone() }).await.unwrap().into_inner();
    assert_eq!((stat.kind.as_str(), &stat.target[..]), ("symlink", &b"big"[..]));
    let code = |result: Result<_, tonic::Status>| result.map(|_: ()| ()).unwrap_err().code();
    assert_eq!(code(read(client, &"/none".into()).await.map(drop)), Code::NotFound);
    assert_eq!(code(read(client, &"/etc".into()).await.map(drop)), Code::InvalidArgument);
    assert_eq!(code(write(client, &"/etc".into(), b"", true, 0).await.map(drop)), Code::InvalidArgument);
    assert_eq!(
        code(write(client, &"/etc/passwd/x".into(), b"", true, 0).await.map(drop)),
        Code::InvalidArgument
    );
    assert_eq!(code(write(client, &"/proc/x".into(), b"", true, 0).await.map(drop)), Code::NotFound);
    let made = client.clone().mkdir(MkdirRequest { path: "/etc".into(), ..MkdirRequest::default() }).await;
    assert_eq!(code(made.map(drop)), Code::AlreadyExists);
    run(client, shell("mkdir /mnt/small && mount -t tmpfs -o size=1m none /mnt/small")).await;
    assert_eq!(
        code(write(client, &"/mnt/small/x".into(), &data, true, 0).await.map(drop)),
        Code::ResourceExhausted
    );
    assert_eq!(run(client, shell("ls -A /mnt/small | wc -l")).await.out(), "0\n");
    let renamed: Bytes = [&dir[..], b"/renamed"].concat().into();
    client.clone().rename(RenameRequest { from: link, to: renamed }).await.unwrap();
    let whole = client.clone().remove(RemoveRequest { path: dir.clone(), recursive: false }).await;
    assert_eq!(code(whole.map(drop)), Code::FailedPrecondition);
    client.clone().remove(RemoveRequest { path: dir, recursive: true }).await.unwrap();
    println!("files: ok");
}

fn order(generation: u64) -> Identity {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    Identity {
        generation,
        entropy: vec![generation as u8; 64].into(),
        unix_nanos: since.as_nanos() as u64,
        hostname: format!("host-{generation}"),
        reason: "fork".into(),
        is_new: true,
        run_hooks: true,
        sandbox_id: "copy".into(),
        parent_sandbox_id: "original".into(),
        ..Identity::default()
    }
}

async fn become_new(gate: &mut Opened, generation: u64) {
    let ack = gate.call(&order(generation)).await.unwrap();
    println!("{ack:?}");
    assert_eq!(ack.generation, generation);
}

/// Through the gate, as a machine that was frozen meanwhile would go: the connection behind it.
/// Refused: user work still stands.
async fn renew(machine: &Machine, client: Client, order: Identity) -> Result<Client, (Client, Status)> {
    client.clone().freeze_user(FreezeUserRequest { timeout_ms: 2000 }).await.unwrap();
    drop(client);
    let (mut gate, _) = machine.open(order.generation).await;
    let refused = match gate.call(&order).await {
        Ok(ack) => {
            println!("{ack:?}");
            assert_eq!(ack.generation, order.generation);
            gate.call(&ThawUserRequest {}).await.unwrap();
            None
        }
        Err(status) => Some(status),
    };
    let client = gate.client().await.unwrap();
    match refused {
        None => Ok(client),
        Some(status) => Err((client, status)),
    }
}

async fn released(machine: &Machine, client: Client) -> Client {
    let client = renew(machine, client, order(7)).await.unwrap();
    // It runs at all: user work goes on. The hosts file comes a little later.
    let found = "hostname; until getent hosts host-7; do sleep 0.1; done";
    let done = run(&client, shell(&format!("{found}; cat /run/keiki/generation; date +%s"))).await;
    let text = done.out();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "host-7");
    assert!(lines[1].contains("127.0.1.1"), "{text}");
    assert!(lines[2].starts_with('7'), "{text}");
    let clock: u64 = lines[2][1..].parse().unwrap();
    assert!(now.abs_diff(clock) < 5, "{text} {now}");
    // Not a second time, after which the same connection goes on.
    drop(client);
    let (mut gate, _) = machine.open(7).await;
    assert_eq!(gate.call(&order(7)).await.unwrap_err().code(), Code::FailedPrecondition);
    assert!(gate.call(&Identity::default()).await.unwrap_err().message().contains("not greater than"));
    // Nor does hello have to be said at its beginning only.
    assert_eq!(gate.meet().await.unwrap().hello.generation, 7);
    let client = gate.client().await.unwrap();
    assert_eq!(run(&client, shell("echo on")).await.out(), "on\n");
    drop(client);
    // Half a call, and then another host.
    let mut cut = machine.raw().await;
    cut.write_all(&Hello::new(8, [3; 16]).encode()).await.unwrap();
    cut.write_all(&call(&order(8))[..50]).await.unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(cut);
    let (client, hello) = machine.connect(8).await;
    assert_eq!(hello.generation, 7);
    println!("identity: ok");
    client
}

/// What identifies a machine is new in a copy and stays over a wake; hooks run in between and can
/// refuse.
async fn renewal(machine: &Machine, client: Client) -> Client {
    let identity =
        "cat /etc/machine-id; cat /var/lib/systemd/random-seed | md5sum; cat /etc/dhcpcd.duid 2>&1";
    let prepare = "mkdir -p /var/lib/systemd /etc/keiki/thaw.d && head -c 512 /dev/zero >/var/lib/systemd/random-seed \
        && echo duid >/etc/dhcpcd.duid";
    assert_eq!(run(&client, shell(prepare)).await.exit.code, 0);
    let first = run(&client, shell(identity)).await.out();
    let wake = Identity { is_new: false, reason: "wake".into(), ..order(8) };
    let client = renew(machine, client, wake).await.unwrap();
    assert_eq!(run(&client, shell(identity)).await.out(), first);
    let client = renew(machine, client, order(9)).await.unwrap();
    let second = run(&client, shell(identity)).await.out();
    let (one, two): (Vec<_>, Vec<_>) = (first.lines().collect(), second.lines().collect());
    assert!(one[0].len() == 32 && two[0].len() == 32 && one[0] != two[0], "{first}{second}");
    assert!(one[1] != two[1] && one[2] == "duid" && two[2].contains("No such file"), "{first}{second}");
    let keep = "printf 'machine-id\\nduid\\n' >/etc/keiki/keep; echo duid >/etc/dhcpcd.duid";
    assert_eq!(run(&client, shell(keep)).await.exit.code, 0);
    let client = renew(machine, client, order(10)).await.unwrap();
    let third = run(&client, shell(identity)).await.out();
    assert_eq!((third.lines().next(), third.lines().last()), (Some(two[0]), Some("duid")));

    let secret = |name: &str, owner: &str| Plain {
        name: name.into(),
        value: zeroize::Zeroizing::new(name.into()),
        owner: owner.into(),
    };
    let given = sealed(&client, &[secret("ONE", ""), secret("TWO", "nobody")]).await;
    let with = |generation| Identity { secrets: Some(given.clone()), ..order(generation) };
    let client = renew(machine, client, with(11)).await.unwrap();
    let (client, again) = renew(machine, client, with(12)).await.unwrap_err();
    assert!(again.message().contains("no key was created"), "a key opened two messages: {again}");
    client.clone().thaw_user(ThawUserRequest {}).await.unwrap();
    let names = |text: &str| format!("cd /run/keiki/secrets && {text}");
    let seen = run(&client, shell(&names("cat ONE TWO; stat -c '%a %U' ONE TWO"))).await.out();
    assert_eq!(seen, "ONETWO400 root\n400 nobody\n");
    let (key, public_key) = Key::new();
    let one = vec!["ONE".to_owned()];
    let read = ReadSecretsRequest { names: one.clone(), public_key: public_key.into() };
    let read = key.open(&client.clone().read_secrets(read).await.unwrap().into_inner()).unwrap();
    assert_eq!(read, [secret("ONE", "")]);
    client.clone().wipe_secrets(WipeSecretsRequest { names: one }).await.unwrap();
    assert_eq!(
        run(&client, shell(&names("od -An -c ONE"))).await.out().split_whitespace().collect::<String>(),
        "\\0\\0\\0"
    );
    let back = sealed(&client, &read).await;
    client.clone().put_secrets(back).await.unwrap();
    assert_eq!(run(&client, shell(&names("cat ONE"))).await.out(), "ONE");
    let keep = Identity { keep_secrets: vec!["TWO".into()], ..order(12) };
    let client = renew(machine, client, keep).await.unwrap();
    assert_eq!(run(&client, shell(&names("ls"))).await.out(), "TWO\n");

    let hooks = "cd /etc/keiki/thaw.d && printf '#!/bin/sh\\nenv | grep ^KEIKI_ | sort >/tmp/hook' >10-env && chmod +x 10-env";
    assert_eq!(run(&client, shell(hooks)).await.exit.code, 0);
    let client = renew(machine, client, order(13)).await.unwrap();
    assert_eq!(
        run(&client, shell("cat /tmp/hook")).await.out(),
        "KEIKI_GENERATION=13\nKEIKI_PARENT_SANDBOX_ID=original\nKEIKI_PARENT_SNAPSHOT_ID=\nKEIKI_REASON=fork\nKEIKI_SANDBOX_ID=copy\n"
    );
    let refuse =
        "cd /etc/keiki/thaw.d && printf '#!/bin/sh\\necho no licence >&2; exit 3' >20-no && chmod +x 20-no";
    assert_eq!(run(&client, shell(refuse)).await.exit.code, 0);
    let (client, status) = renew(machine, client, order(14)).await.unwrap_err();
    assert!(status.message().contains("hook 20-no exited with 3: no licence"), "{status}");
    let info = client.clone().info(InfoRequest {}).await.unwrap().into_inner();
    assert!(info.user_frozen, "a machine that was not released runs");
    client.clone().thaw_user(ThawUserRequest {}).await.unwrap();
    let late = "cd /etc/keiki/thaw.d && printf '#!/bin/sh\\nsleep 1000' >20-no";
    assert_eq!(run(&client, shell(late)).await.exit.code, 0);
    let (client, status) = renew(machine, client, order(15)).await.unwrap_err();
    assert!(status.message().contains("did not exit within 10 s"), "{status}");
    client.clone().thaw_user(ThawUserRequest {}).await.unwrap();
    let left = run(&client, shell("rm -r /etc/keiki; ps -e -o args | grep -c '[s]leep 1000'")).await.out();
    assert_eq!(left, "0\n", "a hook that was given up still runs");
    println!("renewal: ok");
    client
}

async fn sealed(client: &Client, secrets: &[Plain]) -> SealedSecrets {
    let request = SecretKeyRequest { entropy: vec![7; 64].into() };
    let key = client.clone().secret_key(request).await.unwrap().into_inner().public_key;
    seal(&key, secrets).unwrap()
}

async fn freezing(client: &Client) {
    let busy = ExecSpec { id: "busy".into(), ..shell("while :; do :; done & while :; do :; done") };
    let _busy = client.clone().exec(busy).await.unwrap().into_inner();
    let spec = ExecSpec { id: "ticker".into(), ..shell("while :; do echo tick; sleep 0.02; done") };
    let mut ticks = client.clone().exec(spec).await.unwrap().into_inner();
    for _ in 0..5 {
        ticks.message().await.unwrap();
    }
    for round in 0..3 {
        let frozen =
            client.clone().freeze_user(FreezeUserRequest { timeout_ms: 2000 }).await.unwrap().into_inner();
        let info = client.clone().info(InfoRequest {}).await.unwrap().into_inner();
        assert!(info.user_frozen);
        let bytes = |client: Client| async move {
            let list = client.clone().list_execs(ListExecsRequest {}).await.unwrap().into_inner();
            list.execs.into_iter().find(|exec| exec.id == "ticker").unwrap().stdout_bytes
        };
        let before = bytes(client.clone()).await;
        // A command given meanwhile starts at the thaw.
        let (one, spec) = (client.clone(), shell("echo late"));
        let late = tokio::spawn(async move { run(&one, spec).await.out() });
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(bytes(client.clone()).await, before, "a frozen process wrote");
        assert!(!late.is_finished());
        let thawed = client.clone().thaw_user(ThawUserRequest {}).await.unwrap().into_inner();
        assert_eq!(late.await.unwrap(), "late\n");
        println!("round {round}: froze in {} us, thawed in {} us", frozen.micros, thawed.micros);
    }
    for id in ["ticker", "busy"] {
        client.clone().signal(SignalRequest { id: id.into(), signal: 9, whole_group: true }).await.unwrap();
    }
    println!("freezing: ok");
}

async fn reconnecting(machine: &Machine) {
    let (client, hello) = machine.connect(16).await;
    assert_eq!(hello.generation, 15);
    let name = id();
    // Slow enough to be still at it when the connection is gone.
    let spec = ExecSpec {
        id: name.clone(),
        ..shell("i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo $i; sleep 0.01; done; echo bad >&2; exit 5")
    };
    let mut stream = client.clone().exec(spec).await.unwrap().into_inner();
    let mut text = Vec::new();
    while text.len() < 100 {
        if let Event::Stdout(output) = stream.message().await.unwrap().unwrap().event.unwrap() {
            text.extend_from_slice(&output.data);
        }
    }
    drop((stream, client));
    for _ in 0..5 {
        drop(machine.connect(16).await);
    }
    let begin = Instant::now();
    let (client, _) = machine.connect(16).await;
    println!("connected again after {:?}", begin.elapsed());
    let request =
        AttachRequest { id: name.clone(), stdout_offset: text.len() as u64, stderr_offset: 0, polite: false };
    let rest = collect(client.clone().attach(request).await.unwrap().into_inner()).await;
    text.extend_from_slice(&rest.stdout);
    let expected: String = (1..=300).map(|n| format!("{n}\n")).collect();
    assert_eq!(String::from_utf8(text).unwrap(), expected);
    assert_eq!((rest.exit.code, rest.stderr), (5, b"bad\n".to_vec()));
    let again = AttachRequest { id: name, stdout_offset: 10, stderr_offset: 0, polite: false };
    let tail = collect(client.clone().attach(again).await.unwrap().into_inner()).await;
    assert_eq!(tail.out(), expected[10..]);
    // The connection goes while everything is in flight; the command goes on, and nothing is
    // missing.
    let spec = ExecSpec { id: "flood".into(), ..shell("head -c 6000000 /dev/zero | tr '\\0' 'y'") };
    let mut stream = client.clone().exec(spec).await.unwrap().into_inner();
    let mut got = 0u64;
    while got < 1_000_000 {
        if let Event::Stdout(output) = stream.message().await.unwrap().unwrap().event.unwrap() {
            assert_eq!(output.offset, got);
            got += output.data.len() as u64;
        }
    }
    drop((stream, client));
    let (client, _) = machine.connect(16).await;
    let request = AttachRequest { id: "flood".into(), stdout_offset: got, stderr_offset: 0, polite: false };
    let rest = collect(client.clone().attach(request).await.unwrap().into_inner()).await;
    assert_eq!(got + rest.stdout.len() as u64, 6_000_000, "output was lost");
    let begin = Instant::now();
    // Nobody comes back in time: the command is not held up, the oldest output gives way, offsets
    // tell.
    let spec = ExecSpec {
        id: "alone".into(),
        ..shell("head -c 5000000 /dev/zero; echo done > /tmp/alone; sleep 2")
    };
    drop((client.clone().exec(spec).await.unwrap(), client));
    // A busy host takes its time.
    let client = loop {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let (client, _) = machine.connect(16).await;
        if run(&client, shell("test -e /tmp/alone")).await.exit.code == 0 {
            break client;
        }
        assert!(begin.elapsed() < Duration::from_secs(90), "it was held up");
    };
    let request = AttachRequest { id: "alone".into(), ..AttachRequest::default() };
    let rest = collect(client.clone().attach(request).await.unwrap().into_inner()).await;
    assert_eq!(rest.stdout.len(), 1 << 20);
    let beyond =
        AttachRequest { id: "alone".into(), stdout_offset: 5_000_001, stderr_offset: 0, polite: false };
    assert_eq!(client.clone().attach(beyond).await.unwrap_err().code(), Code::InvalidArgument);
    println!("reconnecting: ok");
}
