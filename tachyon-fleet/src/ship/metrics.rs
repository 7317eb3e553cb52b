//! What the shipper counts, in Prometheus's format, preceded by the agent's own metrics.

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::AtomicU64;

/// Longest metrics of an agent that are read.
const LONGEST: u64 = 1 << 20;
/// The format's name.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type OfBackend = [(&'static str, String); 1];
type OfReason = [(&'static str, String); 2];

/// All counts since the start.
#[derive(Debug, Default)]
pub struct Metrics {
    /// Segments that are done: arrived, or refused.
    pub shipped_segments: Family<OfBackend, Counter>,
    /// Samples in them.
    pub shipped_samples: Family<OfBackend, Counter>,
    /// Bytes of pushes that were accepted.
    pub sent_bytes: Family<OfBackend, Counter>,
    /// Pushes, including failed ones.
    pub pushes: Family<OfBackend, Counter>,
    /// Pushes that failed.
    pub errors: Family<OfReason, Counter>,
    /// Pushes that were repeated without knowing whether they had arrived.
    pub doubts: Family<OfBackend, Counter>,
    /// Samples that will never be accepted.
    pub refused_samples: Family<OfReason, Counter>,
    /// Segments that were removed to keep the spool within its limits before they were shipped.
    pub expired_segments: Family<OfBackend, Counter>,
    /// Segments in the spool that have yet to be shipped.
    pub pending_segments: Family<OfBackend, Gauge>,
    /// Age of the oldest of them.
    pub pending_age_seconds: Family<OfBackend, Gauge<f64, AtomicU64>>,
    /// When a push was last accepted.
    pub last_success: Family<OfBackend, Gauge<f64, AtomicU64>>,
    /// Whether the last push was accepted.
    pub up: Family<OfBackend, Gauge>,
    /// Files that were set aside.
    pub bad_files: Counter,
    /// Files of the spool that are set aside now and could not be moved.
    pub bad_files_left: Gauge,
    /// How often the configuration was reloaded.
    pub reloads: Counter,
    /// Age of the oldest segment in the spool.
    pub spool_age_seconds: Gauge<f64, AtomicU64>,
}

/// The label of a backend.
#[must_use]
pub fn of(backend: &str) -> OfBackend {
    [("backend", backend.to_owned())]
}

/// The labels of a metric with a reason.
#[must_use]
pub fn because(backend: &str, reason: &str) -> OfReason {
    [("backend", backend.to_owned()), ("reason", reason.to_owned())]
}

impl Metrics {
    /// As text, after the agent's own.
    #[must_use]
    pub fn text(&self, spool: &Path, healthy: bool) -> String {
        let mut registry = Registry::with_prefix("tachyon");
        macro_rules! register {
            ($($name:ident: $help:literal),* $(,)?) => {
                $(registry.register(concat!("ship_", stringify!($name)), $help, self.$name.clone());)*
            };
        }
        register! {
            shipped_segments: "Segments that are done: arrived, or refused",
            shipped_samples: "Samples in them",
            pushes: "Pushes, failed ones too",
            errors: "Pushes that failed",
            doubts: "Pushes that may have arrived, and were repeated",
            refused_samples: "Samples that will never be taken",
            expired_segments: "Segments that left the spool before they were shipped",
            pending_segments: "Segments that have yet to be shipped",
            up: "Whether the last push was taken",
            bad_files: "Files that were set aside",
            bad_files_left: "Files that are set aside and could not be moved",
            reloads: "How often the configuration was read anew",
        }
        registry.register_with_unit(
            "ship_sent",
            "Bytes of pushes that were taken",
            Unit::Bytes,
            self.sent_bytes.clone(),
        );
        for (name, help, family) in [
            ("ship_pending_age", "Age of the oldest segment that has yet to be shipped", &self.pending_age_seconds),
            ("ship_last_success_timestamp", "When a push was taken last, since 1970", &self.last_success),
        ] {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        }
        let age = self.spool_age_seconds.clone();
        registry.register_with_unit("spool_age", "Age of the oldest segment in the spool", Unit::Seconds, age);
        let health = Gauge::<i64>::default();
        health.set(healthy.into());
        registry.register("healthy", "0: CPythons run and no sample comes, or the agent has stopped", health);
        let mut own = String::new();
        // Writing to memory does not fail.
        let _written = encode(&mut own, &registry);
        let mut text = of_agent(spool);
        let _written = write!(text, "{own}");
        text
    }
}

/// The agent's metrics, checked line by line: whoever can write to the spool must not be able to put anything else here.
fn of_agent(spool: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = tachyon::input::open(&spool.join("metrics.prom")) {
        // Content that is not text is ignored.
        let _some = file.take(LONGEST).read_to_string(&mut text);
    }
    let ours =
        |line: &str| ["tachyon_ship_", "tachyon_healthy", "tachyon_spool_age"].iter().any(|name| line.contains(name));
    let lines = text.lines().filter(|line| is_metric(line) && !ours(line));
    lines.fold(String::new(), |text, line| text + line + "\n")
}

fn is_metric(line: &str) -> bool {
    let plain =
        |name: &str| name.starts_with("tachyon_") && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if let Some(comment) = line.strip_prefix("# ") {
        let mut words = comment.splitn(3, ' ');
        let is_kind = words.next().is_some_and(|kind| matches!(kind, "HELP" | "TYPE" | "UNIT"));
        return is_kind && words.next().is_some_and(plain) && !line.contains(char::is_control);
    }
    let Some((series, value)) = line.rsplit_once(' ') else { return false };
    let name = series.split('{').next().unwrap_or_default();
    let labels = &series[name.len()..];
    let has_labels = labels.is_empty() || labels.starts_with('{') && labels.ends_with('}');
    plain(name) && has_labels && !labels.contains(char::is_control) && value.parse::<f64>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_metrics_of_the_agent_get_through() {
        for (line, expected) in [
            ("# HELP tachyon_samples Samples stored.", true),
            ("# EOF", false),
            ("tachyon_samples_total 7", true),
            ("tachyon_lost_total{cause=\"ring_full\"} 3", true),
            ("process_cpu_seconds_total 7", false),
            ("tachyon_samples_total x", false),
            ("<script>", false),
            ("", false),
        ] {
            assert_eq!(is_metric(line), expected, "{line}");
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join("metrics.prom"),
            "# TYPE tachyon_samples counter\ntachyon_samples_total 7\nx 1\ntachyon_healthy 0\ntachyon_spool_age_seconds 9\n# EOF\n",
        )
        .unwrap();
        let metrics = Metrics::default();
        metrics.errors.get_or_create(&because("otlp x", "tls")).inc();
        metrics.sent_bytes.get_or_create(&of("otlp x")).inc_by(9);
        let text = metrics.text(dir.path(), true);
        for line in [
            "tachyon_samples_total 7",
            "tachyon_ship_errors_total{backend=\"otlp x\",reason=\"tls\"} 1",
            "tachyon_ship_sent_bytes_total{backend=\"otlp x\"} 9",
            "tachyon_healthy 1",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}: {text}");
        }
        assert_eq!(text.matches("# EOF").count(), 1);
        assert!(!text.contains("\ntachyon_healthy 0") && !text.contains("tachyon_spool_age_seconds 9"), "{text}");
        assert!(text.ends_with("# EOF\n") && !text.contains("\nx 1"));
    }

    /// Each metric that the dashboard queries is the shipper's or the agent's, and it uses their real names.
    #[test]
    fn the_dashboard_asks_for_what_there_is() {
        let metrics = Metrics::default();
        // Families without a value are not output.
        for family in [&metrics.errors, &metrics.refused_samples] {
            family.get_or_create(&because("x", "tls")).inc();
        }
        let Metrics { shipped_segments, shipped_samples, sent_bytes, pushes, doubts, expired_segments, .. } = &metrics;
        for family in [shipped_segments, shipped_samples, sent_bytes, pushes, doubts, expired_segments] {
            family.get_or_create(&of("x")).inc();
        }
        for family in [&metrics.pending_segments, &metrics.up] {
            family.get_or_create(&of("x")).set(1);
        }
        for family in [&metrics.pending_age_seconds, &metrics.last_success] {
            family.get_or_create(&of("x")).set(1.0);
        }
        let text = metrics.text(Path::new("/nonexistent"), true);
        let agent = include_str!("../../../tachyon/src/cli/agent/state.rs");
        let dashboard: serde_json::Value =
            serde_json::from_str(include_str!("../../../deploy/grafana-dashboard.json")).unwrap();
        let mut names = std::collections::BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().into_iter().flatten() {
                let words = target["expr"].as_str().unwrap().split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                names.extend(words.filter(|word| word.starts_with("tachyon_")).map(str::to_owned));
            }
        }
        assert!(names.len() >= 15, "{names:?}");
        for name in names {
            let family = name.trim_end_matches("_total");
            let own = text.lines().any(|line| line.starts_with(&format!("# TYPE {family} ")));
            let mut of_agent = family.trim_start_matches("tachyon_");
            for unit in ["_bytes", "_seconds"] {
                of_agent = of_agent.trim_end_matches(unit);
            }
            assert!(own || agent.contains(&format!("\"{of_agent}\"")), "{name}");
        }
    }
}
