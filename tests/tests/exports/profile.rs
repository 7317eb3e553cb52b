//! A profile whose every number is known, and what viewers must show for it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tachyon::cli::export::{self, Output};
use tachyon::cli::output::{Destination, OutputFile, OutputPlan};
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, TASK_FILENAME, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::export::ExportOptions;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Format, Sink, TachSink};
use tachyon_tests::viewers::Costs;

/// Microseconds between samples.
pub const INTERVAL_US: u64 = 10_000;

/// Stacks by thread: root first, with the count.
pub type Stacks<'a> = &'a [(u32, &'a [&'a str], u64)];

/// Two threads; frames are `function:line` of `/srv/app.py`, or native.
pub const USUAL: Stacks<'static> = &[
    (0, &["<module>:30", "middle:20", "leaf:10"], 60),
    (0, &["<module>:30", "middle:20", "leaf:11"], 15),
    (0, &["<module>:30", "middle:21"], 5),
    (0, &["<module>:31"], 3),
    (0, &["<module>:30", "middle:20", "leaf:10", "libz.so.1!deflate"], 7),
    (1, &["Worker.run:40", "Worker.run.<locals>.inner:41", "leaf:10"], 25),
    (1, &["Worker.run:42", "fact:50", "fact:51", "fact:51", "fact:52"], 9),
];

/// What readers would take for a signal handler's frame: every sample has the same caller.
pub const ONE_STACK: Stacks<'static> = &[(0, &["main:1", "loop:2", "leaf:3"], 100)];

/// Native code of a library without symbols, as a leaf and as a caller.
pub const WITHOUT_SYMBOLS: Stacks<'static> = &[
    (0, &["main:1", "libz.so.1!deflate", "libz.so.1!<unknown>"], 40),
    (0, &["main:1", "libz.so.1!deflate", "libz.so.1!<unknown>", "libc.so.6!memcpy"], 9),
    (0, &["main:1", "libz.so.1!deflate"], 2),
];

/// Waits, by what they are for, and tasks that await each other.
pub const WAITING: Stacks<'static> = &[
    (0, &["<module>:1", "<task> server", "serve:5", "<task> fetch-a", "fetch:7", "crunch:3"], 20),
    (0, &["<module>:1", "<task> server", "serve:5", "<task> fetch-b", "fetch:7", "<waiting: socket>"], 10),
    (0, &["<module>:1", "<task> server", "serve:6"], 4),
    (1, &["Worker.run:40", "libc.so.6!futex", "<waiting: lock>"], 6),
    (1, &["Worker.run:41", "<waiting: gil>"], 5),
];

/// What the costs are, with names as `name` has them.
pub fn costs(stacks: Stacks<'_>, name: impl Fn(&str) -> String) -> Costs {
    let mut costs = Costs::new();
    for (_, frames, count) in stacks {
        let names: Vec<String> = frames.iter().map(|frame| name(frame)).collect();
        if let Some(leaf) = names.last() {
            costs.entry(leaf.clone()).or_default().0 += count;
        }
        for name in names.into_iter().collect::<BTreeSet<_>>() {
            costs.entry(name).or_default().1 += count;
        }
    }
    costs
}

/// A frame's function and line.
pub fn parts(frame: &str) -> (&str, Option<&str>) {
    match frame.rsplit_once(':') {
        Some((function, line)) if !frame.starts_with("<waiting: ") => (function, Some(line)),
        _ => (frame.split_once('!').map_or(frame, |(_, symbol)| symbol), None),
    }
}

/// Writes the TACH file.
pub fn write(stacks: Stacks<'_>, path: &Path) {
    let mut profile = Profile::default();
    profile.meta.start_us = 1_000_000;
    profile.meta.start_unix = 1_700_000_000.0;
    profile.meta.interval_us = INTERVAL_US;
    profile.processes.push(Process { pid: 77, comm: "app".into(), ..Process::default() });
    for (tid, name) in [(77, "app"), (78, "worker")] {
        let thread =
            Thread { tid, ns_tid: tid, unique_tid: u64::from(tid), name: name.to_owned(), ..Thread::default() };
        profile.threads.push(thread);
    }
    let file = std::fs::File::create(path).unwrap();
    let mut sink = TachSink::new(file, &profile.meta, TachOptions::default()).unwrap();
    let (mut time_us, mut stored) = (1_005_000, 0);
    for &(thread, names, count) in stacks {
        let frames: Vec<FrameId> = names.iter().rev().map(|name| frame(&mut profile, name)).collect();
        for number in 0..count {
            let waits = names.last().is_some_and(|name| name.starts_with("<waiting: "));
            let status = if waits {
                0
            } else if number % 3 == 0 {
                2
            } else {
                3
            };
            let sample =
                Sample { thread: ThreadId(thread), time_us, status, frames: &frames, merge: Merge::None, work: None };
            sink.sample(&profile, &sample).unwrap();
            time_us += INTERVAL_US;
            stored += 1;
        }
    }
    let report = Report { stored, duration_s: 1.5, rate_hz: 100.0, ..Report::default() };
    sink.finish(&profile, &report).unwrap();
}

fn frame(profile: &mut Profile, name: &str) -> FrameId {
    if let Some(task) = name.strip_prefix("<task> ") {
        let [filename, function] = [TASK_FILENAME, task].map(|text| profile.strings.intern(text));
        return profile.frames.intern(Frame::without_location(filename, function));
    }
    let (function, line) = parts(name);
    let Some(line) = line else { return profile.special_frame(name) };
    let filename = profile.strings.intern("/srv/app.py");
    let function = profile.strings.intern(function);
    let lineno = line.parse().unwrap();
    profile.frames.intern(Frame { lineno, end_lineno: lineno, ..Frame::without_location(filename, function) })
}

/// Exports to `path`, as the program does.
pub fn export(input: &Path, path: PathBuf, by_thread: bool) -> PathBuf {
    let format = Format::from_extension(&path).unwrap();
    export_as(format, input, path, by_thread)
}

/// Exports to `path` in a format that may differ from its extension's.
pub fn export_as(format: Format, input: &Path, path: PathBuf, by_thread: bool) -> PathBuf {
    let plan = OutputPlan { destination: Destination::Path(path.clone()), format, force: true };
    let output = OutputFile::create(&plan.destination, true).unwrap();
    let (companion_output, companion) = plan.create_companion(None).unwrap().unzip();
    let options = ExportOptions { by_thread, svg: plan.is_svg(), companion, ..ExportOptions::default() };
    let mut file = output.try_clone_file().unwrap();
    let summary = export::run(input, Output::File(&mut file), format, options).unwrap();
    assert_eq!(summary.format, format);
    if let Some(companion) = companion_output {
        companion.commit().unwrap();
    }
    output.commit().unwrap();
    path
}
