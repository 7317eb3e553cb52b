//! A profile to collapsed stacks: `tid:42;main.py:main:7;json.py:loads:3 190`, one line for each distinct stack.
//!
//! As CPython 3.15's `profiling.sampling` prints them (`CollapsedStackCollector` in `Lib/profiling/sampling/
//! stack_collector.py`): root first, files without their directories, frames that are no source lines by name alone,
//! the most frequent stacks first. `docs/formats/collapsed.md` tells the differences.

use super::stacks::Counts;
use super::{Sink, file_thread_id, process_frame_name, text};
use crate::profile::{Frame, FrameId, Profile, SPECIAL_FILENAME, Sample, ThreadId};
use crate::report::Report;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, Write};

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

    /// How many samples were taken; their number is the sum of the counts in the file.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.stored
    }
}

impl<W: Write> Sink for CollapsedSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add_shown(profile, sample);
        self.stored += 1;
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        // Different frames may look the same here, which knows neither directories nor columns.
        let mut lines: HashMap<String, u64> = HashMap::new();
        let mut line = String::new();
        for (key, count) in self.counts.sorted() {
            line.clear();
            put_stack(&mut line, profile, ThreadId(key.thread), self.counts.stacks.get(key.stack));
            match lines.get_mut(&line) {
                Some(sum) => *sum += count,
                None => {
                    lines.insert(line.clone(), count);
                }
            }
        }
        let mut lines: Vec<_> = lines.into_iter().collect();
        lines.sort_unstable_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| a.cmp(b)));
        let mut out = io::BufWriter::new(&mut self.out);
        for (line, count) in lines {
            writeln!(out, "{line} {count}")?;
        }
        out.flush()
    }
}

fn put_stack(out: &mut String, profile: &Profile, thread: ThreadId, frames: &[FrameId]) {
    write!(out, "tid:{}", file_thread_id(profile, thread)).expect("a String takes every text");
    if profile.meta.many_processes {
        out.push(';');
        out.push_str(&name(&process_frame_name(profile.process_of(thread))));
    }
    for &frame in frames.iter().rev() {
        out.push(';');
        put_frame(out, profile, profile.frames.get(frame));
    }
}

fn put_frame(out: &mut String, profile: &Profile, frame: &Frame) {
    let filename = profile.strings.get(frame.filename);
    let function = name(profile.strings.get(frame.function));
    // CPython's word for "no location" is line 0.
    let lineno = if frame.lineno == -1 { 0 } else { frame.lineno };
    if filename == SPECIAL_FILENAME && lineno == 0 {
        out.push_str(&function);
    } else {
        let base = filename.rsplit('/').next().unwrap_or(filename);
        write!(out, "{}:{function}:{lineno}", name(base)).expect("a String takes every text");
    }
}

/// A name without what would break the format.
fn name(text: &str) -> std::borrow::Cow<'_, str> {
    text::escape(text, |character| character == ';')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, Process, Thread};

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
                    &Sample { thread: ThreadId(0), time_us: 0, status: 0, frames, merge: Merge::None },
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
