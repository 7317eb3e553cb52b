//! `recover`: recordings that were cut or damaged, with journals and tails that were too.

use std::cell::OnceCell;
use std::fs::{self, File};
use std::io::Cursor;

use tachyon::cli::recover;
use tachyon::profile::{Frame, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};
use tachyon::tach::{Compression, Layout, Reader};
use tempfile::TempDir;

use crate::input::Rng;

/// Files that a recording has while it runs.
const PARTS: usize = 3;
const NAMES: [&str; PARTS] = ["a", "j", "j.tail"];

/// A file, its journal, its tail, and the next file.
pub(crate) fn recordings() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (compression, layout, many) in [
        (Compression::None, Layout::Released, false),
        (Compression::None, Layout::Early, true),
        (Compression::Zstd, Layout::Released, true),
    ] {
        for ended in [false, true] {
            seeds.extend(recording(TachOptions { compression, layout, ..TachOptions::default() }, many, ended));
        }
    }
    seeds
}

fn recording(options: TachOptions, many_processes: bool, ended: bool) -> [Vec<u8>; PARTS] {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let paths = NAMES.map(|name| dir.path().join(name));
    let [path, journal, tail] = &paths;
    let create = |path| File::create(path).expect("it can be written");
    let mut profile = Profile::default();
    profile.meta.many_processes = many_processes;
    profile.meta.interval_us = 10_000;
    let sink = TachSink::new(create(path), &profile.meta, options).expect("it can be written");
    let mut sink = sink.with_journal(create(journal), create(tail), &profile).expect("it can be written");
    for number in 0..60_u32 {
        if number % 20 == 0 {
            profile.processes.push(Process { pid: number, comm: "p".to_owned(), ..Process::default() });
            let tid = number + 7;
            let thread = Thread { tid, ns_tid: tid, unique_tid: tid.into(), process: number / 20, ..Thread::default() };
            profile.threads.push(thread);
        }
        let mut frame = |name: &str, lineno| {
            let (file, function) = (profile.strings.intern("/x.py"), profile.strings.intern(name));
            profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) })
        };
        let frames = [frame("leaf", number.cast_signed() / 5), frame("f", 2), frame("main", 1)];
        let frames = &frames[usize::from(number % 7 == 0)..];
        let sample = Sample {
            thread: ThreadId(number / 20),
            time_us: u64::from(number) * 9_999,
            status: 3,
            frames,
            merge: Merge::None,
            work: None,
        };
        sink.sample(&profile, &sample).expect("it can be written");
        if number % 15 == 0 {
            sink.tick(&profile).expect("it can be written");
        }
    }
    if ended {
        sink.finish(&profile, &Report::default()).expect("it can be written");
    }
    paths.map(|path| fs::read(path).expect("it was written"))
}

thread_local! {
    /// `recover` opens files by their paths: one directory for all executions.
    static DIR: OnceCell<TempDir> = const { OnceCell::new() };
}

/// What is recovered is a file that can be read to its end, with as many samples as reported.
pub(crate) fn rescue(seeds: &[Vec<u8>], rng: &mut Rng) -> bool {
    let first = rng.below(seeds.len() / PARTS) * PARTS;
    let mut damaged = |seed: &Vec<u8>| match rng.below(4) {
        0 => seed[..rng.below(seed.len() + 1)].to_vec(),
        1 => seed.clone(),
        _ => rng.mutated(std::slice::from_ref(seed)),
    };
    let parts: Vec<_> = seeds[first..first + PARTS].iter().map(&mut damaged).collect();
    let mut good = Cursor::new(Vec::new());
    let recovered = DIR.with(|dir| {
        let dir = dir.get_or_init(|| tempfile::tempdir().expect("a temporary directory can be made"));
        let paths = NAMES.map(|name| dir.path().join(name));
        for (path, part) in paths.iter().zip(&parts) {
            fs::write(path, part).expect("it can be written");
        }
        recover::run(&paths[0], Some(&paths[1]), &mut good)
    });
    let Ok(recovered) = recovered else { return false };
    let mut reader = Reader::new(good).expect("what was recovered can be opened");
    let mut samples = reader.samples().expect("what was recovered has samples");
    let mut count = 0;
    while samples.next_sample().expect("what was recovered can be read to its end").is_some() {
        count += 1;
    }
    assert_eq!(count, recovered.samples);
    true
}
