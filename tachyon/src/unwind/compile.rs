//! The rules of one file's `.eh_frame`, compiled into rows.
//!
//! Only what an x86-64 stack needs is kept: the CFA, `rbp`, and that the return address lies below the CFA. Everything in
//! the file may be hostile: what is read is bounded, and one function whose rules make no sense costs that function.

use crate::remote::elf::{Elf, ElfError, ReadAt};
use gimli::{
    BaseAddresses, CfaRule, CieOrFde, EhFrame, EhFrameHdr, EndianSlice, FrameDescriptionEntry, LittleEndian, Pointer,
    Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection, UnwindTableRow, X86_64,
};
use std::collections::HashMap;
use tachyon_common::unwind::{Row, Rule, kind, saved};

/// Most bytes of `.eh_frame` that are read; PyTorch's largest library has 40 MiB.
const MAX_EH_FRAME: u64 = 128 << 20;

/// Most rows of one file: 4 million, 32 MiB.
pub const MAX_ROWS: usize = 1 << 22;

/// `EM_X86_64`.
const MACHINE: u16 = object::elf::EM_X86_64;

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Why a file's stacks cannot be unwound.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It is no ELF file that can be read.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// It is for another processor.
    #[error("it is for another processor (ELF machine {0})")]
    Machine(u16),
    /// It has no `.eh_frame`.
    #[error("it has no .eh_frame")]
    NoTable,
    /// Its `.eh_frame` is larger than any real one.
    #[error("its .eh_frame has {0} bytes, more than {MAX_EH_FRAME}")]
    TooLarge(u64),
    /// Its `.eh_frame` makes no sense.
    #[error("its .eh_frame makes no sense: {0}")]
    Malformed(#[from] gimli::Error),
    /// It has more rules than any real file.
    #[error("its .eh_frame has more than {MAX_ROWS} rows")]
    TooManyRows,
}

/// The compact table of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// What to subtract from an address of the file, before relocation, to get the one that rows start at.
    pub base: u64,
    /// Rows, sorted. The first [`Rule::GAP`] after a function is where it ends.
    pub rows: Vec<Row>,
    /// Rows whose rule has no compact form.
    pub unsupported: usize,
}

impl Table {
    /// The rule at an address of the file, before relocation.
    #[must_use]
    pub fn rule(&self, vaddr: u64) -> Rule {
        let pc = vaddr.checked_sub(self.base).and_then(|pc| u32::try_from(pc).ok());
        let Some(pc) = pc else { return Rule::GAP };
        let after = self.rows.partition_point(|row| row.pc() <= pc);
        after.checked_sub(1).map_or(Rule::GAP, |at| self.rows[at].rule())
    }
}

/// Addresses, before relocation, at which one rule holds.
#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    end: u64,
    rule: Rule,
}

/// Compiles the rules of a file.
///
/// # Errors
/// When it has none, or they cannot be read.
pub fn compile<R: ReadAt>(elf: &Elf<R>) -> Result<Table, Refusal> {
    if elf.machine() != MACHINE {
        return Err(Refusal::Machine(elf.machine()));
    }
    let (address, size) = locate(elf)?;
    if size > MAX_EH_FRAME {
        return Err(Refusal::TooLarge(size));
    }
    let mut bytes = vec![0; usize::try_from(size).map_err(|_| Refusal::TooLarge(size))?];
    elf.read_vaddr(address, &mut bytes)?;
    let mut section = EhFrame::new(&bytes, LittleEndian);
    section.set_address_size(8);
    let code: Vec<_> = elf.loads().iter().filter(|load| load.executable).collect();
    let base = code.iter().map(|load| load.vaddr).min().ok_or(Refusal::NoTable)?;
    let bases = BaseAddresses::default().set_eh_frame(address).set_text(base);
    let mut pieces = Pieces { section: &section, bases: &bases, context: UnwindContext::new(), pieces: Vec::new() };
    let mut cies = HashMap::new();
    let mut entries = section.entries(&bases);
    while let Some(entry) = entries.next()? {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(|section, bases, offset| match cies.get(&offset.0) {
            Some(known) => Ok(gimli::CommonInformationEntry::clone(known)),
            None => {
                let cie = section.cie_from_offset(bases, offset)?;
                cies.insert(offset.0, cie.clone());
                Ok(cie)
            }
        });
        // A function that was thrown away when the file was linked is left at address 0, or in no segment.
        let Ok(fde) = fde else { continue };
        let (start, end) = (fde.initial_address(), fde.end_address());
        let mapped =
            |load: &&&crate::remote::elf::Load| start >= load.vaddr && end <= load.vaddr.saturating_add(load.mem_size);
        if start < end && code.iter().any(|load| mapped(&load)) {
            pieces.add(&fde);
        }
        if pieces.pieces.len() > MAX_ROWS {
            return Err(Refusal::TooManyRows);
        }
    }
    Ok(rows_of(pieces.pieces, base))
}

/// Address and size of `.eh_frame`: by its section, else by what the program header for it points to.
fn locate<R: ReadAt>(elf: &Elf<R>) -> Result<(u64, u64), Refusal> {
    if let Some(section) = elf.section(".eh_frame")
        && section.vaddr != 0
    {
        return Ok((section.vaddr, section.size));
    }
    let (address, size) = elf.eh_frame_hdr().ok_or(Refusal::NoTable)?;
    if size > MAX_EH_FRAME {
        return Err(Refusal::TooLarge(size));
    }
    // Version, encodings, and a pointer of at most 8 bytes; the search table behind is not needed.
    let mut head = [0; 12];
    elf.read_vaddr(address, &mut head)?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(address);
    let header = EhFrameHdr::new(&head, LittleEndian).parse(&bases, 8)?;
    let Pointer::Direct(start) = header.eh_frame_ptr() else { return Err(Refusal::NoTable) };
    // How long it is nobody says: it ends with an entry of length 0, at the latest with its segment.
    let holds =
        |load: &&crate::remote::elf::Load| start >= load.vaddr && start < load.vaddr.saturating_add(load.file_size);
    let load = elf.loads().iter().find(holds).ok_or(Refusal::NoTable)?;
    Ok((start, (load.vaddr + load.file_size - start).min(MAX_EH_FRAME)))
}

/// Collects pieces, function by function.
struct Pieces<'a> {
    section: &'a EhFrame<Slice<'a>>,
    bases: &'a BaseAddresses,
    context: UnwindContext<usize>,
    pieces: Vec<Piece>,
}

impl<'a> Pieces<'a> {
    fn add(&mut self, fde: &FrameDescriptionEntry<Slice<'a>>) {
        let (start, end) = (fde.initial_address(), fde.end_address());
        let before = self.pieces.len();
        if self.add_rows(fde).is_err() {
            self.pieces.truncate(before);
            self.pieces.push(Piece { start, end, rule: Rule::UNSUPPORTED });
        }
    }

    fn add_rows(&mut self, fde: &FrameDescriptionEntry<Slice<'a>>) -> gimli::Result<()> {
        let limit = fde.end_address();
        let signal = fde.is_signal_trampoline();
        let mut rows = fde.rows(self.section, self.bases, &mut self.context)?;
        while let Some(row) = rows.next_row()? {
            let (start, end) = (row.start_address(), row.end_address().min(limit));
            if start >= end {
                continue;
            }
            let rule = compact(self.section, row, signal);
            match self.pieces.last_mut() {
                Some(last) if last.end == start && last.rule == rule => last.end = end,
                _ => self.pieces.push(Piece { start, end, rule }),
            }
            if self.pieces.len() > MAX_ROWS {
                break;
            }
        }
        Ok(())
    }
}

/// The bytes of an expression.
fn expression<'a>(section: &EhFrame<Slice<'a>>, expression: &UnwindExpression<usize>) -> Option<&'a [u8]> {
    expression.get(section).ok().map(|found| found.0.slice())
}

/// The compact form of one row.
fn compact(section: &EhFrame<Slice<'_>>, row: &UnwindTableRow<usize>, signal: bool) -> Rule {
    if signal {
        return signal_return(section, row);
    }
    match row.register(X86_64::RA) {
        RegisterRule::Undefined => return Rule::END,
        RegisterRule::Offset(-8) => {}
        _ => return Rule::UNSUPPORTED,
    }
    let saved = match row.register(X86_64::RBP) {
        RegisterRule::Undefined | RegisterRule::SameValue => Some(saved::UNCHANGED),
        RegisterRule::Offset(offset) if offset < 0 && offset % 8 == 0 => {
            u32::try_from(offset / -8).ok().filter(|words| *words <= saved::MAX)
        }
        // `DW_OP_breg6 0`.
        RegisterRule::Expression(at) if expression(section, &at) == Some(&[0x76, 0]) => Some(saved::AT_FP),
        _ => None,
    };
    let Some(saved) = saved else { return Rule::UNSUPPORTED };
    let rule = match row.cfa() {
        CfaRule::RegisterAndOffset { register, offset } => {
            base_kind(*register, kind::SP, kind::FP).and_then(|kind| Rule::new(kind, *offset, saved))
        }
        CfaRule::Expression(cfa) => expression(section, cfa).and_then(|bytes| cfa_expression(bytes, saved)),
    };
    rule.unwrap_or(Rule::UNSUPPORTED)
}

fn base_kind(register: Register, sp: u32, fp: u32) -> Option<u32> {
    match register {
        X86_64::RSP => Some(sp),
        X86_64::RBP => Some(fp),
        _ => None,
    }
}

/// The two kinds of expression that compilers, assemblers and linkers write for a CFA.
fn cfa_expression(bytes: &[u8], saved: u32) -> Option<Rule> {
    // binutils, `bfd/elfxx-x86.c`: rsp + 8 + ((rip & 15) >= n) << 3.
    if let [0x77, 8, 0x80, 0, 0x3f, 0x1a, threshold @ 0x30..=0x3f, 0x2a, 0x33, 0x24, 0x22] = bytes {
        return Rule::new(kind::PLT, i64::from(threshold - 0x30) * 8, saved);
    }
    // `DW_OP_breg7` or `DW_OP_breg6`, an offset, `DW_OP_deref`, perhaps `DW_OP_plus_uconst`.
    let (&register, rest) = bytes.split_first()?;
    let kind = match register {
        0x77 => kind::DEREF_SP,
        0x76 => kind::DEREF_FP,
        _ => return None,
    };
    let mut rest = EndianSlice::new(rest, LittleEndian);
    let inner = gimli::Reader::read_sleb128(&mut rest).ok()?;
    let (&deref, rest) = rest.slice().split_first()?;
    if deref != 0x06 {
        return None;
    }
    let outer = match rest.split_first() {
        None => 0,
        Some((0x23, rest)) => {
            let mut rest = EndianSlice::new(rest, LittleEndian);
            let outer = gimli::Reader::read_uleb128(&mut rest).ok()?;
            if !rest.is_empty() {
                return None;
            }
            i64::try_from(outer).ok()?
        }
        Some(_) => return None,
    };
    Rule::deref(kind, inner, outer, saved)
}

/// A signal trampoline whose registers are where Linux puts them (`struct ucontext` at `rsp`).
fn signal_return(section: &EhFrame<Slice<'_>>, row: &UnwindTableRow<usize>) -> Rule {
    // `DW_OP_breg7` and an offset as LEB128: 160, 168 and 120 in two bytes each.
    let at = |rule: RegisterRule<usize>, place: &[u8]| match rule {
        RegisterRule::Expression(found) => expression(section, &found) == Some(place),
        _ => false,
    };
    let cfa = match row.cfa() {
        CfaRule::Expression(cfa) => expression(section, cfa) == Some(&[0x77, 0xa0, 1, 0x06]),
        CfaRule::RegisterAndOffset { .. } => false,
    };
    let rip = at(row.register(X86_64::RA), &[0x77, 0xa8, 1]);
    let rbp = at(row.register(X86_64::RBP), &[0x77, 0xf8, 0]);
    if cfa && rip && rbp { Rule::SIGNAL } else { Rule::UNSUPPORTED }
}

/// Sorts pieces and makes them rows. Where two overlap, the one that starts later is believed.
fn rows_of(mut pieces: Vec<Piece>, base: u64) -> Table {
    pieces.sort_by_key(|piece| piece.start);
    let mut table = Table { base, rows: Vec::with_capacity(pieces.len() + pieces.len() / 8), unsupported: 0 };
    for (at, piece) in pieces.iter().enumerate() {
        let next = pieces.get(at + 1).map(|next| next.start);
        if next == Some(piece.start) {
            continue;
        }
        let Ok(pc) = u32::try_from(piece.start - base) else { break };
        table.push(Row::new(pc, piece.rule));
        // Between two functions the linker pads; a hole of less than 16 bytes that no code runs in is not worth a row.
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

#[cfg(test)]
#[path = "compile/tests.rs"]
mod tests;
