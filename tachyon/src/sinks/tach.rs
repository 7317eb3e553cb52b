//! A profile to TACH files, as it is recorded.
//!
//! Streams: samples go out as they come, the tables at the end, when all names are known. A recording whose samples
//! would outgrow what CPython's reader takes goes on in a next file, if the caller gives one.

use super::journal::{FrameLine, Journal, Line};
use super::metadata::Metadata;
use super::tail::Tail;
use super::{Sink, file_thread_id, process_frame_name};
use crate::profile::{self, FrameId, Meta, Profile, SPECIAL_FILENAME, Sample, StrId, waited_for};
use crate::report::Report;
use crate::tach::{
    self, Compression, Features, Frame, Layout, Mode, Options, Statistics, Summary, WriteError, Writer, omitted,
    omitted_name, trim_stack,
};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Seek, Write};

/// How a file is made.
#[derive(Clone, Debug, PartialEq)]
pub struct TachOptions {
    /// Which layout.
    pub layout: Layout,
    /// What is done to the samples.
    pub compression: Compression,
    /// What the file says about its recording, when it was not made by this program.
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
    /// It has our metadata: host, processes and all.
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
/// sink.sample(&profile, &Sample { thread: ThreadId(0), time_us: 5, status: 2, frames: &frames, merge: Merge::None })?;
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
    /// Where names go while there are no tables yet.
    journal: Option<Journal>,
    /// Where samples go that the file lacks yet.
    tail: Option<Tail>,
    sync: Option<Sync>,
    /// What is told as lost instead of what the report says.
    lost_percent: Option<f64>,
    table: FrameIndices,
    /// The stack at hand, as indices of the file.
    stack: Vec<u32>,
}

impl<W: Write + Seek> TachSink<W> {
    /// Starts a file. `file` must be empty and stand at its start.
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

    /// Lets the recording go on in a next file when one is full. Without it, samples past that point are refused.
    #[must_use]
    pub fn with_next_output(mut self, next: impl FnMut(u32) -> io::Result<W> + Send + 'static) -> Self {
        self.next_output = Some(Box::new(next));
        self
    }

    /// Writes what the file lacks beside it, for `recover`: the names that samples use, as they become known, to
    /// `journal`, and at every [`Sink::tick`] the samples that are not in the file yet to `tail`. Both are empty files, which
    /// the caller removes when the TACH files are complete.
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

    /// Has the file tell this share as lost, for a part of a recording whose losses are known as a whole only.
    #[must_use]
    pub fn with_lost_percent(mut self, lost_percent: Option<f64>) -> Self {
        self.lost_percent = lost_percent;
        self
    }

    /// Brings new names to the journal, and names that changed since they were written: they came late.
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
            // CPython looks at six of its bits.
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

    /// A recording that is cut later loses no more than what came after the last call. The file is what it would be
    /// without: what cannot be brought to it yet goes beside it.
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
        // A file that another program made has no host and no processes to tell.
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

/// What an entry of the file's frame table is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Entry {
    /// A frame of the profile.
    Frame(FrameId),
    /// A frame without source of its own, at the line of Python that called it: CPython's heat map and its lists of functions
    /// count by line, and what a line called in C belongs to it.
    Called { callee: FrameId, caller: FrameId },
    /// The outermost frame that names a process: index into [`Profile::processes`].
    Process(u32),
    /// The frame in place of this many omitted ones.
    Omitted(usize),
}

impl Entry {
    /// The frame, with the profile's own names.
    fn of_profile(self, profile: &Profile) -> Option<profile::Frame> {
        match self {
            Self::Frame(id) => Some(*profile.frames.get(id)),
            Self::Called { callee, caller } => {
                let (callee, caller) = (profile.frames.get(callee), profile.frames.get(caller));
                // Where the line is not known, nor is what it called told to be there.
                if caller.lineno < 0 {
                    return Some(*callee);
                }
                let Frame { lineno, end_lineno, column, end_column, opcode, .. } =
                    Frame::called_at(0, 0, caller.lineno);
                let (filename, function) = (caller.filename, callee.function);
                Some(profile::Frame { filename, function, lineno, end_lineno, column, end_column, opcode })
            }
            Self::Process(_) | Self::Omitted(_) => None,
        }
    }

    /// The function name of an entry that is no frame of the profile.
    fn own_name(self, profile: &Profile) -> String {
        match self {
            Self::Frame(id) | Self::Called { callee: id, .. } => {
                profile.strings.get(profile.frames.get(id).function).to_owned()
            }
            Self::Process(index) => match profile.processes.get(index as usize) {
                Some(process) => process_frame_name(process),
                None => "<unknown process>".to_owned(),
            },
            Self::Omitted(count) => omitted_name(count),
        }
    }
}

/// What is known of a frame of the profile.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Its index in the file, if it is there as it is.
    index: Option<u32>,
    /// [`Profile::shown`].
    shown: FrameId,
    /// It has no source of its own.
    special: bool,
    /// It is what a line of Python called: native and kernel code, and waits. CPython has markers such as `<GC>` without a
    /// place, and so have we.
    called: bool,
}

/// Gives frames their indices in the file, in order of first use. The profile's own handles would not do: there are
/// frames beside the profile's, and the profile still grows.
#[derive(Debug, Default)]
struct FrameIndices {
    entries: Vec<Entry>,
    /// By [`FrameId`]; `None` for frames that no sample used.
    places: Vec<Option<Place>>,
    of_others: HashMap<Entry, u32, RandomState>,
}

impl FrameIndices {
    /// Appends a whole stack, the leaf first.
    fn of_stack(&mut self, profile: &Profile, frames: &[FrameId], stack: &mut Vec<u32>) {
        let mut rest = frames;
        while let Some((&frame, outer)) = rest.split_first() {
            let place = self.place(profile, frame);
            if !place.special {
                stack.push(self.own(frame, place));
                rest = outer;
                continue;
            }
            let called = rest.iter().take_while(|&&frame| self.place(profile, frame).special).count();
            let (called, outer) = rest.split_at(called);
            for &frame in called {
                let place = self.place(profile, frame);
                stack.push(match outer.first().filter(|_| place.called) {
                    Some(&caller) => self.of(Entry::Called { callee: place.shown, caller }),
                    None => self.own(frame, place),
                });
            }
            rest = outer;
        }
    }

    fn place(&mut self, profile: &Profile, id: FrameId) -> Place {
        let at = id.0 as usize;
        if at >= self.places.len() {
            self.places.resize(at + 1, None);
        }
        *self.places[at].get_or_insert_with(|| {
            let shown = profile.shown(id);
            let frame = profile.frames.get(shown);
            let special = frame.lineno < 0 && profile.strings.get(frame.filename) == SPECIAL_FILENAME;
            let name = profile.strings.get(frame.function);
            let called = special && (!name.starts_with('<') || waited_for(name).is_some());
            Place { index: None, shown, special, called }
        })
    }

    /// The index of a frame as it is; of a native place that of the frame that is shown.
    fn own(&mut self, id: FrameId, place: Place) -> u32 {
        if let Some(index) = place.index {
            return index;
        }
        // A place may come before the frame that is shown for it, or after.
        let index = if place.special { self.of(Entry::Frame(place.shown)) } else { self.push(Entry::Frame(id)) };
        if let Some(known) = &mut self.places[id.0 as usize] {
            known.index = Some(index);
        }
        index
    }

    fn of(&mut self, entry: Entry) -> u32 {
        if let Some(&index) = self.of_others.get(&entry) {
            return index;
        }
        let index = self.push(entry);
        self.of_others.insert(entry, index);
        index
    }

    fn push(&mut self, entry: Entry) -> u32 {
        let index = u32::try_from(self.entries.len()).expect("fewer than 2^32 frames fit in memory");
        self.entries.push(entry);
        index
    }

    /// The file's tables, once all names are known.
    fn tables(&self, profile: &Profile) -> (Strings, Vec<Frame>) {
        let mut strings = Strings::default();
        let frames = self.entries.iter().map(|entry| {
            if let Some(frame) = entry.of_profile(profile) {
                return Frame {
                    filename: strings.of_profile(frame.filename),
                    function: strings.of_profile(frame.function),
                    lineno: frame.lineno,
                    end_lineno: frame.end_lineno,
                    column: frame.column,
                    end_column: frame.end_column,
                    opcode: frame.opcode,
                };
            }
            let (file, name) = (SPECIAL_FILENAME.to_owned(), entry.own_name(profile));
            Frame::without_location(strings.push(Text::Own(file)), strings.push(Text::Own(name)))
        });
        let frames = frames.collect();
        (strings, frames)
    }
}

/// The file's string table: the profile's strings that frames use, in order of first use, and some of its own.
#[derive(Debug, Default)]
struct Strings {
    texts: Vec<Text>,
    of_profile: HashMap<StrId, u32>,
}

#[derive(Debug)]
enum Text {
    Profile(StrId),
    Own(String),
}

impl Strings {
    fn of_profile(&mut self, id: StrId) -> u32 {
        if let Some(&index) = self.of_profile.get(&id) {
            return index;
        }
        let index = self.push(Text::Profile(id));
        self.of_profile.insert(id, index);
        index
    }

    fn push(&mut self, text: Text) -> u32 {
        let index = u32::try_from(self.texts.len()).expect("fewer than 2^32 strings fit in memory");
        self.texts.push(text);
        index
    }

    fn iter<'a>(&'a self, profile: &'a Profile) -> impl Iterator<Item = &'a str> {
        self.texts.iter().map(|text| match text {
            Text::Profile(id) => profile.strings.get(*id),
            Text::Own(text) => text,
        })
    }
}
