//! Adds the accounts of several files into one: everything that was counted still adds up.
//!
//! Files of one recording share one account: if a recording was too large for one file, each part has the whole account,
//! and of the files that `--split process` made, each counts the samples of the others as filtered. It is added once.

use crate::report::{ProcessReport, Report, add_known};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hasher as _};

/// Where an account comes from.
#[derive(Clone, Debug, Default)]
pub struct Recording<'a> {
    /// Host name; empty if unknown.
    pub host: &'a str,
    /// Start, microseconds on the file's own clock.
    pub start_us: u64,
    /// When it began and ended, in seconds on the clock of the whole profile.
    pub span_s: (f64, f64),
    /// Interval of the samples.
    pub interval_us: u64,
    /// Samples in the file.
    pub samples: u64,
    /// Places of the file's processes in the whole profile.
    pub places: &'a [u32],
}

/// What is the same in all files of a recording, as numbers and texts that two recordings do not share by chance.
#[derive(PartialEq, Eq, Hash)]
struct Key {
    host: String,
    start_us: u64,
    duration: u64,
    /// Sequence number and start.
    segment: Option<(u64, u64)>,
    ran: u64,
    idle: u64,
    not_python: u64,
    stored_or_filtered: u64,
    loss: BTreeMap<String, u64>,
}

/// Adds accounts up.
#[derive(Debug, Default)]
pub struct Accounts {
    sum: Report,
    any: bool,
    /// By recording: its accounts so far, as hashes.
    recordings: HashMap<u64, HashSet<u64>>,
    processes: BTreeMap<u32, ProcessReport>,
    spans_s: Vec<(f64, f64)>,
    /// Sums over samples, for means.
    samples: u64,
    rates: f64,
    mean_rates: f64,
    intervals: u128,
}

impl Accounts {
    /// Adds the account of a file.
    pub fn add(&mut self, of: &Recording<'_>, report: &Report) {
        self.spans_s.push(of.span_s);
        self.samples += of.samples;
        self.intervals += u128::from(of.interval_us) * u128::from(of.samples);
        #[expect(clippy::cast_precision_loss, reason = "a weight of a mean")]
        let weight = of.samples as f64;
        self.rates += report.rate_hz * weight;
        self.mean_rates += report.mean_rate_hz() * weight;

        // A file of another program, or a recovered one, says what it stored and nothing else.
        let whole;
        let report = if report.ran == 0 {
            whole = Report { ran: report.stored, ..report.clone() };
            &whole
        } else {
            report
        };
        let known = self.recordings.entry(hash(&key(of, report))).or_default();
        let (first, new) = (known.is_empty(), known.insert(hash(&serde_json::to_string(report).unwrap_or_default())));
        if !new {
            return;
        }
        if first {
            self.add_whole(report);
        } else {
            // One more file of a recording that was split: its samples are among those that the first one counts as filtered.
            let sum = &mut self.sum;
            sum.stored += report.stored;
            sum.filtered = sum.filtered.saturating_sub(report.stored);
            add_known(&mut sum.expected, report.expected);
            add_known(&mut sum.not_fired, report.not_fired);
        }
        for (index, process) in report.processes.iter().enumerate() {
            // In our own files they are in the order of the file's processes.
            let place = of.places.get(index).copied().unwrap_or(u32::MAX);
            self.processes.entry(place).or_default().add(process);
        }
    }

    fn add_whole(&mut self, report: &Report) {
        let sum = &mut self.sum;
        if !std::mem::replace(&mut self.any, true) {
            *sum = Report { processes: Vec::new(), segment: None, segments: report.segment_count(), ..report.clone() };
            return;
        }
        sum.add(report);
    }

    /// Microseconds between samples: the mean, so that samples times mean is the CPU time of all files.
    #[must_use]
    pub fn interval_us(&self) -> u64 {
        match u128::from(self.samples) {
            0 => 0,
            samples => u64::try_from((self.intervals + samples / 2) / samples).unwrap_or(u64::MAX),
        }
    }

    /// The account of the whole, which has `count` processes.
    #[must_use]
    pub fn into_report(mut self, count: usize) -> Report {
        let mut report = self.sum;
        report.duration_s = union_s(&mut self.spans_s);
        if self.samples > 0 {
            #[expect(clippy::cast_precision_loss, reason = "a weight of a mean")]
            let samples = self.samples as f64;
            report.rate_hz = self.rates / samples;
            report.effective_rate_hz = self.mean_rates / samples;
        }
        if !self.processes.is_empty() {
            // One for each process, in order: readers find them by place.
            let last = u32::try_from(count).unwrap_or(u32::MAX);
            report.processes = (0..last).map(|place| self.processes.remove(&place).unwrap_or_default()).collect();
            report.processes.extend(self.processes.into_values());
        }
        report
    }
}

fn key(of: &Recording<'_>, report: &Report) -> Key {
    Key {
        host: of.host.to_owned(),
        start_us: of.start_us,
        duration: report.duration_s.to_bits(),
        segment: report.segment.map(|segment| (segment.sequence, segment.start_unix.to_bits())),
        ran: report.ran,
        idle: report.idle,
        not_python: report.not_python,
        stored_or_filtered: report.stored.saturating_add(report.filtered),
        loss: report.loss.clone(),
    }
}

fn hash(value: &impl std::hash::Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Seconds in which at least one recording ran.
fn union_s(spans: &mut [(f64, f64)]) -> f64 {
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    let (mut sum, mut until) = (0.0, f64::NEG_INFINITY);
    for &mut (start, end) in spans {
        if end > until {
            sum += end - start.max(until);
            until = end;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ran: u64, stored: u64, filtered: u64, pid: u32) -> Report {
        let process = ProcessReport { pid, samples: stored, cpu_s: Some(1.0), ..ProcessReport::default() };
        Report {
            ran,
            stored,
            filtered,
            loss: [("ring_full".to_owned(), ran - stored - filtered)].into(),
            rate_hz: 99.0,
            duration_s: 10.0,
            expected: Some(stored),
            processes: vec![process],
            ..Report::default()
        }
    }

    fn of(start_us: u64, samples: u64, places: &[u32]) -> Recording<'_> {
        let start_s = start_us as f64 / 1e6;
        Recording { host: "h", start_us, span_s: (start_s, start_s + 10.0), interval_us: 10_101, samples, places }
    }

    fn closes(report: &Report) -> bool {
        let loss: u64 = report.loss.values().sum();
        report.ran == report.stored + report.idle + report.filtered + report.not_python + loss
    }

    #[test]
    fn segments_add_up() {
        let mut accounts = Accounts::default();
        accounts.add(&of(0, 80, &[0]), &report(100, 80, 15, 7));
        accounts.add(&of(10_000_000, 70, &[0]), &report(100, 70, 30, 7));
        accounts.add(&of(50_000_000, 5, &[1]), &report(9, 5, 0, 8));
        assert_eq!(accounts.interval_us(), 10_101);
        let sum = accounts.into_report(2);
        assert_eq!((sum.ran, sum.stored, sum.filtered, sum.loss["ring_full"]), (209, 155, 45, 9));
        assert!(closes(&sum));
        assert_eq!((sum.duration_s, sum.rate_hz, sum.expected), (30.0, 99.0, Some(155)));
        let told: Vec<_> = sum.processes.iter().map(|of| (of.pid, of.samples, of.cpu_s)).collect();
        assert_eq!(told, [(7, 150, Some(2.0)), (8, 5, Some(1.0))]);
    }

    #[test]
    fn what_files_of_one_recording_have_in_common_counts_once() {
        let mut parts = Accounts::default();
        parts.add(&of(0, 50, &[0]), &report(100, 80, 15, 7));
        parts.add(&of(0, 30, &[0]), &report(100, 80, 15, 7));
        assert_eq!(parts.into_report(1).stored, 80);
        let mut split = Accounts::default();
        split.add(&of(0, 50, &[0]), &report(100, 50, 45, 7));
        split.add(&of(0, 30, &[1]), &report(100, 30, 65, 8));
        let sum = split.into_report(2);
        assert_eq!((sum.ran, sum.stored, sum.filtered, sum.processes.len()), (100, 80, 15, 2));
        assert!(closes(&sum));
    }

    #[test]
    fn files_that_tell_nothing_ran_what_they_stored() {
        let mut accounts = Accounts::default();
        accounts.add(&of(0, 5, &[]), &Report { stored: 5, ..Report::default() });
        accounts.add(&of(0, 6, &[]), &Report { stored: 6, cut: true, ..Report::default() });
        let sum = accounts.into_report(0);
        assert_eq!((sum.ran, sum.stored, sum.cut), (11, 11, true));
        assert!(closes(&sum) && sum.duration_s == 10.0, "at the same time");
    }
}
