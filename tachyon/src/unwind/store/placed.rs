//! One file's tables and where their rows lie; and the resulting ranges for a process that maps the file.

use super::kept::Unkept;
use super::{Source, Table, Windows};
use crate::remote::elf::{Elf, ReadAt};
use crate::remote::{FileIdentity, Mapping};
use std::collections::BTreeMap;
use tachyon_common::unwind::{Range, no_table, pages};

/// Where a [`TablePart`](crate::unwind::part::TablePart) is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) pc: u32,
    /// Index of its first row.
    pub(super) first: u32,
    pub(super) rows: u16,
    pub(super) pages: u16,
}

impl Part {
    /// Room for rows and index, in rows.
    pub(super) fn words(&self) -> u32 {
        u32::from(self.rows) + pages::index_words(u32::from(self.pages))
    }
}

/// Tables of one file, and where their rows are.
#[derive(Debug)]
pub(super) struct Placed {
    /// By the first address that they cover, before relocation.
    pub(super) tables: BTreeMap<u64, PlacedTable>,
    /// How further tables are made; `None`: there is one for the whole file.
    pub(super) windows: Option<Windows>,
    /// A sample was met in it: its other windows are made, too, while there is room.
    pub(super) met: bool,
    /// Windows before this address have been made, or tried.
    pub(super) next: u64,
    /// Bytes of its `.eh_frame`.
    pub(super) rules: u64,
    /// Segments that are mapped executable.
    pub(super) code: Vec<Code>,
    /// When it was last asked for, in calls of [`UnwindTables::map`](super::UnwindTables::map).
    pub(super) used: u64,
    /// Its table was made in this recording, and is to be written down for others.
    pub(super) unkept: Option<Box<Unkept>>,
}

#[derive(Debug)]
pub(super) struct PlacedTable {
    /// First address that it does not cover.
    pub(super) end: u64,
    pub(super) base: u64,
    pub(super) parts: Vec<Part>,
    /// When it was made, in calls of [`UnwindTables::map`](super::UnwindTables::map).
    pub(super) made: u64,
}

/// An executable segment: its place in the file, and what to add to a file offset to get its address before relocation.
#[derive(Clone, Copy, Debug)]
pub(in crate::unwind) struct Code {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) to_vaddr: u64,
}

impl Placed {
    pub(super) fn new(windows: Option<Windows>, rules: u64, code: Vec<Code>, used: u64) -> Self {
        Self { tables: BTreeMap::new(), windows, met: false, next: 0, rules, code, used, unkept: None }
    }

    /// With one table for all of the file.
    pub(super) fn whole(table: PlacedTable, rules: u64, code: Vec<Code>, used: u64) -> Self {
        Self { tables: BTreeMap::from([(0, table)]), ..Self::new(None, rules, code, used) }
    }

    /// The first window that has not been made yet, for a file that samples were met in.
    pub(super) fn missing(&mut self) -> Option<(Windows, std::ops::Range<u64>)> {
        let windows = self.windows.filter(|_| self.met)?;
        loop {
            let window = windows.at(self.next.max(windows.base()))?;
            self.next = window.end;
            if !self.tables.contains_key(&window.start) {
                return Some((windows, window));
            }
        }
    }

    /// The segment of a mapping, and the address before relocation of its start.
    pub(super) fn addresses(&self, mapping: &Mapping) -> Option<(Code, u64)> {
        // A mapping starts at a page boundary, a segment anywhere in the page.
        let code = self.code.iter().find(|code| mapping.offset >= code.start & !0xfff && mapping.offset < code.end)?;
        Some((*code, mapping.offset.wrapping_add(code.to_vaddr)))
    }

    /// Adds ranges for these addresses before relocation, which are mapped from `start` on.
    pub(super) fn add_ranges(&self, ranges: &mut Vec<Range>, start: u64, addresses: std::ops::Range<u64>) {
        let bias = start.wrapping_sub(addresses.start);
        let to = |vaddr: u64| vaddr.wrapping_add(bias);
        let stop = |start, end| Range {
            start: to(start),
            end: to(end),
            bias: 0,
            first_row: no_table::STOP,
            rows: 0,
            pages: 0,
        };
        let mut next = addresses.start;
        for (&first, table) in self.tables.range(..addresses.end) {
            let (first, end) = (first.max(next), table.end.min(addresses.end));
            if first >= end {
                continue;
            }
            if first > next {
                ranges.push(stop(next, first));
            }
            next = first;
            let at = |part: &Part| table.base.wrapping_add(u64::from(part.pc));
            for (place, part) in table.parts.iter().enumerate() {
                let until = table.parts.get(place + 1).map_or(end, at).min(end);
                if until > next && at(part) < end {
                    let Part { first, rows, pages, .. } = *part;
                    ranges.push(Range {
                        start: to(next),
                        end: to(until),
                        bias: to(at(part)),
                        first_row: first,
                        rows,
                        pages,
                    });
                    next = until;
                }
            }
            if next < end {
                ranges.push(stop(next, end));
                next = end;
            }
        }
        if next < addresses.end {
            ranges.push(stop(next, addresses.end));
        }
    }
}

/// The executable segments of a file.
pub(in crate::unwind) fn code_of<R: ReadAt>(elf: &Elf<R>) -> Vec<Code> {
    let code = elf.loads().iter().filter(|load| load.executable);
    code.map(|load| Code {
        start: load.offset,
        end: load.offset + load.file_size,
        to_vaddr: load.vaddr.wrapping_sub(load.offset),
    })
    .collect()
}

/// Bytes of code.
pub(super) fn len_of(code: &[Code]) -> u64 {
    code.iter().map(|code| code.end.saturating_sub(code.start)).sum()
}

/// The parts of a file whose rules in a table were derived from the instructions, by offset.
pub(in crate::unwind) fn assembly(
    source: Source,
    table: &Table,
    code: &[Code],
) -> Vec<(FileIdentity, std::ops::Range<u64>)> {
    let Source::File(file) = source else { return Vec::new() };
    let of = |part: &std::ops::Range<u64>| {
        let holds = |code: &&Code| (code.start..code.end).contains(&part.start.wrapping_sub(code.to_vaddr));
        let code = code.iter().find(holds)?;
        Some((file, part.start.wrapping_sub(code.to_vaddr)..part.end.wrapping_sub(code.to_vaddr)))
    };
    table.assembly.iter().filter_map(of).collect()
}
