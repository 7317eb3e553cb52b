//! Alternates two builds of the profiler on the same targets: what one row of the page costs with each, as a ratio.
//!
//! Figures from two runs of the benchmark are not comparable, because machines are shared. Here each round measures a
//! row with both builds, one right after the other, and every other round in reverse order.

use std::path::Path;

use anyhow::{Context, Result, bail};

use super::measure::{self, Bench, DEPTH, DEPTHS, NothingSelected, RATES_HZ, WARM_HZ};
use super::stats::{self, Interval};
use super::target::{Shape, Target};
use super::tools::{Aim, Tool};
use crate::zoo::Python;

/// What one row measures.
enum Work {
    /// A sample in the kernel, in nanoseconds.
    Sample { python: Python, depth: usize, rate_hz: u32, tool: Tool, through_c: usize },
    /// A run with nothing selected, in nanoseconds.
    Nothing,
    /// Process and BPF programs, in percent of a core.
    Whole { rate_hz: u32, tool: Tool },
    /// The process's peak memory, in MiB.
    Memory { tool: Tool },
}

struct Row {
    name: String,
    work: Work,
}

/// Measures every row whose name contains `part`, `rounds` times with both builds, and prints the table.
///
/// # Errors
/// A build does not run, or a profiler failed. A slower build is not an error.
pub(crate) fn run(bench: &mut Bench, other: &Path, rounds: usize, part: &str) -> Result<()> {
    if !other.is_file() {
        bail!("{} is no executable\nhint: --against takes the path of another build's tachyon-bpf", other.display());
    }
    let builds = [bench.tools.tachyon.clone(), other.to_path_buf()];
    let mut lines = vec![format!(
        "{:<58} {:>10} {:>10} {:>7}  95 % interval",
        "by turns, medians of the rounds", "this", "other", "ratio"
    )];
    let rows: Vec<Row> = rows(bench)?.into_iter().filter(|row| row.name.contains(part)).collect();
    if rows.is_empty() {
        bail!("no row has a name with {part:?} in it");
    }
    for row in rows {
        let mut values = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            for turn in 0..2 {
                let build = (round + turn) % 2;
                eprintln!("{}, round {} of {rounds}, {}", row.name, round + 1, ["this build", "the other"][build]);
                bench.tools.tachyon.clone_from(&builds[build]);
                values[build].push(row.work.measure(bench)?);
            }
        }
        lines.push(line(&row.name, &values)?);
        eprintln!("{}", lines.last().map_or("", String::as_str));
    }
    bench.tools.tachyon.clone_from(&builds[0]);
    println!("{}", lines.join("\n"));
    Ok(())
}

fn rows(bench: &Bench) -> Result<Vec<Row>> {
    let oldest = crate::zoo::in_pyenv("3.8").context("hint: pyenv install 3.8")?;
    let mut rows = vec![Row { name: format!("nothing selected, {WARM_HZ} Hz, ns"), work: Work::Nothing }];
    let pythons = [bench.counting.clone(), bench.ordinary(), bench.hashed.clone(), oldest];
    for python in &pythons {
        for (depth, rate_hz) in [(DEPTHS[0], WARM_HZ), (DEPTH, WARM_HZ), (DEPTH, RATES_HZ[0])] {
            let name = format!("{depth} frames of {}, {rate_hz} Hz, ns", python.name());
            let work = Work::Sample { python: python.clone(), depth, rate_hz, tool: Tool::Tachyon, through_c: 0 };
            rows.push(Row { name, work });
        }
    }
    rows.push(Row {
        name: format!("{DEPTH} Python and 20 native frames, {WARM_HZ} Hz, ns"),
        work: Work::Sample {
            python: bench.ordinary(),
            depth: DEPTH,
            rate_hz: WARM_HZ,
            tool: Tool::Native,
            through_c: measure::THROUGH_C,
        },
    });
    for (rate_hz, tool) in [(99, Tool::Tachyon), (99, Tool::Native), (1000, Tool::Tachyon), (1000, Tool::Native)] {
        let name = format!("whole profiler, {}, {rate_hz} Hz, % of a core", tool.name());
        rows.push(Row { name, work: Work::Whole { rate_hz, tool } });
    }
    for tool in [Tool::Tachyon, Tool::Native] {
        rows.push(Row { name: format!("peak memory, {}, MiB", tool.name()), work: Work::Memory { tool } });
    }
    Ok(rows)
}

impl Work {
    fn measure(&self, bench: &Bench) -> Result<f64> {
        match self {
            Self::Nothing => Ok(measure::nothing_selected(bench)?.warm_ns),
            Self::Sample { python, depth, rate_hz, tool, through_c } => {
                let target = Target::start(python, bench.cpu, Shape { through_c: *through_c, ..Shape::deep(*depth) })?;
                // Nearly every run meets the target: both builds are charged the same for the others.
                let nothing = NothingSelected { cold_ns: 700.0, warm_ns: 110.0 };
                measure::sample_cost(bench, &target, *tool, Aim::Pid(target.pid()), *rate_hz, nothing)
            }
            Self::Whole { rate_hz, tool } => {
                let target = bench.target(DEPTH, 0)?;
                Ok(bench.cost(*tool, Aim::Pid(target.pid()), *rate_hz, &target)?.share() * 100.0)
            }
            Self::Memory { tool } => {
                let target = bench.target(DEPTH, 0)?;
                let run = bench.begin(*tool, Aim::Pid(target.pid()), RATES_HZ[1])?;
                let _watched = bench.watch(&run, &target, bench.effort.kernel)?;
                Ok(run.finish()?.peak_rss_bytes as f64 / f64::from(1 << 20))
            }
        }
    }
}

/// Medians, and the ratio of each round with its interval.
fn line(name: &str, [this, other]: &[Vec<f64>; 2]) -> Result<String> {
    let ratios: Vec<f64> = this.iter().zip(other).map(|(this, other)| this / other).collect();
    let (Some(ours), Some(theirs), Some(ratio)) = (stats::median(this), stats::median(other), stats::median(&ratios))
    else {
        bail!("{name} was not measured");
    };
    let interval = Interval::of(&ratios)
        .map_or_else(String::new, |of| format!("{:.3} to {:.3}", of.mean - of.half, of.mean + of.half));
    Ok(format!("{name:<58} {ours:>10.3} {theirs:>10.3} {ratio:>7.3}  {interval}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_medians_and_the_ratio_of_its_rounds() {
        let row = line("cost", &[vec![2.0, 4.0, 6.0], vec![1.0, 4.0, 12.0]]).expect("three rounds");
        assert!(row.starts_with("cost "), "{row}");
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(words[1..4], ["4.000", "4.000", "1.000"]);
        assert!(line("cost", &[Vec::new(), Vec::new()]).is_err());
    }
}
