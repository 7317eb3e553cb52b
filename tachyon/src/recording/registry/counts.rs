//! What the account of a segment takes from the registry.

use super::{EndedThread, MAX_UNINSPECTED_ONLY, ProcessInfo, Program, Registry, cpu_time_ns};
use crate::merge::ProgramKey;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;
use tachyon_common::stop::LossCause;

/// Runs that the kernel side counts as lost and that have since turned out to be something else.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::recording) struct Reclaimed {
    /// Counted as "not inspected"; they met something that is not CPython.
    pub not_python: u64,
    /// Counted as "process gone", likewise.
    pub not_python_gone: u64,
    /// Counted as "not inspected"; they met a process that was not asked for.
    pub filtered: u64,
    /// Counted as "not inspected"; they met a program that ended before it could be looked at. They stay lost, under a
    /// name of their own: it may have been CPython.
    pub never_inspected: u64,
}

impl Reclaimed {
    /// How many of them are not lost after all.
    pub fn not_lost(&self) -> u64 {
        self.not_python + self.not_python_gone + self.filtered
    }

    /// Moves them within an account of losses, as far as they are in it, and returns what was moved. The rest stays in
    /// `self`: what a run of one segment met may only become known in a later one, whose account does not take other
    /// segments' runs.
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

impl Registry {
    /// Forgets programs that were CPython but ended or were replaced so long ago that no record of theirs can still be
    /// on its way, unless the profile has samples of them: children forked to run another program, and programs that
    /// hardly ran. Of those that were only met too early, a limited number is listed one by one.
    pub fn forget_left(&mut self, age: Duration) {
        while self.left.front().is_some_and(|(_, since)| since.elapsed() >= age) {
            let Some((key, _)) = self.left.pop_front() else { return };
            let Some(info) = self.program(key) else { continue };
            // Otherwise it runs CPython again, or may: when that ends it gets another entry here.
            let over = info.program == Program::Other || !info.alive;
            if !over || info.sampled {
                continue;
            }
            let to_its_end = !info.alive && info.is_python() && !info.accounted;
            if to_its_end && info.uninspected > 0 && self.uninspected_only < MAX_UNINSPECTED_ONLY {
                self.uninspected_only += 1;
                continue;
            }
            // What a process was before it executed something else does not count as a process of its own.
            let listed = to_its_end && !info.execs_later();
            self.forgotten_cpu_ns += info.cpu_ns().unwrap_or(0);
            self.forgotten += u64::from(listed);
            self.remove_program(key);
        }
    }

    /// CPU time of all processes as CPython while they were selected; `None` when none could be measured.
    pub fn python_cpu_ns(&self) -> Option<u64> {
        python_cpu_ns(self.python(), self.forgotten_cpu_ns)
    }

    /// Ends a segment: hands out its numbers and begins the next. To be called when all records of the segment have been
    /// dealt with. What ended longer than `settled` ago is forgotten; later ones may still have records on their way.
    pub fn cut(&mut self, settled: Duration) -> SegmentCounts {
        self.end_those_that_are_gone();
        let mut processes = HashMap::new();
        for (&instance, info) in self.by_instance.iter_mut().filter(|(_, info)| info.has_news()) {
            processes.insert(ProgramKey { instance, image: info.image }, info.cut());
        }
        for (&key, info) in self.past.iter_mut().filter(|(_, info)| info.has_news()) {
            processes.insert(key, info.cut());
        }
        let counts = SegmentCounts {
            processes,
            threads: std::mem::take(&mut self.ended_threads),
            reclaimed: std::mem::take(&mut self.reclaimed),
            refused: std::mem::take(&mut self.refused),
            refused_more: std::mem::take(&mut self.refused_more),
            notes: std::mem::take(&mut self.notes),
            forgotten: std::mem::take(&mut self.forgotten),
            forgotten_cpu_ns: std::mem::take(&mut self.forgotten_cpu_ns),
        };
        self.cpu_of_segments_ns += counts.python_cpu_ns().unwrap_or(0);
        self.uninspected_only = 0;
        // Programs that had samples, or were listed, were kept only for this cut.
        let waiting: HashSet<ProgramKey> = self.left.iter().map(|(key, _)| *key).collect();
        self.past.retain(|key, _| waiting.contains(key));
        let over = |info: &ProcessInfo| !info.alive || info.program == Program::Other;
        let is_waiting =
            |instance: u64, info: &ProcessInfo| waiting.contains(&ProgramKey { instance, image: info.image });
        let over = self.by_instance.iter().filter(|(instance, info)| over(info) && !is_waiting(**instance, info));
        for instance in over.map(|(&instance, _)| instance).collect::<Vec<_>>() {
            self.remove(instance);
        }
        self.forget_left(settled);
        counts
    }

    /// Ends processes whose end was never reported (a full ring): they would stay for ever.
    fn end_those_that_are_gone(&mut self) {
        let gone = |info: &ProcessInfo| info.alive && cpu_time_ns(info.pid).is_none();
        let gone: Vec<u64> =
            self.by_instance.iter().filter(|(_, info)| gone(info)).map(|(&instance, _)| instance).collect();
        for instance in gone {
            self.end(instance);
        }
    }
}

/// The numbers of one segment. It answers the same questions as the registry does for a whole recording.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct SegmentCounts {
    /// Programs that were CPython, as they were when the segment ended.
    pub processes: HashMap<ProgramKey, ProcessInfo>,
    /// Threads that ended in it, by the instance of their process.
    pub threads: HashMap<u64, Vec<EndedThread>>,
    pub reclaimed: Reclaimed,
    /// Processes that were met and refused, by reason.
    pub refused: Vec<String>,
    /// How many more there were.
    pub refused_more: u64,
    /// What works less well than it should.
    pub notes: BTreeSet<String>,
    /// How many processes that ran CPython to their end are not among [`SegmentCounts::processes`].
    pub forgotten: u64,
    /// CPU time of processes that are not among them.
    pub forgotten_cpu_ns: u64,
}

impl SegmentCounts {
    /// What was known about a program.
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
