//! What it would cost to parse DWARF, estimated before `addr2line` does.
//!
//! `addr2line` trusts what it reads: it recurses for each inlined function inside an inlined function, and a range list, a name
//! or an abbreviation that a million entries share is read, or copied, a million times. A crafted file of a few hundred kilobytes
//! could thus crash the profiler or take all memory. One pass over the entries shows that; files from compilers are far from all
//! of these limits.

use addr2line::gimli::{
    self, Attribute, AttributeValue, Dwarf, Reader as _, Section as _, UnitHeader, UnitRef, UnitType,
};

use super::units::Bytes;
use std::ops::Range;

/// Most functions nested in each other: each takes some hundred bytes of a thread's two-megabyte stack.
const MAX_NESTED: usize = 256;

/// Most bytes that are read, or allocated, roughly.
const MAX_BYTES: u64 = 512 << 20;

/// Most bytes that are read to find the names of functions, each of which may refer to another function's name.
const MAX_NAMES: u64 = 8 << 30;

/// Entries that `addr2line` goes through to find one name.
const MAX_REFERENCES: u64 = 16;

/// Bytes for each of: an attribute that is read, an address range, a byte of a line program (a row of 24 bytes for each byte at
/// worst).
const ATTRIBUTE: u64 = 8;
const RANGE: u64 = 48;
const LINE_BYTE: u64 = 16;

/// Bytes of an abbreviation and of an attribute in it.
const ABBREVIATION: u64 = 64;
const SPECIFICATION: u64 = 16;

/// Least bytes of a line program's instruction that names a file.
const DEFINE_FILE: u64 = 8;

/// Most bounds of functions that are kept. `CPython/ceval.c` has some twenty thousand.
const MAX_BOUNDS: usize = 1 << 20;

/// What one file's DWARF has cost so far.
#[derive(Debug, Default)]
pub(super) struct Effort {
    bytes: u64,
    /// Functions, including inlined ones.
    functions: u64,
    /// Largest number of attributes in an entry.
    attributes: u64,
    /// Bytes of the longest name.
    name: u64,
    /// Where the functions of the units begin and end, inlined ones included, in no order; `None`: not all are known.
    bounds: Option<Vec<u64>>,
}

impl Effort {
    /// Whether these units, too, can be parsed at the cost of a real file.
    pub(super) fn is_bearable(&mut self, dwarf: &Dwarf<Bytes>) -> bool {
        self.bounds = bounds_of_aranges(dwarf);
        let mut units = dwarf.units();
        while let Ok(Some(header)) = units.next() {
            // `addr2line` gives up on a unit that makes no sense, too: its cost was counted up to that point.
            match self.unit(dwarf, header) {
                Ok(()) => {}
                Err(Stop::TooMuch) => return false,
                Err(Stop::Malformed) => self.bounds = None,
            }
        }
        let one = self.attributes.saturating_mul(ATTRIBUTE * MAX_REFERENCES).saturating_add(self.name);
        self.functions.saturating_mul(one) <= MAX_NAMES
    }
}

impl Effort {
    /// Where the functions begin and end of the units that were examined last, inlined ones included, and what else has ranges of
    /// addresses; in no order. `None`: not all of that is known.
    pub(super) fn take_bounds(&mut self) -> Option<Box<[u64]>> {
        self.bounds.take().filter(|bounds| bounds.len() < MAX_BOUNDS).map(Vec::into_boxed_slice)
    }

    fn bound(&mut self, range: Range<u64>) {
        if let Some(bounds) = self.bounds.as_mut().filter(|bounds| bounds.len() < MAX_BOUNDS) {
            bounds.extend([range.start, range.end]);
        }
    }
}

/// Why a unit is not examined any further.
enum Stop {
    TooMuch,
    Malformed,
}

impl From<gimli::Error> for Stop {
    fn from(_: gimli::Error) -> Self {
        Self::Malformed
    }
}

impl Effort {
    fn spend(&mut self, bytes: u64) -> Result<(), Stop> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > MAX_BYTES { Err(Stop::TooMuch) } else { Ok(()) }
    }

    fn unit(&mut self, dwarf: &Dwarf<Bytes>, header: UnitHeader<Bytes>) -> Result<(), Stop> {
        let kind = header.type_();
        if matches!(kind, UnitType::Type { .. } | UnitType::SplitType { .. }) {
            return Ok(());
        }
        self.abbreviations(dwarf, header.debug_abbrev_offset().0)?;
        let unit = dwarf.unit(header)?;
        let unit = unit.unit_ref(dwarf);
        // Entries are read whether lines make sense or not.
        if kind != UnitType::Partial
            && let Err(Stop::TooMuch) = self.lines(unit)
        {
            return Err(Stop::TooMuch);
        }
        let mut entries = unit.entries_raw(None)?;
        // How deep the functions that hold the entry lie.
        let mut open: Vec<isize> = Vec::new();
        while !entries.is_empty() {
            let depth = entries.next_depth();
            let Some(abbreviation) = entries.read_abbreviation()? else { continue };
            if matches!(abbreviation.tag(), gimli::DW_TAG_subprogram | gimli::DW_TAG_inlined_subroutine) {
                self.functions += 1;
                open.truncate(open.partition_point(|outer| *outer < depth));
                open.push(depth);
                if open.len() > MAX_NESTED {
                    return Err(Stop::TooMuch);
                }
            }
            let attributes = abbreviation.attributes();
            self.attributes = self.attributes.max(attributes.len() as u64);
            self.spend(ATTRIBUTE * (1 + attributes.len() as u64))?;
            let mut span = Span::default();
            for &specification in attributes {
                let attribute = entries.read_attribute(specification)?;
                self.attribute(unit, &attribute)?;
                span.take(unit, &attribute);
            }
            if let Some(range) = span.range() {
                self.bound(range);
            }
        }
        Ok(())
    }

    /// A unit's abbreviations (DWARF 5, 7.5.3), which are kept separately for each unit.
    fn abbreviations(&mut self, dwarf: &Dwarf<Bytes>, offset: usize) -> Result<(), Stop> {
        let mut input = dwarf.debug_abbrev.reader().clone();
        input.skip(offset)?;
        while !input.is_empty() && input.read_uleb128()? != 0 {
            self.spend(ABBREVIATION)?;
            input.read_uleb128()?;
            input.read_u8()?;
            loop {
                let (name, form) = (input.read_uleb128()?, input.read_uleb128()?);
                if form == u64::from(gimli::DW_FORM_implicit_const.0) {
                    input.read_sleb128()?;
                }
                if (name, form) == (0, 0) {
                    break;
                }
                self.spend(SPECIFICATION)?;
            }
        }
        Ok(())
    }

    fn attribute(&mut self, unit: UnitRef<'_, Bytes>, attribute: &Attribute<Bytes>) -> Result<(), Stop> {
        match attribute.name() {
            gimli::DW_AT_name | gimli::DW_AT_linkage_name | gimli::DW_AT_MIPS_linkage_name => {
                let len = self.text(unit, attribute.value())?;
                self.name = self.name.max(len);
            }
            gimli::DW_AT_comp_dir => {
                self.text(unit, attribute.value())?;
            }
            gimli::DW_AT_ranges => {
                // A list ends where it stops making sense.
                let Ok(Some(mut ranges)) = unit.attr_ranges(attribute.value()) else { return Ok(()) };
                while let Ok(Some(range)) = ranges.next() {
                    self.spend(RANGE)?;
                    self.bound(range.begin..range.end);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The length of a text, which was scanned to find its end.
    fn text(&mut self, unit: UnitRef<'_, Bytes>, value: AttributeValue<Bytes>) -> Result<u64, Stop> {
        let len = unit.attr_string(value).map_or(0, |text| text.len() as u64);
        self.spend(len)?;
        Ok(len)
    }

    /// The rows of the unit's line program, and a path for each of its files.
    fn lines(&mut self, unit: UnitRef<'_, Bytes>) -> Result<(), Stop> {
        let Some(program) = &unit.line_program else { return Ok(()) };
        let header = program.header();
        let folder = unit.comp_dir.as_ref().map_or(0, |folder| folder.len() as u64);
        let mut longest = 0;
        for directory in header.include_directories() {
            longest = longest.max(self.text(unit, directory.clone())?);
        }
        for file in header.file_names() {
            let directory = file.directory(header).map_or(Ok(0), |directory| self.text(unit, directory))?;
            let name = self.text(unit, file.path_name())?;
            self.spend(folder + directory + name)?;
        }
        let len = header.raw_program_buf().len() as u64;
        self.spend(len.saturating_mul(LINE_BYTE))?;
        self.spend((len / DEFINE_FILE).saturating_mul(folder + longest))
    }
}

/// The addresses of an entry that has them in one piece.
#[derive(Default)]
struct Span {
    begin: Option<u64>,
    end: Option<u64>,
    size: Option<u64>,
}

impl Span {
    fn take(&mut self, unit: UnitRef<'_, Bytes>, attribute: &Attribute<Bytes>) {
        let address = |value| match value {
            AttributeValue::Addr(address) => Some(address),
            AttributeValue::DebugAddrIndex(index) => unit.address(index).ok(),
            _ => None,
        };
        match (attribute.name(), attribute.value()) {
            (gimli::DW_AT_low_pc, value) => self.begin = address(value),
            (gimli::DW_AT_high_pc, AttributeValue::Udata(size)) => self.size = Some(size),
            (gimli::DW_AT_high_pc, value) => self.end = address(value),
            _ => {}
        }
    }

    fn range(&self) -> Option<Range<u64>> {
        let begin = self.begin?;
        Some(begin..self.end.or_else(|| begin.checked_add(self.size?))?)
    }
}

/// Where the ranges of `.debug_aranges` begin and end, which `addr2line` gets for all units together.
fn bounds_of_aranges(dwarf: &Dwarf<Bytes>) -> Option<Vec<u64>> {
    let mut bounds = Vec::new();
    let mut headers = dwarf.debug_aranges.headers();
    while let Some(header) = headers.next().ok()? {
        let mut entries = header.entries();
        while let Some(entry) = entries.next().transpose().filter(|_| bounds.len() < MAX_BOUNDS) {
            // As `addr2line` does: an entry that goes beyond the last address does not hide the others.
            bounds.extend(entry.iter().flat_map(|entry| [entry.range().begin, entry.range().end]));
        }
    }
    Some(bounds)
}
