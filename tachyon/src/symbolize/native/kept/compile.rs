//! Turns answers that were looked up into pieces that hold for all addresses of a function.
//!
//! Symbol tables say between which addresses the function stays the same; DWARF, at which addresses within them a line or an inlined
//! function begins or ends. Between two such addresses the answer cannot change, so it is asked for once. Addresses that no
//! table has a range for are kept one by one.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Duration;

use super::names::{Frame, NONE, Writer};
use crate::remote::ledger;
use crate::symbolize::native::demangle::demangle;
use crate::symbolize::native::dwarf::Lines;
use crate::symbolize::native::{Detail, NativeFile, NativeName, nameless};

/// How often the time is looked at: an address takes a few microseconds.
const AT_A_TIME: usize = 64;

/// Largest function of which all addresses are kept: beyond that, the symbol's size makes no sense.
const MAX_FUNCTION: u64 = 4 << 20;

impl NativeFile {
    /// Keeps what was looked up since the last time, and the functions around it as far as they can be compiled until the calling
    /// thread has used that much CPU time.
    pub(in crate::symbolize::native) fn keep(&mut self, until: Duration) -> Option<()> {
        let (mut writer, missed) = self.kept.take(self.file.as_ref()?, self.debug.as_deref())?;
        // The first recording of a file is not made dearer than it has to be. That a later one had to read its tables all the same
        // shows that what was met before is not enough.
        let is_first = writer.names.pieces.iter().all(Vec::is_empty);
        let mut functions: BTreeMap<(u64, usize), Function> = BTreeMap::new();
        for (name, detail) in &missed {
            match self.same_function(name.vaddr) {
                Some(range) => {
                    let key = (range.start, super::names::index_of(*detail));
                    let new = || Function { range, detail: *detail, name, met: 0 };
                    functions.entry(key).or_insert_with(new).met += 1;
                }
                None => match self.same_entry(name) {
                    Some(range) => {
                        let function = writer.function(name);
                        for gap in writer.names.gaps(&range, *detail) {
                            writer.piece(gap, function, NONE, *detail);
                        }
                    }
                    None => writer.point(name, *detail),
                },
            }
        }
        let mut functions: Vec<_> = functions.into_values().collect();
        // Those in which most addresses were met: they are the ones that most samples will be in.
        functions.sort_by_key(|function| std::cmp::Reverse(function.met));
        for function in &functions {
            if ledger::thread_time() >= until || writer.names.is_full() {
                break;
            }
            self.compile(&mut writer, function, until);
        }
        let met: Vec<u64> = functions.iter().map(|function| function.range.start).collect();
        writer.settle();
        if !is_first {
            self.compile_neighbours(&mut writer, &met, until);
            writer.settle();
        }
        // What there was no time for is known at least where it was met.
        for (name, detail) in &missed {
            if writer.names.find(name.vaddr, *detail).is_none() {
                writer.point(name, *detail);
            }
        }
        writer.settle();
        self.kept.put(writer.names)
    }

    /// Spends what time is left on functions that were not met, of units that had to be parsed for others: the next recording may meet
    /// one of them, and would have to parse the unit again.
    fn compile_neighbours(&mut self, writer: &mut Writer, met: &[u64], until: Duration) {
        let mut units: Vec<Range<u64>> = Vec::new();
        for &vaddr in met {
            let unit = self.lines.iter().flatten().find_map(|lines| lines.parsed_around(vaddr));
            units.extend(unit.filter(|unit| !units.contains(unit)));
        }
        for unit in units {
            let mut at = unit.start;
            while unit.contains(&at) {
                if ledger::thread_time() >= until || writer.is_well_filled() {
                    return;
                }
                let function = self.same_function(at);
                let next = self.tables.iter().flatten().filter_map(|table| table.next(at)).min();
                if let Some(range) = function.clone().filter(|range| range.start >= unit.start && range.end <= unit.end)
                    && let Some(name) = self.symbol(at)
                {
                    for detail in [Detail::Function, Detail::Lines] {
                        self.compile(writer, &Function { range: range.clone(), detail, name: &name, met: 0 }, until);
                    }
                }
                let Some(after) = function.map(|range| range.end).or(next) else { return };
                at = after;
            }
        }
    }

    /// What symbol tables say of an address.
    fn symbol(&self, vaddr: u64) -> Option<NativeName> {
        let found = self.tables.as_ref()?.iter().find_map(|table| table.find(vaddr))?;
        let function = Some(demangle(&found.name));
        Some(NativeName { vaddr, function, function_vaddr: Some(found.vaddr), ..NativeName::default() })
    }

    /// The addresses around one that symbol tables give to the same function. `None`: to none, or the tables are gone.
    fn same_function(&self, vaddr: u64) -> Option<Range<u64>> {
        let tables = self.tables.as_ref()?;
        tables.iter().find_map(|table| table.find(vaddr))?;
        let same = tables.iter().map(|table| table.same(vaddr));
        let same = same.reduce(|all, one| all.start.max(one.start)..all.end.min(one.end))?;
        (same.end - same.start <= MAX_FUNCTION).then_some(same)
    }

    /// The addresses of an entry of the procedure linkage table.
    fn same_entry(&self, name: &NativeName) -> Option<Range<u64>> {
        const ENTRY: u64 = 16;
        let (file, plt) = (self.file.as_ref()?, name.plt.as_ref()?);
        let start = name.function_vaddr?;
        let range = start..start.checked_add(ENTRY)?;
        let is_same =
            |vaddr| nameless::plt_entry(file, vaddr).is_some_and(|(called, at)| called == *plt && at == start);
        let has_no_symbol = self.tables.as_ref()?.iter().all(|table| {
            let same = table.same(start);
            table.find(start).is_none() && same.start <= range.start && range.end <= same.end
        });
        (has_no_symbol && is_same(start) && is_same(range.end - 1)).then_some(range)
    }

    fn compile(&mut self, writer: &mut Writer, function: &Function<'_>, until: Duration) {
        let lines = match (function.detail, &mut self.lines) {
            (Detail::Function, _) | (Detail::Lines, Some(None)) => None,
            (Detail::Lines, Some(lines)) => lines.as_mut(),
            // They are gone, and not read again for this.
            (Detail::Lines, None) => return,
        };
        let number = writer.function(function.name);
        let gaps = writer.names.gaps(&function.range, function.detail);
        let Some(lines) = lines else {
            for gap in gaps {
                writer.piece(gap, number, NONE, function.detail);
            }
            return;
        };
        let mut chains = Chains { lines, known: RefCell::default() };
        for gap in gaps {
            let Some(mut bounds) = chains.lines.bounds(&gap) else { return };
            bounds.push(gap.start);
            bounds.retain(|bound| gap.contains(bound));
            bounds.sort_unstable();
            bounds.dedup();
            for (at, &begin) in bounds.iter().enumerate() {
                if at % AT_A_TIME == AT_A_TIME - 1 && (ledger::thread_time() >= until || writer.names.is_full()) {
                    return;
                }
                let end = bounds.get(at + 1).copied().unwrap_or(gap.end);
                let chain = chains.at(begin, function.name, writer);
                writer.piece(begin..end, number, chain, Detail::Lines);
            }
        }
    }
}

/// A function in which addresses were met that had to be looked up.
struct Function<'a> {
    range: Range<u64>,
    detail: Detail,
    /// The answer at one of them: function and first address are the same at all.
    name: &'a NativeName,
    met: usize,
}

/// Looks up chains of frames without making texts of those that are known.
struct Chains<'a> {
    lines: &'a mut Lines,
    /// Numbers of functions by what the linker calls them.
    known: RefCell<HashMap<Box<str>, u32>>,
}

impl Chains<'_> {
    /// The number of the chain at an address.
    fn at(&mut self, vaddr: u64, name: &NativeName, writer: &mut Writer) -> u32 {
        let (known, shared) = (&self.known, RefCell::new(&mut *writer));
        let mut frames = self.lines.frames_as(vaddr, |function, file, line| {
            let mut writer = shared.borrow_mut();
            let function = function.map_or(NONE, |raw| {
                let known_number = known.borrow().get(raw).copied();
                known_number.unwrap_or_else(|| {
                    let number = writer.text(Some(&demangle(raw.as_bytes())));
                    known.borrow_mut().insert(raw.into(), number);
                    number
                })
            });
            Frame { function, file: writer.text(file), line: line.unwrap_or(0), outer: NONE }
        });
        // As in `NativeFile::name`: the symbol's name is the one to show.
        if let (Some(function), Some(outermost)) = (&name.function, frames.last_mut()) {
            outermost.function = writer.text(Some(function));
        }
        writer.chain(frames.into_iter())
    }
}
