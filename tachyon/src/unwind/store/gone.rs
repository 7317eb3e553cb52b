//! What is no longer used: its room is freed after a rest.

use super::placed::Part;
use super::{Known, Source, TableMemory, UnwindTables};
use std::collections::HashSet;
use std::time::{Duration, Instant};

/// How long freed memory is left as it is: a walk that began before may still read it, and takes microseconds.
pub(super) const REST: Duration = Duration::from_secs(1);
/// How often to look for it while there is room: finding out what is in use takes a system call per process.
const EVERY: Duration = Duration::from_secs(10);

impl UnwindTables {
    /// Frees the least recently used table of those that no process uses.
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

    /// Finds blocks that no process has any more, unless that was just done and their room is not needed.
    pub(super) fn sweep_if_due(&mut self, memory: &impl TableMemory) {
        let is_due = self.swept.is_none_or(|swept| swept.elapsed() >= EVERY);
        // Tables that a block uses are not freed either.
        if is_due || [&self.ranges, &self.rows].iter().any(|room| room.used > room.size / 2) {
            self.swept = Some(Instant::now());
            self.sweep(memory);
        }
    }

    /// Finds blocks that no process has any more, and frees those that have rested.
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
