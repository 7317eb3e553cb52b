//! Allocates room for tables and writes them there.

use super::placed::{Code, Part, Placed, PlacedTable};
use super::{Known, Source, TableMemory, UnwindTables};
use crate::unwind::{Generated, Table, TablePart, parts};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

impl UnwindTables {
    /// The source of generated code with these rules, which are written if they are new.
    pub(super) fn generated(
        &mut self,
        Generated { table, len }: &Generated,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<Source> {
        let mut hasher = DefaultHasher::new();
        len.hash(&mut hasher);
        table.rows.iter().for_each(|row| row.0.hash(&mut hasher));
        let source = Source::Generated(hasher.finish());
        if let Some(Known::Placed(placed)) = self.known.get_mut(&source) {
            placed.used = self.calls;
            return Some(source);
        }
        let placed = self.place(table, *len, in_use, memory)?;
        let code = vec![Code { start: 0, end: *len, to_vaddr: 0 }];
        self.remember(source, Known::Placed(Placed::whole(placed, 0, code, self.calls)));
        Some(source)
    }

    /// Finds room for a table, and writes it there.
    pub(super) fn place(
        &mut self,
        table: &Table,
        end: u64,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<PlacedTable> {
        let mut placed = Vec::new();
        for part in parts(&table.rows) {
            let Some(part) = self.place_part(&part, in_use, memory) else {
                self.give_back(&placed);
                return None;
            };
            placed.push(part);
        }
        Some(PlacedTable { end, base: table.base, parts: placed, made: self.calls })
    }

    fn place_part(
        &mut self,
        part: &TablePart,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<Part> {
        let count = u32::try_from(part.words.len()).ok()?;
        let first = loop {
            match self.rows.take(count) {
                Some(first) => break first,
                None => self.evict(in_use)?,
            }
        };
        let placed = Part { pc: part.pc, first, rows: part.rows, pages: part.pages };
        if !memory.write_rows(first, &part.words) {
            self.give_back(&[placed]);
            return None;
        }
        Some(placed)
    }
}
