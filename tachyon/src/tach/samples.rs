//! Turns records into samples, one at a time.

use super::bytes::Bytes;
use super::header::ByteOrder;
use super::{
    Compression, Header, MAX_DEPTH, MAX_SAMPLE_BYTES, RECORD_HEAD_LEN, ReadError, RecordCounts, Sample, Section,
    Tables, encoding,
};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::io::{self, Read, Take};
use zstd::stream::read::Decoder;

/// The sample bytes of a file, decompressed.
enum Stored<'a, R: Read> {
    Plain(Take<&'a mut R>),
    Zstd(Box<Decoder<'static, io::BufReader<Take<&'a mut R>>>>),
}

impl<R: Read> Read for Stored<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(source) => source.read(out),
            Self::Zstd(source) => source.read(out),
        }
    }
}

/// The first stored bytes, and bytes that replace the rest.
pub(super) struct Source<'a, R: Read> {
    stored: Take<Stored<'a, R>>,
    rest: &'a [u8],
}

impl<'a, R: Read> Source<'a, R> {
    /// `source` is positioned at the first sample byte. `end`: where another end replaces the stored one.
    pub(super) fn new(source: &'a mut R, header: &Header, end: Option<(u64, &'a [u8])>) -> Result<Self, ReadError> {
        let (limit, rest) = end.unwrap_or((u64::MAX, &[]));
        let len = header.string_table_offset.saturating_sub(super::HEADER_LEN);
        let source = source.take(len);
        let stored = match header.compression {
            Compression::Zstd if limit > 0 && len == 0 => return Err(ReadError::EmptyZstd),
            Compression::Zstd if limit > 0 => Stored::Zstd(Box::new(Decoder::new(source).map_err(ReadError::Io)?)),
            _ => Stored::Plain(source),
        };
        Ok(Self { stored: stored.take(limit), rest })
    }
}

impl<R: Read> Read for Source<'_, R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let count = self.stored.read(out)?;
        if count > 0 || out.is_empty() { Ok(count) } else { self.rest.read(out) }
    }
}

/// Distinguishes a broken zstd stream from a failed disk.
pub(super) fn zstd_fault(error: io::Error) -> ReadError {
    if error.raw_os_error().is_some() {
        ReadError::Io(error)
    } else if error.kind() == io::ErrorKind::UnexpectedEof {
        ReadError::IncompleteZstd
    } else {
        ReadError::Zstd(error)
    }
}

/// What a thread's next record refers to.
struct Thread {
    id: u64,
    interpreter: u32,
    timestamp_us: u64,
    stack: Stack,
}

/// A stack, innermost first, at the end of its memory: frames come and go at its start, and none moves.
#[derive(Default)]
struct Stack {
    memory: Vec<u32>,
    start: usize,
}

impl Stack {
    fn frames(&self) -> &[u32] {
        &self.memory[self.start..]
    }

    fn depth(&self) -> usize {
        self.memory.len() - self.start
    }

    /// Keeps the outermost `kept` frames and puts room for `new` ones before them, which the caller fills.
    fn change(&mut self, kept: usize, new: usize) -> &mut [u32] {
        let depth = kept + new;
        if depth > self.memory.len() {
            // Grows with what the file contains, and not beyond what is allowed: `depth` was checked.
            let mut memory = vec![0; depth.next_power_of_two()];
            let from = self.memory.len() - kept;
            let to = memory.len() - kept;
            memory[to..].copy_from_slice(&self.memory[from..]);
            self.memory = memory;
        }
        self.start = self.memory.len() - depth;
        &mut self.memory[self.start..][..new]
    }
}

/// The samples of a file, in the order of its records: time order for each thread, not across threads.
///
/// Returned by [`super::Reader::samples`]. Memory grows with the number of threads, not with the number of samples.
/// Samples before a bad record come before its error, as in CPython.
pub struct Samples<'a, R: Read> {
    bytes: Bytes<Source<'a, R>>,
    tables: &'a Tables,
    /// By frame: whether it and its names exist.
    usable: Vec<bool>,
    byte_order: ByteOrder,
    declared_samples: u64,
    declared_threads: u32,
    start_time_us: u64,
    threads: Vec<Thread>,
    indices: HashMap<(u64, u32), usize, RandomState>,
    /// The thread of the last record.
    last: usize,
    records: RecordCounts,
    /// The thread of a REPEAT record that is under way, and how many samples it still has.
    repeat: Option<(usize, u32)>,
    /// The end or an error was met.
    done: bool,
}

impl<'a, R: Read> Samples<'a, R> {
    /// The sample bytes are to come from `source`.
    pub(super) fn new(source: Source<'a, R>, header: &Header, tables: &'a Tables) -> Self {
        let most = MAX_SAMPLE_BYTES + source.rest.len() as u64;
        let bytes = match header.compression {
            Compression::None => Bytes::new(source, Section::Samples, ReadError::Io, u64::MAX),
            Compression::Zstd => Bytes::new(source, Section::Samples, zstd_fault, most),
        };
        Self {
            bytes,
            tables,
            usable: tables.usable(),
            byte_order: header.byte_order,
            declared_samples: header.sample_count,
            declared_threads: header.thread_count,
            start_time_us: header.start_time_us,
            threads: Vec::new(),
            indices: HashMap::default(),
            last: 0,
            records: RecordCounts::default(),
            repeat: None,
            done: false,
        }
    }

    /// What the samples' frames point into.
    #[must_use]
    pub fn tables(&self) -> &'a Tables {
        self.tables
    }

    /// The records read so far; of a REPEAT record under way, the samples returned so far.
    #[must_use]
    pub fn records(&self) -> RecordCounts {
        self.records
    }

    /// Distinct pairs of thread and interpreter so far.
    #[must_use]
    pub fn thread_count(&self) -> usize {
        self.threads.len()
    }

    /// Bytes of the records read so far, decompressed.
    #[must_use]
    pub fn bytes_read(&self) -> u64 {
        self.bytes.consumed()
    }

    /// The next sample, or `None` after the last. Every frame and string index in it is valid.
    ///
    /// # Errors
    /// When the file is damaged; then nothing more can be read.
    pub fn next_sample(&mut self) -> Result<Option<Sample<'_>>, ReadError> {
        if self.done {
            return Ok(None);
        }
        // Reset below; an error leaves it set.
        self.done = true;
        let Some((index, status)) = self.step()? else { return Ok(None) };
        self.done = false;
        let thread = &self.threads[index];
        Ok(Some(Sample {
            thread_id: thread.id,
            interpreter_id: thread.interpreter,
            timestamp_us: thread.timestamp_us,
            status,
            frames: thread.stack.frames(),
        }))
    }

    /// The next sample, with those that follow it in the same record and have its status: all times, its own first, are added
    /// to `times_us`, `most` at most. Thousands of samples that repeat one stack cost little more than one.
    ///
    /// # Errors
    /// As [`Samples::next_sample`].
    pub fn next_run(&mut self, times_us: &mut Vec<u64>, most: usize) -> Result<Option<Sample<'_>>, ReadError> {
        if self.done {
            return Ok(None);
        }
        // Reset below; an error leaves it set.
        self.done = true;
        let Some((index, status)) = self.step()? else { return Ok(None) };
        self.done = false;
        let thread = &mut self.threads[index];
        let first_us = thread.timestamp_us;
        times_us.push(first_us);
        if let Some((_, left)) = &mut self.repeat {
            let room = u32::try_from(most.saturating_sub(1)).unwrap_or(u32::MAX);
            let taken = self.bytes.pairs(room.min(*left), status, |delta| {
                thread.timestamp_us = thread.timestamp_us.wrapping_add(delta);
                times_us.push(thread.timestamp_us);
            });
            *left -= taken;
            self.records.repeat_samples += u64::from(taken);
        }
        Ok(Some(Sample {
            thread_id: thread.id,
            interpreter_id: thread.interpreter,
            timestamp_us: first_us,
            status,
            frames: thread.stack.frames(),
        }))
    }

    /// Reads up to the next sample: its thread's place in [`Self::threads`] and its status.
    fn step(&mut self) -> Result<Option<(usize, u8)>, ReadError> {
        loop {
            if let Some((index, left)) = self.repeat {
                self.repeat = left.checked_sub(1).map(|left| (index, left));
                if left == 0 {
                    continue;
                }
                let status = self.time_and_status(index)?;
                self.records.repeat_samples += 1;
                return Ok(Some((index, status)));
            }
            let available = self.bytes.have(RECORD_HEAD_LEN)?;
            if available == 0 {
                let found = self.records.samples();
                if found != self.declared_samples {
                    return Err(ReadError::SampleCountMismatch { declared: self.declared_samples, found });
                }
                return Ok(None);
            }
            if available < RECORD_HEAD_LEN {
                return Err(ReadError::TrailingBytes(available));
            }
            let head: [u8; RECORD_HEAD_LEN] = self.bytes.array()?;
            let [id @ .., a, b, c, d, encoding] = head;
            let (id, interpreter) = (self.byte_order.u64(id), self.byte_order.u32([a, b, c, d]));
            let index = self.thread(id, interpreter)?;
            if encoding == encoding::REPEAT {
                self.repeat = Some((index, self.bytes.varint_u32()?));
                self.records.repeat += 1;
                continue;
            }
            if encoding > encoding::POP_PUSH {
                return Err(ReadError::UnknownEncoding(encoding));
            }
            let status = self.time_and_status(index)?;
            self.change_stack(index, encoding)?;
            return Ok(Some((index, status)));
        }
    }

    fn time_and_status(&mut self, index: usize) -> Result<u8, ReadError> {
        let delta = self.bytes.varint_u64()?;
        let thread = &mut self.threads[index];
        thread.timestamp_us = thread.timestamp_us.wrapping_add(delta);
        self.bytes.u8()
    }

    fn change_stack(&mut self, index: usize, encoding: u8) -> Result<(), ReadError> {
        let depth = self.threads[index].stack.depth();
        let (kept, new) = match encoding {
            encoding::FULL => {
                self.records.full += 1;
                (0, self.bytes.varint_u32()?)
            }
            encoding::SUFFIX => {
                self.records.suffix += 1;
                let shared = self.bytes.varint_u32()?;
                let kept = usize::try_from(shared).unwrap_or(usize::MAX);
                if kept > depth {
                    return Err(ReadError::SharedTooDeep { shared, depth });
                }
                (kept, self.bytes.varint_u32()?)
            }
            _ => {
                self.records.pop_push += 1;
                let popped = usize::try_from(self.bytes.varint_u32()?).unwrap_or(usize::MAX);
                (depth.saturating_sub(popped), self.bytes.varint_u32()?)
            }
        };
        let total = kept as u64 + u64::from(new);
        if total > MAX_DEPTH as u64 {
            return Err(ReadError::TooDeep(total));
        }
        // The file has the new frames innermost first, too.
        let mut places = self.threads[index].stack.change(kept, new as usize).iter_mut();
        let (tables, usable) = (self.tables, &self.usable);
        self.bytes.varints_u32(new, |frame| {
            if usable.get(frame as usize) != Some(&true) {
                tables.check(frame)?;
            }
            *places.next().expect("there is room for as many as are read") = frame;
            Ok(())
        })
    }

    fn thread(&mut self, id: u64, interpreter: u32) -> Result<usize, ReadError> {
        if self.threads.get(self.last).is_some_and(|thread| (thread.id, thread.interpreter) == (id, interpreter)) {
            return Ok(self.last);
        }
        if let Some(&index) = self.indices.get(&(id, interpreter)) {
            self.last = index;
            return Ok(index);
        }
        let index = self.threads.len();
        if index as u64 >= u64::from(self.declared_threads) {
            return Err(ReadError::TooManyThreads(self.declared_threads));
        }
        let timestamp_us = self.start_time_us;
        self.threads.push(Thread { id, interpreter, timestamp_us, stack: Stack::default() });
        self.indices.insert((id, interpreter), index);
        Ok(index)
    }
}
