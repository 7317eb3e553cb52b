//! Names of code that was made while the program ran, and lies in no file: as just-in-time compilers tell them a debugger (the
//! [interface of GDB](https://sourceware.org/gdb/current/onlinedocs/gdb.html/JIT-Interface.html): an ELF image in the process's
//! memory for each piece of code) and `perf` (`/tmp/perf-PID.map`, a line `START SIZE NAME` for each function).
//!
//! Both are the process's own words, and bounded here; what makes no sense is left out.

use super::demangle::demangle;
use object::{Object as _, ObjectKind, ObjectSection as _, ObjectSymbol as _, SectionFlags, SectionIndex, SymbolKind};
use std::collections::BTreeMap;
use std::ops::Range;

/// Most functions of one process.
const MAX_FUNCTIONS: usize = 1 << 16;
/// Most bytes of the names of one process.
const MAX_NAMES: usize = 8 << 20;
/// Longest name, in bytes.
const MAX_NAME: usize = 512;

/// Functions of one process that were made while it ran.
#[derive(Clone, Debug, Default)]
pub struct MadeFunctions {
    /// By start: end and name. None overlaps another.
    functions: BTreeMap<u64, (u64, Box<str>)>,
    name_bytes: usize,
}

/// What a debugger is told of one piece of code.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Image {
    /// Addresses of its functions, and their names as the linker knows them.
    pub functions: Vec<(Range<u64>, Vec<u8>)>,
    /// Where its unwind rules lie in the process's memory.
    pub eh_frame: Option<Range<u64>>,
}

impl MadeFunctions {
    /// Adds a function. It takes the place of those that lay there before.
    pub fn add(&mut self, function: Range<u64>, name: &[u8]) {
        if function.is_empty() || name.is_empty() {
            return;
        }
        while let Some((&start, (end, _))) = self.functions.range(..function.end).next_back() {
            if *end <= function.start {
                break;
            }
            let gone = self.functions.remove(&start);
            self.name_bytes -= gone.map_or(0, |(_, name)| name.len());
        }
        let name = shown(name);
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

    /// The function that holds an address.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&str> {
        let (_, (end, name)) = self.functions.range(..=address).next_back()?;
        (address < *end).then_some(name)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Bytes that are kept, about.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.name_bytes + self.functions.len() * 48
    }
}

impl Image {
    /// Reads an ELF image whose section headers tell where in the process's memory each section lies. Sections that lie nowhere have
    /// the address 0.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let file = object::File::parse(bytes).ok()?;
        let relocatable = file.kind() == ObjectKind::Relocatable;
        let code = |index: SectionIndex| {
            let section = file.section_by_index(index).ok()?;
            let SectionFlags::Elf { sh_flags } = section.flags() else { return None };
            let executable = sh_flags & u64::from(object::elf::SHF_EXECINSTR) != 0;
            (executable && section.address() != 0)
                .then(|| section.address()..section.address().saturating_add(section.size()))
        };
        let function = |symbol: object::Symbol<'_, '_>| {
            let within = code(symbol.section_index()?)?;
            let start = if relocatable { within.start.checked_add(symbol.address())? } else { symbol.address() };
            let end = start.checked_add(symbol.size())?;
            let holds = within.start <= start && start < end && end <= within.end;
            (holds && symbol.kind() == SymbolKind::Text)
                .then(|| Some((start..end, symbol.name_bytes().ok()?.to_vec())))?
        };
        let functions = file.symbols().filter_map(function).take(MAX_FUNCTIONS).collect();
        let eh_frame = file.section_by_name(".eh_frame").filter(|section| section.address() != 0);
        let eh_frame =
            eh_frame.and_then(|section| Some(section.address()..section.address().checked_add(section.size())?));
        Some(Self { functions, eh_frame })
    }
}

/// A name for people: as other native functions have it, without what a compiler adds to tell one version of a function from
/// another (`[abi:…]`, of which Numba has one for the types, one for the options), and with Numba's escapes of Python's own
/// names taken back.
fn shown(raw: &[u8]) -> String {
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
        assert_eq!(names, [None, None, Some("three"), Some("three"), None, None, None, None]);
        made.add_perf_map(b"1018 8 four\nffffffffffffffff 10 five\n");
        assert_eq!((made.name(0x1018), made.name(u64::MAX)), (Some("four"), None));
        assert_eq!(made.bytes(), "threefour".len() + 2 * 48);
    }

    #[test]
    fn names_are_for_people() {
        let outer = "_ZN8__main__5outerB2v3B38c8tJTIeFIjxB2IKSgI4CrvQClQZ6FczSBAA_3dEx";
        assert_eq!(shown(outer.as_bytes()), "__main__::outer");
        assert_eq!(shown(format!("cfunc.{outer}").as_bytes()), "cfunc.__main__::outer");
        let inner = "_ZN5numba7cpython8builtins6ol_max12_3clocals_3e4implB2v2B3abcE8UniTupleIxLi2EE";
        assert_eq!(shown(inner.as_bytes()), "numba::cpython::builtins::ol_max::<locals>::impl");
        assert_eq!(shown(b"py::f:/app/it.py"), "py::f:/app/it.py");
        assert_eq!(shown("[abi:".repeat(3).as_bytes()), "[abi:[abi:[abi:");
        assert!(shown("ä".repeat(400).as_bytes()).len() <= MAX_NAME);
    }

    #[test]
    fn names_have_bounds() {
        let mut made = MadeFunctions::default();
        let long = "x".repeat(MAX_NAME);
        for at in 0..MAX_FUNCTIONS as u64 + 10 {
            made.add(at * 16..at * 16 + 16, long.as_bytes());
        }
        assert!(made.name_bytes <= MAX_NAMES && made.functions.len() <= MAX_FUNCTIONS, "{}", made.bytes());
    }

    /// An object as LLVM's `RuntimeDyld` hands it to a debugger: relocatable, with each section's address in memory.
    #[test]
    fn an_image_tells_where_its_functions_lie() {
        use object::write::{Object, StandardSection, Symbol, SymbolSection};
        use object::{Architecture, BinaryFormat, Endianness, SymbolFlags, SymbolScope};
        let mut object = Object::new(BinaryFormat::Elf, Architecture::X86_64, Endianness::Little);
        let text = object.section_id(StandardSection::Text);
        object.append_section_data(text, &[0xc3; 64], 16);
        for (name, value, size) in [("first", 0, 16), ("second", 16, 8), ("beyond", 60, 8)] {
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
        assert_eq!(Image::parse(&bytes), Some(Image::default()), "it lies nowhere yet");
        // The address of the only section with code, in its header.
        let headers = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
        let header = (0..).map(|at| headers + at * 64).find(|at| bytes[at + 8] & 4 != 0).unwrap();
        bytes[header + 16..header + 24].copy_from_slice(&0x7000_0000_u64.to_le_bytes());
        let image = Image::parse(&bytes).unwrap();
        let at = |start: u64, end: u64| 0x7000_0000 + start..0x7000_0000 + end;
        assert_eq!(image.functions, [(at(0, 16), b"first".to_vec()), (at(16, 24), b"second".to_vec())]);
        for cut in 0..bytes.len() {
            let _any = Image::parse(&bytes[..cut]);
        }
    }
}
