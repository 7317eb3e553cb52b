//! The account of a whole recording: the sum of its segments'.

use super::segment::{Hot, Segment};
use crate::report::Report;
use std::collections::HashMap;

/// Most functions that are remembered between segments; a recording of years meets any number.
const MOST_FUNCTIONS: usize = 4096;

/// Most processes that are listed between segments: a host that starts a thousand programs a minute must not fill memory with
/// them. Where there are more, those with the fewest samples go.
const MOST_PROCESSES: usize = 1024;

/// Adds up segments.
#[derive(Debug, Default)]
pub struct Totals {
    report: Report,
    segments: u64,
    /// CPU time of the targets, seconds, as far as it was measured.
    cpu_s: f64,
    /// Index into the report's processes, by instance and image.
    processes: HashMap<(u64, u64), usize>,
    /// Processes dropped from the list, each time that happened.
    unlisted: u64,
    functions: HashMap<(String, String), Hot>,
}

impl Totals {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a segment.
    pub fn add(&mut self, segment: &Segment) {
        for hot in segment.hottest_functions() {
            let sum = self.functions.entry((hot.file.clone(), hot.function.clone()));
            sum.and_modify(|sum| sum.samples += hot.samples).or_insert(hot);
        }
        if self.functions.len() > MOST_FUNCTIONS {
            let keep = self.hottest_functions().into_iter().take(MOST_FUNCTIONS / 2);
            self.functions = keep.map(|hot| ((hot.file.clone(), hot.function.clone()), hot)).collect();
        }
        self.add_report(&segment.report);
    }

    /// Adds the account of a segment, or of several.
    pub fn add_report(&mut self, later: &Report) {
        self.segments += 1;
        if let (Some(expected), true) = (later.expected, later.effective_rate_hz > 0.0) {
            self.cpu_s += expected as f64 / later.effective_rate_hz;
        }
        if self.segments == 1 {
            self.report = Report { segment: None, ..later.clone() };
            self.processes = later.processes.iter().enumerate().map(|(at, process)| (process.instance, at)).collect();
            return;
        }
        self.report.add(later);
        self.report.duration_s += later.duration_s;
        for process in &later.processes {
            match self.processes.get(&process.instance) {
                Some(&at) => self.report.processes[at].add(process),
                None => {
                    self.processes.insert(process.instance, self.report.processes.len());
                    self.report.processes.push(process.clone());
                }
            }
        }
        self.unlist();
    }

    /// Keeps half of the listed processes, in their order, when there are too many.
    fn unlist(&mut self) {
        let listed = &mut self.report.processes;
        let Some(more) = listed.len().checked_sub(MOST_PROCESSES / 2).filter(|_| listed.len() > MOST_PROCESSES) else {
            return;
        };
        let mut samples: Vec<u64> = listed.iter().map(|process| process.samples).collect();
        let (_, &mut least, _) = samples.select_nth_unstable(more);
        let below = samples.iter().filter(|&&samples| samples < least).count();
        // Of those with exactly as many samples as the last one that stays, the oldest go.
        let mut equals = more - below;
        listed.retain(|process| {
            let goes = process.samples < least || (process.samples == least && equals > 0);
            equals -= usize::from(goes && process.samples == least);
            !goes
        });
        listed.shrink_to(MOST_PROCESSES);
        self.unlisted += more as u64;
        self.processes = listed.iter().enumerate().map(|(at, process)| (process.instance, at)).collect();
    }

    /// The account so far.
    #[must_use]
    pub fn report(&self) -> Report {
        let mut report = Report { segments: Some(self.segments), ..self.report.clone() };
        if self.unlisted > 0 {
            report.notes.push(format!(
                "about {} more processes are listed only in the reports of their segments",
                self.unlisted
            ));
        }
        if let (Some(expected), true) = (report.expected, self.cpu_s > 0.0) {
            report.effective_rate_hz = expected as f64 / self.cpu_s;
        }
        report
    }

    /// Functions by how often they were the running one, most often first.
    #[must_use]
    pub fn hottest_functions(&self) -> Vec<Hot> {
        let mut hot: Vec<Hot> = self.functions.values().cloned().collect();
        hot.sort_by(|a, b| b.samples.cmp(&a.samples).then_with(|| a.function.cmp(&b.function)));
        hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ProcessReport;

    #[test]
    fn processes_with_few_samples_make_room() {
        let process =
            |instance, samples| ProcessReport { instance: (instance, 0), samples, ..ProcessReport::default() };
        let segment = |processes| Report { processes, ..Report::default() };
        let mut totals = Totals::new();
        totals.add_report(&segment(vec![process(0, 9), process(1, 500)]));
        for first in (2..6_002).step_by(10) {
            let mut processes: Vec<_> = (first..first + 10).map(|instance| process(instance, 1)).collect();
            processes.push(process(1, 1));
            totals.add_report(&segment(processes));
            assert!(totals.report().processes.len() <= MOST_PROCESSES);
        }
        let report = totals.report();
        let counts: Vec<_> = report.processes.iter().map(|it| (it.instance.0, it.samples)).collect();
        assert_eq!(counts[..2], [(0, 9), (1, 1_100)]);
        assert_eq!(counts.last(), Some(&(6_001, 1)), "the newest stays");
        let told = format!("about {} more processes", 6_002 - counts.len());
        assert!(report.notes.iter().any(|note| note.starts_with(&told)), "{:?}", report.notes);
    }

    #[test]
    fn segments_add_up() {
        let process = |instance, samples| ProcessReport {
            instance: (instance, 0),
            samples,
            cpu_s: Some(0.5),
            ..ProcessReport::default()
        };
        let segment = |stored, expected, processes| Report {
            ran: stored + 3,
            stored,
            idle: 1,
            loss: [("ring_full".to_owned(), 2)].into(),
            expected: Some(expected),
            not_fired: Some(expected - stored - 2),
            rate_hz: 100.0,
            effective_rate_hz: 100.0,
            duration_s: 1.0,
            processes,
            ..Report::default()
        };
        let mut totals = Totals::new();
        totals.add_report(&segment(10, 20, vec![process(1, 10)]));
        totals.add_report(&segment(5, 10, vec![process(2, 2), process(1, 3)]));
        let report = totals.report();
        assert_eq!((report.ran, report.stored, report.idle, report.loss["ring_full"]), (21, 15, 2, 4));
        assert_eq!(report.ran, report.stored + report.idle + report.loss.values().sum::<u64>());
        assert_eq!((report.expected, report.not_fired, report.segments), (Some(30), Some(11), Some(2)));
        assert!((report.effective_rate_hz - 100.0).abs() < 1e-6, "{}", report.effective_rate_hz);
        assert_eq!(report.duration_s, 2.0);
        let counts: Vec<_> = report.processes.iter().map(|it| (it.instance.0, it.samples, it.cpu_s)).collect();
        assert_eq!(counts, [(1, 13, Some(1.0)), (2, 2, Some(0.5))]);
    }
}
