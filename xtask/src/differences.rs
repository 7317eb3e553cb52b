//! The long form of `diff`'s trials: programs are recorded, pairs are drawn from the recordings, and what `diff` says about them is
//! counted. The tests in `tachyon/tests/differences.rs` are the short form, with recordings that are committed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::{bench, command, zoo};

/// Arguments of `cargo xtask differences`.
#[derive(clap::Args)]
pub(crate) struct DifferencesArgs {
    /// Pairs of each trial
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pairs: u32,
    /// Recordings of each program
    #[arg(long, value_name = "N", default_value_t = 4)]
    recordings: u32,
    /// Seconds of each recording
    #[arg(long, value_name = "N", default_value_t = 25)]
    seconds: u32,
    /// Use builds without optimisation, and few pairs: whether this works
    #[arg(long, conflicts_with = "pairs")]
    quick: bool,
    /// Record into this directory, and use what is there already
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// Programs of `tests/programs`: threads, phases, processes.
const PROGRAMS: [&str; 3] = ["orders", "batch", "served_by_three"];
/// Blocks per side, and how many consecutive ones are kept as they were recorded.
const BLOCKS: &str = "120";
const RUN: &str = "6";
const HZ: &str = "499";

/// A line of the benchmark `differences`.
#[derive(Debug, Deserialize)]
struct Trial {
    trial: String,
    pairs: u64,
    count: u64,
    most: Option<u64>,
    least: Option<u64>,
    samples: Option<f64>,
}

impl Trial {
    fn holds(&self) -> bool {
        self.most.is_none_or(|most| self.count <= most) && self.least.is_none_or(|least| self.count >= least)
    }

    fn row(&self, program: &str) -> String {
        let Self { trial, pairs, count, .. } = self;
        let bound = match (self.most, self.least) {
            (Some(most), _) => format!("at most {most}"),
            (None, Some(least)) => format!("at least {least}, with {:.0} samples", self.samples.unwrap_or_default()),
            (None, None) => "none: two runs of a program are seldom quite the same".to_owned(),
        };
        let verdict = if self.holds() { "" } else { " **broken**" };
        format!("| {program} | {trial} | {count} of {pairs} | {bound}{verdict} |")
    }
}

/// Runs `cargo xtask differences`.
///
/// # Errors
/// Not root, a program cannot be recorded, or a count is beyond its bound.
pub(crate) fn run(args: &DifferencesArgs) -> Result<()> {
    command::require_root("loading BPF programs")?;
    let (tachyon, trials) = if args.quick {
        (bench::build_unoptimised()?, bench::benchmark("differences", &["--profile", "dev"])?)
    } else {
        (bench::build()?, bench::benchmark("differences", &[])?)
    };
    let pairs = if args.quick { 50 } else { args.pairs };
    // The number of samples needed for finding makes it cost more than all other trials.
    let found = pairs.div_ceil(5);
    let temporary = tempfile::tempdir().context("cannot make a directory")?;
    let directory = args.keep.as_deref().unwrap_or(temporary.path());
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    println!("| program | pairs that differ in | significant | bound |\n|---|---|---:|---|");
    let mut broken = 0;
    for program in PROGRAMS {
        let recordings = recordings(args, &tachyon, program, directory)?;
        for (trial, pairs) in [("same", pairs), ("moved", pairs), ("rate", pairs), ("found", found)] {
            let mut line = Command::new(&trials);
            line.args([trial, &pairs.to_string(), BLOCKS, RUN]).args(&recordings);
            broken += tell(program, &mut line)?;
        }
        if recordings.len() > 1 {
            broken += tell(program, Command::new(&trials).arg("pairs").args(&recordings))?;
        }
    }
    ensure!(broken == 0, "{broken} counts are beyond the bound that chance passes once in 1,000 times");
    Ok(())
}

/// Prints what a run of the benchmark says. Returns how many counts are out of bounds.
fn tell(program: &str, line: &mut Command) -> Result<usize> {
    let mut broken = 0;
    for line in command::stdout(line)?.lines() {
        let trial: Trial = serde_json::from_str(line).with_context(|| format!("the benchmark says {line:?}"))?;
        println!("{}", trial.row(program));
        broken += usize::from(!trial.holds());
    }
    Ok(broken)
}

fn recordings(args: &DifferencesArgs, tachyon: &Path, program: &str, directory: &Path) -> Result<Vec<PathBuf>> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let source = command::project_root().join("tests/programs").join(program).with_extension("py");
    let record = |number| {
        let file = directory.join(format!("{program}-{number}.tach"));
        if !file.exists() {
            let seconds = args.seconds.to_string();
            let mut line = Command::new(tachyon);
            line.args(["-F", HZ, "-o"]).arg(&file).arg("--").arg(&python).arg(&source).arg(seconds);
            command::run_quietly(&format!("recording {program} for {} s", args.seconds), &mut line)?;
        }
        Ok(file)
    };
    (0..args.recordings).map(record).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_beyond_its_bound_is_told() {
        let trial = |text: &str| serde_json::from_str::<Trial>(text).unwrap();
        let same = trial(r#"{"trial": "same", "pairs": 1000, "count": 23, "most": 22}"#);
        assert!(!same.holds() && same.row("x").ends_with("**broken** |"));
        let found = trial(r#"{"trial": "found", "pairs": 200, "count": 170, "least": 140, "samples": 2e6}"#);
        assert!(found.holds());
        assert_eq!(found.row("x"), "| x | found | 170 of 200 | at least 140, with 2000000 samples |");
        assert!(!trial(r#"{"trial": "found", "pairs": 200, "count": 139, "least": 140, "samples": 2e6}"#).holds());
        assert!(trial(r#"{"trial": "pairs", "pairs": 6, "count": 6, "rows": {"a": 2}}"#).holds());
    }
}
