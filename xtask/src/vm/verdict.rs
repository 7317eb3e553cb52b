//! What a guest sent, held against what it must be: the known stack, the account, a quiet kernel log.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// A stack is cut now and then by a page that cannot be read at that moment, so not every one can be exact.
const EXACT_SHARE: f64 = 0.99;

/// 3 s at 199 Hz are 597 samples. A loaded machine takes time from the emulated processors, whose timers then fire late
/// (405 were seen): stacks are judged here, counts on the host.
const FEWEST_SAMPLES: u64 = 150;

/// A program of more than 1,000,000 verified instructions is refused (`BPF_COMPLEXITY_LIMIT_INSNS`), and kernels count
/// differently.
const MOST_VERIFIED: u32 = 750_000;

/// The part of the report that is judged here: `ran = stored + idle + filtered + not_python + Σ loss`.
#[derive(Deserialize)]
struct Account {
    ran: u64,
    stored: u64,
    idle: u64,
    filtered: u64,
    not_python: u64,
    loss: std::collections::BTreeMap<String, u64>,
}

/// A frame that must be there: a function, and the lines it may be on.
#[derive(Debug, PartialEq)]
struct Expected<'a> {
    function: &'a str,
    first_line: u32,
    last_line: u32,
}

/// Judges a guest's files and sums them up in a line.
///
/// # Errors
/// One of the promises is broken; the message says which, and ends with what the profiler printed.
pub(crate) fn judge(results: &Path, with_profiler: bool) -> Result<String> {
    let read = |name: &str| {
        let bytes = fs::read(results.join(name)).with_context(|| format!("the guest sent no {name}"))?;
        Ok::<_, anyhow::Error>(String::from_utf8_lossy(&bytes).into_owned())
    };
    let kernel = read("kernel")?;
    let dmesg = read("dmesg")?;
    if let Some(line) = complaint(&dmesg) {
        anyhow::bail!("the kernel complained: {line}");
    }
    let target = read("target")?;
    let expected = expected(&target)?;
    ensure!(target.ends_with("ready\n"), "python did not get ready: {}", read("target.log").unwrap_or_default());
    let mut summary = format!("{}, python ready with {} frames", kernel.trim(), expected.len());
    if !with_profiler {
        return Ok(summary);
    }
    let said = ["doctor", "record.log", "export.log"].map(|name| read(name).unwrap_or_default()).join("");
    judge_recording(&read, &expected, &mut summary).with_context(|| format!("the profiler said:\n{said}"))?;
    Ok(summary)
}

fn judge_recording(
    read: &impl Fn(&str) -> Result<String>,
    expected: &[Expected<'_>],
    summary: &mut String,
) -> Result<()> {
    for step in ["record", "export"] {
        let status = read(&format!("{step}.status"))?;
        ensure!(status.trim() == "0", "{step} ended with status {}", status.trim());
    }
    let account: Account = serde_json::from_str(&read("report.json")?).context("the report is no account")?;
    let loss: u64 = account.loss.values().sum();
    let sum = account.stored + account.idle + account.filtered + account.not_python + loss;
    ensure!(
        account.ran == sum,
        "ran {} times, but stored {}, idle {}, filtered {}, not Python {} and lost {loss} make {sum}",
        account.ran,
        account.stored,
        account.idle,
        account.filtered,
        account.not_python,
    );
    let collapsed = read("out.collapsed")?;
    let (exact, total) = count(&collapsed, expected)?;
    ensure!(total == account.stored, "{total} samples exported, {} stored", account.stored);
    ensure!(total >= FEWEST_SAMPLES, "{total} samples, at least {FEWEST_SAMPLES} wanted");
    #[expect(clippy::cast_precision_loss, reason = "a few hundred samples")]
    let share = exact as f64 / total as f64;
    ensure!(share >= EXACT_SHARE, "{exact} of {total} stacks exact; exported:\n{}", first_lines(&collapsed));
    write!(summary, "; {exact} of {total} stacks exact, {loss} lost").context("cannot sum up")?;
    // One line for each descriptor of a program; kernels before 5.16 do not tell the number.
    let programs = read("programs")?;
    let verified: Vec<&str> = programs
        .lines()
        .filter_map(|program| program.split_once("verified_insns:")?.1.split_whitespace().next())
        .collect();
    for count in &verified {
        let count: u32 = count.parse().with_context(|| format!("verified_insns is {count:?}"))?;
        ensure!(count < MOST_VERIFIED, "{count} instructions of a program were verified: no room for other kernels");
    }
    if !verified.is_empty() {
        write!(summary, "; instructions verified: {}", verified.join(", ")).context("cannot sum up")?;
    }
    Ok(())
}

/// The first line of the kernel's log that speaks of a fault.
fn complaint(dmesg: &str) -> Option<&str> {
    dmesg
        .lines()
        .find(|line| ["WARNING:", "BUG:", "Oops", "Call Trace:", "rcu: INFO"].iter().any(|bad| line.contains(bad)))
}

/// The target's lines `frame NAME FIRST LAST`, root first.
fn expected(target: &str) -> Result<Vec<Expected<'_>>> {
    let frames = target.lines().filter_map(|line| line.strip_prefix("frame "));
    frames
        .map(|frame| match frame.split(' ').collect::<Vec<_>>()[..] {
            [function, first, last] => Ok(Expected { function, first_line: first.parse()?, last_line: last.parse()? }),
            _ => anyhow::bail!("the target printed `frame {frame}`"),
        })
        .collect()
}

/// Samples with exactly the expected stack, and all samples: lines `tid:N;file:function:line;... COUNT`.
fn count(collapsed: &str, expected: &[Expected<'_>]) -> Result<(u64, u64)> {
    let (mut exact, mut total) = (0, 0);
    for line in collapsed.lines() {
        let (stack, samples) = line.rsplit_once(' ').with_context(|| format!("no count in the line {line}"))?;
        let samples: u64 = samples.parse().with_context(|| format!("no count in the line {line}"))?;
        total += samples;
        let frames = stack.split(';').skip_while(|frame| frame.starts_with("tid:")).collect::<Vec<_>>();
        if frames.len() == expected.len() && frames.iter().zip(expected).all(|(frame, expected)| fits(frame, expected))
        {
            exact += samples;
        }
    }
    Ok((exact, total))
}

fn fits(frame: &str, expected: &Expected<'_>) -> bool {
    let mut parts = frame.rsplitn(3, ':');
    let line = parts.next().and_then(|line| line.parse::<u32>().ok());
    let function = parts.next();
    let file = parts.next().is_some_and(|file| file.rsplit('/').next() == Some("known_stack.py"));
    file && function == Some(expected.function)
        && line.is_some_and(|line| (expected.first_line..=expected.last_line).contains(&line))
}

fn first_lines(text: &str) -> String {
    text.lines().take(20).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TARGET: &str = "frame <module> 9 9\nframe leaf 3 5\nready\n";

    #[test]
    fn only_the_very_stack_counts_as_exact() {
        let expected = expected(TARGET).unwrap();
        let collapsed = "tid:7;/known_stack.py:<module>:9;/known_stack.py:leaf:4 90\n\
             tid:7;known_stack.py:<module>:9;known_stack.py:leaf:5 6\n\
             tid:7;/known_stack.py:<module>:9 1\ntid:7;/known_stack.py:<module>:9;/known_stack.py:leaf:6 1\n\
             tid:7;/other.py:<module>:9;/known_stack.py:leaf:4 1\n\
             tid:7;~:comm:0;/known_stack.py:<module>:9;/known_stack.py:leaf:4 1\n";
        assert_eq!(count(collapsed, &expected).unwrap(), (96, 100));
    }

    #[test]
    fn a_fault_in_the_kernel_log_is_found() {
        assert_eq!(complaint("[ 1.0] ok\n[ 2.0] WARNING: CPU: 1 PID: 9\n"), Some("[ 2.0] WARNING: CPU: 1 PID: 9"));
        assert_eq!(complaint("[ 1.0] Spectre V2 mitigation: ok\n"), None);
    }

    #[test]
    fn an_account_that_does_not_add_up_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let report =
            r#"{"ran": 400, "stored": 397, "idle": 0, "filtered": 1, "not_python": 0, "loss": {"ring_full": 1}}"#;
        let files = [
            ("kernel", "5.10\n"),
            ("dmesg", ""),
            ("target", TARGET),
            ("record.status", "0\n"),
            ("export.status", "0\n"),
            ("report.json", report),
            ("programs", "prog_type: 7 prog_id: 3 verified_insns: 5780\n"),
            ("out.collapsed", "tid:7;/known_stack.py:<module>:9;/known_stack.py:leaf:4 397\n"),
        ];
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        assert!(format!("{:#}", judge(dir.path(), true).unwrap_err()).contains("make 399"));
        fs::write(dir.path().join("report.json"), report.replace("400", "399")).unwrap();
        let summary = judge(dir.path(), true).unwrap();
        assert!(summary.contains("397 of 397 stacks exact, 1 lost; instructions verified: 5780"), "{summary}");
    }
}
