//! Line tables, kept once however many code objects share them.

use super::linetable::LineTable;
use std::collections::HashSet;
use std::sync::Arc;

/// Line tables by content: a template that is compiled again and again, or a program that runs in two hundred
/// processes, keeps one copy.
#[derive(Debug)]
pub(super) struct LineTables {
    tables: HashSet<Arc<LineTable>>,
    /// Number of tables at which unused ones are looked for.
    sweep_at: usize,
}

/// Below this number of tables a sweep is not worth its time.
const SWEEP_MIN: usize = 4096;

impl Default for LineTables {
    fn default() -> Self {
        Self { tables: HashSet::new(), sweep_at: SWEEP_MIN }
    }
}

impl LineTables {
    /// The shared copy of `table`.
    pub(super) fn share(&mut self, table: LineTable) -> Arc<LineTable> {
        if let Some(shared) = self.tables.get(&table) {
            return Arc::clone(shared);
        }
        if self.tables.len() >= self.sweep_at {
            self.sweep();
        }
        let table = Arc::new(table);
        self.tables.insert(Arc::clone(&table));
        table
    }

    /// Drops the tables that are no longer used.
    pub(super) fn sweep(&mut self) {
        self.tables.retain(|table| Arc::strong_count(table) > 1);
        self.tables.shrink_to_fit();
        self.sweep_at = (self.tables.len() * 2).max(SWEEP_MIN);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.tables.len()
    }
}

#[cfg(test)]
mod tests {
    use super::super::linetable::Format;
    use super::*;

    fn table(firstlineno: i32) -> LineTable {
        LineTable::new(Format::Locations, firstlineno, [0x80, 0].into(), true)
    }

    #[test]
    fn equal_tables_are_one_and_unused_ones_go() {
        let mut tables = LineTables::default();
        let kept = tables.share(table(-1));
        assert!(Arc::ptr_eq(&kept, &tables.share(table(-1))));
        for firstlineno in 0..10_000 {
            tables.share(table(firstlineno));
        }
        assert!(tables.len() <= SWEEP_MIN);
        assert!(Arc::ptr_eq(&kept, &tables.share(table(-1))));
    }
}
