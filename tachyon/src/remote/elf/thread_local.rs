//! Thread-local variables: where one lies in its module's block, and which words of the module the dynamic linker fills with
//! the block's location for each thread ("ELF Handling For Thread-Local Storage", Drepper; the ABIs of x86-64 and of arm64).

use object::elf;
use object::endian::LittleEndian as LE;

use super::read::read_table_bounded;
use super::{Elf, ElfError, ReadAt};

/// Most bytes of relocations that are read: libtorch's, the largest known, are 12 MB.
const MAX_RELOCATIONS: u64 = 32 << 20;

/// Largest block that is accepted: each thread has one.
const MAX_BLOCK: u64 = 1 << 30;

/// Relocations that are read at once.
const AT_ONCE: u64 = 2048;

/// Most slots of one file that are kept: they all say the same.
const MAX_SLOTS: usize = 16;

/// `PT_TLS`: the template for each thread's block of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TlsSegment {
    /// Address, before relocation: the block has the same offset from its alignment.
    pub vaddr: u64,
    /// Bytes of a block.
    pub mem_size: u64,
    /// Alignment; a power of two.
    pub align: u64,
}

/// A thread-local variable of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsSymbol {
    /// From the start of the module's block, in bytes.
    pub offset: u64,
    /// The module's block.
    pub segment: TlsSegment,
    /// Words that say where the block is, once the dynamic linker has filled them; the first ones of the file.
    pub slots: Vec<Slot>,
}

/// A word, or two, that the dynamic linker fills with the location of this module's block, or of something in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Address of the word, before relocation.
    pub vaddr: u64,
    /// What is put there.
    pub kind: SlotKind,
    /// From the start of the block to what the slot refers to, in bytes.
    pub within: u64,
}

/// What the dynamic linker puts into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotKind {
    /// The module's number in the thread's vector.
    #[doc(alias("R_X86_64_DTPMOD64", "R_AARCH64_TLS_DTPMOD"))]
    Module,
    /// The distance from the thread pointer.
    #[doc(alias("R_X86_64_TPOFF64", "R_AARCH64_TLS_TPREL"))]
    Offset,
    /// A function, and the argument from which it computes the distance.
    #[doc(alias("R_X86_64_TLSDESC", "R_AARCH64_TLSDESC"))]
    Descriptor,
}

impl SlotKind {
    fn of(machine: u16, kind: u32) -> Option<Self> {
        match (machine, kind) {
            (elf::EM_X86_64, elf::R_X86_64_DTPMOD64) | (elf::EM_AARCH64, elf::R_AARCH64_TLS_DTPMOD) => {
                Some(Self::Module)
            }
            (elf::EM_X86_64, elf::R_X86_64_TPOFF64) | (elf::EM_AARCH64, elf::R_AARCH64_TLS_TPREL) => Some(Self::Offset),
            (elf::EM_X86_64, elf::R_X86_64_TLSDESC) | (elf::EM_AARCH64, elf::R_AARCH64_TLSDESC) => {
                Some(Self::Descriptor)
            }
            _ => None,
        }
    }
}

impl TlsSegment {
    pub(super) fn of(program: &elf::ProgramHeader64<LE>) -> Self {
        Self {
            vaddr: program.p_vaddr.get(LE),
            mem_size: program.p_memsz.get(LE),
            align: program.p_align.get(LE).max(1),
        }
    }
}

impl<R: ReadAt> Elf<R> {
    /// The thread-local variable that the file exports under this name.
    ///
    /// # Errors
    /// When its tables make no sense.
    pub fn thread_local(&self, name: &str) -> Result<Option<TlsSymbol>, ElfError> {
        // Hardly any file has both a block of its own and this name: most are done here, without a read.
        let Some(segment) = self.thread_local else { return Ok(None) };
        let Some(found) = self.exported(name)?.filter(|found| found.kind == elf::STT_TLS) else { return Ok(None) };
        self.at_offset(segment, found.symbol.vaddr, found.index).map(Some)
    }

    /// The thread-local variable that the file keeps to itself under this name: as `.symtab` says, or at an offset where the file has lost
    /// that.
    ///
    /// # Errors
    /// When its tables make no sense.
    pub fn own_thread_local(&self, name: &str, if_stripped: u64) -> Result<Option<TlsSymbol>, ElfError> {
        let Some(segment) = self.thread_local else { return Ok(None) };
        let symbol = self.symtab_symbol(name)?;
        self.at_offset(segment, symbol.map_or(if_stripped, |symbol| symbol.vaddr), 0).map(Some)
    }

    /// `index`: that of the symbol; 0: relocations do not name it.
    fn at_offset(&self, segment: TlsSegment, offset: u64, index: u32) -> Result<TlsSymbol, ElfError> {
        let inside = offset.checked_add(8).is_some_and(|end| end <= segment.mem_size);
        if !inside || segment.mem_size > MAX_BLOCK || !segment.align.is_power_of_two() {
            return Err(ElfError::Malformed("thread-local segment"));
        }
        Ok(TlsSymbol { offset, segment, slots: self.slots(index, offset)? })
    }

    /// The slots that belong to this module: those of the symbol with this index, and those that name no symbol.
    fn slots(&self, index: u32, offset: u64) -> Result<Vec<Slot>, ElfError> {
        let mut slots = Vec::new();
        let mut left = MAX_RELOCATIONS;
        for &(vaddr, size) in self.dynamic.iter().flat_map(|dynamic| &dynamic.relocations) {
            left = left.checked_sub(size).ok_or(ElfError::Malformed("relocations"))?;
            for start in (0..size / 24).step_by(usize::try_from(AT_ONCE).unwrap_or(usize::MAX)) {
                let count = (size / 24 - start).min(AT_ONCE);
                let place = vaddr.checked_add(start * 24).ok_or(ElfError::Malformed("relocations"))?;
                let file = self.file_offset(place, count * 24)?;
                let read: Vec<elf::Rela64<LE>> = read_table_bounded(&self.source, file, count, AT_ONCE * 24)?;
                slots.extend(read.iter().filter_map(|relocation| self.slot(relocation, index, offset)));
                if slots.len() >= MAX_SLOTS {
                    slots.truncate(MAX_SLOTS);
                    return Ok(slots);
                }
            }
        }
        Ok(slots)
    }

    fn slot(&self, relocation: &elf::Rela64<LE>, index: u32, offset: u64) -> Option<Slot> {
        let kind = SlotKind::of(self.machine, relocation.r_type(LE, false))?;
        let named = match relocation.r_sym(LE, false) {
            0 => 0,
            symbol if symbol == index => offset,
            _ => return None,
        };
        let within = named.wrapping_add_signed(relocation.r_addend.get(LE));
        Some(Slot { vaddr: relocation.r_offset.get(LE), kind, within })
    }
}
