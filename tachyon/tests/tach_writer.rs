//! The TACH writer and reader against each other, over samples no fixture has.

use std::io::{Cursor, Write};
use tachyon::tach::{Compression, Frame, Options, Reader, Sample, WriteError, Writer};

/// A small generator of pseudo-random numbers: the same ones on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Owned {
    thread: (u64, u32),
    timestamp_us: u64,
    status: u8,
    frames: Vec<u32>,
}

const FRAMES: u32 = 40_000;

/// Samples of interleaved threads whose stacks change as programs' do: mostly repeats, else at the inner end.
fn samples(random: &mut Random, count: usize) -> Vec<Owned> {
    let mut threads = vec![Vec::<u32>::new(); 7];
    let mut time = 1_000_u64;
    (0..count)
        .map(|_| {
            time = time.wrapping_add(random.below(20_000)).wrapping_sub(random.below(50));
            let index = random.below(7);
            let stack = &mut threads[usize::try_from(index).unwrap()];
            if random.below(3) == 0 {
                let pop = if random.below(10) == 0 { 256 } else { random.below(6) };
                let keep = stack.len().saturating_sub(usize::try_from(pop).unwrap());
                let outer = stack.split_off(stack.len() - keep);
                let push = usize::try_from(random.below(8)).unwrap().min(256 - outer.len());
                *stack = (0..push).map(|_| u32::try_from(random.below(u64::from(FRAMES))).unwrap()).collect();
                stack.extend(outer);
            }
            Owned {
                thread: (index / 2 + (1 << 40), u32::try_from(index % 2).unwrap()),
                timestamp_us: time,
                status: u8::try_from(random.below(64)).unwrap(),
                frames: stack.clone(),
            }
        })
        .collect()
}

fn sample(owned: &Owned) -> Sample<'_> {
    let (thread_id, interpreter_id) = owned.thread;
    let Owned { timestamp_us, status, ref frames, .. } = *owned;
    Sample { thread_id, interpreter_id, timestamp_us, status, frames }
}

fn read(file: &[u8]) -> Vec<Owned> {
    let mut reader = Reader::new(Cursor::new(file)).unwrap();
    let mut samples = reader.samples().unwrap();
    let mut out = Vec::new();
    while let Some(sample) = samples.next_sample().unwrap() {
        out.push(Owned {
            thread: (sample.thread_id, sample.interpreter_id),
            timestamp_us: sample.timestamp_us,
            status: sample.status,
            frames: sample.frames.to_vec(),
        });
    }
    out
}

fn frames() -> impl Iterator<Item = Frame> {
    (0..FRAMES).map(|_| Frame::without_location(0, 0))
}

/// Per thread, in the order given.
fn by_thread(mut samples: Vec<Owned>) -> Vec<Owned> {
    samples.sort_by_key(|sample| sample.thread);
    samples
}

#[test]
fn what_is_written_is_read() {
    let mut random = Random(88_172_645_463_325_252);
    let given = samples(&mut random, 30_000);
    for compression in [Compression::None, Compression::Zstd] {
        for every in [usize::MAX, 1_000] {
            let options = Options { compression, start_time_us: 1_000, ..Options::default() };
            let mut writer = Writer::new(Cursor::new(Vec::new()), options).unwrap();
            for (number, owned) in given.iter().enumerate() {
                writer.write_sample(&sample(owned)).unwrap();
                if number % every == every - 1 {
                    writer.checkpoint().unwrap();
                }
            }
            let (file, summary) = writer.finish([""], frames(), None).unwrap();
            assert_eq!(summary.samples, given.len() as u64);
            assert_eq!(summary.records.samples(), summary.samples);
            assert!(
                [summary.records.repeat, summary.records.full, summary.records.suffix, summary.records.pop_push]
                    .iter()
                    .all(|&count| count > 100)
            );
            assert_eq!(by_thread(read(file.get_ref())), by_thread(given.clone()), "{compression:?} {every}");
        }
    }
}

#[test]
fn a_checkpoint_brings_every_sample_to_the_file() {
    let mut file = Cursor::new(Vec::new());
    let options = Options { compression: Compression::Zstd, ..Options::default() };
    let mut writer = Writer::new(&mut file, options).unwrap();
    for timestamp_us in 0..500 {
        writer
            .write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us, status: 1, frames: &[0] })
            .unwrap();
    }
    writer.checkpoint().unwrap();
    drop(writer);
    let mut out = Vec::new();
    let mut decoder = zstd::stream::write::Decoder::new(&mut out).unwrap();
    decoder.write_all(&file.get_ref()[64..]).unwrap();
    decoder.flush().unwrap();
    drop(decoder);
    // One FULL record of 17 bytes; 499 samples as pairs of two bytes after a head of 15.
    assert_eq!(out.len(), 17 + 15 + 2 * 499);
}

#[test]
fn what_the_format_cannot_hold_is_refused_and_leaves_the_file_whole() {
    let mut writer = Writer::new(Cursor::new(Vec::new()), Options::default()).unwrap();
    let deep = vec![0; 257];
    let refused =
        writer.write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 1, status: 0, frames: &deep });
    assert!(matches!(refused, Err(WriteError::TooDeep(257))));
    let taken = Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 1, status: 0, frames: &deep[..256] };
    writer.write_sample(&taken).unwrap();
    let (file, _) = writer.finish([""], [Frame::without_location(0, 0)], None).unwrap();
    assert_eq!(read(file.get_ref()).len(), 1);
}

#[test]
fn a_compressed_file_stops_before_its_limit() {
    // Stacks of 256 frames with five-byte indices that never repeat: 1,314 bytes a sample at most.
    const LIMIT: u64 = 1 << 22;
    for step in [1, 40_000] {
        let options = Options { max_sample_bytes: LIMIT, ..Options::default() };
        let mut writer = Writer::new(Cursor::new(Vec::new()), options).unwrap();
        let mut stack = vec![u32::MAX; 256];
        let mut written = 0_u64;
        while !writer.would_overflow() {
            // Of two threads one repeats its stack: what is kept back counts, too.
            let thread_id = written % 2;
            stack[255] = u32::MAX - u32::try_from(thread_id * (written / step)).unwrap();
            let sample = Sample { thread_id, interpreter_id: 0, timestamp_us: written, status: 0, frames: &stack };
            writer.write_sample(&sample).unwrap();
            written += 1;
        }
        let sample = Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 0, status: 0, frames: &stack };
        assert!(matches!(writer.write_sample(&sample), Err(WriteError::Full)));
        let (_, summary) = writer.finish([""; 0], [], None).unwrap();
        assert!(summary.sample_bytes <= LIMIT, "{}", summary.sample_bytes);
        assert!(summary.sample_bytes > LIMIT - 4096, "{}", summary.sample_bytes);
        assert_eq!(summary.samples, written);
    }
    let writer = Writer::new(Cursor::new(Vec::new()), Options { compression: Compression::None, ..Options::default() });
    assert!(!writer.unwrap().would_overflow());
}

/// An output that fails after some bytes.
struct FullDisk(Cursor<Vec<u8>>, usize);

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.get_ref().len() + bytes.len() > self.1 {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl std::io::Seek for FullDisk {
    fn seek(&mut self, position: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.seek(position)
    }
}

#[test]
fn a_failed_write_breaks_the_file_for_good() {
    let options = Options { compression: Compression::None, ..Options::default() };
    let mut writer = Writer::new(FullDisk(Cursor::new(Vec::new()), 100), options).unwrap();
    let sample = Sample { thread_id: 1, interpreter_id: 0, timestamp_us: 1, status: 0, frames: &[0; 50] };
    writer.write_sample(&sample).unwrap();
    assert!(matches!(writer.flush(), Err(WriteError::Io(_))));
    assert!(matches!(writer.write_sample(&sample), Err(WriteError::Broken)));
    assert!(matches!(writer.finish([""], [Frame::without_location(0, 0)], None), Err(WriteError::Broken)));
}
