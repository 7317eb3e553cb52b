//! Which code objects are sent and which are known, over tables in plain memory.

#[allow(dead_code, reason = "the tests of the walk use all of it")]
mod image;

use image::{Family, Image};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use tachyon_common::codes::{CodeTables, Codes, KnownCode, SENT_ALL, SentSlot, progress, sent_key, set_progress};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{KNOWN_SLOTS, MAX_PENDING_CODES, SENT_SLOTS, SENT_WAYS};
use tachyon_common::walk::{CodeBuffer, CodeIdentity, TextHash, code_identity, lacks};

/// The two tables, of which only what was written takes memory: under Miri millions of slots would take minutes.
#[derive(Default)]
struct Tables {
    known: RefCell<HashMap<u32, KnownCode>>,
    sent: RefCell<HashMap<u32, SentSlot>>,
    /// What all other slots of `known` hold.
    everywhere: Cell<KnownCode>,
}

impl Tables {
    fn new() -> Self {
        Self::default()
    }
}

impl CodeTables for Tables {
    type Bucket = u32;

    fn known(&self, slot: u32) -> Option<KnownCode> {
        assert!(slot < KNOWN_SLOTS);
        Some(self.known.borrow().get(&slot).copied().unwrap_or(self.everywhere.get()))
    }

    fn set_known(&self, slot: u32, entry: &KnownCode) {
        assert!(slot < KNOWN_SLOTS);
        self.known.borrow_mut().insert(slot, *entry);
    }

    fn bucket(&self, index: u32) -> Option<u32> {
        assert!(index < SENT_SLOTS / SENT_WAYS);
        Some(index * SENT_WAYS)
    }

    fn sent(&self, bucket: u32, way: u32) -> SentSlot {
        assert!(way < SENT_WAYS);
        self.sent.borrow().get(&(bucket + way)).copied().unwrap_or_default()
    }

    fn set_sent(&self, bucket: u32, way: u32, slot: SentSlot) {
        assert!(way < SENT_WAYS);
        self.sent.borrow_mut().insert(bucket + way, slot);
    }
}

/// A process while it is sampled: image and instance, and what its interpreter counts.
#[derive(Clone, Copy)]
struct Process {
    instance: u64,
    image: u64,
    interp: i64,
    generation: u64,
}

const PARENT: Process = Process { instance: 1, image: 1, interp: 0, generation: 0 };

/// A sample with one frame, as the kernel side makes it: whether the code object was known, its fingerprint, and how many
/// records were sent.
fn sample(tables: &Tables, image: &Image, process: Process, code: u64) -> (bool, u64, u32) {
    let mut codes = Codes::default();
    let mut identity = CodeIdentity::default();
    codes.enter(&image.layout, (process.instance, process.image), process.interp, process.generation);
    let _zero = codes.look_up(&image.memory, tables, code, &mut identity);
    let known = codes.known != 0;
    if !known {
        let (buffer, file) = (&mut CodeBuffer::default(), &mut TextHash::default());
        identity = code_identity(&image.memory, &image.layout, 1, code, buffer, file).expect("readable");
        codes.note(tables, process.image, 5, code, &identity);
    }
    let mut sent = 0;
    while let Some((index, lacking)) = codes.next() {
        assert_eq!((index, lacking), (5, identity.lacks));
        set_progress(tables, sent_key(process.image, code, identity.fingerprint), SENT_ALL);
        codes.pending_next += 1;
        sent += 1;
    }
    (known, identity.fingerprint, sent)
}

/// An image with one code object that has a version.
fn versioned(family: Family) -> (Image, u64) {
    let mut image = Image::new(family);
    let code = image.code(1, &[1; 300]);
    image.memory.put_u32(code, image.layout.code_version, 77);
    (image, code)
}

#[test]
fn sent_once_and_known_from_then_on() {
    let tables = Tables::new();
    let (image, code) = versioned(Family::CurrentFrame);
    let (known, fingerprint, sent) = sample(&tables, &image, PARENT, code);
    assert_eq!((known, sent), (false, 1));
    assert_eq!(sample(&tables, &image, PARENT, code), (false, fingerprint, 0), "what has been sent is remembered");
    assert_eq!(sample(&tables, &image, PARENT, code), (true, fingerprint, 0));
    // A known one is not read but for its version.
    let reads = image.memory.reads.get();
    assert!(sample(&tables, &image, PARENT, code).0);
    assert_eq!(image.memory.reads.get() - reads, 1);
}

/// 200 forked workers send what they have from their parent no more, each of them having looked at it once; what one makes
/// after its fork is its own, at the same address, of the same version, with all of its parts where a sibling's lie.
#[test]
fn forked_siblings() {
    let tables = Tables::new();
    let (image, shared) = versioned(Family::CurrentFrame);
    let (_, parents, _) = sample(&tables, &image, PARENT, shared);
    let workers = if cfg!(miri) { 5 } else { 200 };
    for instance in 2..2 + workers {
        let child = Process { instance, ..PARENT };
        assert_eq!(sample(&tables, &image, child, shared), (false, parents, 0), "its own look");
        assert_eq!(sample(&tables, &image, child, shared), (true, parents, 0));
    }
    let mut siblings = Vec::new();
    for (instance, table) in [(1_000, 3), (1_001, 4)] {
        let child = Process { instance, ..PARENT };
        let mut image = image.clone();
        let made = image.code(9, &[table; 300]);
        image.memory.put_u32(made, image.layout.code_version, 78);
        let (known, fingerprint, sent) = sample(&tables, &image, child, made);
        assert_eq!((known, sent), (false, 1), "instance {instance}");
        for _ in 0..2 {
            assert_eq!(sample(&tables, &image, child, made).1, fingerprint);
        }
        assert!(sample(&tables, &image, child, made).0);
        siblings.push((made, fingerprint));
    }
    assert_eq!(siblings[0].0, siblings[1].0, "one address");
    assert_ne!(siblings[0].1, siblings[1].1);
}

/// What a version proves, it proves in one interpreter of one program.
#[test]
fn another_interpreter_or_program() {
    let tables = Tables::new();
    let (image, code) = versioned(Family::CurrentFrame);
    for _ in 0..2 {
        sample(&tables, &image, PARENT, code);
    }
    assert!(sample(&tables, &image, PARENT, code).0);
    for other in [Process { interp: 1, ..PARENT }, Process { image: 2, ..PARENT }, Process { interp: -1, ..PARENT }] {
        assert!(!sample(&tables, &image, other, code).0);
    }
    // Without an interpreter's id nothing is ever remembered.
    for _ in 0..3 {
        assert!(!sample(&tables, &image, Process { interp: -1, ..PARENT }, code).0);
    }
}

/// A recycled code object: another version, or another generation and another version.
#[test]
fn a_recycled_code_object_is_not_known() {
    for (family, generation) in [(Family::CurrentFrame, 0), (Family::Tagged, 10)] {
        let tables = Tables::new();
        let (mut image, code) = versioned(family);
        let now = Process { generation, ..PARENT };
        for _ in 0..2 {
            sample(&tables, &image, now, code);
        }
        let (known, before, _) = sample(&tables, &image, now, code);
        assert!(known);
        // Something was freed, and it was another one.
        let later = Process { generation: generation + u64::from(generation != 0), ..PARENT };
        assert!(sample(&tables, &image, later, code).0, "{family:?}");
        let table = identity_of(&image, code).linetable;
        image.memory.put(table, image.layout.bytes_sval + 150, &[2]);
        image.memory.put_u32(code, image.layout.code_version, 78);
        let last = Process { generation: later.generation + u64::from(generation != 0), ..PARENT };
        let (known, after, sent) = sample(&tables, &image, last, code);
        assert_eq!((known, sent), (false, 1), "{family:?}");
        assert_ne!(before, after);
        // From 3.14 on nothing is read while nothing is freed.
        if generation != 0 {
            for _ in 0..2 {
                sample(&tables, &image, last, code);
            }
            let reads = image.memory.reads.get();
            assert!(sample(&tables, &image, last, code).0);
            assert_eq!(image.memory.reads.get(), reads);
        }
    }
}

fn identity_of(image: &Image, code: u64) -> CodeIdentity {
    let (buffer, file) = (&mut CodeBuffer::default(), &mut TextHash::default());
    code_identity(&image.memory, &image.layout, 1, code, buffer, file).expect("readable")
}

/// Before 3.12, without a version, and while a part of it cannot be read, a code object is read in every sample.
#[test]
fn what_proves_nothing_is_not_remembered() {
    for family in [Family::FrameObjects, Family::CFrame] {
        let tables = Tables::new();
        let mut image = Image::new(family);
        let code = image.code(1, &[1; 300]);
        let (_, before, _) = sample(&tables, &image, PARENT, code);
        for _ in 0..3 {
            assert_eq!(sample(&tables, &image, PARENT, code), (false, before, 0));
        }
        let table = identity_of(&image, code).linetable;
        image.memory.put(table, image.layout.bytes_sval + 299, &[2]);
        let (known, after, sent) = sample(&tables, &image, PARENT, code);
        assert!(!known && sent == 1 && after != before, "{family:?}");
    }
    let (mut image, code) = versioned(Family::CurrentFrame);
    let tables = Tables::new();
    let table = identity_of(&image, code).linetable;
    let piece = image.memory.pieces.remove(&table).expect("it lies there");
    for _ in 0..3 {
        assert!(!sample(&tables, &image, PARENT, code).0, "without its line table");
    }
    assert_eq!(identity_of(&image, code).lacks, lacks::LINETABLE);
    image.memory.pieces.insert(table, piece);
    for _ in 0..2 {
        sample(&tables, &image, PARENT, code);
    }
    assert!(sample(&tables, &image, PARENT, code).0);
    image.memory.put_u32(code, image.layout.code_version, 0);
    for _ in 0..3 {
        assert!(!sample(&tables, &image, PARENT, code).0, "its interpreter has run out of versions");
    }
}

/// Whatever words of two entries come together in one slot: it is one of the two, or it is nobody's.
#[test]
fn a_torn_entry_is_a_miss() {
    let (image, code) = versioned(Family::Tagged);
    let layout = &image.layout;
    let entry = |process: Process, fingerprint, version| {
        let mut codes = Codes::default();
        codes.enter(layout, (process.instance, process.image), process.interp, process.generation);
        let generation = process.generation;
        let mut entry = KnownCode {
            owner: codes.owner,
            code,
            fingerprint,
            version,
            code_units: 50,
            generation,
            ..KnownCode::default()
        };
        entry.check = entry.sum();
        (codes, entry)
    };
    let (codes, ours) = entry(Process { generation: 4, ..PARENT }, 111, 77);
    let (_, theirs) = entry(Process { instance: 9, generation: 4, ..PARENT }, 222, 77);
    let (_, before) = entry(Process { generation: 3, ..PARENT }, 333, 76);
    for other in [theirs, before] {
        for words in 0..1_u32 << 7 {
            let pick = |bit: u32, our: u64, their: u64| if words & (1 << bit) == 0 { our } else { their };
            let torn = KnownCode {
                owner: pick(0, ours.owner, other.owner),
                code: pick(1, ours.code, other.code),
                fingerprint: pick(2, ours.fingerprint, other.fingerprint),
                version: pick(3, ours.version.into(), other.version.into()) as u32,
                code_units: pick(4, ours.code_units.into(), other.code_units.into()) as u32,
                generation: pick(5, ours.generation, other.generation),
                check: pick(6, ours.check, other.check),
                _pad: [0; 2],
            };
            let tables = Tables::new();
            tables.everywhere.set(torn);
            let (mut codes, mut identity) = (codes, CodeIdentity::default());
            let _zero = codes.look_up(&image.memory, &tables, code, &mut identity);
            assert!(codes.known == 0 || identity.fingerprint == ours.fingerprint, "words {words:b}");
            assert!(words != 0 || codes.known != 0, "the whole one is known");
        }
    }
}

/// A bucket holds four; what is overwritten is sent again, and nobody's progress is another's.
#[test]
fn a_full_bucket_forgets() {
    let tables = Tables::new();
    let buckets = u64::from(SENT_SLOTS / SENT_WAYS);
    let keys: Vec<u64> = (1..=9).map(|number| (number << 40 | number << 44) * buckets + 3).collect();
    for (number, &key) in (1..).zip(&keys) {
        set_progress(&tables, key, number);
        assert_eq!(progress(&tables, key), number);
        set_progress(&tables, key, number + 100);
        assert_eq!(progress(&tables, key), number + 100);
    }
    let held: Vec<u32> = keys.iter().map(|&key| progress(&tables, key)).collect();
    assert_eq!(held.iter().filter(|&&progress| progress != 0).count(), SENT_WAYS as usize, "{held:?}");
    for (number, held) in (101..).zip(held) {
        assert!(held == 0 || held == number);
    }
}

/// More new code objects than are remembered: the others are sent with a later sample.
#[test]
fn more_than_can_be_pending() {
    let tables = Tables::new();
    let mut codes = Codes::default();
    codes.enter(&Layout::default(), (1, 1), 0, 0);
    for number in 0..MAX_PENDING_CODES + 50 {
        let identity = CodeIdentity { fingerprint: number as u64, lacks: number as u32 & 7, ..CodeIdentity::default() };
        codes.note(&tables, 1, 1_023 - number, 4_096, &identity);
    }
    let mut found = Vec::new();
    while let Some(next) = codes.next() {
        found.push(next);
        codes.pending_next += 1;
    }
    let expected: Vec<_> = (0..MAX_PENDING_CODES).map(|number| (1_023 - number, number as u32 & 7)).collect();
    assert_eq!(found, expected);
    codes.clear();
    assert_eq!(codes.next(), None);
}
