//! Code that a process generated at run time, as it announces it to debuggers and `perf`: read when a sample meets unknown code
//! that is in no file.

mod jitdump;

use self::jitdump::JitDump;
use crate::remote::elf::{Elf, Load, ReadAt as _};
use crate::remote::{FileIdentity, MappedFile, MappedPath, Mapping, RemoteProcess};
use crate::symbolize::native::{Image, MadeFunctions};
use crate::types::RemoteAddr;
use crate::unwind::{Generated, GeneratedRules, Identities};
use nix::time::{ClockId, clock_gettime};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A process's announcements are not read again before this.
const AGAIN: Duration = Duration::from_millis(100);

/// The symbol at which a debugger finds the list of images (GDB's JIT interface).
const DESCRIPTOR: &str = "__jit_debug_descriptor";
/// Most images of one process, most bytes of one and of all, and of one image's rules.
const MAX_IMAGES: usize = 1 << 12;
const MAX_IMAGE: u64 = 4 << 20;
const MAX_BYTES: u64 = 16 << 20;
const MAX_RULES: u64 = 1 << 20;
/// Most bytes that are read of a map for `perf`, from its end, where the newest functions are.
const MAX_MAP: u64 = 8 << 20;
/// Most files for which it is remembered whether they have a list of images.
const MAX_FILES: usize = 1 << 12;
/// Most bytes kept about the generated code of all processes.
const MAX_KEPT: usize = 64 << 20;

/// Where a file has its list of images, before relocation; and its segments.
#[derive(Clone, Debug)]
struct Listed {
    vaddr: u64,
    loads: Arc<[Load]>,
}

/// The code that all processes generated.
#[derive(Debug, Default)]
pub(super) struct Made {
    processes: HashMap<u32, OfProcess>,
    files: HashMap<FileIdentity, Search>,
}

/// What is known of a file's list of images.
#[derive(Clone, Debug)]
enum Search {
    Found(Listed),
    /// None is exported. It may be a local symbol: those of a large library are hundreds of megabytes.
    NotExported,
    Missing,
}

/// The code that one process generated.
#[derive(Debug, Default)]
struct OfProcess {
    /// When it was last read.
    asked: Option<Instant>,
    /// The state of its sources when they were read.
    read: Sources,
    functions: Arc<MadeFunctions>,
    rules: GeneratedRules,
    dump: JitDump,
}

/// Distinguishes one state of a process's sources from others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sources {
    /// Its lists of images: address and content of each head, which changes whenever an image is added or taken away.
    lists: Vec<(u64, [u8; HEAD])>,
    map: Option<FileIdentity>,
    dump: Option<jitdump::Place>,
}

/// Bytes of a list's head: version, the last action, the entry it concerned, and the first entry.
const HEAD: usize = 24;
/// Bytes of an entry: the next one, the one before, address and size of an image.
const ENTRY: usize = 32;

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

impl Made {
    /// Reads a process's announcements again, after its samples met unknown code in no file, unless they were read a moment ago.
    /// `callers`: addresses in files that called such code, where lists of images are looked for thoroughly. True if there is
    /// something new.
    pub fn renew(
        &mut self,
        process: &RemoteProcess,
        maps: &[Mapping],
        (identities, callers): (&Identities, &BTreeSet<u64>),
        now: Instant,
    ) -> bool {
        let pid = process.pid().0;
        let known = self.processes.entry(pid).or_default();
        if known.asked.is_some_and(|asked| now < asked + AGAIN) {
            return false;
        }
        known.asked = Some(now);
        let (map, dump) = (perf_map(process), jitdump::file_of(process, maps));
        let list = |mapping: &Mapping| {
            let identity = identities.get(&mapping.start)?;
            let calls = callers.range(mapping.start..mapping.end).next().is_some();
            list(&mut self.files, (process, mapping), identity, calls)
        };
        let lists: BTreeSet<u64> = maps.iter().filter_map(list).collect();
        let head = |at| Some((at, process.read_array::<HEAD>(RemoteAddr(at)).ok()?));
        let lists = lists.into_iter().filter_map(head).collect();
        let bytes_of =
            |known: &OfProcess| known.functions.bytes() + known.rules.bytes() + known.dump.functions().bytes();
        let kept: usize = self.processes.values().map(bytes_of).sum();
        let Some(known) = self.processes.get_mut(&pid).filter(|_| kept < MAX_KEPT) else { return false };
        known.dump.follow(dump.as_ref());
        let read = Sources { lists, map: map.as_ref().map(MappedFile::identity), dump: known.dump.place() };
        if known.read == read {
            return false;
        }
        let (mut functions, mut rules, mut left) = (MadeFunctions::default(), GeneratedRules::default(), MAX_BYTES);
        if let Some(bytes) = map.and_then(|map| end_of(&map)) {
            functions.add_perf_map(&bytes);
        }
        functions.add_all(known.dump.functions());
        // What debuggers are told is more exact: it comes with unwind rules.
        for (_, head) in &read.lists {
            read_images(process, word(head, 16), &mut left, &mut functions, &mut rules);
        }
        (known.read, known.functions, known.rules) = (read, Arc::new(functions), rules);
        true
    }

    /// The functions of a process.
    pub fn functions(&self, pid: u32) -> Arc<MadeFunctions> {
        self.processes.get(&pid).map(|known| Arc::clone(&known.functions)).unwrap_or_default()
    }

    /// The unwind rules of a process's mappings without a file, by start address.
    pub fn tables(&self, pid: u32, maps: &[Mapping]) -> HashMap<u64, Generated> {
        let Some(known) = self.processes.get(&pid).filter(|known| !known.rules.is_empty()) else {
            return HashMap::new();
        };
        let nowhere = maps.iter().filter(|mapping| mapping.path == MappedPath::Anonymous);
        nowhere.filter_map(|mapping| Some((mapping.start, known.rules.table(mapping.start..mapping.end)?))).collect()
    }

    /// Forgets a process that has ended or has executed another program.
    pub fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }
}

/// Where the file behind a mapping has its list of images in the process's memory; `thorough`: even if no other file may know.
fn list(
    files: &mut HashMap<FileIdentity, Search>,
    (process, mapping): (&RemoteProcess, &Mapping),
    identity: &FileIdentity,
    thorough: bool,
) -> Option<u64> {
    let is_done = |search: &Search| !thorough || !matches!(search, Search::NotExported);
    if !files.get(identity).is_some_and(is_done) {
        if files.len() >= MAX_FILES {
            files.clear();
        }
        let thorough = thorough || mapping.name().to_ascii_lowercase().contains("llvm");
        let found = process.mapped_file(mapping).ok().and_then(|file| list_of(&file, thorough));
        let search = found.map_or(if thorough { Search::Missing } else { Search::NotExported }, Search::Found);
        files.insert(*identity, search);
    }
    let Search::Found(Listed { vaddr, loads }) = files.get(identity)? else { return None };
    // A mapping starts at a page boundary, a segment anywhere in the page.
    let of = |load: &&Load| {
        load.offset & !0xfff <= mapping.offset && mapping.offset < load.offset.saturating_add(load.file_size)
    };
    let load = loads.iter().filter(|load| load.executable).find(of)?;
    let start = load.vaddr.wrapping_sub(load.offset).wrapping_add(mapping.offset);
    Some(vaddr.wrapping_add(mapping.start.wrapping_sub(start)))
}

/// The list of images in a file: exported; or else, if the search is `thorough`, local, as in LLVM's libraries and in those that
/// include LLVM (XLA).
fn list_of(file: &MappedFile, thorough: bool) -> Option<Listed> {
    let file = file.open().ok()?;
    let elf = Elf::parse(&file).ok()?;
    let exported = elf.dynamic_symbol(DESCRIPTOR).ok().flatten();
    let own = || elf.symtab_symbol(DESCRIPTOR).ok().flatten();
    let vaddr = exported.or_else(|| if thorough { own() } else { None })?.vaddr;
    Some(Listed { vaddr, loads: elf.loads().into() })
}

/// Reads a list of images from its first entry on.
fn read_images(
    process: &RemoteProcess,
    first: u64,
    left: &mut u64,
    functions: &mut MadeFunctions,
    rules: &mut GeneratedRules,
) {
    let (mut at, mut images) = (first, Vec::new());
    // This also ends a list that loops.
    while at != 0 && images.len() < MAX_IMAGES {
        let Ok(entry) = process.read_array::<ENTRY>(RemoteAddr(at)) else { break };
        images.push((word(&entry, 16), word(&entry, 24)));
        at = word(&entry, 0);
    }
    let take = |left: &mut u64, len: u64, most: u64| {
        *left = left.checked_sub(len).filter(|_| len <= most)?;
        Some(())
    };
    // The newest comes first and gets its share of the limit first; it may lie where something older lay.
    images.retain(|&(_, size)| take(left, size, MAX_IMAGE).is_some());
    let read = |address: u64, len: u64| {
        let mut bytes = vec![0; usize::try_from(len).ok()?];
        process.read_memory(RemoteAddr(address), &mut bytes).ok()?;
        Some(bytes)
    };
    for (address, size) in images.into_iter().rev() {
        let Some(image) = read(address, size).and_then(|bytes| Image::parse(&bytes)) else { continue };
        for (function, name) in image.functions {
            functions.add(function, &name);
        }
        if let Some(lies) = image.eh_frame
            && take(left, lies.end - lies.start, MAX_RULES).is_some()
            && let Some(bytes) = read(lies.start, lies.end - lies.start)
        {
            rules.add(lies.start, &bytes);
        }
    }
}

/// The map that a process writes for `perf`, in its own `/tmp`, named after the pid that it has in its own namespace. It
/// must belong to the process's user, since anybody may write there. One that was written before the process began belongs
/// to an earlier process with the same pid.
fn perf_map(process: &RemoteProcess) -> Option<MappedFile> {
    let pid = *process.ns_pids().ok()?.last()?;
    let file = process.file_at(&PathBuf::from(format!("/tmp/perf-{pid}.map"))).ok()?;
    let began_ns = began_unix_ns(process)?;
    (file.owner() == process.effective_uid().ok()? && file.identity().mtime_ns >= began_ns).then_some(file)
}

/// When a process began, nanoseconds since 1970, erring towards too early: the kernel gives it to a hundredth of a second, and
/// files carry the time of the last tick.
fn began_unix_ns(process: &RemoteProcess) -> Option<i128> {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_REALTIME).ok()?);
    let began = now.checked_sub(process.age()? + Duration::from_millis(20))?;
    i128::try_from(began.as_nanos()).ok()
}

/// The end of a file, from the start of a line.
fn end_of(file: &MappedFile) -> Option<Vec<u8>> {
    let size = file.identity().size;
    let from = size.saturating_sub(MAX_MAP);
    let mut bytes = vec![0; usize::try_from(size - from).ok()?];
    file.open().ok()?.read_exact_at(from, &mut bytes).ok()?;
    if from > 0 {
        let line = memchr::memchr(b'\n', &bytes)?;
        bytes.drain(..=line);
    }
    Some(bytes)
}
