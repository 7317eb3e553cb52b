//! Unwind tables in plain memory: the kernel's own walk, run by a test.

use std::collections::BTreeMap;
use tachyon::unwind::TableMemory;
use tachyon_common::unwind::{AddressSink, Range, Row, Rule, Space, Tables};

/// The tables of one process in plain memory.
#[derive(Debug, Default)]
pub struct PlainTables {
    rows: BTreeMap<u32, Row>,
    ranges: BTreeMap<u32, Range>,
}

impl PlainTables {
    /// The rule at an address of a process.
    #[must_use]
    pub fn rule(&self, space: Space, address: u64) -> Rule {
        let ranges = (space.first..space.first + space.count).map(|index| self.ranges[&index]);
        let Some(range) = ranges.into_iter().find(|range| (range.start..range.end).contains(&address)) else {
            return Rule::GAP;
        };
        let pc = address.wrapping_sub(range.bias);
        let rows = self.rows.range(range.first_row..range.first_row + u32::from(range.rows)).map(|(_, row)| row);
        rows.take_while(|row| u64::from(row.pc()) <= pc).last().map_or(Rule::GAP, |row| row.rule())
    }
}

impl TableMemory for PlainTables {
    fn write_rows(&mut self, first: u32, rows: &[Row]) -> bool {
        self.rows.extend((first..).zip(rows.iter().copied()));
        true
    }

    fn read_rows(&self, first: u32, count: u32) -> Option<Vec<Row>> {
        (first..first + count).map(|index| self.rows.get(&index).copied()).collect()
    }

    fn write_ranges(&mut self, first: u32, ranges: &[Range]) {
        self.ranges.extend((first..).zip(ranges.iter().copied()));
    }

    fn spaces(&self) -> Vec<Space> {
        Vec::new()
    }
}

impl Tables for PlainTables {
    fn range(&self, index: u32) -> Option<Range> {
        self.ranges.get(&index).copied()
    }

    type Chunk = ();

    fn chunk(&self, _: u32) -> Option<()> {
        Some(())
    }

    fn row(&self, (): (), index: u32) -> Option<Row> {
        self.rows.get(&index).copied()
    }
}

/// The addresses of a walk, leaf first.
#[derive(Debug, Default)]
pub struct Addresses(pub Vec<u64>);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        assert_eq!(index, self.0.len());
        self.0.push(address);
    }
}
