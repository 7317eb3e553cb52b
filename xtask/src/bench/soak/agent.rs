//! `cargo xtask soak --agent`: the agent on a host with normal activity, configured as in its package except for the length
//! of a segment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::{Load, Look, Soaked};

/// 50 interpreters, a thousand program starts a minute; nothing is kept about ended processes.
pub(super) const LOAD: Load = Load { live: 50, between: Duration::from_millis(60), python_every: 10, process_bytes: 0 };
/// Length of a segment.
pub(super) const LENGTH: Duration = Duration::from_secs(10);
/// CPU time that the agent may use with its BPF programs, and memory with its maps (docs/continuous.md).
const MOST_CPU: f64 = 0.01;
const MOST_BYTES: u64 = 100 << 20;
/// Growth allowed after it has warmed up, and how much an allocator fluctuates in a run of minutes.
const MOST_BYTES_AN_HOUR: f64 = (1 << 20) as f64;
const SLACK_BYTES: f64 = (3 << 20) as f64;
/// Time since it was warm: ups and downs over a shorter time are not growth.
const LONG_ENOUGH: Duration = Duration::from_secs(600);

/// Where the spool is.
pub(super) fn spool(work: &Path) -> PathBuf {
    work.join("spool")
}

/// The agent's command line.
pub(super) fn command(profiler: &Path, work: &Path) -> Result<Command> {
    let config = work.join("agent.toml");
    let length = LENGTH.as_secs();
    let text = format!("[segments]\nlength = \"{length}s\"\n[spool]\npath = \"{}\"\n", spool(work).display());
    fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    let mut line = Command::new(profiler);
    line.arg("agent").arg("--config").arg(&config);
    Ok(line)
}

/// What the agent reports about itself, as the account of one recording.
pub(super) fn report(work: &Path) -> Result<Value> {
    let state = fs::read(spool(work).join("state.json")).context("the agent left no state.json")?;
    let mut state: Value = serde_json::from_slice(&state)?;
    let number = |name: &str| state[name].as_f64().with_context(|| format!("state.json has no {name}"));
    let (cpu_s, bpf_s) = (number("cpu_s")?, number("bpf_s")?);
    let duration_s = number("segment_end_unix")? - number("started_unix")?;
    // The kernel's count is in the accounts of segments, which are checked against this one.
    let ran = state["ran"].clone();
    state["duration_s"] = json!(duration_s);
    state["cost"] = json!({ "user_cpu_s": cpu_s, "bpf_run_ns": (bpf_s * 1e9).round() as u64, "bpf_run_count": ran });
    Ok(state)
}

/// Checks memory and cost against what is promised.
pub(super) fn judge(soaked: &Soaked) -> Result<()> {
    let (warm, last) = soaked.ends()?;
    let state = &soaked.report;
    let most = soaked.looks.iter().map(|look| look.rss + look.maps).max().unwrap_or(0);
    let cost = (state["cost"]["user_cpu_s"].as_f64().unwrap_or(0.0)
        + state["cost"]["bpf_run_ns"].as_f64().unwrap_or(0.0) / 1e9)
        / last.at.as_secs_f64();
    let slope = slope(&soaked.looks, warm.at);
    let mark = |over: bool| if over { ", **over**" } else { "" };
    println!(
        "\nThe agent: {:.2} % of a core{} (1 % is promised), {:.1} MiB with maps at most, {:+.1} MiB an hour since {:.0} s",
        cost * 100.0,
        mark(cost > MOST_CPU),
        most as f64 / f64::from(1 << 20),
        slope / MOST_BYTES_AN_HOUR,
        warm.at.as_secs_f64(),
    );
    for (what, count) in [("segments dropped", "dropped_segments"), ("new beginnings", "restarts")] {
        ensure!(state[count] == 0, "{what}: {}", state[count]);
    }
    ensure!(most <= MOST_BYTES, "memory and maps came to {most} bytes, more than {MOST_BYTES}");
    if last.at - warm.at < LONG_ENOUGH {
        println!("The run is too short to say whether memory grows: symbols and segments come and go by some MiB.");
        return Ok(());
    }
    let hours = (last.at - warm.at).as_secs_f64() / 3600.0;
    ensure!(
        slope * hours <= SLACK_BYTES.max(MOST_BYTES_AN_HOUR * hours),
        "memory grew by {:.1} MiB an hour",
        slope / MOST_BYTES_AN_HOUR
    );
    Ok(())
}

/// Growth of resident memory since then in bytes per hour, by least squares.
fn slope(looks: &[Look], since: Duration) -> f64 {
    let points: Vec<(f64, f64)> = looks
        .iter()
        .filter(|look| look.at >= since)
        .map(|look| (look.at.as_secs_f64() / 3600.0, look.rss as f64))
        .collect();
    let count = points.len() as f64;
    let (x, y) = points.iter().fold((0.0, 0.0), |(x, y), point| (x + point.0 / count, y + point.1 / count));
    let (above, below) = points.iter().fold((0.0, 0.0), |(above, below), point| {
        (above + (point.0 - x) * (point.1 - y), below + (point.0 - x).powi(2))
    });
    if below > 0.0 { above / below } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_that_of_all_looks_since_it_was_warm() {
        let look = |(minute, mib): (u64, u64)| Look {
            at: Duration::from_secs(60 * minute),
            rss: mib << 20,
            maps: 0,
            pythons: 0,
        };
        let looks: Vec<Look> = [(0, 10), (30, 60), (60, 61), (90, 62)].map(look).into();
        let mib = |since: u64| slope(&looks, Duration::from_secs(60 * since)) / f64::from(1 << 20);
        assert!((mib(30) - 2.0).abs() < 1e-9, "{}", mib(30));
        assert!(mib(0) > 20.0, "warming up is none: {}", mib(0));
        assert_eq!(slope(&looks[..1], Duration::ZERO), 0.0, "one look shows nothing");
    }
}
