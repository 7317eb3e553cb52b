//! The symbolizer with records made by hand, and with live interpreters.

use super::*;
use crate::symbolize::MAX_LINETABLE_BYTES;
use crate::symbolize::linetable::tests::pyenv_python;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use tachyon_common::event::code as code_flags;
use tachyon_common::layout::flags;
use tachyon_common::walk::{CodeBuffer, TextHash, Unreadable, code_identity};

const KEY: CodeKey = CodeKey { image: 7, code: 0x1000, fingerprint: 99 };
/// Two instructions: line 11 columns 1 to 2, line 12 columns 3 to 4.
const TABLE: &[u8] = &[0xd8, 1, 2, 0xd8, 3, 4];

fn layout(minor: u32) -> Layout {
    Layout { version_hex: 3 << 24 | minor << 16, ..Layout::default() }
}

/// A record of the code object [`KEY`] whose line table is all in one part.
fn record(qualname: &[u8], filename: &[u8], table: &[u8]) -> (CodeRecord, Vec<u8>) {
    let bytes = |part: &[u8]| u32::try_from(part.len()).unwrap();
    let record = CodeRecord {
        image: KEY.image,
        code: KEY.code,
        fingerprint: KEY.fingerprint,
        tgid: 42,
        layout: 3,
        firstlineno: 10,
        linetable_len: bytes(table),
        qualname_bytes: bytes(qualname),
        filename_bytes: bytes(filename),
        linetable_bytes: bytes(table),
        qualname_kind: 1,
        filename_kind: 1,
        ..CodeRecord::default()
    };
    (record, [qualname, filename, table, &[0; 7]].concat())
}

/// One part of a line table of `total` bytes; the first one brings the names.
fn part(start: usize, bytes: &[u8], total: usize) -> (CodeRecord, Vec<u8>) {
    let (qualname, filename): (&[u8], &[u8]) = if start == 0 { (b"f", b"f.py") } else { (b"", b"") };
    let (mut record, payload) = record(qualname, filename, bytes);
    record.linetable_start = u32::try_from(start).unwrap();
    record.linetable_len = u32::try_from(total).unwrap();
    (record, payload)
}

/// `function file line:column`.
fn show(profile: &Profile, id: FrameId) -> String {
    let frame = profile.frames.get(id);
    let (function, filename) = (profile.strings.get(frame.function), profile.strings.get(frame.filename));
    format!("{function} {filename} {}:{}", frame.lineno, frame.column)
}

fn add(symbolizer: &mut Symbolizer, profile: &mut Profile, part: &(CodeRecord, Vec<u8>)) -> Result<(), BadCodeRecord> {
    symbolizer.add_code(profile, &part.0, &part.1, &layout(12))
}

#[test]
fn names_may_come_before_and_after_the_frame() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let early = symbolizer.frame(&mut profile, KEY, 2, Frame::NO_OPCODE);
    assert!(!symbolizer.is_named(early));
    assert_eq!(show(&profile, early), "<unknown function> <unknown file> -1:-1");
    assert_eq!(symbolizer.missing(), [Missing { key: KEY, tgid: None, layout: None, names: true, linetable: true }]);

    add(&mut symbolizer, &mut profile, &record(b"C.f", b"/a b;c.py", TABLE)).unwrap();
    assert_eq!(show(&profile, early), "C.f /a b;c.py 12:3");
    assert!(symbolizer.is_named(early));
    assert_eq!(symbolizer.missing(), []);

    let late = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
    assert_eq!(show(&profile, late), "C.f /a b;c.py 11:1");
    let not_started = symbolizer.frame(&mut profile, KEY, -1, Frame::NO_OPCODE);
    assert_eq!(show(&profile, not_started), "C.f /a b;c.py 10:-1");
    let in_a_trace = symbolizer.frame(&mut profile, KEY, UNKNOWN_LASTI, Frame::NO_OPCODE);
    assert_eq!(show(&profile, in_a_trace), "C.f /a b;c.py -1:-1");
    // The same arguments give the same frame; opcodes are part of them.
    assert_eq!(symbolizer.frame(&mut profile, KEY, 2, Frame::NO_OPCODE), early);
    assert_eq!(symbolizer.frame(&mut profile, KEY, -1, Frame::NO_OPCODE), not_started);
    assert_eq!(symbolizer.frame(&mut profile, KEY, -7, Frame::NO_OPCODE), in_a_trace);
    assert_ne!(symbolizer.frame(&mut profile, KEY, 2, 100), early);
    // Another object at the same address has its own frame.
    let other = symbolizer.frame(&mut profile, CodeKey { fingerprint: 98, ..KEY }, 2, Frame::NO_OPCODE);
    assert!(!symbolizer.is_named(other));
    assert_eq!(symbolizer.health(KEY.image), ImageHealth { codes: 1, ..ImageHealth::default() });
}

#[test]
fn parts_of_a_line_table_come_in_any_order() {
    let table = [0xd8, 1, 2].repeat(50);
    let parts = [(0, 40), (40, 100), (100, 150)];
    for order in [[0, 1, 2, 2], [2, 1, 0, 0], [1, 1, 2, 0], [2, 0, 2, 1]] {
        let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
        let frame = symbolizer.frame(&mut profile, KEY, 60, Frame::NO_OPCODE);
        for index in order {
            let (start, end) = parts[index];
            add(&mut symbolizer, &mut profile, &part(start, &table[start..end], table.len())).unwrap();
        }
        assert_eq!(show(&profile, frame), "f f.py 41:1", "{order:?}");
        assert_eq!(symbolizer.missing(), []);
    }
}

#[test]
fn what_never_comes_is_unknown_at_the_end() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let table = [0xd8, 1, 2].repeat(50);
    let inside = symbolizer.frame(&mut profile, KEY, 2, Frame::NO_OPCODE);
    let outside = symbolizer.frame(&mut profile, KEY, 60, Frame::NO_OPCODE);
    let nameless = CodeKey { code: 0x2000, ..KEY };
    let nameless_frame = symbolizer.frame(&mut profile, nameless, 0, Frame::NO_OPCODE);
    let half_named = CodeKey { code: 0x3000, ..KEY };
    let half_frame = symbolizer.frame(&mut profile, half_named, 0, Frame::NO_OPCODE);

    add(&mut symbolizer, &mut profile, &part(0, &table[..40], table.len())).unwrap();
    let (mut half, payload) = record(b"", b"f.py", TABLE);
    half.code = half_named.code;
    half.flags = code_flags::QUALNAME_UNREADABLE;
    add(&mut symbolizer, &mut profile, &(half, payload)).unwrap();
    // Named already, but their lines are still to come.
    assert!(symbolizer.is_named(inside));
    assert_eq!(
        symbolizer.missing(),
        [
            Missing { key: KEY, tgid: Some(42), layout: Some(3), names: false, linetable: true },
            Missing { key: nameless, tgid: None, layout: None, names: true, linetable: true },
            Missing { key: half_named, tgid: Some(42), layout: Some(3), names: true, linetable: false },
        ]
    );

    symbolizer.finish(&mut profile);
    assert_eq!(show(&profile, inside), "f f.py 12:1");
    assert_eq!(show(&profile, outside), "f f.py -1:-1");
    assert_eq!(show(&profile, nameless_frame), "<unknown function> <unknown file> -1:-1");
    assert_eq!(show(&profile, half_frame), "<unknown function> f.py 11:1");
    let named = [inside, outside, nameless_frame, half_frame].map(|frame| symbolizer.is_named(frame));
    assert_eq!(named, [true, true, false, false]);
    assert!(symbolizer.health(KEY.image).is_sound());
}

#[test]
fn a_cut_name_says_so_and_is_not_asked_for_again() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let frame = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
    let mut cut = record(b"very_lo", b"f.py", TABLE);
    cut.0.flags = code_flags::QUALNAME_CUT;
    add(&mut symbolizer, &mut profile, &cut).unwrap();
    assert_eq!(show(&profile, frame), "very_lo… f.py 11:1");
    assert_eq!(symbolizer.missing(), []);
}

#[test]
fn records_that_contradict_themselves_are_refused() {
    let whole = record(b"f", b"f.py", TABLE);
    let change = |change: &dyn Fn(&mut CodeRecord)| {
        let mut part = whole.clone();
        change(&mut part.0);
        let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
        let result = add(&mut symbolizer, &mut profile, &part);
        (result.map_err(|why| why.to_string()), symbolizer.health(KEY.image))
    };
    type Case<'a> = (&'a dyn Fn(&mut CodeRecord), &'a str, bool);
    let cases: &[Case<'_>] = &[
        (&|r| r.qualname_bytes = u32::MAX, "code record announces 4294967305 bytes and brings 18", true),
        (&|r| r.linetable_bytes = 300, "code record announces 305 bytes and brings 18", true),
        (
            &|r| r.linetable_start = u32::MAX,
            "code record brings bytes 4294967295 to 4294967301 of a line table of 6",
            true,
        ),
        (&|r| r.linetable_len = 5, "code record brings bytes 0 to 6 of a line table of 5", true),
        (
            &|r| r.qualname_kind = 3,
            "cannot decode a qualified name: string has 3 bytes a code point, expected 1, 2 or 4",
            false,
        ),
        (
            &|r| r.filename_kind = 0,
            "cannot decode a file name: string has 0 bytes a code point, expected 1, 2 or 4",
            false,
        ),
        (
            &|r| r.qualname_kind = 2,
            "cannot decode a qualified name: string of 1 bytes does not hold whole code points of 2 bytes",
            false,
        ),
    ];
    for (how, message, sound) in cases {
        let (result, health) = change(*how);
        assert_eq!((result, health.is_sound()), (Err((*message).to_owned()), *sound));
    }
}

#[test]
fn a_layout_that_does_not_fit_shows_in_the_health() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    add(&mut symbolizer, &mut profile, &record(b"f", b"f.py", b"no line table")).unwrap();
    assert_eq!(symbolizer.health(KEY.image), ImageHealth { codes: 1, bad_tables: 1, ..ImageHealth::default() });
    let (mut other, payload) = record(b"f", b"f.py", TABLE);
    other.image = 8;
    let key = CodeKey::from(&other);
    symbolizer.frame(&mut profile, key, 4000, Frame::NO_OPCODE);
    add(&mut symbolizer, &mut profile, &(other, payload)).unwrap();
    symbolizer.frame(&mut profile, key, 2, Frame::NO_OPCODE);
    symbolizer.frame(&mut profile, key, 4002, Frame::NO_OPCODE);
    assert_eq!(symbolizer.health(8), ImageHealth { codes: 1, outside: 2, ..ImageHealth::default() });
}

#[test]
fn a_table_without_bytes_was_not_read() {
    for (minor, line, complete) in [(9, 10, true), (12, -1, false)] {
        let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
        let (record, payload) = record(b"f", b"f.py", b"");
        symbolizer.add_code(&mut profile, &record, &payload, &layout(minor)).unwrap();
        let frame = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
        assert_eq!(symbolizer.missing().is_empty(), complete);
        symbolizer.finish(&mut profile);
        assert_eq!(profile.frames.get(frame).lineno, line);
        assert!(symbolizer.health(KEY.image).is_sound());
    }
}

#[test]
fn an_image_has_a_budget() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let chunk = vec![0x80; 8192];
    let mut refused = 0;
    for number in 0..20_000 {
        let (mut record, payload) = part(0, &chunk, 1 << 20);
        record.code = number;
        refused += u32::from(add(&mut symbolizer, &mut profile, &(record, payload)).is_err());
        symbolizer.frame(&mut profile, CodeKey { code: number, ..KEY }, 0, Frame::NO_OPCODE);
    }
    let kept = symbolizer.codes.len();
    assert_eq!(kept + refused as usize, 20_000);
    assert!((7000..=8192).contains(&kept), "{kept}");
    assert!(profile.frames.len() <= kept + 1);
    // Other processes are not concerned; another program of this one is.
    let (mut record, payload) = record(b"g", b"g.py", TABLE);
    for (image, instance, told) in [(8, 0, "<unknown function> <unknown file> -1:-1"), (9, 1, "g g.py 11:1")] {
        symbolizer.begin_image(image, || Owner { instance, ..Owner::default() });
        record.image = image;
        let _maybe_refused = add(&mut symbolizer, &mut profile, &(record, payload.clone()));
        let frame = symbolizer.frame(&mut profile, CodeKey::from(&record), 0, Frame::NO_OPCODE);
        assert_eq!(show(&profile, frame), told);
    }
    assert_eq!(symbolizer.refused().len(), 1);
    symbolizer.forget(&mut profile, KEY.image);
    record.image = 10;
    add(&mut symbolizer, &mut profile, &(record, payload)).expect("what was held is free");
}

#[test]
fn a_huge_claim_allocates_nothing() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let frame = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
    add(&mut symbolizer, &mut profile, &part(0, TABLE, u32::MAX as usize)).unwrap();
    symbolizer.finish(&mut profile);
    assert_eq!(show(&profile, frame), "f f.py 11:1");
    // Nothing past the limit is waited for.
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let frame = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
    let table = [0xd8, 1, 2].repeat(MAX_LINETABLE_BYTES / 3 + 100);
    add(&mut symbolizer, &mut profile, &part(0, &table, table.len())).unwrap();
    assert_eq!(symbolizer.missing(), []);
    assert_eq!(show(&profile, frame), "f f.py 11:1");
    let past = symbolizer.frame(&mut profile, KEY, i32::MAX, Frame::NO_OPCODE);
    assert_eq!(show(&profile, past), "f f.py -1:-1");
}

#[test]
fn a_forgotten_image_leaves_its_frames_and_nothing_else() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let named = symbolizer.frame(&mut profile, KEY, 0, Frame::NO_OPCODE);
    add(&mut symbolizer, &mut profile, &record(b"f", b"f.py", TABLE)).unwrap();
    let unnamed = symbolizer.frame(&mut profile, CodeKey { code: 1, ..KEY }, 0, Frame::NO_OPCODE);
    symbolizer.forget(&mut profile, KEY.image);
    symbolizer.forget(&mut profile, 12345);
    assert!(symbolizer.codes.is_empty() && symbolizer.frames.is_empty() && symbolizer.incomplete.is_empty());
    assert_eq!(show(&profile, named), "f f.py 11:1");
    assert!(symbolizer.is_named(named) && !symbolizer.is_named(unnamed));
}

#[test]
fn equal_tables_of_many_processes_are_kept_once() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    for image in 0..200 {
        let (mut record, payload) = record(b"f", b"f.py", TABLE);
        record.image = image;
        add(&mut symbolizer, &mut profile, &(record, payload)).unwrap();
        symbolizer.frame(&mut profile, CodeKey::from(&record), 2, Frame::NO_OPCODE);
    }
    assert_eq!((symbolizer.tables.len(), profile.strings.len(), profile.frames.len()), (1, 2, 1));
}

/// A live process's memory.
struct ProcMem(std::fs::File);

impl UserMemory for ProcMem {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        self.0.read_exact_at(into, addr).map_err(|_| Unreadable)
    }
}

/// What `live.py` prints.
#[derive(serde::Deserialize)]
struct Live {
    qualname: u32,
    filename: u32,
    linetable: u32,
    firstlineno: u32,
    codes: Vec<LiveCodeFact>,
}

#[derive(serde::Deserialize)]
struct LiveCodeFact {
    address: u64,
    qualname: String,
    filename: String,
    last: Option<[Option<i32>; 4]>,
    length: i32,
}

#[test]
fn missing_names_are_read_from_the_live_process() {
    for minor in 8..=13 {
        let Some(python) = pyenv_python(&format!("3.{minor}")) else { continue };
        let mut child = Command::new(python)
            .args(["-c", include_str!("live.py")])
            .env("PYTHONIOENCODING", "utf-8")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let live: Live = serde_json::from_str(&line).unwrap();
        let layout = Layout {
            flags: if minor < 11 { flags::FRAME_OBJECTS } else { 0 },
            ob_type: 8,
            ob_size: 16,
            code_qualname: live.qualname,
            code_filename: live.filename,
            code_linetable: live.linetable,
            code_firstlineno: live.firstlineno,
            bytes_sval: 32,
            unicode_length: 16,
            unicode_state: 32,
            unicode_ascii_size: if minor < 12 { 48 } else { 40 },
            unicode_compact_size: if minor < 12 { 72 } else { 56 },
            unicode_kind_shift: 2,
            unicode_compact_bit: 1 << 5,
            unicode_ascii_bit: 1 << 6,
            ..layout(minor)
        }
        .complete();
        let memory = ProcMem(std::fs::File::open(format!("/proc/{}/mem", child.id())).unwrap());

        let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
        for (fact, line) in live.codes.iter().zip([5, 5, 5, 5]) {
            let identity =
                code_identity(&memory, &layout, 1, fact.address, &mut CodeBuffer::default(), &mut TextHash::default())
                    .unwrap();
            let key = CodeKey { image: 1, code: fact.address, fingerprint: identity.fingerprint };
            let frame = symbolizer.frame(&mut profile, key, fact.length - 2, Frame::NO_OPCODE);
            symbolizer.read_missing(&mut profile, key, &layout, 1, &memory).unwrap();
            let found = *profile.frames.get(frame);
            assert!(symbolizer.is_named(frame));
            assert_eq!(profile.strings.get(found.function), fact.qualname, "3.{minor}");
            assert_eq!(profile.strings.get(found.filename).replace("\\udcff", "?"), fact.filename, "3.{minor}");
            match fact.last {
                Some(last) => assert_eq!(
                    [found.lineno, found.end_lineno, found.column, found.end_column],
                    last.map(|number| number.unwrap_or(-1)),
                    "3.{minor}"
                ),
                None => assert!(found.lineno == 4 || found.lineno == line, "3.{minor}: line {}", found.lineno),
            }
            // Another fingerprint: another object is there. It is not asked for again.
            let stale = CodeKey { fingerprint: !identity.fingerprint, ..key };
            symbolizer.frame(&mut profile, stale, 0, Frame::NO_OPCODE);
            let changed = symbolizer.read_missing(&mut profile, stale, &layout, 1, &memory);
            assert_eq!(changed, Err(ReadCodeError::Changed(fact.address)));
        }
        assert_eq!(symbolizer.missing(), []);
        assert!(symbolizer.health(1).is_sound());

        drop(child.stdin.take());
        child.wait().unwrap();
        // Gone: tried three times.
        let gone = CodeKey { image: 1, code: live.codes[0].address, fingerprint: 5 };
        symbolizer.frame(&mut profile, gone, 0, Frame::NO_OPCODE);
        for left in [1, 1, 0] {
            let result = symbolizer.read_missing(&mut profile, gone, &layout, 1, &memory);
            assert_eq!((result, symbolizer.missing().len()), (Err(ReadCodeError::Unreadable(gone.code)), left));
        }
    }
}

#[test]
fn a_full_symbolizer_learns_nothing_more() {
    let (mut symbolizer, mut profile) = (Symbolizer::new(), Profile::default());
    let known = record(b"known", b"a.py", TABLE);
    add(&mut symbolizer, &mut profile, &known).expect("there is room");
    let key = CodeKey::from(&known.0);
    let first = symbolizer.frame(&mut profile, key, 0, Frame::NO_OPCODE);
    symbolizer.set_full(true);
    let mut other = record(b"other", b"b.py", TABLE);
    other.0.code += 64;
    assert_eq!(add(&mut symbolizer, &mut profile, &other), Err(BadCodeRecord::Full));
    assert_eq!(symbolizer.frame(&mut profile, key, 0, Frame::NO_OPCODE), first, "what was met stays as it is");
    let line = symbolizer.frame(&mut profile, key, 2, Frame::NO_OPCODE);
    assert_eq!((show(&profile, line), symbolizer.is_named(line)), ("known a.py -1:-1".to_owned(), true));
    let (frames, strings) = (profile.frames.len(), profile.strings.len());
    for lasti in 0..100 {
        let unknown = symbolizer.frame(&mut profile, CodeKey::from(&other.0), lasti, Frame::NO_OPCODE);
        assert!(!symbolizer.is_named(unknown) && show(&profile, unknown).starts_with(UNKNOWN_FUNCTION));
        assert_eq!(symbolizer.frame(&mut profile, key, 2 + lasti, Frame::NO_OPCODE), line);
    }
    assert!(profile.frames.len() <= frames + 1 && profile.strings.len() <= strings + 2, "no table grows");
    symbolizer.set_full(false);
    add(&mut symbolizer, &mut profile, &other).expect("there is room again");
    let now = symbolizer.frame(&mut profile, CodeKey::from(&other.0), 0, Frame::NO_OPCODE);
    assert_eq!(show(&profile, now), "other b.py 11:1");
}
