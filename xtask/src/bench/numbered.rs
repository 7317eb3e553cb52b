//! A program that numbers its work, beside a soak in segments: its numbers say whether samples are missing at a cut, or stand in
//! two segments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Steps until the numbers begin again: each is a line of one function, so the program's code stays what it is.
const STEPS: u64 = 1_000;
/// CPU time of a step: more than the longest interval at 99 Hz.
const STEP_MS: u64 = 20;
const FUNCTION: &str = "numbered_steps";

/// Writes the program.
///
/// # Errors
/// It could not be written.
pub(super) fn write(directory: &Path) -> Result<PathBuf> {
    let mut source = format!(
        "import os, time\n\
         parent = os.getppid()\n\
         end = time.thread_time()\n\
         def step():\n    \
             global end\n    \
             end += {STEP_MS} / 1000\n    \
             while time.thread_time() < end: sum(range(500))\n\
         def {FUNCTION}():\n"
    );
    source += &"    step()\n".repeat(STEPS as usize);
    source += &format!("while os.getppid() == parent: {FUNCTION}()\n");
    let path = directory.join("numbered.py");
    fs::write(&path, source).context("cannot write the program that numbers its work")?;
    Ok(path)
}

/// Most steps that no firing may have met, one after the other: other programs may have the CPU whenever the timer fires, but not
/// so often in a row.
const MOST_UNMET: u64 = 10;

/// Holds the steps in these files, in the order of time, against the order in which the program does them; returns how many
/// samples there are.
///
/// # Errors
/// A step came back, many are missing, they are missing at cuts more often than elsewhere, or a file cannot be read.
pub(super) fn check(profiler: &Path, files: &[PathBuf]) -> Result<u64> {
    let (mut last, mut samples) = (None, 0);
    let (mut within, mut at_cuts) = (Gaps::default(), Gaps::default());
    for file in files {
        let mut gaps = Some(&mut at_cuts);
        let output = Command::new(profiler).arg("export").arg(file).args(["--format", "jsonl", "-o", "-"]).output()?;
        ensure!(output.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&output.stderr));
        for line in String::from_utf8(output.stdout)?.lines() {
            let Some(step) = step(&serde_json::from_str(line)?) else { continue };
            let on = last.map_or(0, |last: u64| (step + STEPS - last) % STEPS);
            ensure!(on <= MOST_UNMET, "{}: step {step} after {last:?}, sample {samples}", file.display());
            gaps.take().unwrap_or(&mut within).count(on);
            (last, samples) = (Some(step), samples + 1);
        }
    }
    ensure!(at_cuts.are_as_in(&within), "steps are missing at cuts: {at_cuts:?}, elsewhere {within:?}");
    Ok(samples)
}

/// Pairs of samples, one right after the other, and how many of them have a step between them that was not met.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    pairs: u64,
    gaps: u64,
}

impl Gaps {
    fn count(&mut self, on: u64) {
        self.pairs += 1;
        self.gaps += u64::from(on > 1);
    }

    /// Whether there are no more of them than by chance (99.9 % of a Poisson distribution, roughly) if they are as frequent as others.
    fn are_as_in(&self, others: &Self) -> bool {
        let expected = self.pairs as f64 * others.gaps as f64 / others.pairs.max(1) as f64;
        self.gaps as f64 <= expected + 3.1 * expected.sqrt() + 3.0
    }
}

/// The step that a sample met.
fn step(sample: &Value) -> Option<u64> {
    let frames = sample["frames"].as_array()?;
    let frame = frames.iter().find(|frame| frame["function"] == FUNCTION)?;
    frame["line"].as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_at_cuts_are_told_from_chance() {
        let within = Gaps { pairs: 20_000, gaps: 400 };
        assert!(Gaps { pairs: 1_000, gaps: 20 }.are_as_in(&within));
        assert!(!Gaps { pairs: 1_000, gaps: 100 }.are_as_in(&within));
        assert!(!Gaps { pairs: 1_000, gaps: 4 }.are_as_in(&Gaps { pairs: 20_000, gaps: 0 }));
    }

    #[test]
    fn the_step_is_the_line_of_the_function() {
        let sample =
            serde_json::json!({"frames": [{"function": "<module>", "line": 7}, {"function": FUNCTION, "line": 12}]});
        assert_eq!(step(&sample), Some(12));
        assert_eq!(step(&serde_json::json!({"frames": []})), None);
    }
}
