//! Turns native addresses into functions, files and lines.
//!
//! In: an address in a process and the mapping that holds it. Out: the object it lies in, its function (demangled) and,
//! if the file or its debug file has DWARF, source lines and inlined functions. A file is opened when an address in it
//! is first seen, and held open: names can still be read after the process has ended and the file has been deleted. An
//! address that cannot be named gets an answer (`object+0x1234`), not an error.
//!
//! Files are untrusted: they are opened through the mapping, read (never mapped), and every table read from them is
//! bounded. What is kept is bounded, too: the least recently used table goes first, and is read again when needed.

mod debug;
mod demangle;
mod dwarf;
mod effort;
pub mod jitdump;
mod kept;
mod made;
mod nameless;
mod table;
#[cfg(test)]
mod tests;
mod units;
mod vdso;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use demangle::demangle;
pub use dwarf::SourceFrame;
pub use kept::tables_read;
pub use made::{Image, MadeFunctions, made_name};
pub use nameless::FunctionNames;

use self::dwarf::Lines;
use self::kept::Kept;
use self::table::SymbolTable;
use crate::kept::Folder;
use crate::remote::elf::{Elf, Load};
use crate::remote::ledger::{self, Work};
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteProcess, TargetFile, open_files};
use crate::types::Pid;

/// Most files held open, plus at most as many debug files, if the limit of open files allows them.
const MAX_FILES: usize = 2_000;

/// Most bytes of symbol tables and DWARF that are kept, not counting the table in use.
pub const MAX_BYTES: usize = 64 << 20;

/// What is known about one address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NativeName {
    /// The file's name without its folders, `[vdso]`, or the name of other memory; empty when there is no mapping.
    pub object: String,
    /// Address in the file, before relocation; without a file, the address in the process.
    pub vaddr: u64,
    /// The function that holds the address, demangled.
    pub function: Option<String>,
    /// Its first address, before relocation, even if it has no name.
    pub function_vaddr: Option<u64>,
    /// What an entry of the procedure linkage table is called, after the function that it calls: `memcpy@plt`. No function of the file
    /// has that name.
    pub plt: Option<String>,
    /// Source lines and inlined functions, innermost first; the last one is `function`. Empty without DWARF.
    pub lines: Vec<SourceFrame>,
    /// Tables were not read because the process has cost enough: there may be a name another time.
    pub refused: bool,
}

impl NativeName {
    /// The name to show; `None`: there is none but the address.
    #[must_use]
    pub fn shown(&self) -> Option<&str> {
        self.function.as_deref().or(self.plt.as_deref())
    }
}

/// Names addresses of all processes of a recording. One thread may hold files while another asks for names.
#[derive(Debug)]
pub struct NativeSymbols {
    held: Mutex<Held>,
    max_bytes: usize,
    max_files: usize,
    /// Where names are kept between recordings.
    folder: Option<Arc<Folder>>,
}

#[derive(Debug, Default)]
struct Held {
    files: HashMap<FileIdentity, Pinned>,
    vdso: Option<Pinned>,
    /// Counts files and names.
    clock: u64,
}

impl Default for NativeSymbols {
    fn default() -> Self {
        Self::with_budget(MAX_BYTES)
    }
}

/// A file that is held open. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Pinned {
    file: Arc<Mutex<NativeFile>>,
    number: u64,
    identity: Option<FileIdentity>,
    build_id: Arc<str>,
}

impl Pinned {
    /// What distinguishes it from other files; `None`: it is the vdso.
    #[must_use]
    pub const fn identity(&self) -> Option<FileIdentity> {
        self.identity
    }

    /// A number that distinguishes it from all files ever held.
    #[must_use]
    pub const fn number(&self) -> u64 {
        self.number
    }

    /// The file itself; `None`: it is the vdso.
    #[must_use]
    pub fn file(&self) -> Option<Arc<TargetFile>> {
        lock(&self.file).file.clone().filter(|_| self.identity.is_some())
    }

    /// The file's build id in hexadecimal digits; empty when it has none.
    #[must_use]
    pub fn build_id(&self) -> &str {
        &self.build_id
    }
}

/// A panic while it was locked leaves it usable, since only caches change in it.
fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct NativeFile {
    object: String,
    build_id: String,
    file: Option<Arc<TargetFile>>,
    debug: Option<Arc<TargetFile>>,
    loads: Vec<Load>,
    tables: Option<Vec<SymbolTable>>,
    lines: Option<Option<Lines>>,
    kept: Kept,
    used: u64,
    /// The process for which its tables were read.
    payer: Option<Pid>,
}

impl NativeSymbols {
    /// Nothing is held yet; keeps about `max_bytes` of tables.
    #[must_use]
    pub fn with_budget(max_bytes: usize) -> Self {
        let spare = usize::try_from(open_files::spare()).unwrap_or(usize::MAX);
        // Each file may have a debug file, and half of what is spare is left for others.
        Self { held: Mutex::default(), max_bytes, max_files: MAX_FILES.min(spare / 4), folder: None }
    }

    /// The same, with names that are kept between recordings.
    #[must_use]
    pub fn keeping_names(self, folder: Option<Arc<Folder>>) -> Self {
        Self { folder, ..self }
    }

    /// Where that is; `None`: nothing is kept.
    #[must_use]
    pub const fn folder(&self) -> Option<&Arc<Folder>> {
        self.folder.as_ref()
    }

    /// Opens the file behind a mapping, and its debug file, and holds them. `None`: there is no file, it cannot be
    /// opened (any more), is not an ELF file, or too many are held.
    pub fn pin(&self, process: &RemoteProcess, mapping: &Mapping) -> Option<Pinned> {
        if mapping.path == MappedPath::Special(b"[vdso]".to_vec()) {
            let mut held = lock(&self.held);
            if held.vdso.is_none() {
                held.vdso = Some(held.pinned(vdso::file()?, None));
            }
            return held.vdso.clone();
        }
        self.pin_file(process, mapping, &process.mapped_file(mapping).ok()?)
    }

    /// The same for a mapping whose file has been found.
    pub fn pin_file(&self, process: &RemoteProcess, mapping: &Mapping, found: &MappedFile) -> Option<Pinned> {
        let path = mapping.file_path()?;
        {
            let mut held = lock(&self.held);
            if let Some(file) = held.files.get(&found.identity()) {
                return Some(file.clone());
            }
            if held.files.len() >= self.max_files {
                // Files of processes that have ended are not held by anyone else.
                held.files.retain(|_, pinned| Arc::strong_count(&pinned.file) > 1);
            }
            if held.files.len() >= self.max_files {
                return None;
            }
        }
        let file = NativeFile::open(process, found, path, mapping.name(), self.folder.as_ref())?;
        let mut held = lock(&self.held);
        let pinned = held.pinned(file, Some(found.identity()));
        held.files.insert(found.identity(), pinned.clone());
        Some(pinned)
    }

    /// The name of what is at an offset of a held file. The cost of reading for it is charged to a process, if one is given.
    pub fn name(&self, pinned: &Pinned, offset: u64, detail: Detail, payer: Option<Pid>) -> NativeName {
        let clock = lock(&self.held).tick();
        let name = {
            let mut file = lock(&pinned.file);
            file.used = clock;
            file.name_for(offset, detail, payer)
        };
        self.shrink(clock);
        name
    }

    /// Writes down the names that had to be looked up since the last time, for other recordings.
    pub fn keep(&self) {
        let Some(folder) = &self.folder else { return };
        let files: Vec<_> = lock(&self.held).files.values().map(|pinned| Arc::clone(&pinned.file)).collect();
        kept::keep(folder, &files);
    }

    /// Bytes of tables that are kept.
    #[must_use]
    pub fn bytes(&self) -> usize {
        lock(&self.held).bytes()
    }

    /// Files that are held open, debug files included.
    #[must_use]
    pub fn files_held(&self) -> usize {
        let files = |pinned: &Pinned| 1 + usize::from(lock(&pinned.file).debug.is_some());
        lock(&self.held).files.values().map(files).sum()
    }

    /// Drops tables until the rest fits the budget or only the newest is left: each time the least recently used table of the
    /// process that has most.
    fn shrink(&self, clock: u64) {
        let held = lock(&self.held);
        let mut bytes = held.bytes();
        while bytes > self.max_bytes {
            let mut of_payers: HashMap<Option<Pid>, usize> = HashMap::new();
            for pinned in held.files.values() {
                let file = lock(&pinned.file);
                *of_payers.entry(file.payer).or_default() += file.bytes();
            }
            let full = held.files.values().filter(|pinned| {
                let file = lock(&pinned.file);
                file.bytes() > 0 && file.used != clock
            });
            let oldest = full.min_by_key(|pinned| {
                let file = lock(&pinned.file);
                (std::cmp::Reverse(of_payers.get(&file.payer).copied()), file.used)
            });
            let Some(mut oldest) = oldest.map(|pinned| lock(&pinned.file)) else { return };
            bytes -= oldest.bytes();
            (oldest.tables, oldest.lines) = (None, None);
            oldest.kept.drop_tables();
        }
    }
}

impl Held {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn pinned(&mut self, file: NativeFile, identity: Option<FileIdentity>) -> Pinned {
        let build_id = Arc::from(&*file.build_id);
        Pinned { file: Arc::new(Mutex::new(file)), number: self.tick(), identity, build_id }
    }

    fn bytes(&self) -> usize {
        self.files.values().map(|pinned| lock(&pinned.file).bytes()).sum()
    }
}

/// How much detail is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// The function: from symbol tables, which are small.
    Function,
    /// Source lines and inlined functions as well: DWARF of some ten megabytes is read.
    Lines,
}

/// What is at an offset of an ELF file that no process has mapped, as in [`NativeSymbols::name`]; its tables are read for
/// this one answer. `None`: it is not an ELF file, or cannot be read.
#[must_use]
pub fn name_in_file(file: TargetFile, offset: u64, detail: Detail) -> Option<NativeName> {
    let loads = Elf::parse(&file).ok()?.loads().to_vec();
    let (object, build_id) = (String::new(), String::new());
    let file = Some(Arc::new(file));
    let (tables, lines, kept) = (None, None, Kept::default());
    let mut file = NativeFile { object, build_id, file, debug: None, loads, tables, lines, kept, used: 0, payer: None };
    Some(file.name(offset, detail))
}

impl NativeFile {
    fn open(
        process: &RemoteProcess,
        found: &MappedFile,
        path: &std::path::Path,
        object: String,
        folder: Option<&Arc<Folder>>,
    ) -> Option<Self> {
        let file = found.open().ok()?;
        let (debug, loads, build_id) = {
            let elf = Elf::parse(&file).ok()?;
            let debug = debug::debug_file(process, path, &elf).map(Arc::new);
            (debug, elf.loads().to_vec(), elf.build_id().unwrap_or_default())
        };
        let kept = Kept::of(folder, &build_id, &file, debug.as_deref());
        let build_id = debug::hex(&build_id);
        let (file, tables, lines) = (Some(Arc::new(file)), None, None);
        Some(Self { object, build_id, file, debug, loads, tables, lines, kept, used: 0, payer: None })
    }

    /// What is kept of an address, or what its tables say, which then is kept, too.
    fn name_for(&mut self, offset: u64, detail: Detail, payer: Option<Pid>) -> NativeName {
        let vaddr = Load::code_vaddr(&self.loads, offset);
        if let Some(kept) = vaddr.and_then(|vaddr| self.kept_name(vaddr, detail, payer)) {
            return kept;
        }
        let name = self.name_charged(offset, detail, payer);
        if vaddr.is_some() && !name.refused {
            self.kept.note(&name, detail);
        }
        name
    }

    fn kept_name(&mut self, vaddr: u64, detail: Detail, payer: Option<Pid>) -> Option<NativeName> {
        if self.kept.is_to_be_read() {
            if payer.is_some_and(|pid| !ledger::may(Work::Symbols, pid, Duration::ZERO)) {
                return None;
            }
            let _charged = payer.map(|pid| ledger::charge(Work::Symbols, pid));
            self.payer = self.payer.or(payer);
            self.kept.read();
        }
        Some(NativeName { object: self.object.clone(), ..self.kept.find(vaddr, detail)? })
    }

    /// [`NativeFile::name`], with the cost charged to a process that may still cost something.
    fn name_charged(&mut self, offset: u64, detail: Detail, payer: Option<Pid>) -> NativeName {
        let Some(pid) = payer else { return self.name(offset, detail) };
        let has_tables = self.tables.is_some();
        let cost = if has_tables { Duration::ZERO } else { self.cost_of_tables() };
        if ledger::may(Work::Symbols, pid, cost) {
            if !has_tables {
                self.payer = payer;
            }
            let _charged = ledger::charge(Work::Symbols, pid);
            return self.name(offset, detail);
        }
        if has_tables {
            return NativeName { refused: detail == Detail::Lines, ..self.name(offset, Detail::Function) };
        }
        let vaddr = Load::code_vaddr(&self.loads, offset).unwrap_or(offset);
        NativeName { object: self.object.clone(), vaddr, refused: true, ..NativeName::default() }
    }

    /// How long reading its symbol tables is likely to take, judged by their size.
    fn cost_of_tables(&self) -> Duration {
        let bytes = |file: &Arc<TargetFile>| Elf::parse(&**file).map_or(0, |elf| table::bytes_of(&elf));
        let files = self.file.iter().chain(&self.debug);
        Duration::from_nanos(files.map(bytes).max().unwrap_or(0).saturating_mul(table::NANOSECONDS_A_BYTE))
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
        } else if let Some((plt, start)) = self.file.as_ref().and_then(|file| nameless::plt_entry(file, vaddr)) {
            // The linker makes those: no DWARF describes them.
            (name.plt, name.function_vaddr) = (Some(plt), Some(start));
            return name;
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
        if name.function.is_none()
            && let Some(file) = &self.file
        {
            name.function_vaddr = nameless::start(file, vaddr);
        }
        name
    }

    /// The symbol tables, the best first.
    fn tables(&mut self) -> &[SymbolTable] {
        let (file, debug, loads) = (&self.file, &self.debug, &self.loads);
        self.tables.get_or_insert_with(|| match file {
            Some(file) => {
                kept::count_table();
                tables_of(file, debug.as_ref(), loads)
            }
            None => Vec::new(),
        })
    }

    fn lines(&mut self) -> Option<&mut Lines> {
        let (file, debug) = (&self.file, &self.debug);
        let read = || {
            kept::count_table();
            dwarf::of_either(debug.as_ref(), file.as_ref()?)
        };
        self.lines.get_or_insert_with(read).as_mut()
    }

    /// Bytes that could be recovered by reading the file again.
    fn bytes(&self) -> usize {
        let tables: usize = self.tables.iter().flatten().map(SymbolTable::bytes).sum();
        tables + self.lines.iter().flatten().map(Lines::bytes).sum::<usize>() + self.kept.bytes()
    }
}

/// All functions if a table has them; otherwise the exported ones and those that the packed table adds.
fn tables_of(file: &Arc<TargetFile>, debug: Option<&Arc<TargetFile>>, loads: &[Load]) -> Vec<SymbolTable> {
    let of = |file: &Arc<TargetFile>, kind| SymbolTable::of_file(file, kind, loads).ok().flatten();
    if let Some(all) = of(file, table::ALL).or_else(|| of(debug?, table::ALL)) {
        return vec![all];
    }
    let mini = Elf::parse(&**file).ok().and_then(|elf| debug::mini_debug_info(&elf));
    let mini = mini.and_then(|bytes| SymbolTable::of_bytes(&bytes, table::ALL, loads).ok().flatten());
    mini.into_iter().chain(of(file, table::DYNAMIC)).collect()
}
