//! Writes a profile as the report: one HTML page with a flame graph, a time line, a table of functions, and filters.
//!
//! The page is committed ready-made (`prebuilt/report.html`, from `report-page/`); what is written here is its data: one
//! block of base64 with gzip inside, in which nothing can close the element around it. Samples are kept in a temporary
//! file until the end, so memory grows with the number of distinct stacks. `docs/formats/report.md` has the layout.

mod data;
pub mod source;
mod summary;
mod tree;

use super::flamegraph::{caption, title, xml};
use super::need::Amounts;
use super::spool::Spool;
use super::stacks::Stacks;
use super::{Sink, stacks};
use crate::profile::{Merge, Profile, Sample, TASK_WAIT};
use crate::report::Report;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::GzEncoder;
use source::{Source, SourceFiles};
use std::io::{self, Write};
use tachyon_common::event::status;
use tree::Tree;

/// The page without its data.
const PAGE: &str = include_str!("../../prebuilt/report.html");
/// Most nodes of the tree of stacks: more would take the browser seconds.
const MOST_NODES: usize = 1_500_000;

/// Writes the page at the end.
pub struct PageSink<W> {
    out: W,
    spool: Spool,
    total: u64,
    /// By number of [`Merge`].
    merges: [u64; 4],
    source: Option<Box<dyn SourceFiles>>,
    /// By process: whether it had a sample.
    met: Vec<bool>,
    /// Whether some samples are of waiting threads.
    waits: bool,
    /// Whether the page is about waiting asyncio tasks; otherwise it leaves those out.
    task_waits: bool,
}

impl<W: Write> PageSink<W> {
    /// Nothing is written to `out` before the end.
    pub fn new(out: W) -> Self {
        Self {
            out,
            spool: Spool::default(),
            total: 0,
            merges: [0; 4],
            source: None,
            met: Vec::new(),
            waits: false,
            task_waits: false,
        }
    }

    /// Makes the page show only what asyncio tasks await. Otherwise it leaves that out, since it is not part of any
    /// thread's time.
    #[must_use]
    pub fn of_task_waits(self, task_waits: bool) -> Self {
        Self { task_waits, ..self }
    }

    /// Adds source text to the page, from these files.
    #[must_use]
    pub fn with_source(self, source: Option<Box<dyn SourceFiles>>) -> Self {
        Self { source, ..self }
    }

    /// Writes the page's data on a profile: one text in base64. Returns the page's summary as HTML.
    fn write_data(&mut self, out: impl Write, profile: &Profile, report: &Report) -> io::Result<String> {
        let stacks = &self.spool.stacks;
        let usage = Usage::of(profile, &self.spool)?;
        let mut tree = Tree::new(profile, stacks, self.source.is_some());
        if tree.len() > MOST_NODES {
            tree.prune(&usage.counts, MOST_NODES);
        }
        tree.sort();
        let summary = summary::summary(&tree, &usage.counts, self.whole(report));
        let source = self.source.as_mut().map(|files| Source::read(profile, &usage, stacks, &mut tree, files.as_mut()));
        let base64 = base64::write::EncoderWriter::new(out, &STANDARD);
        let mut gzip = GzEncoder::new(base64, Compression::new(4));
        data::write(&mut gzip, profile, report, &self.spool, &tree, source.as_ref(), self.merges)?;
        gzip.finish()?.finish()?;
        Ok(summary)
    }

    /// What the samples are a part of.
    fn whole(&self, report: &Report) -> &'static str {
        match (report.events.is_empty(), self.waits) {
            _ if self.task_waits => "the tasks’ waiting time",
            (false, _) => "the samples",
            (true, true) => "the threads’ time",
            (true, false) => "the CPU time",
        }
    }
}

impl<W: Write> Sink for PageSink<W> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        if profile.event_of(sample.frames).is_some_and(|(event, _)| event == TASK_WAIT) != self.task_waits {
            return Ok(());
        }
        self.total += times_us.len() as u64;
        self.merges[usize::from(sample.merge.number())] += times_us.len() as u64;
        self.waits |= State::of(sample.status) == State::Waited;
        if let Some(source) = &mut self.source {
            let process = profile.thread(sample.thread).process as usize;
            if process >= self.met.len() {
                self.met.resize(process + 1, false);
            }
            if let (false, Some(process)) =
                (std::mem::replace(&mut self.met[process], true), profile.processes.get(process))
            {
                source.met(process);
            }
        }
        self.spool.repeat_by_thread(profile, sample, times_us)
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        Amounts::of(profile, &self.spool.stacks).sum([64, 68, 300, 2, 600])
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        // The page names what its samples stand for.
        let of_tasks = self.task_waits.then(|| Report { event: TASK_WAIT.to_owned(), ..report.clone() });
        let report = of_tasks.as_ref().unwrap_or(report);
        let (title, caption) = (title(profile), caption(self.total, report));
        let mut data = Vec::new();
        let summary = self.write_data(&mut data, profile, report)?;
        write_page(&mut self.out, &title, &caption, &summary, &data, &[])
    }
}

/// Writes the page with its summary, which is HTML, and its blocks of data, which are base64.
fn write_page(
    out: &mut dyn Write,
    title: &str,
    caption: &str,
    summary: &str,
    data: &[u8],
    difference: &[u8],
) -> io::Result<()> {
    let (title, caption) = (xml(title), xml(caption));
    for (place, part) in PAGE.split("@@").enumerate() {
        out.write_all(match (place % 2, part) {
            (0, text) => text.as_bytes(),
            (_, "title") => title.as_bytes(),
            (_, "caption") => caption.as_bytes(),
            (_, "summary") => summary.as_bytes(),
            (_, "data") => data,
            (_, "difference") => difference,
            (_, other) => unreachable!("the page has no part {other}"),
        })?;
    }
    out.flush()
}

/// One side of a comparison: takes samples as the page's sink does, and keeps the page's data on them.
pub struct SideSink {
    sink: PageSink<io::Sink>,
    data: Vec<u8>,
}

impl Default for SideSink {
    fn default() -> Self {
        Self { sink: PageSink::new(io::sink()), data: Vec::new() }
    }
}

impl Sink for SideSink {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.sink.sample(profile, sample)
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.sink.repeated(profile, sample, times_us)
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        self.sink.write_data(&mut self.data, profile, report).map(drop)
    }
}

/// Writes the page of a comparison. `changes`: the result of the statistics, as in `diff --json`.
///
/// # Errors
/// When it cannot be written.
pub fn write_difference(
    out: &mut dyn Write,
    title: &str,
    caption: &str,
    [before, after]: &[SideSink; 2],
    changes: &impl serde::Serialize,
) -> io::Result<()> {
    let mut difference = before.data.clone();
    difference.push(b' ');
    let mut gzip = GzEncoder::new(base64::write::EncoderWriter::new(&mut difference, &STANDARD), Compression::new(4));
    serde_json::to_writer(&mut gzip, changes)?;
    gzip.finish()?.finish()?;
    write_page(out, title, caption, "", &after.data, &difference)
}

/// By stack: how often it was seen, and a process that it was seen in.
struct Usage {
    counts: Vec<u64>,
    process: Vec<u32>,
}

impl Usage {
    fn of(profile: &Profile, spool: &Spool) -> io::Result<Self> {
        let len = spool.stacks.iter().len();
        let mut usage = Self { counts: vec![0; len], process: vec![0; len] };
        for thread in spool.threads() {
            let process = profile.threads.get(thread.0 as usize).map_or(0, |thread| thread.process);
            spool.read_with(thread.0 as usize, |sample, _| {
                let stack = sample.stack.0 as usize;
                usage.counts[stack] += sample.count;
                usage.process[stack] = process;
                Ok(())
            })?;
        }
        Ok(usage)
    }
}

/// What a thread was doing, as the page shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// It ran; whether it held the GIL is not known.
    Ran = 0,
    /// It ran and held the GIL.
    Held = 1,
    /// It ran without the GIL.
    NotHeld = 2,
    /// It waited.
    Waited = 3,
}

impl State {
    fn of(status_byte: u8) -> Self {
        let bits = u32::from(status_byte);
        match stacks::gil_held(status_byte) {
            Some(true) => Self::Held,
            None => Self::Ran,
            Some(false) if bits & status::ON_CPU != 0 => Self::NotHeld,
            Some(false) => Self::Waited,
        }
    }
}

/// Samples by how their stacks were put together.
fn merged(merges: [u64; 4]) -> impl Iterator<Item = (&'static str, u64)> {
    (0..4).filter_map(move |number| Some((Merge::from_number(number).name()?, merges[usize::from(number)])))
}

#[cfg(test)]
mod tests;
