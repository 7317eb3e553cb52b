//! Tables that lie in plain memory.

use super::{Range, Row, Tables};

/// Tables in slices, as user space and tests have them.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a> {
    /// Ranges of all spaces.
    pub ranges: &'a [Range],
    /// Rows and indexes of all tables.
    pub rows: &'a [Row],
    /// One of [`crate::config::machine`].
    pub machine: u32,
}

impl Tables for Slices<'_> {
    type Chunk = ();

    fn range(&self, index: u32) -> Option<Range> {
        self.ranges.get(index as usize).copied()
    }

    fn chunk(&self, _: u32) -> Option<()> {
        Some(())
    }

    fn row(&self, (): (), index: u32) -> Option<Row> {
        self.rows.get(index as usize).copied()
    }

    fn machine(&self) -> u32 {
        self.machine
    }
}
