//! The few lines that tell a recording's leaders when it has ended.

use super::aggregate::Aggregate;
use super::filter::Filter;
use super::module::NoDistributions;
use super::ratio;
use super::rows::{By, RowKind, report};

/// One function.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadLine {
    /// Qualified name.
    pub function: String,
    /// Source file; empty for what has none.
    pub file: String,
    /// The line that has most of its self.
    pub line: Option<u32>,
    /// Samples in it, native code that it called included.
    pub samples: u64,
    /// Their share.
    pub self_share: f64,
    /// Share of the samples that have it anywhere in their stack.
    pub total_share: f64,
}

/// The leading functions, most self first: the first rows of `tachyon-bpf report`.
#[must_use]
pub fn head(aggregate: &Aggregate, lines: usize) -> Vec<HeadLine> {
    let report = report(aggregate, By::Function, &Filter::default(), false, &NoDistributions);
    let rows = report.rows.iter().filter(|row| row.own.samples > 0).take(lines);
    rows.map(|row| HeadLine {
        function: row.name.name.clone(),
        file: row.name.file.as_deref().filter(|_| row.name.kind == RowKind::Python).unwrap_or_default().to_owned(),
        line: row.hottest_line,
        samples: row.own.samples,
        self_share: ratio(row.own.samples, report.samples),
        total_share: ratio(row.total.samples, report.samples),
    })
    .collect()
}
