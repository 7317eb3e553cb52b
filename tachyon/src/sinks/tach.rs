//! Writes a profile to TACH files while it is recorded.
//!
//! It streams: samples are written as they come, the tables at the end, when all names are known. A recording whose
//! samples would exceed what CPython's reader accepts continues in another file, if the caller provides one.

mod indices;

use super::journal::{FrameLine, Journal, Line};
use super::metadata::Metadata;
use super::tail::Tail;
use super::{Sink, file_thread_id};
use crate::profile::{self, Meta, Profile, SPECIAL_FILENAME, Sample, StrId};
use crate::report::Report;
use crate::tach::{
    self, Compression, Features, Layout, Mode, Options, Statistics, Summary, WriteError, Writer, omitted, trim_stack,
};
use indices::{Entry, FrameIndices};
use std::fs::File;
use std::io::{self, Seek, Write};

/// How a file is made.
#[derive(Clone, Debug, PartialEq)]
pub struct TachOptions {
    /// Which layout.
    pub layout: Layout,
    /// What is done to the samples.
    pub compression: Compression,
    /// What the file says about its recording, if it was not made by this program.
    pub origin: Option<Origin>,
    /// Most bytes of samples in a compressed file; see [`Options::max_sample_bytes`].
    pub max_sample_bytes: u64,
}

impl Default for TachOptions {
    fn default() -> Self {
        Self {
            layout: Layout::default(),
            compression: Compression::default(),
            origin: None,
            max_sample_bytes: tach::MAX_SAMPLE_BYTES,
        }
    }
}

/// What a file of another program says about its recording.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Origin {
    /// When samples were taken.
    pub mode: Option<Mode>,
    /// What was recorded.
    pub features: Option<Features>,
    /// Duration, rate and shares.
    pub statistics: Option<Statistics>,
    /// It has this project's metadata: host, processes and so on.
    pub metadata: bool,
}

/// Gives the output for the second, third, … file of a recording; the argument counts from 2.
type NextOutput<W> = Box<dyn FnMut(u32) -> io::Result<W> + Send>;

/// Synchronises files to disk.
type Sync = Box<dyn FnMut() -> io::Result<()> + Send>;

/// Writes TACH files.
///
/// ```
/// use std::io::Cursor;
/// use tachyon::profile::{Merge, Process, Profile, Sample, Thread, ThreadId};
/// use tachyon::report::Report;
/// use tachyon::sinks::tach::TachOptions;
/// use tachyon::sinks::{Sink, TachSink};
///
/// let mut profile = Profile::default();
/// profile.processes.push(Process::default());
/// profile.threads.push(Thread { ns_tid: 7, ..Thread::default() });
/// let frames = [profile.special_frame("libz.so.1!deflate")];
/// let mut sink = TachSink::new(Cursor::new(Vec::new()), &profile.meta, TachOptions::default())?;
/// sink.sample(&profile, &Sample { thread: ThreadId(0), time_us: 5, status: 2, frames: &frames, merge: Merge::None , work: None})?;
/// sink.finish(&profile, &Report::default())?;
/// assert_eq!(sink.stored(), 1);
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct TachSink<W> {
    options: Options,
    origin: Option<Origin>,
    next_output: Option<NextOutput<W>>,
    /// The file that samples go to; `None` after the end.
    writer: Option<Writer<W>>,
    /// Files whose samples are complete; their tables come at the end.
    full: Vec<Writer<W>>,
    finished: Vec<(W, Summary)>,
    stored: u64,
    /// Where names go until there are tables.
    journal: Option<Journal>,
    /// Where samples go that are not in the file yet.
    tail: Option<Tail>,
    sync: Option<Sync>,
    /// The share to report as lost, in place of the report's.
    lost_percent: Option<f64>,
    table: FrameIndices,
    /// The stack at hand, as indices of the file.
    stack: Vec<u32>,
}

impl<W: Write + Seek> TachSink<W> {
    /// Starts a file. `file` must be empty and positioned at its start.
    ///
    /// # Errors
    /// When the header cannot be written.
    pub fn new(file: W, meta: &Meta, options: TachOptions) -> io::Result<Self> {
        let (mode, features) = match options.origin {
            Some(origin) => (origin.mode, origin.features),
            None => {
                let mode = match (meta.gil_only, meta.waits) {
                    (true, _) => Mode::Gil,
                    (false, true) => Mode::Wall,
                    (false, false) => Mode::Cpu,
                };
                let recorded = Features {
                    all_threads: true,
                    native: meta.native,
                    gc: true,
                    opcodes: meta.opcodes,
                    ..Features::default()
                };
                (Some(mode), Some(recorded))
            }
        };
        let origin = options.origin;
        let options = Options {
            layout: options.layout,
            compression: options.compression,
            start_time_us: meta.start_us,
            sample_interval_us: meta.interval_us,
            python_version: version(meta),
            mode,
            features,
            max_sample_bytes: options.max_sample_bytes,
        };
        Ok(Self {
            options,
            origin,
            next_output: None,
            writer: Some(Writer::new(file, options)?),
            full: Vec::new(),
            finished: Vec::new(),
            stored: 0,
            journal: None,
            tail: None,
            sync: None,
            lost_percent: None,
            table: FrameIndices::default(),
            stack: Vec::new(),
        })
    }

    /// Lets the recording continue in another file when one is full. Without this, samples past that point are refused.
    #[must_use]
    pub fn with_next_output(mut self, next: impl FnMut(u32) -> io::Result<W> + Send + 'static) -> Self {
        self.next_output = Some(Box::new(next));
        self
    }

    /// Writes what is not in the file yet beside it, for `recover`: names that samples use go to `journal` as they become
    /// known, and at every [`Sink::tick`] the samples that the file lacks go to `tail`. Both are empty files, which the
    /// caller removes when the TACH files are complete.
    ///
    /// # Errors
    /// When the journal cannot be written.
    ///
    /// # Panics
    /// When samples were taken before.
    pub fn with_journal(mut self, journal: File, tail: File, profile: &Profile) -> io::Result<Self> {
        let journal = Journal::new(journal);
        self.tail = Some(Tail::new(tail, journal.id));
        self.journal = Some(journal);
        if let Some(writer) = &mut self.writer {
            writer.keep_checkpoints();
        }
        self.write_journal(profile)?;
        Ok(self)
    }

    /// Has what was written synchronised to disk at every [`Sink::tick`]; `sync` does it for all files.
    #[must_use]
    pub fn with_sync(mut self, sync: impl FnMut() -> io::Result<()> + Send + 'static) -> Self {
        self.sync = Some(Box::new(sync));
        self
    }

    /// Makes the file report this share as lost, for a part of a recording whose losses are only known as a whole.
    #[must_use]
    pub fn with_lost_percent(mut self, lost_percent: Option<f64>) -> Self {
        self.lost_percent = lost_percent;
        self
    }

    /// Writes new names to the journal, and names that arrived late and so changed since they were written.
    fn write_journal(&mut self, profile: &Profile) -> io::Result<()> {
        let Some(journal) = &mut self.journal else { return Ok(()) };
        journal.put_profile(profile, &self.options);
        for (place, entry) in self.table.entries.iter().enumerate() {
            let known = journal.frames.get(place);
            let of_profile = entry.of_profile(profile);
            let frame = match (of_profile, known) {
                (Some(frame), _) => frame,
                (None, Some(&known)) => known,
                (None, None) => profile::Frame::without_location(StrId(u32::MAX), StrId(u32::MAX)),
            };
            if known == Some(&frame) {
                continue;
            }
            let (file, function) = match of_profile {
                Some(_) => (profile.strings.get(frame.filename), profile.strings.get(frame.function).to_owned()),
                None => (SPECIAL_FILENAME, entry.own_name(profile)),
            };
            journal.put(&Line::Frame(FrameLine {
                index: u32::try_from(place).expect("frames of a file are counted in 32 bits"),
                file: file.to_owned(),
                function,
                position: [frame.lineno, frame.end_lineno, frame.column, frame.end_column],
                opcode: frame.opcode,
            }));
            if place < journal.frames.len() {
                journal.frames[place] = frame;
            } else {
                journal.frames.push(frame);
            }
        }
        journal.write(self.sync.is_some())
    }

    /// How many samples the files hold.
    #[must_use]
    pub fn stored(&self) -> u64 {
        self.stored
    }

    /// The outputs in order, each with what was written to it. Empty before [`Sink::finish`].
    #[must_use]
    pub fn into_outputs(self) -> Vec<(W, Summary)> {
        self.finished
    }

    /// The file for one more sample.
    fn writer(&mut self) -> io::Result<&mut Writer<W>> {
        let full = self.writer.as_ref().is_some_and(Writer::would_overflow);
        if full && let Some(next) = &mut self.next_output {
            let number = u32::try_from(self.full.len()).map_or(u32::MAX, |count| count.saturating_add(2));
            let mut fresh = Writer::new(next(number)?, self.options)?;
            if self.tail.is_some() {
                fresh.keep_checkpoints();
            }
            if let Some(mut writer) = self.writer.replace(fresh) {
                writer.end_samples()?;
                self.full.push(writer);
            }
        }
        self.writer.as_mut().ok_or_else(|| WriteError::Broken.into())
    }

    fn statistics(&self, report: &Report) -> Option<Statistics> {
        if self.options.layout == Layout::Early {
            return None;
        }
        if let Some(origin) = &self.origin {
            return origin.statistics;
        }
        let lost: u64 = report.loss.values().sum();
        let statistics = Statistics {
            duration_sec: report.duration_s,
            sample_rate: report.mean_rate_hz(),
            error_rate: self.lost_percent.or_else(|| percent(lost, self.stored + lost)).filter(|_| !report.cut),
            missed_samples: report.not_fired.zip(report.expected).and_then(|(missed, all)| percent(missed, all)),
        };
        let sound = |number: f64| number.is_finite() && number >= 0.0;
        (sound(statistics.duration_sec) && sound(statistics.sample_rate)).then_some(statistics)
    }
}

impl<W: Write + Seek> Sink for TachSink<W> {
    fn streams(&self) -> bool {
        true
    }

    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        let mut stack = std::mem::take(&mut self.stack);
        stack.clear();
        self.table.of_stack(profile, sample.frames, &mut stack);
        if profile.meta.many_processes {
            stack.push(self.table.of(Entry::Process(profile.thread(sample.thread).process)));
        }
        if let Some(count) = omitted(stack.len()) {
            trim_stack(&mut stack, self.table.of(Entry::Omitted(count)));
        }
        let mut of_file = tach::Sample {
            thread_id: file_thread_id(profile, sample.thread),
            interpreter_id: profile.thread(sample.thread).interpreter,
            timestamp_us: sample.time_us,
            // CPython uses six of its bits.
            status: sample.status | sample.merge.number() << 6,
            frames: &stack,
        };
        let mut result = Ok(());
        for &time_us in times_us {
            of_file.timestamp_us = time_us;
            result = self.writer().and_then(|writer| Ok(writer.write_sample(&of_file)?));
            if result.is_err() {
                break;
            }
            self.stored += 1;
        }
        self.stack = stack;
        result
    }

    /// A recording that is cut later loses no more than what came after the last call. The file stays the same as
    /// without this: what cannot be written to it yet goes beside it.
    fn tick(&mut self, profile: &Profile) -> io::Result<()> {
        // Names first: a sample without them is lost when the file is cut.
        self.write_journal(profile)?;
        let (Some(writer), Some(tail)) = (&mut self.writer, &mut self.tail) else { return Ok(()) };
        let checkpoint = writer.checkpoint()?;
        // Then the file: what goes beside it begins where the file ends.
        if let Some(sync) = &mut self.sync {
            sync()?;
        }
        tail.put(&checkpoint, self.sync.is_some())
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        self.write_journal(profile)?;
        if let Some(writer) = &mut self.writer {
            writer.end_samples()?;
            if let (Some(end), Some(journal)) = (writer.samples_end(), &mut self.journal) {
                journal.put(&Line::SamplesEnd(end));
                journal.write(false)?;
            }
        }
        let statistics = self.statistics(report);
        let (strings, frames) = self.table.tables(profile);
        // A file from another program has no host and no processes to record.
        let told = self.origin.is_none_or(|origin| origin.metadata);
        let mut metadata = told.then(|| Metadata::new(profile, report));
        let mut writers = std::mem::take(&mut self.full);
        writers.extend(self.writer.take());
        let parts = u32::try_from(writers.len()).unwrap_or(u32::MAX);
        for (part, mut writer) in (1..).zip(writers) {
            let entry = metadata.as_mut().map(|metadata| {
                (metadata.part, metadata.parts) = (part, parts);
                metadata.to_entry()
            });
            writer.set_python_version(version(&profile.meta));
            let strings = strings.iter(profile).chain(entry.as_deref());
            self.finished.push(writer.finish(strings, frames.iter().copied(), statistics.as_ref())?);
        }
        self.sync.as_mut().map_or(Ok(()), |sync| sync())
    }
}

fn version(meta: &Meta) -> [u8; 3] {
    let (major, minor, micro) = meta.python_version;
    [major, minor, micro]
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^53 are exact, and this is a share for people")]
pub(crate) fn percent(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 * 100.0 / whole as f64)
}
