//! `recover`: recordings cut at every byte of the file, the journal and the tail.

use std::fs::{self, File};
use std::io::Cursor;
use std::path::Path;
use tachyon::cli::recover::{self, LostTail, RecoverError};
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};
use tachyon::tach::{Compression, Layout, Reader};

type Samples = Vec<(u64, u64, Vec<String>)>;

/// A recording: its files at its end, its samples, and what would be left if it were killed at each tick.
struct Recorded {
    whole: Files,
    samples: Samples,
    ticks: Vec<Tick>,
}

/// The file, its journal and its tail.
#[derive(Clone)]
struct Files {
    file: Vec<u8>,
    journal: Vec<u8>,
    tail: Vec<u8>,
}

/// The files at a tick, and how many samples they must hold.
struct Tick {
    files: Files,
    samples: usize,
}

fn record(compression: Compression, layout: Layout, many_processes: bool) -> Recorded {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["a.tach.part", "a.tach.part.journal", "a.tach.part.tail"].map(|name| dir.path().join(name));
    let [path, journal_path, tail_path] = &paths;
    let files = || {
        let [file, journal, tail] = paths.each_ref().map(|path| fs::read(path).unwrap());
        Files { file, journal, tail }
    };
    let create = |path| File::create(path).unwrap();
    let mut profile = Profile::default();
    profile.meta.many_processes = many_processes;
    profile.meta.interval_us = 10_000;
    profile.meta.hostname = "here".into();
    let options = TachOptions { compression, layout, ..TachOptions::default() };
    let mut sink = TachSink::new(create(path), &profile.meta, options)
        .unwrap()
        .with_journal(create(journal_path), create(tail_path), &profile)
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
        let sample = Sample {
            thread,
            time_us: 1000 + number * 10_000,
            status: 3,
            frames: &frames,
            merge: Merge::None,
            work: None,
        };
        sink.sample(&profile, &sample).unwrap();
        let mut names: Vec<String> = frames.iter().map(|&frame| name(&profile, frame)).collect();
        if many_processes {
            names.push(tachyon::sinks::process_frame_name(profile.process_of(thread)));
        }
        samples.push((profile.thread(thread).unique_tid, sample.time_us, names));
        if number == 70 {
            // A name that arrives late, after the placeholder was written.
            let named = Frame { function: profile.strings.intern("late"), ..*profile.frames.get(late.unwrap()) };
            profile.resolve(late.unwrap(), named);
        }
        if number % 30 == 29 {
            sink.tick(&profile).unwrap();
            ticks.push(Tick { files: files(), samples: samples.len() });
        }
    }
    sink.finish(&profile, &Report::default()).unwrap();
    Recorded { whole: files(), samples, ticks }
}

fn name(profile: &Profile, frame: FrameId) -> String {
    profile.strings.get(profile.frames.get(frame).function).to_owned()
}

/// A reader of what was recovered, and the reported number of samples.
fn rescued(
    dir: &Path,
    broken: &[u8],
    journal: Option<&[u8]>,
    tail: Option<&[u8]>,
) -> anyhow::Result<(Reader<Cursor<Vec<u8>>>, u64)> {
    let path = dir.join("a.tach.part");
    fs::write(&path, broken)?;
    for (ending, bytes) in [("journal", journal), ("tail", tail)] {
        let path = dir.join("a.tach.part").with_added_extension(ending);
        match bytes {
            Some(bytes) => fs::write(&path, bytes)?,
            None => drop(fs::remove_file(&path)),
        }
    }
    let mut good = Cursor::new(Vec::new());
    let summary = recover::run(&path, None, &mut good)?;
    Ok((Reader::new(good).expect("what was recovered can be read"), summary.samples))
}

/// What was recovered, read by the reader that refuses whatever CPython's refuses.
fn recovered(dir: &Path, broken: &[u8], journal: Option<&[u8]>, tail: Option<&[u8]>) -> anyhow::Result<Samples> {
    let (mut reader, count) = rescued(dir, broken, journal, tail)?;
    let mut samples = reader.samples()?;
    let mut found = Samples::new();
    while let Some(sample) = samples.next_sample()? {
        let tables = samples_tables(sample.frames);
        found.push((sample.thread_id, sample.timestamp_us, tables));
    }
    assert_eq!(count, found.len() as u64);
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

/// Compares the samples of each thread, because the order across threads is not kept.
fn starts_with(all: &Samples, found: &Samples, at_cut: bool) -> bool {
    found.iter().all(|sample| {
        let number = usize::try_from((sample.1 - 1_000) / 10_000).unwrap();
        all.get(number).is_some_and(|known| {
            (known.0, known.1) == (sample.0, sample.1)
                && known.2.len() == sample.2.len()
                // Before the late name arrives, its placeholder is what is known.
                && known.2.iter().zip(&sample.2).all(|(a, b)| a == b || (at_cut && (b == "late" || b == "main")))
        })
    })
}

const KINDS: [(Compression, Layout, bool); 3] = [
    (Compression::Zstd, Layout::Released, false),
    (Compression::None, Layout::Released, true),
    (Compression::Zstd, Layout::Early, true),
];

/// Killed after a tick, nothing is missing; and whatever else is cut off the file, what comes out are samples.
fn cut_at_every_byte((compression, layout, many): (Compression, Layout, bool)) {
    let dir = tempfile::tempdir().unwrap();
    let recording = record(compression, layout, many);
    assert_eq!(recording.ticks.len(), 4);
    for Tick { files, samples } in &recording.ticks {
        let found = recovered(dir.path(), &files.file, Some(&files.journal), Some(&files.tail)).unwrap();
        assert_eq!(found.len(), *samples);
        assert!(starts_with(&recording.samples, &found, true));
    }
    let Files { file, journal, tail } = &recording.whole;
    let samples = recording.ticks[3].samples;
    for len in 0..=file.len() {
        for tail in [Some(tail.as_slice()), None] {
            let found = recovered(dir.path(), &file[..len], Some(journal), tail).unwrap();
            let all = len == file.len() || tail.is_some() && compression == Compression::Zstd;
            assert!(!all || found.len() >= samples, "{len} bytes: {} of {samples}", found.len());
            assert!(starts_with(&recording.samples, &found, true), "{len} bytes");
        }
    }
}

#[test]
fn cut_at_every_byte_compressed() {
    cut_at_every_byte(KINDS[0]);
}

#[test]
fn cut_at_every_byte_uncompressed() {
    cut_at_every_byte(KINDS[1]);
}

#[test]
fn cut_at_every_byte_early_layout() {
    cut_at_every_byte(KINDS[2]);
}

#[test]
fn cut_and_damaged_tails() {
    let dir = tempfile::tempdir().unwrap();
    for (compression, layout, many) in KINDS {
        let recording = record(compression, layout, many);
        let Files { file, journal, tail } = &recording.ticks[3].files;
        let mut before = 0;
        for len in (0..tail.len()).step_by(5).chain([tail.len()]) {
            let found = recovered(dir.path(), file, Some(journal), Some(&tail[..len])).unwrap();
            assert!(found.len() >= before, "{len} bytes: fewer than with some bytes less");
            before = found.len();
            assert!(starts_with(&recording.samples, &found, true), "{len} bytes");
        }
        assert_eq!(before, 120);
        for place in (0..tail.len()).step_by(3) {
            let mut damaged = tail.clone();
            damaged[place] ^= 1 << (place % 8);
            let found = recovered(dir.path(), file, Some(journal), Some(&damaged)).unwrap();
            assert!(found.len() < 120, "no byte is without meaning: {place}");
            assert!(starts_with(&recording.samples, &found, true), "{place}");
        }
        // The tail of an earlier moment, and that of another recording.
        let earlier = &recording.ticks[1].files.tail;
        let found = recovered(dir.path(), file, Some(journal), Some(earlier)).unwrap();
        assert!(found.len() >= recording.ticks[1].samples && starts_with(&recording.samples, &found, true));
        let other = record(compression, layout, !many).ticks.remove(3).files.tail;
        let found = recovered(dir.path(), file, Some(journal), Some(&other)).unwrap();
        assert!(starts_with(&recording.samples, &found, true));
    }
}

/// Several blocks of the compressor and several slots of the tail: whatever is cut off, nothing more is missing than what
/// another file should have contained.
#[test]
fn long_recordings() {
    let dir = tempfile::tempdir().unwrap();
    let paths = ["file", "journal", "tail"].map(|name| dir.path().join(name));
    for compression in [Compression::Zstd, Compression::None] {
        let mut profile = Profile::default();
        profile.processes.push(Process::default());
        let thread = |tid| Thread { tid, ns_tid: tid, unique_tid: tid.into(), ..Thread::default() };
        profile.threads.extend((1..4).map(thread));
        let frames: Vec<_> = (0..90).map(|number| profile.special_frame(&format!("f{number}"))).collect();
        let [file, journal, tail] = paths.each_ref().map(|path| File::create(path).unwrap());
        let options = TachOptions { compression, ..TachOptions::default() };
        let mut sink =
            TachSink::new(file, &profile.meta, options).unwrap().with_journal(journal, tail, &profile).unwrap();
        let (mut most, mut dice) = (0, 1_u32);
        for number in 1..=13_500_u32 {
            dice = dice.wrapping_mul(1_103_515_245).wrapping_add(12_345);
            // One thread always repeats.
            let stack = if number % 3 == 0 { 0 } else { dice as usize >> 20 };
            let frames = &frames[stack % 40..40 + stack % 50];
            let thread = ThreadId(number % 3);
            let time_us = u64::from(number);
            sink.sample(&profile, &Sample { thread, time_us, status: 3, frames, merge: Merge::None, work: None })
                .unwrap();
            if number % 1_500 != 0 {
                continue;
            }
            sink.tick(&profile).unwrap();
            let [file, journal, tail] = paths.each_ref().map(|path| fs::read(path).unwrap());
            most = most.max(tail.len());
            let count = |file: &[u8], tail: &[u8]| {
                let (mut reader, _) = rescued(dir.path(), file, Some(&journal), Some(tail)).unwrap();
                let (mut samples, mut times) = (reader.samples().unwrap(), Vec::new());
                while let Some(sample) = samples.next_sample().unwrap() {
                    times.push(sample.timestamp_us);
                }
                times.sort_unstable();
                assert!(times.windows(2).all(|pair| pair[0] < pair[1]), "no sample comes twice");
                times.len()
            };
            let all = count(&file, &tail);
            assert_eq!(all, number as usize, "{compression:?}");
            let (mut last, alone) = (0, count(&file, &[]));
            assert!(alone < all, "a thread's repeated samples are in the tail alone");
            for part in 0..3 {
                let cut = count(&file[..file.len() * part / 3], &tail);
                assert!(cut >= last && cut <= all);
                last = cut;
                assert!(count(&file, &tail[..tail.len() * part / 3]) >= alone);
            }
        }
        drop(sink);
        assert!(most > 1 << 19 && most < 1 << 21, "{most} bytes: slots take turns");
    }
}

#[test]
fn cut_journals() {
    let dir = tempfile::tempdir().unwrap();
    let recording = record(Compression::Zstd, Layout::Released, true);
    let Files { file, journal, tail } = &recording.ticks[3].files;
    for len in 0..=journal.len() {
        match recovered(dir.path(), file, Some(&journal[..len]), Some(tail)) {
            Ok(found) => assert!(starts_with(&recording.samples, &found, true), "{len} bytes"),
            Err(error) => {
                assert!(matches!(error.downcast_ref(), Some(RecoverError::EmptyJournal(_))), "{error:#}");
                assert!(!journal[..len].contains(&b'\n'), "{len} bytes");
            }
        }
    }
    let found = recovered(dir.path(), file, Some(journal), Some(tail)).unwrap();
    assert_eq!(found.len(), 120);
}

#[test]
fn journals_and_tails_of_other_recordings() {
    let dir = tempfile::tempdir().unwrap();
    for (compression, layout, many) in KINDS {
        let recording = record(compression, layout, many);
        let Files { file, journal, tail } = &recording.ticks[3].files;
        let other = String::from_utf8(journal.clone()).unwrap().replace("\"start_time_us\":0,", "\"start_time_us\":7,");
        assert_ne!(other.as_bytes(), journal);
        let error = recovered(dir.path(), file, Some(other.as_bytes()), Some(tail)).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(RecoverError::OtherRecording(_))), "{error:#}");

        let path = dir.path().join("a.tach.part");
        let lost = |tail: Option<&[u8]>| {
            recovered(dir.path(), file, Some(journal), tail).unwrap();
            recover::run(&path, None, &mut Cursor::new(Vec::new())).unwrap().lost_tail
        };
        let other = record(compression, layout, !many).ticks.remove(3).files.tail;
        let named = path.with_added_extension("tail");
        assert_eq!(lost(Some(&other)), Some(LostTail::Unfit(named.clone())));
        assert_eq!(lost(None), Some(LostTail::Missing(named)));
        assert_eq!([lost(Some(tail)), lost(Some(&[]))], [None, None]);
    }
}

#[test]
fn without_journal() {
    let dir = tempfile::tempdir().unwrap();
    let recording = record(Compression::None, Layout::Released, false);
    let file = &recording.whole.file;
    let whole = recovered(dir.path(), file, None, None).unwrap();
    assert_eq!(whole.len(), 120);
    for len in [0, 10, 64, 200, file.len() - 1] {
        let error = recovered(dir.path(), &file[..len], None, None).unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(RecoverError::NoJournal { .. })), "{len} bytes: {error:#}");
    }
    for other in ["#!/bin/sh\n".repeat(20), "HCAT\u{2}\0\0\0".repeat(20)] {
        let error = recovered(dir.path(), other.as_bytes(), None, None).unwrap_err();
        assert!(error.downcast_ref::<RecoverError>().is_none(), "it is no profile that was cut: {error:#}");
    }
    // Tables that are whole and samples that are not: the samples before the damage come out.
    let mut damaged = file.clone();
    let end = damaged.len();
    damaged[64 + 300..(64 + 340).min(end)].fill(0xff);
    let found = recovered(dir.path(), &damaged, None, None).unwrap();
    assert!(!found.is_empty() && found.len() < 120 && starts_with(&recording.samples, &found, false));
}
