//! The procedure linkage table: code without symbols, and often without unwind rules, through which a file calls functions of others.

use object::elf;
use object::endian::LittleEndian as LE;

use super::read::read_table_bounded;
use super::{Elf, ReadAt, Section};

/// Bytes of an entry (System V ABI for x86-64, 5.2).
const ENTRY: u64 = 16;

impl<R: ReadAt> Elf<R> {
    /// The name of the function that the entry at an address calls, and where the entry begins; for x86-64. `None`: there is none, or
    /// the file has lost its section headers.
    #[must_use]
    pub fn plt_entry(&self, vaddr: u64) -> Option<(Vec<u8>, u64)> {
        if self.machine() != elf::EM_X86_64 {
            return None;
        }
        // What calls the dynamic loader comes first. Where entries are targets of guarded jumps, they are in a section of their own.
        let (section, header) = [(".plt", ENTRY), (".plt.sec", 0)].into_iter().find_map(|(name, header)| {
            let section = self.section(name)?;
            (vaddr.checked_sub(section.vaddr)? < section.size).then_some((section, header))
        })?;
        let number = (vaddr - section.vaddr).checked_sub(header)? / ENTRY;
        let start = section.vaddr + header + number * ENTRY;
        // Linkers write entries in the order of their relocations. Other kinds of entries exist, so the jump itself is read, too.
        let relocations = self.section(".rela.plt")?;
        let relocation: elf::Rela64<LE> = self.element(relocations, number)?;
        if self.jumps_through(start)? != relocation.r_offset.get(LE) {
            return None;
        }
        let linked = |section: &Section| self.sections().get(usize::try_from(section.link).ok()?);
        let symbols = linked(relocations)?;
        let symbol: elf::Sym64<LE> = self.element(symbols, u64::from(relocation.r_sym(LE, false)))?;
        let name = self.c_string(linked(symbols)?.vaddr.checked_add(u64::from(symbol.st_name.get(LE)))?)?;
        (!name.is_empty()).then_some((name, start))
    }

    /// The address of the pointer through which an entry jumps: `jmp *pointer(%rip)`, after `endbr64` and with a `bnd` prefix perhaps.
    fn jumps_through(&self, entry: u64) -> Option<u64> {
        let mut code = [0; ENTRY as usize];
        self.read_vaddr(entry, &mut code).ok()?;
        let after = |at: usize, prefix: &[u8]| if code[at..].starts_with(prefix) { at + prefix.len() } else { at };
        let at = after(after(0, &[0xf3, 0x0f, 0x1e, 0xfa]), &[0xf2]);
        let distance = code[at..].strip_prefix(&[0xff, 0x25])?.first_chunk().map(|bytes| i32::from_le_bytes(*bytes))?;
        Some(entry.wrapping_add(at as u64 + 6).wrapping_add_signed(distance.into()))
    }

    /// An element of a section that is a table.
    fn element<T: object::Pod + Copy>(&self, section: &Section, number: u64) -> Option<T> {
        let size = size_of::<T>() as u64;
        let at = number.checked_mul(size).filter(|at| *at < section.size)?;
        read_table_bounded(&self.source, section.offset.checked_add(at)?, 1, size).ok()?.pop()
    }
}
