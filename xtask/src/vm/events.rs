//! Chosen events on a guest's kernel: `tests/kernel/waits.py` under `-e context-switches -e sched:sched_switch`, which are the
//! same switches, once as a perf event and once as a tracepoint.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// 2 s of turns of 10 ms are 200 sleeps. An emulated CPU loses time.
const FEWEST: u64 = 20;
/// Share of samples whose stack shows the expected place. A switch can be met at any other place, too, if other
/// programs want the CPU.
const RIGHT_SHARE: f64 = 0.5;
/// By how much the two may differ: they are attached and detached one after the other, on each of sixteen emulated processors.
const APART: u64 = 24;

#[derive(Deserialize)]
struct Account {
    events: Vec<Event>,
    inconsistent: u64,
}

#[derive(Deserialize)]
struct Event {
    name: String,
    stored: u64,
}

#[derive(Deserialize)]
struct Sample {
    event: String,
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    function: String,
}

/// Checks that both are sampled, equally often, where the program sleeps.
///
/// # Errors
/// One of these does not hold.
#[expect(clippy::cast_precision_loss, reason = "some hundreds of samples")]
pub(super) fn judge(read: &impl Fn(&str) -> Result<String>, summary: &mut String) -> Result<()> {
    let status = read("events/record.status")?;
    ensure!(status.trim() == "0", "it ended with status {}", status.trim());
    let account: Account = serde_json::from_str(&read("events/report.json")?).context("the report is no account")?;
    ensure!(account.inconsistent == 0, "counts differ by {}", account.inconsistent);
    let [perfs, points] = ["context-switches", "sched:sched_switch"]
        .map(|name| account.events.iter().find(|event| event.name == name).map_or(0, |event| event.stored));
    ensure!(perfs.min(points) >= FEWEST, "{perfs} and {points} switches, at least {FEWEST} wanted");
    ensure!(perfs.abs_diff(points) <= APART, "{perfs} switches by perf, {points} at the tracepoint");
    let lines = read("events/out.jsonl")?;
    let samples = lines.lines().map(serde_json::from_str::<Sample>).collect::<Result<Vec<_>, _>>();
    let samples = samples.context("a line is no sample")?;
    for (name, stored) in [("context-switches", perfs), ("sched:sched_switch", points)] {
        let of: Vec<&Sample> = samples.iter().filter(|sample| sample.event == name).collect();
        ensure!(of.len() as u64 == stored, "{} samples of {name}, {stored} stored", of.len());
        let right = of.iter().filter(|sample| sample.frames.iter().any(|frame| frame.function == "sleeps")).count();
        ensure!(right as f64 >= RIGHT_SHARE * stored as f64, "{right} of {stored} {name} where the program sleeps");
    }
    write!(summary, "; {perfs} switches by perf, {points} at the tracepoint").context("cannot sum up")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// What a guest sends if all is well.
    pub(in super::super) fn sent() -> [(&'static str, String); 3] {
        let sample = |event: &str| format!(r#"{{"event": "{event}", "frames": [{{"function": "sleeps"}}]}}"#) + "\n";
        let report = r#"{"events": [{"name": "context-switches", "stored": 30}, {"name": "sched:sched_switch", "stored": 31}], "inconsistent": 0}"#;
        [
            ("events/record.status", "0\n".to_owned()),
            ("events/report.json", report.to_owned()),
            ("events/out.jsonl", sample("context-switches").repeat(30) + &sample("sched:sched_switch").repeat(31)),
        ]
    }

    #[test]
    fn both_events_are_counted_where_they_happen() {
        let judged = |what: &str, from: &str, to: &str| {
            let sent = sent().map(|(name, text)| (name, if name == what { text.replace(from, to) } else { text }));
            let read = move |name: &str| {
                let text = sent.iter().find(|(known, _)| *known == name).map(|(_, text)| text.clone());
                text.context("the guest sent nothing")
            };
            judge(&read, &mut String::new())
        };
        judged("", "", "").unwrap();
        for (what, from, to, why) in [
            ("events/record.status", "0", "1", "status 1"),
            ("events/report.json", "t\": 0", "t\": 2", "counts differ by 2"),
            ("events/report.json", "30", "3", "at least 20"),
            ("events/report.json", "31", "60", "30 switches by perf, 60"),
            ("events/report.json", "31", "32", "31 samples of sched:sched_switch, 32 stored"),
            ("events/out.jsonl", "sleeps", "works", "0 of 30"),
        ] {
            let error = judged(what, from, to).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
