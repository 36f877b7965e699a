use super::{FRAME, MAX_PACKET, decode_reply, decode_request, encode_reply, encode_request};
use crate::{
    Boot, ControlError, Cpu, Devices, Disk, FailureKind, Frozen, Hello, Load, Persisted, Reply, Request,
    Role, Shape, Stage, Step, Thaw, Thawed, VERSION,
};
use keiki_sys::stopwatch::Steps;
use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};
use std::time::Duration;

fn shapes() -> impl Strategy<Value = Shape> {
    any::<(u32, u32)>().prop_map(|(vcpus, memory_mib)| Shape { vcpus, memory_mib })
}

fn requests() -> impl Strategy<Value = Request> {
    let disks = prop::collection::vec(any::<bool>().prop_map(|read_only| Disk { read_only }), 0..9);
    let devices = (any::<[u8; 6]>(), "[a-z.]{0,40}", disks);
    let devices = devices.prop_map(|(mac, agent_port, disks)| Devices { mac, agent_port, disks });
    let boot = (shapes(), ".{0,300}", devices, any::<[u8; 16]>());
    let boot = boot.prop_map(|(shape, cmdline, devices, generation)| {
        Request::Boot(Boot { shape, cmdline, cpu: Cpu::Baseline, devices, generation })
    });
    prop_oneof![
        Just(Request::Hello),
        boot,
        (shapes(), any::<[u8; 32]>()).prop_map(|(shape, digest)| Request::Load(Load { shape, digest })),
        Just(Request::Pause),
        Just(Request::Resume),
        Just(Request::Freeze),
        any::<[u8; 16]>().prop_map(|generation| Request::Thaw(Thaw { generation })),
        Just(Request::Persist),
        Just(Request::Layers),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(("[a-z]{1,12}", any::<u64>()).prop_map(|(name, ns)| Step { name, ns }), 0..12)
}

fn replies() -> impl Strategy<Value = Reply> {
    let stage = prop_oneof![Just(Stage::Blank), Just(Stage::Machine), Just(Stage::Zygote)];
    prop_oneof![
        (stage, any::<(bool, u32, u32)>()).prop_map(|(stage, (paused, generation, layers))| {
            Reply::Hello(Hello { stage, paused, generation, layers })
        }),
        Just(Reply::Done),
        (any::<(u32, u64)>(), steps()).prop_map(|((pid, vcpu_pause_ns), steps)| {
            Reply::Frozen(Frozen { pid, vcpu_pause_ns, private_bytes: 0, steps })
        }),
        (any::<u32>(), any::<[u8; 16]>(), steps())
            .prop_map(|(pid, generation, steps)| Reply::Thawed(Thawed { pid, generation, steps })),
        any::<(u64, u64, u64, [u8; 32])>().prop_map(|(pages, zeroed, state_bytes, digest)| {
            Reply::Persisted(Persisted { pages, zeroed, state_bytes, digest })
        }),
        ".{0,200}".prop_map(|sentence| Reply::Failed { kind: FailureKind::Refused, sentence }),
    ]
}

proptest! {
    #[test]
    fn requests_come_through(request in requests(), layers in 0..20_u8) {
        let roles: Vec<_> = (0..layers).flat_map(|disk| [Role::Layer, Role::DiskTop(disk)]).collect();
        let (decoded, with) = decode_request(&encode_request(&request, &roles).unwrap()).unwrap();
        assert_eq!((decoded, with), (request, roles));
    }

    #[test]
    fn replies_come_through(reply in replies()) {
        assert_eq!(decode_reply(&encode_reply(&reply).unwrap()).unwrap(), reply);
    }

    /// Cut anywhere, or with a byte changed, a packet is refused or another message: never a panic.
    #[test]
    fn damage_is_refused_or_understood(request in requests(), cut in any::<prop::sample::Index>(), bits in 1..=255_u8) {
        let packet = encode_request(&request, &[]).unwrap();
        let cut = cut.index(packet.len());
        assert!(decode_request(&packet[..cut]).is_err());
        let mut changed = packet.clone();
        changed[cut] ^= bits;
        if cut < FRAME.header_len() {
            assert!(decode_request(&changed).is_err());
        }
        let _ = (decode_request(&changed), decode_reply(&changed));
    }

    #[test]
    fn any_bytes_may_come(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        for version in [0, VERSION] {
            let mut packet = encode_reply(&Reply::Done).unwrap();
            packet.truncate(FRAME.header_len());
            packet[4..8].copy_from_slice(&version.to_le_bytes());
            packet[8..12].copy_from_slice(&(bytes.len() as u32).to_le_bytes());
            packet.extend(&bytes);
            let _ = (decode_request(&packet), decode_reply(&packet), decode_request(&bytes));
        }
    }
}

fn refusal(packet: &[u8]) -> String {
    decode_request(packet).expect_err("it was taken").to_string()
}

#[test]
fn each_field_of_the_header_is_checked() {
    let good = encode_request(&Request::Hello, &[]).unwrap();
    let changed = |at: usize, to: u8| {
        let mut packet = good.clone();
        packet[at] = to;
        packet
    };
    assert!(refusal(&[]).contains("fewer than its header"));
    assert!(refusal(&changed(0, b'X')).contains("wrong first bytes"));
    let ours = format!("this program version {VERSION}");
    assert!(refusal(&changed(4, 9)).contains(&format!("speaks version 9, {ours}")));
    assert!(refusal(&changed(6, 1)).contains(&ours));
    assert!(refusal(&changed(8, 1)).contains("header says 1 bytes"));
    assert!(refusal(&changed(11, 0xff)).contains("header says"));
    assert!(refusal(&changed(12, 99)).contains("schema"));
    let mut longer = good.clone();
    longer.push(0);
    longer[8] += 1;
    assert!(refusal(&longer).contains("left over"));
}

/// A list that claims to be endless costs no memory.
#[test]
fn a_length_in_the_body_is_not_believed() {
    let mut packet = encode_request(&Request::Hello, &[]).unwrap();
    packet.truncate(FRAME.header_len());
    // Hello, then a list of u32::MAX roles.
    packet.extend([0, 0xff, 0xff, 0xff, 0xff, 0x0f]);
    packet[8] = 6;
    assert!(refusal(&packet).contains("schema"));
}

#[test]
fn what_is_too_long_is_not_sent() {
    let boot = Boot {
        shape: Shape { vcpus: 1, memory_mib: 1 },
        cmdline: "x".repeat(MAX_PACKET),
        cpu: Cpu::Baseline,
        devices: Devices { mac: [0; 6], agent_port: String::new(), disks: Vec::new() },
        generation: [0; 16],
    };
    assert!(matches!(encode_request(&Request::Boot(boot), &[]), Err(ControlError::Malformed(_))));
}

#[test]
fn steps_keep_their_order_and_their_nanoseconds() {
    let steps = Steps(vec![("fork".into(), Duration::from_micros(3)), ("run".into(), Duration::MAX)]);
    let wanted = [("fork", 3000), ("run", u64::MAX)].map(|(name, ns)| Step { name: name.into(), ns });
    assert_eq!(Step::list(&steps), wanted);
}
