//! Segments of a made-up program, for tests.

use super::driver::Taken;
use super::model::{Model, Sampled, Title};
use crate::analysis::live::BatchSink;
use crate::profile::{Frame, Merge, Process, Profile, Sample, TASK_FILENAME, Thread, ThreadId};
use crate::report::Report;
use crate::sinks::Sink as _;
use std::time::Duration;
use tachyon_common::event::status;

pub const PID: u32 = 4242;
pub const HOLDS: u8 = (status::HAS_GIL | status::ON_CPU) as u8;
pub const WITHOUT: u8 = status::ON_CPU as u8;
pub const RAISES: u8 = HOLDS | status::HAS_EXCEPTION as u8;

/// A stack, leaf first: `function:line`, `<task> name`, or `object!symbol` for native code. With the thread, its status and how often.
pub type Seen<'a> = (usize, &'a [&'a str], u8, u64);

/// A segment of two seconds of a program with the threads `main` and `worker`, sampled each 10 ms.
pub fn taken(seen: &[Seen<'_>]) -> Taken {
    let mut profile = Profile::default();
    profile.meta.start_us = 1_000_000;
    profile.meta.interval_us = 10_000;
    let cmdline = vec!["python3".to_owned(), "app.py".to_owned()];
    profile.processes.push(Process { pid: PID, comm: "python3".into(), cmdline, ..Process::default() });
    for (name, tid) in [("main", PID), ("worker", PID + 1)] {
        let name = name.to_owned();
        profile.threads.push(Thread { tid, ns_tid: tid, unique_tid: tid.into(), name, ..Thread::default() });
    }
    let mut sink = BatchSink::default();
    let mut stored = 0;
    for &(thread, stack, status, count) in seen {
        let mut frame = |text: &&str| match text.rsplit_once(':') {
            Some((function, line)) => {
                let (file, function) = (profile.strings.intern("/srv/app.py"), profile.strings.intern(function));
                let lineno = line.parse().expect("a line is a number");
                profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) })
            }
            None if text.starts_with(TASK_FILENAME) => {
                let name = text.trim_start_matches(TASK_FILENAME).trim_start();
                let (file, name) = (profile.strings.intern(TASK_FILENAME), profile.strings.intern(name));
                profile.frames.intern(Frame::without_location(file, name))
            }
            None => profile.special_frame(text),
        };
        let frames: Vec<_> = stack.iter().map(&mut frame).collect();
        for _ in 0..count {
            stored += 1;
            let thread = ThreadId(u32::try_from(thread).expect("there are two"));
            let time_us = 1_000_000 + stored * 10_000;
            let sample = Sample { thread, time_us, status, frames: &frames, merge: Merge::None, work: None };
            sink.sample(&profile, &sample).expect("memory takes it");
        }
    }
    let mut report = Report { schema: 1, ran: stored, stored, duration_s: 2.0, ..Report::default() };
    report.cost.user_cpu_s = 0.02;
    Taken { profile, report, batch: sink.take(), notes: Vec::new() }
}

/// A view of such segments with a window of four seconds.
pub fn model() -> Model {
    model_with(Sampled { native: true, tasks: false })
}

/// The same for a recording with this sampled.
pub fn model_with(sampled: Sampled) -> Model {
    let title = Title { what: "python3 app.py".to_owned(), rate_hz: 99.0 };
    Model::new(title, Duration::from_secs(2), Duration::from_secs(4), sampled)
}

/// The usual segment: 60 % of `lead`, 25 % of `pack` in native code, the rest in the other thread.
pub fn usual() -> Taken {
    taken(&[
        (0, &["lead:10", "main:3"], HOLDS, 90),
        (0, &["lead:11", "main:3"], HOLDS, 30),
        (0, &["libz.so.1!deflate", "pack:20", "main:4"], WITHOUT, 50),
        (1, &["wait:30", "serve:31"], HOLDS, 30),
    ])
}
