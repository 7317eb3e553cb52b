//! Samples read by a thread of their own, so that decoding one file and writing another take turns on no CPU.

use super::{ReadError, Reader, Sample};
use std::io::{self, Read, Seek};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::Scope;

/// Samples of a batch: enough that handing it over costs nothing, few enough to stay in a CPU's cache.
const MAX_SAMPLES: usize = 1024;
/// Frames of a batch: of deep stacks fewer samples fit.
const MAX_FRAMES: usize = 64 * 1024;
/// Batches that are read and not yet taken.
const QUEUE: usize = 4;

/// A sample whose stack lies with others in [`Batch::frames`].
struct Entry {
    thread_id: u64,
    interpreter_id: u32,
    timestamp_us: u64,
    status: u8,
    start: usize,
    end: usize,
}

#[derive(Default)]
struct Batch {
    entries: Vec<Entry>,
    frames: Vec<u32>,
    /// What comes after the last sample.
    end: Option<Result<(), ReadError>>,
}

/// The samples of a file, as [`super::Samples`] has them.
pub(crate) struct ReadAhead {
    full: Receiver<Batch>,
    empty: Sender<Batch>,
    batch: Batch,
    next: usize,
}

impl ReadAhead {
    /// Starts to read. The thread ends with the file, or when the receiving end is dropped.
    ///
    /// # Errors
    /// When there can be no thread.
    pub fn start<'scope, 'env, R: Read + Seek + Send>(
        scope: &'scope Scope<'scope, 'env>,
        reader: &'env mut Reader<R>,
    ) -> io::Result<Self> {
        let ((full_in, full), (empty, empty_out)) = (sync_channel(QUEUE), channel());
        let thread = std::thread::Builder::new().name("tachyon-decode".to_owned());
        thread.spawn_scoped(scope, move || read(reader, &full_in, &empty_out))?;
        Ok(Self { full, empty, batch: Batch::default(), next: 0 })
    }

    /// The next sample, or `None` after the last.
    ///
    /// # Errors
    /// As [`super::Samples::next_sample`], and when the samples cannot be had at all.
    pub fn next_sample(&mut self) -> Result<Option<Sample<'_>>, ReadError> {
        while self.next >= self.batch.entries.len() {
            match self.batch.end.take() {
                Some(Ok(())) => {
                    self.batch.end = Some(Ok(()));
                    return Ok(None);
                }
                Some(Err(error)) => {
                    self.batch.end = Some(Ok(()));
                    return Err(error);
                }
                None => {}
            }
            // A thread that panicked takes this one along when both are joined.
            let Ok(batch) = self.full.recv() else { return Ok(None) };
            // At the end nobody wants it.
            let _gone = self.empty.send(std::mem::replace(&mut self.batch, batch));
            self.next = 0;
        }
        let Entry { thread_id, interpreter_id, timestamp_us, status, start, end } = self.batch.entries[self.next];
        self.next += 1;
        Ok(Some(Sample { thread_id, interpreter_id, timestamp_us, status, frames: &self.batch.frames[start..end] }))
    }
}

fn read<R: Read + Seek>(reader: &mut Reader<R>, full: &SyncSender<Batch>, empty: &Receiver<Batch>) {
    let mut samples = match reader.samples() {
        Ok(samples) => samples,
        Err(error) => {
            // Nobody waits any more when the receiver is gone: here and below.
            let _gone = full.send(Batch { end: Some(Err(error)), ..Batch::default() });
            return;
        }
    };
    loop {
        let mut batch = empty.try_recv().unwrap_or_default();
        batch.entries.clear();
        batch.frames.clear();
        batch.end = None;
        while batch.entries.len() < MAX_SAMPLES && batch.frames.len() < MAX_FRAMES {
            match samples.next_sample() {
                Ok(Some(sample)) => batch.push(&sample),
                Ok(None) => batch.end = Some(Ok(())),
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

impl Batch {
    fn push(&mut self, sample: &Sample<'_>) {
        let &Sample { thread_id, interpreter_id, timestamp_us, status, frames } = sample;
        // Repeated stacks are told once.
        let (start, end) = match self.entries.last() {
            Some(last) if self.frames[last.start..last.end] == *frames => (last.start, last.end),
            _ => {
                let start = self.frames.len();
                self.frames.extend_from_slice(frames);
                (start, self.frames.len())
            }
        };
        self.entries.push(Entry { thread_id, interpreter_id, timestamp_us, status, start, end });
    }
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
                match samples.next_sample() {
                    Ok(Some(sample)) => all.push(seen(&sample)),
                    Ok(None) => return (all, None),
                    Err(error) => {
                        assert!(samples.next_sample().unwrap().is_none(), "an error is the end");
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
            assert!(samples.next_sample().unwrap().is_some());
        });
    }
}
