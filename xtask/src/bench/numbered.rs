//! A program that numbers its work, running during a soak in segments: its numbers show whether samples are missing at a cut, or
//! appear in two segments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

/// Steps until the numbers start over: each is a line of one function, so the program's code does not change.
const STEPS: u64 = 1_000;
/// CPU time of a step: six intervals at 99 Hz. Now and then the timer meets another program on this CPU, above all at a cut, when
/// the profiler itself has work, but not this many times in a row.
const STEP_MS: u64 = 60;
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

/// Checks the steps in these files, in order of time, against the order in which the program does them; returns how many
/// samples there are.
///
/// # Errors
/// A step came back or is missing, or a file cannot be read.
pub(super) fn check(profiler: &Path, files: &[PathBuf]) -> Result<u64> {
    let (mut last, mut samples) = (None, 0);
    for file in files {
        let output = Command::new(profiler).arg("export").arg(file).args(["--format", "jsonl", "-o", "-"]).output()?;
        ensure!(output.status.success(), "{}: {}", file.display(), String::from_utf8_lossy(&output.stderr));
        for line in String::from_utf8(output.stdout)?.lines() {
            let Some(step) = step(&serde_json::from_str(line)?) else { continue };
            let on = last.map_or(0, |last: u64| (step + STEPS - last) % STEPS);
            // No firing may have met the end of one and the beginning of the next: two steps in a row were lost.
            ensure!(on <= 2, "{}: step {step} after {last:?}, sample {samples}", file.display());
            (last, samples) = (Some(step), samples + 1);
        }
    }
    Ok(samples)
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
    fn the_step_is_the_line_of_the_function() {
        let sample =
            serde_json::json!({"frames": [{"function": "<module>", "line": 7}, {"function": FUNCTION, "line": 12}]});
        assert_eq!(step(&sample), Some(12));
        assert_eq!(step(&serde_json::json!({"frames": []})), None);
    }
}
