//! Waiting threads on a guest's kernel: `tests/kernel/waits.py` under `--off-cpu`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

/// 3 s at 49 Hz are 147 ticks, of which seven tenths or more are in waits. An emulated processor loses time.
const FEWEST: u64 = 40;
/// Share of waits for anything but a CPU whose stack shows the expected place. Now and then a page cannot be read.
const RIGHT_SHARE: f64 = 0.95;
/// Share of waits for a CPU, each from the moment the thread was woken: other programs of the guest want one now and then, and an emulated
/// guest on a busy machine spends as long on that as its program sleeps.
const QUEUED_SHARE: f64 = 0.7;
/// Share of ticks whose kick may have missed its thread.
const MISSED_SHARE: f64 = 0.05;

/// `ticks_due = stored + Σ loss`.
#[derive(Deserialize)]
struct Wall {
    ticks_due: u64,
    stored: u64,
    loss: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Account {
    wall: Wall,
    inconsistent: u64,
}

#[derive(Deserialize)]
struct Sample {
    frames: Vec<Frame>,
    /// How many samples the line stands for.
    #[serde(default = "one")]
    weight: u64,
}

fn one() -> u64 {
    1
}

#[derive(Deserialize)]
struct Frame {
    function: String,
}

/// Checks that each tick is accounted for, and that the stacks are those of the thread that waited.
///
/// # Errors
/// One of these does not hold.
#[expect(clippy::cast_precision_loss, reason = "some hundreds of samples")]
pub(super) fn judge(read: &impl Fn(&str) -> Result<String>, summary: &mut String) -> Result<()> {
    let status = read("waiting/record.status")?;
    ensure!(status.trim() == "0", "it ended with status {}", status.trim());
    let account: Account = serde_json::from_str(&read("waiting/report.json")?).context("the report is no account")?;
    let Wall { ticks_due, stored, loss } = account.wall;
    let lost: u64 = loss.values().sum();
    ensure!(ticks_due == stored + lost, "{ticks_due} ticks were due, {stored} stored, {lost} lost: {loss:?}");
    ensure!(account.inconsistent == 0, "counts differ by {}", account.inconsistent);
    ensure!(stored >= FEWEST, "{stored} of {ticks_due} ticks stored, at least {FEWEST} wanted: {loss:?}");
    ensure!(lost as f64 <= MISSED_SHARE * ticks_due as f64, "{lost} of {ticks_due} ticks lost: {loss:?}");
    let lines = read("waiting/out.jsonl")?;
    let samples = lines.lines().map(serde_json::from_str::<Sample>).collect::<Result<Vec<_>, _>>();
    let samples = samples.context("a line is no sample")?;
    let weight = |which: &dyn Fn(&Sample) -> bool| -> u64 {
        samples.iter().filter(|sample| which(sample)).map(|sample| sample.weight).sum()
    };
    let has = |sample: &Sample, name: &str| sample.frames.iter().any(|frame| frame.function == name);
    let all = weight(&|_| true);
    ensure!(all == stored, "{all} samples, {stored} stored");
    let queued = weight(&|sample| has(sample, "<waiting: cpu>"));
    let waits = all - queued;
    let right = weight(&|sample| has(sample, "<waiting: sleep>") && has(sample, "sleeps"));
    let shown = lines.lines().next().map_or("", |line| line.get(..400).unwrap_or(line));
    ensure!(queued as f64 <= QUEUED_SHARE * stored as f64, "{queued} of {stored} waits are for a processor: {shown}");
    ensure!(right as f64 >= RIGHT_SHARE * waits as f64, "{right} of {waits} waits are the program's sleep: {shown}");
    write!(
        summary,
        "; {right} of {waits} waits where the program sleeps, {queued} for a CPU, {lost} of {ticks_due} ticks lost"
    )
    .context("cannot sum up")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_judged_by_its_stack_and_the_account_by_its_sum() {
        let sample = r#"{"frames": [{"function": "<waiting: sleep>"}, {"function": "sleeps"}]}"#.to_owned() + "\n";
        let other = r#"{"frames": [{"function": "<waiting: lock>"}, {"function": "works"}]}"#.to_owned() + "\n";
        let judged = |due: u64, lost: u64, inconsistent: u64, samples: String| {
            let stored = samples.lines().count() + samples.matches("\"weight\": 2").count();
            let read = move |name: &str| {
                Ok(match name {
                    "waiting/record.status" => "0\n".to_owned(),
                    "waiting/out.jsonl" => samples.clone(),
                    _ => format!(
                        r#"{{"wall": {{"ticks_due": {due}, "stored": {stored}, "loss": {{"not_met": {lost}}}}}, "inconsistent": {inconsistent}}}"#
                    ),
                })
            };
            judge(&read, &mut String::new())
        };
        let queued = sample.replace("sleep>", "cpu>");
        judged(100, 2, 0, sample.repeat(75) + &other.repeat(3) + &queued.repeat(20)).unwrap();
        let double = sample.replacen('{', r#"{"weight": 2, "#, 1);
        judged(100, 2, 0, double.repeat(49)).unwrap();
        for (due, lost, inconsistent, samples, why) in [
            (100, 1, 0, sample.repeat(98), "ticks were due"),
            (100, 2, 3, sample.repeat(98), "counts differ by 3"),
            (30, 0, 0, sample.repeat(30), "at least 40"),
            (100, 10, 0, sample.repeat(90), "10 of 100 ticks lost"),
            (100, 0, 0, sample.repeat(80) + &other.repeat(20), "80 of 100 waits"),
            (100, 0, 0, sample.repeat(20) + &queued.repeat(80), "80 of 100 waits are for a processor"),
        ] {
            let error = judged(due, lost, inconsistent, samples).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
