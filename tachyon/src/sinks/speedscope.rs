//! Writes a profile as speedscope's JSON: one sampled profile for each thread, in time order.
//!
//! The weights make speedscope's time line right: all profiles start with the recording, a sample lasts until the
//! thread's next one, and if a thread was off CPU for longer, an empty stack fills the gap. The format is
//! `file-format-spec.ts` of speedscope; `docs/formats/speedscope.md` has the arithmetic.

use super::label::{Label, thread_name};
use super::need::Amounts;
use super::spool::{Spool, Spooled};
use super::stacks::StackId;
use super::{Sink, process_title};
use crate::profile::{FrameId, Profile, Sample, ThreadId};
use crate::report::Report;
use std::collections::HashMap;
use std::io::{self, Write};

const SCHEMA: &str = "https://www.speedscope.app/file-format-schema.json";
/// Stands for a stack without frames: an empty stack would mean that the thread was idle.
const NO_FRAMES: &str = "<no frames>";

/// Writes the file at the end. Memory grows with the number of distinct stacks and frames.
pub struct SpeedscopeSink<W> {
    out: W,
    spool: Spool,
}

impl<W: Write> SpeedscopeSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self { out, spool: Spool::default() }
    }
}

impl<W: Write> Sink for SpeedscopeSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.spool.repeat_by_thread(profile, sample, times_us)
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        Amounts::of(profile, &self.spool.stacks).sum([64, 8, 100, 1, 64])
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let mut out = io::BufWriter::with_capacity(1 << 16, &mut self.out);
        write_file(&mut out, profile, &self.spool)?;
        out.flush()
    }
}

fn write_file(out: &mut impl Write, profile: &Profile, spool: &Spool) -> io::Result<()> {
    let (first, last) = spool.span().unwrap_or_default();
    // A file from another program may have no start of its own.
    let start = if profile.meta.start_us == 0 || profile.meta.start_us > first { first } else { profile.meta.start_us };
    let exporter = concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION"));
    write!(out, "{{\"$schema\":\"{SCHEMA}\",\"exporter\":\"{exporter}\",\"name\":")?;
    json(out, &title(profile))?;
    out.write_all(b",\"activeProfileIndex\":0,\"shared\":{\"frames\":[")?;
    let mut frames = Frames::write(out, profile, spool)?;
    out.write_all(b"]},\"profiles\":[")?;
    let end = last.saturating_add(profile.meta.interval_us.max(1));
    for id in spool.threads() {
        let span = Span { start, end, interval: profile.meta.interval_us.max(1) };
        if id.0 > 0 {
            out.write_all(b",")?;
        }
        write_thread(out, profile, spool, &mut frames, id, &span)?;
    }
    out.write_all(b"]}\n")
}

fn title(profile: &Profile) -> String {
    match &profile.processes[..] {
        [process] if process.pid != 0 => process_title(process),
        processes => format!("{} processes", processes.len()),
    }
}

/// The frames that stacks use, with their index in the file, which distinguishes lines of a function but not columns.
#[derive(Default)]
struct Frames {
    /// By [`FrameId`].
    index: Vec<Option<u32>>,
    /// By [`StackId`], made at first use: how a stack is written. There are far fewer stacks than samples.
    stacks: Vec<Option<Box<str>>>,
}

impl Frames {
    /// Writes the table; its first entry is [`NO_FRAMES`].
    fn write(out: &mut impl Write, profile: &Profile, spool: &Spool) -> io::Result<Self> {
        write!(out, "{{\"name\":\"{NO_FRAMES}\"}}")?;
        let stacks = vec![None; spool.stacks.iter().len()];
        let mut frames = Self { index: vec![None; profile.frames.len()], stacks };
        let mut known = HashMap::new();
        for &FrameId(id) in spool.stacks.iter().flatten() {
            let place = &mut frames.index[id as usize];
            if place.is_some() {
                continue;
            }
            let frame = profile.frames.get(FrameId(id));
            let next = u32::try_from(known.len() + 1).expect("fewer than 2^32 frames fit in memory");
            let index = *known.entry((frame.filename, frame.function, frame.lineno)).or_insert(next);
            *place = Some(index);
            if index == next {
                write_frame(out, &Label::of(profile, frame))?;
            }
        }
        Ok(frames)
    }
}

impl Frames {
    /// A stack as in the file, outermost frame first.
    fn stack(&mut self, spool: &Spool, id: StackId) -> &str {
        let index = &self.index;
        self.stacks[id.0 as usize].get_or_insert_with(|| {
            let stack = spool.stacks.get(id);
            if stack.is_empty() {
                return "[0]".into();
            }
            let place = |&FrameId(frame): &FrameId| {
                index[frame as usize].expect("every frame of a stack is in the table").to_string()
            };
            format!("[{}]", stack.iter().rev().map(place).collect::<Vec<_>>().join(",")).into()
        })
    }
}

fn write_frame(out: &mut impl Write, label: &Label<'_>) -> io::Result<()> {
    out.write_all(b",{\"name\":")?;
    json(out, label.function)?;
    if !label.filename.is_empty() {
        out.write_all(b",\"file\":")?;
        json(out, label.filename)?;
    }
    if let Some(line) = label.line {
        write!(out, ",\"line\":{line}")?;
    }
    out.write_all(b"}")
}

/// The whole recording's time, and the usual time between samples.
struct Span {
    start: u64,
    end: u64,
    interval: u64,
}

impl Span {
    /// How long a sample lasts if the thread's next one comes `gap` later. A running thread has one for each interval
    /// of CPU time; moving between CPUs, whose timers tick at different moments, makes the gap up to two.
    fn duration(&self, gap: u64) -> u64 {
        if gap <= self.interval.saturating_mul(2) { gap } else { self.interval }
    }
}

fn write_thread(
    out: &mut impl Write,
    profile: &Profile,
    spool: &Spool,
    frames: &mut Frames,
    id: ThreadId,
    span: &Span,
) -> io::Result<()> {
    let mut name = thread_name(profile, id);
    if profile.meta.many_processes {
        name = format!("{}: {name}", process_title(profile.process_of(id)));
    }
    out.write_all(b"{\"type\":\"sampled\",\"name\":")?;
    json(out, &name)?;
    write!(out, ",\"unit\":\"microseconds\",\"startValue\":0,\"endValue\":{},\"samples\":[", span.end - span.start)?;
    // Two passes over the same samples: stacks, then weights.
    let mut list = List::default();
    walk(spool, id, span, |part| {
        list.comma(out)?;
        match part {
            Part::Idle(_) => out.write_all(b"[]"),
            Part::Sample(stack, _) => out.write_all(frames.stack(spool, stack).as_bytes()),
        }
    })?;
    out.write_all(b"],\"weights\":[")?;
    let mut list = List::default();
    walk(spool, id, span, |part| {
        list.comma(out)?;
        let (Part::Idle(weight) | Part::Sample(_, weight)) = part;
        out.write_all(itoa::Buffer::new().format(weight).as_bytes())
    })?;
    out.write_all(b"]}")
}

/// A piece of a thread's time line.
enum Part {
    /// Nothing was sampled for so long.
    Idle(u64),
    /// One sample, and how long it lasts.
    Sample(StackId, u64),
}

/// Cuts a thread's time into pieces without gaps, from the recording's start to its end.
fn walk(spool: &Spool, id: ThreadId, span: &Span, mut take: impl FnMut(Part) -> io::Result<()>) -> io::Result<()> {
    let mut now = span.start;
    // `whole`: the stack was met during all of the gap.
    let mut until = |next: u64, stack: Option<StackId>, whole: bool| {
        let gap = next.saturating_sub(now);
        let busy = match stack {
            Some(_) if whole => gap,
            Some(_) => span.duration(gap),
            None => 0,
        };
        if let Some(stack) = stack {
            take(Part::Sample(stack, busy))?;
        }
        if gap > busy {
            take(Part::Idle(gap - busy))?;
        }
        now += gap;
        io::Result::Ok(())
    };
    let mut last = None;
    spool.read_with(id.0 as usize, |samples, _| {
        let Spooled { time_us, count, step_us, stack, .. } = samples;
        until(time_us, last.replace(stack), false)?;
        let rest = count - 1;
        // That many side by side look like one that lasts as long.
        if rest >= MANY && span.duration(step_us) == step_us {
            return until(time_us.saturating_add(step_us.saturating_mul(rest)), last, true);
        }
        (1..=rest).try_for_each(|number| until(time_us.wrapping_add(step_us.wrapping_mul(number)), last, false))
    })?;
    until(span.end, last, false)
}

/// From this many on, evenly spaced samples of one stack are written as one: no recording by this profiler has as many.
const MANY: u64 = 4096;

/// Commas between entries.
#[derive(Default)]
struct List {
    begun: bool,
}

impl List {
    fn comma(&mut self, out: &mut impl Write) -> io::Result<()> {
        if std::mem::replace(&mut self.begun, true) { out.write_all(b",") } else { Ok(()) }
    }
}

fn json(out: &mut impl Write, text: &str) -> io::Result<()> {
    Ok(super::text::write_json_line(out, text)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Merge, Process, Thread};
    use serde_json::{Value, json};

    #[test]
    fn gaps_and_weights() {
        let mut profile = Profile::default();
        profile.meta.start_us = 1000;
        profile.meta.interval_us = 10;
        let cmdline = vec!["python3".into(), "app.py".into()];
        profile.processes.push(Process { pid: 9, comm: "app".into(), cmdline, ..Process::default() });
        for tid in [5, 6] {
            profile.threads.push(Thread { ns_tid: tid, ..Thread::default() });
        }
        let (a, b) = (profile.special_frame("a"), profile.special_frame("b"));
        let mut sink = SpeedscopeSink::new(Vec::new());
        let samples: [(u32, u64, &[FrameId]); 6] =
            [(0, 1005, &[b, a]), (0, 1015, &[a]), (1, 1018, &[b]), (0, 1033, &[]), (0, 1100, &[a]), (0, 1100, &[b])];
        for (thread, time_us, frames) in samples {
            sink.sample(
                &profile,
                &Sample { thread: ThreadId(thread), time_us, status: 0, frames, merge: Merge::None, work: None },
            )
            .unwrap();
        }
        sink.finish(&profile, &Report::default()).unwrap();
        let file: Value = serde_json::from_slice(&sink.out).unwrap();
        assert_eq!(file["name"], "python3 app.py (9)");
        assert_eq!(file["shared"]["frames"], json!([{"name": "<no frames>"}, {"name": "b"}, {"name": "a"}]));
        let one = &file["profiles"][0];
        assert_eq!((&one["endValue"], &one["name"]), (&json!(110), &json!("thread 5")));
        assert_eq!(one["samples"], json!([[], [2, 1], [2], [0], [], [2], [1]]));
        assert_eq!(one["weights"], json!([5, 10, 18, 10, 57, 0, 10]));
        let other = &file["profiles"][1];
        assert_eq!(other["samples"], json!([[], [1], []]));
        assert_eq!(other["weights"], json!([18, 10, 82]));
    }

    #[test]
    fn no_samples() {
        let mut sink = SpeedscopeSink::new(Vec::new());
        sink.finish(&Profile::default(), &Report::default()).unwrap();
        let file: Value = serde_json::from_slice(&sink.out).unwrap();
        assert_eq!(file["profiles"], json!([]));
    }
}
