//! `convert`: what tables hold of TACH files, ours and CPython's, and that it comes back.

mod support;

use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use support::{Segment, fails, succeeds, word};
use tachyon::tach::Reader;
use tachyon_fleet::load::{self, Tables};

/// Files that CPython 3.15.2 wrote (`tests/golden/tach/README.md`), which its own reader reads.
const GOLDEN: [&str; 10] = [
    "v02_single",
    "v03_record_types",
    "v04_record_types_zstd",
    "v05_threads_status",
    "v06_locations_opcodes",
    "v07_unicode_zstd",
    "v08_stats_config",
    "v09_rle_split",
    "v10_capture_wall_zstd",
    "x01_big_endian",
];

/// File, function and line of each frame, innermost first; and whether the thread was on a CPU.
type Stack = (Vec<(String, String, Option<i32>)>, bool);
type Counts = BTreeMap<Stack, i64>;

fn golden(name: &str, ending: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tach").join(format!("{name}.{ending}"))
}

/// What CPython's own reader says.
fn expected(name: &str) -> Counts {
    let text = fs::read_to_string(golden(name, "jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let mut counts = Counts::new();
    for line in lines.filter(|line: &Value| line["kind"] == "sample") {
        let frame = |frame: &Value| {
            let line = frame[2].as_i64().map(|line| i32::try_from(line).unwrap()).filter(|&line| line != -1);
            (frame[0].as_str().unwrap().to_owned(), frame[1].as_str().unwrap().to_owned(), line)
        };
        let frames = line["frames"].as_array().unwrap().iter().map(frame).collect();
        *counts.entry((frames, line["status"].as_u64().unwrap() & 2 != 0)).or_default() += 1;
    }
    counts
}

fn read(root: &Path) -> Tables {
    load::read(&[root.to_owned()]).unwrap()
}

/// What tables say, in TACH's words.
fn counts(tables: &Tables) -> Counts {
    let mut counts = Counts::new();
    for row in &tables.samples {
        let frame = |id: &i64| {
            let row = &tables.frames[id];
            let (file, function) = (row.file.to_string(), row.function.to_string());
            match &*row.kind {
                "python" => (file, function, row.line),
                "native" if !file.is_empty() => ("~".to_owned(), format!("{file}!{function}"), None),
                "kernel" => ("~".to_owned(), format!("[k] {function}"), None),
                _ => ("~".to_owned(), function, None),
            }
        };
        let frames: Vec<_> = tables.stacks[&row.stack_id].iter().map(frame).collect();
        let interval = (row.on_cpu_ns + row.waiting_ns) / row.samples;
        for (ns, on_cpu) in [(row.on_cpu_ns, true), (row.waiting_ns, false)] {
            if ns > 0 {
                *counts.entry((frames.clone(), on_cpu)).or_default() += ns / interval;
            }
        }
    }
    counts
}

/// All files below a directory with their content.
fn content(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(root).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(
                content(&path)
                    .into_iter()
                    .map(|(inner, bytes)| (Path::new(path.file_name().unwrap()).join(inner), bytes)),
            );
        } else {
            found.insert(path.file_name().unwrap().into(), fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn tables_of_cpythons_files_say_what_cpython_says() {
    let dir = tempfile::tempdir().unwrap();
    for name in GOLDEN {
        let (tables, back, again) =
            (dir.path().join(name), dir.path().join(format!("{name}.tach")), dir.path().join("again"));
        succeeds(&["convert", word(&golden(name, "tach")), "-o", word(&tables)]);
        let expected = expected(name);
        assert!(!expected.is_empty(), "{name}");
        assert_eq!(counts(&read(&tables)), expected, "{name}");
        // And back, and there again: nothing is lost on the way.
        succeeds(&["convert", word(&tables), "-o", word(&back)]);
        succeeds(&["convert", word(&back), "-o", word(&again)]);
        assert_eq!(counts(&read(&again)), expected, "{name}");
        let reader = Reader::new(fs::File::open(&back).unwrap()).unwrap();
        assert_eq!(reader.header().sample_count, expected.values().sum::<i64>().unsigned_abs(), "{name}");
        fs::remove_dir_all(&again).unwrap();
    }
}

const APP: [(&str, &str, &[&str], u64); 5] = [
    ("web", "1", &["main", "handle", "libz.so.1!deflate"], 30),
    ("web", "1", &["main", "handle"], 20),
    ("web", "1", &["main", "<waiting: socket>"], 7),
    ("my shop", "2", &["main", "handle"], 5),
    ("my shop", "2", &["main", "[k] read"], 1),
];

fn app(host: &str, sequence: u64) -> Segment<'_> {
    Segment { host, sequence, samples: &APP, loss: &[("ring_full", 3), ("uninspected", 0)], before: &[] }
}

#[test]
fn a_spool_becomes_tables_with_labels_and_losses() {
    let dir = tempfile::tempdir().unwrap();
    let (spool, tables) = (dir.path().join("spool"), dir.path().join("tables"));
    fs::create_dir(&spool).unwrap();
    let segment = app("h1", 0);
    segment.write(&spool);
    fs::write(spool.join("state.json"), "{}").unwrap();
    succeeds(&["convert", word(&spool), "-o", word(&tables)]);
    let name = format!("{}.parquet", segment.name());
    let hour = Path::new("date=2026-11-22/hour=19");
    let mut files: Vec<PathBuf> = ["frames", "samples", "stacks"]
        .iter()
        .flat_map(|table| ["my%20shop", "web"].map(|service| (table, service)))
        .map(|(table, service)| Path::new(table).join(hour).join(format!("service={service}")).join(&name))
        .collect();
    files.insert(2, Path::new("loss").join(hour).join("service=__HIVE_DEFAULT_PARTITION__").join(&name));
    assert_eq!(content(&tables).into_keys().collect::<Vec<_>>(), files);

    let tables = read(&tables);
    let all: i64 = tables.samples.iter().map(|row| row.samples).sum();
    assert_eq!((all, tables.samples.len(), tables.stacks.len()), (63, 5, 4), "a stack of two services is one");
    for row in &tables.samples {
        assert_eq!((&*row.host, row.slice_start_ms), ("h1", 1_795_374_073_000));
        assert_eq!(row.labels.others, BTreeMap::from([("team".to_owned(), "a".to_owned())]));
        let (version, pid) = if &*row.service == "web" { ("1", 100) } else { ("2", 101) };
        assert_eq!((row.labels.version.as_deref(), row.labels.pid), (Some(version), Some(pid)));
        let waits = &*tables.frames[&tables.stacks[&row.stack_id][0]].function == "<waiting: socket>";
        let ns = row.samples * 10_000_000;
        assert_eq!([row.on_cpu_ns, row.waiting_ns], if waits { [0, ns] } else { [ns, 0] });
    }
    let native = tables.frames.values().find(|frame| &*frame.kind == "native").unwrap();
    assert_eq!((&*native.function, &*native.file, native.line), ("deflate", "libz.so.1", None));
    let loss: Vec<_> = tables.loss.iter().map(|row| (&*row.host, row.cause.as_str(), row.runs)).collect();
    assert_eq!(loss, [("h1", "ring_full", 3)]);
}

#[test]
fn names_and_bytes_are_the_same_each_time_and_ids_on_each_host() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let segment = app("h1", 0).write(dir.path());
    let other = Segment { host: "h2", before: &["handle", "x"], ..app("h2", 0) }.write(dir.path());
    succeeds(&["convert", word(&segment), "-o", word(&path("a"))]);
    succeeds(&["convert", word(&segment), "-o", word(&path("b"))]);
    assert_eq!(content(&path("a")), content(&path("b")));
    succeeds(&["convert", word(&segment), "-o", word(&path("b"))]);
    assert_eq!(content(&path("a")), content(&path("b")), "a second run replaces what is there by the same");
    succeeds(&["convert", word(&other), "-o", word(&path("c"))]);
    let (one, two) = (read(&path("a")), read(&path("c")));
    assert_eq!(one.stacks, two.stacks);
    assert_eq!(one.frames, two.frames);
}

#[test]
fn tables_of_many_segments_come_back_as_one_profile() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("spool")).unwrap();
    for (host, sequence) in [("h1", 0), ("h1", 1), ("h2", 0)] {
        app(host, sequence).write(&path("spool"));
    }
    succeeds(&["convert", word(&path("spool")), "-o", word(&path("tables"))]);
    succeeds(&["convert", word(&path("tables")), "-o", word(&path("all.tach"))]);
    succeeds(&["convert", word(&path("all.tach")), "-o", word(&path("again"))]);
    let (before, after) = (read(&path("tables")), read(&path("again")));
    assert_eq!(counts(&before), counts(&after));
    let services = |tables: &Tables| {
        let mut services: BTreeMap<_, i64> = BTreeMap::new();
        for row in &tables.samples {
            *services.entry((row.slice_start_ms, row.service.to_string(), row.labels.version.clone())).or_default() +=
                row.samples;
        }
        services
    };
    assert_eq!(services(&before), services(&after));
    let lost = |tables: &Tables| tables.loss.iter().map(|row| row.runs).sum::<i64>();
    assert_eq!((lost(&before), lost(&after)), (9, 9));
    let told = fails(&["convert", word(&path("tables")), "-o", word(&path("all.tach"))], 1);
    assert!(told.ends_with("all.tach exists already\nhint: --force replaces it\n"), "{told}");
    succeeds(&["convert", word(&path("tables")), "-o", word(&path("all.tach")), "--force"]);
}

#[test]
fn small_tables_become_large_ones() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::create_dir(path("spool")).unwrap();
    for (host, sequence) in [("h1", 0), ("h1", 1), ("h1", 60), ("h2", 0)] {
        app(host, sequence).write(&path("spool"));
    }
    succeeds(&["convert", word(&path("spool")), "-o", word(&path("small"))]);
    succeeds(&["convert", word(&path("small")), "-o", word(&path("large"))]);
    succeeds(&["convert", word(&path("small")), "-o", word(&path("hours")), "--slice", "1h"]);
    let small = read(&path("small"));
    for (name, rows) in [("large", 20), ("hours", 15)] {
        let large = read(&path(name));
        assert_eq!(counts(&small), counts(&large), "{name}");
        assert_eq!(large.samples.len(), rows, "{name}");
        // Two hours of two services in three tables, and losses.
        assert_eq!(content(&path(name)).len(), 2 * 7, "{name}");
        for question in [&["top"][..], &["top", "--losses"], &["top", "--changes"]] {
            let answer = |name: &str| succeeds(&[question, &[word(&path(name)), "--json"]].concat());
            assert_eq!(answer("small"), answer(name), "{question:?}");
        }
    }
    assert!(read(&path("hours")).samples.iter().all(|row| row.slice_start_ms % 3_600_000 == 0));
    let told = fails(&["convert", word(&path("small")), "-o", word(&path("small"))], 1);
    assert!(told.contains("tables cannot be written where they are read"), "{told}");
}

#[test]
fn long_recordings_have_slices() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // 96 samples over 37 ms of the file's clock, without a length.
    let file = golden("v05_threads_status", "tach");
    succeeds(&["convert", word(&file), "-o", word(&path("a")), "--start", "2026-11-22T23:59:59.990Z"]);
    let row = &read(&path("a")).samples[0];
    assert_eq!((&*row.service, &*row.host, row.slice_start_ms), ("v05_threads_status", "unknown", 1_795_391_999_990));
    let mut many = app("h1", 0);
    many.samples = &[("web", "1", &["main"], 7000)];
    // Its 70 s of samples are more than its account's 60 s: the last slice takes the rest.
    let segment = many.write(dir.path());
    succeeds(&["convert", word(&segment), "-o", word(&path("b")), "--slice", "10s"]);
    let slices: Vec<_> = read(&path("b")).samples.iter().map(|row| (row.slice_start_ms, row.samples)).collect();
    let expected = (0..6).map(|slice| (1_795_374_073_000 + slice * 10_000, if slice == 5 { 2000 } else { 1000 }));
    assert_eq!(slices, expected.collect::<Vec<_>>());
}

#[test]
fn what_does_not_fit_is_an_error_that_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let out = path("out");
    let convert = |input: &Path| fails(&["convert", word(input), "-o", word(&out)], 1);

    let segment = app("h1", 0).write(dir.path());
    let told = fails(&["convert", word(&segment), word(&copy(&segment, &path("copy"))), "-o", word(&out)], 1);
    assert!(told.contains("would both be ") && told.contains("one recording twice"), "{told}");

    fs::copy(app("h1", 1).write(dir.path()), &segment).unwrap();
    succeeds(&["convert", word(&segment), "-o", word(&out)]);
    let other = Segment { samples: &APP[..2], ..app("h1", 0) }.write(&path("copy"));
    fs::copy(other.with_extension("json"), segment.with_extension("json")).unwrap();
    let told = convert(&segment);
    assert!(told.contains("its account tells of 50 samples, and it has 63"), "{told}");
    fs::write(segment.with_extension("json"), "{").unwrap();
    assert!(convert(&segment).contains("cannot read its account "), "half an account");

    assert!(convert(&golden("c01_truncated", "tach")).contains("the file may have been cut"));
    assert!(convert(&path("none.tach")).contains("no such file or directory"));
    let told = fails(&["convert", word(dir.path()), "-o", word(&path("x.tach"))], 1);
    assert!(told.contains("there are no tables in ") && !path("x.tach").exists(), "{told}");
    let told = fails(&["convert", word(&segment), "-o", word(&out), "--slice", "1ms"], 2);
    assert!(told.contains("a slice takes between 1s and 24h") && told.contains("hint: "), "{told}");
}

fn copy(file: &Path, directory: &Path) -> PathBuf {
    fs::create_dir_all(directory).unwrap();
    let path = directory.join(file.file_name().unwrap());
    fs::copy(file, &path).unwrap();
    path
}
