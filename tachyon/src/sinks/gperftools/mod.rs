//! Writes a profile as gperftools' CPU profile, with a companion ELF file that names its addresses.
//!
//! The format is 64-bit little-endian words (gperftools, `docs/cpuprofile-fileformat.html`): a header, one record for
//! each distinct stack, a trailer, then the mapped objects as text. `docs/formats/gperftools.md` says how readers treat
//! it and how this sink deals with that.

mod space;
mod symbols;

use super::Sink;
use super::label::{Kind, Label, RootOptions, Roots, base_name};
use super::stacks::Counts;
use super::text::escape_controls;
use crate::profile::{FrameId, Profile, Sample, ThreadId};
use crate::report::Report;
use crate::sinks::need::Amounts;
use foldhash::fast::RandomState;
use space::{Space, native_place};
use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use symbols::{CodeMap, PAGE, Place, SLOT, elf_file};

/// Stands for a stack without frames, because a record has a leaf.
const NO_FRAMES: &str = "[no frames]";
/// Offsets into a caller's slot, from which readers subtract 1; the second is as good as the first.
const CALLER: [u64; 2] = [2, 4];

/// Sums equal stacks up and writes both files at the end. Memory grows with the number of distinct stacks.
pub struct GperftoolsSink<W> {
    out: W,
    symbols: Box<dyn Write + Send>,
    symbols_path: PathBuf,
    counts: Counts,
    roots: RootOptions,
}

/// Where the companion of a profile goes: `app.prof.so` beside `app.prof`. Perl's `pprof` recognises libraries only by
/// their ending.
#[must_use]
pub fn companion_path(profile: &Path) -> PathBuf {
    let mut path = profile.as_os_str().to_owned();
    path.push(".so");
    path.into()
}

impl<W: Write> GperftoolsSink<W> {
    /// Nothing is written before the end. `symbols` takes the companion, which will be at `symbols_path`; `roots`: what
    /// goes below the stacks.
    pub fn new(out: W, symbols: Box<dyn Write + Send>, symbols_path: PathBuf, roots: RootOptions) -> Self {
        Self { out, symbols, symbols_path, counts: Counts::default(), roots }
    }
}

impl<W: Write> Sink for GperftoolsSink<W> {
    fn sample(&mut self, _profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.counts.add(sample, false, 1);
        Ok(())
    }

    fn repeated(&mut self, _profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        self.counts.add(sample, false, times_us.len());
        Ok(())
    }

    fn finish_bytes(&self, profile: &Profile) -> u64 {
        Amounts::of(profile, &self.counts.stacks).sum([100, 24, 1000, 6, 100])
    }

    fn finish(&mut self, profile: &Profile, _report: &Report) -> io::Result<()> {
        let code = Code::new(profile, &self.counts, self.roots);
        self.symbols.write_all(&elf_file(&code.map)?)?;
        self.symbols.flush()?;
        let mut out = io::BufWriter::new(&mut self.out);
        let period_us = profile.meta.interval_us;
        write_words(&mut out, &[0, 3, 0, period_us, 0])?;
        for (addresses, count) in records(&code, &self.counts) {
            write_words(&mut out, &[count, addresses.len() as u64])?;
            write_words(&mut out, &addresses)?;
        }
        write_words(&mut out, &[0, 1, 0])?;
        let companion = self.symbols_path.as_os_str().as_bytes();
        // Go's pprof takes the first mapping that holds an address, and supports only one mapping per file: so the first
        // one is the companion, from the first address to the last. It reads only the first word of a path with white
        // space, and finds nothing there. Then the companion has to be the profile's program, which users can name.
        let found = !companion.iter().any(u8::is_ascii_whitespace);
        if let Some(program) = code.map.native.objects.iter().find(|object| found && is_program(&object.path)) {
            // It moves the first object that is not a library to the front, so an empty one is added for that.
            write_mapping(&mut out, (0, PAGE, 0), escape_controls(&program.path).as_bytes())?;
        }
        let (start, end) = code.map.span();
        write_mapping(&mut out, (start, end, start), companion)?;
        for object in &code.map.native.objects {
            // Perl's takes the one with the highest start, and of several the first: so the companion comes again,
            // before the object. It names everything that was sampled, here and elsewhere, whether or not the object
            // has names and is where the path says.
            write_mapping(&mut out, (object.start, object.end, object.start), companion)?;
            let path = escape_controls(&object.path);
            write_mapping(&mut out, (object.start, object.end, object.offset), path.as_bytes())?;
        }
        out.flush()
    }
}

fn write_words(out: &mut impl Write, words: &[u64]) -> io::Result<()> {
    words.iter().try_for_each(|word| out.write_all(&word.to_le_bytes()))
}

/// Whether Go's pprof takes it for the main program (`libRx` in its `legacy_profile.go`).
fn is_program(path: &str) -> bool {
    let numbered = |path: &str| path.starts_with(['.', '_']) && path[1..].starts_with(|c: char| c.is_ascii_digit());
    !path.is_empty() && !path.starts_with('[') && !path.ends_with(".so") && !path.split(".so").skip(1).any(numbered)
}

/// A line as in `/proc/PID/maps`.
fn write_mapping(out: &mut impl Write, (start, end, offset): (u64, u64, u64), path: &[u8]) -> io::Result<()> {
    write!(out, "{start:012x}-{end:012x} r-xp {offset:08x} 00:00 0                          ")?;
    out.write_all(path)?;
    out.write_all(b"\n")
}

/// The addresses of something: one as a leaf, and two equivalent ones as a caller.
#[derive(Clone, Copy, Debug)]
struct Addresses {
    leaf: u64,
    callers: [u64; 2],
}

impl Addresses {
    fn synthetic(leaf: u64) -> Self {
        Self { leaf, callers: CALLER.map(|into| leaf + into) }
    }
}

/// The addresses of everything in the profile.
struct Code {
    map: CodeMap,
    /// By frame.
    frames: Vec<Option<Addresses>>,
    /// By thread: outermost frames, innermost of them first.
    roots: HashMap<u32, Vec<Addresses>>,
    no_frames: Addresses,
}

impl Code {
    fn new(profile: &Profile, counts: &Counts, roots: RootOptions) -> Self {
        let mut used = vec![false; profile.frames.len()];
        for frame in counts.stacks.iter().flatten() {
            used[frame.0 as usize] = true;
        }
        let used: Vec<FrameId> = (0..).map(FrameId).zip(used).filter_map(|(id, used)| used.then_some(id)).collect();
        let native = Space::new(profile, used.iter().copied(), |id| native_place(profile, id));
        let mut frames: Vec<Option<Place>> = vec![None; profile.frames.len()];
        for &id in used.iter().filter(|&&id| native.address(id).is_none()) {
            frames[id.0 as usize] = Some(native_place(profile, id));
        }
        let named = |name: &str| place(&Label { kind: Kind::Special, function: name, filename: "", line: None });
        let threads = counts.sorted().into_iter().map(|(key, _)| key.thread);
        let names = Roots::new(profile, roots);
        let roots: HashMap<u32, Vec<Place>> = threads
            .map(|thread| {
                let names = names.of(ThreadId(thread));
                (thread, names.iter().rev().map(|name| named(name)).collect())
            })
            .collect();
        let no_frames = named(NO_FRAMES);
        let places = frames.iter().flatten().chain(roots.values().flatten()).chain([&no_frames]).cloned();
        let map = CodeMap::new(places.collect(), native);
        let address = |place: &Place| Addresses::synthetic(map.address(place).expect("every place is in the map"));
        let real = |id| {
            let leaf = map.native.address(id)?;
            Some(Addresses { leaf, callers: map.native.callers(leaf) })
        };
        Self {
            frames: frames
                .iter()
                .zip(0..)
                .map(|(at, id)| at.as_ref().map(address).or_else(|| real(FrameId(id))))
                .collect(),
            roots: roots.iter().map(|(&thread, places)| (thread, places.iter().map(address).collect())).collect(),
            no_frames: address(&no_frames),
            map,
        }
    }
}

/// The place of a frame, with names that readers leave intact.
fn place(label: &Label<'_>) -> Place {
    let line = label.line.unwrap_or(0);
    let (function, symbol) = match label.kind {
        // As for a linker: demangled names lose their arguments and template arguments, as everywhere in pprof.
        Kind::Native | Kind::Kernel if !label.filename.is_empty() && !is_bracketed(label.function) => {
            (label.function.to_owned(), label.function.to_owned())
        }
        Kind::Python => {
            // Go's pprof takes `<module>` for C++ and drops it, but keeps anything with `.<`, for Java's sake.
            let name = if label.function.starts_with('<') {
                let base = base_name(label.filename);
                format!("{}.{}", base.strip_suffix(".py").unwrap_or(base), label.function)
            } else {
                label.function.to_owned()
            };
            let symbol = without_brackets(&name);
            (name, symbol)
        }
        _ => {
            let name = label.function.replace('<', "[").replace('>', "]");
            let symbol = without_brackets(&name);
            (name, symbol)
        }
    };
    // Empty names and files need a replacement.
    let clean = |text: &str, none: &str| {
        if text.is_empty() { none.to_owned() } else { escape_controls(text).into_owned() }
    };
    Place { file: clean(label.filename, "~"), function: clean(&function, "?"), symbol: clean(&symbol, "?"), line }
}

/// Whether the whole name is one pair of brackets, such as `<unknown>`: readers drop template arguments, and Perl's pprof
/// charges what has no name left to its caller.
fn is_bracketed(name: &str) -> bool {
    name.strip_prefix('<').and_then(|name| name.strip_suffix('>')).is_some_and(|name| !name.contains(['<', '>']))
}

/// Perl's pprof drops everything in `()` and `<>`.
fn without_brackets(name: &str) -> String {
    name.replace(['<', '('], "{").replace(['>', ')'], "}")
}

/// Stacks of addresses, leaf first, each with its count.
///
/// Readers drop the second address if it is the same in (nearly) all records, because gperftools' own signal handler used
/// to be there. So a caller of leaves has two addresses, used in turn; and a profile with one stack has two records.
fn records(code: &Code, counts: &Counts) -> Vec<(Vec<u64>, u64)> {
    let mut places: HashMap<Vec<u64>, usize, RandomState> = HashMap::default();
    let mut records: Vec<(Vec<u64>, u64)> = Vec::new();
    // For second addresses: the equivalent one.
    let mut others: HashMap<u64, u64, RandomState> = HashMap::default();
    for (key, count) in counts.sorted() {
        let frames = counts.stacks.get(key.stack).iter().filter_map(|frame| code.frames[frame.0 as usize]);
        let none = counts.stacks.get(key.stack).is_empty().then_some(code.no_frames);
        let roots = code.roots.get(&key.thread).into_iter().flatten().copied();
        let mut addresses = Vec::new();
        for (place, Addresses { leaf, callers: [one, other] }) in frames.chain(none).chain(roots).enumerate() {
            addresses.push(if place == 0 { leaf } else { one });
            if place == 1 {
                others.insert(one, other);
            }
        }
        match places.get(&addresses) {
            Some(&place) => records[place].1 += count,
            None => {
                places.insert(addresses.clone(), records.len());
                records.push((addresses, count));
            }
        }
    }
    if let [(addresses, count)] = &mut records[..]
        && addresses.len() > 1
        && *count > 1
    {
        let half = *count / 2;
        *count -= half;
        let twin = (addresses.clone(), half);
        records.push(twin);
    }
    let mut turns: HashMap<u64, usize, RandomState> = HashMap::default();
    for (addresses, _) in &mut records {
        if let [leaf, caller, ..] = &mut addresses[..] {
            let [one, other] = [*caller, others[caller]];
            let turn = turns.entry(one).or_default();
            let [this, that] = if turn.is_multiple_of(2) { [one, other] } else { [other, one] };
            // The leaf's own address would be taken for the leaf again; this happens if a function has just returned to
            // itself.
            *caller = if this == *leaf { that } else { this };
            *turn += 1;
        }
    }
    records
}

/// Callers' addresses stay in their slot, and no reader takes a caller for the leaf's own copy (leaf = caller − 1 + 1).
const _: () = assert!(CALLER[0] > 1 && CALLER[1] > CALLER[0] + 1 && CALLER[1] < SLOT);

#[cfg(test)]
mod tests;
