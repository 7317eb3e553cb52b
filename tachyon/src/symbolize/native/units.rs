//! Compile units of a file's DWARF: finds the one that describes an address, and parses only that.
//!
//! `.debug_aranges` says which addresses a unit describes, if the compiler writes it (GCC does); otherwise each unit is examined,
//! which takes a tenth of a second for CPython's own library.
//!
//! `addr2line` parses all units of a file at once, and the parsed abbreviations alone are larger than the DWARF itself. So
//! it is given one unit at a time, as if there were no other. `.debug_info` and `.debug_line`, nine tenths of the whole, stay in
//! the file: a unit and its line program are read when it is first asked for. Files whose units refer to each other (from
//! link-time optimisation, or packed by `dwz`) cannot be handled here: [`Units::of`] or [`Units::find`] says so.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use addr2line::Context;
use addr2line::gimli::{
    self, AttributeValue, DebugAranges, Dwarf, EndianArcSlice, IncompleteLineProgram, LittleEndian, Reader as _,
    SectionId, UnitType,
};

use super::effort::Effort;
use crate::remote::TargetFile;
use crate::remote::elf::ReadAt as _;
use crate::remote::ledger;

pub(super) type Bytes = EndianArcSlice<LittleEndian>;

/// Longest CPU time for finding a file's units. CPython's own library takes a tenth of a second if each is examined; for a file
/// that takes longer the symbol table must do.
const MOST_TIME: Duration = Duration::from_secs(3);

/// Most address ranges for finding units. CPython's own library has some thousand.
const MAX_PLACES: usize = 1 << 20;

/// Longest line program that is read to learn which addresses a unit describes.
const MAX_PROGRAM: usize = 8 << 20;

/// Most bounds of functions of a file's opened units: 8 MiB. Where there are more, only the addresses that were met are kept.
const MAX_BOUNDS: usize = 1 << 20;

/// Memory that a unit takes once its functions, lines and abbreviations are parsed, as a multiple of their size in the file.
const PARSED: usize = 3;

/// Where a section is.
#[derive(Debug)]
pub(super) enum Section {
    /// In the file: its offset and its length.
    File(Arc<TargetFile>, u64, u64),
    /// In memory: it was packed.
    Unpacked(Arc<[u8]>),
}

impl Section {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::File(_, _, len) => *len,
            Self::Unpacked(bytes) => bytes.len() as u64,
        }
    }

    /// A part of it.
    fn read(&self, offset: u64, len: u64) -> Option<Arc<[u8]>> {
        match self {
            Self::File(file, start, all) => {
                offset.checked_add(len).filter(|end| end <= all)?;
                let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, usize::try_from(len).ok()?).collect();
                file.read_exact_at(start.checked_add(offset)?, Arc::get_mut(&mut bytes)?).ok()?;
                Some(bytes)
            }
            Self::Unpacked(bytes) => {
                let start = usize::try_from(offset).ok()?;
                bytes.get(start..start.checked_add(usize::try_from(len).ok()?)?).map(Arc::from)
            }
        }
    }

    /// The length of what begins at an offset with its own length, that field included (DWARF 5, 7.4).
    fn len_at(&self, offset: u64) -> Option<u64> {
        let short = u32::from_le_bytes(*self.read(offset, 4)?.first_chunk()?);
        if short != u32::MAX {
            return Some(u64::from(short) + 4);
        }
        u64::from_le_bytes(*self.read(offset + 4, 8)?.first_chunk()?).checked_add(12)
    }
}

/// All units of one file.
pub(super) struct Units {
    info: Section,
    lines: Section,
    /// All of `lines`, while it is found out which unit describes which addresses.
    all_lines: Option<Bytes>,
    /// Bytes of line programs that opened units hold: no more than there are, or a file whose units share one would take any memory.
    lines_held: u64,
    others: Vec<(SectionId, Bytes)>,
    /// In order of the last address.
    places: Vec<Place>,
    /// What parsing them costs.
    effort: Effort,
    opened: HashMap<u64, Option<Context<Bytes>>>,
    /// Where the functions of opened units begin and end, in no order, as far as that is known.
    bounds: HashMap<u64, Box<[u64]>>,
    opened_bytes: usize,
}

/// Addresses that one unit describes.
#[derive(Clone, Copy, Debug)]
struct Place {
    begin: u64,
    end: u64,
    /// The lowest `begin` of this place and of all that follow.
    least: u64,
    offset: u64,
    len: u64,
}

/// Units refer to each other: only all of them together make sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Together;

/// What a file's DWARF turned out to be.
pub(super) enum Found {
    /// Units that are independent of each other.
    Units(Box<Units>),
    /// Units that refer to each other: only all of them together make sense.
    Together,
    /// Nothing usable.
    Nothing,
}

impl Units {
    /// Finds the units of `.debug_info`; `lines` is `.debug_line`, `others` are the other sections, `aranges` is `.debug_aranges`.
    pub fn of(info: Section, lines: Section, others: Vec<(SectionId, Bytes)>, aranges: Bytes) -> Found {
        let told = told_by(aranges);
        let start = ledger::thread_time();
        let effort = Effort::default();
        let (places, all_lines, lines_held) = (Vec::new(), None, 0);
        let (opened, bounds, opened_bytes) = (HashMap::new(), HashMap::new(), 0);
        let mut units =
            Self { info, lines, all_lines, lines_held, others, places, effort, opened, bounds, opened_bytes };
        let (mut offset, len) = (0, units.info.len());
        while offset < len {
            let Some(unit_len) = units.info.len_at(offset).filter(|unit_len| *unit_len <= len - offset) else { break };
            let looked = match told.get(&offset) {
                Some(ranges) => units.take(ranges, offset, unit_len),
                None => units.look_at(offset, unit_len),
            };
            match looked {
                Some(true) => return Found::Together,
                // A unit that makes no sense does not hide the others.
                Some(false) | None => offset += unit_len,
            }
            if ledger::thread_time().saturating_sub(start) > MOST_TIME || units.places.len() >= MAX_PLACES {
                return Found::Nothing;
            }
        }
        units.all_lines = None;
        units.places.sort_by_key(|place| place.end);
        let mut least = u64::MAX;
        for place in units.places.iter_mut().rev() {
            least = least.min(place.begin);
            place.least = least;
        }
        if units.places.is_empty() { Found::Nothing } else { Found::Units(Box::new(units)) }
    }

    /// The first of the units describing an address in which `frames` finds something.
    ///
    /// # Errors
    /// When one of these units refers to others.
    pub fn find<T>(&mut self, vaddr: u64, frames: impl Fn(&Context<Bytes>) -> Vec<T>) -> Result<Vec<T>, Together> {
        let mut at = self.places.partition_point(|place| place.end <= vaddr);
        while let Some(&place) = self.places.get(at).filter(|place| place.least <= vaddr) {
            at += 1;
            if place.begin > vaddr {
                continue;
            }
            let found = self.context(place)?.map(&frames).unwrap_or_default();
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Adds the addresses within a range at which [`Units::find`] may begin to find something else. `None`: a unit that describes
    /// some of it has not been opened, or its functions are not known.
    pub fn add_bounds(&self, within: &Range<u64>, bounds: &mut Vec<u64>) -> Option<()> {
        let at = self.places.partition_point(|place| place.end <= within.start);
        let places = self.places[at..].iter().take_while(|place| place.least < within.end);
        for place in places.filter(|place| place.begin < within.end) {
            bounds.extend([place.begin, place.end]);
            // A unit that cannot be parsed has nothing to say anywhere.
            if let Some(context) = self.opened.get(&place.offset)?.as_ref() {
                bounds.extend(self.bounds.get(&place.offset)?);
                add_rows(context, within, bounds);
            }
        }
        Some(())
    }

    /// The addresses around one that the unit which describes it does, if it has been opened.
    pub fn opened_around(&self, vaddr: u64) -> Option<Range<u64>> {
        let at = self.places.partition_point(|place| place.end <= vaddr);
        let place = self.places.get(at).filter(|place| place.begin <= vaddr)?;
        self.opened.get(&place.offset)?.as_ref().map(|_| place.begin..place.end)
    }

    /// Bytes of the parsed units, roughly.
    pub fn opened_bytes(&self) -> usize {
        self.opened_bytes
    }

    fn context(&mut self, place: Place) -> Result<Option<&Context<Bytes>>, Together> {
        if !self.opened.contains_key(&place.offset) {
            let (dwarf, len) = self.alone(place.offset, place.len).unzip();
            if dwarf.as_ref().and_then(refers_to_others) == Some(true) {
                return Err(Together);
            }
            let dwarf = dwarf.filter(|dwarf| self.effort.is_bearable(dwarf));
            let held: usize = self.bounds.values().map(|bounds| bounds.len()).sum();
            let bounds = dwarf.as_ref().and_then(|_| self.effort.take_bounds());
            if let Some(bounds) = bounds.filter(|bounds| held + bounds.len() <= MAX_BOUNDS) {
                self.opened_bytes += size_of_val(&*bounds);
                self.bounds.insert(place.offset, bounds);
            }
            let context = dwarf.and_then(|dwarf| Context::from_dwarf(dwarf).ok());
            self.opened_bytes += len.unwrap_or(place.len) as usize * PARSED;
            self.opened.insert(place.offset, context);
        }
        Ok(self.opened.get(&place.offset).and_then(Option::as_ref))
    }

    /// One unit, as if it were the only one, with these lines.
    fn dwarf(&self, unit: Arc<[u8]>, lines: Bytes) -> Option<Dwarf<Bytes>> {
        let unit = EndianArcSlice::new(unit, LittleEndian);
        let section = |id| -> Result<Bytes, Infallible> {
            let other = self.others.iter().find(|(other, _)| *other == id);
            Ok(match other {
                _ if id == SectionId::DebugInfo => unit.clone(),
                _ if id == SectionId::DebugLine => lines.clone(),
                Some((_, bytes)) => bytes.clone(),
                None => EndianArcSlice::new(Arc::default(), LittleEndian),
            })
        };
        Dwarf::load(section).ok()
    }

    /// One unit and its line program, as if there were nothing else, and their length.
    fn alone(&mut self, offset: u64, len: u64) -> Option<(Dwarf<Bytes>, u64)> {
        let mut unit = self.info.read(offset, len)?;
        let none = || EndianArcSlice::new(Arc::default(), LittleEndian);
        let Some((program, place)) = line_program(&self.dwarf(Arc::clone(&unit), none())?) else {
            return Some((self.dwarf(unit, none())?, len));
        };
        let lines_len = self.lines.len_at(program)?;
        let held = self.lines_held.checked_add(lines_len).filter(|held| *held <= self.lines.len())?;
        let lines = self.lines.read(program, lines_len)?;
        self.lines_held = held;
        // The program has moved to the beginning of the section.
        Arc::get_mut(&mut unit)?.get_mut(place)?.fill(0);
        Some((self.dwarf(unit, EndianArcSlice::new(lines, LittleEndian))?, len + lines_len))
    }

    /// One unit, and the lines of all.
    fn among_all_lines(&mut self, offset: u64, len: u64) -> Option<Dwarf<Bytes>> {
        if self.all_lines.is_none() {
            let bytes = self.lines.read(0, self.lines.len())?;
            self.all_lines = Some(EndianArcSlice::new(bytes, LittleEndian));
        }
        self.dwarf(self.info.read(offset, len)?, self.all_lines.clone()?)
    }

    /// Notes the addresses of a unit. Returns whether it refers to others; `None`: it makes no sense.
    fn look_at(&mut self, offset: u64, len: u64) -> Option<bool> {
        let dwarf = self.among_all_lines(offset, len)?;
        let header = dwarf.units().next().ok()??;
        match header.type_() {
            UnitType::Type { .. } | UnitType::SplitType { .. } => return Some(false),
            UnitType::Partial => return Some(true),
            _ => {}
        }
        let unit = dwarf.unit(header).ok()?;
        if any_leads_out(&unit.abbreviations) {
            return Some(true);
        }
        ends_within_addresses(&unit)?;
        let mut ranges = dwarf.unit_ranges(&unit).ok()?;
        let before = self.places.len();
        while let Some(range) = ranges.next().ok()? {
            self.add(Place { begin: range.begin, end: range.end, least: range.begin, offset, len })?;
        }
        let short = |program: &IncompleteLineProgram<Bytes>| program.header().raw_program_buf().len() <= MAX_PROGRAM;
        if before == self.places.len()
            && let Some(program) = unit.line_program.clone().filter(short)
        {
            // As `addr2line` does: in some units they are nowhere else.
            for sequence in program.sequences().ok()?.1 {
                self.add(Place { begin: sequence.start, end: sequence.end, least: sequence.start, offset, len })?;
            }
        }
        Some(false)
    }

    /// Notes the addresses of a unit that lists them. What it refers to shows when it is asked for.
    fn take(&mut self, ranges: &[Range<u64>], offset: u64, len: u64) -> Option<bool> {
        for &Range { start, end } in ranges {
            self.add(Place { begin: start, end, least: start, offset, len })?;
        }
        Some(false)
    }

    fn add(&mut self, place: Place) -> Option<()> {
        if self.places.len() >= MAX_PLACES {
            return None;
        }
        if place.begin < place.end {
            self.places.push(place);
        }
        Some(())
    }
}

/// Ranges of addresses by the offset of the unit that describes them, as in `.debug_aranges` (DWARF 5, 6.1.2). It ends at the
/// first entry that makes no sense: units after that are examined.
fn told_by(aranges: Bytes) -> HashMap<u64, Vec<Range<u64>>> {
    let (mut told, mut count) = (HashMap::<u64, Vec<Range<u64>>>::new(), 0);
    let mut headers = DebugAranges::from(aranges).headers();
    while let Ok(Some(header)) = headers.next() {
        let mut entries = header.entries();
        while let Ok(Some(entry)) = entries.next() {
            count += 1;
            if entry.length() > 0 && count < MAX_PLACES {
                let range = entry.range();
                told.entry(header.debug_info_offset().0 as u64).or_default().push(range.begin..range.end);
            }
        }
    }
    told
}

/// Where a unit's line program is in `.debug_line`, and where the unit says so; `None`: it has none, or makes no sense.
fn line_program(dwarf: &Dwarf<Bytes>) -> Option<(u64, Range<usize>)> {
    let header = dwarf.units().next().ok()??;
    let abbreviations = dwarf.abbreviations(&header).ok()?;
    let mut entries = header.entries_raw(&abbreviations, None).ok()?;
    let root = entries.read_abbreviation().ok()??;
    for &specification in root.attributes() {
        let start = entries.next_offset().0;
        let attribute = entries.read_attribute(specification).ok()?;
        if let (gimli::DW_AT_stmt_list, AttributeValue::DebugLineRef(offset)) = (attribute.name(), attribute.value()) {
            return Some((offset.0 as u64, start..entries.next_offset().0));
        }
    }
    None
}

/// Adds where the rows of line programs begin and end.
pub(super) fn add_rows(context: &Context<Bytes>, within: &Range<u64>, bounds: &mut Vec<u64>) {
    let Ok(rows) = context.find_location_range(within.start, within.end) else { return };
    bounds.extend(rows.flat_map(|(begin, len, _)| [begin, begin.wrapping_add(len)]));
}

/// Whether a unit refers to others, or exists only for others; `None`: it makes no sense.
fn refers_to_others(dwarf: &Dwarf<Bytes>) -> Option<bool> {
    let header = dwarf.units().next().ok()??;
    let partial = header.type_() == UnitType::Partial;
    Some(partial || any_leads_out(&*dwarf.abbreviations(&header).ok()?))
}

fn any_leads_out(abbreviations: &gimli::Abbreviations) -> bool {
    // All compilers number them from 1 on.
    let each = (1..).map_while(|code| abbreviations.get(code));
    each.flat_map(gimli::Abbreviation::attributes).any(|attribute| leads_out(attribute.form()))
}

/// Whether a reference of this form can lead out of its unit.
fn leads_out(form: gimli::DwForm) -> bool {
    const FORMS: [gimli::DwForm; 4] =
        [gimli::DW_FORM_ref_addr, gimli::DW_FORM_ref_sup4, gimli::DW_FORM_ref_sup8, gimli::DW_FORM_GNU_ref_alt];
    FORMS.contains(&form)
}

/// `None`: a unit says that it goes on beyond the last address. gimli adds what it says without looking (`Dwarf::die_ranges`, 0.32).
fn ends_within_addresses(unit: &gimli::Unit<Bytes>) -> Option<()> {
    let mut entries = unit.entries();
    entries.next_dfs().ok()??;
    let mut attributes = entries.current()?.attrs();
    while let Some(attribute) = attributes.next().ok()? {
        if let (gimli::DW_AT_high_pc, AttributeValue::Udata(size)) = (attribute.name(), attribute.value()) {
            unit.low_pc.checked_add(size)?;
        }
    }
    Some(())
}
