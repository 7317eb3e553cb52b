use super::*;
use crate::profile::{FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use crate::report::{ProcessReport, Report, SegmentReport};
use crate::sinks::export::{self as sinks, ExportOptions};
use crate::sinks::metadata::Metadata;
use crate::sinks::tach::TachOptions;
use crate::sinks::{Format, Sink, TachSink};
use crate::tach::Reader;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// A process of a file, with its threads' tids and how often each was sampled.
type Told<'a> = (u32, &'a str, &'a [(u32, u64)]);

/// A file as one segment of a recording on host `h`, which began at `start_s` on the boot's clock.
fn segment(path: &Path, start_s: u64, many: bool, processes: &[Told<'_>]) {
    let mut profile = Profile::default();
    profile.meta.start_us = start_s * 1_000_000;
    profile.meta.start_unix = 1e9 + start_s as f64;
    profile.meta.interval_us = 10_000;
    profile.meta.many_processes = many;
    profile.meta.native = true;
    profile.meta.hostname = "h".into();
    let leaf = profile.special_frame("libz.so.1!deflate");
    let root = {
        let (file, name) = (profile.strings.intern("/srv/app.py"), profile.strings.intern("main"));
        profile
            .frames
            .intern(crate::profile::Frame { lineno: 7, ..crate::profile::Frame::without_location(file, name) })
    };
    let mut report = Report { rate_hz: 100.0, duration_s: 10.0, ..Report::default() };
    let mut plan = Vec::new();
    for (index, &(pid, instance, threads)) in (0..).zip(processes) {
        let cmdline = vec!["python3".to_owned(), "app.py".to_owned()];
        let instance = instance.to_owned();
        profile.processes.push(Process { pid, comm: "app".into(), cmdline, instance, ..Process::default() });
        let samples = threads.iter().map(|thread| thread.1).sum();
        report.processes.push(ProcessReport { pid, samples, named: samples, ..ProcessReport::default() });
        report.stored += samples;
        for &(tid, count) in threads {
            let handle = ThreadId(profile.threads.len() as u32);
            let unique_tid = u64::from(tid) | u64::from(index) << 32;
            let thread = Thread { process: index, tid, unique_tid, ns_tid: tid % 100, ..Thread::default() };
            profile.threads.push(thread);
            plan.push((handle, count));
        }
    }
    let (start_unix, sequence) = (profile.meta.start_unix, start_s);
    report.segment = Some(SegmentReport { sequence, start_unix, end_unix: start_unix + 10.0 });
    report.filtered = 3;
    report.ran = report.stored + 5;
    report.loss.insert("ring_full".into(), 2);
    let mut sink = TachSink::new(File::create(path).unwrap(), &profile.meta, TachOptions::default()).unwrap();
    for number in 1..=plan.iter().map(|plan| plan.1).max().unwrap_or(0) {
        for &(thread, count) in plan.iter().filter(|plan| plan.1 >= number) {
            let frames: &[FrameId] = if number % 3 == 0 { &[root] } else { &[leaf, root] };
            let merge = if number % 4 == 0 { Merge::Repaired } else { Merge::Exact };
            let time_us = profile.meta.start_us + number * 10_000;
            let status = if count % 2 == 0 { 3 } else { 2 };
            sink.sample(&profile, &Sample { thread, time_us, status, frames, merge, work: None }).unwrap();
        }
    }
    sink.finish(&profile, &report).unwrap();
}

fn exported(source: Source, format: Format) -> (Fed, String) {
    let mut out = Vec::new();
    let fed = source.feed(&mut *sinks::open(format, &mut out, ExportOptions::default()).unwrap()).unwrap();
    (fed, String::from_utf8_lossy(&out).into_owned())
}

/// The JSON lines as (pid, thread id, time, merge).
fn lines(text: &str) -> Vec<(u64, u64, u64, String)> {
    let line = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let number = |key: &str| value[key].as_u64().unwrap();
        (number("pid"), number("thread_id"), number("time_us"), value["merge"].as_str().unwrap_or("").to_owned())
    };
    text.lines().map(line).collect()
}

#[test]
fn a_directory_of_segments_is_one_profile() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // The second was written first; pid 7 was reused, and so was its tid.
    segment(&path("h-1-000001.tach"), 20, true, &[(8, "b", &[(8, 40)]), (7, "c", &[(7, 10), (71, 5)])]);
    segment(&path("h-1-000000.tach"), 10, true, &[(7, "a", &[(7, 30)]), (8, "b", &[(8, 20)])]);
    std::fs::write(path("h-1-000002.tach.part"), "x").unwrap();
    let open = || Source::open(&[dir.path().to_owned()]).unwrap();
    assert_eq!(open().notes().len(), 1);
    let pids: Vec<_> = open().profile().processes.iter().map(|process| process.pid).collect();
    assert_eq!(pids, [7, 8, 7], "the same process in two segments is one, a pid that was used again is two");

    let (fed, text) = exported(open(), Format::Jsonl);
    let all = lines(&text);
    assert_eq!((fed.samples, fed.threads, all.len()), (105, 4, 105));
    let report = &fed.report;
    assert_eq!((report.ran, report.stored, report.filtered, report.loss["ring_full"]), (115, 105, 6, 4));
    assert_eq!((report.duration_s, report.segment, report.segments), (20.0, None, Some(2)));
    let samples: Vec<_> = report.processes.iter().map(|process| (process.pid, process.samples)).collect();
    assert_eq!(samples, [(7, 30), (8, 60), (7, 15)]);
    let count = |id: u64| all.iter().filter(|line| line.1 == id).count();
    assert_eq!([count(7), count(8), count(7 | 1 << 32), count(71)], [30, 60, 10, 5]);
    for id in [7, 8, 7 | 1 << 32, 71] {
        let times: Vec<_> = all.iter().filter(|line| line.1 == id).map(|line| line.2).collect();
        assert!(times.is_sorted(), "{id}: {times:?}");
    }

    // As one file it says the same, in every format, and exactly.
    let other = tempfile::tempdir().unwrap();
    let all = other.path().join("all.tach");
    let mut sink = TachSink::new(File::create(&all).unwrap(), &open().profile().meta, open().tach_options()).unwrap();
    open().feed(&mut sink).unwrap();
    let merged = || Source::open(std::slice::from_ref(&all)).unwrap();
    for format in [Format::Jsonl, Format::Collapsed, Format::Speedscope, Format::Firefox] {
        // With several threads only the order within each is kept.
        let told = |source: Source| {
            let (fed, text) = exported(source, format);
            let fed = Fed { records: Default::default(), sample_bytes: 0, ..fed };
            let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
            if format == Format::Jsonl {
                lines.sort();
            }
            (fed, lines)
        };
        assert!(told(merged()) == told(open()), "{format}");
    }
}

#[test]
fn one_process_in_several_files_stays_a_profile_of_one() {
    let dir = tempfile::tempdir().unwrap();
    let files = [dir.path().join("a.tach"), dir.path().join("b.tach")];
    segment(&files[0], 10, false, &[(107, "", &[(107, 6)])]);
    segment(&files[1], 20, false, &[(107, "", &[(107, 7)])]);
    let (fed, text) = exported(Source::open(&files).unwrap(), Format::Collapsed);
    assert_eq!((fed.samples, fed.threads), (13, 1));
    assert_eq!(text, "tid:7;app.py:main:7;libz.so.1!deflate 9\ntid:7;app.py:main:7 4\n");
}

#[test]
fn programs_that_nothing_is_known_of_stay_apart() {
    let fixture = |name: &str| Path::new("../tests/golden/tach").join(name);
    let files = [fixture("v03_record_types.tach"), fixture("v03_record_types.tach")];
    assert_eq!(Source::open(&files).unwrap().file_count(), 1, "it is the same file");
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("copy.tach");
    std::fs::copy(&files[0], &copy).unwrap();
    let one = exported(Source::open(&files[..1]).unwrap(), Format::Collapsed).0;
    let (two, text) = exported(Source::open(&[files[0].clone(), copy]).unwrap(), Format::Collapsed);
    assert_eq!((two.samples, two.threads), (2 * one.samples, 2 * one.threads));
    assert!(text.contains(";copy (0);") && text.contains(";v03_record_types (0);"), "{text}");
}

#[test]
fn merge_labels_come_back_and_cpython_never_sees_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tach");
    segment(&path, 10, false, &[(7, "a", &[(7, 40)])]);
    let told = lines(&exported(Source::open(std::slice::from_ref(&path)).unwrap(), Format::Jsonl).1);
    for (number, line) in (1..).zip(&told) {
        assert_eq!(line.3, if number % 4 == 0 { "repaired" } else { "exact" }, "sample {number}");
    }
    // A file of another program may use these bits for something else.
    let mut reader = Reader::new(File::open(&path).unwrap()).unwrap();
    assert!(Metadata::find(reader.tables()).unwrap().merge_in_status);
    let mut samples = reader.samples().unwrap();
    while let Some(sample) = samples.next_sample().unwrap() {
        assert_eq!(sample.status & 0x3f, 3);
    }
}

#[test]
fn a_file_of_several_that_is_broken_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let files = [dir.path().join("a.tach"), dir.path().join("b.tach")];
    segment(&files[0], 10, false, &[(7, "", &[(7, 6)])]);
    std::fs::write(&files[1], "nonsense".repeat(20)).unwrap();
    let error = Source::open(&files).err().unwrap().to_string();
    assert!(error.starts_with(&format!("cannot read {}: ", files[1].display())), "{error}");
}

#[test]
fn a_part_of_a_profile() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tach");
    segment(&path, 10, true, &[(7, "a", &[(7, 30)]), (8, "b", &[(8, 20), (81, 9)])]);
    let part = |filter: Filter, format| {
        exported(Source::open(std::slice::from_ref(&path)).unwrap().with_filter(filter), format)
    };
    let closes = |report: &Report| report.ran == report.stored + report.filtered + report.loss["ring_full"];

    let (fed, text) = part(Filter { pids: vec![8], ..Filter::default() }, Format::Jsonl);
    assert_eq!((fed.samples, fed.threads), (29, 2));
    assert!(lines(&text).iter().all(|line| line.0 == 8));
    assert_eq!((fed.report.stored, fed.report.filtered), (29, 33));
    assert!(closes(&fed.report));

    // Times are 10 ms apart, from 10 ms after the start on.
    let times =
        Filter { from: Some(Duration::from_millis(50)), to: Some(Duration::from_millis(100)), ..Filter::default() };
    let (fed, text) = part(times, Format::Jsonl);
    assert_eq!(fed.samples, 15);
    assert!(lines(&text).iter().all(|line| (10_050_000..10_100_000).contains(&line.2)));
    assert!(closes(&fed.report) && (fed.report.duration_s - 0.05).abs() < 1e-9);

    let (fed, text) = part(Filter { no_native: true, ..Filter::default() }, Format::Collapsed);
    assert_eq!(fed.samples, 59);
    assert_eq!(
        text,
        "tid:7;python3 app.py (7);app.py:main:7 30\ntid:4294967304;python3 app.py (8);app.py:main:7 20\ntid:4294967377;python3 app.py (8);app.py:main:7 9\n"
    );

    let error = Source::open(&[path]).unwrap().with_filter(Filter { pids: vec![5], ..Filter::default() });
    let error = error.feed(&mut crate::sinks::CollapsedSink::new(Vec::new())).unwrap_err();
    assert_eq!(error.to_string(), "there is no process 5 in the profile");
}

/// A file of one repeated stack, which compresses best: some kilobytes for millions of samples.
fn repeated(path: &Path, samples: u64) {
    let options = crate::tach::Options { sample_interval_us: 1, ..Default::default() };
    let mut writer = crate::tach::Writer::new(File::create(path).unwrap(), options).unwrap();
    for timestamp_us in 0..samples {
        let sample = crate::tach::Sample { thread_id: 1, interpreter_id: 0, timestamp_us, status: 3, frames: &[0] };
        writer.write_sample(&sample).unwrap();
    }
    let frame = crate::tach::Frame::without_location(0, 1);
    writer.finish(["~", "f"], [frame], None).unwrap();
}

#[test]
fn a_repeat_is_one_step() {
    struct Steps(u64, u64);
    impl Sink for Steps {
        fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> std::io::Result<()> {
            self.repeated(profile, sample, &[sample.time_us])
        }
        fn repeated(&mut self, _: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> std::io::Result<()> {
            assert_eq!((sample.time_us, times_us.len() as u64 + self.1), (self.1, times_us[times_us.len() - 1] + 1));
            self.0 += 1;
            self.1 += times_us.len() as u64;
            Ok(())
        }
        fn finish(&mut self, _: &Profile, _: &Report) -> std::io::Result<()> {
            Ok(())
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.tach");
    repeated(&path, 300_000);
    assert!(std::fs::metadata(&path).unwrap().len() < 2_000);
    let mut steps = Steps(0, 0);
    Source::open(&[path]).unwrap().feed(&mut steps).unwrap();
    // One of CPython's records has 8,187 samples, and the reader's buffer may end within one.
    assert!(steps.1 == 300_000 && steps.0 < 150, "{} steps", steps.0);
}

#[test]
fn what_costs_too_much_ends_with_its_cost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("r.tach");
    repeated(&path, 300_000);
    let open = || Source::open(std::slice::from_ref(&path)).unwrap();
    let limited = || open().with_budget(budget::Budget::new(Duration::ZERO, u64::MAX));
    let error = limited().feed(&mut crate::sinks::CollapsedSink::new(Vec::new())).unwrap_err().to_string();
    assert!(error.starts_with("it takes more than files of its size should: stopped after "), "{error}");
    let fed = limited().without_limits().feed(&mut crate::sinks::CollapsedSink::new(Vec::new())).unwrap();
    assert_eq!(fed.samples, 300_000);
    assert_eq!(open().feed(&mut crate::sinks::CollapsedSink::new(Vec::new())).unwrap().samples, 300_000);
}
