//! Writes a profile as the Firefox profiler's "processed" JSON.
//!
//! `fxprof-processed-profile` does the encoding of all but two tables. It keeps samples and markers in memory, some 80
//! bytes for each sample, and cannot write them piece by piece; so it gets each distinct stack of a thread, and each kind
//! of marker, only once. Its output for these shows what the two tables look like, which are then written column by
//! column (`firefox/columns.rs`). Frames have a category for the kind of their code; markers show when a thread held the
//! GIL.

mod columns;

use super::label::{Kind, Label};
use super::need::Amounts;
use super::{Sink, process_title};
use crate::profile::{FrameId, Profile, Sample, ThreadId};
use crate::report::Report;
use crate::sinks::spool::Spool;
use columns::{Clock, Columns, Told};
use fxprof_processed_profile::{
    CategoryColor, CategoryHandle, CpuDelta, Frame, FrameFlags, FrameInfo, MarkerFieldFlags, MarkerFieldFormat,
    MarkerTiming, ProcessHandle, ReferenceTimestamp, SamplingInterval, StackHandle, StaticSchemaMarker,
    StaticSchemaMarkerField, StringHandle, ThreadHandle, Timestamp,
};
use serde_json::Value;
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
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.spool.repeat_by_thread(profile, sample, times_us)
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        let amounts = Amounts::of(profile, &self.spool.stacks);
        // Each thread has texts of its own. A frame is shown with its file.
        let threads = (profile.threads.len() as u64).clamp(1, amounts.stacks.max(1));
        let labels = threads * (amounts.stack_frames / threads).min(amounts.frames);
        let label = 2 * amounts.text / amounts.frames.max(1) + 16;
        amounts.sum([200, 200, 700, 0, 1000]) + 7 * labels * label
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let mut builder = Builder::new(profile, self.spool.span().map_or(0, |(first, _)| first));
        for thread in self.spool.threads() {
            builder.thread(&self.spool, thread)?;
        }
        let mut file = serde_json::to_value(&builder.out)?;
        let threads = file.as_object_mut().and_then(|file| file.remove("threads"));
        let Some(Value::Array(threads)) = threads else { return Err(changed()) };
        let mut out = io::BufWriter::with_capacity(1 << 16, &mut self.out);
        write_file(&mut out, &file, threads, &self.spool, &builder.told)?;
        out.flush()
    }
}

fn write_file(out: &mut impl Write, file: &Value, threads: Vec<Value>, spool: &Spool, told: &Told) -> io::Result<()> {
    begin_object(out, file)?;
    out.write_all(b"\"threads\":[")?;
    for (place, mut encoded) in threads.into_iter().enumerate() {
        if place > 0 {
            out.write_all(b",")?;
        }
        let thread = encoded.as_object_mut().ok_or_else(changed)?;
        let (samples, markers) = (thread.remove("samples"), thread.remove("markers"));
        let columns = Columns::new(spool, told, &samples, &markers).ok_or_else(changed)?;
        begin_object(out, &encoded)?;
        columns.write(out)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"]}\n")
}

/// The encoder's output does not look as expected from this version.
fn changed() -> io::Error {
    io::Error::other("the encoder of Firefox profiles has changed")
}

/// Writes an object up to where its last member goes.
fn begin_object(out: &mut impl Write, object: &Value) -> io::Result<()> {
    let text = super::text::json_line(object);
    let members = text.strip_suffix('}').ok_or_else(changed)?;
    out.write_all(members.as_bytes())?;
    if members == "{" { Ok(()) } else { out.write_all(b",") }
}

struct Builder<'a> {
    profile: &'a Profile,
    out: fxprof_processed_profile::Profile,
    told: Told,
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
        // Viewers need not look for names of native code: they are in the file.
        out.set_symbolicated(true);
        let python = out.add_category("Python", CategoryColor::Yellow);
        let native = out.add_category("Native", CategoryColor::Blue);
        let kernel = out.add_category("Kernel", CategoryColor::Orange);
        let clock = Clock { start_us, interval_us: meta.interval_us.max(1) };
        Self { profile, out, told: Told::new(clock), processes: HashMap::new(), python, native, kernel }
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

    /// Gives the encoder each stack and each kind of marker of the thread once; [`Columns`] uses the result. All
    /// weights are the thread's number, because the encoder sorts threads.
    fn samples(&mut self, spool: &Spool, id: ThreadId, thread: ThreadHandle) -> io::Result<()> {
        let start = Timestamp::from_nanos_since_reference(0);
        let number = i32::try_from(id.0).map_err(io::Error::other)?;
        let held = self.told.read(spool, id)?;
        for place in 0..self.told.stacks(id).len() {
            let stack = self.stack(thread, spool.stacks.get(self.told.stacks(id)[place]));
            self.out.add_sample(thread, start, stack, CpuDelta::ZERO, number);
        }
        for held in held {
            self.marker(thread, held);
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

    fn marker(&mut self, thread: ThreadHandle, held: bool) {
        let start = Timestamp::from_nanos_since_reference(0);
        let name = self.out.intern_string(if held { "GIL held" } else { "GIL not held" });
        let marker = GilMarker { name, category: self.python, held };
        self.out.add_marker(thread, MarkerTiming::Interval(start, start), marker);
    }
}

/// A period in which a thread held, or did not hold, the GIL at every sample.
struct GilMarker {
    name: StringHandle,
    category: CategoryHandle,
    /// Stands in for the number of samples until that is known.
    held: bool,
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
        f64::from(u8::from(self.held))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, Process, Thread};
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
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(0), time_us, status, frames, merge: Merge::None, work: None },
            )
            .unwrap();
        }
        sink.finish(&profile, &Report::default()).unwrap();
        let file: Value = serde_json::from_slice(&sink.out).unwrap();
        let thread = &file["threads"][0];
        // The encoder gives main threads their process's name.
        assert_eq!((&thread["name"], &thread["isMainThread"]), (&json!("python3 -m app (5)"), &json!(true)));
        let cpu = json!([10, 10, 10, 10]);
        assert_eq!(
            thread["samples"],
            json!({
                "length": 4, "weightType": "samples", "weight": [1, 1, 1, 1], "stack": [1, 0, null, 1],
                "timeDeltas": [0.01, 0.01, 0.013, 0.067], "threadCPUDelta": cpu
            })
        );
        let gil = |samples: f64| json!({"type": "GIL", "samples": samples});
        let markers = &thread["markers"];
        assert_eq!((&markers["length"], &markers["data"]), (&json!(2), &json!([gil(2.0), gil(1.0)])));
        assert_eq!((&markers["startTime"], &markers["endTime"]), (&json!([0.01, 0.033]), &json!([0.03, 0.043])));
        assert_eq!(markers["phase"], json!([1, 1]));
        let names = markers["name"].as_array().unwrap().iter();
        let names: Vec<_> = names.map(|index| &thread["stringArray"][index.as_u64().unwrap() as usize]).collect();
        assert_eq!(names, ["GIL held", "GIL not held"]);
        let category = &file["meta"]["categories"][markers["category"][1].as_u64().unwrap() as usize];
        assert_eq!(category["name"], "Python");
    }
}
