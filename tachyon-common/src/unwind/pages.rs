//! The index of a table: which rows lie in which piece of code, so that a search looks at a few neighbours and not at
//! places all over the table.
//!
//! A page is [`PAGE_BYTES`] of code from the table's first row on. The word of [`PAGES_PER_WORD`] pages has, in 16 bits each
//! from the lowest on, how many rows start before each of them and before the page behind the last.

use super::{NativeWalk, Row, Rule, Tables, not_above};
use crate::limits::PAGE_SEARCH_STEPS;

/// Bytes of code of one page. A row is for one byte at least, so that its rows are as many at most, and are found by
/// [`PAGE_SEARCH_STEPS`].
pub const PAGE_BYTES: u32 = 1 << PAGE_SHIFT;

const PAGE_SHIFT: u32 = PAGE_SEARCH_STEPS - 1;

/// Pages that one word of the index is for.
pub const PAGES_PER_WORD: u32 = 3;

/// Most pages of one table: 16 MiB of code.
pub const MAX_PAGES: u32 = u16::MAX as u32;

/// How many pages there are from a table's first row to its last one, both as addresses relative to one base.
#[must_use]
pub const fn pages_of(first: u32, last: u32) -> u32 {
    (last.wrapping_sub(first) >> PAGE_SHIFT) + 1
}

/// How many words the index of so many pages has.
#[must_use]
pub const fn index_words(pages: u32) -> u32 {
    pages.div_ceil(PAGES_PER_WORD)
}

/// The index of a table whose rows are relative to the first one: what follows its rows.
pub fn index(rows: &[Row]) -> impl Iterator<Item = Row> {
    let pages = rows.last().map_or(0, |last| pages_of(0, last.pc()));
    // How many rows start before a page, which is no lower than the one asked for last.
    let mut count = 0;
    let mut before = move |page: u32| {
        match page.checked_mul(PAGE_BYTES) {
            Some(pc) if page < pages => count += rows[count..].iter().take_while(|row| row.pc() < pc).count(),
            _ => count = rows.len(),
        }
        count as u64 & 0xffff
    };
    (0..index_words(pages)).map(move |word| {
        let first = word * PAGES_PER_WORD;
        Row((0..=PAGES_PER_WORD).fold(0, |counts, at| counts | (before(first + at) << (16 * at))))
    })
}

impl NativeWalk {
    /// Finds the row that holds at an address of the present range: the last one that starts at or below it.
    #[inline(never)]
    pub(super) fn find_row<T: Tables + ?Sized>(&mut self, tables: &T, at: u64) -> u64 {
        let pc = at.wrapping_sub(self.range.bias);
        let (first, rows) = (u64::from(self.range.first_row), u64::from(self.range.rows));
        self.row = u64::from(Rule::GAP.0);
        // A row's address has 32 bits: what lies beyond, or before the first one, is in no table.
        if pc > u64::from(u32::MAX) {
            return 0;
        }
        let Some(chunk) = tables.chunk(self.range.first_row) else { return 0 };
        let page = (pc >> PAGE_SHIFT).min(u64::from(self.range.pages.saturating_sub(1))) as u32;
        let Some(word) = tables.row(chunk, (first + rows) as u32 + page / PAGES_PER_WORD) else { return 0 };
        let counts = word.0 >> (page % PAGES_PER_WORD * 16);
        let before = counts & 0xffff;
        let count = ((counts >> 16) & 0xffff).saturating_sub(before);
        let (mut below, mut bit) = (0, 1_u64 << PAGE_SEARCH_STEPS);
        while bit > 1 {
            bit >>= 1;
            let next = below + bit;
            let there = not_above(tables, next, count);
            let Some(row) = tables.row(chunk, (first + before + ((next - 1) & there)) as u32) else { return 0 };
            below += bit & there & not_above(tables, u64::from(row.pc()), pc);
        }
        if before + below > 0
            && let Some(row) = tables.row(chunk, (first + before + below - 1) as u32)
        {
            self.row = row.0;
        }
        0
    }
}
