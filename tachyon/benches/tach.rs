//! The TACH writer and reader by their CPU time, for `cargo xtask bench`. Prints one JSON object.
//!
//! `write IN OUT COUNT` writes COUNT samples: those of the file IN, held in memory before the clock starts, over and over; `read FILE`
//! reads a file to its end; `zstd FILE` compresses the bytes of its samples again, by zstd alone with the writer's parameters.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context, Result, bail};
use tachyon::tach::{Compression, Frame, HEADER_LEN, Layout, Options, Reader, Sample, Writer};

/// A sample whose stack lies in a list of its own.
struct Held {
    thread_id: u64,
    interpreter_id: u32,
    timestamp_us: u64,
    status: u8,
    stack: usize,
}

fn main() -> Result<()> {
    // `cargo bench` passes `--bench` to every benchmark, also to those without a harness.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", from, to, count] => write(from.as_ref(), to.as_ref(), count.parse()?),
        ["read", from] => read(from.as_ref()),
        ["zstd", from] => compress(from.as_ref()),
        // Run by hand without words there is nothing to measure.
        [] => Ok(()),
        _ => bail!("write IN OUT COUNT, read FILE, or zstd FILE"),
    }
}

/// CPU time of this process: other work on the machine does not count.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel writes a whole timespec, which lives.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0, "every Linux has this clock");
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn open(path: &Path) -> Result<Reader<BufReader<File>>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    Ok(Reader::new(BufReader::new(file))?)
}

fn tell(seconds: f64, samples: u64, path: &Path) -> Result<()> {
    let bytes = std::fs::metadata(path)?.len();
    println!("{{\"seconds\":{seconds},\"samples\":{samples},\"bytes\":{bytes}}}");
    Ok(())
}

fn write(from: &Path, to: &Path, count: usize) -> Result<()> {
    let mut reader = open(from)?;
    let header = *reader.header();
    let (mut held, mut stacks, mut known) = (Vec::new(), Vec::<Vec<u32>>::new(), std::collections::HashMap::new());
    let mut samples = reader.samples()?;
    while let Some(sample) = samples.next_sample()? {
        let stack = *known.entry(sample.frames.to_vec()).or_insert_with(|| {
            stacks.push(sample.frames.to_vec());
            stacks.len() - 1
        });
        let Sample { thread_id, interpreter_id, timestamp_us, status, .. } = sample;
        held.push(Held { thread_id, interpreter_id, timestamp_us, status, stack });
    }
    let tables = reader.tables();
    let strings: Vec<String> = (0..).map_while(|index| tables.string(index)).map(str::to_owned).collect();
    let frames: Vec<Frame> = tables.frames().to_vec();
    let options = Options { compression: Compression::Zstd, layout: Layout::Released, ..Options::from(&header) };
    let end_us = held.iter().map(|sample| sample.timestamp_us).max().context("no samples")?;
    let round_us = end_us - header.start_time_us;
    let begin = cpu_seconds();
    let file = BufWriter::with_capacity(256 * 1024, File::create(to)?);
    let mut writer = Writer::new(file, options)?;
    let (mut left, mut later_us) = (count, 0);
    while left > 0 {
        for held in held.iter().take(left) {
            let &Held { thread_id, interpreter_id, timestamp_us, status, stack } = held;
            let (timestamp_us, frames) = (timestamp_us + later_us, &stacks[stack]);
            writer.write_sample(&Sample { thread_id, interpreter_id, timestamp_us, status, frames })?;
        }
        left = left.saturating_sub(held.len());
        later_us += round_us;
    }
    let (file, summary) = writer.finish(&strings, frames, None)?;
    drop(file);
    tell(cpu_seconds() - begin, summary.samples, to)
}

fn read(from: &Path) -> Result<()> {
    let begin = cpu_seconds();
    let mut reader = open(from)?;
    let mut samples = reader.samples()?;
    let mut count = 0;
    while samples.next_sample()?.is_some() {
        count += 1;
    }
    tell(cpu_seconds() - begin, count, from)
}

/// The least that a writer takes: zstd, given the writer's 64 KiB at a time, to memory.
fn compress(from: &Path) -> Result<()> {
    let header = *open(from)?.header();
    let file = std::fs::read(from)?;
    let samples = &file[usize::try_from(HEADER_LEN)?..usize::try_from(header.string_table_offset)?];
    let raw = zstd::decode_all(samples)?;
    let mut out = vec![0; raw.len()];
    let begin = cpu_seconds();
    let mut encoder = zstd::stream::write::Encoder::new(out.as_mut_slice(), 5)?;
    encoder.window_log(21)?;
    for piece in raw.chunks(64 * 1024) {
        encoder.write_all(piece)?;
    }
    encoder.finish()?;
    tell(cpu_seconds() - begin, header.sample_count, from)
}
