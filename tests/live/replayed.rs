//! The files that CPython 3.15's own writer made, and the profiler's versions of them, in every format that CPython makes
//! from a file; and live recordings of several processes in the same.

use crate::exports::{collapsed, firefox, gperftools, pprof, speedscope};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::sinks::metadata::Metadata;
use tachyon::tach::{Frame, Reader};
use tachyon_tests::viewers::run;
use tachyon_tests::{Interpreter, Profiler, Recorded, Recording, Target, binary, judge, live};

/// The fixtures that can be read, and those that cannot.
fn fixtures() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tach");
    let files = fs::read_dir(directory).expect("the fixtures are there").map(|entry| entry.expect("listed").path());
    let mut files: Vec<_> = files.filter(|path| path.extension().is_some_and(|ending| ending == "tach")).collect();
    files.sort();
    let sound = |path: &PathBuf| {
        let read = |path| {
            let mut reader = Reader::new(fs::File::open(path)?)?;
            let mut samples = reader.samples()?;
            while samples.next_sample()?.is_some() {}
            anyhow::Ok(())
        };
        read(path).is_ok()
    };
    files.into_iter().partition(sound)
}

/// The samples of a file, each with what is shown of it, in an order that does not depend on the file's.
fn samples(of: &Recorded) -> Vec<(u64, u32, u64, u8, String)> {
    let shown =
        |s: &tachyon_tests::Sample| (s.thread_id, s.interpreter_id, s.timestamp_us, s.status, of.shown(s.stack));
    let mut samples: Vec<_> = of.samples.iter().map(shown).collect();
    samples.sort();
    samples
}

/// Samples that have frames: CPython's formats leave the others out.
fn with_frames(of: &Recorded) -> u64 {
    of.samples.iter().filter(|sample| !of.stacks[sample.stack].is_empty()).count() as u64
}

/// CPython draws no flame graph of a profile with only one frame: it takes that for the root of the rest.
fn has_flame_graph(of: &Recorded) -> bool {
    let of_frames: Vec<_> = of.stacks.iter().filter(|stack| !stack.is_empty()).collect();
    of_frames.len() > 1 || of_frames.iter().any(|stack| stack.len() > 1)
}

#[test]
fn each_fixture_through_every_mode() {
    let Some(_live) = live() else { return };
    let (sound, broken) = fixtures();
    assert_eq!((sound.len(), broken.len()), (12, 4), "{sound:?} {broken:?}");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let exported = |file: &Path, ending: &str| {
        let out = dir.path().join(file.file_stem().expect("a name")).with_extension(ending);
        run(Command::new(binary()).arg("export").arg(file).arg("-o").arg(&out));
        out
    };

    // What CPython wrote, and what the profiler writes for the same samples.
    let again: Vec<_> = sound.iter().map(|file| exported(file, "tach")).collect();
    let files: Vec<&Path> = sound.iter().chain(&again).map(PathBuf::as_path).collect();
    let totals = judge::totals(&files);
    for (number, (file, totals)) in files.iter().zip(totals).enumerate() {
        let read = Recorded::read(file);
        judge::agrees(file, &read);
        let count = with_frames(&read);
        for (form, total) in totals {
            let expected = if form == "flamegraph" && !has_flame_graph(&read) { 0 } else { count };
            assert_eq!(total, expected, "{}: replay --{form}", file.display());
        }
        if let Some(original) = number.checked_sub(sound.len()).map(|number| &sound[number]) {
            assert_eq!(samples(&read), samples(&Recorded::read(original)), "{}", original.display());
            let size = |path: &Path| fs::metadata(path).expect("it is there").len();
            assert!(size(file) <= size(original), "{} is larger than CPython's", file.display());
        }
    }

    // And in each of the profiler's own formats.
    for file in &sound {
        let read = Recorded::read(file);
        let total = read.samples.len() as u64;
        let text = |ending: &str| fs::read_to_string(exported(file, ending)).expect("it is text");
        let name = file.display();
        assert_eq!(text("jsonl").lines().count() as u64, total, "{name}: jsonl");
        assert_eq!(collapsed(&text("collapsed")), total, "{name}: collapsed");
        assert_eq!(speedscope(&exported(file, "speedscope.json")), total, "{name}: speedscope");
        assert_eq!(firefox(&exported(file, "firefox.json")), total, "{name}: Firefox");
        assert_eq!(pprof(&exported(file, "pb.gz")), total, "{name}: pprof");
        assert_eq!(gperftools(&exported(file, "prof")), total, "{name}: gperftools");
        for ending in ["html", "svg"] {
            // Only some files tell how long it took.
            let captions = [format!("{total} samples in "), format!("{total} samples, 0 lost")];
            let text = text(ending);
            assert!(captions.iter().any(|caption| text.contains(caption)), "{name}: {ending}");
        }
    }

    for file in &broken {
        let told = judge::refusal(file);
        assert!(told.contains("Error: "), "{}: {told}", file.display());
        let out = dir.path().join("refused.tach");
        let output = Command::new(binary()).arg("export").arg(file).arg("-o").arg(&out).output().expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{}: {told}", file.display());
        assert!(told.starts_with("tachyon-bpf: cannot export ") && !out.exists(), "{told}");
    }
}

/// A frame that no sample uses, and names that no frame uses, are no reason to refuse a file.
#[test]
fn unused_entries_survive_a_conversion() {
    let Some(_live) = live() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (before, after) = (dir.path().join("before.tach"), dir.path().join("after.tach"));
    let file = fs::File::create(&before).expect("it can be made");
    let mut writer = tachyon::tach::Writer::new(file, tachyon::tach::Options::default()).expect("it can be written");
    let sample = tachyon::tach::Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 9, status: 3, frames: &[1] };
    writer.write_sample(&sample).expect("it can be written");
    let frames = [Frame::without_location(0, 1), Frame::without_location(0, 2)];
    writer.finish(["a.py", "unused", "used", "no frame's"], frames, None).expect("it can be written");
    run(Command::new(binary()).arg("export").arg(&before).arg("-o").arg(&after));
    judge::agrees(&after, &Recorded::read(&before));
    assert_eq!(fs::read(&before).expect("it is there"), fs::read(&after).expect("it is there"));
}

/// Counts of a collapsed file by the process that each stack's outermost frame names. Lines are
/// `tid:TID;comm (pid);frame;… count`.
fn by_process(collapsed: &str) -> BTreeMap<u32, u64> {
    let mut counts = BTreeMap::new();
    for line in collapsed.lines() {
        let (stack, count) = line.rsplit_once(' ').expect("a count");
        let root = stack.split(';').nth(1).expect("the frame that names the process");
        let pid = root.rsplit_once(" (").and_then(|(_, pid)| pid.strip_suffix(')')?.parse().ok());
        *counts.entry(pid.unwrap_or_else(|| panic!("{root:?} names no process"))).or_default() +=
            count.parse::<u64>().expect("a number");
    }
    counts
}

/// Checks that each of CPython's formats has the account's samples, and each process its own.
fn through_every_mode(recording: &Recording, targets: &[Target]) {
    let report = &recording.report;
    let totals = judge::totals(&[&recording.path]).remove(0);
    assert_eq!(totals.len(), 4, "{totals:?}");
    for (form, total) in totals {
        assert_eq!(total, report.stored, "replay --{form}");
    }
    let told = report.processes.iter().filter(|process| process.samples > 0);
    let told: BTreeMap<u32, u64> = told.map(|process| (process.pid, process.samples)).collect();
    assert_eq!(by_process(&judge::collapsed(&recording.path)), told);
    for target in targets {
        assert!(told.get(&target.pid()).is_some_and(|&samples| samples > 50), "{}: {told:?}", target.pid());
    }
}

/// Processes of several versions, threads and deep stacks among them, by pid and as all of the host.
#[test]
fn several_processes_through_every_mode() {
    let Some(_live) = live() else { return };
    let targets = [("pyenv_3_12", "eight_threads.py"), ("pyenv_3_8", "deep_stack.py"), ("pyenv_3_13", "spin.py")]
        .map(|(interpreter, name)| Target::start(&Interpreter::named(interpreter), name));
    let by_pid = || targets.iter().fold(Profiler::new(), |all, target| all.arg("-p").arg(target.pid().to_string()));
    let recordings = [by_pid(), by_pid().native(), Profiler::new().arg("--all-python")].map(|profiler| {
        let recording = profiler.rate(499).milliseconds(2_000).record();
        through_every_mode(&recording, &targets);
        recording
    });
    merged(&recordings, &targets);
}

/// Files of the same processes as one: CPython's reader finds all samples, and each process once.
fn merged(recordings: &[Recording], targets: &[Target]) {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let whole = dir.path().join("whole.tach");
    let files = recordings.iter().map(|recording| &recording.path);
    run(Command::new(binary()).arg("merge").args(files).arg("-o").arg(&whole));
    let (mut expected, mut of_process) = (0, BTreeMap::<u32, u64>::new());
    for Recording { report, .. } in recordings {
        expected += report.stored;
        for process in report.processes.iter().filter(|process| process.samples > 0) {
            *of_process.entry(process.pid).or_default() += process.samples;
        }
    }
    let read = Recorded::read(&whole);
    judge::agrees(&whole, &read);
    for (form, total) in judge::totals(&[&whole]).remove(0) {
        assert_eq!(total, expected, "replay --{form}");
    }
    assert_eq!(by_process(&judge::collapsed(&whole)), of_process);
    let reader = Reader::new(fs::File::open(&whole).expect("it is there")).expect("it is whole");
    let metadata = Metadata::find(reader.tables()).expect("it says what it is of");
    let report = &metadata.report;
    let loss: u64 = report.loss.values().sum();
    assert_eq!(
        (report.stored, report.ran),
        (expected, expected + report.idle + report.filtered + report.not_python + loss)
    );
    for target in targets {
        let known = metadata.processes.iter().filter(|process| process.pid == target.pid());
        assert_eq!(known.count(), 1, "{}", target.pid());
    }
}

/// One process, and no frame that names it.
#[test]
fn each_file_of_a_split_recording_through_every_mode() {
    let Some(_live) = live() else { return };
    let targets = ["eight_threads.py", "deep_stack.py", "spin.py"]
        .map(|name| Target::start(&Interpreter::named("pyenv_3_12"), name));
    let profiler = Profiler::new().arg("--all-python").arg("--split").arg("process").rate(499).milliseconds(2_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let files = fs::read_dir(profiler.output()).expect("a directory was written");
    let files: Vec<PathBuf> = files.map(|entry| entry.expect("it is listed").path()).collect();
    let of = |target: &Target| {
        let begins = format!("{}-", target.pid());
        let own = |file: &&PathBuf| file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&begins));
        files.iter().find(own).expect("each target has a file").as_path()
    };
    let files = [of(&targets[0]), of(&targets[1]), of(&targets[2])];
    for (file, totals) in files.iter().zip(judge::totals(&files)) {
        let read = Recorded::read(file);
        judge::agrees(file, &read);
        let count = with_frames(&read);
        assert!(count > 50 && count == read.samples.len() as u64, "{}: {count}", file.display());
        for (form, total) in totals {
            let expected = if form == "flamegraph" && !has_flame_graph(&read) { 0 } else { count };
            assert_eq!(total, expected, "{}: replay --{form}", file.display());
        }
    }
}
