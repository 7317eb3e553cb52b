//! What was seen: sums for the view, and the samples themselves for a file.

use super::driver::Taken;
use crate::analysis::live::{Live, Numbered};
use crate::cli::output::{Destination, OutputFile};
use crate::profile::{Merge, Profile, Sample, ThreadId};
use crate::recording::Totals;
use crate::sinks::tach::TachOptions;
use crate::sinks::{Sink as _, TachSink};
use std::collections::VecDeque;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::rc::Rc;

/// Most samples that are kept for a file, 24 bytes each; beyond that, the oldest go.
const MOST_SAMPLES: usize = 2_000_000;
/// How many of them go at once.
const CHUNK: usize = 100_000;

/// Consecutive samples, with the sum of their segments' accounts.
#[derive(Debug, Default)]
struct Chunk {
    samples: Vec<Numbered>,
    totals: Totals,
    start_us: u64,
    start_unix: f64,
}

/// Everything that was seen.
#[derive(Debug, Default)]
pub struct Seen {
    live: Rc<Live>,
    chunks: VecDeque<Chunk>,
    /// The oldest samples are no longer kept.
    pub trimmed: bool,
}

impl Seen {
    /// Adds a segment. Returns whether there was so much that everything before it had to go.
    pub fn add(&mut self, taken: &Taken) -> bool {
        let full = self.live.is_full();
        if full {
            *self = Self { trimmed: true, ..Self::default() };
        }
        let Taken { profile, report, batch, .. } = taken;
        // A paused view has its own copy.
        let samples = Rc::make_mut(&mut self.live).add(profile, report, batch);
        if self.chunks.back().is_none_or(|chunk| chunk.samples.len() >= CHUNK) {
            let (start_us, start_unix) = (profile.meta.start_us, profile.meta.start_unix);
            self.chunks.push_back(Chunk { start_us, start_unix, ..Chunk::default() });
        }
        if let Some(chunk) = self.chunks.back_mut() {
            chunk.samples.extend(samples);
            chunk.totals.add_report(report);
        }
        while self.chunks.len() > 1 && self.samples() > MOST_SAMPLES {
            self.chunks.pop_front();
            self.trimmed = true;
        }
        full
    }

    /// The sums as they are now; they do not change when more is added.
    pub fn live(&self) -> Rc<Live> {
        Rc::clone(&self.live)
    }

    /// Samples that a file would hold.
    fn samples(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.samples.len()).sum()
    }

    /// Writes a TACH file. Returns the number of its samples.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, path: &Path) -> anyhow::Result<u64> {
        let output = OutputFile::create(&Destination::Path(path.to_owned()), false)?;
        let shown = self.live.profile();
        let mut meta = shown.meta.clone();
        if let Some(first) = self.chunks.front() {
            (meta.start_us, meta.start_unix) = (first.start_us, first.start_unix);
        }
        let profile = Profile { meta, ..shown.clone() };
        let file = BufWriter::new(output.try_clone_file()?);
        let mut sink = TachSink::new(file, &profile.meta, TachOptions::default())?;
        let mut totals = Totals::new();
        for chunk in &self.chunks {
            for numbered in &chunk.samples {
                sink.sample(&profile, &self.sample(numbered))?;
            }
            totals.add_report(&chunk.totals.report());
        }
        let mut report = totals.report();
        // It is one file, however many segments it came from.
        report.segments = Some(1);
        sink.finish(&profile, &report)?;
        let stored = sink.stored();
        for (mut file, _) in sink.into_outputs() {
            file.flush()?;
        }
        output.commit()?;
        Ok(stored)
    }

    fn sample(&self, numbered: &Numbered) -> Sample<'_> {
        let &Numbered { time_us, thread, status, .. } = numbered;
        let thread: ThreadId = thread;
        let frames = self.live.stack(numbered);
        Sample { thread, time_us, status: status & 0x3f, frames, merge: Merge::from_number(status >> 6), work: None }
    }
}
