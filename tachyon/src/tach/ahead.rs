//! Samples read by a thread of their own, so that decoding one file and writing another do not share a CPU.

use super::{ReadError, Reader, RecordCounts, Sample};
use std::io::{self, Seek};
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::Scope;

/// Most samples in a batch: enough that handing it over costs nothing, few enough to stay in a CPU's cache.
const MAX_SAMPLES: usize = 1024;
/// Most frames in a batch: with deep stacks fewer samples fit.
const MAX_FRAMES: usize = 64 * 1024;
/// Most times in a batch: of samples that repeat one stack more fit.
const MAX_TIMES: usize = 64 * 1024;
/// Most batches that are read and not yet taken.
const QUEUE: usize = 4;

/// Samples that differ only in their times, which are in [`Batch::times_us`] along with others, as their stack is in
/// [`Batch::frames`].
struct Entry {
    thread_id: u64,
    interpreter_id: u32,
    status: u8,
    times: Range<usize>,
    frames: Range<usize>,
}

/// The totals of all samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Read {
    pub records: RecordCounts,
    /// Bytes of the records, decompressed.
    pub bytes: u64,
}

#[derive(Default)]
struct Batch {
    entries: Vec<Entry>,
    frames: Vec<u32>,
    times_us: Vec<u64>,
    /// What comes after the last sample.
    end: Option<Result<Read, ReadError>>,
}

/// The samples of a file, as from [`super::Samples`].
pub(crate) struct ReadAhead {
    full: Receiver<Batch>,
    empty: Sender<Batch>,
    batch: Batch,
    next: usize,
    read: Option<Read>,
}

impl ReadAhead {
    /// Starts to read. The thread ends with the file, or when the receiving end is dropped.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start<'scope, 'env, R: io::Read + Seek + Send>(
        scope: &'scope Scope<'scope, 'env>,
        reader: &'env mut Reader<R>,
    ) -> io::Result<Self> {
        let ((full_in, full), (empty, empty_out)) = (sync_channel(QUEUE), channel());
        let thread = std::thread::Builder::new().name("tachyon-decode".to_owned());
        thread.spawn_scoped(scope, move || read(reader, &full_in, &empty_out))?;
        Ok(Self { full, empty, batch: Batch::default(), next: 0, read: None })
    }

    /// The next samples that differ only in their times, and all their times, or `None` after the last.
    ///
    /// # Errors
    /// As [`super::Samples::next_sample`], and when the samples cannot be read at all.
    pub fn next_run(&mut self) -> Result<Option<(Sample<'_>, &mut [u64])>, ReadError> {
        while self.next >= self.batch.entries.len() {
            match self.batch.end.take() {
                Some(Ok(read)) => {
                    self.batch.end = Some(Ok(read));
                    self.read = Some(read);
                    return Ok(None);
                }
                Some(Err(error)) => {
                    self.batch.end = Some(Ok(Read::default()));
                    return Err(error);
                }
                None => {}
            }
            // If that thread panicked, joining it makes this one panic, too.
            let Ok(batch) = self.full.recv() else { return Ok(None) };
            // At the end nothing takes it.
            let _gone = self.empty.send(std::mem::replace(&mut self.batch, batch));
            self.next = 0;
        }
        let Entry { thread_id, interpreter_id, status, times, frames } = &self.batch.entries[self.next];
        self.next += 1;
        let times_us = &mut self.batch.times_us[times.clone()];
        let frames = &self.batch.frames[frames.clone()];
        let (thread_id, interpreter_id, status) = (*thread_id, *interpreter_id, *status);
        Ok(Some((Sample { thread_id, interpreter_id, timestamp_us: times_us[0], status, frames }, times_us)))
    }

    /// The totals of all samples, once they are at their end.
    pub fn read(&self) -> Read {
        self.read.unwrap_or_default()
    }
}

fn read<R: io::Read + Seek>(reader: &mut Reader<R>, full: &SyncSender<Batch>, empty: &Receiver<Batch>) {
    let mut samples = match reader.samples() {
        Ok(samples) => samples,
        Err(error) => {
            // If the receiver is gone, nothing waits for this any more: here and below.
            let _gone = full.send(Batch { end: Some(Err(error)), ..Batch::default() });
            return;
        }
    };
    loop {
        let mut batch = empty.try_recv().unwrap_or_default();
        batch.entries.clear();
        batch.frames.clear();
        batch.times_us.clear();
        batch.end = None;
        while batch.entries.len() < MAX_SAMPLES && batch.frames.len() < MAX_FRAMES && batch.times_us.len() < MAX_TIMES {
            let first = batch.times_us.len();
            match samples.next_run(&mut batch.times_us, MAX_TIMES - first) {
                Ok(Some(sample)) => push(&mut batch.entries, &mut batch.frames, &sample, first..batch.times_us.len()),
                Ok(None) => batch.end = Some(Ok(Read { records: samples.records(), bytes: samples.bytes_read() })),
                Err(error) => batch.end = Some(Err(error)),
            }
            if batch.end.is_some() {
                break;
            }
        }
        let last = batch.end.is_some();
        if full.send(batch).is_err() || last {
            return;
        }
    }
}

fn push(entries: &mut Vec<Entry>, all: &mut Vec<u32>, sample: &Sample<'_>, times: Range<usize>) {
    let &Sample { thread_id, interpreter_id, status, frames, .. } = sample;
    // Repeated stacks are stored once.
    let frames = match entries.last() {
        Some(last) if all[last.frames.clone()] == *frames => last.frames.clone(),
        _ => {
            let start = all.len();
            all.extend_from_slice(frames);
            start..all.len()
        }
    };
    entries.push(Entry { thread_id, interpreter_id, status, times, frames });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn fixture(name: &str) -> Vec<u8> {
        std::fs::read(format!("../tests/golden/tach/{name}.tach")).unwrap()
    }

    type Seen = (Vec<(u64, u32, u64, u8, Vec<u32>)>, Option<String>);

    fn seen(sample: &Sample<'_>) -> (u64, u32, u64, u8, Vec<u32>) {
        (sample.thread_id, sample.interpreter_id, sample.timestamp_us, sample.status, sample.frames.to_vec())
    }

    fn plain(bytes: &[u8]) -> Seen {
        let (mut reader, mut all) = (Reader::new(Cursor::new(bytes)).unwrap(), Vec::new());
        let mut samples = match reader.samples() {
            Ok(samples) => samples,
            Err(error) => return (all, Some(error.to_string())),
        };
        loop {
            match samples.next_sample() {
                Ok(Some(sample)) => all.push(seen(&sample)),
                Ok(None) => return (all, None),
                Err(error) => return (all, Some(error.to_string())),
            }
        }
    }

    fn ahead(bytes: &[u8]) -> Seen {
        let (mut reader, mut all) = (Reader::new(Cursor::new(bytes)).unwrap(), Vec::new());
        std::thread::scope(|scope| {
            let mut samples = ReadAhead::start(scope, &mut reader).unwrap();
            loop {
                match samples.next_run() {
                    Ok(Some((sample, times_us))) => {
                        all.extend(times_us.iter().map(|&timestamp_us| seen(&Sample { timestamp_us, ..sample })));
                    }
                    Ok(None) => return (all, None),
                    Err(error) => {
                        assert!(samples.next_run().unwrap().is_none(), "an error is the end");
                        return (all, Some(error.to_string()));
                    }
                }
            }
        })
    }

    #[test]
    fn the_same_samples_and_errors() {
        let mut failed = 0;
        for entry in std::fs::read_dir("../tests/golden/tach").unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            if path.extension().is_none_or(|extension| extension != "tach") || Reader::new(Cursor::new(&bytes)).is_err()
            {
                continue;
            }
            let told = plain(&bytes);
            failed += usize::from(told.1.is_some());
            assert_eq!(ahead(&bytes), told, "{}", path.display());
        }
        assert!(failed > 0, "some fixtures are damaged");
    }

    #[test]
    fn who_stops_early_stops_the_thread() {
        let bytes = fixture("v03_record_types");
        let mut reader = Reader::new(Cursor::new(&bytes)).unwrap();
        std::thread::scope(|scope| {
            let mut samples = ReadAhead::start(scope, &mut reader).unwrap();
            assert!(samples.next_run().unwrap().is_some());
        });
    }
}
