//! Tables of all files that profiled processes have mapped, within a bounded memory, and the ranges of each process.
//!
//! In: a process. Out: rows and ranges written to a [`TableMemory`], and the [`Space`] that says where they are. A file's
//! table is made once and shared by all processes that map it. What is in use is not learned from events, which can be
//! lost, but read from the memory itself ([`TableMemory::spaces`]): what no process has any more is freed after a while,
//! the least recently used file first.
//!
//! A program may map gigabytes of code and run little of it. So what is made at once is limited by an allowance
//! ([`Wanted`]): the interpreter, then files in order of size. For all others a window is made when a sample has met it
//! ([`UnwindTables::meet`]); until then a walk ends there and says so.

mod file;
mod gone;
mod kept;
mod placed;
mod room;
mod wanted;
mod write;

pub use self::kept::tables_made;
pub use self::wanted::{Identities, NoRoom, TableMemory, Wanted};

pub(super) use self::file::{MACHINE, own_vdso};
pub(super) use self::placed::{assembly, code_of};

use self::file::{identity, path_of, without_table, words};
use self::placed::{Code, Placed, len_of};
use self::room::Room;
use super::compile::{Refusal, Table, Windows, compile_vdso, rules_len};
use crate::kept::Folder;
use crate::remote::elf::Elf;
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteProcess};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tachyon_common::limits::{MAX_SPACE_RANGES, ROWS_PER_CHUNK};
use tachyon_common::unwind::{Range, Row, Rule, Space, no_table};

/// Most files remembered, those without a table included.
const MAX_FILES: usize = 16_384;

/// Share of the memory for rows, as one part in so many, that may be filled with tables that no sample has asked for.
const UNASKED: u32 = 8;

/// Share of the memory for rows, as one part in so many, that may be filled with windows that no sample has asked for.
const MOST_BESIDE: u32 = 4;

/// How long such windows are made at a time (at least one): meanwhile, what samples ask for has to wait.
const AT_A_TIME: Duration = Duration::from_millis(15);

/// Largest `.eh_frame` of a file whose rows are all made before samples are met in it.
const MOST_UNASKED: u64 = 2 << 20;

/// The same for its code: code without rules is read instruction by instruction. For OpenBLAS's 20 MB that takes four times as long
/// as its rules, and only one function in five is for this machine's processor.
const MOST_CODE_UNASKED: u64 = 8 << 20;

/// How the reason begins for a file whose table does not fit.
const NO_ROOM: &str = "no room for its";

/// What stands behind an executable mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Source {
    File(FileIdentity),
    Vdso,
    /// Generated code, by its rules.
    Generated(u64),
}

/// What is known about a file.
#[derive(Debug)]
enum Known {
    Placed(Placed),
    /// It has no rules at all.
    Bare,
    /// Its rules cannot be used.
    Refused,
}

/// Ranges of one address space.
#[derive(Debug)]
struct Block {
    first: u32,
    count: u32,
    sources: HashSet<Source>,
    /// Since when no process has used it.
    unused: Option<Instant>,
}

/// All tables.
#[derive(Debug)]
pub struct UnwindTables {
    known: HashMap<Source, Known>,
    blocks: Vec<Block>,
    rows: Room,
    ranges: Room,
    calls: u64,
    refusals: BTreeMap<String, String>,
    /// Windows for which there was no room, with the room they need.
    starved: HashMap<(Source, u64), u32>,
    /// When unused blocks were last looked for.
    swept: Option<Instant>,
    /// Parts of files whose rules were derived from the instructions, for tables made since the last call for them.
    assembly: Vec<(FileIdentity, std::ops::Range<u64>)>,
    /// Where tables are kept between recordings.
    folder: Option<Arc<Folder>>,
}

impl UnwindTables {
    /// Tables in a memory for that many rows and ranges.
    #[must_use]
    pub fn new(rows: u32, ranges: u32) -> Self {
        Self {
            known: HashMap::new(),
            blocks: Vec::new(),
            rows: Room::new(rows, ROWS_PER_CHUNK),
            ranges: Room::new(ranges, ranges),
            calls: 0,
            refusals: BTreeMap::new(),
            starved: HashMap::new(),
            swept: None,
            assembly: Vec::new(),
            folder: None,
        }
    }

    /// The same, with the tables of whole files kept between recordings.
    #[must_use]
    pub fn keeping(self, folder: Option<&Arc<Folder>>) -> Self {
        Self { folder: folder.cloned(), ..self }
    }

    /// Parts of files, by offset, without rules in `.eh_frame`, whose rules were derived from the instructions: for tables made since
    /// the last call.
    pub fn take_assembly(&mut self) -> Vec<(FileIdentity, std::ops::Range<u64>)> {
        std::mem::take(&mut self.assembly)
    }

    /// Files that cannot be unwound, by path, each with its reason.
    pub fn refusals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.refusals.iter().map(|(path, reason)| (path.as_str(), reason.as_str()))
    }

    /// How many files, or parts of files, that samples have met have no table for want of room.
    #[must_use]
    pub fn without_room(&self) -> usize {
        self.starved.len()
    }

    /// Bytes of memory that would have had room for everything that was asked for.
    #[must_use]
    pub fn bytes_wanted(&self) -> u64 {
        let starved: u64 = self.starved.values().map(|&words| u64::from(words)).sum();
        // No part straddles two chunks: some room is left at the end of each.
        let words = u64::from(self.rows.used) + starved;
        let words = words + words / 8 + u64::from(ROWS_PER_CHUNK);
        words.next_multiple_of(u64::from(ROWS_PER_CHUNK)) * size_of::<Row>() as u64
    }

    /// Rows in use, including those whose room an index takes.
    #[must_use]
    pub fn rows_used(&self) -> u32 {
        self.rows.used
    }

    /// Bytes of rows and indexes in use.
    #[must_use]
    pub fn bytes_used(&self) -> u64 {
        u64::from(self.rows.used) * size_of::<Row>() as u64
    }

    /// Writes what is needed to unwind a process's stacks with these mappings, which are all that it has.
    ///
    /// # Errors
    /// When there is no room for them.
    pub fn map(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        image: u64,
        memory: &mut impl TableMemory,
    ) -> Result<Space, NoRoom> {
        Ok(self.map_some(process, maps, &Wanted { image, ..Wanted::default() }, memory)?.0)
    }

    /// Writes as much of that as is wanted, and says whether to ask again: small files were left out.
    ///
    /// # Errors
    /// When there is no room for the ranges.
    pub fn map_some(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        wanted: &Wanted<'_>,
        memory: &mut impl TableMemory,
    ) -> Result<(Space, bool), NoRoom> {
        self.calls += 1;
        self.sweep_if_due(memory);
        let mut code: Vec<(&Mapping, Option<Source>)> =
            maps.iter().filter(|mapping| mapping.executable).map(|mapping| (mapping, None)).collect();
        let named_first = |mapping: &Mapping| {
            let identity = || identity(process, mapping, wanted.identities);
            wanted.first.is_some_and(|first| identity().is_some_and(|file| first.contains(&file)))
        };
        let first: HashSet<u64> =
            code.iter().filter(|(mapping, _)| named_first(mapping)).map(|(mapping, _)| mapping.start).collect();
        let is_first = |mapping: &Mapping| first.contains(&mapping.start);
        // The cheapest first, but interpreters before everything.
        code.sort_by_cached_key(|(mapping, _)| (!is_first(mapping), mapping.end - mapping.start));
        let (mut sources, mut left, mut more) = (HashSet::new(), wanted.allowance, false);
        for (mapping, source) in &mut code {
            let generated = wanted.generated.and_then(|generated| generated.get(&mapping.start));
            *source = match generated {
                Some(generated) => self.generated(generated, &sources, memory),
                None => {
                    let allowance = if is_first(mapping) { None } else { left.as_mut() };
                    self.source((process, mapping, wanted.identities), &sources, allowance, memory, &mut more)
                }
            };
            sources.extend(*source);
        }
        code.sort_by_key(|(mapping, _)| mapping.start);
        let mut ranges = Vec::new();
        for (mapping, source) in code {
            match source {
                Some(source) => self.add_ranges(&mut ranges, mapping, source),
                // Generated code, or a file that is out of reach.
                None => {
                    let bare = mapping.path == MappedPath::Anonymous;
                    ranges.push(without_table(mapping, if bare { no_table::FRAME_POINTERS } else { no_table::STOP }));
                }
            }
        }
        ranges.truncate(MAX_SPACE_RANGES as usize);
        let count = u32::try_from(ranges.len()).map_err(|_| NoRoom(ranges.len()))?;
        let first = self.ranges.take(count).ok_or(NoRoom(ranges.len()))?;
        memory.write_ranges(first, &ranges);
        self.blocks.push(Block { first, count, sources, unused: None });
        // A recording never sees as many address spaces as there are numbers.
        Ok((Space { image: wanted.image, first, count, version: self.calls as u32, _pad: 0 }, more))
    }

    /// Makes the rows of a file that a process is about to map, if they are few, or those of an interpreter.
    pub fn expect(&mut self, file: &MappedFile, interpreter: bool, memory: &mut impl TableMemory) {
        let source = Source::File(file.identity());
        let Some(opened) = file.open().ok().filter(|_| !self.known.contains_key(&source)) else { return };
        let Ok(elf) = Elf::parse(&opened) else { return };
        let rules = rules_len(&elf).unwrap_or_default();
        let room = self.rows.used <= self.rows.size / UNASKED;
        let code = code_of(&elf);
        if !interpreter && (rules > MOST_UNASKED || len_of(&code) > MOST_CODE_UNASKED || !room) {
            return;
        }
        // Problems with a file are reported when a process maps it.
        let (Ok(table), unkept) = kept::table(self.folder.as_ref(), (&opened, &elf), rules) else { return };
        let in_use = self.known.keys().copied().collect();
        if let Some(at) = self.place(&table, u64::MAX, &in_use, memory) {
            self.assembly.extend(assembly(source, &table, &code));
            self.remember(source, Known::Placed(Placed { unkept, ..Placed::whole(at, rules, code, self.calls) }));
        }
    }

    /// Makes the rows of the window that holds an address of a process, if they are not made yet. True: a [`Space`] of this
    /// version does not have them, and the next one will.
    pub fn meet(
        &mut self,
        process: &RemoteProcess,
        mapping: &Mapping,
        address: u64,
        version: u32,
        identities: &Identities,
        memory: &mut impl TableMemory,
    ) -> bool {
        let Some(file) = identity(process, mapping, Some(identities)) else { return false };
        let source = Source::File(file);
        let Some(Known::Placed(placed)) = self.known.get_mut(&source) else { return false };
        let Some((_, vaddr)) = placed.addresses(mapping) else { return false };
        placed.met = true;
        let vaddr = address.wrapping_sub(mapping.start).wrapping_add(vaddr);
        if let Some((_, table)) = placed.tables.range(..=vaddr).next_back().filter(|(_, table)| vaddr < table.end) {
            return u32::try_from(table.made).is_ok_and(|made| made >= version);
        }
        let Some((windows, window)) = placed.windows.and_then(|windows| Some((windows, windows.at(vaddr)?))) else {
            return false;
        };
        let Ok(file) = process.mapped_file(mapping) else { return false };
        self.make(&file, &path_of(mapping), &windows, &window, memory)
    }

    /// Makes some of the missing windows of files in which samples were met, while less than a quarter of the memory is in use:
    /// otherwise each would cost a sample to ask for it. Returns whether it made any, and whether there are more.
    pub fn make_more(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        identities: &Identities,
        memory: &mut impl TableMemory,
    ) -> (bool, bool) {
        let (mut made, begun) = (false, Instant::now());
        for mapping in maps.iter().filter(|mapping| mapping.executable) {
            let Some(source) = identity(process, mapping, Some(identities)).map(Source::File) else { continue };
            let mut file = None;
            while let Some(Known::Placed(placed)) = self.known.get_mut(&source) {
                if self.rows.used > self.rows.size / MOST_BESIDE {
                    return (made, false);
                }
                if made && begun.elapsed() > AT_A_TIME {
                    return (made, true);
                }
                let Some((windows, window)) = placed.missing() else { break };
                let file = match &mut file {
                    Some(file) => file,
                    none => match process.mapped_file(mapping) {
                        Ok(found) => none.insert(found),
                        Err(_) => break,
                    },
                };
                made |= self.make(file, &path_of(mapping), &windows, &window, memory);
            }
        }
        (made, false)
    }

    /// Makes a window of a file. True if it exists now.
    fn make(
        &mut self,
        file: &MappedFile,
        path: &str,
        windows: &Windows,
        window: &std::ops::Range<u64>,
        memory: &mut impl TableMemory,
    ) -> bool {
        let source = Source::File(file.identity());
        if self.starved.contains_key(&(source, window.start)) {
            return false;
        }
        let compiled = file.open().map_err(|error| error.to_string()).and_then(|file| {
            let elf = Elf::parse(file).map_err(|error| error.to_string())?;
            windows.compile(&elf, window).map_err(|error| error.to_string())
        });
        let table = match compiled {
            // Code without any rule: from now on it is reported as such.
            Ok(table) if table.rows.is_empty() => {
                Table { base: window.start, rows: vec![Row::new(0, Rule::GAP)], ..Table::default() }
            }
            Ok(table) => table,
            Err(reason) => {
                self.refusals.insert(path.to_owned(), reason);
                return false;
            }
        };
        // No file mapped by live processes gives way to another: samples would ask for each again in turn, and nothing would
        // show that room is short.
        let living = self.blocks.iter().filter(|block| block.unused.is_none());
        let in_use = living.flat_map(|block| block.sources.iter().copied()).chain([source]).collect();
        let Some(at) = self.place(&table, window.end, &in_use, memory) else {
            self.starved.insert((source, window.start), words(&table));
            return false;
        };
        if let Some(Known::Placed(placed)) = self.known.get_mut(&source) {
            placed.tables.insert(window.start, at);
            self.assembly.extend(assembly(source, &table, &placed.code));
        }
        true
    }

    /// What is behind a mapping, examined if it is new; `in_use` belongs to the process at hand. `None` if that cannot
    /// be determined, or there is no room for it. `more` becomes true when the allowance was too small for it.
    fn source(
        &mut self,
        (process, mapping, identities): (&RemoteProcess, &Mapping, Option<&Identities>),
        in_use: &HashSet<Source>,
        mut allowance: Option<&mut u64>,
        memory: &mut impl TableMemory,
        more: &mut bool,
    ) -> Option<Source> {
        let is_vdso = mapping.path == MappedPath::Special(b"[vdso]".to_vec());
        let source = if is_vdso { Source::Vdso } else { Source::File(identity(process, mapping, identities)?) };
        let room = self.rows.used <= self.rows.size / UNASKED;
        // Whether all of a file is made now; a file that is already partly made stays as it is.
        let mut all = |rules: u64, code: &[Code]| match &mut allowance {
            None => true,
            Some(_) if rules > MOST_UNASKED || len_of(code) > MOST_CODE_UNASKED || !room => false,
            Some(left) => {
                let affordable = **left >= rules;
                *more |= !affordable;
                **left = if affordable { **left - rules } else { 0 };
                affordable
            }
        };
        let mut known_rules = None;
        match self.known.get_mut(&source) {
            Some(Known::Placed(placed)) => {
                placed.used = self.calls;
                if placed.windows.is_none() || !placed.tables.is_empty() || !all(placed.rules, &placed.code) {
                    return Some(source);
                }
                known_rules = Some(placed.rules);
            }
            Some(_) => return Some(source),
            None => {}
        }
        let file = if is_vdso { None } else { Some(process.mapped_file(mapping).ok()?) };
        if let Some(found) = file.as_ref().map(|file| Source::File(file.identity())).filter(|found| *found != source) {
            // It has changed since: the next look will see that.
            return self.known.contains_key(&found).then_some(found);
        }
        let compiled = match &file {
            Some(file) => file.open().map_err(|error| error.to_string()).and_then(|file| {
                let elf = Elf::parse(&file).map_err(|error| error.to_string())?;
                let rules = known_rules.unwrap_or_else(|| rules_len(&elf).unwrap_or_default());
                let windows = Windows::of(&elf).filter(|_| elf.machine() == MACHINE);
                let code = code_of(&elf);
                let whole = (windows.is_none() || known_rules.is_some() || all(rules, &code))
                    .then(|| kept::table(self.folder.as_ref(), (&file, &elf), rules));
                Ok((code, rules, windows, whole))
            }),
            None => own_vdso().and_then(|bytes| {
                let elf = Elf::parse(&bytes[..]).map_err(|error| error.to_string())?;
                Ok((code_of(&elf), 0, None, Some((compile_vdso(&elf), None))))
            }),
        };
        let known = match compiled {
            Ok((code, rules, windows, None)) => Known::Placed(Placed::new(windows, rules, code, self.calls)),
            Ok((code, rules, windows, Some((Ok(table), unkept)))) => match self.place(&table, u64::MAX, in_use, memory)
            {
                Some(at) => {
                    self.assembly.extend(assembly(source, &table, &code));
                    Known::Placed(Placed { unkept, ..Placed::whole(at, rules, code, self.calls) })
                }
                // Parts of it may fit when they are asked for.
                None if windows.is_some() => Known::Placed(Placed::new(windows, rules, code, self.calls)),
                None => {
                    self.starved.insert((source, 0), words(&table));
                    self.refusals.insert(path_of(mapping), format!("{NO_ROOM} {} rows", table.rows.len()));
                    return None;
                }
            },
            Ok((.., Some((Err(refusal), _)))) => {
                self.refusals.insert(path_of(mapping), refusal.to_string());
                if matches!(refusal, Refusal::NoTable) { Known::Bare } else { Known::Refused }
            }
            Err(reason) => {
                self.refusals.insert(path_of(mapping), reason);
                Known::Refused
            }
        };
        self.remember(source, known);
        Some(source)
    }

    fn remember(&mut self, source: Source, known: Known) {
        if self.known.len() >= MAX_FILES {
            // Files without a table cost little to look at again.
            self.known.retain(|_, known| matches!(known, Known::Placed(placed) if !placed.tables.is_empty()));
            self.refusals.clear();
            self.starved.clear();
        }
        self.known.insert(source, known);
    }

    /// Adds the ranges of a mapping: one for each part of the file's tables.
    fn add_ranges(&self, ranges: &mut Vec<Range>, mapping: &Mapping, source: Source) {
        let placed = match self.known.get(&source) {
            Some(Known::Placed(placed)) => placed,
            Some(Known::Bare) => return ranges.push(without_table(mapping, no_table::FRAME_POINTERS)),
            Some(Known::Refused) => return ranges.push(without_table(mapping, no_table::NEVER)),
            None => return ranges.push(without_table(mapping, no_table::STOP)),
        };
        if let Source::Generated(_) = source {
            // The kernel merges adjacent arenas into one mapping.
            let len = placed.code.first().map_or(u64::MAX, |code| code.end).max(1);
            for start in (mapping.start..mapping.end).step_by(usize::try_from(len).unwrap_or(usize::MAX)) {
                let end = mapping.end.min(start.saturating_add(len));
                placed.add_ranges(ranges, start, 0..end - start);
            }
            return;
        }
        let Some((_, vaddr)) = placed.addresses(mapping) else {
            return ranges.push(without_table(mapping, no_table::STOP));
        };
        placed.add_ranges(ranges, mapping.start, vaddr..vaddr.saturating_add(mapping.end - mapping.start));
    }
}

#[cfg(test)]
#[path = "store/tests.rs"]
mod tests;
