//! Reads from an ELF file without trusting it: headers, segments, symbols by name, bytes at an address.
//!
//! Reads only the parts that are needed, so that a library of hundreds of megabytes costs a few small reads. All
//! numbers are the file's own and may be hostile: every read and every loop is bounded, and what makes no sense is an
//! [`ElfError`]. Only 64-bit little-endian files are of use here.

mod contents;
mod dynamic;
mod plt;
mod read;
#[cfg(test)]
mod tests;
mod thread_local;

use std::io;

use object::elf;
use object::endian::LittleEndian as LE;

pub use contents::{Function, FunctionTable};
pub use read::ReadAt;
use read::{read_bytes, read_pod, read_table};
pub use thread_local::{Slot, SlotKind, TlsSegment, TlsSymbol};

/// Most program headers, of which linkers write about a dozen.
const MAX_PROGRAM_HEADERS: u16 = 512;

/// Most section headers; linkers write about forty.
const MAX_SECTION_HEADERS: u16 = 8192;

/// Most bytes of section names and of the dynamic section.
const MAX_SMALL_TABLE: u64 = 1 << 20;

/// Longest symbol name that is compared, and longest file name that is read.
const MAX_NAME: usize = 256;

/// Most libraries of one file; real ones need a dozen.
const MAX_NEEDED: usize = 64;

/// Most bytes of `.symtab` and of its names, which have no hash table and are scanned (CPython's have 0.4 MB).
const MAX_SYMTAB: u64 = 8 << 20;

/// Why an ELF file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ElfError {
    /// It does not start like a 64-bit little-endian ELF file.
    #[error("not a 64-bit little-endian ELF file")]
    NotElf,
    /// It cannot be read where its own headers point to.
    #[error("cannot read {len} bytes at offset {offset:#x} of the file: {source}")]
    Read {
        /// Offset in the file.
        offset: u64,
        /// How many bytes were wanted.
        len: u64,
        /// What went wrong.
        source: io::Error,
    },
    /// A header makes no sense.
    #[error("its {0} makes no sense")]
    Malformed(&'static str),
    /// No segment of the file holds the address.
    #[error("no segment holds {len} bytes at {vaddr:#x}")]
    NoSegment {
        /// The address, before relocation.
        vaddr: u64,
        /// How many bytes were wanted.
        len: u64,
    },
}

/// A `PT_LOAD` program header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// Offset in the file.
    pub offset: u64,
    /// Bytes that come from the file.
    pub file_size: u64,
    /// Address, before relocation.
    pub vaddr: u64,
    /// Bytes in memory; what is more than `file_size` is zero.
    pub mem_size: u64,
    /// May be executed.
    pub executable: bool,
    /// May be written.
    pub writable: bool,
}

/// A defined symbol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Address, before relocation.
    pub vaddr: u64,
    /// Size in bytes; 0 when the file does not say.
    pub size: u64,
}

/// A section header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its name; bytes that are not UTF-8 are replaced.
    pub name: String,
    /// `sh_type`.
    pub kind: u32,
    /// `sh_link`.
    pub link: u32,
    /// `sh_flags`.
    pub flags: u64,
    /// Address, before relocation; 0 when it is not loaded.
    pub vaddr: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Size in bytes.
    pub size: u64,
}

/// Addresses of the dynamic symbol table and its helpers, from `PT_DYNAMIC`.
#[derive(Clone, Debug, Default)]
struct Dynamic {
    symtab: u64,
    strtab: u64,
    hash: u64,
    gnu_hash: u64,
    soname: Option<u64>,
    /// `DT_NEEDED`, at most [`MAX_NEEDED`] of them.
    needed: Vec<u64>,
    /// `DT_RUNPATH`, else `DT_RPATH`.
    run_path: Option<u64>,
    /// Address and size of `DT_RELA`, and of `DT_JMPREL`.
    relocations: [(u64, u64); 2],
}

/// An ELF file whose headers were read and checked.
#[derive(Debug)]
pub struct Elf<R> {
    source: R,
    machine: u16,
    fixed_address: bool,
    loads: Vec<Load>,
    /// Offset and size of each `PT_NOTE`.
    notes: Vec<(u64, u64)>,
    sections: Vec<Section>,
    dynamic: Option<Dynamic>,
    eh_frame_hdr: Option<(u64, u64)>,
    thread_local: Option<TlsSegment>,
    /// Offset and size of `PT_INTERP`.
    linker: Option<(u64, u64)>,
}

impl<R: ReadAt> Elf<R> {
    /// Reads the headers.
    ///
    /// # Errors
    /// When it is not an ELF file of the right kind, cannot be read or its headers make no sense.
    pub fn parse(source: R) -> Result<Self, ElfError> {
        let len = source.len_bytes().map_err(|source| ElfError::Read { offset: 0, len: 0, source })?;
        if len < size_of::<elf::FileHeader64<LE>>() as u64 {
            return Err(ElfError::NotElf);
        }
        let header: elf::FileHeader64<LE> = read_pod(&source, 0)?;
        let ident = &header.e_ident;
        if ident.magic != elf::ELFMAG || ident.class != elf::ELFCLASS64 || ident.data != elf::ELFDATA2LSB {
            return Err(ElfError::NotElf);
        }
        let kind = header.e_type.get(LE);
        if kind != elf::ET_EXEC && kind != elf::ET_DYN {
            return Err(ElfError::Malformed("file type"));
        }
        let count = header.e_phnum.get(LE);
        if count > MAX_PROGRAM_HEADERS || header.e_phentsize.get(LE) != 56 {
            return Err(ElfError::Malformed("program header table"));
        }
        let programs: Vec<elf::ProgramHeader64<LE>> = read_table(&source, header.e_phoff.get(LE), u64::from(count))?;
        let loads = programs.iter().filter(|program| program.p_type.get(LE) == elf::PT_LOAD);
        let loads = loads.map(Load::checked).collect::<Result<Vec<_>, _>>()?;
        let notes = programs.iter().filter(|program| program.p_type.get(LE) == elf::PT_NOTE);
        let notes = notes.map(|program| (program.p_offset.get(LE), program.p_filesz.get(LE))).collect();
        let mut elf = Self {
            machine: header.e_machine.get(LE),
            fixed_address: kind == elf::ET_EXEC,
            loads,
            notes,
            sections: Vec::new(),
            dynamic: None,
            eh_frame_hdr: programs
                .iter()
                .find(|program| program.p_type.get(LE) == elf::PT_GNU_EH_FRAME)
                .map(|program| (program.p_vaddr.get(LE), program.p_memsz.get(LE))),
            thread_local: programs.iter().find(|program| program.p_type.get(LE) == elf::PT_TLS).map(TlsSegment::of),
            linker: programs
                .iter()
                .find(|program| program.p_type.get(LE) == elf::PT_INTERP)
                .map(|program| (program.p_offset.get(LE), program.p_filesz.get(LE))),
            source,
        };
        // A file with only debug information has none of these bytes: its headers point to other content, or nowhere.
        let dynamic = |program: &&elf::ProgramHeader64<LE>| program.p_type.get(LE) == elf::PT_DYNAMIC;
        if let Some(program) = programs.iter().find(dynamic).filter(|program| program.p_filesz.get(LE) > 0) {
            elf.dynamic = Some(elf.read_dynamic(program)?);
        }
        // Files can do without section headers (packers and `sstrip` cut them off): that is not an error.
        elf.sections = elf.read_sections(&header).unwrap_or_default();
        Ok(elf)
    }

    /// `e_machine`.
    #[must_use]
    pub fn machine(&self) -> u16 {
        self.machine
    }

    /// Whether it is loaded at the addresses it names (`ET_EXEC`).
    #[must_use]
    pub fn fixed_address(&self) -> bool {
        self.fixed_address
    }

    /// Its loadable segments.
    #[must_use]
    pub fn loads(&self) -> &[Load] {
        &self.loads
    }

    /// Address and size of `.eh_frame_hdr`, before relocation (`PT_GNU_EH_FRAME`).
    #[must_use]
    pub fn eh_frame_hdr(&self) -> Option<(u64, u64)> {
        self.eh_frame_hdr
    }

    /// The first section of this name.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|section| section.name == name)
    }

    /// Fills `into` with the file's own bytes for `vaddr`: what is there before the program runs.
    ///
    /// # Errors
    /// When no single segment's part of the file holds all of them.
    pub fn read_vaddr(&self, vaddr: u64, into: &mut [u8]) -> Result<(), ElfError> {
        let len = into.len() as u64;
        let offset = self.file_offset(vaddr, len)?;
        self.source.read_exact_at(offset, into).map_err(|source| ElfError::Read { offset, len, source })
    }

    /// Where the file has the bytes for `vaddr`.
    fn file_offset(&self, vaddr: u64, len: u64) -> Result<u64, ElfError> {
        let offset = self.loads.iter().find_map(|load| {
            let within = vaddr.checked_sub(load.vaddr)?;
            (within.checked_add(len)? <= load.file_size).then(|| load.offset + within)
        });
        offset.ok_or(ElfError::NoSegment { vaddr, len })
    }

    /// `DT_SONAME`.
    #[must_use]
    pub fn soname(&self) -> Option<String> {
        let name = self.dynamic_string(self.dynamic.as_ref()?.soname?)?;
        Some(String::from_utf8_lossy(&name).into_owned())
    }

    /// Libraries that the dynamic linker loads with it (`DT_NEEDED`).
    #[must_use]
    pub fn needed(&self) -> Vec<Vec<u8>> {
        let needed = self.dynamic.iter().flat_map(|dynamic| &dynamic.needed);
        needed.filter_map(|&name| self.dynamic_string(name)).collect()
    }

    /// Where it looks for them first (`DT_RUNPATH`, `DT_RPATH`).
    #[must_use]
    pub fn run_path(&self) -> Option<Vec<u8>> {
        self.dynamic_string(self.dynamic.as_ref()?.run_path?)
    }

    /// The dynamic linker that starts it (`PT_INTERP`).
    #[must_use]
    pub fn linker(&self) -> Option<Vec<u8>> {
        let (offset, size) = self.linker?;
        let mut path = read_bytes(&self.source, offset, size.min(MAX_NAME as u64)).ok()?;
        path.truncate(path.iter().position(|&byte| byte == 0)?);
        Some(path)
    }

    fn dynamic_string(&self, offset: u64) -> Option<Vec<u8>> {
        self.c_string(self.dynamic.as_ref()?.strtab.checked_add(offset)?)
    }

    /// Defined symbols of `.symtab`, by name, in one scan of the table. None are found in a table of more than 8 MiB:
    /// that belongs to some large program and is too expensive.
    ///
    /// # Errors
    /// When the table makes no sense.
    pub fn symtab_symbols<const N: usize>(&self, names: [&str; N]) -> Result<[Option<Symbol>; N], ElfError> {
        let mut found = [None; N];
        let Some(table) = self.sections.iter().find(|section| section.kind == elf::SHT_SYMTAB) else {
            return Ok(found);
        };
        let strings = usize::try_from(table.link).ok().and_then(|link| self.sections.get(link));
        let strings = strings.ok_or(ElfError::Malformed("symbol table"))?;
        if table.size > MAX_SYMTAB || strings.size > MAX_SYMTAB {
            return Ok(found);
        }
        let text = read_bytes(&self.source, strings.offset, strings.size)?;
        // The names alone quickly show that a large program has none of them.
        if names.iter().all(|name| memchr::memmem::find(&text, name.as_bytes()).is_none()) {
            return Ok(found);
        }
        let symbols = read_table::<elf::Sym64<LE>>(&self.source, table.offset, table.size / 24)?;
        for symbol in symbols.iter().filter(|symbol| symbol.st_shndx.get(LE) != elf::SHN_UNDEF) {
            let start = usize::try_from(symbol.st_name.get(LE)).unwrap_or(usize::MAX);
            let Some(rest) = text.get(start..) else { continue };
            for (place, name) in found.iter_mut().zip(names) {
                if rest.strip_prefix(name.as_bytes()).is_some_and(|after| after.first() == Some(&0)) {
                    *place = Some(Symbol { vaddr: symbol.st_value.get(LE), size: symbol.st_size.get(LE) });
                }
            }
        }
        Ok(found)
    }

    fn read_dynamic(&self, program: &elf::ProgramHeader64<LE>) -> Result<Dynamic, ElfError> {
        let size = program.p_filesz.get(LE);
        if size > MAX_SMALL_TABLE {
            return Err(ElfError::Malformed("dynamic section"));
        }
        let entries = read_table::<elf::Dyn64<LE>>(&self.source, program.p_offset.get(LE), size / 16)?;
        let mut dynamic = Dynamic::default();
        for entry in entries {
            let value = entry.d_val.get(LE);
            match u32::try_from(entry.d_tag.get(LE)) {
                Ok(elf::DT_NULL) => break,
                Ok(elf::DT_SYMTAB) => dynamic.symtab = value,
                Ok(elf::DT_STRTAB) => dynamic.strtab = value,
                Ok(elf::DT_HASH) => dynamic.hash = value,
                Ok(elf::DT_GNU_HASH) => dynamic.gnu_hash = value,
                Ok(elf::DT_SONAME) => dynamic.soname = Some(value),
                Ok(elf::DT_NEEDED) if dynamic.needed.len() < MAX_NEEDED => dynamic.needed.push(value),
                Ok(elf::DT_RUNPATH) => dynamic.run_path = Some(value),
                Ok(elf::DT_RPATH) => dynamic.run_path = dynamic.run_path.or(Some(value)),
                Ok(elf::DT_RELA) => dynamic.relocations[0].0 = value,
                Ok(elf::DT_RELASZ) => dynamic.relocations[0].1 = value,
                Ok(elf::DT_JMPREL) => dynamic.relocations[1].0 = value,
                Ok(elf::DT_PLTRELSZ) => dynamic.relocations[1].1 = value,
                _ => {}
            }
        }
        Ok(dynamic)
    }

    fn read_sections(&self, header: &elf::FileHeader64<LE>) -> Result<Vec<Section>, ElfError> {
        let count = header.e_shnum.get(LE);
        if count > MAX_SECTION_HEADERS || header.e_shentsize.get(LE) != 64 {
            return Err(ElfError::Malformed("section header table"));
        }
        let headers: Vec<elf::SectionHeader64<LE>> =
            read_table(&self.source, header.e_shoff.get(LE), u64::from(count))?;
        let names = headers.get(usize::from(header.e_shstrndx.get(LE)));
        let names = names.filter(|names| names.sh_size.get(LE) <= MAX_SMALL_TABLE);
        let names = names.ok_or(ElfError::Malformed("section name table"))?;
        let names = read_bytes(&self.source, names.sh_offset.get(LE), names.sh_size.get(LE))?;
        let section = |section: &elf::SectionHeader64<LE>| {
            let start = usize::try_from(section.sh_name.get(LE)).unwrap_or(usize::MAX);
            let name = names.get(start..).unwrap_or_default();
            // Otherwise overlapping names could add up to the table's size for each section.
            let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
            Section {
                name: String::from_utf8_lossy(&name[..name.len().min(MAX_NAME)]).into_owned(),
                kind: section.sh_type.get(LE),
                link: section.sh_link.get(LE),
                flags: section.sh_flags.get(LE),
                vaddr: section.sh_addr.get(LE),
                offset: section.sh_offset.get(LE),
                size: section.sh_size.get(LE),
            }
        };
        Ok(headers.iter().map(section).collect())
    }

    /// Reads 32-bit words at an address; `None` is an address that overflowed.
    fn words<const N: usize>(&self, vaddr: Option<u64>) -> Result<[u32; N], ElfError> {
        let vaddr = vaddr.ok_or(ElfError::Malformed("hash table"))?;
        let mut words = [0; N];
        for (word, at) in words.iter_mut().zip((0_u64..).step_by(4)) {
            let mut bytes = [0; 4];
            self.read_vaddr(vaddr.checked_add(at).ok_or(ElfError::Malformed("hash table"))?, &mut bytes)?;
            *word = u32::from_le_bytes(bytes);
        }
        Ok(words)
    }

    /// The bytes at an address up to a zero byte, at most [`MAX_NAME`].
    fn c_string(&self, vaddr: u64) -> Option<Vec<u8>> {
        let mut text = Vec::new();
        for at in 0..MAX_NAME as u64 {
            let mut byte = [0];
            self.read_vaddr(vaddr.checked_add(at)?, &mut byte).ok()?;
            if byte == [0] {
                return Some(text);
            }
            text.extend(byte);
        }
        None
    }
}

impl Load {
    fn checked(program: &elf::ProgramHeader64<LE>) -> Result<Self, ElfError> {
        let load = Self {
            offset: program.p_offset.get(LE),
            file_size: program.p_filesz.get(LE),
            vaddr: program.p_vaddr.get(LE),
            mem_size: program.p_memsz.get(LE),
            executable: program.p_flags.get(LE) & elf::PF_X != 0,
            writable: program.p_flags.get(LE) & elf::PF_W != 0,
        };
        let ends = [load.offset.checked_add(load.file_size), load.vaddr.checked_add(load.mem_size)];
        if ends.contains(&None) || load.file_size > load.mem_size {
            return Err(ElfError::Malformed("segment"));
        }
        Ok(load)
    }
}
