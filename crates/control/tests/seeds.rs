//! The fuzz target of the control socket without a fuzzer: one seed for each message.
//!
//! The seeds also fix the format: a change to a message needs another [`keiki_control::VERSION`]
//! and new seeds (`KEIKI_WRITE_SEEDS=1`).

#[path = "../../../fuzz/bodies/control.rs"]
mod control;
#[path = "../../../fuzz/bodies/seeds.rs"]
mod seeds;

use keiki_control::{
    Boot, Cpu, Devices, Disk, FailureKind, Frozen, Hello, Load, Persisted, Reply, Request, Role, Shape,
    Stage, Step, Thaw, Thawed,
    packet::{encode_reply, encode_request},
};
use std::path::{Path, PathBuf};

fn messages() -> Vec<(String, Vec<u8>)> {
    let shape = Shape { vcpus: 2, memory_mib: 256 };
    let devices = Devices {
        mac: [2, 0, 0, 0, 0, 1],
        agent_port: "agent".into(),
        disks: vec![Disk { read_only: true }],
    };
    let boot = Boot { shape, cmdline: "quiet".into(), cpu: Cpu::Baseline, devices, generation: [7; 16] };
    let requests = [
        Request::Hello,
        Request::Boot(boot),
        Request::Load(Load { shape, digest: [9; 32] }),
        Request::Pause,
        Request::Resume,
        Request::Freeze,
        Request::Thaw(Thaw { generation: [8; 16] }),
        Request::Persist,
        Request::Layers,
    ];
    let steps = vec![Step { name: "fork".into(), ns: 1_000_000 }];
    let replies = [
        ("hello", Reply::Hello(Hello { stage: Stage::Zygote, paused: true, generation: 3, layers: 2 })),
        ("done", Reply::Done),
        (
            "frozen",
            Reply::Frozen(Frozen { pid: 77, vcpu_pause_ns: 900, private_bytes: 4096, steps: steps.clone() }),
        ),
        ("thawed", Reply::Thawed(Thawed { pid: 78, generation: [8; 16], steps })),
        ("persisted", Reply::Persisted(Persisted { pages: 5, zeroed: 6, state_bytes: 7, digest: [1; 32] })),
        ("failed", Reply::Failed { kind: FailureKind::NoSpace, sentence: "the store is full".into() }),
    ];
    let roles = |request: &Request| -> Vec<Role> { request.wants().iter().map(|want| want.role).collect() };
    let requests = requests.iter().map(|request| {
        let packet = encode_request(request, &roles(request)).expect("a request");
        (format!("request-{}", request.name().to_lowercase()), packet)
    });
    let replies =
        replies.iter().map(|(name, reply)| (format!("reply-{name}"), encode_reply(reply).expect("a reply")));
    requests.chain(replies).collect()
}

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/control")
}

#[test]
fn seeds_are_the_messages_of_this_version() -> std::io::Result<()> {
    if std::env::var_os("KEIKI_WRITE_SEEDS").is_some() {
        std::fs::create_dir_all(dir())?;
        messages().iter().try_for_each(|(name, packet)| std::fs::write(dir().join(name), packet))?;
    }
    for (name, packet) in messages() {
        assert_eq!(std::fs::read(dir().join(&name))?, packet, "{name} is another message than it was");
    }
    assert_eq!(std::fs::read_dir(dir())?.count(), messages().len());
    Ok(())
}

#[test]
fn mutations_are_refused_or_understood() {
    seeds::run("control", control::run, 20_000);
}
