//! The TACH writer: however it is called, what it took is what is read, from a whole file and from one that was cut.

use std::io::Cursor;

use tachyon::tach::{Base, Compression, Frame, Layout, Options, Reader, Sample, Tables, Writer};

use crate::input::Rng;

/// Entries of the frame table.
const FRAMES: usize = 300;

/// Thread and interpreter, time, status, frames.
type Owned = ((u64, u32), u64, u8, Vec<u32>);

/// The records of the checkpoints since the newest base, and how many samples had been taken.
#[derive(Default)]
struct Kept {
    base: Option<Base>,
    records: Vec<u8>,
    samples: usize,
}

/// Calls in random order; returns whether all samples were taken.
pub(crate) fn write(_seeds: &[Vec<u8>], rng: &mut Rng) -> bool {
    let options = Options {
        compression: *rng.of(&[Compression::None, Compression::Zstd]),
        layout: *rng.of(&[Layout::Released, Layout::Early]),
        start_time_us: rng.odd(),
        max_sample_bytes: *rng.of(&[1 << 30, 1 << 30, 5_000]),
        ..Options::default()
    };
    let mut writer = Writer::new(Cursor::new(Vec::new()), options).expect("memory can be written");
    writer.keep_checkpoints();
    let threads = 1 + rng.below(5);
    let mut stacks = vec![Vec::<u32>::new(); threads];
    let (mut taken, mut kept, mut all) = (Vec::<Owned>::new(), Kept::default(), true);
    for _ in 0..rng.below(2_000) {
        if rng.below(100) == 0 {
            checkpoint(&mut writer, &mut kept, taken.len());
        }
        let index = rng.below(threads);
        if rng.below(3) == 0 {
            change(&mut stacks[index], rng);
        }
        let (thread_id, interpreter_id) = (index as u64 / 2, u32::try_from(index % 2).expect("it is small"));
        let timestamp_us =
            if rng.below(50) == 0 { rng.odd() } else { taken.last().map_or(0, |last| last.1.wrapping_add(999)) };
        let (status, frames) = (rng.next().to_le_bytes()[0], stacks[index].as_slice());
        match writer.write_sample(&Sample { thread_id, interpreter_id, timestamp_us, status, frames }) {
            Ok(()) => taken.push(((thread_id, interpreter_id), timestamp_us, status, frames.to_vec())),
            Err(_) => all = false,
        }
    }
    assert_eq!(writer.samples(), taken.len() as u64);
    let frames = || (0..FRAMES).map(|_| Frame::without_location(0, 0));
    let found = if rng.below(2) == 0 {
        checkpoint(&mut writer, &mut kept, taken.len());
        let tables = Tables::new([""], frames().collect());
        let file = writer.into_unfinished();
        let mut reader = Reader::cut(file, &options, tables, None).expect("memory can be read");
        let base = kept.base.expect("the first checkpoint has one");
        assert!(reader.continue_with(&base, kept.records).expect("memory can be read"), "it is this file's");
        taken.truncate(kept.samples);
        samples(reader, false)
    } else {
        let (file, summary) = writer.finish([""], frames(), None).expect("memory can be written");
        assert_eq!(summary.samples, taken.len() as u64);
        samples(Reader::new(file).expect("what was written can be opened"), true)
    };
    // For each thread, in the given order.
    taken.sort_by_key(|sample| sample.0);
    assert!(found == taken, "{} samples found, {} given", found.len(), taken.len());
    all
}

fn checkpoint(writer: &mut Writer<Cursor<Vec<u8>>>, kept: &mut Kept, samples: usize) {
    let checkpoint = writer.checkpoint().expect("memory can be written");
    if checkpoint.base.is_some() {
        kept.base = checkpoint.base;
        kept.records.clear();
    }
    kept.records.extend_from_slice(checkpoint.records);
    kept.samples = samples;
}

/// Exchanges inner frames; now and then the stack gets deeper than the format allows.
fn change(stack: &mut Vec<u32>, rng: &mut Rng) {
    let outer = stack.split_off(rng.below(stack.len() + 1));
    let most = if rng.below(30) == 0 { 300 } else { 8 };
    *stack = (0..rng.below(most)).map(|_| u32::try_from(rng.below(FRAMES)).expect("it is small")).collect();
    stack.extend(outer);
    if stack.len() > 256 && rng.below(4) != 0 {
        stack.truncate(256);
    }
}

/// The samples of a file, up to its end or to where it was cut.
fn samples(mut reader: Reader<Cursor<Vec<u8>>>, whole: bool) -> Vec<Owned> {
    let mut found = Vec::new();
    let mut samples = match reader.samples() {
        Ok(samples) => samples,
        Err(error) => panic!("{error}"),
    };
    loop {
        match samples.next_sample() {
            Ok(Some(sample)) => found.push((
                (sample.thread_id, sample.interpreter_id),
                sample.timestamp_us,
                sample.status,
                sample.frames.to_vec(),
            )),
            Ok(None) => break,
            Err(error) => {
                assert!(!whole, "{error}");
                break;
            }
        }
    }
    found.sort_by_key(|sample: &Owned| sample.0);
    found
}
