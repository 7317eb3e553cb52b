//! Writes a profile as collapsed stacks: `tid:42;main.py:main:7;json.py:loads:3 190`, one line for each distinct stack.
//!
//! As CPython 3.15's `profiling.sampling` prints them (`CollapsedStackCollector` in `Lib/profiling/sampling/
//! stack_collector.py`): root first, files without their directories, frames that are not source lines by name only,
//! the most frequent stacks first. `docs/formats/collapsed.md` lists the differences.

use super::need::Amounts;
use super::stacks::Counts;
use super::{Sink, file_thread_id, process_frame_name, text};
use crate::profile::{Frame, FrameId, Profile, SPECIAL_FILENAME, Sample, ThreadId};
use crate::report::Report;
use foldhash::fast::RandomState;
use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::HashMap;
use std::io::{self, Write};
use std::rc::Rc;

/// Counts equal stacks and writes them at the end. Memory grows with the number of distinct stacks.
pub struct CollapsedSink<W> {
    out: W,
    counts: Counts,
    stored: u64,
}

impl<W: Write> CollapsedSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self { out, counts: Counts::default(), stored: 0 }
    }

    /// How many samples were taken; the counts in the file add up to this.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.stored
    }
}

impl<W: Write> Sink for CollapsedSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add_shown(profile, sample, 1);
        self.stored += 1;
        Ok(())
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.counts.add_shown(profile, sample, times_us.len());
        self.stored += times_us.len() as u64;
        Ok(())
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        Amounts::of(profile, &self.counts.stacks).sum([100, 6, 150, 1, 64])
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let mut names = Names::default();
        // Different frames may look the same here, since the format has neither directories nor columns.
        let mut lines: HashMap<Box<[u32]>, u64, RandomState> = HashMap::default();
        let mut line = Vec::new();
        for (key, count) in self.counts.sorted() {
            line.clear();
            names.put_root(&mut line, profile, ThreadId(key.thread));
            let stack = self.counts.stacks.get(key.stack).iter().rev();
            line.extend(stack.map(|&frame| names.of_frame(profile, frame)));
            match lines.get_mut(line.as_slice()) {
                Some(sum) => *sum += count,
                None => {
                    lines.insert(line.as_slice().into(), count);
                }
            }
        }
        let mut lines: Vec<_> = lines.into_iter().collect();
        lines.sort_unstable_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| names.compare(a, b)));
        let mut out = io::BufWriter::new(&mut self.out);
        for (line, count) in lines {
            for (place, &name) in line.iter().enumerate() {
                if place > 0 {
                    out.write_all(b";")?;
                }
                out.write_all(names.texts[name as usize].as_bytes())?;
            }
            writeln!(out, " {count}")?;
        }
        out.flush()
    }
}

/// Most bytes of a name: far more than any programmer writes, and small enough that a file of few samples cannot fill a
/// disk.
const LONGEST_NAME: usize = 1024;

/// The texts between semicolons, each once.
#[derive(Default)]
struct Names {
    texts: Vec<Rc<str>>,
    ids: HashMap<Rc<str>, u32, RandomState>,
    /// By [`FrameId`].
    of_frames: Vec<Option<u32>>,
}

impl Names {
    fn id(&mut self, text: String) -> u32 {
        if let Some(&id) = self.ids.get(text.as_str()) {
            return id;
        }
        let id = u32::try_from(self.texts.len()).expect("fewer than 2^32 names fit in memory");
        let text: Rc<str> = text.into();
        self.texts.push(Rc::clone(&text));
        self.ids.insert(text, id);
        id
    }

    fn put_root(&mut self, line: &mut Vec<u32>, profile: &Profile, thread: ThreadId) {
        line.push(self.id(format!("tid:{}", file_thread_id(profile, thread))));
        if profile.meta.many_processes {
            let process = name(&process_frame_name(profile.process_of(thread))).into_owned();
            line.push(self.id(process));
        }
    }

    fn of_frame(&mut self, profile: &Profile, frame: FrameId) -> u32 {
        let place = frame.0 as usize;
        if place >= self.of_frames.len() {
            self.of_frames.resize(place + 1, None);
        }
        if let Some(id) = self.of_frames[place] {
            return id;
        }
        let id = self.id(frame_text(profile, profile.frames.get(frame)));
        self.of_frames[place] = Some(id);
        id
    }

    /// The order of two lines as texts.
    fn compare(&self, a: &[u32], b: &[u32]) -> Ordering {
        let shared = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let bytes = |line: &[u32]| {
            let line: Vec<_> = line[shared..].iter().map(|&name| Rc::clone(&self.texts[name as usize])).collect();
            line.join(";")
        };
        match (shared == a.len(), shared == b.len()) {
            (false, false) => bytes(a).cmp(&bytes(b)),
            // One is a prefix of the other.
            _ => a.len().cmp(&b.len()),
        }
    }
}

fn frame_text(profile: &Profile, frame: &Frame) -> String {
    let filename = profile.strings.get(frame.filename);
    let function = name(profile.strings.get(frame.function));
    // CPython's word for "no location" is line 0.
    let lineno = if frame.lineno == -1 { 0 } else { frame.lineno };
    if filename == SPECIAL_FILENAME && lineno == 0 {
        function.into_owned()
    } else {
        let base = filename.rsplit('/').next().unwrap_or(filename);
        format!("{}:{function}:{lineno}", name(base))
    }
}

/// A name without what would break the format, or fill a disk.
fn name(text: &str) -> Cow<'_, str> {
    match text::cut(text, LONGEST_NAME) {
        Cow::Borrowed(text) => text::escape(text, |character| character == ';'),
        Cow::Owned(text) => Cow::Owned(text::escape(&text, |character| character == ';').into_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, Process, Thread};

    #[test]
    fn few_samples_with_long_names_make_a_small_file() {
        let mut profile = Profile::default();
        profile.processes.push(Process::default());
        profile.threads.push(Thread::default());
        let long = "n".repeat(60_000);
        let frames: Vec<_> = (0..256).map(|number| profile.special_frame(&format!("{long}{number}"))).collect();
        let mut sink = CollapsedSink::new(Vec::new());
        for number in 0..20 {
            let frames = &frames[number..];
            let sample = Sample { thread: ThreadId(0), time_us: 0, status: 0, frames, merge: Merge::None, work: None };
            sink.repeated(&profile, &sample, &[1, 2, 3]).unwrap();
        }
        sink.finish(&profile, &Report::default()).unwrap();
        // Whole names would take 300 MB.
        assert!(sink.out.len() < 20 * 256 * 1100, "{} bytes", sink.out.len());
        let text = String::from_utf8(sink.out).unwrap();
        assert_eq!(text.lines().count(), 20, "names that differ behind the cut stay apart");
        assert!(text.lines().all(|line| line.ends_with(" 3")));
    }

    #[test]
    fn lines_are_in_the_order_of_their_texts() {
        let mut names = Names::default();
        let lines = [["a", "b"], ["a", "b c"], ["a!", "b"], ["a", "z"], ["aa", "b"]];
        let ids = lines.map(|line| line.map(|text| names.id(text.to_owned())));
        for (a, a_ids) in lines.iter().zip(&ids) {
            for (b, b_ids) in lines.iter().zip(&ids) {
                assert_eq!(names.compare(a_ids, b_ids), a.join(";").cmp(&b.join(";")), "{a:?} {b:?}");
            }
            assert_eq!(names.compare(&a_ids[..1], a_ids), Ordering::Less);
        }
    }

    #[test]
    fn frames_and_order() {
        let mut profile = Profile::default();
        profile.processes.push(Process { pid: 9, comm: "a;b\n".into(), ..Process::default() });
        profile.threads.push(Thread { unique_tid: 1 << 32, ns_tid: 5, ..Thread::default() });
        let mut frame = |filename: &str, function: &str, lineno| {
            let filename = profile.strings.intern(filename);
            let function = profile.strings.intern(function);
            profile.frames.intern(Frame { lineno, ..Frame::without_location(filename, function) })
        };
        let root = frame("/srv/app.py", "<module>", 3);
        let leaf = frame("<frozen abc>", "A.b;c\x1b", 1);
        let twin = frame("/opt/app.py", "<module>", 3);
        let native = frame("~", "[k] read", -1);
        let odd = frame("~", "f", 4);
        let none = frame("x.py", "g", -1);
        let stacks: [&[FrameId]; 7] = [&[leaf, root], &[root], &[twin], &[native, root], &[odd], &[none], &[]];
        let text = |profile: &Profile| {
            let mut sink = CollapsedSink::new(Vec::new());
            for frames in stacks {
                sink.sample(
                    profile,
                    &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames, merge: Merge::None, work: None },
                )
                .unwrap();
            }
            sink.finish(profile, &Report::default()).unwrap();
            assert_eq!(sink.stored(), 7);
            String::from_utf8(sink.out).unwrap()
        };
        assert_eq!(
            text(&profile),
            "tid:5;app.py:<module>:3 2\n\
             tid:5 1\n\
             tid:5;app.py:<module>:3;<frozen abc>:A.b\\x3bc\\x1b:1 1\n\
             tid:5;app.py:<module>:3;[k] read 1\n\
             tid:5;x.py:g:0 1\n\
             tid:5;~:f:4 1\n"
        );
        profile.meta.many_processes = true;
        assert!(text(&profile).starts_with("tid:4294967296;a\\x3bb\\n (9);app.py:<module>:3 2\n"));
    }
}
