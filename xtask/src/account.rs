//! The sums of a recording's report: `ran = stored + idle + filtered + not_python + Σ loss`.

use std::collections::BTreeMap;

use serde::Deserialize;

/// What became of the runs of the timer's program.
#[derive(Debug, Deserialize)]
pub(crate) struct Sums {
    pub(crate) ran: u64,
    pub(crate) stored: u64,
    pub(crate) idle: u64,
    pub(crate) filtered: u64,
    pub(crate) not_python: u64,
    loss: BTreeMap<String, u64>,
}

impl Sums {
    /// Runs that should have left a sample and did not.
    pub(crate) fn lost(&self) -> u64 {
        self.loss.values().sum()
    }

    /// What the parts add up to: `ran`, if the account closes.
    pub(crate) fn parts(&self) -> u64 {
        self.stored + self.idle + self.filtered + self.not_python + self.lost()
    }
}
