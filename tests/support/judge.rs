//! CPython 3.15's own reader, in Debian sid's chroot: it has the last word on what the profiler wrote.

use crate::{Recorded, ShownFrame, profile::Sample, program};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Deserialize)]
struct Judgement {
    replayed: u64,
    info: Info,
}

#[derive(Deserialize)]
struct Info {
    sample_count: u64,
    thread_count: u32,
    sample_interval_us: u64,
}

/// A frame as the judge writes it: file, function, location, opcode.
type JudgedFrame = (String, String, Option<[i32; 4]>, Option<u8>);

/// The chroot with CPython 3.15.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn chroot() -> PathBuf {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache/tachyon-bpf")));
    let root = cache.expect("there is a home directory").join("zoo/sid");
    assert!(root.join("usr/bin/python3.15").is_file(), "{}: no python3.15\nhint: cargo xtask zoo", root.display());
    root
}

/// Runs CPython 3.15 on a copy of `file`, whose path replaces `FILE` among `args`. Returns its output, and what it
/// wrote to the path that replaced `OUT`.
///
/// # Panics
/// When it fails.
#[must_use]
pub fn python(file: &Path, script: Option<&str>, args: &[&str]) -> (String, String) {
    judged(&[file], script, args).unwrap_or_else(|errors| panic!("CPython 3.15 refuses {}: {errors}", file.display()))
}

/// Like [`python`], for several files, whose paths replace `FILES`. An error is what it prints when it fails.
fn judged(files: &[&Path], script: Option<&str>, args: &[&str]) -> Result<(String, String), String> {
    let root = chroot();
    let dir = tempfile::Builder::new().prefix("judge").tempdir_in(root.join("tmp")).expect("the chroot has a /tmp");
    let inside = Path::new("/").join(dir.path().strip_prefix(&root).expect("it was made there"));
    let mut copies = Vec::new();
    for (number, file) in files.iter().enumerate() {
        let copy = format!("{number:03}.tach");
        std::fs::copy(file, dir.path().join(&copy))
            .unwrap_or_else(|error| panic!("cannot copy {}: {error}", file.display()));
        copies.push(inside.join(copy));
    }
    let mut command = Command::new("chroot");
    command.arg(&root).args(["/usr/bin/python3.15", "-X", "utf8"]);
    if let Some(script) = script {
        std::fs::copy(program(script), dir.path().join(script)).expect("the script can be copied");
        command.arg(inside.join(script));
    }
    command.args(args.iter().flat_map(|&word| match word {
        "FILE" | "FILES" => copies.clone(),
        "OUT" => vec![inside.join("out")],
        word => vec![PathBuf::from(word)],
    }));
    let output = command.output().expect("chroot can be run");
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let written = std::fs::read_to_string(dir.path().join("out")).unwrap_or_default();
    Ok((String::from_utf8_lossy(&output.stdout).into_owned(), written))
}

/// What CPython 3.15 says about a file that it must refuse.
///
/// # Panics
/// When it does not.
#[must_use]
pub fn refusal(file: &Path) -> String {
    let replayed = judged(&[file], None, &["-m", "profiling.sampling", "replay", "--collapsed", "-o", "OUT", "FILE"]);
    replayed.expect_err("CPython 3.15 reads it")
}

/// How many samples `replay --collapsed`, `--flamegraph`, `--gecko` and `--pstats` show, by file and by these words.
///
/// # Panics
/// When one fails.
#[must_use]
pub fn totals(files: &[&Path]) -> Vec<BTreeMap<String, u64>> {
    let told = judged(files, Some("replay_totals.py"), &["FILES"]);
    let (told, _) = told.unwrap_or_else(|errors| panic!("CPython 3.15 refuses one of {files:?}: {errors}"));
    let totals: BTreeMap<String, BTreeMap<String, u64>> = serde_json::from_str(&told).expect("the script prints JSON");
    assert_eq!(totals.len(), files.len(), "{told}");
    // In order of name, which is the order of number.
    totals.into_values().collect()
}

/// Checks that CPython 3.15's reader gets the same from the file as the project's own: samples, stacks, status.
///
/// # Panics
/// When it does not, with the first difference.
pub fn agrees(file: &Path, ours: &Recorded) {
    let (judged, dump) = python(file, Some("judge.py"), &["FILE", "OUT"]);
    let judged: Judgement = serde_json::from_str(&judged).expect("the judge prints JSON");
    let count = ours.samples.len() as u64;
    assert_eq!((judged.replayed, judged.info.sample_count), (count, count), "samples");
    assert_eq!(judged.info.thread_count, ours.header.thread_count, "threads");
    assert_eq!(judged.info.sample_interval_us, ours.header.sample_interval_us, "interval");
    let (mut frames, mut stacks, mut samples) = (ours.frames.iter(), ours.stacks.iter(), ours.samples.iter());
    for line in dump.lines() {
        let mut words = line.splitn(3, ' ');
        let kind = words.next().unwrap_or_default();
        let (_number, shown) = (words.next(), words.next().unwrap_or_default());
        match kind {
            "frame" => {
                let (filename, function, place, opcode): JudgedFrame = serde_json::from_str(shown).expect(line);
                assert_eq!(frames.next(), Some(&ShownFrame { function, filename, place, opcode }));
            }
            "stack" => {
                let theirs: Vec<usize> = serde_json::from_str(shown).expect(line);
                assert_eq!(stacks.next(), Some(&theirs));
            }
            _ => {
                let numbers: Vec<u64> = line.split(' ').skip(1).map(|word| word.parse().expect(line)).collect();
                let [thread_id, interpreter_id, timestamp_us, status, stack] = numbers[..] else { panic!("{line}") };
                let theirs = Sample {
                    thread_id,
                    interpreter_id: interpreter_id.try_into().expect(line),
                    timestamp_us,
                    status: status.try_into().expect(line),
                    stack: stack.try_into().expect(line),
                };
                assert_eq!(samples.next(), Some(&theirs));
            }
        }
    }
    assert_eq!((frames.next(), stacks.next(), samples.next()), (None, None, None), "our reader sees more");
}

/// The samples in what `python3.15 -m profiling.sampling replay --collapsed` makes of the file.
///
/// # Panics
/// When it fails.
#[must_use]
pub fn collapsed(file: &Path) -> String {
    python(file, None, &["-m", "profiling.sampling", "replay", "--collapsed", "-o", "OUT", "FILE"]).1
}
