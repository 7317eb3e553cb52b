//! The companion ELF file: what makes ordinary `pprof` show Python functions, files and lines.
//!
//! Python code has no addresses of its own, so each (function, line) gets a synthetic one; this file maps them back,
//! through a symbol for each function and a DWARF line table. It does the same for the profile's native addresses, whose
//! objects readers may be unable to find or read: most have no DWARF, without which Go's `pprof` has no names. The file
//! is never loaded: it only looks like a library that is mapped over all these addresses.

use super::space::{Object, Space};
use gimli::write::{Address, AttributeValue, Dwarf, EndianVec, LineProgram, LineString, Sections, Unit, UnitEntryId};
use gimli::{Encoding, LineEncoding, LittleEndian, constants};
use object::elf;
use object::write::elf::{FileHeader, ProgramHeader, SectionHeader, Sym, Writer};
use std::io;

/// Where the synthetic code goes: neither x86-64 nor arm64 Linux puts programs, libraries or stacks there.
pub(super) const BASE: u64 = 0x2000_0000_0000;
/// The mapping begins and ends at a multiple of this.
pub(super) const PAGE: u64 = 0x1000;
/// Bytes of a location. More than one, because readers subtract 1 from callers' addresses and take the result's line.
pub(super) const SLOT: u64 = 8;

/// Lines of functions, and their addresses.
#[derive(Debug)]
pub(super) struct CodeMap {
    /// In order of file, function, line; their position gives the address.
    places: Vec<Place>,
    /// Code with addresses of its own.
    pub native: Space,
}

/// One line of one function.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub file: String,
    /// Name in the line table, which Go's `pprof` shows.
    pub function: String,
    /// Name in the symbol table, which Perl's shows.
    pub symbol: String,
    /// 0: not known.
    pub line: u32,
}

impl CodeMap {
    /// Gives addresses to places.
    pub fn new(mut places: Vec<Place>, native: Space) -> Self {
        places.sort_unstable();
        places.dedup();
        Self { places, native }
    }

    /// Address of the place as a leaf: the first byte of its slot.
    pub fn address(&self, place: &Place) -> Option<u64> {
        let index = self.places.binary_search(place).ok()?;
        Some(BASE + index as u64 * SLOT)
    }

    /// The first address of all code, and the one past the end.
    pub fn span(&self) -> (u64, u64) {
        let end = BASE + (self.places.len().max(1) as u64 * SLOT);
        let objects = &self.native.objects;
        let start = objects.first().map_or(BASE, |object| object.start.min(BASE));
        let end = objects.last().map_or(end, |object| object.end.max(end));
        (start - start % PAGE, end.next_multiple_of(PAGE))
    }

    /// Functions as in the symbol table: name, address, length.
    fn symbols(&self) -> Vec<(&str, u64, u64)> {
        let synthetic = self.by_file().flat_map(|(address, places)| by_function(address, places));
        let synthetic = synthetic.map(|(address, places)| (&*places[0].symbol, address, places.len() as u64 * SLOT));
        let native = self.native.objects.iter().flat_map(functions);
        synthetic.chain(native.map(|(place, start, end)| (&*place.symbol, start, end - start))).collect()
    }

    /// Runs of places in one file; `by_function` splits such a run by function.
    fn by_file(&self) -> impl Iterator<Item = (u64, &[Place])> {
        runs(BASE, &self.places, |place| &place.file)
    }
}

/// The code of an object from a sampled address to the next: readers ask for addresses a little after those of callers.
fn steps(object: &Object) -> impl Iterator<Item = (&Place, u64, u64)> {
    let mut next = object.code.keys().skip(1);
    object.code.iter().map(move |(&address, place)| {
        let end = address + NEAR;
        (place, address, next.next().map_or(end, |&next| end.min(next)))
    })
}

/// The sampled functions of an object: the first address of each, and the one past the end.
fn functions(object: &Object) -> impl Iterator<Item = (&Place, u64, u64)> {
    let mut steps = steps(object).peekable();
    std::iter::from_fn(move || {
        let (first, start, mut end) = steps.next()?;
        let same = |place: &Place| (&place.function, &place.symbol) == (&first.function, &first.symbol);
        while let Some((_, _, last)) = steps.next_if(|(place, ..)| same(place)) {
            end = last;
        }
        Some((first, start, end))
    })
}

/// A caller's address may be given as one up to this far past it.
const NEAR: u64 = 2;

/// Cuts into runs of equal keys, with the address of each.
fn runs<'a, K: PartialEq + 'a>(
    base: u64,
    places: &'a [Place],
    key: impl Fn(&'a Place) -> K,
) -> impl Iterator<Item = (u64, &'a [Place])> {
    let mut rest = places;
    let mut address = base;
    std::iter::from_fn(move || {
        let first = key(rest.first()?);
        let len = rest.iter().position(|place| key(place) != first).unwrap_or(rest.len());
        let (run, after) = rest.split_at(len);
        let start = address;
        rest = after;
        address += len as u64 * SLOT;
        Some((start, run))
    })
}

fn by_function(base: u64, places: &[Place]) -> impl Iterator<Item = (u64, &[Place])> {
    runs(base, places, |place| (&place.function, &place.symbol))
}

/// The whole ELF file.
///
/// # Errors
/// When the tables exceed their format's limits.
pub(super) fn elf_file(map: &CodeMap) -> io::Result<Vec<u8>> {
    let debug = dwarf(map).map_err(io::Error::other)?;
    write_elf(map, &debug).map_err(io::Error::other)
}

/// Sections with debug information: names and bytes.
type DebugSections = Vec<(&'static str, Vec<u8>)>;

fn dwarf(map: &CodeMap) -> gimli::write::Result<DebugSections> {
    // Version 4 and 64-bit addresses: every reader supports that.
    let encoding = Encoding { format: gimli::Format::Dwarf32, version: 4, address_size: 8 };
    let mut dwarf = Dwarf::new();
    for (address, places) in map.by_file() {
        let file = places.first().map_or("", |place| &place.file);
        dwarf.units.add(unit(encoding, file, address, places));
    }
    for object in &map.native.objects {
        dwarf.units.add(native_unit(encoding, object));
    }
    let mut sections = Sections::new(EndianVec::new(LittleEndian));
    dwarf.write(&mut sections)?;
    let mut found = Vec::new();
    sections.for_each(|id, data| {
        if !data.slice().is_empty() {
            found.push((id.name(), data.slice().to_vec()));
        }
        gimli::write::Result::Ok(())
    })?;
    Ok(found)
}

/// The compilation unit of one source file.
fn unit(encoding: Encoding, file: &str, address: u64, places: &[Place]) -> Unit {
    let mut program = line_program(encoding, file);
    let directory = program.default_directory();
    let file_id = program.add_file(line_string(file), directory, None);
    program.begin_sequence(Some(Address::Constant(address)));
    for (index, place) in places.iter().enumerate() {
        let row = program.row();
        row.address_offset = index as u64 * SLOT;
        row.file = file_id;
        row.line = u64::from(place.line);
        program.generate_row();
    }
    let len = places.len() as u64 * SLOT;
    program.end_sequence(len);

    let mut unit = Unit::new(encoding, program);
    let root = unit.root();
    set_range(&mut unit, root, file, address, len);
    // DWARF has no number for Python before version 6; readers do not care.
    for (address, places) in by_function(address, places) {
        let entry = unit.add(root, constants::DW_TAG_subprogram);
        let function = places.first().map_or("", |place| &place.function);
        set_range(&mut unit, entry, function, address, places.len() as u64 * SLOT);
    }
    unit
}

/// The compilation unit of one object: its source files, or the object itself if these are not known.
fn native_unit(encoding: Encoding, object: &Object) -> Unit {
    let start = object.code.keys().next().copied().unwrap_or(object.start);
    let mut program = line_program(encoding, &object.path);
    let directory = program.default_directory();
    program.begin_sequence(Some(Address::Constant(start)));
    let mut len = 0;
    for (place, address, end) in steps(object) {
        let file = program.add_file(line_string(&place.file), directory, None);
        let row = program.row();
        row.address_offset = address - start;
        row.file = file;
        row.line = u64::from(place.line);
        program.generate_row();
        len = end - start;
    }
    program.end_sequence(len);
    let mut unit = Unit::new(encoding, program);
    let root = unit.root();
    set_range(&mut unit, root, &object.path, start, len);
    for (place, start, end) in functions(object) {
        let entry = unit.add(root, constants::DW_TAG_subprogram);
        set_range(&mut unit, entry, &place.function, start, end - start);
    }
    unit
}

fn line_program(encoding: Encoding, name: &str) -> LineProgram {
    // Relative names are joined to the directory: "." leaves them as they are.
    LineProgram::new(encoding, LineEncoding::default(), line_string("."), None, line_string(name), None)
}

fn line_string(text: &str) -> LineString {
    LineString::String(text.as_bytes().to_vec())
}

fn set_range(unit: &mut Unit, entry: UnitEntryId, name: &str, address: u64, len: u64) {
    let entry = unit.get_mut(entry);
    entry.set(constants::DW_AT_name, AttributeValue::String(name.as_bytes().to_vec()));
    entry.set(constants::DW_AT_low_pc, AttributeValue::Address(Address::Constant(address)));
    entry.set(constants::DW_AT_high_pc, AttributeValue::Udata(len));
}

fn write_elf(map: &CodeMap, debug: &DebugSections) -> object::write::Result<Vec<u8>> {
    let (start, end) = map.span();
    let mut bytes = Vec::new();
    let mut writer = Writer::new(object::Endianness::Little, true, &mut bytes);
    // First everything is given its place…
    writer.reserve_file_header();
    writer.reserve_program_headers(1);
    let text_name = writer.add_section_name(b".text");
    writer.reserve_null_section_index();
    let text_index = writer.reserve_section_index();
    let debug_names: Vec<_> = debug
        .iter()
        .map(|(name, _)| {
            writer.reserve_section_index();
            writer.add_section_name(name.as_bytes())
        })
        .collect();
    writer.reserve_symtab_section_index();
    writer.reserve_strtab_section_index();
    writer.reserve_shstrtab_section_index();
    writer.reserve_null_symbol_index();
    let mut symbols = Vec::new();
    let functions = map.symbols();
    for &(name, address, len) in &functions {
        symbols.push((writer.add_string(name.as_bytes()), address, len));
        writer.reserve_symbol_index(Some(text_index));
    }
    let debug_offsets: Vec<_> = debug.iter().map(|(_, data)| writer.reserve(data.len(), 1)).collect();
    writer.reserve_symtab();
    writer.reserve_strtab();
    writer.reserve_shstrtab();
    writer.reserve_section_headers();

    // … then everything is written in the same order.
    writer.write_file_header(&FileHeader {
        os_abi: elf::ELFOSABI_NONE,
        abi_version: 0,
        e_type: elf::ET_DYN,
        e_machine: MACHINE,
        e_entry: 0,
        e_flags: 0,
    })?;
    writer.write_align_program_headers();
    writer.write_program_header(&ProgramHeader {
        p_type: elf::PT_LOAD,
        p_flags: elf::PF_R | elf::PF_X,
        p_offset: start,
        p_vaddr: start,
        p_paddr: start,
        p_filesz: 0,
        p_memsz: end - start,
        p_align: PAGE,
    });
    for (_, data) in debug {
        writer.write(data);
    }
    writer.write_null_symbol();
    for &(name, st_value, st_size) in &symbols {
        writer.write_symbol(&Sym {
            name: Some(name),
            section: Some(text_index),
            st_info: (elf::STB_GLOBAL << 4) | elf::STT_FUNC,
            st_other: 0,
            st_shndx: 0,
            st_value,
            st_size,
        });
    }
    writer.write_strtab();
    writer.write_shstrtab();
    writer.write_null_section_header();
    let section = |name, sh_type, sh_flags, sh_addr, sh_offset, sh_size| SectionHeader {
        name: Some(name),
        sh_type,
        sh_flags,
        sh_addr,
        sh_offset,
        sh_size,
        sh_link: 0,
        sh_info: 0,
        sh_addralign: 1,
        sh_entsize: 0,
    };
    let flags = u64::from(elf::SHF_ALLOC | elf::SHF_EXECINSTR);
    // There is no code in the file. Since any address would be at its own offset, the same subtraction is right for
    // every mapping: Perl's pprof uses one for all, taken from this section.
    writer.write_section_header(&section(text_name, elf::SHT_NOBITS, flags, start, start, end - start));
    for ((&name, &offset), (_, data)) in debug_names.iter().zip(&debug_offsets).zip(debug) {
        writer.write_section_header(&section(name, elf::SHT_PROGBITS, 0, 0, offset as u64, data.len() as u64));
    }
    writer.write_symtab_section_header(1);
    writer.write_strtab_section_header();
    writer.write_shstrtab_section_header();
    Ok(bytes)
}

#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = elf::EM_AARCH64;
#[cfg(not(target_arch = "aarch64"))]
const MACHINE: u16 = elf::EM_X86_64;

#[cfg(test)]
mod tests {
    use super::*;
    use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol};

    fn place(file: &str, function: &str, line: u32) -> Place {
        Place { file: file.into(), function: function.into(), symbol: format!("{function}!"), line }
    }

    #[test]
    fn addresses_lead_back() {
        let places = vec![
            place("/b.py", "g", 9),
            place("/a.py", "f", 7),
            place("/a.py", "f", 3),
            place("/a.py", "f", 3),
            place("~", "[native]", 0),
            place("/b.py", "f", 3),
        ];
        let map = CodeMap::new(places.clone(), Space::default());
        assert_eq!(map.span(), (BASE, BASE + PAGE));
        assert_eq!(map.address(&places[2]), Some(BASE));
        assert_eq!(map.address(&places[1]), Some(BASE + SLOT));
        assert_eq!(map.address(&place("/c.py", "f", 3)), None);

        let bytes = elf_file(&map).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let segment = file.segments().next().unwrap();
        assert_eq!((segment.address(), segment.size(), segment.file_range()), (BASE, PAGE, (BASE, 0)));
        let mut symbols: Vec<_> =
            file.symbols().map(|symbol| (symbol.name().unwrap(), symbol.address(), symbol.size())).collect();
        symbols.sort_by_key(|&(_, address, _)| address);
        assert_eq!(
            symbols,
            [
                ("f!", BASE, 2 * SLOT),
                ("f!", BASE + 2 * SLOT, SLOT),
                ("g!", BASE + 3 * SLOT, SLOT),
                ("[native]!", BASE + 4 * SLOT, SLOT)
            ]
        );
        let load = |id: gimli::SectionId| {
            let data = file.section_by_name(id.name()).map_or(&[][..], |section| section.data().unwrap());
            Ok::<_, gimli::Error>(gimli::EndianSlice::new(data, LittleEndian))
        };
        let dwarf = gimli::Dwarf::load(load).unwrap();
        let mut units = dwarf.units();
        let mut rows = Vec::new();
        while let Some(header) = units.next().unwrap() {
            let unit = dwarf.unit(header).unwrap();
            let program = unit.line_program.clone().unwrap();
            let mut state = program.rows();
            while let Some((header, row)) = state.next_row().unwrap() {
                if row.end_sequence() {
                    continue;
                }
                let name = dwarf.attr_string(&unit, row.file(header).unwrap().path_name()).unwrap();
                let line = row.line().map_or(0, std::num::NonZero::get);
                rows.push((row.address(), name.to_string().unwrap().to_owned(), line));
            }
        }
        let row = |slot, file: &str, line| (BASE + slot * SLOT, file.to_owned(), line);
        assert_eq!(
            rows,
            [row(0, "/a.py", 3), row(1, "/a.py", 7), row(2, "/b.py", 3), row(3, "/b.py", 9), row(4, "~", 0)]
        );
    }

    #[test]
    fn no_code() {
        let bytes = elf_file(&CodeMap::new(Vec::new(), Space::default())).unwrap();
        assert_eq!(object::File::parse(&*bytes).unwrap().symbols().count(), 0);
    }
}
