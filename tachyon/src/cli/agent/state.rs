//! What the agent reports about itself: `state.json`, and the same as metrics for Prometheus.

use super::spool::Spool;
use crate::recording::Segment;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::registry::{Registry, Unit};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

/// Its name in the spool.
pub const STATE: &str = "state.json";
/// Name of the metrics, as required by the textfile collector of Prometheus's node exporter.
pub const METRICS: &str = "metrics.prom";

/// Sums since the agent's start, and how it is doing now. Written anew after each segment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct State {
    /// The agent's process.
    pub pid: u32,
    /// Its start, seconds since 1970, UTC.
    pub started_unix: f64,
    /// Segments that have ended.
    pub segments: u64,
    /// The number of the latest one from the present recorder.
    pub sequence: u64,
    /// When it ended.
    pub segment_end_unix: f64,
    /// `ran = stored + idle + filtered + not_python + Σ loss`, as in the accounts of segments.
    pub ran: u64,
    pub stored: u64,
    pub idle: u64,
    pub filtered: u64,
    pub not_python: u64,
    pub loss: BTreeMap<String, u64>,
    /// By how much counts of the same thing differ: anything but 0 is a bug.
    pub inconsistent: u64,
    /// Share of one core in the latest segment, BPF programs included.
    pub cpu_share: f64,
    /// CPU time since the start, of the agent and of its BPF programs.
    pub cpu_s: f64,
    pub bpf_s: f64,
    /// Resident memory and maps now.
    pub memory_bytes: u64,
    /// All files of the spool.
    pub spool_bytes: u64,
    /// Finished segments that were removed for the spool's bounds.
    pub removed_segments: u64,
    /// Segments that could not be written, and the samples in them.
    pub dropped_segments: u64,
    pub dropped_samples: u64,
    /// How often the recorder was restarted.
    pub restarts: u64,
    /// CPythons sampled in the latest segment, by version.
    pub pythons: BTreeMap<String, u64>,
}

impl State {
    pub fn new() -> Self {
        let started_unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        Self { pid: std::process::id(), started_unix, ..Self::default() }
    }

    /// Adds a segment. `written` says whether its file is there.
    pub fn add(&mut self, segment: &Segment, written: bool) {
        let report = &segment.report;
        self.segments += 1;
        self.sequence = segment.sequence;
        self.segment_end_unix = report.segment.map_or(self.segment_end_unix, |segment| segment.end_unix);
        self.ran += report.ran;
        self.stored += report.stored;
        self.idle += report.idle;
        self.filtered += report.filtered;
        self.not_python += report.not_python;
        for (cause, count) in &report.loss {
            *self.loss.entry(cause.clone()).or_default() += count;
        }
        self.inconsistent += report.inconsistent;
        if !written {
            self.dropped_segments += 1;
            self.dropped_samples += report.stored;
        }
        let bpf_s = report.cost.bpf_run_ns.unwrap_or(0) as f64 / 1e9;
        self.cpu_share = (report.cost.user_cpu_s + bpf_s) / report.duration_s.max(1e-3);
        self.cpu_s += report.cost.user_cpu_s;
        self.bpf_s += bpf_s;
        self.memory_bytes = resident_bytes() + report.cost.map_bytes;
        self.pythons.clear();
        for process in report.processes.iter().filter(|process| process.samples > 0) {
            *self.pythons.entry(process.python_version.clone()).or_default() += 1;
        }
    }

    /// Writes both files.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn write(&mut self, spool: &Spool) -> anyhow::Result<()> {
        self.spool_bytes = spool.bytes();
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        spool.write(STATE, &text)?;
        spool.write(METRICS, self.metrics()?.as_bytes())
    }

    /// In the OpenMetrics text format.
    fn metrics(&self) -> Result<String, std::fmt::Error> {
        let mut registry = Registry::with_prefix("tachyon");
        let mut counter = |name: &str, help: &str, value: u64| registry.register(name, help, ConstCounter::new(value));
        counter("runs", "Runs of the timer's program", self.ran);
        counter("samples", "Samples stored", self.stored);
        counter("segments", "Segments that have ended", self.segments);
        counter("removed_segments", "Segments removed for the bounds of the spool", self.removed_segments);
        counter("dropped_segments", "Segments that could not be written", self.dropped_segments);
        counter("dropped_samples", "Samples in those", self.dropped_samples);
        counter("recorder_restarts", "How often the recorder began anew", self.restarts);
        counter("inconsistent", "Differences between counts of the same thing", self.inconsistent);
        for (name, help, value) in [
            ("agent_cpu", "CPU time of the agent", self.cpu_s),
            ("bpf_cpu", "CPU time of its BPF programs", self.bpf_s),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, ConstCounter::new(value));
        }
        registry.register(
            "agent_cpu_ratio",
            "Share of one core in the latest segment",
            ConstGauge::new(self.cpu_share),
        );
        let gauge = |value: u64| ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        registry.register_with_unit("agent_memory", "Resident memory and maps", Unit::Bytes, gauge(self.memory_bytes));
        registry.register_with_unit("spool", "Files in the spool", Unit::Bytes, gauge(self.spool_bytes));
        for (name, help, value) in [
            ("agent_start_timestamp", "Start of the agent, since 1970", self.started_unix),
            ("segment_end_timestamp", "End of the latest segment, since 1970", self.segment_end_unix),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, ConstGauge::new(value));
        }
        let loss = Family::<[(String, String); 1], prometheus_client::metrics::counter::Counter>::default();
        for (cause, count) in &self.loss {
            loss.get_or_create(&[("cause".to_owned(), cause.clone())]).inc_by(*count);
        }
        registry.register("lost", "Runs without a sample, by cause", loss);
        let pythons = Family::<[(String, String); 1], Gauge>::default();
        for (version, count) in &self.pythons {
            pythons
                .get_or_create(&[("version".to_owned(), version.clone())])
                .set(i64::try_from(*count).unwrap_or(i64::MAX));
        }
        registry.register("sampled_processes", "CPythons sampled in the latest segment, by version", pythons);
        let mut text = String::new();
        encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
    pages * page.unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_named_as_the_contract_says() {
        let loss = BTreeMap::from([("ring_full".to_owned(), 3)]);
        let pythons = BTreeMap::from([("3.12.1".to_owned(), 2)]);
        let state = State { ran: 9, cpu_s: 0.5, spool_bytes: 77, loss, pythons, ..State::default() };
        let text = state.metrics().unwrap();
        for line in [
            "tachyon_runs_total 9",
            "tachyon_agent_cpu_seconds_total 0.5",
            "tachyon_spool_bytes 77",
            "tachyon_lost_total{cause=\"ring_full\"} 3",
            "tachyon_sampled_processes{version=\"3.12.1\"} 2",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            assert!(line.starts_with("tachyon_"), "{line}");
        }
    }
}
