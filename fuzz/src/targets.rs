//! One entry for each decoder: its seeds, and how an input is run.
//!
//! A run says whether the input was accepted: a fuzzer whose inputs are all refused tests nothing but the refusal.

use std::io::Cursor;
use std::path::Path;

use tachyon::events::{Event, Events, head, with_native};
use tachyon::inspect::spans::ProcessContext;
use tachyon::inspect::{Evaluator, examine_file, published_layout};
use tachyon::profile::Profile;
use tachyon::remote::elf::Elf;
use tachyon::remote::{parse_maps, parse_stat};
use tachyon::sinks::text;
use tachyon::symbolize::linetable::{Format, LineTable};
use tachyon::symbolize::{CodeKey, Symbolizer};
use tachyon::tach;
use tachyon_common::event::{CodeRecord, ProcessRecord, RawFrame, SampleRecord, StackRecord, kind};
use tachyon_common::layout::Layout;
use tachyon_common::walk::{
    CodeBuffer, InterpBuffer, TextHash, ThreadBuffer, ThreadPointer, code_identity, read_thread, thread_facts,
};

use crate::input::Rng;
use crate::native;
use crate::recover;
use crate::symbols;
use crate::writer;

#[path = "../../tachyon-common/tests/image/mod.rs"]
mod image;

use image::{Family, Image, OWNER_SHIM, THREAD};

/// A decoder under test.
pub struct Target {
    /// Its name on the command line.
    pub name: &'static str,
    /// Inputs that it accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// How an input is run.
    pub run: Run,
}

/// One execution; says whether the input was accepted.
pub enum Run {
    /// Decodes these bytes; the dice choose what to ask about them.
    Bytes(fn(&[u8], &mut Rng) -> bool),
    /// Makes its own input from the seeds.
    Dice(fn(&[Vec<u8>], &mut Rng) -> bool),
}

/// All of them.
pub const TARGETS: [Target; 19] = [
    Target { name: "tach", seeds: tach_files, run: Run::Bytes(read_tach) },
    Target { name: "tach_writer", seeds: Vec::new, run: Run::Dice(writer::write) },
    Target { name: "recover", seeds: recover::recordings, run: Run::Dice(recover::rescue) },
    Target { name: "line_table", seeds: line_tables, run: Run::Bytes(locate) },
    Target { name: "text", seeds: texts, run: Run::Bytes(decode_text) },
    Target { name: "debug_offsets", seeds: || seed_files("bin"), run: Run::Bytes(walk_as_published) },
    Target { name: "elf", seeds: || seed_files("so"), run: Run::Bytes(examine) },
    Target { name: "thread_local", seeds: || seed_files("tls"), run: Run::Bytes(find_variable) },
    Target { name: "process_context", seeds: contexts, run: Run::Bytes(decode_context) },
    Target { name: "eh_frame", seeds: native::elf_files, run: Run::Bytes(native::compile_rules) },
    Target { name: "native_walk", seeds: native::tables, run: Run::Bytes(native::walk_hostile) },
    Target { name: "symbols", seeds: symbols::files, run: Run::Bytes(symbols::name_addresses) },
    Target { name: "demangle", seeds: symbols::mangled, run: Run::Bytes(symbols::demangle_name) },
    Target { name: "made_code", seeds: symbols::made, run: Run::Bytes(symbols::take_made_code) },
    Target { name: "proc", seeds: proc_files, run: Run::Bytes(parse_proc) },
    Target { name: "events", seeds: records, run: Run::Bytes(decode_events) },
    Target { name: "walk", seeds: Vec::new, run: Run::Dice(walk_hostile) },
    Target { name: "mixed", seeds: native::stacks, run: Run::Bytes(native::join_stacks) },
    Target { name: "live_code", seeds: Vec::new, run: Run::Dice(read_hostile_code) },
];

pub(crate) fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The committed inputs that coverage has found for a target, smallest first; none for targets that it does not guide.
///
/// # Panics
/// When one cannot be read.
#[must_use]
pub fn corpus_of(name: &str) -> Vec<Vec<u8>> {
    let Ok(entries) = std::fs::read_dir(here().join("corpus").join(name)) else { return Vec::new() };
    let inputs = entries.map(|entry| std::fs::read(entry.expect("it is listed").path()).expect("it is readable"));
    let mut inputs: Vec<_> = inputs.collect();
    inputs.sort_by(|one, other| one.len().cmp(&other.len()).then_with(|| one.cmp(other)));
    inputs
}

/// The files of a folder with this extension, in name order.
fn files(folder: &Path, extension: &str) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("cannot read {}: {error}", folder.display()));
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.retain(|path| path.extension().is_some_and(|found| found == extension));
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a file of the project is readable")).collect()
}

pub(crate) fn seed_files(extension: &str) -> Vec<Vec<u8>> {
    files(&here().join("seeds"), extension)
}

/// Files that CPython wrote, and one of our own without compression, whose records a change can reach.
fn tach_files() -> Vec<Vec<u8>> {
    let mut seeds = files(&here().join("../tests/golden/tach"), "tach");
    for layout in [tach::Layout::Released, tach::Layout::Early] {
        let mut names = tach::Interner::default();
        let options = tach::Options { compression: tach::Compression::None, layout, ..tach::Options::default() };
        let mut writer = tach::Writer::new(Cursor::new(Vec::new()), options).expect("memory can be written");
        let frames: Vec<u32> = (0..20).map(|n| names.frame("f.py", &format!("f{n}"), None, None)).collect();
        for step in 0..40_usize {
            let depth = [1, 1, 5, 6, 20, 3][step % 6];
            let sample = tach::Sample {
                thread_id: 7 + (step as u64 / 10) % 2,
                interpreter_id: 0,
                timestamp_us: step as u64 * 1000,
                status: 3,
                frames: &frames[20 - depth..],
            };
            writer.write_sample(&sample).expect("memory can be written");
        }
        let strings: Vec<&str> = names.strings().collect();
        let written = writer.finish(strings, names.frames(), None);
        seeds.push(written.expect("memory can be written").0.into_inner());
    }
    seeds
}

fn read_tach(bytes: &[u8], _rng: &mut Rng) -> bool {
    let Ok(mut reader) = tach::Reader::new(Cursor::new(bytes.to_vec())) else { return false };
    let tables = reader.tables();
    for frame in tables.frames() {
        let _names = (tables.string(frame.filename), tables.string(frame.function), frame.location(), frame.opcode());
    }
    let Ok(mut samples) = reader.samples() else { return false };
    // A file may say "repeat a billion times" in a few bytes, and mean it.
    for _ in 0..100_000 {
        match samples.next_sample() {
            Ok(Some(sample)) => {
                let tables = samples_tables(&sample);
                assert!(tables, "a reader gives checked indices");
            }
            Ok(None) => {
                let count = samples.records().samples();
                copy_tach(reader, count);
                return true;
            }
            Err(_) => return false,
        }
    }
    true
}

/// What can be read to its end can be copied, and the copy can be read.
fn copy_tach(reader: tach::Reader<Cursor<Vec<u8>>>, count: u64) {
    if !reader.can_be_copied() {
        return;
    }
    let (copy, summary) = reader.copy_to(Cursor::new(Vec::new())).expect("all of it was read before");
    assert_eq!(summary.samples, count);
    let mut copy = tach::Reader::new(copy).expect("it was written");
    let mut samples = copy.samples().expect("it was written");
    while samples.next_sample().expect("the samples are the same").is_some() {}
    assert_eq!(samples.records().samples(), count);
}

fn samples_tables(sample: &tach::Sample<'_>) -> bool {
    sample.frames.len() <= tach::MAX_DEPTH
}

/// Tables of all three formats, as CPython 3.9, 3.10 and 3.12 made them for small functions.
fn line_tables() -> Vec<Vec<u8>> {
    vec![
        vec![0, 1, 8, 1, 6, 1, 2, 255, 12, 3, 10, 250],
        vec![4, 1, 8, 1, 6, 128, 2, 255, 12, 3, 10, 250],
        vec![
            0x80, 0x00, 0xd8, 0x04, 0x0b, 0x90, 0x46, 0x89, 0x1e, 0x9c, 0x01, 0xf0, 0x05, 0x02, 0x05, 0x1d, 0xf0, 0x1e,
            0x01, 0x02, 0xe8, 0x00, 0xf8, 0x7f, 0x05, 0x41,
        ],
        vec![0xf2; 64],
        Vec::new(),
    ]
}

fn locate(bytes: &[u8], rng: &mut Rng) -> bool {
    let format = *rng.of(&[Format::Lnotab, Format::Ranges, Format::Locations]);
    let firstlineno = rng.odd() as u32 as i32;
    let whole = rng.below(4) != 0;
    let table = LineTable::new(format, firstlineno, bytes.into(), whole);
    for lasti in [-1, 0, 1, 2, 10, i32::MAX, i32::MIN, rng.odd() as u32 as i32, rng.below(400) as i32] {
        let position = table.locate(lasti);
        assert_eq!(position, table.locate(lasti), "the same question has the same answer");
        let _covers = table.covers(lasti);
    }
    assert!(table.size_bytes() < 1 << 24);
    table.is_sound()
}

fn texts() -> Vec<Vec<u8>> {
    let ucs2: Vec<u8> = "αβγ\u{fffd}".encode_utf16().flat_map(u16::to_ne_bytes).collect();
    let ucs4: Vec<u8> = "🐍a\u{202e}".chars().flat_map(|c| u32::from(c).to_ne_bytes()).collect();
    vec![b"Class.method.<locals>.<lambda>".to_vec(), b"\x1b[2J\n;\0\xff".to_vec(), ucs2, ucs4]
}

/// Text as it is in memory, then in every form in which we show it.
fn decode_text(bytes: &[u8], rng: &mut Rng) -> bool {
    let Ok(name) = tachyon::symbolize::text::decode(rng.below(9) as u8, bytes, rng.below(2) == 0) else {
        return false;
    };
    let shown = text::escape_controls(&name);
    assert!(!shown.contains(text::is_unsafe), "{shown:?}");
    let mut json = Vec::new();
    text::write_json(&mut json, &name).expect("a text has a form in JSON");
    let json = String::from_utf8(json).expect("JSON is text");
    assert!(!json.contains(text::is_unsafe), "{json:?}");
    true
}

/// An accepted layout is one that can be walked with, whatever is in memory.
fn walk_as_published(bytes: &[u8], rng: &mut Rng) -> bool {
    let Ok(Some(layout)) = published_layout(bytes) else { return false };
    let family = *rng.of(&Family::ALL);
    let mut hostile = hostile_image(family, rng);
    hostile.layout = layout;
    walk_all(&hostile);
    true
}

fn examine(bytes: &[u8], rng: &mut Rng) -> bool {
    let _evaluator = Evaluator::of_file(bytes);
    examine_file(bytes, rng.below(2) == 0).is_ok_and(|found| found.is_some())
}

fn find_variable(bytes: &[u8], _rng: &mut Rng) -> bool {
    let Ok(found) = Elf::parse(bytes).and_then(|elf| elf.thread_local("otel_thread_ctx_v1")) else { return false };
    found.is_some_and(|found| {
        assert!(found.offset + 8 <= found.segment.mem_size && found.slots.len() <= 16);
        true
    })
}

/// What ddtrace publishes, shortened.
fn contexts() -> Vec<Vec<u8>> {
    vec![
        b"\n\x2c\n\x16\n\x0cservice.name\x12\x06\n\x04shop\n\x12\n\x09host.name\x12\x05\n\x03one\x12.\n\x1athreadlocal.schema_version\
          \x12\x10\n\x0etlsdesc_v1_dev\x12*\n\x1dthreadlocal.attribute_key_map\x12\x09*\x07\n\x05\n\x03key"
            .to_vec(),
    ]
}

fn decode_context(bytes: &[u8], _rng: &mut Rng) -> bool {
    ProcessContext::decode(bytes, 1).is_ok_and(|context| {
        let texts = [&context.service, &context.namespace, &context.version, &context.instance, &context.environment];
        assert!(texts.into_iter().flatten().all(|text| text.len() <= 256) && context.attribute_keys.len() <= 256);
        context.service.is_some()
    })
}

fn proc_files() -> Vec<Vec<u8>> {
    vec![
        b"00400000-0041f000 r--p 00000000 fe:01 4242                             /usr/bin/python3.11\n\
          7ffd10000000-7ffd10021000 rw-p 00000000 00:00 0                          [stack]\n\
          7f0000002000-7f0000003000 r-xs 00001000 08:02 7 /tmp/with blank \xff\\012 (deleted)\n"
            .to_vec(),
        b"977 (py) S (x) R 1 977 977 0 -1 4194560 1000 0 0 0 10 20 0 0 20 0 3 0 12345 100000 200 18446744073709551615"
            .to_vec(),
    ]
}

fn parse_proc(bytes: &[u8], _rng: &mut Rng) -> bool {
    let stat = parse_stat(bytes).is_some();
    let Ok(maps) = parse_maps(bytes) else { return stat };
    for mapping in &maps {
        assert!(mapping.start < mapping.end && mapping.contains(mapping.start) && !mapping.contains(mapping.end));
        let _path = mapping.file_path();
    }
    stat || !maps.is_empty()
}

/// A record's first bytes; the rest are zeros.
fn record(kind: u16, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[..2].copy_from_slice(&kind.to_ne_bytes());
    bytes[4..8].copy_from_slice(&u32::try_from(len).expect("records are small").to_ne_bytes());
    bytes
}

fn records() -> Vec<Vec<u8>> {
    let (sample, frame, code) = (size_of::<SampleRecord>(), size_of::<RawFrame>(), size_of::<CodeRecord>());
    let mut with_frames = record(kind::SAMPLE, sample + 3 * frame);
    let count = std::mem::offset_of!(SampleRecord, python_frames);
    with_frames[count] = 3;
    let mut named = record(kind::CODE, code + 40);
    let mut put = |offset: usize, value: u32| named[offset..offset + 4].copy_from_slice(&value.to_ne_bytes());
    put(std::mem::offset_of!(CodeRecord, qualname_bytes), 8);
    put(std::mem::offset_of!(CodeRecord, filename_bytes), 16);
    put(std::mem::offset_of!(CodeRecord, linetable_bytes), 16);
    put(std::mem::offset_of!(CodeRecord, linetable_len), 16);
    named[std::mem::offset_of!(CodeRecord, qualname_kind)] = 1;
    named[std::mem::offset_of!(CodeRecord, filename_kind)] = 2;
    let mut part = named.clone();
    let start = std::mem::offset_of!(CodeRecord, linetable_start);
    part[start] = 16;
    part[std::mem::offset_of!(CodeRecord, linetable_len)] = 32;
    let process = record(kind::EXIT, size_of::<ProcessRecord>());
    let mut stack = record(kind::STACK, size_of::<StackRecord>() + 64);
    stack[std::mem::offset_of!(StackRecord, bytes)] = 64;
    let all = [stack.clone(), with_frames.clone(), named.clone(), part.clone(), process.clone()].concat();
    vec![with_frames, named, part, process, stack, all]
}

/// Records as the ring buffer delivers them, on to names and places.
fn decode_events(bytes: &[u8], rng: &mut Rng) -> bool {
    let layout = rng.of(&Family::ALL).layout();
    let (mut profile, mut symbolizer, mut good) = (Profile::default(), Symbolizer::new(), false);
    if let Some(other) = head(bytes).and_then(|record| with_native(bytes, &record, &[1, 2])) {
        assert_eq!(head(&other).map(|record| record.native_frames), Some(2));
    }
    for event in Events::new(bytes) {
        match event {
            Ok(
                Event::Sample(record, frames)
                | Event::Wait(record, frames, _)
                | Event::WaitBegin(record, frames, _)
                | Event::Waker(record, frames, _),
            ) => {
                good = true;
                assert_eq!(frames.len(), usize::from(record.python_frames));
                for frame in frames.iter() {
                    let key = CodeKey { image: record.image, code: frame.code, fingerprint: frame.fingerprint };
                    let _id = symbolizer.frame(&mut profile, key, frame.lasti, frame.opcode);
                }
            }
            Ok(Event::Code(record, payload)) => {
                good |= symbolizer.add_code(&mut profile, &record, payload, &layout).is_ok();
                let key = CodeKey { image: record.image, code: record.code, fingerprint: record.fingerprint };
                let _id = symbolizer.frame(&mut profile, key, rng.odd() as u32 as i32, 255);
            }
            Ok(Event::Stack(record, stack)) => {
                good = true;
                assert_eq!(stack.len(), record.bytes as usize);
            }
            Ok(Event::Process(_) | Event::WaitEnd(..)) => good = true,
            Err(_) => {}
        }
    }
    let _missing = symbolizer.missing();
    symbolizer.finish(&mut profile);
    symbolizer.forget(&mut profile, 0);
    good
}

/// A process whose memory was changed in places that matter.
fn hostile_image(family: Family, rng: &mut Rng) -> Image {
    let mut image = Image::new(family);
    let _second = image.interpreter();
    let depth = 1 + rng.below(6) as u32;
    let (_, frames) = image.stack(depth);
    image.thread(image.interp, THREAD + rng.below(2) as u64, frames[0]);
    if rng.below(2) == 0 {
        let shim = image.frame(0, 0, OWNER_SHIM, frames[0]);
        image.memory.put_u64(frames[frames.len() - 1], image.layout.frame_previous, shim);
    }
    let pieces: Vec<u64> = image.memory.pieces.keys().copied().collect();
    for _ in 0..rng.below(6) {
        let piece = *rng.of(&pieces);
        let value = if rng.below(2) == 0 { *rng.of(&pieces) } else { rng.odd() };
        let bytes = image.memory.pieces.get_mut(&piece).expect("it is one of them");
        let at = rng.below(bytes.len()) & !3;
        for (byte, new) in bytes.iter_mut().skip(at).zip(value.to_ne_bytes()) {
            *byte = new;
        }
    }
    if rng.below(8) == 0 {
        image.memory.pieces.remove(rng.of(&pieces));
    }
    if rng.below(8) == 0 {
        image.memory.failing = Some(rng.below(64) as u64);
    }
    image
}

fn walk_all(image: &Image) -> image::Outcome {
    let outcome = image.walk();
    // 20 steps of 64 threads and 11 of 104 frames, a few reads each.
    assert!(image.memory.reads.get() < 20_000, "{} reads", image.memory.reads.get());
    let mut thread = ThreadBuffer::default();
    if read_thread(&image.memory, &image.layout, outcome.tstate, &mut thread).is_ok() {
        let _facts = thread_facts(
            &image.memory,
            &image.layout,
            (&image.entry, ThreadPointer { address: THREAD, reach: 0 }),
            outcome.tstate,
            &thread,
            &mut InterpBuffer::default(),
        );
    }
    outcome
}

fn walk_hostile(_seeds: &[Vec<u8>], rng: &mut Rng) -> bool {
    let family = *rng.of(&Family::ALL);
    let mut image = hostile_image(family, rng);
    if rng.below(16) == 0 {
        // Validation comes before the walk; the walk must not need it to be safe.
        image.layout = wild(image.layout, rng);
    }
    walk_all(&image).stop == tachyon_common::stop::StopReason::Complete
}

fn wild(layout: Layout, rng: &mut Rng) -> Layout {
    let number = rng.odd() as u32;
    match rng.below(11) {
        0 => Layout { frame_read: number as u16, ..layout },
        8 => Layout { tstate_read: number as u16, ..layout },
        1 => Layout { code_read: number as u16, ..layout },
        9 => Layout { interp_read: number as u16, ..layout },
        10 => Layout { interp_at: number, ..layout },
        2 => Layout { frame_previous: number, ..layout },
        3 => Layout { frame_instr: number, ..layout },
        4 => Layout { code_linetable: number, ..layout },
        5 => Layout { bytes_sval: number, ..layout },
        6 => Layout { ob_size: number, ..layout },
        _ => Layout { instr_unit: number, flags: rng.odd() as u32, ..layout },
    }
}

/// Code objects read from a live process that changes them, as user space reads them.
fn read_hostile_code(_seeds: &[Vec<u8>], rng: &mut Rng) -> bool {
    const SEED: u64 = 7;
    let family = *rng.of(&Family::ALL);
    let image = hostile_image(family, rng);
    let (mut profile, mut symbolizer, mut read) = (Profile::default(), Symbolizer::new(), false);
    let pieces: Vec<u64> = image.memory.pieces.keys().copied().collect();
    for code in pieces {
        let identity = code_identity(
            &image.memory,
            &image.layout,
            SEED,
            code,
            &mut CodeBuffer::default(),
            &mut TextHash::default(),
        );
        let Ok(identity) = identity else { continue };
        let key = CodeKey { image: 1, code, fingerprint: identity.fingerprint };
        let _frame = symbolizer.frame(&mut profile, key, 0, 255);
        read |= symbolizer.read_missing(&mut profile, key, &image.layout, SEED, &image.memory).is_ok();
    }
    symbolizer.finish(&mut profile);
    read
}
