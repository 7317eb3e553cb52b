//! What the tests of this program share: running it, and segments as an agent leaves them.

use serde_json::json;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tachyon::profile::{Frame, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::{ProcessReport, Report, SegmentReport};
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink as _, TachSink};

/// 2026-11-22 19:01:13 UTC.
pub const START: f64 = 1_795_374_073.0;

/// Runs the program as its user would; its outcome.
pub fn fleet(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tachyon-fleet")).args(words).output().expect("the program starts")
}

/// Runs the program, which must succeed; its standard output.
pub fn succeeds(words: &[&str]) -> String {
    let output = fleet(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("it writes UTF-8")
}

/// Runs the program, which must fail with this status; its standard error.
pub fn fails(words: &[&str], status: i32) -> String {
    let output = fleet(words);
    let told = String::from_utf8(output.stderr).expect("it writes UTF-8");
    assert_eq!(output.status.code(), Some(status), "{words:?}: {told}");
    told
}

/// A path as a word.
pub fn word(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

/// A segment of a host, with samples of services. Stacks are names of functions, outermost first; a name with `!` is native.
pub struct Segment<'a> {
    pub host: &'a str,
    pub sequence: u64,
    /// Service, version, stack, samples.
    pub samples: &'a [(&'a str, &'a str, &'a [&'a str], u64)],
    pub loss: &'a [(&'a str, u64)],
    /// Names that the file has before its own: other hosts number them in another way.
    pub before: &'a [&'a str],
}

impl Segment<'_> {
    /// The name of its files, without their ending.
    pub fn name(&self) -> String {
        format!("{}-20261122T190113Z-{:06}", self.host, self.sequence)
    }

    /// Writes the TACH file and its account, as the agent does.
    pub fn write(&self, spool: &Path) -> PathBuf {
        let profile = self.profile();
        let report = self.report(&profile);
        let path = spool.join(self.name() + ".tach");
        // The account in the file has no labels.
        let mut inside = report.clone();
        inside.processes.iter_mut().for_each(|process| process.labels.clear());
        fs::write(path.with_extension("json"), json!(report).to_string()).unwrap();
        let mut sink = TachSink::new(File::create(&path).unwrap(), &profile.meta, TachOptions::default()).unwrap();
        for (place, (service, version, stack, samples)) in (0..).zip(self.samples) {
            let thread = self.process(service, version);
            let frames: Vec<_> = stack.iter().rev().map(|name| frame(&mut profile.clone(), name)).collect();
            let waits = stack.last().is_some_and(|leaf| leaf.starts_with("<waiting"));
            let status = if waits { 0 } else { 3 };
            for number in 0..*samples {
                let time_us = profile.meta.start_us + self.sequence * 60_000_000 + number * 10_000 + place;
                let sample = Sample {
                    thread: ThreadId(thread),
                    time_us,
                    status,
                    frames: &frames,
                    merge: Merge::None,
                    work: None,
                };
                sink.sample(&profile, &sample).unwrap();
            }
        }
        sink.finish(&profile, &inside).unwrap();
        path
    }

    /// Place of the process of a service and version.
    fn process(&self, service: &str, version: &str) -> u32 {
        let mut known: Vec<_> = self.samples.iter().map(|(service, version, ..)| (*service, *version)).collect();
        known.dedup();
        (0..).zip(known).find(|(_, known)| *known == (service, version)).expect("it is one of them").0
    }

    fn profile(&self) -> Profile {
        let mut profile = Profile::default();
        let meta = &mut profile.meta;
        (meta.start_us, meta.start_unix, meta.interval_us) = (5_000_000, START, 10_000);
        (meta.hostname, meta.many_processes, meta.waits) = (self.host.to_owned(), true, true);
        meta.python_version = (3, 12, 1);
        for name in self.before {
            profile.strings.intern(name);
        }
        for (service, version, stack, _) in self.samples {
            let place = self.process(service, version);
            if place as usize == profile.processes.len() {
                let (pid, cmdline) = (100 + place, vec!["python3".to_owned(), format!("/srv/{service}.py")]);
                let comm = "python3".to_owned();
                profile.processes.push(Process { pid, comm, cmdline, ..Process::default() });
                let tid = 100 + place;
                let thread = Thread { process: place, tid, unique_tid: tid.into(), ns_tid: tid, ..Thread::default() };
                profile.threads.push(thread);
            }
            for name in *stack {
                frame(&mut profile, name);
            }
        }
        profile
    }

    fn report(&self, profile: &Profile) -> Report {
        let count = |waits: bool| {
            let of_kind = |stack: &&[&str]| stack.last().is_some_and(|leaf| leaf.starts_with("<waiting")) == waits;
            self.samples.iter().filter(|(_, _, stack, _)| of_kind(stack)).map(|(.., samples)| samples).sum::<u64>()
        };
        let processes = profile.processes.iter().enumerate().map(|(place, process)| {
            let of =
                |(service, version, ..): &&(&str, &str, &[&str], u64)| self.process(service, version) as usize == place;
            let (service, version, ..) = self.samples.iter().find(of).expect("each process has samples");
            let labels = [
                ("host", self.host),
                ("pid", &process.pid.to_string()),
                ("service.name", service),
                ("service.version", version),
                ("team", "a"),
            ];
            let labels = labels.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
            ProcessReport { pid: process.pid, labels, ..ProcessReport::default() }
        });
        let processes = processes.collect();
        let loss = self.loss.iter().map(|&(cause, runs)| (cause.to_owned(), runs)).collect();
        let start_unix = START + 60.0 * self.sequence as f64;
        Report {
            schema: 1,
            stored: count(false),
            ran: count(false) + self.loss.iter().map(|(_, runs)| runs).sum::<u64>(),
            wall: Some(tachyon::report::WallReport {
                stored: count(true),
                ticks_due: count(true),
                ..Default::default()
            }),
            segment: Some(SegmentReport { sequence: self.sequence, start_unix, end_unix: start_unix + 60.001 }),
            duration_s: 60.001,
            loss,
            processes,
            ..Report::default()
        }
    }
}

fn frame(profile: &mut Profile, name: &str) -> tachyon::profile::FrameId {
    if name.contains('!') || name.starts_with('<') {
        return profile.special_frame(name);
    }
    let (file, function) = (profile.strings.intern("/srv/app.py"), profile.strings.intern(name));
    profile.frames.intern(Frame { lineno: 7, end_lineno: 7, ..Frame::without_location(file, function) })
}
