//! The TACH writer and reader against each other, with samples that no fixture has.

use std::cell::RefCell;
use std::io::{Cursor, Write};
use std::rc::Rc;
use tachyon::tach::{Base, Compression, Frame, Options, Reader, Sample, Tables, WriteError, Writer};

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

/// Samples of interleaved threads whose stacks change as programs' do: mostly repeats, otherwise changes at the inner end.
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
        out.push(owned(&sample));
    }
    out
}

fn owned(sample: &Sample<'_>) -> Owned {
    Owned {
        thread: (sample.thread_id, sample.interpreter_id),
        timestamp_us: sample.timestamp_us,
        status: sample.status,
        frames: sample.frames.to_vec(),
    }
}

fn frames() -> impl Iterator<Item = Frame> {
    (0..FRAMES).map(|_| Frame::without_location(0, 0))
}

/// By thread, each in the given order.
fn by_thread(mut samples: Vec<Owned>) -> Vec<Owned> {
    samples.sort_by_key(|sample| sample.thread);
    samples
}

#[test]
fn what_is_written_is_read() {
    let mut random = Random(88_172_645_463_325_252);
    let given = samples(&mut random, 30_000);
    for compression in [Compression::None, Compression::Zstd] {
        let options = Options { compression, start_time_us: 1_000, ..Options::default() };
        let mut writer = Writer::new(Cursor::new(Vec::new()), options).unwrap();
        given.iter().for_each(|owned| writer.write_sample(&sample(owned)).unwrap());
        let (file, summary) = writer.finish([""], frames(), None).unwrap();
        assert_eq!(summary.samples, given.len() as u64);
        assert_eq!(summary.records.samples(), summary.samples);
        let records = summary.records;
        assert!([records.repeat, records.full, records.suffix, records.pop_push].iter().all(|&count| count > 100));
        assert_eq!(by_thread(read(file.get_ref())), by_thread(given.clone()), "{compression:?}");
    }
}

/// An output that can be read while it is written, as another program would see it.
#[derive(Clone, Default)]
struct Shared(Rc<RefCell<Cursor<Vec<u8>>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl std::io::Seek for Shared {
    fn seek(&mut self, position: std::io::SeekFrom) -> std::io::Result<u64> {
        self.0.borrow_mut().seek(position)
    }
}

/// What a reader finds in a file that was cut, with the records of its checkpoints.
fn continued(file: Vec<u8>, options: &Options, base: &Base, records: &[u8]) -> Option<Vec<Owned>> {
    let tables = Tables::new([""], frames().collect());
    let mut reader = Reader::cut(Cursor::new(file), options, tables, None).unwrap();
    if !reader.continue_with(base, records.to_vec()).unwrap() {
        return None;
    }
    let (mut samples, mut out) = (reader.samples().unwrap(), Vec::new());
    while let Ok(Some(sample)) = samples.next_sample() {
        out.push(owned(&sample));
    }
    Some(out)
}

/// However many checkpoints: the file stays what it is without them, and with their records has every sample at each.
#[test]
fn checkpoints_change_no_byte_and_lack_no_sample() {
    let mut random = Random(88_172_645_463_325_252);
    let given = samples(&mut random, 60_000);
    for compression in [Compression::None, Compression::Zstd] {
        let options = Options { compression, start_time_us: 1_000, ..Options::default() };
        let mut plain = Writer::new(Cursor::new(Vec::new()), options).unwrap();
        given.iter().for_each(|owned| plain.write_sample(&sample(owned)).unwrap());
        let (plain, _) = plain.finish([""], frames(), None).unwrap();
        for every in [1_000, 7_001, 25_000] {
            let file = Shared::default();
            let mut writer = Writer::new(file.clone(), options).unwrap();
            writer.keep_checkpoints();
            let (mut base, mut records, mut bases, mut most) = (None, Vec::new(), 0, 0);
            for (number, owned) in given.iter().enumerate() {
                writer.write_sample(&sample(owned)).unwrap();
                if number % every != every - 1 {
                    continue;
                }
                let checkpoint = writer.checkpoint().unwrap();
                if checkpoint.base.is_some() {
                    (base, bases, most) = (checkpoint.base, bases + 1, checkpoint.max_len());
                    records.clear();
                }
                records.extend_from_slice(checkpoint.records);
                assert!(records.len() <= most, "{} of {most}", records.len());
                let base = base.as_ref().expect("the first checkpoint has one");
                let file = file.0.borrow().get_ref().clone();
                let found = continued(file, &options, base, &records).expect("it is this file's, and in it");
                assert_eq!(by_thread(found), by_thread(given[..=number].to_vec()), "{compression:?} {every} {number}");
            }
            // There is about a megabyte of records.
            assert!(bases > 1, "{bases}");
            writer.finish([""], frames(), None).unwrap();
            assert!(file.0.borrow().get_ref() == plain.get_ref(), "{compression:?} {every}: it is another file");
        }
    }
}

#[test]
fn records_of_another_file_are_refused() {
    let write = |options: Options, status| {
        let mut writer = Writer::new(Cursor::new(Vec::new()), options).unwrap();
        writer.keep_checkpoints();
        let frames: Vec<u32> = (0..200).collect();
        for number in 0..2_000_u64 {
            let frames = &frames[..usize::try_from(number % 200).unwrap()];
            writer
                .write_sample(&Sample { thread_id: 1, interpreter_id: 0, timestamp_us: number, status, frames })
                .unwrap();
        }
        let checkpoint = writer.checkpoint().unwrap();
        let (base, records) = (checkpoint.base.unwrap(), checkpoint.records.to_vec());
        (writer.into_unfinished().into_inner(), base, records)
    };
    for compression in [Compression::None, Compression::Zstd] {
        let options = Options { compression, ..Options::default() };
        let (file, base, records) = write(options, 1);
        assert!(base.len > 100_000, "{base:?}");
        assert_eq!(continued(file.clone(), &options, &base, &records).unwrap().len(), 2_000);
        // From a file that differs in its samples, or begins at another time; and from one that ends before the base.
        let (other, other_base, _) = write(options, 2);
        assert_eq!(other_base.len, base.len);
        assert!(continued(other, &options, &base, &records).is_none());
        let (later, ..) = write(Options { start_time_us: 1, ..options }, 1);
        assert!(continued(later, &Options { start_time_us: 1, ..options }, &base, &records).is_none());
        assert!(continued(file[..file.len() / 2].to_vec(), &options, &base, &records).is_none());
        let past = Base { len: u64::MAX, ..base };
        assert!(continued(file, &options, &past, &records).is_none());
    }
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
            // One of the two threads repeats its stack: what is held back counts too.
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
    writer.keep_checkpoints();
    writer.write_sample(&sample).unwrap();
    assert!(matches!(writer.checkpoint(), Err(WriteError::Io(_))));
    assert!(matches!(writer.write_sample(&sample), Err(WriteError::Broken)));
    assert!(matches!(writer.finish([""], [Frame::without_location(0, 0)], None), Err(WriteError::Broken)));
}
