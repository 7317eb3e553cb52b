//! The TACH reader and writer against files that CPython 3.15.2 wrote (`tests/golden/tach/`, see its README).
//!
//! Reading gives what CPython's own reader gave, which is next to each file; writing the same samples gives
//! CPython's bytes.

use serde_json::{Value, json};
use std::fs;
use std::io::Cursor;
use std::path::PathBuf;
use tachyon::tach::{Compression, CopyError, Frame, Layout, Mode, Options, ReadError, Reader, Sample, Tables, Writer};

const VALID: [&str; 10] = [
    "v01_empty",
    "v02_single",
    "v03_record_types",
    "v04_record_types_zstd",
    "v05_threads_status",
    "v06_locations_opcodes",
    "v07_unicode_zstd",
    "v08_stats_config",
    "v09_rle_split",
    "v10_capture_wall_zstd",
];

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tach").join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    fs::read(golden(&format!("{name}.tach"))).unwrap()
}

fn expected(name: &str) -> Vec<Value> {
    let text = fs::read_to_string(golden(&format!("{name}.jsonl"))).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn open(bytes: &[u8]) -> Result<Reader<Cursor<&[u8]>>, ReadError> {
    Reader::new(Cursor::new(bytes))
}

fn info(reader: &Reader<Cursor<&[u8]>>) -> Value {
    let header = reader.header();
    let statistics = reader.statistics();
    json!({
        "kind": "info", "version": 1, "python_version": header.python_version,
        "start_time_us": header.start_time_us, "sample_interval_us": header.sample_interval_us,
        "sample_count": header.sample_count, "thread_count": header.thread_count,
        "string_count": header.string_count, "frame_count": header.frame_count,
        "compression_type": if header.compression == Compression::Zstd { 1 } else { 0 },
        "duration_sec": statistics.map(|statistics| statistics.duration_sec),
        "sample_rate": statistics.map(|statistics| statistics.sample_rate),
        "error_rate": statistics.and_then(|statistics| statistics.error_rate),
        "missed_samples": statistics.and_then(|statistics| statistics.missed_samples),
        "mode": header.mode.map(|mode| mode as u32),
        "capture_features": header.features.map(tachyon::tach::Features::bits),
    })
}

fn frame_json(tables: &Tables, index: u32) -> Value {
    let frame = tables.frame(index).unwrap();
    let location = frame.location();
    json!([
        tables.string(frame.filename).unwrap(),
        tables.string(frame.function).unwrap(),
        location.map(|location| location.lineno),
        location.map(|location| location.end_lineno),
        location.map(|location| location.column),
        location.map(|location| location.end_column),
        frame.opcode(),
    ])
}

/// Everything the reader says about a file, in the form of the `.jsonl` next to it; the error, if any, is returned separately.
fn dump(bytes: &[u8]) -> (Vec<Value>, Option<ReadError>) {
    let mut reader = match open(bytes) {
        Ok(reader) => reader,
        Err(error) => return (Vec::new(), Some(error)),
    };
    let mut lines = vec![info(&reader)];
    let mut samples = match reader.samples() {
        Ok(samples) => samples,
        Err(error) => return (lines, Some(error)),
    };
    let tables = samples.tables();
    loop {
        match samples.next_sample() {
            Ok(Some(sample)) => lines.push(json!({
                "kind": "sample", "thread_id": sample.thread_id, "interpreter_id": sample.interpreter_id,
                "timestamp_us": sample.timestamp_us, "status": sample.status,
                "frames": sample.frames.iter().map(|&frame| frame_json(tables, frame)).collect::<Vec<_>>(),
            })),
            Ok(None) => break,
            Err(error) => return (lines, Some(error)),
        }
    }
    let records = samples.records();
    let changes = records.full + records.suffix + records.pop_push;
    lines.push(json!({
        "kind": "end", "samples": records.samples(),
        "stats": {
            "repeat_records": records.repeat, "repeat_samples": records.repeat_samples,
            "full_records": records.full, "suffix_records": records.suffix, "pop_push_records": records.pop_push,
            "total_records": records.total(), "total_samples": records.samples(), "stack_reconstructions": changes,
        },
    }));
    (lines, None)
}

#[test]
fn reads_what_cpython_reads() {
    for name in VALID.into_iter().chain(["x01_big_endian", "c03_wrong_file_size"]) {
        let (lines, error) = dump(&bytes(name));
        assert!(error.is_none(), "{name}: {error:?}");
        let expected = expected(name);
        assert_eq!(lines.len(), expected.len(), "{name}");
        for (number, (line, expected)) in lines.iter().zip(&expected).enumerate() {
            assert_eq!(line, expected, "{name}, line {}", number + 1);
        }
    }
}

#[test]
fn refuses_what_cpython_refuses() {
    let refusal = |name| {
        let (lines, error) = dump(&bytes(name));
        let expected = expected(name);
        assert_eq!(lines, expected[..expected.len() - 1], "{name}: what is read before the error");
        error.unwrap_or_else(|| panic!("{name} was read"))
    };
    let error = refusal("c01_truncated");
    assert!(matches!(error, ReadError::BadOffsets { size: 328, .. }), "{error:?}");
    assert!(error.to_string().contains("string table offset 385 is past the end"), "{error}");
    assert!(matches!(refusal("c02_bad_magic"), ReadError::BadMagic(0x5441_434b)));
    assert!(matches!(refusal("c04_string_index"), ReadError::InvalidStringIndex { frame: 0, .. }));
    let error = refusal("c05_varint_overflow");
    assert_eq!(error.to_string(), "malformed varint in string table");
}

/// Writes a file's samples again. Records of a thread follow each other in time order, so feeding the samples in the order
/// of the records makes the writer end each REPEAT record where CPython's ended it.
fn rewrite(bytes: &[u8], layout: Layout) -> (Vec<u8>, tachyon::tach::Summary) {
    let mut reader = open(bytes).unwrap();
    let header = *reader.header();
    let options = Options { layout, ..Options::from(&header) };
    let mut writer = Writer::new(Cursor::new(Vec::new()), options).unwrap();
    let mut samples = reader.samples().unwrap();
    while let Some(sample) = samples.next_sample().unwrap() {
        writer.write_sample(&sample).unwrap();
    }
    let tables = reader.tables();
    let frames: Vec<Frame> = tables.frames().to_vec();
    let (file, summary) = writer.finish(tables.strings(), frames, reader.statistics()).unwrap();
    (file.into_inner(), summary)
}

/// The file with its sample data decompressed; the header's offsets stay as they are.
fn decompressed(bytes: &[u8]) -> Vec<u8> {
    let header = *open(bytes).unwrap().header();
    let (head, tail) = bytes.split_at(64);
    let (samples, tables) = tail.split_at(usize::try_from(header.string_table_offset).unwrap() - 64);
    let samples = zstd::stream::decode_all(samples).unwrap();
    assert_eq!(head[56], 1);
    // What depends on the compressed size is left out: both offsets, and the file's size in the footer.
    [&head[..40], &head[56..], &samples, &tables[..tables.len() - 32 + 8]].concat()
}

#[test]
fn writes_cpythons_bytes() {
    for name in VALID {
        let original = bytes(name);
        let (written, summary) = rewrite(&original, Layout::Released);
        assert_eq!(summary.file_size, written.len() as u64, "{name}");
        if open(&original).unwrap().header().compression == Compression::Zstd {
            assert!(decompressed(&original) == decompressed(&written), "{name}: sample data or tables differ");
            assert!(written.len() <= original.len(), "{name}: {} > {} bytes", written.len(), original.len());
        } else {
            assert!(original == written, "{name}: bytes differ");
        }
    }
}

/// A copy of what CPython wrote is identical, and so is a copy of it in the early layout, except for the statistics.
#[test]
fn a_copy_is_the_same_file() {
    for name in VALID {
        let original = bytes(name);
        let (copy, summary) = open(&original).unwrap().copy_to(Cursor::new(Vec::new())).unwrap();
        assert!(copy.into_inner() == original, "{name}: bytes differ");
        assert_eq!(summary.file_size, original.len() as u64, "{name}");
        let (early, _) = rewrite(&original, Layout::Early);
        let (released, _) = open(&early).unwrap().copy_to(Cursor::new(Vec::new())).unwrap();
        let (lines, error) = dump(released.get_ref());
        assert!(error.is_none(), "{name}: {error:?}");
        assert_eq!(lines[1..], expected(name)[1..], "{name}");
        assert_eq!(open(released.get_ref()).unwrap().header().layout, Layout::Released, "{name}");
    }
    assert!(!open(&bytes("x01_big_endian")).unwrap().can_be_copied());
}

/// Takes this many bytes.
struct Room(Cursor<Vec<u8>>, u64);

impl std::io::Write for Room {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.position() + bytes.len() as u64 > self.1 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl std::io::Seek for Room {
    fn seek(&mut self, to: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.seek(to)
    }
}

/// A file that cannot be read and one that cannot be written are told apart.
#[test]
fn a_copy_that_fails_says_where() {
    for name in ["v03_record_types", "v04_record_types_zstd"] {
        let original = bytes(name);
        for room in 0..original.len() as u64 {
            let copied = open(&original).unwrap().copy_to(Room(Cursor::new(Vec::new()), room));
            let error = copied.err().unwrap_or_else(|| panic!("{name}: {room} bytes were enough"));
            assert!(matches!(error, CopyError::Write(_)), "{name}, {room} bytes: {error}");
        }
        // The first record's encoding, or the first byte of the compressed samples.
        let mut damaged = original;
        damaged[if name.ends_with("zstd") { 64 } else { 76 }] ^= 0x77;
        let error = open(&damaged).unwrap().copy_to(Cursor::new(Vec::new())).unwrap_err();
        assert!(matches!(error, CopyError::Read(_)), "{name}: {error}");
    }
}

#[test]
fn early_layout_holds_the_same_samples() {
    for name in VALID {
        let original = bytes(name);
        let (early, _) = rewrite(&original, Layout::Early);
        let (lines, error) = dump(&early);
        assert!(error.is_none(), "{name}: {error:?}");
        assert_eq!(open(&early).unwrap().header().layout, Layout::Early, "{name}");
        assert_eq!(lines[1..], expected(name)[1..], "{name}");
        assert_eq!(lines[0]["mode"], Value::Null, "{name}");
        // As the first description has it, byte for byte: counts of four bytes, offsets after them, eight zeros.
        let released = rewrite(&original, Layout::Released).0;
        assert_eq!(early[..28], released[..28], "{name}");
        assert_eq!(early[28..32], released[28..32], "{name}");
        assert_eq!(early[32..36], released[36..40], "{name}");
        assert_eq!(early[36..56], released[40..60], "{name}");
        assert_eq!(early[56..64], [0; 8], "{name}");
        assert_eq!(early[64..], released[64..], "{name}");
    }
}

/// No cut and no changed byte makes the reader panic, hang or take memory that the file's size does not explain.
#[test]
fn damage_is_an_error_and_nothing_else() {
    for name in VALID.into_iter().chain(["x01_big_endian"]) {
        let original = bytes(name);
        let step = original.len() / 400 + 1;
        for len in (0..original.len()).step_by(step) {
            let (_, error) = dump(&original[..len]);
            assert!(error.is_some(), "{name} cut to {len} bytes is read");
        }
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for position in (0..original.len()).step_by(step) {
            let mut changed = original.clone();
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            changed[position] ^= random.to_le_bytes()[3] | 1;
            dump(&changed);
        }
    }
}

#[test]
fn a_file_that_was_not_finished_says_so() {
    let mut file = Cursor::new(Vec::new());
    let mut writer = Writer::new(&mut file, Options { mode: Some(Mode::Cpu), ..Options::default() }).unwrap();
    writer.write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 1, status: 0, frames: &[0] }).unwrap();
    writer.end_samples().unwrap();
    drop(writer);
    let mut bytes = file.into_inner();
    bytes.extend([7; 64]);
    assert!(matches!(open(&bytes), Err(ReadError::Unfinished)));
    // Compressed samples are written late: for a long time the header is all there is.
    for header in [&bytes[..64], &[0; 64]] {
        assert!(matches!(open(header), Err(ReadError::Unfinished)));
    }
    assert!(matches!(open(&bytes[..63]), Err(ReadError::TooSmall(63))));
    assert!(matches!(open(&[b'x'; 64]), Err(ReadError::TooSmall(64))));
    let gperftools: Vec<u8> =
        [0_u64, 3, 0, 10_000, 0].into_iter().cycle().take(20).flat_map(u64::to_le_bytes).collect();
    assert!(matches!(open(&gperftools), Err(ReadError::BadMagic(0))));
}
