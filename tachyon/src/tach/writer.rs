//! Writes samples to a file, byte for byte as CPython 3.15.2's `BinaryWriter` does.

use super::checkpoint::{Checkpoint, Log};
use super::compress::SampleOutput;
use super::finish::{Body, finish_file};
use super::pending::{MAX_ENTRY, Pending};
use super::records::{put_change, put_repeat_head};
use super::varint::MAX_LEN;
use super::{
    Compression, Frame, HEADER_LEN, Header, Layout, MAX_DEPTH, MAX_SAMPLE_BYTES, Options, RECORD_HEAD_LEN,
    RecordCounts, Sample, Statistics, WriteError,
};
use std::collections::HashMap;
use std::io::{Seek, Write};

/// Longest head of a REPEAT record: a `u32` takes five bytes.
const MAX_REPEAT_HEAD: u64 = RECORD_HEAD_LEN as u64 + 5;
/// Longest record that is not a REPEAT: head, delta, status, two counts, 256 frames of five bytes.
const MAX_RECORD: u64 = RECORD_HEAD_LEN as u64 + MAX_LEN as u64 + 1 + 2 * 5 + MAX_DEPTH as u64 * 5;
/// One more repeated sample never takes more than that.
const _: () = assert!(MAX_REPEAT_HEAD + MAX_ENTRY as u64 <= MAX_RECORD);

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Samples.
    pub samples: u64,
    /// Distinct pairs of thread and interpreter.
    pub threads: u32,
    /// Entries of the string table.
    pub strings: u32,
    /// Entries of the frame table.
    pub frames: u32,
    /// Records by kind.
    pub records: RecordCounts,
    /// Bytes of samples before compression.
    pub sample_bytes: u64,
    /// Bytes of samples in the file.
    pub stored_bytes: u64,
    /// Bytes of the whole file.
    pub file_size: u64,
}

struct Thread {
    id: u64,
    interpreter: u32,
    timestamp_us: u64,
    stack: Vec<u32>,
    /// Samples that repeat [`Self::stack`].
    pending: Pending,
}

/// Writes a profile file.
///
/// Samples are streamed: memory grows with the number of threads, not with the number of samples. The output must be
/// empty and stand at its start. Until [`Writer::finish`] the header has no counts and no offsets; a file that is cut
/// before reads as [`super::ReadError::Unfinished`].
///
/// Samples must be in time order for each thread to be useful; the format itself can say that time stepped back.
///
/// Names are only needed at the end. An [`Interner`](super::Interner) numbers them as they come:
///
/// ```
/// use std::fs::File;
/// use std::io::BufWriter;
/// use tachyon::tach::{Interner, Mode, Options, Sample, Statistics, Writer};
///
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("app.tach");
/// let options = Options {
///     start_time_us: 5_000_000,
///     sample_interval_us: 10_000,
///     python_version: [3, 13, 0],
///     mode: Some(Mode::Cpu),
///     ..Options::default()
/// };
/// let mut writer = Writer::new(BufWriter::new(File::create(&path)?), options)?;
/// let mut names = Interner::default();
/// for tick in 0..100 {
///     let leaf = if tick % 10 == 0 { "parse" } else { "work" };
///     let frames = [names.frame("app.py", leaf, None, None), names.frame("app.py", "main", None, None)];
///     let timestamp_us = 5_000_000 + tick * 10_000;
///     writer.write_sample(&Sample { thread_id: 42, interpreter_id: 0, timestamp_us, status: 3, frames: &frames })?;
/// }
/// let statistics =
///     Statistics { duration_sec: 1.0, sample_rate: 100.0, error_rate: Some(0.0), missed_samples: None };
/// let (_file, summary) = writer.finish(names.strings(), names.frames(), Some(&statistics))?;
/// assert_eq!((summary.samples, summary.threads, summary.frames), (100, 1, 3));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Writer<W> {
    file: W,
    options: Options,
    output: SampleOutput,
    threads: Vec<Thread>,
    indices: HashMap<(u64, u32), usize, foldhash::fast::RandomState>,
    /// The thread of the last sample: the next one is likely to have the same.
    last: usize,
    /// How many samples that repeat the last one can follow without checking any limit.
    room: u64,
    /// What [`Self::room`] was at first: the difference is the samples that [`Self::samples`] does not count yet.
    granted: u64,
    /// Upper bound of what the threads' pending samples will take.
    pending_bytes: u64,
    records: RecordCounts,
    samples: u64,
    /// The most that the header can count.
    most_samples: u64,
    /// The most that readers accept.
    most_bytes: u64,
    /// Where the string table starts, once the samples are complete.
    samples_end: Option<u64>,
    /// What checkpoints will contain.
    log: Option<Log>,
    broken: bool,
}

impl<W: Write + Seek> Writer<W> {
    /// Starts a file.
    ///
    /// # Errors
    /// When the header cannot be written.
    pub fn new(mut file: W, options: Options) -> Result<Self, WriteError> {
        let header = Header { sample_count: 0, ..options.header() };
        file.write_all(&header.encode())?;
        Ok(Self {
            file,
            options,
            output: SampleOutput::new(options.compression)?,
            threads: Vec::new(),
            indices: HashMap::default(),
            last: 0,
            room: 0,
            granted: 0,
            pending_bytes: 0,
            records: RecordCounts::default(),
            samples: 0,
            most_samples: match options.layout {
                Layout::Released => u64::MAX,
                Layout::Early => u64::from(u32::MAX),
            },
            most_bytes: match options.compression {
                Compression::None => u64::MAX,
                Compression::Zstd => options.max_sample_bytes.min(MAX_SAMPLE_BYTES),
            },
            samples_end: None,
            log: None,
            broken: false,
        })
    }

    /// How many samples were taken.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples + (self.granted - self.room)
    }

    /// Whether one more sample could make the file larger than [`Options::max_sample_bytes`]: CPython's reader accepts
    /// 2^30 bytes of samples if they are compressed. Then it is time to finish this file and to go on in another one.
    #[must_use]
    #[inline]
    pub fn would_overflow(&self) -> bool {
        // Where there is room, a whole record fits as well: see `make_room`.
        self.room == 0
            && self.output.taken() + self.pending_bytes + self.uncounted_bytes() + MAX_RECORD > self.most_bytes
    }

    /// What went into the file at its start.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The offset where the samples end, once they have.
    #[must_use]
    pub fn samples_end(&self) -> Option<u64> {
        self.samples_end
    }

    /// Changes the version that the header will state, which may be learnt late.
    pub fn set_python_version(&mut self, version: [u8; 3]) {
        self.options.python_version = version;
    }

    /// Takes one sample.
    ///
    /// # Errors
    /// When the sample does not fit the format, which leaves the file as it was; or when the output fails, which
    /// breaks it.
    #[inline]
    pub fn write_sample(&mut self, sample: &Sample<'_>) -> Result<(), WriteError> {
        if self.repeats(sample) { Ok(()) } else { self.write_any(sample) }
    }

    /// Takes a sample that only repeats the last one's thread and stack: most samples of most programs. Returns whether
    /// it did.
    #[inline]
    fn repeats(&mut self, sample: &Sample<'_>) -> bool {
        let Some(thread) = self.threads.get_mut(self.last) else { return false };
        if self.room == 0
            || (thread.id, thread.interpreter) != (sample.thread_id, sample.interpreter_id)
            || thread.stack != sample.frames
        {
            return false;
        }
        thread.pending.put(sample.timestamp_us.wrapping_sub(thread.timestamp_us), sample.status);
        thread.timestamp_us = sample.timestamp_us;
        self.room -= 1;
        true
    }

    /// Bytes of the samples that [`Self::repeats`] took since they were last counted.
    fn uncounted_bytes(&self) -> u64 {
        self.threads.get(self.last).map_or(0, |thread| thread.pending.uncounted_bytes())
    }

    /// Counts the samples that [`Self::repeats`] took, and lets it take no more.
    fn count_repeats(&mut self) {
        let taken = std::mem::take(&mut self.granted) - std::mem::take(&mut self.room);
        if let Some(thread) = self.threads.get_mut(self.last) {
            self.pending_bytes += thread.pending.count_samples(taken);
            self.samples += taken;
        }
    }

    /// Lets [`Self::repeats`] take what fits for sure. All samples are counted.
    fn make_room(&mut self) {
        let pending = &mut self.threads[self.last].pending;
        let used = self.output.taken() + self.pending_bytes + MAX_RECORD;
        let limits = (self.most_samples - self.samples).min(self.most_bytes.saturating_sub(used) / MAX_ENTRY as u64);
        self.room = limits.min(pending.make_room() as u64);
        self.granted = self.room;
    }

    fn write_any(&mut self, sample: &Sample<'_>) -> Result<(), WriteError> {
        self.count_repeats();
        if self.broken || self.samples_end.is_some() {
            return Err(WriteError::Broken);
        }
        if sample.frames.len() > MAX_DEPTH {
            return Err(WriteError::TooDeep(sample.frames.len()));
        }
        if self.would_overflow() {
            return Err(WriteError::Full);
        }
        if self.samples >= self.most_samples {
            return Err(WriteError::TooMany("samples"));
        }
        let index = self.thread(sample.thread_id, sample.interpreter_id)?;
        let thread = &mut self.threads[index];
        let delta = sample.timestamp_us.wrapping_sub(thread.timestamp_us);
        let repeats = thread.stack == sample.frames;
        if repeats {
            if thread.pending.is_full() {
                self.write_pending(index)?;
            }
            let pending = &mut self.threads[index].pending;
            if pending.bytes().is_empty() {
                self.pending_bytes += MAX_REPEAT_HEAD;
            }
            pending.make_room();
            pending.put(delta, sample.status);
            self.pending_bytes += pending.count_samples(1);
        } else {
            self.write_pending(index)?;
            let thread = &mut self.threads[index];
            let out = self.output.buffer();
            let start = out.len();
            put_change(out, &mut self.records, &thread.stack, sample, delta);
            if let Some(log) = &mut self.log {
                log.put(&out[start..]);
            }
            thread.stack.clear();
            thread.stack.extend_from_slice(sample.frames);
            self.end_record()?;
        }
        self.threads[index].timestamp_us = sample.timestamp_us;
        self.samples += 1;
        if repeats {
            self.make_room();
        }
        Ok(())
    }

    /// Prepares for [`Writer::checkpoint`], which costs some hundred KiB of memory.
    ///
    /// # Panics
    /// When samples were taken before.
    pub fn keep_checkpoints(&mut self) {
        assert!(self.samples() == 0 && self.log.is_none(), "the first thing that is done");
        self.output.keep(&self.options);
        self.log = Some(Log::new());
    }

    /// Writes to the file what does not change what it will be, and returns the records that it still lacks: if the
    /// program is killed, file and records together have every sample taken so far.
    ///
    /// ```
    /// use std::io::Cursor;
    /// use tachyon::tach::{Options, Reader, Sample, Tables, Writer};
    ///
    /// let mut writer = Writer::new(Cursor::new(Vec::new()), Options::default())?;
    /// writer.keep_checkpoints();
    /// let (mut base, mut records) = (None, Vec::new());
    /// for timestamp_us in 0..1000 {
    ///     writer.write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us, status: 3, frames: &[] })?;
    ///     if timestamp_us % 100 == 99 {
    ///         let checkpoint = writer.checkpoint()?;
    ///         if checkpoint.base.is_some() {
    ///             base = checkpoint.base;
    ///             records.clear();
    ///         }
    ///         records.extend_from_slice(checkpoint.records);
    ///     }
    /// }
    /// // All that a program that is killed leaves, names aside: the start of a file, and those records.
    /// let file = writer.into_unfinished();
    /// let mut reader = Reader::cut(file, &Options::default(), Tables::default(), None)?;
    /// assert!(reader.continue_with(&base.expect("the first one has it"), records)?);
    /// let mut samples = reader.samples()?;
    /// let mut count = 0;
    /// while let Ok(Some(_)) = samples.next_sample() {
    ///     count += 1;
    /// }
    /// assert_eq!(count, 1000);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the output fails, which breaks the file; after [`Writer::end_samples`].
    ///
    /// # Panics
    /// Without [`Writer::keep_checkpoints`].
    pub fn checkpoint(&mut self) -> Result<Checkpoint<'_>, WriteError> {
        self.count_repeats();
        if self.samples_end.is_some() {
            return Err(WriteError::Broken);
        }
        self.guard(|writer| {
            writer.output.bring(&mut writer.file)?;
            Ok(writer.file.flush()?)
        })?;
        let log = self.log.as_mut().expect("the caller prepared for it");
        let mut base = None;
        for thread in &mut self.threads {
            log.put_repeated(thread.id, thread.interpreter, &mut thread.pending);
        }
        if log.needs_base() {
            let (found, held_back) = self.output.base().expect("it was prepared for, too");
            log.begin(held_back);
            base = Some(found);
            for thread in &mut self.threads {
                thread.pending.forget_logged();
                log.put_repeated(thread.id, thread.interpreter, &mut thread.pending);
            }
        }
        Ok(log.checkpoint(base))
    }

    /// The output, with what was given to it so far: a file that was cut.
    #[must_use]
    pub fn into_unfinished(self) -> W {
        self.file
    }

    /// Ends the samples and frees the memory they needed. Only [`Writer::finish`] may follow. For callers that must
    /// stop a file before they have its tables.
    ///
    /// # Errors
    /// When the output fails, which breaks the file.
    pub fn end_samples(&mut self) -> Result<(), WriteError> {
        if self.samples_end.is_some() {
            return Ok(());
        }
        self.write_all_pending()?;
        self.guard(|writer| {
            writer.output.finish(&mut writer.file)?;
            Ok(writer.file.flush()?)
        })?;
        self.log = None;
        self.samples_end = Some(HEADER_LEN + self.output.written());
        for thread in &mut self.threads {
            thread.stack = Vec::new();
            thread.pending = Pending::default();
        }
        Ok(())
    }

    /// Writes the tables and completes the file. Returns the output, which is not synchronised to disk.
    ///
    /// Entries that no sample uses are legal; a sample's frame that the table lacks is not, and makes the file
    /// unreadable from that sample on.
    ///
    /// # Errors
    /// When the output fails or the tables do not fit the format.
    pub fn finish<S: AsRef<str>>(
        mut self,
        strings: impl IntoIterator<Item = S>,
        frames: impl IntoIterator<Item = Frame>,
        statistics: Option<&Statistics>,
    ) -> Result<(W, Summary), WriteError> {
        self.end_samples()?;
        let body = Body {
            samples: self.samples,
            threads: u32::try_from(self.threads.len()).map_err(|_| WriteError::TooMany("threads"))?,
            records: self.records,
            sample_bytes: self.output.taken(),
            stored_bytes: self.output.written(),
        };
        finish_file(self.file, &self.options, &body, strings, frames, statistics)
    }

    fn thread(&mut self, id: u64, interpreter: u32) -> Result<usize, WriteError> {
        if self.threads.get(self.last).is_some_and(|thread| (thread.id, thread.interpreter) == (id, interpreter)) {
            return Ok(self.last);
        }
        let count = self.threads.len();
        let index = *self.indices.entry((id, interpreter)).or_insert(count);
        if index == count {
            if u32::try_from(count + 1).is_err() {
                return Err(WriteError::TooMany("threads"));
            }
            self.threads.push(Thread {
                id,
                interpreter,
                timestamp_us: self.options.start_time_us,
                stack: Vec::new(),
                pending: Pending::default(),
            });
        }
        self.last = index;
        Ok(index)
    }

    /// Writes a thread's repeated samples as one record.
    fn write_pending(&mut self, index: usize) -> Result<(), WriteError> {
        let thread = &mut self.threads[index];
        if thread.pending.bytes().is_empty() {
            return Ok(());
        }
        if let Some(log) = &mut self.log {
            log.put_repeated(thread.id, thread.interpreter, &mut thread.pending);
        }
        let out = self.output.buffer();
        put_repeat_head(out, thread.id, thread.interpreter, thread.pending.count());
        out.extend_from_slice(thread.pending.bytes());
        self.records.repeat += 1;
        self.records.repeat_samples += u64::from(thread.pending.count());
        self.pending_bytes -= MAX_REPEAT_HEAD + thread.pending.bytes().len() as u64;
        thread.pending.clear();
        self.end_record()
    }

    /// Writes all threads' repeated samples, in order of the threads' first samples.
    fn write_all_pending(&mut self) -> Result<(), WriteError> {
        self.count_repeats();
        for index in 0..self.threads.len() {
            self.write_pending(index)?;
        }
        Ok(())
    }

    fn end_record(&mut self) -> Result<(), WriteError> {
        self.guard(|writer| Ok(writer.output.record_end(&mut writer.file)?))
    }

    /// After a failed write the file's contents are unknown: refuses all further ones.
    fn guard(&mut self, write: impl FnOnce(&mut Self) -> Result<(), WriteError>) -> Result<(), WriteError> {
        if self.broken {
            return Err(WriteError::Broken);
        }
        let result = write(self);
        self.broken = result.is_err();
        result
    }
}
