//! A CPU that goes away and comes back while a guest is recorded: the target moves to it, and goes on being sampled.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// Fewest samples on that CPU: 3 s at 199 Hz are 597. An emulated CPU loses time.
const FEWEST: usize = 30;

#[derive(Deserialize)]
struct Account {
    notes: Vec<String>,
}

#[derive(Deserialize)]
struct Sample {
    time_us: u64,
}

/// Judges what the guest has sent; a guest whose CPUs cannot be unplugged says so.
///
/// # Errors
/// The guest says neither, the CPU was not sampled after its return, or its absence is not reported.
pub(super) fn judge(read: &impl Fn(&str) -> Result<String>, summary: &mut String) -> Result<()> {
    if read("hotplug/none").is_ok() {
        return write!(summary, "; its CPUs stay").context("cannot sum up");
    }
    let status = read("hotplug/record.status")?;
    ensure!(status.trim() == "0", "it ended with status {}", status.trim());
    let account: Account = serde_json::from_str(&read("hotplug/report.json")?).context("the report is no account")?;
    ensure!(account.notes.iter().any(|note| note.starts_with("CPU 1 ")), "nothing is told: {:?}", account.notes);
    let there: f64 = read("hotplug/there")?.trim().parse().context("when the target moved is no number")?;
    let lines = read("hotplug/out.jsonl")?;
    let samples = lines.lines().map(serde_json::from_str::<Sample>).collect::<Result<Vec<_>, _>>();
    let samples = samples.context("a line is no sample")?;
    let later = samples.iter().filter(|sample| std::time::Duration::from_micros(sample.time_us).as_secs_f64() > there);
    let count = later.count();
    ensure!(
        count >= FEWEST,
        "{count} samples on the CPU that came back, at least {FEWEST} wanted; {} before",
        samples.len() - count
    );
    write!(summary, "; {count} samples on a CPU that came back").context("cannot sum up")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_of_a_cpu_that_came_back() {
        let judged = |notes: &'static str, times: std::ops::Range<u64>| {
            let read = move |name: &str| {
                Ok(match name {
                    "hotplug/none" => anyhow::bail!("its CPUs can go"),
                    "hotplug/record.status" => "0\n".to_owned(),
                    "hotplug/report.json" => format!(r#"{{"notes": [{notes}]}}"#),
                    "hotplug/there" => "12.50\n".to_owned(),
                    _ => times.clone().map(|ms| format!("{{\"time_us\": {}}}\n", ms * 1000)).collect(),
                })
            };
            judge(&read, &mut String::new())
        };
        let note = r#""CPU 1 was not there for a while""#;
        assert!(judged(note, 12_000..12_600).is_ok());
        assert!(judged(note, 12_000..12_510).is_err(), "nothing later");
        assert!(judged("", 12_000..12_600).is_err(), "nothing told");
    }

    #[test]
    fn that_cpus_stay_is_said() {
        let judged = |sent: &'static str| {
            let read = move |name: &str| if name == sent { Ok(String::new()) } else { anyhow::bail!("not sent") };
            judge(&read, &mut String::new())
        };
        assert!(judged("hotplug/none").is_ok());
        assert!(judged("").is_err(), "it did not come so far");
    }
}
