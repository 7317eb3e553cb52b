//! Larger parts of an ELF file, for code that names addresses: all functions of a symbol table, whole sections, the
//! build id, the name of the file with its debug information.

use std::sync::Arc;

use object::elf;
use object::endian::LittleEndian as LE;

use super::read::{read_bounded, read_shared, read_table_bounded};
use super::{Elf, ElfError, Load, ReadAt, Section, Symbol};

/// Most bytes of a symbol table: 2.7 million symbols. libtorch's has 0.5 million.
const MAX_SYMBOLS: u64 = 64 << 20;

/// Most bytes of names where one is looked for: libtorch's and XLA's have 70 to 74 MiB.
const MAX_NAMES: u64 = 256 << 20;

/// Bytes of names, and of symbols, that are read at once where none is kept.
const PIECE: usize = 64 << 10;

/// Most bytes of notes that are searched.
const MAX_NOTES: u64 = 1 << 16;

/// Longest build id that is accepted: linkers write 8 to 20 bytes.
const MAX_BUILD_ID: usize = 64;

/// A function (or a name in code written by hand) of a symbol table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Function {
    /// Address, before relocation.
    pub vaddr: u64,
    /// Size in bytes; 0 when the file does not say.
    pub size: u64,
    /// Where its name starts in [`FunctionTable::names`].
    pub name: u32,
    /// Other files may use it.
    pub exported: bool,
}

/// What a symbol table says about functions.
#[derive(Clone, Debug)]
pub struct FunctionTable {
    /// In the order of the file.
    pub functions: Vec<Function>,
    /// The section that holds their names.
    pub names: Section,
}

impl<R: ReadAt> Elf<R> {
    /// The sections; none when the file has lost its section headers.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// A defined symbol of `.symtab`, however large that is: names and symbols are read piece by piece, and none is kept.
    ///
    /// # Errors
    /// When the table makes no sense or is larger than any real one.
    pub fn symtab_symbol(&self, name: &str) -> Result<Option<Symbol>, ElfError> {
        let Some(table) = self.sections.iter().find(|section| section.kind == elf::SHT_SYMTAB) else {
            return Ok(None);
        };
        let names = usize::try_from(table.link).ok().and_then(|link| self.sections.get(link));
        let names = names.ok_or(ElfError::Malformed("symbol table"))?;
        if table.size > MAX_SYMBOLS || names.size > MAX_NAMES {
            return Ok(None);
        }
        let wanted = [name.as_bytes(), b"\0"].concat();
        // Where it is in the section; in several places if other names end with it.
        let mut found = Vec::new();
        for start in (0..names.size).step_by(PIECE) {
            let len = (names.size - start).min((PIECE + wanted.len() - 1) as u64);
            let text = read_bounded(&self.source, names.offset.saturating_add(start), len, MAX_SYMBOLS)?;
            found.extend(memchr::memmem::find_iter(&text, &wanted).map(|at| start + at as u64));
        }
        let symbols = (table.size / 24) * u64::from(!found.is_empty());
        for start in (0..symbols).step_by(PIECE) {
            let count = (symbols - start).min(PIECE as u64);
            let offset = table.offset.saturating_add(start * 24);
            let symbols: Vec<elf::Sym64<LE>> = read_table_bounded(&self.source, offset, count, MAX_SYMBOLS)?;
            let is_it = |symbol: &&elf::Sym64<LE>| {
                let name = u64::from(symbol.st_name.get(LE));
                symbol.st_shndx.get(LE) != elf::SHN_UNDEF && found.binary_search(&name).is_ok()
            };
            if let Some(symbol) = symbols.iter().find(is_it) {
                return Ok(Some(Symbol { vaddr: symbol.st_value.get(LE), size: symbol.st_size.get(LE) }));
            }
        }
        Ok(None)
    }

    /// The defined functions of the first section of this type (`SHT_SYMTAB` or `SHT_DYNSYM`); `None` when there is no
    /// such section. `loads` are the segments of the mapped file: a file with only debug information has the addresses
    /// of that file.
    ///
    /// # Errors
    /// When the table makes no sense or is larger than any real one.
    pub fn functions(&self, kind: u32, loads: &[Load]) -> Result<Option<FunctionTable>, ElfError> {
        let Some(table) = self.sections.iter().find(|section| section.kind == kind) else { return Ok(None) };
        let names = usize::try_from(table.link).ok().and_then(|link| self.sections.get(link));
        let names = names.ok_or(ElfError::Malformed("symbol table"))?.clone();
        let symbols: Vec<elf::Sym64<LE>> =
            read_table_bounded(&self.source, table.offset, table.size / 24, MAX_SYMBOLS)?;
        let executable = |vaddr: u64| {
            let holds = |load: &&Load| vaddr >= load.vaddr && vaddr - load.vaddr < load.mem_size;
            loads.iter().find(holds).is_some_and(|load| load.executable)
        };
        let function = |symbol: &elf::Sym64<LE>| {
            let of_code = matches!(symbol.st_info & 0xf, elf::STT_FUNC | elf::STT_GNU_IFUNC | elf::STT_NOTYPE);
            let vaddr = symbol.st_value.get(LE);
            (of_code && symbol.st_shndx.get(LE) != elf::SHN_UNDEF && symbol.st_name.get(LE) != 0 && executable(vaddr))
                .then(|| Function {
                    vaddr,
                    size: symbol.st_size.get(LE),
                    name: symbol.st_name.get(LE),
                    exported: symbol.st_info >> 4 != elf::STB_LOCAL,
                })
        };
        Ok(Some(FunctionTable { functions: symbols.iter().filter_map(function).collect(), names }))
    }

    /// The bytes of a section, at most `most`.
    ///
    /// # Errors
    /// When it is larger, or cannot be read.
    pub fn section_bytes(&self, section: &Section, most: u64) -> Result<Vec<u8>, ElfError> {
        if section.kind == elf::SHT_NOBITS {
            return Ok(Vec::new());
        }
        read_bounded(&self.source, section.offset, section.size, most)
    }

    /// The same as bytes that can be shared.
    ///
    /// # Errors
    /// When it is larger, or cannot be read.
    pub fn shared_section_bytes(&self, section: &Section, most: u64) -> Result<Arc<[u8]>, ElfError> {
        if section.kind == elf::SHT_NOBITS {
            return Ok(Arc::default());
        }
        read_shared(&self.source, section.offset, section.size, most)
    }

    /// What the linker wrote to distinguish this build from all others (`NT_GNU_BUILD_ID`).
    #[must_use]
    pub fn build_id(&self) -> Option<Vec<u8>> {
        let sections = self.sections.iter().filter(|section| section.kind == elf::SHT_NOTE);
        // The program headers come first: a file with only debug information has notes only in sections.
        let parts = self.notes.iter().copied().chain(sections.map(|section| (section.offset, section.size)));
        parts.take(16).find_map(|(offset, size)| {
            let bytes = read_bounded(&self.source, offset, size, MAX_NOTES).ok()?;
            build_id_note(&bytes)
        })
    }

    /// Name and checksum of the file with the debug information (`.gnu_debuglink`).
    #[must_use]
    pub fn debuglink(&self) -> Option<(Vec<u8>, u32)> {
        let bytes = self.section_bytes(self.section(".gnu_debuglink")?, 4096).ok()?;
        let len = bytes.iter().position(|&byte| byte == 0)?;
        let sum = bytes.get(len.checked_add(4)? & !3..)?.first_chunk()?;
        // It is a name, not a path: it must not lead to other folders.
        let name = bytes.get(..len).filter(|name| !name.is_empty() && !name.contains(&b'/') && *name != b"..")?;
        Some((name.to_vec(), u32::from_le_bytes(*sum)))
    }
}

impl Load {
    /// The address of what is at this offset of the file in a segment with code.
    #[must_use]
    pub fn code_vaddr(loads: &[Self], offset: u64) -> Option<u64> {
        loads.iter().filter(|load| load.executable).find_map(|load| {
            let within = offset.checked_sub(load.offset)?;
            // A mapping has whole pages: what follows the last byte of the file's part is mapped, too.
            (within < load.mem_size).then(|| load.vaddr + within)
        })
    }
}

/// Searches notes: name size, description size, type, then name and description, each padded to 4 bytes.
fn build_id_note(mut bytes: &[u8]) -> Option<Vec<u8>> {
    loop {
        let (head, rest) = bytes.split_first_chunk::<12>()?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (name_len, len, kind) = (word(0) as usize, word(4) as usize, word(8));
        let padded = |len: usize| len.checked_add(3).map(|len| len & !3);
        let name = rest.get(..name_len)?;
        let rest = rest.get(padded(name_len)?..)?;
        let description = rest.get(..len)?;
        if kind == elf::NT_GNU_BUILD_ID && name == b"GNU\0" && (2..=MAX_BUILD_ID).contains(&len) {
            return Some(description.to_vec());
        }
        bytes = rest.get(padded(len)?..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_walked_with_their_padding() {
        let mut bytes = vec![5, 0, 0, 0, 1, 0, 0, 0, 9, 0, 0, 0];
        bytes.extend(b"ABCD\0\0\0\0x\0\0\0");
        bytes.extend([4, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 0]);
        bytes.extend(b"GNU\0\x01\x02\x03\0");
        assert_eq!(build_id_note(&bytes), Some(vec![1, 2, 3]));
        for cut in 0..bytes.len() - 1 {
            assert_eq!(build_id_note(&bytes[..cut]), None, "cut at {cut}");
        }
        assert_eq!(build_id_note(&[0xff; 64]), None);
    }

    #[test]
    fn an_offset_has_an_address_in_code_only() {
        let load = |offset, executable| Load {
            offset,
            file_size: 0x800,
            vaddr: offset + 0x40_0000,
            mem_size: 0x900,
            executable,
            writable: false,
        };
        let loads = [load(0, false), load(0x1000, true)];
        assert_eq!(Load::code_vaddr(&loads, 0x1010), Some(0x40_1010));
        assert_eq!(Load::code_vaddr(&loads, 0x10), None);
        assert_eq!(Load::code_vaddr(&loads, 0x1900), None);
    }
}
