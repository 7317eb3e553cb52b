//! Turns functions' rules into rows: collected function by function, then sorted.

use super::assembly::Assembly;
use super::eh_return::{self, EhReturn};
use super::{MAX_ROWS, Machine, Piece, Registers, Slice, Table, arm64, x86_64};
use crate::remote::elf::{Elf, ReadAt};
use gimli::{BaseAddresses, EhFrame, FrameDescriptionEntry, UnwindContext, UnwindExpression};
use tachyon_common::unwind::{Row, Rule};

/// Collects pieces, function by function.
pub(super) struct Pieces<'a, R> {
    /// `None`: the code is in no file.
    elf: Option<&'a Elf<R>>,
    section: &'a EhFrame<Slice<'a>>,
    bases: &'a BaseAddresses,
    machine: Machine,
    context: UnwindContext<usize, Registers>,
    pieces: Vec<Piece>,
}

impl<'a, R: ReadAt> Pieces<'a, R> {
    pub fn new(
        elf: Option<&'a Elf<R>>,
        section: &'a EhFrame<Slice<'a>>,
        bases: &'a BaseAddresses,
        machine: Machine,
    ) -> Self {
        Self { elf, section, bases, machine, context: UnwindContext::new_in(), pieces: Vec::new() }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    pub fn extend(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        self.pieces.extend(pieces);
    }

    /// All of them.
    pub fn finish(self) -> Vec<Piece> {
        self.pieces
    }

    /// Adds a function.
    pub fn add(&mut self, fde: &FrameDescriptionEntry<Slice<'a>>) {
        let (start, end) = (fde.initial_address(), fde.end_address());
        let before = self.pieces.len();
        if self.add_rows(fde).is_err() {
            self.pieces.truncate(before);
            self.pieces.push(Piece { start, end, rule: Rule::UNSUPPORTED });
        }
    }

    /// Puts a rule in place of those of the pieces from `first` on.
    fn replace(&mut self, first: usize, new: &Piece) {
        let old: Vec<Piece> = self.pieces.drain(first..).collect();
        for piece in old {
            let (start, end) = (new.start.clamp(piece.start, piece.end), new.end.clamp(piece.start, piece.end));
            let parts = [(piece.start, start, piece.rule), (start, end, new.rule), (end, piece.end, piece.rule)];
            let parts = parts.into_iter().map(|(start, end, rule)| Piece { start, end, rule });
            self.pieces.extend(parts.filter(|part| part.start < part.end));
        }
    }

    fn add_rows(&mut self, fde: &FrameDescriptionEntry<Slice<'a>>) -> gimli::Result<()> {
        let limit = fde.end_address();
        let signal = fde.is_signal_trampoline();
        let outermost = self.machine == Machine::Arm64 && arm64::is_outermost(fde, self.section, self.bases);
        let (before, mut eh_return, mut throws) = (self.pieces.len(), EhReturn::default(), false);
        let mut rows = fde.rows(self.section, self.bases, &mut self.context)?;
        while let Some(row) = rows.next_row()? {
            let (start, end) = (row.start_address(), row.end_address().min(limit));
            if start >= end {
                continue;
            }
            let rule = match self.machine {
                Machine::X86_64 if eh_return.take(row) => Rule::UNSUPPORTED,
                Machine::X86_64 => x86_64::compact(self.section, row, signal),
                Machine::Arm64 => arm64::compact(row, signal, outermost),
            };
            throws |= self.machine == Machine::Arm64 && eh_return::arm64::saves(row);
            match self.pieces.last_mut() {
                Some(last) if last.end == start && last.rule == rule => last.end = end,
                _ => self.pieces.push(Piece { start, end, rule }),
            }
            if self.pieces.len() > MAX_ROWS {
                break;
            }
        }
        if let Some(installed) = self.elf.and_then(|elf| eh_return.installed(elf, fde.initial_address())) {
            self.replace(before, &installed);
        }
        let code = self.elf.filter(|_| throws).and_then(|elf| eh_return::function(elf, fde.initial_address()..limit));
        for at in code.iter().flat_map(|code| eh_return::arm64::installed(code, fde.initial_address())) {
            self.replace(before, &Piece { start: at.start, end: at.end, rule: Rule::UNSUPPORTED });
        }
        Ok(())
    }
}

/// The bytes of an expression.
pub(super) fn expression<'a>(section: &EhFrame<Slice<'a>>, expression: &UnwindExpression<usize>) -> Option<&'a [u8]> {
    expression.get(section).ok().map(|found| found.0.slice())
}

/// Sorts pieces, those of `.eh_frame` and others, and turns them into rows. Where two overlap, the one that starts later wins.
pub(super) fn rows_of(mut pieces: Vec<Piece>, mut assembly: Assembly, base: u64) -> Table {
    pieces.extend(assembly.pieces);
    pieces.sort_by_key(|piece| piece.start);
    assembly.functions.sort_by_key(|function| function.start);
    let rows = Vec::with_capacity(pieces.len() + pieces.len() / 8);
    let mut table = Table { base, rows, unsupported: 0, assembly: assembly.functions };
    for (at, piece) in pieces.iter().enumerate() {
        let next = pieces.get(at + 1).map(|next| next.start);
        if next == Some(piece.start) {
            continue;
        }
        let Ok(pc) = u32::try_from(piece.start - base) else { break };
        table.push(Row::new(pc, piece.rule));
        // The linker pads between two functions; a hole of less than 16 bytes in which no code runs is not worth a row.
        let gap = next.is_none_or(|next| next > piece.end.saturating_add(15));
        if gap && let Ok(end) = u32::try_from(piece.end - base) {
            table.push(Row::new(end, Rule::GAP));
        }
    }
    table.rows.shrink_to_fit();
    table
}

impl Table {
    /// Adds a row, unless the one before says the same.
    fn push(&mut self, row: Row) {
        if self.rows.last().is_some_and(|last| last.rule() == row.rule()) {
            return;
        }
        self.unsupported += usize::from(row.rule() == Rule::UNSUPPORTED);
        self.rows.push(row);
    }
}
