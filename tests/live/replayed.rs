//! The files that CPython 3.15's own writer made, and what we make of them, through all that CPython makes of a file.

use crate::exports::{collapsed, firefox, gperftools, pprof, speedscope};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::tach::{Frame, Reader};
use tachyon_tests::viewers::run;
use tachyon_tests::{Recorded, binary, judge, live};

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

/// CPython draws no flame graph of a profile that has one frame: it takes it for the root of what is left.
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

    // What CPython wrote, and what we write of the same samples.
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

    // And in each of our own formats.
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
            // How long it took only some files tell.
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
