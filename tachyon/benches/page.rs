//! A large profile to open the HTML report with: `cargo bench -p tachyon --bench page -- write OUT SAMPLES STACKS` writes a TACH file
//! of a made-up service whose calls branch as those of a program do. The same words give the same file.

use std::collections::HashSet;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result, bail};
use tachyon::profile::{Frame, FrameId, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink, TachSink};

/// Functions of the program, files that they are in, and how many others each calls.
const FUNCTIONS: usize = 3000;
const FILES: usize = 180;
const CALLEES: usize = 7;
/// Frames of a stack.
const SHALLOWEST: usize = 12;
const DEEPEST: usize = 45;
const THREADS: u32 = 24;
const INTERVAL_US: u64 = 10_000;

fn main() -> Result<()> {
    // `cargo bench` passes `--bench` to every benchmark, also to those without a harness.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["write", to, samples, stacks] => write(to.as_ref(), samples.parse()?, stacks.parse()?),
        // Run by hand without words there is nothing to measure.
        [] => Ok(()),
        _ => bail!("write OUT SAMPLES STACKS"),
    }
}

/// A number below `most`, the low ones more often.
fn skewed(random: &mut fastrand::Rng, most: usize) -> usize {
    let share = random.f64();
    (share * share * share * most as f64) as usize
}

fn write(to: &Path, count: usize, distinct: usize) -> Result<()> {
    let mut random = fastrand::Rng::with_seed(13);
    let mut profile = Profile::default();
    profile.meta.start_us = 1_000_000;
    profile.meta.start_unix = 1_700_000_000.0;
    profile.meta.interval_us = INTERVAL_US;
    for number in 0..4 {
        profile.processes.push(Process { pid: 100 + number, comm: "service".into(), ..Process::default() });
    }
    for tid in 0..THREADS {
        let name = format!("worker-{tid}");
        let thread = Thread { tid, ns_tid: tid, unique_tid: tid.into(), name, process: tid % 4, ..Thread::default() };
        profile.threads.push(thread);
    }
    // Whom each function calls, and at which lines.
    let callees: Vec<Vec<(usize, i32)>> = (0..FUNCTIONS)
        .map(|_| (0..CALLEES).map(|_| (random.usize(..FUNCTIONS), random.i32(1..60))).collect())
        .collect();
    let files: Vec<_> =
        (0..FILES).map(|file| profile.strings.intern(&format!("/srv/app/part{}/module{file}.py", file % 12))).collect();
    let names: Vec<_> = (0..FUNCTIONS)
        .map(|function| profile.strings.intern(&format!("Class{}.method_{function}", function % 400)))
        .collect();
    let mut frame = |function: usize, line: i32| {
        let lineno = 1 + (function as i32 % 50) * 60 + line;
        let frame = Frame::without_location(files[function % FILES], names[function]);
        profile.frames.intern(Frame { lineno, end_lineno: lineno, ..frame })
    };
    let mut stacks: Vec<Vec<FrameId>> = Vec::new();
    let mut known = HashSet::new();
    while stacks.len() < distinct {
        let depth = random.usize(SHALLOWEST..DEEPEST);
        let (mut at, mut frames) = (0, Vec::new());
        for _ in 1..depth {
            let (next, line) = callees[at][skewed(&mut random, CALLEES)];
            frames.push(frame(at, line));
            at = next;
        }
        frames.push(frame(at, random.i32(1..60)));
        frames.reverse();
        if known.insert(frames.clone()) {
            stacks.push(frames);
        }
    }
    let file = BufWriter::new(File::create(to).with_context(|| format!("cannot make {}", to.display()))?);
    let mut sink = TachSink::new(file, &profile.meta, TachOptions::default())?;
    let mut time_us = profile.meta.start_us;
    for number in 0..count {
        // Each stack once, and some of them very often.
        let stack = if number < distinct { number } else { skewed(&mut random, distinct) };
        let thread = ThreadId(random.u32(..THREADS));
        let sample = Sample {
            thread,
            time_us,
            status: random.u8(2..4),
            frames: &stacks[stack],
            merge: Merge::Exact,
            work: None,
        };
        sink.sample(&profile, &sample)?;
        time_us += INTERVAL_US / 8;
    }
    let duration_s = (time_us - profile.meta.start_us) as f64 / 1e6;
    let stops = [("complete".to_owned(), count as u64)].into();
    let report = Report { stored: count as u64, duration_s, rate_hz: 100.0, stops, ..Report::default() };
    sink.finish(&profile, &report)?;
    Ok(())
}
