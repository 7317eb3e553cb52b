//! Tables of all files that profiled processes have mapped, within a bounded memory, and the ranges of each process.
//!
//! In: a process. Out: rows and ranges written to a [`TableMemory`], and the [`Space`] that says where they are. A file's
//! table is made once and shared by all processes that map it. What is in use is not told by events, which can be lost,
//! but read from the memory itself ([`TableMemory::spaces`]): what no process has any more is given away after a while,
//! the file used longest ago first.

use super::compile::{Refusal, Table, compile, compile_vdso};
use super::part::{TablePart, parts};
use crate::remote::elf::{Elf, ReadAt};
use crate::remote::{FileIdentity, MappedPath, Mapping, RemoteProcess};
use crate::types::{Pid, RemoteAddr};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};
use tachyon_common::limits::{MAX_SPACE_RANGES, ROWS_PER_CHUNK};
use tachyon_common::unwind::{Range, Row, Space, no_table, pages};

/// How long what was given up is left as it is: a walk that began before may still read it, and takes microseconds.
const REST: Duration = Duration::from_secs(1);

/// Most files remembered, those without a table included.
const MAX_FILES: usize = 16_384;

/// This machine's processor.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { object::elf::EM_AARCH64 } else { object::elf::EM_X86_64 };

/// Largest vdso; real ones have 8 KiB.
const MAX_VDSO: u64 = 64 << 10;

/// Where tables are kept for the kernel side.
pub trait TableMemory {
    /// Writes rows and their index from index `first` on, all of them in one chunk of [`ROWS_PER_CHUNK`]; false when there
    /// is no memory for them.
    fn write_rows(&mut self, first: u32, rows: &[Row]) -> bool;
    /// Writes ranges from index `first` on.
    fn write_ranges(&mut self, first: u32, ranges: &[Range]);
    /// The spaces of all processes.
    fn spaces(&self) -> Vec<Space>;
}

/// Why a process has no ranges: those of all processes are more than there is room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no room for the {0} ranges of its address space")]
pub struct NoRoom(pub usize);

/// Where a [`TablePart`] is.
#[derive(Clone, Copy, Debug)]
struct Part {
    pc: u32,
    /// Index of its first row.
    first: u32,
    rows: u16,
    pages: u16,
}

impl Part {
    /// Room for rows and index, in rows.
    fn words(&self) -> u32 {
        u32::from(self.rows) + pages::index_words(u32::from(self.pages))
    }
}

/// How the reason begins of a file whose table does not fit.
const NO_ROOM: &str = "no room for its";

/// One file's table, and where its rows are.
#[derive(Debug)]
struct Placed {
    base: u64,
    parts: Vec<Part>,
    /// Segments that are mapped executable.
    code: Vec<Code>,
    /// When it was last asked for, in calls of [`UnwindTables::map`].
    used: u64,
}

/// An executable segment: where in the file, and what to add to a file offset to get its address before relocation.
#[derive(Clone, Copy, Debug)]
struct Code {
    start: u64,
    end: u64,
    to_vaddr: u64,
}

/// What stands behind an executable mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Source {
    File(FileIdentity),
    Vdso,
}

/// What is known of a file.
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
    /// Since when no process has it.
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
}

impl UnwindTables {
    /// Tables in a memory of so many rows and ranges.
    #[must_use]
    pub fn new(rows: u32, ranges: u32) -> Self {
        Self {
            known: HashMap::new(),
            blocks: Vec::new(),
            rows: Room::new(rows, ROWS_PER_CHUNK),
            ranges: Room::new(ranges, ranges),
            calls: 0,
            refusals: BTreeMap::new(),
        }
    }

    /// Files that cannot be unwound, by path, each with its reason.
    pub fn refusals(&self) -> impl Iterator<Item = (&str, &str)> {
        self.refusals.iter().map(|(path, reason)| (path.as_str(), reason.as_str()))
    }

    /// How many files have no table for want of room.
    #[must_use]
    pub fn without_room(&self) -> usize {
        self.refusals.values().filter(|reason| reason.starts_with(NO_ROOM)).count()
    }

    /// Rows in use, those that an index takes the room of among them.
    #[must_use]
    pub fn rows_used(&self) -> u32 {
        self.rows.used
    }

    /// Bytes of rows and indexes in use.
    #[must_use]
    pub fn bytes_used(&self) -> u64 {
        u64::from(self.rows.used) * size_of::<Row>() as u64
    }

    /// Writes what is needed to unwind a process's stacks with these mappings, which are all of its own.
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
        self.calls += 1;
        self.sweep(memory);
        let (mut ranges, mut sources) = (Vec::new(), HashSet::new());
        for mapping in maps.iter().filter(|mapping| mapping.executable) {
            match self.source(process, mapping, &sources, memory) {
                Some(source) => {
                    self.add_ranges(&mut ranges, mapping, source);
                    sources.insert(source);
                }
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
        // As many address spaces as numbers are more than a recording sees.
        Ok(Space { image, first, count, version: self.calls as u32, _pad: 0 })
    }

    /// Finds blocks that no process has any more, and gives away those that have rested.
    fn sweep(&mut self, memory: &impl TableMemory) {
        let used: HashSet<u32> = memory.spaces().iter().map(|space| space.first).collect();
        let now = Instant::now();
        let ranges = &mut self.ranges;
        self.blocks.retain_mut(|block| {
            if used.contains(&block.first) {
                block.unused = None;
                return true;
            }
            let rested = now.duration_since(*block.unused.get_or_insert(now)) >= REST;
            if rested {
                ranges.give_back(block.first, block.count);
            }
            !rested
        });
    }

    /// What stands behind a mapping, which is looked at if it is new; `in_use` is of the process in hand. `None` when it
    /// cannot be told, or there is no room for it.
    fn source(
        &mut self,
        process: &RemoteProcess,
        mapping: &Mapping,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<Source> {
        let is_vdso = mapping.path == MappedPath::Special(b"[vdso]".to_vec());
        let file = if is_vdso { None } else { Some(process.mapped_file(mapping).ok()?) };
        let source = file.as_ref().map_or(Source::Vdso, |file| Source::File(file.identity()));
        if let Some(known) = self.known.get_mut(&source) {
            if let Known::Placed(placed) = known {
                placed.used = self.calls;
            }
            return Some(source);
        }
        let compiled = match &file {
            Some(file) => file.open().map_err(|error| error.to_string()).and_then(|file| {
                let elf = Elf::parse(file).map_err(|error| error.to_string())?;
                Ok((code_of(&elf), compile_own(&elf)))
            }),
            None => own_vdso().and_then(|bytes| {
                let elf = Elf::parse(&bytes[..]).map_err(|error| error.to_string())?;
                Ok((code_of(&elf), compile_vdso(&elf)))
            }),
        };
        let path = || mapping.file_path().map_or_else(|| "[vdso]".to_owned(), |path| path.display().to_string());
        let known = match compiled {
            Ok((code, Ok(table))) => match self.place(&table, code, in_use, memory) {
                Some(placed) => Known::Placed(placed),
                None => {
                    self.refusals.insert(path(), format!("{NO_ROOM} {} rows", table.rows.len()));
                    return None;
                }
            },
            Ok((_, Err(refusal))) => {
                self.refusals.insert(path(), refusal.to_string());
                if matches!(refusal, Refusal::NoTable) { Known::Bare } else { Known::Refused }
            }
            Err(reason) => {
                self.refusals.insert(path(), reason);
                Known::Refused
            }
        };
        if self.known.len() >= MAX_FILES {
            // What has no table costs little to look at again.
            self.known.retain(|_, known| matches!(known, Known::Placed(_)));
            self.refusals.clear();
        }
        self.known.insert(source, known);
        Some(source)
    }

    /// Finds room for a table, and writes it there.
    fn place(
        &mut self,
        table: &Table,
        code: Vec<Code>,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<Placed> {
        let mut placed = Vec::new();
        for part in parts(&table.rows) {
            let Some(part) = self.place_part(&part, in_use, memory) else {
                self.give_back(&placed);
                return None;
            };
            placed.push(part);
        }
        Some(Placed { base: table.base, parts: placed, code, used: self.calls })
    }

    fn place_part(
        &mut self,
        part: &TablePart,
        in_use: &HashSet<Source>,
        memory: &mut impl TableMemory,
    ) -> Option<Part> {
        let count = u32::try_from(part.words.len()).ok()?;
        let first = loop {
            match self.rows.take(count) {
                Some(first) => break first,
                None => self.evict(in_use)?,
            }
        };
        let placed = Part { pc: part.pc, first, rows: part.rows, pages: part.pages };
        if !memory.write_rows(first, &part.words) {
            self.give_back(&[placed]);
            return None;
        }
        Some(placed)
    }

    fn give_back(&mut self, parts: &[Part]) {
        parts.iter().for_each(|part| self.rows.give_back(part.first, part.words()));
    }

    /// Gives away the table that was used longest ago of those that no process has.
    fn evict(&mut self, in_use: &HashSet<Source>) -> Option<()> {
        let blocks = &self.blocks;
        let is_used =
            |source: &Source| in_use.contains(source) || blocks.iter().any(|block| block.sources.contains(source));
        let placed = self.known.iter().filter_map(|(source, known)| match known {
            Known::Placed(placed) if !is_used(source) => Some((placed.used, *source)),
            _ => None,
        });
        let (_, oldest) = placed.min()?;
        if let Some(Known::Placed(placed)) = self.known.remove(&oldest) {
            self.give_back(&placed.parts);
        }
        Some(())
    }

    /// Adds the ranges of a mapping: one for each part of the file's table.
    fn add_ranges(&self, ranges: &mut Vec<Range>, mapping: &Mapping, source: Source) {
        let placed = match self.known.get(&source) {
            Some(Known::Placed(placed)) => placed,
            Some(Known::Bare) => return ranges.push(without_table(mapping, no_table::FRAME_POINTERS)),
            _ => return ranges.push(without_table(mapping, no_table::STOP)),
        };
        // A mapping starts at a page, a segment anywhere in it.
        let code = placed.code.iter().find(|code| mapping.offset >= code.start & !0xfff && mapping.offset < code.end);
        let Some(code) = code else { return ranges.push(without_table(mapping, no_table::STOP)) };
        let vaddr = mapping.offset.wrapping_add(code.to_vaddr);
        let base = mapping.start.wrapping_sub(vaddr).wrapping_add(placed.base);
        let mut start = mapping.start;
        let at = |part: &Part| base.wrapping_add(u64::from(part.pc));
        for (place, part) in placed.parts.iter().enumerate() {
            let next = placed.parts.get(place + 1).map(at);
            let end = next.unwrap_or(mapping.end).min(mapping.end);
            if end > start && at(part) < mapping.end {
                let Part { first, rows, pages, .. } = *part;
                ranges.push(Range { start, end, bias: at(part), first_row: first, rows, pages });
                start = end;
            }
        }
        if start < mapping.end {
            ranges.push(Range { start, ..without_table(mapping, no_table::STOP) });
        }
    }
}

fn without_table(mapping: &Mapping, what: u32) -> Range {
    Range { start: mapping.start, end: mapping.end, bias: 0, first_row: what, rows: 0, pages: 0 }
}

/// The table of a file for this machine's own processor: rules of another would be followed as if they were its own.
fn compile_own<R: ReadAt>(elf: &Elf<R>) -> Result<Table, Refusal> {
    if elf.machine() == MACHINE { compile(elf) } else { Err(Refusal::Machine(elf.machine())) }
}

fn code_of<R: ReadAt>(elf: &Elf<R>) -> Vec<Code> {
    let code = elf.loads().iter().filter(|load| load.executable);
    code.map(|load| Code {
        start: load.offset,
        end: load.offset + load.file_size,
        to_vaddr: load.vaddr.wrapping_sub(load.offset),
    })
    .collect()
}

/// The vdso, which is the kernel's and the same in every process: this process's own cannot have been tampered with.
fn own_vdso() -> Result<Vec<u8>, String> {
    let own = RemoteProcess::at(Pid(std::process::id()));
    let maps = own.maps().map_err(|error| error.to_string())?;
    let vdso = maps.iter().find(|mapping| mapping.path == MappedPath::Special(b"[vdso]".to_vec()));
    let vdso = vdso.filter(|vdso| vdso.end - vdso.start <= MAX_VDSO).ok_or("this process has no vdso")?;
    let mut bytes = vec![0; (vdso.end - vdso.start) as usize];
    own.read_memory(RemoteAddr(vdso.start), &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}

/// Which parts of a memory are free.
#[derive(Debug)]
struct Room {
    /// First index and length of each free part, sorted, with something used between any two.
    free: Vec<(u32, u32)>,
    used: u32,
    /// What is taken lies within one of the chunks of this length.
    chunk: u32,
}

impl Room {
    fn new(size: u32, chunk: u32) -> Self {
        Self { free: vec![(0, size)], used: 0, chunk: chunk.max(1) }
    }

    /// Takes from the first free part where so many lie in one chunk.
    fn take(&mut self, count: u32) -> Option<u32> {
        let (at, taken) = self.free.iter().enumerate().find_map(|(at, part)| Some((at, self.within(*part, count)?)))?;
        let (first, len) = self.free[at];
        let before = (first, taken - first);
        let behind = (taken + count, first + len - taken - count);
        self.free.splice(at..=at, [before, behind].into_iter().filter(|(_, len)| *len > 0));
        self.used += count;
        Some(taken)
    }

    /// The first index in a free part from which so many lie in one chunk.
    fn within(&self, (first, len): (u32, u32), count: u32) -> Option<u32> {
        let left = self.chunk - first % self.chunk;
        let skipped = if count <= left { 0 } else { left };
        (count <= self.chunk && u64::from(skipped) + u64::from(count) <= u64::from(len)).then(|| first + skipped)
    }

    /// Gives a part back, and joins it with its neighbours.
    fn give_back(&mut self, first: u32, count: u32) {
        self.used -= count;
        let at = self.free.partition_point(|(start, _)| *start < first);
        self.free.insert(at, (first, count));
        let mut joined: Vec<(u32, u32)> = Vec::with_capacity(self.free.len());
        for &(start, len) in &self.free {
            match joined.last_mut() {
                Some((before, before_len)) if *before + *before_len == start => *before_len += len,
                _ if len == 0 => {}
                _ => joined.push((start, len)),
            }
        }
        self.free = joined;
    }
}

#[cfg(test)]
#[path = "store/tests.rs"]
mod tests;
