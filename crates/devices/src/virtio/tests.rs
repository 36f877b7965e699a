//! Chains and rings by themselves, at their edges.

use super::{Chain, INT_USED, Line, Rings, Segment, slice};
use crate::{Event, Memory, limit::Limit};
use proptest::prelude::{prop_assert_eq, proptest};
use virtio_queue::{Queue, QueueState};
use vm_memory::{Bytes, GuestAddress};

const SIZE: u16 = 8;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const DATA: u64 = 0x8000;

fn memory() -> Memory {
    Memory::from_ranges(&[(GuestAddress(0), 0x1_0000), (GuestAddress(0x1_0000), 0x1_0000)]).unwrap()
}

/// A queue whose indices stand at `index`.
fn rings(index: u16, event_idx: bool) -> Rings {
    let memory = memory();
    let queue = Queue::try_from(QueueState {
        max_size: SIZE,
        next_avail: index,
        next_used: index,
        event_idx_enabled: event_idx,
        size: SIZE,
        ready: true,
        desc_table: DESC,
        avail_ring: AVAIL,
        used_ring: USED,
    })
    .unwrap();
    memory.write_obj(index, GuestAddress(AVAIL + 2)).unwrap();
    memory.write_obj(index, GuestAddress(USED + 2)).unwrap();
    Rings {
        memory,
        queues: vec![queue],
        events: vec![Event::new().unwrap()],
        line: Line::new(Box::new(Event::new().unwrap())),
        limit: Limit::new("test"),
        live: true,
    }
}

/// Makes `count` chains of one writable piece available, from `index` on.
fn offer(rings: &Rings, index: u16, count: u16) {
    for nth in 0..count {
        let slot = index.wrapping_add(nth) % SIZE;
        let at = DESC + 16 * u64::from(slot);
        rings.memory.write_obj(DATA + 64 * u64::from(slot), GuestAddress(at)).unwrap();
        rings.memory.write_obj(u64::from(2_u32) << 32 | 64, GuestAddress(at + 8)).unwrap();
        rings.memory.write_obj(slot, GuestAddress(AVAIL + 4 + 2 * u64::from(slot))).unwrap();
    }
    rings.memory.write_obj(index.wrapping_add(count), GuestAddress(AVAIL + 2)).unwrap();
}

fn used(rings: &Rings, index: u16) -> (u32, u32) {
    let at = USED + 4 + 8 * u64::from(index % SIZE);
    (rings.memory.read_obj(GuestAddress(at)).unwrap(), rings.memory.read_obj(GuestAddress(at + 4)).unwrap())
}

#[test]
fn chains_published_together_appear_together_also_around_the_end() {
    for start in [0, 5, u16::MAX - 2, u16::MAX] {
        let mut rings = rings(start, true);
        offer(&rings, start, 6);
        let taken: Vec<Chain> = (0..5).map(|_| rings.take(0).unwrap().unwrap()).collect();
        let index = |rings: &Rings| rings.memory.read_obj::<u16>(GuestAddress(USED + 2)).unwrap();
        assert_eq!(index(&rings), start);
        let lens: Vec<(Chain, u32)> = taken.into_iter().zip(10..).collect();
        rings.publish(0, &lens).unwrap();
        assert_eq!(index(&rings), start.wrapping_add(5));
        for (nth, (chain, len)) in (0_u16..).zip(&lens) {
            assert_eq!(used(&rings, start.wrapping_add(nth)), (chain.head.into(), *len), "{start} {nth}");
        }
        assert_eq!(rings.line.status.get(), INT_USED);
        // The sixth is taken, put back, and taken again.
        let sixth = rings.take(0).unwrap().unwrap();
        assert_eq!(rings.take(0).unwrap(), None);
        rings.untake(0, 1);
        assert_eq!(rings.take(0).unwrap(), Some(sixth));
    }
}

#[test]
fn nothing_happens_in_a_queue_that_is_not_live() {
    let mut rings = rings(0, false);
    offer(&rings, 0, 3);
    rings.live = false;
    assert_eq!(rings.take(0).unwrap(), None);
    rings.serve(0, |_, _| panic!("there is no chain")).unwrap();
    rings.live = true;
    assert_eq!(rings.take(7).unwrap(), None, "and there is no such queue");
    rings.publish(7, &[]).unwrap();
    rings.untake(7, 3);
    rings.kick(7);
    assert!(rings.take(0).unwrap().is_some());
}

proptest! {
    /// Copies from and to chains are those of their pieces behind each other.
    #[test]
    fn a_chain_is_the_bytes_of_its_pieces(
        pieces in proptest::collection::vec((0_u64..0xff00, 0_u32..300), 0..12),
        offset in 0_u64..3000,
        len in 0_usize..3000,
    ) {
        let memory = memory();
        let all: Vec<u8> = (0..0x2_0000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        memory.write_slice(&all, GuestAddress(0)).unwrap();
        // Some cross from one region to the next.
        let segments: Vec<Segment> = pieces
            .iter()
            .map(|&(at, len)| Segment { address: GuestAddress(at + 0x80), len })
            .collect();
        let flat: Vec<u8> = segments
            .iter()
            .flat_map(|piece| &all[piece.address.0 as usize..][..piece.len as usize])
            .copied()
            .collect();
        let expected: Vec<u8> = flat.iter().skip(offset as usize).take(len).copied().collect();
        let chain = Chain { head: 0, readable: segments.clone(), writable: Vec::new() };
        let mut into = vec![0; len];
        let count = chain.read(&memory, offset, &mut into);
        prop_assert_eq!(&into[..count], &expected[..]);
        let total: u64 = slice(&segments, offset, len as u64).map(|piece| u64::from(piece.len)).sum();
        prop_assert_eq!(total as usize, expected.len());
        // Writing writes as much, and nothing else, into pieces that do not overlap.
        let mut at = 0;
        let apart: Vec<Segment> = pieces
            .iter()
            .map(|&(_, len)| {
                let segment = Segment { address: GuestAddress(at), len };
                at += u64::from(len) + 1;
                segment
            })
            .collect();
        let chain = Chain { head: 0, readable: Vec::new(), writable: apart.clone() };
        memory.write_slice(&vec![0; 0x2_0000], GuestAddress(0)).unwrap();
        let count = chain.write(&memory, offset, &vec![1; len]);
        prop_assert_eq!(count, expected.len());
        let mut after = vec![0; 0x2_0000];
        memory.read_slice(&mut after, GuestAddress(0)).unwrap();
        prop_assert_eq!(after.iter().filter(|&&byte| byte == 1).count(), count);
    }
}
