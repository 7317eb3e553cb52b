//! A profile to the Firefox profiler's "processed" JSON.
//!
//! `fxprof-processed-profile` does the encoding, in memory: unlike the other sinks this one needs some 80 bytes a
//! sample. Frames have a category for the kind of their code; when a thread held the GIL is told by markers.

use super::label::{Kind, Label};
use super::stacks::gil_held;
use super::{Sink, process_title};
use crate::profile::{FrameId, Profile, Sample, ThreadId};
use crate::report::Report;
use crate::sinks::spool::Spool;
use crate::sinks::stacks::StackId;
use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags, MarkerFieldFormat,
    MarkerTiming, ProcessHandle, ReferenceTimestamp, SamplingInterval, StackHandle, StaticSchemaMarker,
    StaticSchemaMarkerField, StringHandle, ThreadHandle, Timestamp,
};
use std::collections::HashMap;
use std::io::{self, Write};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Writes the file at the end.
pub struct FirefoxSink<W> {
    out: W,
    spool: Spool,
}

impl<W: Write> FirefoxSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self { out, spool: Spool::default() }
    }
}

impl<W: Write> Sink for FirefoxSink<W> {
    fn sample(&mut self, _profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.spool.push_by_thread(sample)
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let mut builder = Builder::new(profile, self.spool.span().map_or(0, |(first, _)| first));
        for thread in self.spool.threads() {
            builder.thread(&self.spool, thread)?;
        }
        let mut out = io::BufWriter::with_capacity(1 << 16, &mut self.out);
        serde_json::to_writer(&mut out, &builder.out)?;
        out.write_all(b"\n")?;
        out.flush()
    }
}

struct Builder<'a> {
    profile: &'a Profile,
    out: fxprof_processed_profile::Profile,
    /// Where the time line starts.
    start_us: u64,
    processes: HashMap<u32, ProcessHandle>,
    python: CategoryHandle,
    native: CategoryHandle,
    kernel: CategoryHandle,
}

impl<'a> Builder<'a> {
    fn new(profile: &'a Profile, first_us: u64) -> Self {
        let meta = &profile.meta;
        let start_us = if meta.start_us == 0 { first_us } else { meta.start_us.min(first_us) };
        let since_epoch = Duration::try_from_secs_f64(meta.start_unix).unwrap_or_default();
        let reference = ReferenceTimestamp::from(UNIX_EPOCH.checked_add(since_epoch).unwrap_or(SystemTime::UNIX_EPOCH));
        let interval = SamplingInterval::from_nanos(meta.interval_us.max(1).saturating_mul(1000));
        let product = match &profile.processes[..] {
            [process] if process.pid != 0 => process.comm.as_str(),
            _ => "Python",
        };
        let mut out = fxprof_processed_profile::Profile::new(product, reference, interval);
        // Nobody is to look for names of native code: they are there.
        out.set_symbolicated(true);
        let python = out.add_category("Python", CategoryColor::Yellow);
        let native = out.add_category("Native", CategoryColor::Blue);
        let kernel = out.add_category("Kernel", CategoryColor::Orange);
        Self { profile, out, start_us, processes: HashMap::new(), python, native, kernel }
    }

    fn timestamp(&self, time_us: u64) -> Timestamp {
        Timestamp::from_nanos_since_reference(time_us.saturating_sub(self.start_us).saturating_mul(1000))
    }

    fn thread(&mut self, spool: &Spool, id: ThreadId) -> io::Result<()> {
        let (thread, process) = (self.profile.thread(id), self.profile.process_of(id));
        let start = Timestamp::from_nanos_since_reference(0);
        let process = match self.processes.get(&thread.process) {
            Some(&handle) => handle,
            None => {
                let handle = self.out.add_process(&process_title(process), process.pid, start);
                self.processes.insert(thread.process, handle);
                handle
            }
        };
        let tid = u32::try_from(super::file_thread_id(self.profile, id)).unwrap_or(thread.tid);
        let is_main = tid == self.profile.process_of(id).pid || thread.tid == self.profile.process_of(id).pid;
        let handle = self.out.add_thread(process, tid, start, is_main);
        let mut name = if thread.name.is_empty() { format!("thread {tid}") } else { thread.name.clone() };
        if thread.interpreter != 0 {
            name.push_str(&format!(" (interpreter {})", thread.interpreter));
        }
        self.out.set_thread_name(handle, &name);
        self.samples(spool, id, handle)
    }

    fn samples(&mut self, spool: &Spool, id: ThreadId, thread: ThreadHandle) -> io::Result<()> {
        let interval_us = self.profile.meta.interval_us.max(1);
        let cpu = CpuDelta::from_nanos(interval_us.saturating_mul(1000));
        let mut stacks: HashMap<StackId, Option<StackHandle>> = HashMap::new();
        let mut gil = GilRuns::default();
        spool.read(id.0 as usize, |sample| {
            let stack = match stacks.get(&sample.stack) {
                Some(&stack) => stack,
                None => {
                    let stack = self.stack(thread, spool.stacks.get(sample.stack));
                    stacks.insert(sample.stack, stack);
                    stack
                }
            };
            let time = self.timestamp(sample.time_us);
            self.out.add_sample(thread, time, stack, cpu, 1);
            if let Some(run) = gil.sample(gil_held(sample.status), sample.time_us, interval_us) {
                self.marker(thread, &run);
            }
            Ok(())
        })?;
        if let Some(run) = gil.end() {
            self.marker(thread, &run);
        }
        Ok(())
    }

    fn stack(&mut self, thread: ThreadHandle, frames: &[FrameId]) -> Option<StackHandle> {
        let frames: Vec<FrameInfo> = frames
            .iter()
            .rev()
            .map(|&frame| {
                let label = Label::of(self.profile, self.profile.frames.get(frame));
                let category = match label.kind {
                    Kind::Python => self.python,
                    Kind::Native => self.native,
                    Kind::Kernel => self.kernel,
                    Kind::Special => CategoryHandle::OTHER,
                };
                FrameInfo {
                    frame: Frame::Label(self.out.intern_string(&label.to_text())),
                    category_pair: category.into(),
                    flags: FrameFlags::empty(),
                }
            })
            .collect();
        self.out.intern_stack_frames(thread, frames.into_iter())
    }

    fn marker(&mut self, thread: ThreadHandle, run: &Run) {
        let name = self.out.intern_string(if run.held { "GIL held" } else { "GIL not held" });
        let timing = MarkerTiming::Interval(self.timestamp(run.start_us), self.timestamp(run.end_us));
        self.out.add_marker(thread, timing, GilMarker { name, category: self.python, samples: run.samples });
    }
}

/// Consecutive samples of a thread in one state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    held: bool,
    start_us: u64,
    end_us: u64,
    samples: u32,
}

/// Joins samples to runs.
#[derive(Debug, Default)]
struct GilRuns {
    run: Option<Run>,
}

impl GilRuns {
    /// Takes a sample; gives the run that it ended. A thread that was not sampled for two intervals did not run.
    fn sample(&mut self, held: Option<bool>, time_us: u64, interval_us: u64) -> Option<Run> {
        let end_us = time_us.saturating_add(interval_us);
        if let (Some(run), Some(held)) = (&mut self.run, held)
            && run.held == held
            && time_us <= run.end_us.saturating_add(interval_us)
        {
            run.end_us = run.end_us.max(end_us);
            run.samples = run.samples.saturating_add(1);
            return None;
        }
        let new = held.map(|held| Run { held, start_us: time_us, end_us, samples: 1 });
        // It lasts no longer than to the next one's start.
        std::mem::replace(&mut self.run, new)
            .map(|run| Run { end_us: run.end_us.min(time_us.max(run.start_us)), ..run })
    }

    fn end(self) -> Option<Run> {
        self.run
    }
}

/// A time in which a thread held, or did not hold, the GIL at every sample.
struct GilMarker {
    name: StringHandle,
    category: CategoryHandle,
    samples: u32,
}

impl StaticSchemaMarker for GilMarker {
    const UNIQUE_MARKER_TYPE_NAME: &'static str = "GIL";
    const DESCRIPTION: Option<&'static str> =
        Some("Whether the thread held its interpreter's GIL at consecutive samples on a CPU.");
    const CHART_LABEL: Option<&'static str> = Some("{marker.data.samples}");
    const FIELDS: &'static [StaticSchemaMarkerField] = &[StaticSchemaMarkerField {
        key: "samples",
        label: "Samples",
        format: MarkerFieldFormat::Integer,
        flags: MarkerFieldFlags::empty(),
    }];

    fn name(&self, _profile: &mut fxprof_processed_profile::Profile) -> StringHandle {
        self.name
    }

    fn category(&self, _profile: &mut fxprof_processed_profile::Profile) -> CategoryHandle {
        self.category
    }

    fn string_field_value(&self, _field_index: u32) -> StringHandle {
        self.name
    }

    fn number_field_value(&self, _field_index: u32) -> f64 {
        f64::from(self.samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Process, Thread};
    use serde_json::{Value, json};

    #[test]
    fn threads_samples_and_markers() {
        let mut profile = Profile::default();
        profile.meta.start_us = 1000;
        profile.meta.interval_us = 10;
        let cmdline = vec!["python3".into(), "-mapp".into()];
        profile.processes.push(Process { pid: 5, comm: "app".into(), cmdline, ..Process::default() });
        profile.threads.push(Thread { tid: 5, ns_tid: 5, name: "main".into(), ..Thread::default() });
        let (a, b) = (profile.special_frame("a"), profile.special_frame("libz.so!b"));
        let mut sink = FirefoxSink::new(Vec::new());
        for (time_us, status, frames) in [(1010, 1, &[b, a][..]), (1020, 1, &[a]), (1033, 0, &[]), (1100, 4, &[b, a])] {
            sink.sample(&profile, &Sample { thread: ThreadId(0), time_us, status, frames }).unwrap();
        }
        sink.finish(&profile, &Report::default()).unwrap();
        let file: Value = serde_json::from_slice(&sink.out).unwrap();
        let thread = &file["threads"][0];
        // The encoder gives main threads their process's name.
        assert_eq!((&thread["name"], &thread["isMainThread"]), (&json!("app (5) -m app"), &json!(true)));
        assert_eq!(thread["samples"]["weight"], json!([1, 1, 1, 1]));
        assert_eq!(thread["samples"]["stack"], json!([1, 0, null, 1]));
        assert_eq!(thread["markers"]["length"], 2);
        assert_eq!(thread["markers"]["startTime"], json!([0.01, 0.033]));
        assert_eq!(thread["markers"]["endTime"], json!([0.03, 0.043]));
    }
}
