//! A table split into the parts that the kernel side searches: each with its index, in one chunk of memory.

use tachyon_common::limits::ROWS_PER_CHUNK;
use tachyon_common::unwind::{Row, pages};

/// A part of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePart {
    /// Address of the first row, relative to the table's base.
    pub pc: u32,
    /// How many rows there are.
    pub rows: u16,
    /// How many pages of code the index covers.
    pub pages: u16,
    /// The rows, relative to the first one, and the index.
    pub words: Vec<Row>,
}

/// The parts of a table whose rows are sorted, each made on demand.
pub fn parts(rows: &[Row]) -> impl Iterator<Item = TablePart> {
    let mut left = rows;
    std::iter::from_fn(move || {
        let (rows, others) = left.split_at(part_len(left)?);
        left = others;
        let pc = rows[0].pc();
        let mut words: Vec<Row> = rows.iter().map(|row| Row::new(row.pc() - pc, row.rule())).collect();
        let pages = pages::pages_of(0, words[words.len() - 1].pc());
        let index: Vec<Row> = pages::index(&words).collect();
        words.extend(index);
        Some(TablePart { pc, rows: rows.len() as u16, pages: pages as u16, words })
    })
}

/// How many of these rows make one part: as many as fit into a chunk along with the index of the code they cover, and no
/// more code than an index can cover.
fn part_len(rows: &[Row]) -> Option<usize> {
    let first = rows.first()?.pc();
    let fits = |len: usize| {
        let pages = pages::pages_of(first, rows[len - 1].pc());
        let words = len as u64 + u64::from(pages::index_words(pages));
        len <= usize::from(u16::MAX) && pages <= pages::MAX_PAGES && words <= u64::from(ROWS_PER_CHUNK)
    };
    // One row always fits.
    let (mut most, mut too_many) = (1, rows.len() + 1);
    while most + 1 < too_many {
        let len = most.midpoint(too_many);
        *(if fits(len) { &mut most } else { &mut too_many }) = len;
    }
    Some(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tachyon_common::unwind::Rule;

    fn lens(rows: &[Row]) -> Vec<usize> {
        parts(rows).map(|part| usize::from(part.rows)).collect()
    }

    /// Dense code fills a chunk along with its index, and code after a wide gap gets a part of its own.
    #[test]
    fn a_part_is_bounded_by_its_rows_and_by_its_code() {
        let dense: Vec<Row> = (0..70_000).map(|at| Row::new(at * 4, Rule::END)).collect();
        let lengths = lens(&dense);
        assert_eq!(lengths.iter().sum::<usize>(), dense.len());
        assert!(parts(&dense).all(|part| part.words.len() <= ROWS_PER_CHUNK as usize));
        assert!(lengths[0] > 65_000, "{lengths:?}");
        let far = pages::MAX_PAGES * pages::PAGE_BYTES;
        let at = |pcs: &[u32]| pcs.iter().map(|pc| Row::new(*pc, Rule::END)).collect::<Vec<_>>();
        assert_eq!(lens(&at(&[8, 16, 8 + far - 1])), [3]);
        assert_eq!(lens(&at(&[8, 16, 8 + far, u32::MAX])), [2, 1, 1]);
        assert!(lens(&[]).is_empty());
    }
}
