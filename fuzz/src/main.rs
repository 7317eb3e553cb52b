//! Fuzzers of everything that decodes foreign bytes: `cargo run -p tachyon-fuzz -- --seconds 60 [TARGET...]`.
//!
//! Seeded and deterministic on stable Rust, with nothing to install: an execution is (target, seed, number), and can be
//! repeated by itself. A finding is a panic, an execution that takes too long, or one that allocates too much. It is
//! reported with the command that repeats it, and ends the run with status 1. `docs/dev/fuzzing.md` has the numbers.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use tachyon_fuzz::input::Rng;
use tachyon_fuzz::targets::{Run, TARGETS, Target, corpus_of};
use tachyon_fuzz::{MOST_BYTES, SLOW, covered, cpu_time, gauge};

/// Fuzzes the decoders of tachyon-bpf.
#[derive(Parser)]
struct Args {
    /// Seconds for each target
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// Where the dice start
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Runs only the execution of this number
    #[arg(long)]
    only: Option<u64>,
    /// Only writes the seeds, as inputs of the fuzzers led by coverage: a folder for each target
    #[arg(long, value_name = "DIR")]
    write_seeds: Option<PathBuf>,
    /// Targets; all when there is none
    targets: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let known = |name: &String| TARGETS.iter().any(|target| target.name == name);
    if let Some(unknown) = args.targets.iter().find(|name| !known(name)) {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("tachyon-fuzz: no target {unknown}\nhint: there are {}", names.join(", "));
        return ExitCode::from(2);
    }
    let wanted = |target: &&Target| args.targets.is_empty() || args.targets.iter().any(|name| name == target.name);
    if let Some(dir) = &args.write_seeds {
        return match TARGETS.iter().filter(wanted).try_for_each(|target| write_seeds(target, dir)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("tachyon-fuzz: cannot write to {}: {error}", dir.display());
                ExitCode::FAILURE
            }
        };
    }
    if args.only.is_none() && args.targets.is_empty() {
        println!("{} inputs of the corpora are decoded within their bounds", covered::run_corpora());
    }
    let findings: u64 = TARGETS.iter().filter(wanted).map(|target| fuzz(target, &args)).sum();
    if findings == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn write_seeds(target: &Target, dir: &Path) -> std::io::Result<()> {
    let dir = dir.join(target.name);
    std::fs::create_dir_all(&dir)?;
    (target.seeds)().iter().enumerate().try_for_each(|(number, seed)| {
        let input = [seed.as_slice(), &[0; covered::DICE]].concat();
        std::fs::write(dir.join(format!("seed-{number:02}")), input)
    })
}

/// Runs one target for its time. Returns the number of findings; the first one ends it.
fn fuzz(target: &Target, args: &Args) -> u64 {
    let mut seeds = (target.seeds)();
    if let Run::Bytes(_) = target.run {
        seeds.extend(corpus_of(target.name).iter().map(|input| covered::split(input).0.to_vec()));
    }
    let start = Instant::now();
    let end = Duration::from_secs(args.seconds);
    let (mut slowest, mut most, mut useful, mut executions) = (Duration::ZERO, 0, 0_u64, 0_u64);
    let numbers = args.only.map_or(0..u64::MAX, |only| only..only.saturating_add(1));
    for number in numbers {
        if start.elapsed() >= end && args.only.is_none() {
            break;
        }
        let mut rng = Rng::new(args.seed, number);
        let before = gauge::begin();
        let begin = cpu_time();
        let outcome = catch_unwind(AssertUnwindSafe(|| match target.run {
            Run::Bytes(run) => run(&rng.mutated(&seeds), &mut rng),
            Run::Dice(run) => run(&seeds, &mut rng),
        }));
        let (took, peak) = (cpu_time().saturating_sub(begin), gauge::peak_since(before));
        executions += 1;
        useful += u64::from(matches!(outcome, Ok(true)));
        slowest = slowest.max(took);
        most = most.max(peak);
        let wrong = match outcome {
            Err(_) => Some("it panicked".to_owned()),
            Ok(_) if took > SLOW => Some(format!("it took {took:?}")),
            Ok(_) if peak > MOST_BYTES => Some(format!("it allocated {peak} bytes")),
            Ok(_) => None,
        };
        if let Some(wrong) = wrong {
            let (name, seed) = (target.name, args.seed);
            println!("{name}: {wrong}\nhint: cargo run -p tachyon-fuzz -- --seed {seed} --only {number} {name}");
            return 1;
        }
    }
    println!(
        "{:<14} {executions:>10} executions in {:.0} s, {useful:>10} accepted; slowest {slowest:.1?}, peak {} KiB",
        target.name,
        start.elapsed().as_secs_f64(),
        most >> 10
    );
    0
}
