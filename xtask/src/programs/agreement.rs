//! What py-spy says about the same process at the same time: the Python functions that ran.

use super::counts::Sample;
use super::rows::Compared;
use std::collections::BTreeMap;

/// How many of py-spy's top functions are compared.
const TOP: usize = 10;

/// Difference in shares of all samples up to which two count as the same.
pub(super) const TOLERATED: f64 = 0.05;

/// Samples by innermost Python function: its unqualified name, and the name of its file.
#[derive(Clone, Debug, Default)]
pub(super) struct Functions {
    pub samples: u64,
    by_function: BTreeMap<(String, String), u64>,
}

impl Functions {
    fn add(&mut self, function: &str, file: &str, count: u64) {
        let last = |text: &str, separator: char| text.rsplit(separator).next().unwrap_or_default().to_owned();
        self.samples += count;
        *self.by_function.entry((last(function, '.'), last(file, '/'))).or_default() += count;
    }

    /// Adds this profiler's samples.
    pub fn add_ours(&mut self, samples: &[Sample], compared: Compared) {
        for sample in samples {
            let wanted = compared == Compared::Running || sample.gil == Some(true);
            let python = sample.frames.iter().find(|frame| frame.kind == "python");
            if let Some(frame) = python.filter(|_| wanted) {
                self.add(&frame.function, frame.file.as_deref().unwrap_or_default(), 1);
            }
        }
    }

    /// Adds py-spy's raw output: lines `name (file:line);name (file:line) count`, the leaf last.
    pub fn add_theirs(&mut self, raw: &str) {
        for line in raw.lines() {
            let Some((stack, count)) = line.rsplit_once(' ') else { continue };
            let Some((function, place)) = stack.rsplit(';').next().and_then(|leaf| leaf.rsplit_once(" (")) else {
                continue;
            };
            let file = place.trim_end_matches(')');
            let file = file.rsplit_once(':').map_or(file, |(file, _)| file);
            self.add(function, file, count.parse().unwrap_or(0));
        }
    }

    fn share(&self, function: &(String, String)) -> f64 {
        let count = self.by_function.get(function).copied().unwrap_or(0);
        if self.samples == 0 { 0.0 } else { count as f64 / self.samples as f64 }
    }
}

/// How two profilers' views differ.
#[derive(Clone, Debug, Default)]
pub(super) struct Agreement {
    /// Functions that were compared: py-spy's top ones.
    pub of: usize,
    pub same: usize,
    /// Those that differ: name, this profiler's share, py-spy's.
    pub differ: Vec<(String, f64, f64)>,
}

pub(super) fn agreement(ours: &Functions, theirs: &Functions) -> Agreement {
    let mut top: Vec<_> = theirs.by_function.iter().collect();
    top.sort_by_key(|&(function, &count)| (std::cmp::Reverse(count), function));
    top.truncate(TOP);
    let mut found = Agreement { of: top.len(), ..Agreement::default() };
    for (function, _) in top {
        let (our, their) = (ours.share(function), theirs.share(function));
        if (our - their).abs() <= TOLERATED {
            found.same += 1;
        } else {
            found.differ.push((format!("{} ({})", function.0, function.1), our, their));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::counts::samples;
    use super::*;

    #[test]
    fn functions_are_compared_by_their_own_samples() {
        let line = |function: &str, gil: bool| {
            format!(
                r#"{{"time_us": 1, "gil": {gil}, "merge": "exact", "frames": [{{"function": "libz!deflate", "file": null, "kind": "native"}}, {{"function": "{function}", "file": "/x/app.py", "kind": "python"}}]}}"#
            ) + "\n"
        };
        let text =
            line("Shop.work", true).repeat(80) + &line("Shop.rest", true).repeat(20) + &line("idle", false).repeat(50);
        let mut ours = Functions::default();
        ours.add_ours(&samples(&text).unwrap(), Compared::Gil);
        let mut theirs = Functions::default();
        theirs.add_theirs("process 7:\"a b\";main (app.py:1);work (app.py:2) 70\nmain (app.py:1);rest (app.py:3) 18\nnoise (b.py:1) 12\n");
        assert_eq!((ours.samples, theirs.samples), (100, 100));
        let found = agreement(&ours, &theirs);
        assert_eq!((found.of, found.same), (3, 1));
        assert_eq!(found.differ[0].0, "work (app.py)");
        ours.add_ours(&samples(&text).unwrap(), Compared::Running);
        assert_eq!(ours.samples, 250);
    }
}
