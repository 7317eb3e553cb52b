//! What a recording hands out: a part of it, from one moment of the monotonic clock to another.

use crate::profile::{FrameId, Process, Profile, SPECIAL_FILENAME, ThreadId};
use crate::report::Report;
use crate::types::Pid;
use std::collections::HashMap;

/// A part of a recording. Each sample is in exactly one, and the accounts of all add up to the whole recording's.
#[derive(Debug)]
pub struct Segment {
    /// Its place in the recording, from 0.
    pub sequence: u64,
    /// Its account: `ran = stored + idle + filtered + not_python + Σ loss`, to the unit.
    pub report: Report,
    /// The processes, threads and frames that its samples refer to.
    pub profile: Profile,
    /// What is known about the account's processes without a sample, listed there after the profile's; they have no identity.
    pub unsampled: Vec<Process>,
    /// Its samples by stack, where [`Request::keep_stacks`](super::Request::keep_stacks) asked for them; in no order.
    pub stacks: Vec<StackCount>,
    /// Samples by the frame that they are charged to: the innermost Python frame, or a mark such as `<GC>`; the innermost frame of
    /// all if there is neither.
    pub(super) own: HashMap<FrameId, u64>,
    /// The first error of its sink; the output is then incomplete.
    pub sink_error: Option<std::io::Error>,
    /// In the last segment, with targets given by pid: where the first target's main thread waits, if it is alive.
    pub waiting: Option<String>,
    /// Likewise: targets whose children were busy but are not part of the recording.
    pub busy_children: Vec<BusyChildren>,
    /// What works less well than it should and was not reported while the recording ran
    /// ([`Status::told`](super::Status::told)).
    pub notes: Vec<String>,
    /// By the end of this segment, no requested CPython had been met.
    pub nobody: bool,
}

/// How often a thread had a stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StackCount {
    /// The thread.
    pub thread: ThreadId,
    /// TACH's status byte (bits of [`tachyon_common::event::status`], the first six).
    pub status: u8,
    /// Whole stack, leaf first.
    pub frames: Box<[FrameId]>,
    /// Samples that had it.
    pub samples: u64,
}

/// A process with busy Python children that were not recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusyChildren {
    /// The process.
    pub pid: Pid,
    /// How many of its children were busy.
    pub count: u64,
}

/// A function or a line, and how often it was the innermost of a sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hot {
    /// Qualified name.
    pub function: String,
    /// Source file; empty for code outside Python.
    pub file: String,
    /// Its line: for a function, the one that was met most often; `None` if there is none.
    pub line: Option<u32>,
    /// Samples.
    pub samples: u64,
}

impl Segment {
    pub(super) fn new(report: Report, profile: Profile, own: HashMap<FrameId, u64>) -> Self {
        Self {
            sequence: 0,
            report,
            profile,
            unsampled: Vec::new(),
            stacks: Vec::new(),
            own,
            sink_error: None,
            waiting: None,
            busy_children: Vec::new(),
            notes: Vec::new(),
            nobody: false,
        }
    }

    /// Functions by samples, most first, as in `tachyon-bpf report`: native code is charged to the Python function that called it.
    #[must_use]
    pub fn hottest_functions(&self) -> Vec<Hot> {
        self.hottest(|_| None)
    }

    /// Lines, likewise.
    #[must_use]
    pub fn hottest_lines(&self) -> Vec<Hot> {
        self.hottest(Some)
    }

    fn hottest(&self, apart: impl Fn(i32) -> Option<i32>) -> Vec<Hot> {
        // File, function and perhaps line; samples, the samples of the line that has most, and that line.
        type Place<'a> = (&'a str, &'a str, Option<i32>);
        let mut places: HashMap<Place<'_>, (u64, u64, i32)> = HashMap::new();
        for (&frame, &samples) in &self.own {
            let frame = self.profile.frames.get(frame);
            let (file, function) = (self.profile.strings.get(frame.filename), self.profile.strings.get(frame.function));
            let (sum, most, line) = places.entry((file, function, apart(frame.lineno))).or_insert((0, 0, -1));
            *sum += samples;
            if samples > *most {
                (*most, *line) = (samples, frame.lineno);
            }
        }
        let mut hot: Vec<_> = places
            .into_iter()
            .map(|((file, function, _), (samples, _, line))| Hot {
                function: function.to_owned(),
                file: if file == SPECIAL_FILENAME { String::new() } else { file.to_owned() },
                line: u32::try_from(line).ok(),
                samples,
            })
            .collect();
        hot.sort_by(|a, b| b.samples.cmp(&a.samples).then_with(|| (&a.function, a.line).cmp(&(&b.function, b.line))));
        hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Frame;

    #[test]
    fn lines_of_a_function_are_one_function() {
        let mut profile = Profile::default();
        let (file, work, idle) =
            (profile.strings.intern("app.py"), profile.strings.intern("work"), profile.strings.intern("idle"));
        let mut at =
            |function, lineno| profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) });
        let own = HashMap::from([(at(work, 3), 5), (at(work, 4), 7), (at(idle, 9), 8)]);
        let native = profile.special_frame("libz.so.1!deflate");
        let own = own.into_iter().chain([(native, 2)]).collect();
        let segment = Segment::new(Report::default(), profile, own);
        let shown =
            |hot: Vec<Hot>| -> Vec<_> { hot.into_iter().map(|hot| (hot.function, hot.line, hot.samples)).collect() };
        assert_eq!(
            shown(segment.hottest_functions()),
            [("work".into(), Some(4), 12), ("idle".into(), Some(9), 8), ("libz.so.1!deflate".into(), None, 2)]
        );
        let lines = shown(segment.hottest_lines());
        assert_eq!(lines[1..3], [("work".into(), Some(4), 7), ("work".into(), Some(3), 5)]);
        assert_eq!(segment.hottest_lines()[3].file, "");
    }
}
