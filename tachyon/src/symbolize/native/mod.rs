//! Native addresses to functions, files and lines.
//!
//! In: an address in a process and the mapping that holds it. Out: the object it lies in, its function (demangled) and,
//! where the file or its debug file has DWARF, source lines and inlined functions. A file is opened when an address in
//! it is first seen, and held: names are still there after the process has ended and the file has been deleted.
//! What cannot be named is an answer (`object+0x1234`), not an error.
//!
//! Files are somebody else's: they are opened as they are mapped, read (never mapped), and every table of them is
//! bounded. What is kept of them is bounded, too: the table used longest ago goes first, and is read again when needed.

mod debug;
mod demangle;
mod dwarf;
mod table;
#[cfg(test)]
mod tests;
mod vdso;

use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use dwarf::SourceFrame;

use self::dwarf::Lines;
use self::table::SymbolTable;
use crate::remote::elf::{Elf, Load};
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteProcess};

/// Most files held open, with as many debug files at most. Only those are held in which an address was seen.
const MAX_FILES: usize = 400;

/// Most bytes of symbol tables and DWARF that are kept, the table that is being used aside.
const MAX_BYTES: usize = 64 << 20;

/// What is known of one address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NativeName {
    /// The file's name without its folders, `[vdso]`, or the name of other memory; empty when there is no mapping.
    pub object: String,
    /// Address in the file, before relocation; where there is no file, in the process.
    pub vaddr: u64,
    /// The function that holds the address, demangled.
    pub function: Option<String>,
    /// Its first address, before relocation.
    pub function_vaddr: Option<u64>,
    /// Source lines and inlined functions, innermost first; the last one is `function`. Empty without DWARF.
    pub lines: Vec<SourceFrame>,
}

/// Names addresses of all processes of a recording.
#[derive(Debug)]
pub struct NativeSymbols {
    files: HashMap<FileIdentity, Shared>,
    vdso: Option<Shared>,
    max_bytes: usize,
    clock: u64,
}

impl Default for NativeSymbols {
    fn default() -> Self {
        Self::with_budget(MAX_BYTES)
    }
}

/// A file that is held open. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pinned(Shared);

type Shared = Arc<Mutex<NativeFile>>;

/// A panic while it was locked leaves it usable: all that changes in it are caches.
fn lock(file: &Shared) -> MutexGuard<'_, NativeFile> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct NativeFile {
    object: String,
    file: Option<Arc<File>>,
    debug: Option<Arc<File>>,
    loads: Vec<Load>,
    tables: Option<Vec<SymbolTable>>,
    lines: Option<Option<Lines>>,
    used: u64,
}

impl NativeSymbols {
    /// Nothing is held yet; keeps about `max_bytes` of tables.
    #[must_use]
    pub fn with_budget(max_bytes: usize) -> Self {
        Self { files: HashMap::new(), vdso: None, max_bytes, clock: 0 }
    }

    /// Opens the file behind a mapping, and its debug file, and holds them. `None`: there is no file, it cannot be
    /// opened (any more), is no ELF file, or too many are held.
    pub fn pin(&mut self, process: &RemoteProcess, mapping: &Mapping) -> Option<Pinned> {
        if mapping.path == MappedPath::Special(b"[vdso]".to_vec()) {
            let vdso = || Some(Arc::new(Mutex::new(vdso::file()?)));
            self.vdso = self.vdso.take().or_else(vdso);
            return self.vdso.clone().map(Pinned);
        }
        let path = mapping.file_path()?;
        let name = mapping.name();
        let found = process.mapped_file(mapping).ok()?;
        if let Some(file) = self.files.get(&found.identity()) {
            return Some(Pinned(Arc::clone(file)));
        }
        if self.files.len() >= MAX_FILES {
            // Those of processes that have ended are held by nobody else.
            self.files.retain(|_, file| Arc::strong_count(file) > 1);
        }
        if self.files.len() >= MAX_FILES {
            return None;
        }
        let file = Arc::new(Mutex::new(NativeFile::open(process, &found, path, name)?));
        self.files.insert(found.identity(), Arc::clone(&file));
        Some(Pinned(file))
    }

    /// The name of what lies at an offset of a file that is held.
    pub fn name(&mut self, file: &Pinned, offset: u64, detail: Detail) -> NativeName {
        self.clock += 1;
        let name = {
            let mut file = lock(&file.0);
            file.used = self.clock;
            file.name(offset, detail)
        };
        self.shrink();
        name
    }

    /// Bytes of tables that are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.files.values().map(|file| lock(file).bytes()).sum()
    }

    /// Files that are held open, debug files included.
    #[must_use]
    pub fn files_held(&self) -> usize {
        let held = |file: &Shared| 1 + usize::from(lock(file).debug.is_some());
        self.files.values().map(held).sum()
    }

    /// Lets go of tables, those used longest ago first, until what is left keeps the budget or is the newest.
    fn shrink(&mut self) {
        let mut bytes = self.bytes();
        while bytes > self.max_bytes {
            let full = self.files.values().filter(|file| lock(file).bytes() > 0);
            let oldest = full.min_by_key(|file| lock(file).used).filter(|file| lock(file).used != self.clock);
            let Some(oldest) = oldest else { return };
            bytes -= lock(oldest).bytes();
            let mut oldest = lock(oldest);
            (oldest.tables, oldest.lines) = (None, None);
        }
    }
}

/// How much is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The function: from symbol tables, which are small.
    Function,
    /// Source lines and inlined functions as well: DWARF of some ten megabytes is read.
    Lines,
}

impl NativeFile {
    fn open(process: &RemoteProcess, found: &MappedFile, path: &std::path::Path, object: String) -> Option<Self> {
        let file = found.open().ok()?;
        let (debug, loads) = {
            let elf = Elf::parse(&file).ok()?;
            let debug = debug::debug_file(process, path, &elf).map(Arc::new);
            (debug, elf.loads().to_vec())
        };
        Some(Self { object, file: Some(Arc::new(file)), debug, loads, tables: None, lines: None, used: 0 })
    }

    fn name(&mut self, offset: u64, detail: Detail) -> NativeName {
        let object = self.object.clone();
        let Some(vaddr) = Load::code_vaddr(&self.loads, offset) else {
            return NativeName { object, vaddr: offset, ..NativeName::default() };
        };
        let found = self.tables().iter().find_map(|table| table.find(vaddr));
        let mut name = NativeName { object, vaddr, ..NativeName::default() };
        if let Some(found) = found {
            name.function = Some(demangle::demangle(&found.name));
            name.function_vaddr = Some(found.vaddr);
        }
        if detail == Detail::Lines
            && let Some(lines) = self.lines()
        {
            name.lines = lines.frames(vaddr);
            // The symbol's name is the one that other tools show; DWARF may know one where no symbol does.
            match (&name.function, name.lines.last_mut()) {
                (Some(function), Some(outer)) => outer.function = Some(function.clone()),
                (None, Some(outer)) => name.function.clone_from(&outer.function),
                _ => {}
            }
        }
        name
    }

    /// The symbol tables, the best first.
    fn tables(&mut self) -> &[SymbolTable] {
        let (file, debug, loads) = (&self.file, &self.debug, &self.loads);
        self.tables.get_or_insert_with(|| match file {
            Some(file) => tables_of(file, debug.as_ref(), loads),
            None => Vec::new(),
        })
    }

    fn lines(&mut self) -> Option<&Lines> {
        let (file, debug) = (&self.file, &self.debug);
        self.lines.get_or_insert_with(|| dwarf::of_either(debug.as_ref(), file.as_ref()?)).as_ref()
    }

    /// Bytes that reading the file again would bring back.
    fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().flatten().map(SymbolTable::bytes).sum();
        tables + self.lines.iter().flatten().map(Lines::bytes).sum::<usize>()
    }
}

/// All functions where a table has them; else what is exported and what the packed table adds.
fn tables_of(file: &Arc<File>, debug: Option<&Arc<File>>, loads: &[Load]) -> Vec<SymbolTable> {
    let of = |file: &Arc<File>, kind| SymbolTable::of_file(file, kind, loads).ok().flatten();
    if let Some(all) = of(file, table::ALL).or_else(|| of(debug?, table::ALL)) {
        return vec![all];
    }
    let mini = Elf::parse(&**file).ok().and_then(|elf| debug::mini_debug_info(&elf));
    let mini = mini.and_then(|bytes| SymbolTable::of_bytes(&bytes, table::ALL, loads).ok().flatten());
    mini.into_iter().chain(of(file, table::DYNAMIC)).collect()
}
