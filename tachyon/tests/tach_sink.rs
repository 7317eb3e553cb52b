//! A recorded profile through the sinks and back: TACH, what `export` makes of it, and what `info` says.

use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};
use tachyon::cli::args::InfoArgs;
use tachyon::cli::{export, info};
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::{ProcessReport, Report};
use tachyon::sinks::export::ExportOptions;
use tachyon::sinks::metadata::Metadata;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{CollapsedSink, Format, Sink, TachSink};
use tachyon::tach::Reader;

/// Two processes with three threads, one of them with a dangerous name; frames that are named at the end.
fn profile(many_processes: bool) -> (Profile, Vec<FrameId>) {
    let mut profile = Profile::default();
    profile.meta.many_processes = many_processes;
    profile.meta.start_us = 5_000_000;
    profile.meta.start_unix = 1_795_000_000.5;
    profile.meta.interval_us = 10_101;
    profile.meta.hostname = "build\u{202e}host".into();
    profile.meta.python_version = (3, 12, 1);
    for (pid, comm) in [(100, "python3"), (200, "gunicorn;\x1b[2J\n")] {
        profile.processes.push(Process {
            pid,
            comm: comm.into(),
            cmdline: vec![comm.into(), "-m".into(), "app".into()],
            python_version: "3.12.1".into(),
            ..Process::default()
        });
    }
    for (process, tid, ns_tid) in [(0, 100, 1), (0, 101, 2), (1, 200, 1)] {
        let unique_tid = u64::from(tid);
        let name = format!("thread-{tid}");
        profile.threads.push(Thread { process, tid, unique_tid, ns_tid, interpreter: 0, name });
    }
    let mut frames = Vec::new();
    for line in 1..=6 {
        let filename = profile.strings.intern("/srv/app/main.py");
        let function = profile.strings.intern(&format!("Handler.step_{line}"));
        let (lineno, end_lineno, column, end_column) = (line * 10, line * 10, 4, 20);
        let opcode = Frame::NO_OPCODE;
        let frame = Frame { filename, function, lineno, end_lineno, column, end_column, opcode };
        frames.push(profile.frames.intern(frame));
    }
    frames.push(profile.special_frame("[k] do;syscall"));
    let (filename, function) = (profile.strings.intern("?"), profile.strings.intern("<pending>"));
    frames.push(profile.frames.push_pending(Frame::without_location(filename, function)));
    (profile, frames)
}

fn record(profile: &Profile, frames: &[FrameId], sink: &mut dyn Sink) -> u64 {
    let threads = if profile.meta.many_processes { 3 } else { 2 };
    let mut count = 0;
    for tick in 0..400_u64 {
        for thread in 0..threads {
            let depth = usize::try_from(tick / 7 % 6).unwrap();
            let mut stack: Vec<FrameId> = frames[..depth].to_vec();
            stack.extend((tick % 5 == 0).then_some(frames[6]));
            stack.extend((tick % 11 == 0).then_some(frames[7]));
            let time_us = 5_000_000 + tick * 10_101 + u64::from(thread);
            let sample =
                Sample { thread: ThreadId(thread), time_us, status: 3, frames: &stack, merge: Merge::None, work: None };
            sink.sample(profile, &sample).unwrap();
            count += 1;
        }
        if tick % 99 == 0 {
            sink.tick(profile).unwrap();
        }
    }
    count
}

fn resolve(profile: &mut Profile, frames: &[FrameId]) {
    let filename = profile.strings.intern("/srv/app/late.py");
    let function = profile.strings.intern("late");
    profile.resolve(frames[7], Frame { lineno: 3, ..Frame::without_location(filename, function) });
}

fn report() -> Report {
    Report {
        schema: 1,
        ran: 1300,
        stored: 1200,
        loss: [("ring_full".to_owned(), 12), ("write_error".to_owned(), 0)].into(),
        expected: Some(2000),
        not_fired: Some(10),
        rate_hz: 99.0,
        duration_s: 4.1,
        processes: vec![ProcessReport { pid: 100, samples: 800, named: 799, ..ProcessReport::default() }],
        ..Report::default()
    }
}

fn write_tach(many: bool, dir: &Path) -> (PathBuf, u64) {
    let path = dir.join("profile.tach");
    let (mut profile, frames) = profile(many);
    let file = fs::File::create_new(&path).unwrap();
    let mut sink = TachSink::new(file, &profile.meta, TachOptions::default()).unwrap();
    let count = record(&profile, &frames, &mut sink);
    resolve(&mut profile, &frames);
    sink.finish(&profile, &report()).unwrap();
    assert_eq!(sink.stored(), count);
    let [(_, summary)] = sink.into_outputs()[..] else { panic!("one file") };
    assert_eq!(summary.samples, count);
    (path, count)
}

fn live_collapsed(many: bool) -> String {
    let (mut profile, frames) = profile(many);
    let mut out = Vec::new();
    let mut sink = CollapsedSink::new(&mut out);
    record(&profile, &frames, &mut sink);
    resolve(&mut profile, &frames);
    sink.finish(&profile, &report()).unwrap();
    String::from_utf8(out).unwrap()
}

fn export_collapsed(path: &Path) -> (String, export::ExportSummary) {
    let mut out = Vec::new();
    let summary =
        export::run(path, export::Output::Stream(&mut out), Format::Collapsed, ExportOptions::default()).unwrap();
    (String::from_utf8(out).unwrap(), summary)
}

#[test]
fn export_gives_what_recording_would_have_given() {
    for many in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (path, count) = write_tach(many, dir.path());
        let (text, summary) = export_collapsed(&path);
        assert_eq!(text, live_collapsed(many), "many: {many}");
        assert_eq!(summary.samples, count);
        let total: u64 = text.lines().map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum();
        assert_eq!(total, count);
        let expected = if many { "tid:200;gunicorn\\x3b\\x1b[2J\\n (200);main.py:Handler.step_2:20" } else { "tid:2;" };
        assert!(text.contains(expected), "{text}");
        assert!(text.contains(";late.py:late:3"), "{text}");
        assert!(!text.contains("pending"));

        // Through TACH once more: nothing changes.
        let mut again = Cursor::new(Vec::new());
        export::run(&path, export::Output::File(&mut again), Format::Tach, ExportOptions::default()).unwrap();
        let second = dir.path().join("again.tach");
        fs::write(&second, again.into_inner()).unwrap();
        assert_eq!(export_collapsed(&second).0, text);
        let metadata =
            |path: &Path| Metadata::find(Reader::new(fs::File::open(path).unwrap()).unwrap().tables()).unwrap();
        assert_eq!(metadata(&second).report, metadata(&path).report);
        assert_eq!(metadata(&second).processes, metadata(&path).processes);
    }
}

#[test]
fn the_file_carries_the_account() {
    let dir = tempfile::tempdir().unwrap();
    let (path, _) = write_tach(true, dir.path());
    let reader = Reader::new(fs::File::open(&path).unwrap()).unwrap();
    let metadata = Metadata::find(reader.tables()).unwrap();
    assert_eq!(metadata.report, report());
    assert_eq!(metadata.processes[1].comm, "gunicorn;\x1b[2J\n");
    assert_eq!((metadata.threads[2].thread_id, metadata.threads[2].process), (200, 1));
    let statistics = reader.statistics().unwrap();
    assert_eq!((statistics.duration_sec, statistics.sample_rate), (4.1, 99.0));
    assert_eq!(statistics.error_rate, Some(1200.0 / 1212.0));
    assert_eq!(statistics.missed_samples, Some(0.5));
}

#[test]
fn a_stack_deeper_than_the_format_keeps_both_ends() {
    let mut profile = Profile::default();
    profile.meta.many_processes = true;
    profile.processes.push(Process { pid: 7, comm: "deep".into(), ..Process::default() });
    profile.threads.push(Thread { tid: 7, unique_tid: 7, ns_tid: 7, ..Thread::default() });
    let frames: Vec<FrameId> = (0..1000).map(|depth| profile.special_frame(&format!("f{depth}"))).collect();
    let mut sink = TachSink::new(Cursor::new(Vec::new()), &profile.meta, TachOptions::default()).unwrap();
    for depth in [255, 256, 1000] {
        let sample = Sample {
            thread: ThreadId(0),
            time_us: 0,
            status: 0,
            frames: &frames[..depth],
            merge: Merge::None,
            work: None,
        };
        sink.sample(&profile, &sample).unwrap();
    }
    sink.finish(&profile, &Report::default()).unwrap();
    let (file, _) = sink.into_outputs().remove(0);
    let mut reader = Reader::new(file).unwrap();
    let mut samples = reader.samples().unwrap();
    let tables = samples.tables();
    let mut stacks = Vec::new();
    while let Some(sample) = samples.next_sample().unwrap() {
        let name = |&index: &u32| tables.string(tables.frame(index).unwrap().function).unwrap().to_owned();
        stacks.push(sample.frames.iter().map(name).collect::<Vec<_>>());
    }
    assert_eq!(stacks.iter().map(Vec::len).collect::<Vec<_>>(), [256; 3]);
    for stack in &stacks {
        assert_eq!((stack[0].as_str(), stack[255].as_str()), ("f0", "deep (7)"));
    }
    assert_eq!(stacks[0][254], "f254");
    assert_eq!(stacks[1][127], "<2 frames omitted>");
    assert_eq!(stacks[2][126..129], ["f126", "<746 frames omitted>", "f873"]);
}

#[test]
fn a_full_file_is_followed_by_another() {
    let mut profile = Profile::default();
    profile.processes.push(Process::default());
    profile.threads.push(Thread { ns_tid: 7, ..Thread::default() });
    let frames: Vec<FrameId> = (0..256).map(|number| profile.special_frame(&format!("f{number}"))).collect();
    let options = TachOptions { max_sample_bytes: 10_000, ..TachOptions::default() };
    let sink = TachSink::new(Cursor::new(Vec::new()), &profile.meta, options).unwrap();
    let mut next = 2;
    let mut sink = sink.with_next_output(move |number| {
        assert_eq!(number, next);
        next += 1;
        Ok(Cursor::new(Vec::new()))
    });
    let feed = |sink: &mut TachSink<_>, frame: &FrameId, time_us| {
        let frames = [&[*frame], &frames[..200]].concat();
        sink.sample(
            &profile,
            &Sample { thread: ThreadId(0), time_us, status: 0, frames: &frames, merge: Merge::None, work: None },
        )
        .unwrap();
    };
    for (time_us, frame) in (0..).zip(frames.iter().chain(frames.iter().rev()).chain(&frames)) {
        feed(&mut sink, frame, time_us);
        feed(&mut sink, frame, time_us);
    }
    sink.finish(&profile, &Report::default()).unwrap();
    let outputs = sink.into_outputs();
    assert!(outputs.len() > 1);
    let (parts, mut total) = (u32::try_from(outputs.len()).unwrap(), 0);
    for (part, (file, summary)) in (1..).zip(outputs) {
        assert!(summary.sample_bytes <= 10_000);
        total += summary.samples;
        let mut reader = Reader::new(file).unwrap();
        let metadata = Metadata::find(reader.tables()).unwrap();
        assert_eq!((metadata.part, metadata.parts), (part, parts));
        let mut samples = reader.samples().unwrap();
        while samples.next_sample().unwrap().is_some() {}
    }
    assert_eq!(total, 3 * 256 * 2);
}

fn shown(path: &Path, json: bool) -> InfoArgs {
    InfoArgs { files: vec![path.to_owned()], json, force_large: false }
}

#[test]
fn info_says_what_a_file_holds() {
    let dir = tempfile::tempdir().unwrap();
    let (path, count) = write_tach(true, dir.path());
    let mut out = Vec::new();
    info::run(&shown(&path, false), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(text.contains(&format!("samples      {count} of 3 threads")), "{text}");
    assert!(text.contains("recorded     2026-11-18T"), "{text}");
    assert!(text.contains("mode         cpu; features: all_threads"), "{text}");
    assert!(text.contains("loss         12 of 1300 runs (0.92 %): ring_full 12\n"), "{text}");
    assert!(text.contains("100  CPython 3.12.1, 800 samples, 799 named  python3 -m app"), "{text}");
    assert!(text.contains("gunicorn;\\x1b[2J\\n -m app"), "{text}");
    assert!(text.contains("build\\u{202e}host"), "{text}");

    let mut out = Vec::new();
    info::run(&shown(&path, true), &mut out).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(json["samples"], count);
    assert_eq!(json["metadata"]["report"]["loss"]["ring_full"], 12);
    assert_eq!(json["error"], serde_json::Value::Null);
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tach").join(name)
}

#[test]
fn info_and_export_tell_damage() {
    let path = golden("c04_string_index.tach");
    let mut out = Vec::new();
    let error = info::run(&shown(&path, true), &mut out).unwrap_err();
    assert!(format!("{error:#}").contains("c04_string_index.tach: invalid string index"), "{error:#}");
    let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
    assert!(json["error"].as_str().unwrap().contains("invalid string index"));
    let result =
        export::run(&path, export::Output::Stream(&mut Vec::new()), Format::Collapsed, ExportOptions::default());
    let message = format!("{:#}", result.unwrap_err());
    assert!(message.starts_with("cannot export ") && message.contains(": invalid string index"), "{message}");
    let result =
        export::run(&path, export::Output::Stream(&mut Vec::new()), Format::Gperftools, ExportOptions::default());
    let message = format!("{:#}", result.unwrap_err());
    assert!(message.contains("gperftools profiles cannot go to a pipe"), "{message}");
}

/// `NAME.collapsed` is what `python3.15 -m profiling.sampling replay --collapsed` (3.15.2) prints. It counts stacks
/// separately that differ only in a file's directory, and leaves out empty ones.
#[test]
fn collapsed_is_cpythons() {
    for name in ["v03_record_types", "v05_threads_status", "v06_locations_opcodes", "v10_capture_wall_zstd"] {
        let mut expected = std::collections::BTreeMap::<String, u64>::new();
        for line in fs::read_to_string(golden(&format!("{name}.collapsed"))).unwrap().lines() {
            let (stack, count) = line.rsplit_once(' ').unwrap();
            *expected.entry(stack.to_owned()).or_default() += count.parse::<u64>().unwrap();
        }
        let (text, _) = export_collapsed(&golden(&format!("{name}.tach")));
        let ours = text.lines().filter(|line| line.contains(';')).map(|line| {
            let (stack, count) = line.rsplit_once(' ').unwrap();
            (stack.to_owned(), count.parse::<u64>().unwrap())
        });
        assert_eq!(ours.collect::<std::collections::BTreeMap<_, _>>(), expected, "{name}");
    }
}
