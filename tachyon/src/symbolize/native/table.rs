//! The functions of one symbol table, sorted by address. Names stay in the file until they are asked for: most never
//! are, and a large library has tens of megabytes of them.

use std::ops::Range;
use std::sync::Arc;

use object::elf;

use crate::remote::TargetFile;
use crate::remote::elf::{Elf, ElfError, Function, Load, ReadAt};

/// Longest name that is read.
const MAX_NAME: usize = 8 << 10;

/// Most bytes of a name that are compared to choose between several names of one address: a million names may share one text.
const MAX_RANKED: usize = 256;

/// Most bytes of names that are read to choose between several names of one address.
const MAX_COMPARED: u64 = 64 << 20;

/// How far a symbol without a size is assumed to reach. Those are entry points written by hand; in a stripped file
/// nothing shows where one ends and functions without a name begin (musl's `memset` would be most of its system calls).
const UNSIZED_REACH: u64 = 64;

/// How many symbols to look back for one that extends over others that begin after it.
const LOOK_BACK: usize = 8;

/// Where names are stored.
#[derive(Debug)]
enum Names {
    /// In a file that is held open.
    File { file: Arc<TargetFile>, offset: u64, len: u64 },
    /// In memory, because they were unpacked.
    Memory(Box<[u8]>),
}

/// A function: 16 bytes, because a large library has half a million of them.
#[derive(Clone, Copy, Debug)]
struct Entry {
    vaddr: u64,
    size: u32,
    name: u32,
}

/// Functions by address.
#[derive(Debug)]
pub(super) struct SymbolTable {
    entries: Box<[Entry]>,
    names: Names,
}

/// A function that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// Its linker name.
    pub(super) name: Vec<u8>,
    /// Its first address, before relocation.
    pub(super) vaddr: u64,
}

impl SymbolTable {
    /// The table of a file that is held open; `None` when it has none of this kind.
    pub(super) fn of_file(file: &Arc<TargetFile>, kind: u32, loads: &[Load]) -> Result<Option<Self>, ElfError> {
        let elf = Elf::parse(&**file)?;
        Self::read(&elf, kind, loads, |names| {
            Ok(Names::File { file: Arc::clone(file), offset: names.offset, len: names.size })
        })
    }

    /// The table of a file in memory.
    pub(super) fn of_bytes(bytes: &[u8], kind: u32, loads: &[Load]) -> Result<Option<Self>, ElfError> {
        let elf = Elf::parse(bytes)?;
        Self::read(&elf, kind, loads, |names| Ok(Names::Memory(elf.section_bytes(names, MAX_COMPARED)?.into())))
    }

    fn read<R: ReadAt>(
        elf: &Elf<R>,
        kind: u32,
        loads: &[Load],
        names: impl FnOnce(&crate::remote::elf::Section) -> Result<Names, ElfError>,
    ) -> Result<Option<Self>, ElfError> {
        let Some(mut table) = elf.functions(kind, loads)? else { return Ok(None) };
        // A stable sort: in the file's order if one address has several names.
        table.functions.sort_by_key(|function| function.vaddr);
        keep_best(&mut table.functions, || elf.section_bytes(&table.names, MAX_COMPARED).unwrap_or_default());
        let entry = |function: &Function| Entry {
            vaddr: function.vaddr,
            size: u32::try_from(function.size).unwrap_or(u32::MAX),
            name: function.name,
        };
        let entries = table.functions.iter().map(entry).collect();
        Ok(Some(Self { entries, names: names(&table.names)? }))
    }

    /// The function that holds an address.
    pub(super) fn find(&self, vaddr: u64) -> Option<Found> {
        let end = self.entries.partition_point(|entry| entry.vaddr <= vaddr);
        let before = &self.entries[end.saturating_sub(LOOK_BACK)..end];
        let within = |entry: &&Entry| vaddr - entry.vaddr < u64::from(entry.size);
        let sized = before.iter().rev().find(within);
        let unsized_reach = |entry: &&Entry| entry.size == 0 && vaddr - entry.vaddr < UNSIZED_REACH;
        let entry = sized.or_else(|| before.last().filter(unsized_reach))?;
        Some(Found { name: self.name(entry.name)?, vaddr: entry.vaddr })
    }

    /// The next address after this one at which a function begins.
    pub(super) fn next(&self, vaddr: u64) -> Option<u64> {
        Some(self.entries.get(self.entries.partition_point(|entry| entry.vaddr <= vaddr))?.vaddr)
    }

    /// The addresses around one at which [`SymbolTable::find`] finds the same.
    pub(super) fn same(&self, vaddr: u64) -> Range<u64> {
        let next = self.entries.partition_point(|entry| entry.vaddr <= vaddr);
        let before = &self.entries[next.saturating_sub(LOOK_BACK)..next];
        let begin = before.last().map_or(0, |entry| entry.vaddr);
        let end = self.entries.get(next).map_or(u64::MAX, |entry| entry.vaddr);
        let mut same = begin..end;
        for (back, entry) in before.iter().rev().enumerate() {
            let reach = if entry.size == 0 { UNSIZED_REACH } else { u64::from(entry.size) };
            let over = entry.vaddr.saturating_add(reach);
            if entry.size == 0 && back > 0 {
                // Only the last one may be without a size.
            } else if over <= vaddr {
                same.start = same.start.max(over);
            } else {
                same.end = same.end.min(over);
            }
            if entry.size > 0 && over > vaddr {
                // It is the one; those before it are not asked.
                break;
            }
        }
        same
    }

    fn name(&self, at: u32) -> Option<Vec<u8>> {
        let mut buffer = [0; MAX_NAME];
        let bytes = match &self.names {
            Names::Memory(bytes) => bytes.get(usize::try_from(at).ok()?..)?,
            Names::File { file, offset, len } => {
                let room = len.checked_sub(u64::from(at))?.min(MAX_NAME as u64);
                // Most names are short: the first read is enough.
                let mut text = buffer.get_mut(..usize::try_from(room).ok()?.min(128))?;
                let offset = offset.checked_add(u64::from(at))?;
                file.read_exact_at(offset, text).ok()?;
                if !text.contains(&0) {
                    text = buffer.get_mut(..usize::try_from(room).ok()?)?;
                    file.read_exact_at(offset, text).ok()?;
                }
                text
            }
        };
        let len = bytes.iter().take(MAX_NAME).position(|&byte| byte == 0).unwrap_or(bytes.len().min(MAX_NAME));
        Some(bytes[..len].to_vec()).filter(|name| !name.is_empty())
    }

    /// Bytes it takes.
    pub(super) fn bytes(&self) -> usize {
        let names = if let Names::Memory(bytes) = &self.names { bytes.len() } else { 0 };
        std::mem::size_of_val(&*self.entries) + names
    }
}

/// Keeps the function with the best name for each address. `names` are read only if an address has several: most have one, and a
/// large library has tens of megabytes of names. If they cannot be read, the first one is kept.
fn keep_best(functions: &mut Vec<Function>, names: impl FnOnce() -> Vec<u8>) {
    let same = |a: &Function, b: &Function| a.vaddr == b.vaddr;
    if functions.windows(2).any(|pair| same(&pair[0], &pair[1])) {
        let text = names();
        for several in functions.chunk_by_mut(same).filter(|several| several.len() > 1) {
            let best = several.iter().min_by_key(|function| rank(function, &text)).copied();
            several[0] = best.unwrap_or(several[0]);
        }
        functions.dedup_by_key(|function| function.vaddr);
    }
}

/// What makes one name of an address better than another: smaller is better. Having a size comes first, then a name that
/// others may use, then few leading underscores (`read`, not `__libc_read`), then shortness, then alphabetical order.
fn rank<'a>(function: &Function, names: &'a [u8]) -> (bool, bool, usize, usize, &'a [u8]) {
    let name = usize::try_from(function.name).ok().and_then(|at| names.get(at..)).unwrap_or_default();
    let name = &name[..name.len().min(MAX_RANKED)];
    let len = memchr::memchr(0, name).unwrap_or(name.len());
    let name = &name[..len];
    let underscores = name.iter().take_while(|&&byte| byte == b'_').count();
    (function.size == 0, !function.exported, underscores, len, name)
}

/// Time per byte of a symbol table until its functions are in order: two million symbols, 48 MiB, take some 0.7 s.
pub(super) const NANOSECONDS_A_BYTE: u64 = 15;

/// Bytes of a file's symbol tables.
pub(super) fn bytes_of(elf: &Elf<&TargetFile>) -> u64 {
    let tables = elf.sections().iter().filter(|section| matches!(section.kind, ALL | DYNAMIC));
    tables.map(|section| section.size).max().unwrap_or(0)
}

/// `SHT_SYMTAB`: all functions.
pub(super) const ALL: u32 = elf::SHT_SYMTAB;
/// `SHT_DYNSYM`: those that others may use.
pub(super) const DYNAMIC: u32 = elf::SHT_DYNSYM;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_name_of_an_address_is_kept() {
        let names = b"\0__libc_read\0read\0reader\0_read\0".to_vec();
        let function = |vaddr, size, name: &str, exported| {
            let at = names.windows(name.len() + 1).position(|text| text == [name.as_bytes(), b"\0"].concat());
            Function { vaddr, size, name: u32::try_from(at.expect("it is there")).expect("short"), exported }
        };
        let mut functions = vec![
            function(1, 8, "__libc_read", true),
            function(2, 8, "__libc_read", true),
            function(2, 8, "reader", true),
            function(2, 0, "read", true),
            function(2, 8, "read", true),
            function(2, 8, "_read", false),
            function(3, 0, "_read", true),
        ];
        let (read, underscored) = (functions[4].name, functions[6].name);
        keep_best(&mut functions, || names.clone());
        let kept: Vec<_> = functions.iter().map(|function| (function.vaddr, function.size, function.name)).collect();
        assert_eq!(kept, [(1, 8, 1), (2, 8, read), (3, 0, underscored)]);
        keep_best(&mut functions, || unreachable!("no address has several names"));
        assert_eq!(functions.len(), 3);
    }
}
