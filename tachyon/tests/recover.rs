//! `recover`: recordings cut at every byte, of the file and of the journal.

use std::fs::{self, File};
use std::io::Cursor;
use std::path::Path;
use tachyon::cli::recover::{self, RecoverError};
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};
use tachyon::tach::{Compression, Layout, Reader};

type Samples = Vec<(u64, u64, Vec<String>)>;

/// A recording: the file before its end and after it, its journal, its samples, and at each tick the file's length
/// and how many samples it must hold.
struct Recorded {
    whole: Vec<u8>,
    journal: Vec<u8>,
    samples: Samples,
    ticks: Vec<(usize, usize)>,
}

fn record(compression: Compression, layout: Layout, many_processes: bool) -> Recorded {
    let dir = tempfile::tempdir().unwrap();
    let (path, journal_path) = (dir.path().join("a.tach.part"), dir.path().join("a.tach.part.journal"));
    let mut profile = Profile::default();
    profile.meta.many_processes = many_processes;
    profile.meta.interval_us = 10_000;
    profile.meta.hostname = "here".into();
    let options = TachOptions { compression, layout, ..TachOptions::default() };
    let mut sink = TachSink::new(File::create(&path).unwrap(), &profile.meta, options)
        .unwrap()
        .with_journal(File::create(&journal_path).unwrap(), &profile)
        .unwrap();
    let (mut samples, mut ticks): (Samples, _) = (Vec::new(), Vec::new());
    let mut late: Option<FrameId> = None;
    for number in 0..120_u64 {
        if number % 40 == 0 {
            let id = u32::try_from(number + 7).unwrap();
            profile.processes.push(Process { pid: id, comm: format!("p{id}"), ..Process::default() });
            let process = u32::try_from(profile.processes.len() - 1).unwrap();
            profile.threads.push(Thread { process, tid: id, unique_tid: id.into(), ns_tid: id, ..Thread::default() });
        }
        let mut frame = |name: &str, lineno| {
            let (file, function) = (profile.strings.intern("/x.py"), profile.strings.intern(name));
            profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) })
        };
        let mut frames = vec![frame("leaf", i32::try_from(number / 5).unwrap()), frame("main", 1)];
        if number == 50 {
            let placeholder = *profile.frames.get(frames[1]);
            late = Some(profile.frames.push_pending(placeholder));
        }
        frames.extend(late.filter(|_| number >= 50));
        let thread = ThreadId(u32::try_from(profile.threads.len() - 1).unwrap());
        let sample = Sample { thread, time_us: 1000 + number * 10_000, status: 3, frames: &frames, merge: Merge::None };
        sink.sample(&profile, &sample).unwrap();
        let mut names: Vec<String> = frames.iter().map(|&frame| name(&profile, frame)).collect();
        if many_processes {
            names.push(tachyon::sinks::process_frame_name(profile.process_of(thread)));
        }
        samples.push((profile.thread(thread).unique_tid, sample.time_us, names));
        if number == 70 {
            // A name that comes late, after the placeholder was written.
            let named = Frame { function: profile.strings.intern("late"), ..*profile.frames.get(late.unwrap()) };
            profile.resolve(late.unwrap(), named);
        }
        if number % 30 == 29 {
            sink.tick(&profile).unwrap();
            ticks.push((usize::try_from(fs::metadata(&path).unwrap().len()).unwrap(), samples.len()));
        }
    }
    sink.finish(&profile, &Report::default()).unwrap();
    Recorded { whole: fs::read(&path).unwrap(), journal: fs::read(&journal_path).unwrap(), samples, ticks }
}

fn name(profile: &Profile, frame: FrameId) -> String {
    profile.strings.get(profile.frames.get(frame).function).to_owned()
}

/// What was recovered, read by the reader that refuses what CPython's does.
fn recovered(dir: &Path, broken: &[u8], journal: Option<&[u8]>) -> anyhow::Result<Samples> {
    let path = dir.join("a.tach.part");
    fs::write(&path, broken)?;
    let journal_path = dir.join("a.tach.part.journal");
    match journal {
        Some(bytes) => fs::write(&journal_path, bytes)?,
        None => drop(fs::remove_file(&journal_path)),
    }
    let mut good = Cursor::new(Vec::new());
    let summary = recover::run(&path, None, &mut good)?;
    let mut reader = Reader::new(good).expect("what was recovered can be read");
    let mut samples = reader.samples()?;
    let mut found = Samples::new();
    while let Some(sample) = samples.next_sample()? {
        let tables = samples_tables(sample.frames);
        found.push((sample.thread_id, sample.timestamp_us, tables));
    }
    assert_eq!(summary.samples, found.len() as u64);
    let tables = samples.tables();
    for (_, _, names) in &mut found {
        for name in names {
            let frame = tables.frame(name.parse()?).expect("the reader has checked it");
            *name = tables.string(frame.function).expect("the reader has checked it").to_owned();
        }
    }
    Ok(found)
}

fn samples_tables(frames: &[u32]) -> Vec<String> {
    frames.iter().map(ToString::to_string).collect()
}

/// Samples of each thread, for the order across threads is not kept.
fn starts_with(all: &Samples, found: &Samples, at_cut: bool) -> bool {
    found.iter().all(|sample| {
        all.iter().any(|known| {
            (known.0, known.1) == (sample.0, sample.1)
                && known.2.len() == sample.2.len()
                // Before the late name came, its placeholder is what is known.
                && known.2.iter().zip(&sample.2).all(|(a, b)| a == b || (at_cut && (b == "late" || b == "main")))
        })
    })
}

#[test]
fn cut_at_every_byte() {
    let dir = tempfile::tempdir().unwrap();
    for (compression, layout, many) in [
        (Compression::Zstd, Layout::Released, false),
        (Compression::None, Layout::Released, true),
        (Compression::Zstd, Layout::Early, true),
    ] {
        let recording = record(compression, layout, many);
        assert!(recording.ticks.len() == 4 && recording.ticks[0].0 > 64);
        for len in (0..=recording.whole.len()).rev() {
            let found = recovered(dir.path(), &recording.whole[..len], Some(&recording.journal)).unwrap();
            let expected = recording.ticks.iter().rfind(|tick| tick.0 <= len).map_or(0, |tick| tick.1);
            assert!(found.len() >= expected, "{len} bytes: {} of {expected}", found.len());
            assert!(starts_with(&recording.samples, &found, true), "{len} bytes");
        }
    }
}

#[test]
fn cut_journals() {
    let dir = tempfile::tempdir().unwrap();
    let recording = record(Compression::Zstd, Layout::Released, true);
    let broken = &recording.whole[..recording.ticks[3].0];
    for len in 0..=recording.journal.len() {
        match recovered(dir.path(), broken, Some(&recording.journal[..len])) {
            Ok(found) => assert!(starts_with(&recording.samples, &found, true), "{len} bytes"),
            Err(error) => {
                assert!(matches!(error.downcast_ref(), Some(RecoverError::EmptyJournal(_))), "{error:#}");
                assert!(!recording.journal[..len].contains(&b'\n'), "{len} bytes");
            }
        }
    }
    let found = recovered(dir.path(), broken, Some(&recording.journal)).unwrap();
    assert_eq!(found.len(), 120);
}

#[test]
fn without_journal() {
    let dir = tempfile::tempdir().unwrap();
    let recording = record(Compression::None, Layout::Released, false);
    let whole = recovered(dir.path(), &recording.whole, None).unwrap();
    assert_eq!(whole.len(), 120);
    for len in [0, 10, 64, 200, recording.whole.len() - 1] {
        let error = recovered(dir.path(), &recording.whole[..len], None).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(RecoverError::NoJournal { .. })), "{len} bytes: {error:#}");
    }
    // Tables that are whole and samples that are not: what comes before the damage.
    let mut damaged = recording.whole.clone();
    let end = damaged.len();
    damaged[64 + 300..(64 + 340).min(end)].fill(0xff);
    let found = recovered(dir.path(), &damaged, None).unwrap();
    assert!(!found.is_empty() && found.len() < 120 && starts_with(&recording.samples, &found, false));
}
