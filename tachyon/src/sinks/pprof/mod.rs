//! Writes pprof's protocol buffer, gzip-compressed: equal stacks summed up, with labels for process and thread.

pub mod proto;

use super::Sink;
use super::label::{Kind, Label, RootOptions, Roots};
use super::stacks::{Counts, Key};
use crate::profile::{FrameId, MappingId, NativeMapping, NativePlace, Profile, Sample, TASK_WAIT, ThreadId};
use crate::report::Report;
use crate::sinks::need::Amounts;
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};

/// Name of the mapping that Python code belongs to: pprof needs one, and the code has no object of its own.
const PYTHON: &str = "[python]";
/// Stands for a stack without frames, which pprof does not support.
const NO_FRAMES: &str = "<no frames>";

/// Sums equal stacks up and writes them at the end. Memory grows with the number of distinct stacks.
pub struct PprofSink<W> {
    out: W,
    counts: Counts,
    roots: RootOptions,
}

impl<W: Write> PprofSink<W> {
    /// Nothing is written to `out` before the end. Threads are labels; `roots` can also put them at the root, or programs
    /// in place of processes.
    pub fn new(out: W, roots: RootOptions) -> Self {
        Self { out, counts: Counts::default(), roots }
    }
}

impl<W: Write> Sink for PprofSink<W> {
    fn tells_work(&self) -> bool {
        true
    }

    fn sample(&mut self, _profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add(sample, true, 1);
        Ok(())
    }

    fn repeated(&mut self, _profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.counts.add(sample, true, times_us.len());
        Ok(())
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        // One stack may occur with many different pieces of work.
        let stacks = self.counts.len() as u64;
        Amounts { stacks, ..Amounts::of(profile, &self.counts.stacks) }.sum([220, 18, 700, 4, 200])
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let message = Builder::new(profile, self.roots).build(&self.counts, report);
        let mut gzip = flate2::write::GzEncoder::new(&mut self.out, flate2::Compression::default());
        gzip.write_all(&prost::Message::encode_to_vec(&message))?;
        gzip.finish()?.flush()
    }
}

/// What identifies a location.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct LocationKey {
    /// Functions and lines, innermost first.
    functions: Vec<(u64, i64)>,
    mapping: u64,
    address: u64,
}

/// What identifies a mapping.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum MappingKey {
    /// An object in memory.
    Object(MappingId),
    /// An object of which only the name is known, or Python.
    Name(String),
}

/// Puts the message together.
struct Builder<'a> {
    profile: &'a Profile,
    roots: Roots<'a>,
    message: proto::Profile,
    strings: HashMap<String, i64, RandomState>,
    functions: HashMap<(Kind, String, String, i64), u64, RandomState>,
    locations: HashMap<LocationKey, u64, RandomState>,
    mappings: HashMap<MappingKey, u64, RandomState>,
    /// By frame; inlined frames and the one that they are inlined into form one location.
    frames: HashMap<Vec<FrameId>, u64, RandomState>,
}

impl<'a> Builder<'a> {
    fn new(profile: &'a Profile, roots: RootOptions) -> Self {
        let mut builder = Self {
            profile,
            roots: Roots::new(profile, roots),
            message: proto::Profile::default(),
            strings: HashMap::default(),
            functions: HashMap::default(),
            locations: HashMap::default(),
            mappings: HashMap::default(),
            frames: HashMap::default(),
        };
        builder.string("");
        builder
    }

    fn build(mut self, counts: &Counts, report: &Report) -> proto::Profile {
        let period = i64::try_from(self.profile.meta.interval_us.saturating_mul(1000)).unwrap_or(i64::MAX);
        let samples = self.value_type("samples", "count");
        let cpu = self.value_type("cpu", "nanoseconds");
        // If waiting threads were sampled, too: what is not CPU time is still wall-clock time.
        let profile = self.profile;
        let waits = |key: &Key| profile.waits_for(counts.stacks.get(key.stack)).is_some();
        let sorted = counts.sorted();
        let wall = sorted.iter().any(|(key, _)| waits(key)).then(|| self.value_type("wall", "nanoseconds"));
        let event = |key: &Key| profile.event_of(counts.stacks.get(key.stack));
        let names: BTreeSet<&str> = sorted.iter().filter_map(|(key, _)| Some(event(key)?.0)).collect();
        // What tasks await is measured in time.
        let unit = |event: &str| if event == TASK_WAIT { "nanoseconds" } else { "count" };
        let events: Vec<_> = names.iter().map(|&name| self.value_type(name, unit(name))).collect();
        let is_timed = names.is_empty() || sorted.iter().any(|(key, _)| event(key).is_none());
        self.message.sample_type = [samples, cpu].into_iter().chain(wall).chain(events.iter().copied()).collect();
        self.message.period_type = Some(cpu);
        self.message.period = period;
        let first = events.first().copied().filter(|_| !is_timed);
        self.message.default_sample_type = first.or(wall).unwrap_or(cpu).r#type;
        self.message.time_nanos = nanoseconds(self.profile.meta.start_unix);
        self.message.duration_nanos = nanoseconds(report.duration_s);
        self.comments(report);
        let mut threads: HashMap<u32, (Vec<u64>, Vec<proto::Label>)> = HashMap::new();
        for (key, count) in sorted {
            let id = ThreadId(key.thread);
            let (root, labels) = threads.entry(key.thread).or_insert_with(|| (self.roots(id), self.labels(id))).clone();
            let count = i64::try_from(count).unwrap_or(i64::MAX);
            let mut location_id = self.stack(counts.stacks.get(key.stack));
            if location_id.is_empty() {
                location_id.push(self.special(NO_FRAMES));
            }
            location_id.extend(root);
            let label = labels.into_iter().chain(self.gil(&key)).chain(self.work(&key)).collect();
            let of_event = event(&key);
            let time = if of_event.is_some() { 0 } else { count.saturating_mul(period) };
            let on_cpu = if waits(&key) { 0 } else { time };
            let of_events = names.iter().map(|name| {
                let (_, each) = of_event.filter(|(own, _)| own == name)?;
                let each = if *name == TASK_WAIT { period } else { i64::try_from(each).unwrap_or(i64::MAX) };
                Some(count.saturating_mul(each))
            });
            let of_events = of_events.map(|events| events.unwrap_or(0));
            let value = [count, on_cpu].into_iter().chain(wall.map(|_| time)).chain(of_events).collect();
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
            match report.cut {
                true => format!("{} samples recovered, what was lost is unknown", report.stored),
                false => format!("{} samples stored, {lost} lost", report.stored),
            },
        ];
        if !self.profile.meta.hostname.is_empty() {
            comments.push(format!("host {}", self.profile.meta.hostname));
        }
        self.message.comment = comments.iter().map(|comment| self.string(comment)).collect();
    }

    /// The locations of a stack.
    fn stack(&mut self, stack: &[FrameId]) -> Vec<u64> {
        let profile = self.profile;
        let mut locations = Vec::with_capacity(stack.len() + 1);
        let mut rest = stack;
        while !rest.is_empty() {
            let inlined = rest.iter().take_while(|&&id| profile.native_place(id).is_some_and(|place| place.inlined));
            // A stack that was cut may have lost the frame that the last ones are inlined into.
            let (one, outer) = rest.split_at((inlined.count() + 1).min(rest.len()));
            locations.push(self.frame(one));
            rest = outer;
        }
        locations
    }

    /// The location of a frame, with those that are inlined into it before it.
    fn frame(&mut self, frames: &[FrameId]) -> u64 {
        if let Some(&location) = self.frames.get(frames) {
            return location;
        }
        let profile = self.profile;
        let labels: Vec<_> = frames
            .iter()
            .map(|&id| {
                let (file, line) = profile.native_source(id).unwrap_or(("", None));
                let label = Label::of(profile, profile.frames.get(id));
                (Label { line: label.line.or(line), ..label }, file)
            })
            .collect();
        let place = frames.last().and_then(|&id| profile.native_place(id));
        let location = self.location(&labels, place);
        self.frames.insert(frames.to_vec(), location);
        location
    }

    fn special(&mut self, name: &str) -> u64 {
        self.location(&[(Label { kind: Kind::Special, function: name, filename: "", line: None }, "")], None)
    }

    /// Labels come with the source files of native code, as far as these are known.
    fn location(&mut self, labels: &[(Label<'_>, &str)], place: Option<&NativePlace>) -> u64 {
        let mapping = match (place.and_then(|place| place.mapping), labels.last()) {
            (Some(id), _) => self.object(id),
            (None, Some((Label { kind: Kind::Native | Kind::Kernel, filename, .. }, _))) if !filename.is_empty() => {
                self.named_mapping(filename)
            }
            _ => self.named_mapping(PYTHON),
        };
        let address = place.map_or(0, |place| place.address);
        let functions: Vec<_> = labels
            .iter()
            .map(|(label, source)| (self.function(label, source), label.line.map_or(0, i64::from)))
            .collect();
        let next = self.locations.len() as u64 + 1;
        let key = LocationKey { functions, mapping, address };
        *self.locations.entry(key).or_insert_with_key(|LocationKey { functions, .. }| {
            let line = functions.iter().map(|&(function_id, line)| proto::Line { function_id, line }).collect();
            self.message.location.push(proto::Location { id: next, mapping_id: mapping, address, line });
            next
        })
    }

    fn function(&mut self, label: &Label<'_>, source: &str) -> u64 {
        let name = self.string(label.function);
        // A native frame's object is its mapping; its file is known only from DWARF.
        let file = if label.kind == Kind::Python { label.filename } else { source };
        let filename = self.string(file);
        let key = (label.kind, label.filename.to_owned(), label.function.to_owned(), filename);
        let next = self.functions.len() as u64 + 1;
        let id = *self.functions.entry(key).or_insert(next);
        if id == next {
            // A system name equal to the name would be taken for a C++ name, and `<module>` for template arguments.
            self.message.function.push(proto::Function { id, name, system_name: 0, filename });
        }
        id
    }

    /// A real mapping.
    fn object(&mut self, id: MappingId) -> u64 {
        let NativeMapping { start, end, offset, path, build_id, .. } = self.profile.native.mapping(id);
        self.mapping(MappingKey::Object(id), path, build_id, (*start, *end, *offset))
    }

    /// A mapping with a name but no addresses. pprof treats all mappings without a range of their own as the same, so
    /// it gets one, where Linux never puts code.
    fn named_mapping(&mut self, name: &str) -> u64 {
        let start = (1 << 56) + ((self.mappings.len() as u64) << 32);
        self.mapping(MappingKey::Name(name.to_owned()), name, "", (start, start + (1 << 32), 0))
    }

    fn mapping(&mut self, key: MappingKey, name: &str, build_id: &str, (start, end, offset): (u64, u64, u64)) -> u64 {
        if let Some(&id) = self.mappings.get(&key) {
            return id;
        }
        let id = self.mappings.len() as u64 + 1;
        self.mappings.insert(key, id);
        let mapping = proto::Mapping {
            id,
            memory_start: start,
            memory_limit: end,
            file_offset: offset,
            filename: self.string(name),
            build_id: self.string(build_id),
            // Readers need not look for more.
            has_functions: true,
            has_filenames: true,
            has_line_numbers: true,
            has_inline_frames: true,
        };
        self.message.mapping.push(mapping);
        id
    }

    fn roots(&mut self, id: ThreadId) -> Vec<u64> {
        let names = self.roots.of(id);
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
        let names = names.map(|(key, text)| (Cow::Borrowed(key), text));
        for (key, text) in names.into_iter().chain(process.labels()) {
            // An empty text is a label with the number 0.
            if !text.is_empty() {
                labels.push(proto::Label { key: self.string(&key), str: self.string(&text), num: 0 });
            }
        }
        labels
    }

    /// Task and span, as far as they are known.
    fn work(&mut self, key: &Key) -> Vec<proto::Label> {
        let profile = self.profile;
        let Some(work) = key.work.map(|id| profile.works.get(id)) else { return Vec::new() };
        let task = work.task.map(|task| ("task", profile.strings.get(task.name).to_owned()));
        let span = work.span_ids().map(|(trace, span)| [("trace_id", trace), ("span_id", span)]);
        let labels = task.into_iter().chain(span.into_iter().flatten());
        labels.map(|(key, text)| proto::Label { key: self.string(key), str: self.string(&text), num: 0 }).collect()
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
    use crate::profile::{Frame, Merge, Process, Thread};
    use prost::Message;
    use std::io::Read;

    fn message(profile: &Profile, by_thread: bool, samples: &[(u8, &[FrameId])]) -> proto::Profile {
        let mut sink = PprofSink::new(Vec::new(), RootOptions { by_thread, ..RootOptions::default() });
        for &(status, frames) in samples {
            sink.sample(
                profile,
                &Sample { thread: ThreadId(0), time_us: 0, status, frames, merge: Merge::None, work: None },
            )
            .unwrap();
        }
        sink.finish(profile, &Report::default()).unwrap();
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(&sink.out[..]).read_to_end(&mut bytes).unwrap();
        proto::Profile::decode(&bytes[..]).unwrap()
    }

    #[test]
    fn waiting_threads_have_a_value_of_their_own() {
        let mut profile = Profile::default();
        profile.meta.interval_us = 10_000;
        profile.processes.push(Process::default());
        profile.threads.push(Thread::default());
        let (work, waits) = (profile.special_frame("work"), profile.special_frame(&crate::profile::waiting("socket")));
        let message = message(&profile, false, &[(0, &[work]), (0, &[waits, work]), (0, &[waits, work])]);
        let name = |index: i64| message.string_table[usize::try_from(index).unwrap()].as_str();
        let types: Vec<&str> = message.sample_type.iter().map(|it| name(it.r#type)).collect();
        assert_eq!((types, name(message.default_sample_type)), (vec!["samples", "cpu", "wall"], "wall"));
        let values: Vec<&[i64]> = message.sample.iter().map(|sample| &*sample.value).collect();
        assert!(values.contains(&&[1, 10_000_000, 10_000_000][..]), "{values:?}");
        assert!(values.contains(&&[2, 0, 20_000_000][..]), "{values:?}");
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

    #[test]
    fn native_places() {
        let mut profile = Profile::default();
        profile.meta.interval_us = 10_000;
        profile.processes.push(Process::default());
        profile.threads.push(Thread { ns_tid: 5, ..Thread::default() });
        let (path, build_id) = ("/lib/libz.so.1".to_owned(), "c0ffee".to_owned());
        let mapping =
            NativeMapping { process: 0, start: 0x7000_0000, end: 0x7000_8000, offset: 0x3000, path, build_id };
        let mapping = Some(profile.native_mapping(mapping));
        let mut frame = |name: &str, line: Option<u32>, address, inlined, mapping| {
            let vaddr = address - 0x6fff_0000;
            profile.native_frame(name, line.map(|_| "/z.c"), line, NativePlace { mapping, address, vaddr, inlined })
        };
        let inner = frame("libz.so.1!inner", Some(3), 0x7000_0010, true, mapping);
        let outer = frame("libz.so.1!outer", Some(9), 0x7000_0010, false, mapping);
        let later = frame("libz.so.1!outer", None, 0x7000_0018, false, mapping);
        let jit = frame("[jit]+0x20", None, 0x7fff_0020, false, None);
        let message = message(&profile, false, &[(0, &[inner, outer, later]), (0, &[jit, outer]), (0, &[inner])]);
        let text = |index: i64| message.string_table[usize::try_from(index).unwrap()].as_str();
        let locations: Vec<_> = message
            .location
            .iter()
            .map(|location| {
                let lines = location.line.iter().map(|line| {
                    let function = message.function[usize::try_from(line.function_id - 1).unwrap()];
                    format!("{} {}:{}", text(function.name), text(function.filename), line.line)
                });
                (location.mapping_id, location.address, lines.collect::<Vec<_>>().join(", "))
            })
            .collect();
        assert_eq!(
            locations,
            [
                (1, 0x7000_0010, "inner /z.c:3, outer /z.c:9".to_owned()),
                (1, 0x7000_0018, "outer :0".to_owned()),
                (2, 0x7fff_0020, "[jit]+0x20 :0".to_owned()),
                (1, 0x7000_0010, "outer /z.c:9".to_owned()),
                (1, 0x7000_0010, "inner /z.c:3".to_owned()),
            ]
        );
        let stacks: Vec<_> = message.sample.iter().map(|sample| sample.location_id.clone()).collect();
        assert_eq!(stacks, [vec![1, 2], vec![3, 4], vec![5]]);
        let object = message.mapping[0];
        assert_eq!((object.memory_start, object.memory_limit, object.file_offset), (0x7000_0000, 0x7000_8000, 0x3000));
        assert_eq!((text(object.filename), text(object.build_id)), ("/lib/libz.so.1", "c0ffee"));
        assert_eq!(text(message.mapping[1].filename), PYTHON);
    }
}
