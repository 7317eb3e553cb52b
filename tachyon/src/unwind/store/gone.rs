//! What is not used any more: its room is given back after a rest.

use super::placed::Part;
use super::{Known, Source, TableMemory, UnwindTables};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long what was given up is left as it is: a walk that began before may still read it, and takes microseconds.
pub(super) const REST: Duration = Duration::from_secs(1);
/// How often it is looked for while there is room: who has what is a system call for each process.
const EVERY: Duration = Duration::from_secs(10);

impl UnwindTables {
    /// Gives away the table that was used longest ago of those that no process has.
    pub(super) fn evict(&mut self, in_use: &HashSet<Source>) -> Option<()> {
        let blocks = &self.blocks;
        let is_used =
            |source: &Source| in_use.contains(source) || blocks.iter().any(|block| block.sources.contains(source));
        let placed = self.known.iter().filter_map(|(source, known)| match known {
            Known::Placed(placed) if !placed.tables.is_empty() && !is_used(source) => Some((placed.used, *source)),
            _ => None,
        });
        let (_, oldest) = placed.min()?;
        if let Some(Known::Placed(placed)) = self.known.remove(&oldest) {
            placed.tables.values().for_each(|table| self.give_back(&table.parts));
        }
        Some(())
    }

    /// Finds blocks that no process has any more, if that was not done just now or their room is needed.
    pub(super) fn sweep_if_due(&mut self, memory: &impl TableMemory) {
        let is_due = self.swept.is_none_or(|swept| swept.elapsed() >= EVERY);
        // Tables of what has a block are not given away either.
        if is_due || [&self.ranges, &self.rows].iter().any(|room| room.used > room.size / 2) {
            self.swept = Some(Instant::now());
            self.sweep(memory);
        }
    }

    /// Finds blocks that no process has any more, and gives away those that have rested.
    pub(super) fn sweep(&mut self, memory: &impl TableMemory) {
        let used: HashSet<u32> = memory.spaces().iter().map(|space| space.first).collect();
        let now = Instant::now();
        let ranges = &mut self.ranges;
        self.blocks.retain_mut(|block| {
            if used.contains(&block.first) {
                block.unused = None;
                return true;
            }
            let rested = now.duration_since(*block.unused.get_or_insert(now)) >= REST;
            if rested {
                ranges.give_back(block.first, block.count);
            }
            !rested
        });
    }

    pub(super) fn give_back(&mut self, parts: &[Part]) {
        parts.iter().for_each(|part| self.rows.give_back(part.first, part.words()));
    }
}
