//! Names of code that was generated at run time and is in no file: as just-in-time compilers give them to a debugger (the [interface of
//! GDB](https://sourceware.org/gdb/current/onlinedocs/gdb.html/JIT-Interface.html): an ELF image in the process's memory for each piece
//! of code) and `perf` (`/tmp/perf-PID.map`, a line `START SIZE NAME` for each function; or a `jitdump` file, see [`super::jitdump`]).
//!
//! All of it comes from the process and is bounded here; what makes no sense is left out.

use super::demangle::demangle;
use object::endian::LittleEndian;
use object::read::elf::{ElfFile64, ElfSymbol64};
use object::{Object as _, ObjectKind, ObjectSection as _, ObjectSymbol as _, SectionFlags, SectionIndex, SymbolKind};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most functions of one process.
const MAX_FUNCTIONS: usize = 1 << 16;
/// Most bytes of the names of one process.
const MAX_NAMES: usize = 8 << 20;
/// Longest linker name that is kept, in bytes, and longest name that is shown.
const MAX_RAW: usize = 1 << 10;
const MAX_NAME: usize = 512;

/// Functions that one process generated at run time.
#[derive(Clone, Debug, Default)]
pub struct MadeFunctions {
    /// By start: end and linker name, since most are never asked for. They do not overlap.
    functions: BTreeMap<u64, (u64, Box<[u8]>)>,
    name_bytes: usize,
}

/// What a debugger is told about one piece of code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Addresses of its functions, and their linker names.
    pub functions: Vec<(Range<u64>, Vec<u8>)>,
    /// Where its unwind rules lie in the process's memory.
    pub eh_frame: Option<Range<u64>>,
}

impl MadeFunctions {
    /// Adds a function. It replaces any that were there before.
    pub fn add(&mut self, function: Range<u64>, name: &[u8]) {
        if function.is_empty() || name.is_empty() {
            return;
        }
        while let Some((&start, (end, _))) = self.functions.range(..function.end).next_back() {
            if *end <= function.start {
                break;
            }
            self.remove(start);
        }
        let name = &name[..name.len().min(MAX_RAW)];
        if self.functions.len() < MAX_FUNCTIONS && self.name_bytes + name.len() <= MAX_NAMES {
            self.name_bytes += name.len();
            self.functions.insert(function.start, (function.end, name.into()));
        }
    }

    /// Adds what a map for `perf` says, line by line; a later line is newer.
    pub fn add_perf_map(&mut self, map: &[u8]) {
        for line in map.split(|byte| *byte == b'\n') {
            let mut parts = line.splitn(3, |byte| *byte == b' ');
            let mut number = || {
                let digits = std::str::from_utf8(parts.next()?).ok()?;
                u64::from_str_radix(digits.trim_start_matches("0x"), 16).ok()
            };
            if let (Some(start), Some(size)) = (number(), number())
                && let (Some(end), Some(name)) = (start.checked_add(size), parts.next())
            {
                self.add(start..end, name.trim_ascii());
            }
        }
    }

    /// Removes the function that begins at an address, and returns its name.
    pub(super) fn remove(&mut self, start: u64) -> Option<Box<[u8]>> {
        let (_, name) = self.functions.remove(&start)?;
        self.name_bytes -= name.len();
        Some(name)
    }

    /// Adds all functions of another source, which is newer.
    pub fn add_all(&mut self, newer: &Self) {
        for (&start, (end, name)) in &newer.functions {
            self.add(start..*end, name);
        }
    }

    /// The name of the function that holds an address, in the form that [`made_name`] makes readable.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&[u8]> {
        let (_, (end, name)) = self.functions.range(..=address).next_back()?;
        (address < *end).then_some(name)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Approximate number of bytes that are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.name_bytes + self.functions.len() * 48
    }
}

impl Image {
    /// Reads an ELF image whose section headers say where in the process's memory each section lies. Sections that are not in memory
    /// have the address 0.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let file = ElfFile64::<LittleEndian>::parse(bytes).ok()?;
        let relocatable = file.kind() == ObjectKind::Relocatable;
        // A name without an end would be as long as the image, and every symbol might share it.
        let names = file.section_by_index(file.elf_symbol_table().string_section()).ok();
        let names = names.and_then(|names| names.data().ok()).unwrap_or_default();
        let name = |symbol: &ElfSymbol64<'_, '_, LittleEndian>| {
            let start = usize::try_from(symbol.elf_symbol().st_name.get(LittleEndian)).ok()?;
            let name = names.get(start..)?;
            let name = &name[..name.len().min(MAX_RAW)];
            Some(&name[..memchr::memchr(0, name).unwrap_or(name.len())])
        };
        let code = |index: SectionIndex| {
            let section = file.section_by_index(index).ok()?;
            let SectionFlags::Elf { sh_flags } = section.flags() else { return None };
            let executable = sh_flags & u64::from(object::elf::SHF_EXECINSTR) != 0;
            let end = section.address().saturating_add(section.size());
            (executable && section.address() != 0).then_some(section.address()..end)
        };
        let mut left = MAX_NAMES;
        let function = |symbol: ElfSymbol64<'_, '_, LittleEndian>| {
            let within = code(symbol.section_index()?)?;
            let start = if relocatable { within.start.checked_add(symbol.address())? } else { symbol.address() };
            let end = start.checked_add(symbol.size())?;
            let holds = within.start <= start && start < end && end <= within.end;
            let name = name(&symbol).filter(|_| holds && symbol.kind() == SymbolKind::Text)?;
            left = left.checked_sub(name.len())?;
            Some((start..end, name.to_vec()))
        };
        let functions = file.symbols().filter_map(function).take(MAX_FUNCTIONS).collect();
        let eh_frame = file.section_by_name(".eh_frame").filter(|section| section.address() != 0);
        let eh_frame =
            eh_frame.and_then(|section| Some(section.address()..section.address().checked_add(section.size())?));
        Some(Self { functions, eh_frame })
    }
}

/// Turns a linker name into one for people: like that of other native functions, without what a compiler adds to distinguish versions of a
/// function (`[abi:…]`, of which Numba has one for the types, one for the options), and with Numba's escapes of Python names undone.
#[must_use]
pub fn made_name(raw: &[u8]) -> String {
    let mangled = raw.windows(3).position(|part| part == b"._Z").map_or(0, |at| at + 1);
    let (before, raw) = raw.split_at(mangled);
    let mut name = format!("{}{}", String::from_utf8_lossy(before), demangle(raw));
    while let Some(start) = name.find("[abi:")
        && let Some(len) = name[start..].find(']')
    {
        name.replace_range(start..=start + len, "");
    }
    let mut name = name.replace("_3clocals_3e", "<locals>").replace("_3clambda_3e", "<lambda>");
    name.truncate(name.floor_char_boundary(MAX_NAME));
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_functions_take_the_place_of_earlier_ones() {
        let mut made = MadeFunctions::default();
        made.add_perf_map(
            b"1000 10 one\n0x1010 20 two words\n1008 10 three\nbroken\n2000 zz four\n3000 0 five\n4000 10\n",
        );
        let names = [0xfff, 0x1000, 0x1008, 0x1017, 0x1018, 0x1020, 0x3000, 0x4000].map(|at| made.name(at));
        let three = Some(&b"three"[..]);
        assert_eq!(names, [None, None, three, three, None, None, None, None]);
        made.add_perf_map(b"1018 8 four\nffffffffffffffff 10 five\n");
        assert_eq!((made.name(0x1018), made.name(u64::MAX)), (Some(&b"four"[..]), None));
        assert_eq!(made.bytes(), "threefour".len() + 2 * 48);
    }

    #[test]
    fn names_are_for_people() {
        let outer = "_ZN8__main__5outerB2v3B38c8tJTIeFIjxB2IKSgI4CrvQClQZ6FczSBAA_3dEx";
        assert_eq!(made_name(outer.as_bytes()), "__main__::outer");
        assert_eq!(made_name(format!("cfunc.{outer}").as_bytes()), "cfunc.__main__::outer");
        let inner = "_ZN5numba7cpython8builtins6ol_max12_3clocals_3e4implB2v2B3abcE8UniTupleIxLi2EE";
        assert_eq!(made_name(inner.as_bytes()), "numba::cpython::builtins::ol_max::<locals>::impl");
        assert_eq!(made_name(b"py::f:/app/it.py"), "py::f:/app/it.py");
        assert_eq!(made_name("[abi:".repeat(3).as_bytes()), "[abi:[abi:[abi:");
        assert!(made_name("ä".repeat(400).as_bytes()).len() <= MAX_NAME);
    }

    #[test]
    fn names_have_bounds() {
        let mut made = MadeFunctions::default();
        let long = "x".repeat(2 * MAX_RAW);
        for at in 0..MAX_FUNCTIONS as u64 + 10 {
            made.add(at * 16..at * 16 + 16, long.as_bytes());
        }
        assert!(made.name_bytes <= MAX_NAMES && made.functions.len() <= MAX_FUNCTIONS, "{}", made.bytes());
    }

    /// An object as LLVM's `RuntimeDyld` hands it to a debugger: relocatable, with the address in memory of the only section with
    /// code in its header.
    fn image(functions: &[(&str, u64, u64)], address: u64) -> Vec<u8> {
        use object::write::{Object, StandardSection, Symbol, SymbolSection};
        use object::{Architecture, BinaryFormat, Endianness, SymbolFlags, SymbolScope};
        let mut object = Object::new(BinaryFormat::Elf, Architecture::X86_64, Endianness::Little);
        let text = object.section_id(StandardSection::Text);
        object.append_section_data(text, &[0xc3; 64], 16);
        for &(name, value, size) in functions {
            object.add_symbol(Symbol {
                name: name.into(),
                value,
                size,
                kind: SymbolKind::Text,
                scope: SymbolScope::Linkage,
                weak: false,
                section: SymbolSection::Section(text),
                flags: SymbolFlags::None,
            });
        }
        let mut bytes = object.write().unwrap();
        let headers = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
        let header = (0..).map(|at| headers + at * 64).find(|at| bytes[at + 8] & 4 != 0).unwrap();
        bytes[header + 16..header + 24].copy_from_slice(&address.to_le_bytes());
        bytes
    }

    #[test]
    fn an_image_tells_where_its_functions_lie() {
        let functions = [("first", 0, 16), ("second", 16, 8), ("beyond", 60, 8)];
        assert_eq!(Image::parse(&image(&functions, 0)), Some(Image::default()), "it lies nowhere yet");
        let bytes = image(&functions, 0x7000_0000);
        let at = |start: u64, end: u64| 0x7000_0000 + start..0x7000_0000 + end;
        let found = Image::parse(&bytes).unwrap().functions;
        assert_eq!(found, [(at(0, 16), b"first".to_vec()), (at(16, 24), b"second".to_vec())]);
        for cut in 0..bytes.len() {
            let _any = Image::parse(&bytes[..cut]);
        }
    }

    /// Twenty thousand long names that share the same text.
    #[test]
    fn names_that_are_one_text_are_cut() {
        let long = "y".repeat(4 * MAX_RAW);
        let found = Image::parse(&image(&[(long.as_str(), 0, 16); 20_000], 0x7000_0000)).unwrap().functions;
        assert!(
            found.iter().all(|(_, name)| name.len() == MAX_RAW) && found.len() == MAX_NAMES / MAX_RAW,
            "{}",
            found.len()
        );
    }
}
