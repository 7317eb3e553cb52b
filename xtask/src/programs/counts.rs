//! What a recording says about itself: samples by label, and where stacks were cut.

use anyhow::{Context as _, Result};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The part of `--report` that is used here (`docs/report.md`).
#[derive(Deserialize)]
struct Report {
    stored: u64,
    loss: BTreeMap<String, u64>,
    stops: BTreeMap<String, u64>,
    native: Native,
    cost: Cost,
}

#[derive(Deserialize)]
struct Native {
    exact: u64,
    missing: u64,
    repairs: BTreeMap<String, u64>,
    stops: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Cost {
    peak_rss_bytes: u64,
    map_bytes: u64,
}

/// Counts from one recording, or from several of one program.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    pub stored: u64,
    pub lost: u64,
    pub exact: u64,
    /// Samples that are right up to code without rules, where they end (generated at run time without frame pointers), or through it
    /// (assembly language, frame pointers), or up to code that is exchanging the native stack.
    pub to_the_last_rule: u64,
    /// Samples that are not exact, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// Samples whose innermost frame has no name and no address in a file.
    pub unknown: u64,
    /// Samples that are not exact, by the object where the native stack ends.
    pub cut_in: BTreeMap<String, u64>,
    pub memory_bytes: u64,
}

/// Native stops in code without rules.
const WITHOUT_RULES: [&str; 2] = ["no_unwind_rule", "no_frame_pointer"];

/// Merges of stacks through such code, and of those that end where one greenlet gives way to another.
const AS_FAR_AS_IS_KNOWN: [&str; 3] = [
    "repaired: through assembly without unwind rules",
    "repaired: walked by frame pointers",
    "repaired: between two greenlets",
];

impl Counts {
    /// Adds a recording: its account, and its samples as JSON lines.
    ///
    /// # Errors
    /// One of them is malformed.
    pub fn add(&mut self, report: &str, samples: &[Sample]) -> Result<()> {
        let report: Report = serde_json::from_str(report).context("cannot read the report")?;
        self.stored += report.stored;
        self.lost += report.loss.values().sum::<u64>();
        self.exact += report.native.exact;
        let ended = WITHOUT_RULES.iter().filter_map(|stop| report.native.stops.get(*stop));
        let without_rules =
            ended.chain(AS_FAR_AS_IS_KNOWN.iter().filter_map(|repair| report.native.repairs.get(*repair)));
        self.to_the_last_rule += without_rules.sum::<u64>().min(report.stored - report.native.exact);
        let mut reason = |text: &str, count: u64| {
            if count > 0 {
                *self.reasons.entry(text.to_owned()).or_default() += count;
            }
        };
        for (text, count) in &report.native.repairs {
            reason(text.strip_prefix("repaired: ").unwrap_or(text), *count);
        }
        reason("no native stack", report.native.missing);
        for (stop, count) in &report.native.stops {
            if stop != "complete" {
                reason(&format!("native stack: {}", stop.replace('_', " ")), *count);
            }
        }
        for (stop, count) in &report.stops {
            if !["complete", "no_thread_state", "no_frame"].contains(&stop.as_str()) {
                reason(&format!("Python stack: {}", stop.replace('_', " ")), *count);
            }
        }
        self.memory_bytes = self.memory_bytes.max(report.cost.peak_rss_bytes + report.cost.map_bytes);
        for sample in samples {
            let leaf = sample.frames.first();
            self.unknown += u64::from(leaf.is_none_or(|leaf| leaf.function.contains("<unknown")));
            if sample.merge.as_deref() != Some("exact") {
                let outermost = sample.frames.iter().take_while(|frame| frame.kind == "native").last();
                let object =
                    outermost.map_or("no native frame", |frame| frame.file.as_deref().unwrap_or("generated code"));
                *self.cut_in.entry(object.to_owned()).or_default() += 1;
            }
        }
        Ok(())
    }

    /// A number of samples as a share of all.
    pub fn share(&self, part: u64) -> f64 {
        if self.stored == 0 { 0.0 } else { part as f64 / self.stored as f64 }
    }
}

/// A sample of JSON lines.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Sample {
    pub time_us: u64,
    pub gil: Option<bool>,
    pub merge: Option<String>,
    /// The leaf first.
    pub frames: Vec<Frame>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Frame {
    pub function: String,
    pub file: Option<String>,
    pub kind: String,
}

/// Reads JSON lines.
///
/// # Errors
/// A line is not a sample.
pub(super) fn samples(text: &str) -> Result<Vec<Sample>> {
    text.lines().map(|line| serde_json::from_str(line).context("cannot read a sample")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_exact_has_its_reason() {
        let report = r#"{"stored": 10, "loss": {"ring_full": 1}, "stops": {"complete": 8, "unreadable_frame": 1, "no_frame": 1},
            "native": {"exact": 5, "missing": 1, "repairs": {"repaired: native stack cut": 2, "repaired: through assembly without unwind rules": 1, "repaired: walked by frame pointers": 1},
                       "stops": {"complete": 8, "no_unwind_rule": 1, "no_unwind_tables": 1}},
            "cost": {"peak_rss_bytes": 5, "map_bytes": 6}}"#;
        let lines = r#"{"time_us": 1, "gil": true, "merge": "repaired", "frames": [{"function": "f", "file": "libx.so", "kind": "native"},
            {"function": "main", "file": "/a.py", "kind": "python"}]}"#
            .replace('\n', "");
        let mut counts = Counts::default();
        counts.add(report, &samples(&lines).unwrap()).unwrap();
        assert_eq!((counts.stored, counts.lost, counts.exact, counts.to_the_last_rule), (10, 1, 5, 3));
        assert_eq!((counts.unknown, counts.memory_bytes, counts.cut_in["libx.so"]), (0, 11, 1));
        let reasons: Vec<_> = counts.reasons.iter().map(|(reason, count)| (&**reason, *count)).collect();
        let expected = [
            ("Python stack: unreadable frame", 1),
            ("native stack cut", 2),
            ("native stack: no unwind rule", 1),
            ("native stack: no unwind tables", 1),
            ("no native stack", 1),
            ("through assembly without unwind rules", 1),
            ("walked by frame pointers", 1),
        ];
        assert_eq!(reasons, expected);
    }
}
