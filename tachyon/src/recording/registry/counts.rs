//! What the account of a segment takes from the registry.

use super::ProcessInfo;
use crate::merge::ProgramKey;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use tachyon_common::stop::LossCause;

/// Runs that the kernel side counts as lost, and that have turned out to be something else since.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::recording) struct Reclaimed {
    /// Counted as "not inspected"; they met something that is not CPython.
    pub not_python: u64,
    /// Counted as "process gone", likewise.
    pub not_python_gone: u64,
    /// Counted as "not inspected"; they met a process that is not asked for.
    pub filtered: u64,
    /// Counted as "not inspected"; they met a program that was over before anybody could look at it. They stay lost, under
    /// a name of their own: it may have been CPython.
    pub never_inspected: u64,
}

impl Reclaimed {
    /// How many of them are no loss.
    pub fn not_lost(&self) -> u64 {
        self.not_python + self.not_python_gone + self.filtered
    }

    /// Moves them within an account of losses, as far as they are in it, and returns what was moved. The rest is left in
    /// `self`: a run of one segment may be known for what it is in a later one only, whose account takes no other's runs.
    pub fn reclassify(&mut self, loss: &mut BTreeMap<String, u64>) -> Self {
        let mut take = |cause: LossCause, count: &mut u64| {
            let counted = loss.entry(cause.name().to_owned()).or_default();
            let taken = (*count).min(*counted);
            *counted -= taken;
            *count -= taken;
            taken
        };
        let moved = Self {
            not_python: take(LossCause::Uninspected, &mut self.not_python),
            filtered: take(LossCause::Uninspected, &mut self.filtered),
            never_inspected: take(LossCause::Uninspected, &mut self.never_inspected),
            not_python_gone: take(LossCause::ProcessGone, &mut self.not_python_gone),
        };
        *loss.entry(LossCause::NeverInspected.name().to_owned()).or_default() += moved.never_inspected;
        moved
    }
}

/// The numbers of one segment. It answers what the registry answers of a whole recording.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct SegmentCounts {
    /// Programs that were CPython, as they were when the segment ended.
    pub processes: HashMap<ProgramKey, ProcessInfo>,
    pub reclaimed: Reclaimed,
    /// What was met and refused, by reason.
    pub refused: Vec<String>,
    /// How many more there were.
    pub refused_more: u64,
    /// What is weaker than it should be.
    pub notes: BTreeSet<String>,
    /// How many processes that ran CPython to their end are not among [`SegmentCounts::processes`].
    pub forgotten: u64,
    /// CPU time of processes that are not.
    pub forgotten_cpu_ns: u64,
}

impl SegmentCounts {
    /// What was known of a program.
    pub fn get(&self, key: ProgramKey) -> Option<&ProcessInfo> {
        self.processes.get(&key)
    }

    /// CPU time of all processes as CPython within the segment; `None` when none could be measured.
    pub fn python_cpu_ns(&self) -> Option<u64> {
        python_cpu_ns(self.processes.values(), self.forgotten_cpu_ns)
    }
}

/// The sum of what could be measured.
pub(super) fn python_cpu_ns<'a>(
    processes: impl Iterator<Item = &'a ProcessInfo>,
    forgotten_cpu_ns: u64,
) -> Option<u64> {
    let known: Vec<u64> = processes.filter_map(ProcessInfo::cpu_ns).collect();
    (!known.is_empty() || forgotten_cpu_ns > 0).then(|| forgotten_cpu_ns + known.iter().sum::<u64>())
}
