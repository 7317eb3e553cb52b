//! Writes a profile as JSON lines: one object for each sample, in order of arrival. For scripts and tests.
//!
//! Names may arrive after a sample, so samples wait in a temporary file; `docs/formats/jsonl.md` has the keys.

mod wait;
mod whose;

use super::label::Label;
use super::need::Amounts;
use super::spool::Spool;
use super::stacks::gil_held;
use super::streams::put;
use super::{Sink, file_thread_id};
use crate::profile::{FrameId, Profile, Sample, ThreadId, Wait};
use crate::report::Report;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};
use tachyon_common::event::status;
use wait::{Waiting, get_wait, put_wait};

/// Names of the status bits, in their order.
const STATUS_NAMES: [(u32, &str); 6] = [
    (status::HAS_GIL, "has_gil"),
    (status::ON_CPU, "on_cpu"),
    (status::UNKNOWN, "unknown"),
    (status::GIL_REQUESTED, "gil_requested"),
    (status::HAS_EXCEPTION, "has_exception"),
    (status::MAIN_THREAD, "main_thread"),
];

/// Writes one line for each sample, at the end. Memory grows with the number of distinct stacks and frames.
pub struct JsonlSink<W> {
    out: W,
    spool: Spool,
}

impl<W: Write> JsonlSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self { out, spool: Spool::default() }
    }
}

/// What the lines of a thread have in common.
#[derive(Serialize)]
struct Who<'a> {
    pid: u32,
    comm: &'a str,
    #[serde(flatten)]
    labels: BTreeMap<Cow<'static, str>, String>,
    tid: u32,
    thread_id: u64,
    thread: &'a str,
    interpreter: u32,
}

#[derive(Serialize)]
struct Place<'a> {
    function: &'a str,
    file: Option<&'a str>,
    line: Option<i32>,
    end_line: Option<i32>,
    column: Option<i32>,
    end_column: Option<i32>,
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    opcode: Option<u8>,
    #[serde(flatten)]
    native: Option<Native<'a>>,
}

/// What is known about a native frame whose address was recorded.
#[derive(Serialize)]
struct Native<'a> {
    address: String,
    object: Option<&'a str>,
    source: Option<&'a str>,
    inlined: bool,
}

impl<W: Write> Sink for JsonlSink<W> {
    fn tells_work(&self) -> bool {
        true
    }

    fn sample(&mut self, _profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.spool.push_with(0, sample, |out| put(out, 0))
    }

    fn repeated(&mut self, _profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.spool.repeat_with(0, sample, times_us, |out| put(out, 0))
    }

    fn wait(&mut self, _profile: &Profile, sample: &Sample<'_>, wait: &Wait<'_>) -> io::Result<bool> {
        let waker = wait.waker_stack.map(|(thread, frames)| (thread, self.spool.stacks.intern(frames)));
        self.spool.push_with(0, sample, |out| put_wait(out, wait, waker))?;
        Ok(true)
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        Amounts::of(profile, &self.spool.stacks).sum([0, 2, 100, 5, 100])
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let mut out = io::BufWriter::with_capacity(1 << 16, &mut self.out);
        let mut threads: HashMap<ThreadId, String> = HashMap::new();
        let mut frames: HashMap<FrameId, String> = HashMap::new();
        let stacks = &self.spool.stacks;
        let mut line = Vec::new();
        self.spool.read_with(0, |sample, more| {
            let spooled = get_wait(more)?;
            let wait = spooled.as_ref().map(|spooled| &spooled.wait);
            // Samples that differ only in their time are put together once.
            line.clear();
            let waiter = threads.entry(sample.thread).or_insert_with(|| who(profile, sample.thread));
            line.write_all(waiter.as_bytes())?;
            let gil = match gil_held(sample.status) {
                Some(true) => "true",
                Some(false) => "false",
                None => "null",
            };
            write!(line, ",\"gil\":{gil},\"status\":[")?;
            let mut comma = "";
            for (bit, name) in STATUS_NAMES {
                if u32::from(sample.status) & bit != 0 {
                    write!(line, "{comma}\"{name}\"")?;
                    comma = ",";
                }
            }
            line.write_all(b"],")?;
            if let Some(merge) = sample.merge.name() {
                write!(line, "\"merge\":\"{merge}\",")?;
            }
            let stack = stacks.get(sample.stack);
            if let Some((event, period)) = profile.event_of(stack) {
                write!(line, "\"event\":{},", json(&event))?;
                if period != 1 {
                    write!(line, "\"weight\":{period},")?;
                }
            }
            if let Some(wait) = wait.filter(|wait| wait.weight != 1) {
                write!(line, "\"weight\":{},", wait.weight)?;
            }
            whose::write(&mut line, profile, sample.work, stack)?;
            if let Some(cause) = profile.waits_for(stack) {
                write!(line, "\"waiting\":{},", json(&Waiting::new(profile, cause, wait)))?;
            }
            if let Some((thread, stack)) = spooled.and_then(|spooled| spooled.waker) {
                let waker = threads.entry(thread).or_insert_with(|| who(profile, thread));
                write!(line, "\"waker\":{{{waker},")?;
                write_frames(&mut line, profile, stacks.get(stack), &mut frames)?;
                line.write_all(b"},")?;
            }
            write_frames(&mut line, profile, stack, &mut frames)?;
            line.write_all(b"}\n")?;
            for sample in sample.each() {
                write!(out, "{{\"time_us\":{},", sample.time_us)?;
                out.write_all(&line)?;
            }
            Ok(())
        })?;
        out.flush()
    }
}

/// The member that has a stack's frames, leaf first.
fn write_frames(
    out: &mut impl Write,
    profile: &Profile,
    stack: &[FrameId],
    known: &mut HashMap<FrameId, String>,
) -> io::Result<()> {
    out.write_all(b"\"frames\":[")?;
    for (place, &frame) in stack.iter().enumerate() {
        if place > 0 {
            out.write_all(b",")?;
        }
        let text = known.entry(frame).or_insert_with(|| describe(profile, frame));
        out.write_all(text.as_bytes())?;
    }
    out.write_all(b"]")
}

/// The members of an object that identify the thread, without its braces.
fn who(profile: &Profile, id: ThreadId) -> String {
    let (thread, process) = (profile.thread(id), profile.process_of(id));
    let text = json(&Who {
        pid: process.pid,
        comm: &process.comm,
        labels: process.labels().collect(),
        tid: thread.tid,
        thread_id: file_thread_id(profile, id),
        thread: &thread.name,
        interpreter: thread.interpreter,
    });
    text.trim_matches(['{', '}']).to_owned()
}

fn describe(profile: &Profile, id: FrameId) -> String {
    let frame = profile.frames.get(id);
    let label = Label::of(profile, frame);
    let known = |number: i32| (number != -1).then_some(number);
    let source = profile.native_source(id);
    let native = profile.native_place(id).map(|place| Native {
        address: format!("{:#x}", place.address),
        object: place.mapping.map(|mapping| profile.native.mapping(mapping).path.as_str()),
        source: source.map(|(file, _)| file),
        inlined: place.inlined,
    });
    let source_line = source.and_then(|(_, line)| i32::try_from(line?).ok());
    json(&Place {
        function: label.function,
        file: (!label.filename.is_empty()).then_some(label.filename),
        line: known(frame.lineno).or(source_line),
        end_line: known(frame.end_lineno),
        column: known(frame.column),
        end_column: known(frame.end_column),
        kind: label.kind.name(),
        opcode: (frame.opcode != crate::profile::Frame::NO_OPCODE).then_some(frame.opcode),
        native,
    })
}

fn json(value: &impl Serialize) -> String {
    super::text::json_line(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Frame, Holder, Merge, NativeMapping, NativePlace, Process, Thread};

    #[test]
    fn one_object_a_sample() {
        let mut profile = Profile::default();
        let cmdline = vec!["python".into(), "a\"}.py".into()];
        let (container, pod) = ("c1".into(), "p1".into());
        profile.processes.push(Process { pid: 9, comm: "a\"}".into(), cmdline, container, pod, ..Process::default() });
        let thread = Thread { tid: 6, ns_tid: 5, interpreter: 2, name: "w\n".into(), ..Thread::default() };
        profile.threads.push(thread);
        let (file, function) = (profile.strings.intern("/x.py"), profile.strings.intern("f<é>"));
        let located = Frame { lineno: 3, end_lineno: 3, column: 4, ..Frame::without_location(file, function) };
        let leaf = profile.special_frame("libz.so.1!deflate");
        let frames = [leaf, profile.frames.intern(located)];
        let mut sink = JsonlSink::new(Vec::new());
        for (status, frames) in [(35, &frames[..]), (0, &[]), (4, &[])] {
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(0), time_us: 12, status, frames, merge: Merge::None, work: None },
            )
            .unwrap();
        }
        sink.finish(&profile, &Report::default()).unwrap();
        let who = r#""time_us":12,"pid":9,"comm":"a\"}","container":"c1","pod":"p1","script":"a\"}.py","tid":6,"thread_id":5,"thread":"w\n","interpreter":2"#;
        let native = r#"{"function":"deflate","file":"libz.so.1","line":null,"end_line":null,"column":null,"end_column":null,"kind":"native"}"#;
        let python =
            r#"{"function":"f<é>","file":"/x.py","line":3,"end_line":3,"column":4,"end_column":null,"kind":"python"}"#;
        let expected = format!(
            "{{{who},\"gil\":true,\"status\":[\"has_gil\",\"on_cpu\",\"main_thread\"],\"frames\":[{native},{python}]}}\n\
             {{{who},\"gil\":false,\"status\":[],\"frames\":[]}}\n\
             {{{who},\"gil\":null,\"status\":[\"unknown\"],\"frames\":[]}}\n"
        );
        assert_eq!(String::from_utf8(sink.out).unwrap(), expected);
    }

    #[test]
    fn a_wait_is_one_line_whatever_it_weighs() {
        let mut profile = Profile::default();
        profile.processes.push(Process::default());
        profile.threads.push(Thread::default());
        let frames = [profile.special_frame(&crate::profile::waiting("lock"))];
        let sample =
            Sample { thread: ThreadId(0), time_us: 90, status: 0, frames: &frames, merge: Merge::None, work: None };
        let futex = u32::try_from(libc::SYS_futex).unwrap();
        let (file, function) = (profile.strings.intern("/a.py"), profile.strings.intern("hogs"));
        let holder = Frame { lineno: 7, ..Frame::without_location(file, function) };
        let holder = profile.frames.intern(holder);
        let long = Wait {
            weight: 8,
            since_us: 10,
            wait_us: 80,
            syscall: Some(futex),
            futex: Some(0x7f10),
            queued_us: Some(0),
            waker: Some(77),
            waker_stack: Some((ThreadId(0), &frames)),
            holder: Some(Holder { tid: None, frame: holder }),
        };
        let mut sink = JsonlSink::new(Vec::new());
        sink.wait(&profile, &sample, &long).unwrap();
        let short = Wait { weight: 1, since_us: 10, wait_us: 80, ..Wait::default() };
        sink.wait(&profile, &sample, &short).unwrap();
        sink.sample(&profile, &sample).unwrap();
        sink.finish(&profile, &Report::default()).unwrap();
        let lines: Vec<serde_json::Value> =
            sink.out.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
        let told: Vec<_> = lines.iter().map(|line| (line["weight"].as_u64(), line["waiting"].to_string())).collect();
        let of = |text: &str| text.to_owned();
        assert_eq!(
            told,
            [
                (
                    Some(8),
                    of(concat!(
                        r#"{"cause":"lock","futex":"0x7f10","holder":{"file":"/a.py","function":"hogs","line":7,"tid":null},"#,
                        r#""queued_us":0,"since_us":10,"syscall":"futex","wait_us":80,"waker_tid":77}"#
                    ))
                ),
                (None, of(r#"{"cause":"lock","since_us":10,"wait_us":80}"#)),
                // As read from a file that keeps no more than that.
                (None, of(r#"{"cause":"lock"}"#)),
            ]
        );
    }

    #[test]
    fn a_waker_has_a_thread_and_a_stack() {
        let mut profile = Profile::default();
        profile.processes.push(Process { pid: 5, ..Process::default() });
        profile.threads.push(Thread { tid: 6, name: "producer".into(), ..Thread::default() });
        let (waits, puts) = (profile.special_frame(&crate::profile::waiting("lock")), profile.special_frame("puts"));
        let frames = [waits];
        let sample =
            Sample { thread: ThreadId(0), time_us: 90, status: 0, frames: &frames, merge: Merge::None, work: None };
        let waker = [puts];
        let wait = Wait { weight: 1, waker: Some(6), waker_stack: Some((ThreadId(0), &waker)), ..Wait::default() };
        let mut sink = JsonlSink::new(Vec::new());
        sink.wait(&profile, &sample, &wait).unwrap();
        sink.finish(&profile, &Report::default()).unwrap();
        let line: serde_json::Value = serde_json::from_slice(&sink.out).unwrap();
        let waker = &line["waker"];
        assert_eq!((&waker["pid"], &waker["tid"], &waker["thread"]), (&5.into(), &6.into(), &"producer".into()));
        assert_eq!(waker["frames"][0]["function"], "puts");
        assert_eq!(line["frames"].as_array().map(Vec::len), Some(1));
    }

    #[test]
    fn native_places() {
        let mut profile = Profile::default();
        let (path, build_id) = ("/lib/libz.so.1".to_owned(), String::new());
        let mapping = NativeMapping { process: 0, start: 0x1000, end: 0x9000, offset: 0, path, build_id };
        let mapping = Some(profile.native_mapping(mapping));
        let place = |address, inlined| NativePlace { mapping, address, vaddr: address, inlined };
        let inner = profile.native_frame("libz.so.1!inner", Some("/z.c"), Some(7), place(0x2010, true));
        let outer = profile.native_frame("libz.so.1!outer", None, None, place(0x2010, false));
        let object = r#""kind":"native","address":"0x2010","object":"/lib/libz.so.1""#;
        let empty = r#""end_line":null,"column":null,"end_column":null"#;
        assert_eq!(
            [describe(&profile, inner), describe(&profile, outer)],
            [
                format!(
                    r#"{{"function":"inner","file":"libz.so.1","line":7,{empty},{object},"source":"/z.c","inlined":true}}"#
                ),
                format!(
                    r#"{{"function":"outer","file":"libz.so.1","line":null,{empty},{object},"source":null,"inlined":false}}"#
                ),
            ]
        );
    }
}
