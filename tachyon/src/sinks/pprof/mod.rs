//! A profile to pprof's protocol buffer, gzip-compressed: equal stacks summed up, with labels for process and thread.

pub mod proto;

use super::Sink;
use super::label::{Kind, Label, roots};
use super::stacks::{Counts, Key};
use crate::profile::{FrameId, Profile, Sample, ThreadId};
use crate::report::Report;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::io::{self, Write};

/// Name of the mapping that Python code belongs to: pprof wants one, and code has no object of its own.
const PYTHON: &str = "[python]";
/// What stands for a stack without frames, which pprof does not know.
const NO_FRAMES: &str = "<no frames>";

/// Sums equal stacks up and writes them at the end. Memory grows with the number of distinct stacks.
pub struct PprofSink<W> {
    out: W,
    counts: Counts,
    by_thread: bool,
}

impl<W: Write> PprofSink<W> {
    /// Nothing is written to `out` before the end. Threads are labels; `by_thread` also puts them at the root.
    pub fn new(out: W, by_thread: bool) -> Self {
        Self { out, counts: Counts::default(), by_thread }
    }
}

impl<W: Write> Sink for PprofSink<W> {
    fn sample(&mut self, _profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add(sample, true);
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let message = Builder::new(profile, self.by_thread).build(&self.counts, report);
        let mut gzip = flate2::write::GzEncoder::new(&mut self.out, flate2::Compression::default());
        gzip.write_all(&prost::Message::encode_to_vec(&message))?;
        gzip.finish()?.flush()
    }
}

/// Puts the message together.
struct Builder<'a> {
    profile: &'a Profile,
    by_thread: bool,
    message: proto::Profile,
    strings: HashMap<String, i64, RandomState>,
    functions: HashMap<(Kind, String, String), u64, RandomState>,
    /// By function and line.
    locations: HashMap<(u64, i64), u64, RandomState>,
    mappings: HashMap<String, u64, RandomState>,
    /// By [`FrameId`].
    frames: Vec<Option<u64>>,
}

impl<'a> Builder<'a> {
    fn new(profile: &'a Profile, by_thread: bool) -> Self {
        let mut builder = Self {
            profile,
            by_thread,
            message: proto::Profile::default(),
            strings: HashMap::default(),
            functions: HashMap::default(),
            locations: HashMap::default(),
            mappings: HashMap::default(),
            frames: vec![None; profile.frames.len()],
        };
        builder.string("");
        builder
    }

    fn build(mut self, counts: &Counts, report: &Report) -> proto::Profile {
        let period = i64::try_from(self.profile.meta.interval_us.saturating_mul(1000)).unwrap_or(i64::MAX);
        let samples = self.value_type("samples", "count");
        let cpu = self.value_type("cpu", "nanoseconds");
        self.message.sample_type = vec![samples, cpu];
        self.message.period_type = Some(cpu);
        self.message.period = period;
        self.message.default_sample_type = cpu.r#type;
        self.message.time_nanos = nanoseconds(self.profile.meta.start_unix);
        self.message.duration_nanos = nanoseconds(report.duration_s);
        self.comments(report);
        let mut threads: HashMap<u32, (Vec<u64>, Vec<proto::Label>)> = HashMap::new();
        for (key, count) in counts.sorted() {
            let id = ThreadId(key.thread);
            let (root, labels) = threads.entry(key.thread).or_insert_with(|| (self.roots(id), self.labels(id))).clone();
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            let mut location_id: Vec<u64> =
                counts.stacks.get(key.stack).iter().map(|&frame| self.frame(frame)).collect();
            if location_id.is_empty() {
                location_id.push(self.special(NO_FRAMES));
            }
            location_id.extend(root);
            let label = labels.into_iter().chain(self.gil(&key)).collect();
            let value = vec![count, count.saturating_mul(period)];
            self.message.sample.push(proto::Sample { location_id, value, label });
        }
        self.message
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = i64::try_from(self.message.string_table.len()).expect("strings fit in memory");
        self.message.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn value_type(&mut self, r#type: &str, unit: &str) -> proto::ValueType {
        proto::ValueType { r#type: self.string(r#type), unit: self.string(unit) }
    }

    fn comments(&mut self, report: &Report) {
        let lost: u64 = report.loss.values().sum();
        let mut comments = vec![
            concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")).to_owned(),
            format!("{} samples stored, {lost} lost", report.stored),
        ];
        if !self.profile.meta.hostname.is_empty() {
            comments.push(format!("host {}", self.profile.meta.hostname));
        }
        self.message.comment = comments.iter().map(|comment| self.string(comment)).collect();
    }

    fn frame(&mut self, FrameId(id): FrameId) -> u64 {
        if let Some(location) = self.frames[id as usize] {
            return location;
        }
        let profile = self.profile;
        let label = Label::of(profile, profile.frames.get(FrameId(id)));
        let location = self.location(&label);
        self.frames[id as usize] = Some(location);
        location
    }

    fn special(&mut self, name: &str) -> u64 {
        self.location(&Label { kind: Kind::Special, function: name, filename: "", line: None })
    }

    fn location(&mut self, label: &Label<'_>) -> u64 {
        let name = self.string(label.function);
        // A native frame's file is not known; its object is its mapping.
        let (filename, mapping) = match label.kind {
            Kind::Python => (self.string(label.filename), self.mapping(PYTHON)),
            Kind::Native | Kind::Kernel if !label.filename.is_empty() => (0, self.mapping(label.filename)),
            _ => (0, self.mapping(PYTHON)),
        };
        let key = (label.kind, label.filename.to_owned(), label.function.to_owned());
        let next = self.functions.len() as u64 + 1;
        let function_id = *self.functions.entry(key).or_insert(next);
        if function_id == next {
            // A system name equal to the name would be taken for C++'s, and `<module>` for its template arguments.
            self.message.function.push(proto::Function { id: next, name, system_name: 0, filename });
        }
        let line = label.line.map_or(0, i64::from);
        let next = self.locations.len() as u64 + 1;
        let id = *self.locations.entry((function_id, line)).or_insert(next);
        if id == next {
            let line = vec![proto::Line { function_id, line }];
            self.message.location.push(proto::Location { id, mapping_id: mapping, line });
        }
        id
    }

    fn mapping(&mut self, name: &str) -> u64 {
        if let Some(&id) = self.mappings.get(name) {
            return id;
        }
        let id = self.mappings.len() as u64 + 1;
        self.mappings.insert(name.to_owned(), id);
        let mapping = proto::Mapping {
            id,
            // Not addresses, but pprof takes mappings without a range of their own for one and the same.
            memory_start: id << 32,
            memory_limit: (id + 1) << 32,
            filename: self.string(name),
            // Nobody is to look for more.
            has_functions: true,
            has_filenames: true,
            has_line_numbers: true,
        };
        self.message.mapping.push(mapping);
        id
    }

    fn roots(&mut self, id: ThreadId) -> Vec<u64> {
        let names = roots(self.profile, id, self.by_thread);
        names.iter().rev().map(|name| self.special(name)).collect()
    }

    fn labels(&mut self, id: ThreadId) -> Vec<proto::Label> {
        let (thread, process) = (self.profile.thread(id), self.profile.process_of(id));
        let mut labels = Vec::new();
        let tid = i64::try_from(super::file_thread_id(self.profile, id)).unwrap_or(i64::MAX);
        for (key, num) in
            [("pid", i64::from(process.pid)), ("tid", tid), ("interpreter", i64::from(thread.interpreter))]
        {
            labels.push(proto::Label { key: self.string(key), str: 0, num });
        }
        let names = [("comm", process.comm.clone()), ("thread", thread.name.clone())];
        for (key, text) in names.into_iter().chain(process.labels()) {
            // An empty text is a label with the number 0.
            if !text.is_empty() {
                labels.push(proto::Label { key: self.string(key), str: self.string(&text), num: 0 });
            }
        }
        labels
    }

    fn gil(&mut self, key: &Key) -> Option<proto::Label> {
        let text = if key.gil? { "held" } else { "not held" };
        Some(proto::Label { key: self.string("gil"), str: self.string(text), num: 0 })
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a float that is too large becomes the largest number")]
fn nanoseconds(seconds: f64) -> i64 {
    (seconds * 1e9) as i64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Frame, Process, Thread};
    use prost::Message;
    use std::io::Read;

    fn message(profile: &Profile, by_thread: bool, samples: &[(u8, &[FrameId])]) -> proto::Profile {
        let mut sink = PprofSink::new(Vec::new(), by_thread);
        for &(status, frames) in samples {
            sink.sample(profile, &Sample { thread: ThreadId(0), time_us: 0, status, frames }).unwrap();
        }
        sink.finish(profile, &Report::default()).unwrap();
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(&sink.out[..]).read_to_end(&mut bytes).unwrap();
        proto::Profile::decode(&bytes[..]).unwrap()
    }

    #[test]
    fn places_and_labels() {
        let mut profile = Profile::default();
        profile.meta.interval_us = 10_000;
        profile.meta.start_unix = 2.5;
        let cmdline = vec!["python3".into(), "-m".into(), "app".into()];
        let (container, pod) = ("c1".into(), "p1".into());
        profile.processes.push(Process { pid: 9, comm: "app".into(), cmdline, container, pod, ..Process::default() });
        profile.threads.push(Thread { ns_tid: 5, interpreter: 2, name: "w".into(), ..Thread::default() });
        let (file, function) = (profile.strings.intern("/x.py"), profile.strings.intern("f"));
        let mut frame =
            |lineno, column| profile.frames.intern(Frame { lineno, column, ..Frame::without_location(file, function) });
        let (a, b, c) = (frame(3, 1), frame(3, 2), frame(4, 0));
        let native = profile.special_frame("libz.so.1!deflate");
        let samples: [(u8, &[FrameId]); 4] = [(1, &[native, a]), (1, &[native, a]), (0, &[b, c]), (4, &[])];
        let message = message(&profile, true, &samples);
        let text = |index: i64| message.string_table[usize::try_from(index).unwrap()].as_str();
        let place = |id: u64| {
            let location = &message.location[usize::try_from(id - 1).unwrap()];
            let function = &message.function[usize::try_from(location.line[0].function_id - 1).unwrap()];
            let mapping = &message.mapping[usize::try_from(location.mapping_id - 1).unwrap()];
            format!(
                "{}|{}|{}|{}",
                text(mapping.filename),
                text(function.name),
                text(function.filename),
                location.line[0].line
            )
        };
        let stacks: Vec<_> = message
            .sample
            .iter()
            .map(|sample| (sample.value.clone(), sample.location_id.iter().map(|&id| place(id)).collect::<Vec<_>>()))
            .collect();
        let root = "[python]|w (tid 5), interpreter 2||0".to_owned();
        let python = |line| format!("[python]|f|/x.py|{line}");
        assert_eq!(
            stacks,
            [
                (vec![2, 20_000_000], vec!["libz.so.1|deflate||0".to_owned(), python(3), root.clone()]),
                (vec![1, 10_000_000], vec![python(3), python(4), root.clone()]),
                (vec![1, 10_000_000], vec!["[python]|<no frames>||0".to_owned(), root]),
            ]
        );
        let labels: Vec<_> =
            message.sample[0].label.iter().map(|label| (text(label.key), text(label.str), label.num)).collect();
        assert_eq!(
            labels,
            [
                ("pid", "", 9),
                ("tid", "", 5),
                ("interpreter", "", 2),
                ("comm", "app", 0),
                ("thread", "w", 0),
                ("script", "-m app", 0),
                ("container", "c1", 0),
                ("pod", "p1", 0),
                ("gil", "held", 0)
            ]
        );
        assert_eq!(message.sample[2].label.len(), 8);
        assert_eq!((message.time_nanos, message.period), (2_500_000_000, 10_000_000));
        assert_eq!(text(message.period_type.unwrap().r#type), "cpu");
    }
}
