//! A live recording can be recovered at any moment, and this makes its file no larger than what CPython's writer makes of the
//! same samples.

use std::fs::File;
use std::io::{Cursor, Read, Seek, SeekFrom};
use std::path::Path;
use tachyon::tach::{Compression, HEADER_LEN, Options, Reader, RecordCounts, Summary, Writer};
use tachyon_tests::{Interpreter, Profiler, Target, judge, live};

/// The samples of a file as they are stored.
fn stored(mut file: impl Read + Seek, end: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(HEADER_LEN)).expect("it is longer");
    file.take(end - HEADER_LEN).read_to_end(&mut bytes).expect("it can be read");
    bytes
}

/// What the writer makes of a file's samples, in their order, without a checkpoint; and what the file contains.
fn again(path: &Path) -> (Vec<u8>, Summary, Vec<u8>, RecordCounts, u64) {
    let mut reader = Reader::new(File::open(path).expect("it is there")).expect("it can be read");
    let header = *reader.header();
    let mut writer = Writer::new(Cursor::new(Vec::new()), Options::from(&header)).expect("memory can be written");
    let mut samples = reader.samples().expect("it has samples");
    while let Some(sample) = samples.next_sample().expect("to their end") {
        writer.write_sample(&sample).expect("memory can be written");
    }
    let (records, sample_bytes) = (samples.records(), samples.bytes_read());
    let (file, summary) = writer.finish::<&str>([], [], None).expect("memory can be written");
    let live = stored(File::open(path).expect("it is there"), header.string_table_offset);
    (stored(file, HEADER_LEN + summary.stored_bytes), summary, live, records, sample_bytes)
}

/// What CPython 3.15's writer makes of a file's samples, in their order: the number of bytes.
fn by_cpython(path: &Path) -> usize {
    let (told, _) = judge::python(path, Some("rewrite.py"), &["FILE"]);
    let lengths: Vec<usize> = serde_json::from_str(&told).expect("the script prints JSON");
    lengths[0]
}

#[test]
fn a_live_file_is_no_larger_than_cpythons() {
    let Some(_live) = live() else { return };
    for (program, threads, words) in [
        ("deep_stack.py", 1, &[][..]),
        ("deep_stack.py", 1, &["--compression", "none"]),
        ("eight_threads.py", 8, &[]),
        ("eight_threads.py", 8, &["--sync"]),
    ] {
        let target = Target::start(&Interpreter::named("pyenv_3_12"), program);
        let profiler = words.iter().fold(Profiler::of(target.pid()).native(), Profiler::arg);
        let recording = profiler.rate(1_999).cpu_milliseconds(target.pid(), 1_250).record();
        let path = &recording.path;
        let (plain, summary, live, records, sample_bytes) = again(path);
        assert!(summary.samples > 1_000, "{program}: {summary:?}");
        // Half a second's worth of repeated samples would be a record of its own.
        assert_eq!((sample_bytes, records), (summary.sample_bytes, summary.records), "{program}");
        let compressed = recording.recorded.header.compression == Compression::Zstd;
        let theirs = by_cpython(path);
        println!("{program} {words:?}: {} samples, {} bytes, {theirs} of CPython's", summary.samples, live.len());
        if threads == 1 {
            assert!(live == plain, "{program}: {} bytes, {} of the plain writer", live.len(), plain.len());
        }
        // For zstd: which of two equal matches it takes depends on where its blocks begin, and across threads the order of records
        // is not that of samples.
        let room = if compressed { theirs / 100 } else { 0 };
        assert!(live.len() <= theirs + room, "{program}: {} bytes, {theirs} of CPython's", live.len());
    }
}
