//! The rules of one file's `.eh_frame`, compiled into rows.
//!
//! Only what a stack needs is kept: the CFA, and where the frame pointer and the return address were saved. Which rules have
//! a compact form depends on the processor ([`x86_64`], [`arm64`]). Everything in the file may be hostile: reads are
//! bounded, and if one function's rules make no sense, only that function is lost.

mod arm64;
mod assembly;
mod eh_return;
mod pieces;
mod window;
mod x86_64;

pub use arm64::is_outermost;
pub use window::Windows;

use self::assembly::Assembly;
use self::pieces::{Pieces, expression, rows_of};
use crate::remote::elf::{Elf, ElfError, Load, ReadAt};
use gimli::{
    BaseAddresses, CieOrFde, EhFrame, EhFrameHdr, EndianSlice, LittleEndian, Pointer, Register, RegisterRule,
    UnwindContextStorage, UnwindSection, UnwindTableRow, Vendor,
};
use std::collections::HashMap;
use std::ops::Range;
use tachyon_common::unwind::{Row, Rule};

/// Most bytes of `.eh_frame` that are read; PyTorch's largest library has 40 MiB.
const MAX_EH_FRAME: u64 = 128 << 20;

/// Most rows of one file: 4 million, 32 MiB.
pub const MAX_ROWS: usize = 1 << 22;

/// Most bytes of instructions that are run per byte of `.eh_frame`: instructions shared by functions are run for each of them.
/// Files from linkers need two at most.
const MAX_RUN: usize = 4;

/// Most shared parts that are kept at hand; real files have some dozens.
const MAX_SHARED: usize = 4096;

/// Most registers that one function has rules for; one that has more is lost. x86-64 has 17 of them and at most ten vector registers
/// that a caller wants back; arm64 has 31, a state and 16 vector registers.
const MAX_REGISTERS: usize = 48;

/// Where a function's rules are while they are run: the library's own place has room for 192 registers, 6 KiB that are copied for
/// each function.
#[derive(Debug)]
struct Registers;

impl UnwindContextStorage<usize> for Registers {
    type Rules = [(Register, RegisterRule<usize>); MAX_REGISTERS];
    type Stack = Box<[UnwindTableRow<usize, Self>; 4]>;
}

/// The rules of some of its addresses.
type RuleRow = UnwindTableRow<usize, Registers>;

/// The processor that a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machine {
    X86_64,
    Arm64,
}

impl Machine {
    fn of<R: ReadAt>(elf: &Elf<R>) -> Result<Self, Refusal> {
        match elf.machine() {
            object::elf::EM_X86_64 => Ok(Self::X86_64),
            object::elf::EM_AARCH64 => Ok(Self::Arm64),
            other => Err(Refusal::Machine(other)),
        }
    }

    /// The vendor whose additional instructions `.eh_frame` may use: arm64 marks where return addresses are signed.
    fn vendor(self) -> Vendor {
        match self {
            Self::X86_64 => Vendor::Default,
            Self::Arm64 => Vendor::AArch64,
        }
    }
}

/// Bytes of a section.
pub type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// Why a file's stacks cannot be unwound.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// It is not a readable ELF file.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// It is for another processor.
    #[error("it is for another processor (ELF machine {0})")]
    Machine(u16),
    /// It has no `.eh_frame`, or an empty one.
    #[error("it has no rules in .eh_frame")]
    NoTable,
    /// Its `.eh_frame` is larger than any real one.
    #[error("its .eh_frame has {0} bytes, more than {MAX_EH_FRAME}")]
    TooLarge(u64),
    /// Its `.eh_frame` makes no sense.
    #[error("its .eh_frame makes no sense: {0}")]
    Malformed(#[from] gimli::Error),
    /// Its functions share instructions out of all proportion.
    #[error("its .eh_frame has rules that take far longer to read than it is long")]
    TooDear,
    /// It has more rules than any real file.
    #[error("its .eh_frame has more than {MAX_ROWS} rows")]
    TooManyRows,
}

/// The compact table of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// What to subtract from a file address, before relocation, to get the form in which rows store it.
    pub base: u64,
    /// Sorted rows. A function ends at the first [`Rule::GAP`] after it.
    pub rows: Vec<Row>,
    /// Rows whose rule has no compact form.
    pub unsupported: usize,
    /// Functions of the file, before relocation, without rules in `.eh_frame`: theirs were derived from the instructions.
    /// Sorted.
    pub assembly: Vec<Range<u64>>,
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

/// Compiles the rules of a file for any supported processor.
///
/// # Errors
/// When it has none, or they cannot be read.
pub fn compile<R: ReadAt>(elf: &Elf<R>) -> Result<Table, Refusal> {
    let machine = Machine::of(elf)?;
    let (address, size) = locate(elf)?;
    if size > MAX_EH_FRAME {
        return Err(Refusal::TooLarge(size));
    }
    let mut bytes = vec![0; usize::try_from(size).map_err(|_| Refusal::TooLarge(size))?];
    elf.read_vaddr(address, &mut bytes)?;
    let section = section(&bytes, machine);
    let code: Vec<_> = elf.loads().iter().filter(|load| load.executable).collect();
    let base = code.iter().map(|load| load.vaddr).min().ok_or(Refusal::NoTable)?;
    let bases = BaseAddresses::default().set_eh_frame(address).set_text(base);
    let mut pieces = Pieces::new(Some(elf), &section, &bases, machine);
    if machine == Machine::Arm64 {
        pieces.extend(arm64::linkage_table(elf));
    }
    // A function that the linker discarded is left at address 0, or in no segment.
    pieces_of((&section, bytes.len()), &bases, &mut pieces, |start, end| is_mapped(&code, start, end))?;
    let mut pieces = pieces.finish();
    if pieces.is_empty() {
        // The compiler's own start files leave an end mark in files that were compiled without tables.
        return Err(Refusal::NoTable);
    }
    pieces.sort_by_key(|piece| piece.start);
    let parts = code.iter().map(|load| load.vaddr..load.vaddr.saturating_add(load.file_size));
    let assembly = match machine {
        Machine::X86_64 => assembly::functions(elf, &pieces, parts)?,
        Machine::Arm64 => Assembly::default(),
    };
    Ok(rows_of(pieces, assembly, base))
}

/// Adds all wanted functions of a section of that many bytes.
fn pieces_of<'a, R: ReadAt>(
    (section, len): (&'a EhFrame<Slice<'a>>, usize),
    bases: &'a BaseAddresses,
    pieces: &mut Pieces<'a, R>,
    wanted: impl Fn(u64, u64) -> bool,
) -> Result<(), Refusal> {
    let (mut cies, mut run) = (HashMap::new(), 0_usize);
    let mut entries = section.entries(bases);
    while let Some(entry) = entries.next()? {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(|section, bases, offset| match cies.get(&offset.0) {
            Some(known) => Ok(gimli::CommonInformationEntry::clone(known)),
            None => {
                let cie = section.cie_from_offset(bases, offset)?;
                if cies.len() >= MAX_SHARED {
                    cies.clear();
                }
                cies.insert(offset.0, cie.clone());
                Ok(cie)
            }
        });
        let Ok(fde) = fde else { continue };
        if wanted(fde.initial_address(), fde.end_address()) {
            run = run.saturating_add(fde.cie().entry_len().saturating_add(fde.entry_len()));
            if run > len.saturating_mul(MAX_RUN) {
                return Err(Refusal::TooDear);
            }
            pieces.add(&fde);
        }
        if pieces.len() > MAX_ROWS {
            return Err(Refusal::TooManyRows);
        }
    }
    Ok(())
}

/// The rules in a section at an address of a process on this machine: where each rule begins and ends there. Reading stops at the
/// first entry that makes no sense.
pub(super) fn rules_in_memory(bytes: &[u8], address: u64) -> Vec<(u64, u64, Rule)> {
    let machine = if cfg!(target_arch = "aarch64") { Machine::Arm64 } else { Machine::X86_64 };
    let section = section(bytes, machine);
    let bases = BaseAddresses::default().set_eh_frame(address);
    let mut pieces = Pieces::<&[u8]>::new(None, &section, &bases, machine);
    let _rest = pieces_of((&section, bytes.len()), &bases, &mut pieces, |start, end| start < end);
    pieces.finish().into_iter().map(|piece| (piece.start, piece.end, piece.rule)).collect()
}

/// The table of rules that begin and end at these addresses.
pub(super) fn table_of(rules: impl Iterator<Item = (u64, u64, Rule)>) -> Table {
    rows_of(rules.map(|(start, end, rule)| Piece { start, end, rule }).collect(), Assembly::default(), 0)
}

/// How many bytes of rules a file has: what its table costs to make.
///
/// # Errors
/// When it has none.
pub fn rules_len<R: ReadAt>(elf: &Elf<R>) -> Result<u64, Refusal> {
    Ok(locate(elf)?.1)
}

fn section(bytes: &[u8], machine: Machine) -> EhFrame<Slice<'_>> {
    let mut section = EhFrame::new(bytes, LittleEndian);
    section.set_address_size(8);
    section.set_vendor(machine.vendor());
    section
}

/// Whether a function lies in a segment that is mapped executable.
fn is_mapped(code: &[&Load], start: u64, end: u64) -> bool {
    start < end && code.iter().any(|load| start >= load.vaddr && end <= load.vaddr.saturating_add(load.mem_size))
}

/// Compiles the rules of the kernel's vdso; on arm64 it has none, so they are derived from its code.
///
/// # Errors
/// As [`compile()`], if the code cannot be understood either.
pub fn compile_vdso<R: ReadAt>(elf: &Elf<R>) -> Result<Table, Refusal> {
    match compile(elf) {
        Err(Refusal::NoTable) if elf.machine() == object::elf::EM_AARCH64 => arm64::vdso(elf).ok_or(Refusal::NoTable),
        compiled => compiled,
    }
}

/// Address and size of `.eh_frame`: from its section, otherwise from what the program header for it points to.
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
    // Version, encodings, and a pointer of at most 8 bytes; the search table after it is not needed.
    let mut head = [0; 12];
    elf.read_vaddr(address, &mut head)?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(address);
    let header = EhFrameHdr::new(&head, LittleEndian).parse(&bases, 8)?;
    let Pointer::Direct(start) = header.eh_frame_ptr() else { return Err(Refusal::NoTable) };
    // Its length is not recorded: it ends with an entry of length 0, at the latest with its segment.
    let holds =
        |load: &&crate::remote::elf::Load| start >= load.vaddr && start < load.vaddr.saturating_add(load.file_size);
    let load = elf.loads().iter().find(holds).ok_or(Refusal::NoTable)?;
    Ok((start, (load.vaddr + load.file_size - start).min(MAX_EH_FRAME)))
}

#[cfg(test)]
#[path = "compile/tests.rs"]
mod tests;
