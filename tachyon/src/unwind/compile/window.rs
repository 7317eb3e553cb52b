//! The rules of a piece of a file's code, found through the search table of `.eh_frame_hdr`: of a library with 40 MiB of
//! rules, samples need a few hundred kilobytes.

use super::{
    Assembly, MAX_EH_FRAME, MAX_RUN, MAX_SHARED, Machine, Pieces, Refusal, Table, assembly, is_mapped, locate, rows_of,
    section,
};
use crate::remote::elf::{Elf, ElfError, ReadAt};
use gimli::{BaseAddresses, UnwindSection as _};
use memmap2::MmapMut;
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// Bytes of code of one window: some 20,000 rows, which take 5 ms to make.
const WINDOW: u64 = 1 << 20;

/// Most functions of one window; the linker's smallest have 16 bytes.
const MAX_FUNCTIONS: u64 = WINDOW / 16;

/// How many functions that start before a window are included: they may reach into it.
const LOOK_BACK: u64 = 1;

/// Bytes of `.eh_frame` that are read at once.
const BLOCK: u64 = 16 << 10;

/// Longest entry that is read.
const MAX_ENTRY: u64 = 1 << 20;

/// A file whose rules can be made window by window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// Address of `.eh_frame`, and its size.
    rules: (u64, u64),
    /// Address of `.eh_frame_hdr`, and how many functions its search table has.
    header: u64,
    functions: u64,
    /// The lowest address of code.
    base: u64,
    /// Where code ends.
    end: u64,
}

impl Windows {
    /// The windows of a file; `None`: it has no search table, or one of a kind that linkers do not write.
    #[must_use]
    pub fn of<R: ReadAt>(elf: &Elf<R>) -> Option<Self> {
        let rules = locate(elf).ok().filter(|(_, size)| *size <= MAX_EH_FRAME)?;
        let (header, size) = elf.eh_frame_hdr()?;
        // Version 1; a pointer as 4 bytes from here; a count of 4 bytes; pairs of 4 bytes each from the header's start (Linux
        // Standard Base, "Exception Frame Header").
        let mut head = [0; 12];
        elf.read_vaddr(header, &mut head).ok()?;
        if head[..4] != [1, 0x1b, 0x03, 0x3b] {
            return None;
        }
        let functions = u64::from(u32::from_le_bytes([head[8], head[9], head[10], head[11]]));
        let code = || elf.loads().iter().filter(|load| load.executable);
        let base = code().map(|load| load.vaddr).min()?;
        let end = code().map(|load| load.vaddr.saturating_add(load.mem_size)).max()?;
        (functions > 0 && functions <= size / 8).then_some(Self { rules, header, functions, base, end })
    }

    /// The lowest address of code.
    #[must_use]
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The window that holds an address.
    #[must_use]
    pub fn at(&self, vaddr: u64) -> Option<Range<u64>> {
        let start = self.base + vaddr.checked_sub(self.base)? / WINDOW * WINDOW;
        (vaddr < self.end).then(|| start..start.saturating_add(WINDOW).min(self.end))
    }

    /// First address of the function that holds an address.
    pub fn function<R: ReadAt>(&self, elf: &Elf<R>, vaddr: u64) -> Option<u64> {
        let (start, entry) = self.pair(elf, self.after(elf, vaddr)?.checked_sub(1)?)?;
        // Length, shared entry, start and size: 4 bytes each, as in the linker's search table; otherwise the function is
        // unknown.
        let mut head = [0; 16];
        elf.read_vaddr(entry, &mut head).ok()?;
        let word = |at: usize| [head[at], head[at + 1], head[at + 2], head[at + 3]];
        let told = (entry + 8).wrapping_add_signed(i64::from(i32::from_le_bytes(word(8))));
        let size = u64::from(u32::from_le_bytes(word(12)));
        (told == start && vaddr - start < size).then_some(start)
    }

    /// Compiles the rules of a window.
    ///
    /// # Errors
    /// When the file is of another processor, or its rules cannot be read.
    pub fn compile<R: ReadAt>(&self, elf: &Elf<R>, window: &Range<u64>) -> Result<Table, Refusal> {
        let machine = Machine::of(elf)?;
        let first = self.after(elf, window.start).unwrap_or_default().saturating_sub(LOOK_BACK);
        let past = self.after(elf, window.end - 1).unwrap_or_default();
        let pairs = past.saturating_sub(first).min(MAX_FUNCTIONS);
        let mut bytes = vec![0; pairs as usize * 8];
        elf.read_vaddr(self.header + 12 + first * 8, &mut bytes)?;
        let offset = |pair: &[u8]| {
            let entry = i32::from_le_bytes([pair[4], pair[5], pair[6], pair[7]]);
            self.header.wrapping_add_signed(i64::from(entry)).checked_sub(self.rules.0).filter(|at| *at < self.rules.1)
        };
        let offsets: Vec<u64> = bytes.chunks_exact(8).filter_map(offset).collect();
        let mut sparse = Sparse::new(self.rules)?;
        for &at in &offsets {
            sparse.entry(elf, at)?;
        }
        let rules = section(&sparse.bytes, machine);
        let bases = BaseAddresses::default().set_eh_frame(self.rules.0).set_text(self.base);
        let code: Vec<_> = elf.loads().iter().filter(|load| load.executable).collect();
        let mut pieces = Pieces::new(Some(elf), &rules, &bases, machine);
        if machine == Machine::Arm64 {
            pieces.extend(super::arm64::linkage_table(elf));
        }
        let (mut cies, mut run) = (HashMap::new(), 0_usize);
        for &at in &offsets {
            let fde = rules.fde_from_offset(&bases, (at as usize).into(), |section, bases, offset| {
                if let Some(known) = cies.get(&offset.0) {
                    return Ok(gimli::CommonInformationEntry::clone(known));
                }
                let cie = section.cie_from_offset(bases, offset)?;
                if cies.len() < MAX_SHARED {
                    cies.insert(offset.0, cie.clone());
                }
                Ok(cie)
            });
            let Ok(fde) = fde else { continue };
            if !is_mapped(&code, fde.initial_address(), fde.end_address()) {
                continue;
            }
            run = run.saturating_add(fde.cie().entry_len().saturating_add(fde.entry_len()));
            // All of a window's functions may share an entry; in real files no more than a few do.
            if run > (sparse.read as usize).saturating_mul(MAX_RUN) {
                return Err(Refusal::TooDear);
            }
            pieces.add(&fde);
        }
        let mut pieces = pieces.finish();
        pieces.sort_by_key(|piece| piece.start);
        let mut assembly = match machine {
            Machine::X86_64 => {
                let part = self.whole_gaps(elf, (first, past), window);
                assembly::functions(elf, &pieces, std::iter::once(part))?
            }
            Machine::Arm64 => Assembly::default(),
        };
        for pieces in [&mut pieces, &mut assembly.pieces] {
            pieces.retain_mut(|piece| {
                (piece.start, piece.end) = (piece.start.max(window.start), piece.end.min(window.end));
                piece.start < piece.end
            });
        }
        assembly.functions.retain(|function| function.start < window.end && window.start < function.end);
        Ok(rows_of(pieces, assembly, window.start))
    }

    /// A window, extended on both sides to the next functions that have rules.
    fn whole_gaps<R: ReadAt>(&self, elf: &Elf<R>, (first, past): (u64, u64), window: &Range<u64>) -> Range<u64> {
        let start = self.pair(elf, first).map_or(self.base, |(start, _)| start.min(window.start));
        let next = (past < self.functions).then(|| self.pair(elf, past)).flatten();
        start..next.map_or(self.end, |(start, _)| start).max(window.end)
    }

    /// How many functions start at or below an address.
    fn after<R: ReadAt>(&self, elf: &Elf<R>, vaddr: u64) -> Option<u64> {
        let (mut from, mut to) = (0, self.functions);
        while from < to {
            let middle = from.midpoint(to);
            if self.pair(elf, middle)?.0 <= vaddr {
                from = middle + 1;
            } else {
                to = middle;
            }
        }
        Some(from)
    }

    /// Where a function starts, and its entry.
    fn pair<R: ReadAt>(&self, elf: &Elf<R>, index: u64) -> Option<(u64, u64)> {
        let mut pair = [0; 8];
        elf.read_vaddr(self.header + 12 + index * 8, &mut pair).ok()?;
        let at = |bytes: [u8; 4]| self.header.wrapping_add_signed(i64::from(i32::from_le_bytes(bytes)));
        Some((at([pair[0], pair[1], pair[2], pair[3]]), at([pair[4], pair[5], pair[6], pair[7]])))
    }
}

/// The part of `.eh_frame` that was read: untouched pages take no memory. (Those of the heap would, once the allocator uses it for blocks
/// of this size: 40 MiB where torch is imported.)
struct Sparse {
    bytes: MmapMut,
    address: u64,
    blocks: BTreeSet<u64>,
    read: u64,
}

impl Sparse {
    fn new((address, size): (u64, u64)) -> Result<Self, Refusal> {
        let bytes = MmapMut::map_anon(size as usize);
        let bytes = bytes.map_err(|source| ElfError::Read { offset: address, len: size, source })?;
        Ok(Self { bytes, address, blocks: BTreeSet::new(), read: 0 })
    }

    /// Reads an entry and the one that it shares.
    fn entry<R: ReadAt>(&mut self, elf: &Elf<R>, at: u64) -> Result<(), Refusal> {
        let (len, shared) = self.head(elf, at)?;
        self.ensure(elf, at, len)?;
        // The pointer says how far back from itself the shared entry lies.
        if let Some(shared) = (at + 4).checked_sub(u64::from(shared)) {
            let (len, _) = self.head(elf, shared)?;
            self.ensure(elf, shared, len)?;
        }
        Ok(())
    }

    /// Length of an entry including its length field, and the word after that. (64-bit entries are not written for
    /// these processors: such an entry makes no sense, and its function is lost.)
    fn head<R: ReadAt>(&mut self, elf: &Elf<R>, at: u64) -> Result<(u64, u32), Refusal> {
        self.ensure(elf, at, 8)?;
        let word = |at: u64| {
            let bytes = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..at + 4));
            bytes.map_or(0, |bytes| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        Ok(((u64::from(word(at)) + 4).min(MAX_ENTRY), word(at + 4)))
    }

    fn ensure<R: ReadAt>(&mut self, elf: &Elf<R>, at: u64, len: u64) -> Result<(), Refusal> {
        let end = at.saturating_add(len).min(self.bytes.len() as u64);
        let mut block = at / BLOCK * BLOCK;
        while block < end {
            if self.blocks.insert(block) {
                let until = (block + BLOCK).min(self.bytes.len() as u64);
                elf.read_vaddr(self.address + block, &mut self.bytes[block as usize..until as usize])?;
                self.read += until - block;
            }
            block += BLOCK;
        }
        Ok(())
    }
}
