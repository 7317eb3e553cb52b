//! Source lines and inlined functions from DWARF, through `addr2line`.

use std::io::Read as _;
use std::ops::Range;
use std::sync::Arc;

use addr2line::Context;
use addr2line::gimli::{Dwarf, EndianArcSlice, LittleEndian, SectionId};
use object::elf;
use object::endian::LittleEndian as LE;
use object::pod::from_bytes;

use super::demangle::demangle;
use super::effort::Effort;
use super::units::{Bytes, Found, Section, Together, Units, add_rows};
use crate::remote::TargetFile;
use crate::remote::elf::{Elf, ReadAt};

/// Most bytes of one file's DWARF, unpacked. That of CPython's own library has 25 MB; for larger files the symbol table
/// must do.
const MAX_DWARF: u64 = 48 << 20;

/// Most bytes of abbreviations: parsed, they take twenty times as much. CPython's own library has 0.2 MB.
const MAX_ABBREVIATIONS: u64 = 8 << 20;

/// Most bytes of the index of which unit describes which addresses. CPython's own library has 9 kB.
const MAX_ARANGES: u64 = 4 << 20;

/// Zstd may keep a window of at most 2 to this power bytes.
const MAX_WINDOW_LOG: u32 = 26;

/// Most inlined functions at one address.
pub(super) const MAX_INLINES: usize = 64;

/// One function at an address, the innermost first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceFrame {
    /// Its name; `None` when DWARF does not say.
    pub function: Option<String>,
    /// Path of its source file, as it was compiled.
    pub file: Option<String>,
    /// Line in that file.
    pub line: Option<u32>,
}

/// One file's DWARF.
pub(super) struct Lines {
    kind: Kind,
    bytes: usize,
}

enum Kind {
    /// Unit by unit, as they are asked for, and the file where they are.
    Units(Box<Units>, Arc<TargetFile>),
    /// All at once, and where their functions begin and end if that is known, in no order.
    Whole(Box<Context<Bytes>>, Option<Box<[u64]>>),
    /// Units that only make sense together, and are too large for that.
    Nothing,
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Lines {
    /// Reads a file's DWARF; `None` if it has none, has too much, or makes no sense.
    pub(super) fn of_file(file: &Arc<TargetFile>) -> Option<Self> {
        let elf = Elf::parse(&**file).ok()?;
        elf.section(".debug_info").filter(|section| section.kind != elf::SHT_NOBITS)?;
        let mut left = MAX_DWARF;
        let mut others = Vec::new();
        for id in USED {
            let most = if id == SectionId::DebugAbbrev { MAX_ABBREVIATIONS } else { MAX_DWARF };
            let bytes = section(&elf, id.name(), left.min(most)).ok()?;
            left -= bytes.len() as u64;
            others.push((id, EndianArcSlice::new(bytes, LittleEndian)));
        }
        let mut bytes = MAX_DWARF - left;
        let mut large = |name| -> Option<Section> {
            let plain = |flags: u64| flags & u64::from(elf::SHF_COMPRESSED) == 0;
            let found = if let Some(at) = elf.section(name).filter(|at| plain(at.flags) && at.kind != elf::SHT_NOBITS) {
                Section::File(Arc::clone(file), at.offset, at.size)
            } else {
                let unpacked = section(&elf, name, left).ok()?;
                bytes += unpacked.len() as u64;
                Section::Unpacked(unpacked)
            };
            left = left.checked_sub(found.len())?;
            Some(found)
        };
        let (info, lines) = (large(".debug_info")?, large(".debug_line")?);
        let aranges = section(&elf, ".debug_aranges", left.min(MAX_ARANGES)).unwrap_or_default();
        let kind = match Units::of(info, lines, others, EndianArcSlice::new(aranges, LittleEndian)) {
            Found::Units(units) => Kind::Units(units, Arc::clone(file)),
            Found::Together => return Self::whole(&elf),
            Found::Nothing => return None,
        };
        Some(Self { kind, bytes: usize::try_from(bytes).ok()? })
    }

    /// All units at once.
    pub(super) fn whole(elf: &Elf<&TargetFile>) -> Option<Self> {
        let mut left = MAX_DWARF;
        let mut load = |id: SectionId| -> Result<Bytes, TooMuch> {
            let is_used = matches!(id, SectionId::DebugInfo | SectionId::DebugLine | SectionId::DebugAranges)
                || USED.contains(&id);
            let bytes = if is_used { section(elf, id.name(), left)? } else { Arc::default() };
            left -= bytes.len() as u64;
            Ok(EndianArcSlice::new(bytes, LittleEndian))
        };
        let mut effort = Effort::default();
        let dwarf = Dwarf::load(&mut load).ok().filter(|dwarf| effort.is_bearable(dwarf))?;
        let bounds = effort.take_bounds();
        let context = Context::from_dwarf(dwarf).ok()?;
        let bytes = usize::try_from(MAX_DWARF - left).ok()? + bounds.as_deref().map_or(0, size_of_val);
        Some(Self { kind: Kind::Whole(Box::new(context), bounds), bytes })
    }

    /// The functions at an address, inlined ones first. Empty if DWARF does not cover it.
    pub(super) fn frames(&mut self, vaddr: u64) -> Vec<SourceFrame> {
        self.frames_as(vaddr, |function, file, line| SourceFrame {
            function: function.map(|raw| demangle(raw.as_bytes())),
            file: file.map(str::to_owned),
            line,
        })
    }

    /// The same, each frame in the form that `make` gives it from the linker's name of the function, the file and the line.
    pub(super) fn frames_as<T>(
        &mut self,
        vaddr: u64,
        make: impl Fn(Option<&str>, Option<&str>, Option<u32>) -> T,
    ) -> Vec<T> {
        let together = match &mut self.kind {
            Kind::Units(units, file) => match units.find(vaddr, |context| frames(context, vaddr, &make)) {
                Ok(found) => return found,
                Err(Together) => Elf::parse(&**file).ok().and_then(|elf| Self::whole(&elf)),
            },
            Kind::Whole(context, _) => return frames(context, vaddr, &make),
            Kind::Nothing => return Vec::new(),
        };
        *self = together.unwrap_or(Self { kind: Kind::Nothing, bytes: 0 });
        self.frames_as(vaddr, make)
    }

    /// Addresses within a range at which the answer may change, and others. `None`: they are not known.
    pub(super) fn bounds(&self, within: &Range<u64>) -> Option<Vec<u64>> {
        let mut bounds = Vec::new();
        match &self.kind {
            Kind::Units(units, _) => units.add_bounds(within, &mut bounds)?,
            Kind::Whole(context, of_functions) => {
                bounds.extend(of_functions.as_deref()?);
                add_rows(context, within, &mut bounds);
            }
            Kind::Nothing => {}
        }
        Some(bounds)
    }

    /// The addresses around one that are described by a unit which has been parsed.
    pub(super) fn parsed_around(&self, vaddr: u64) -> Option<Range<u64>> {
        match &self.kind {
            Kind::Units(units, _) => units.opened_around(vaddr),
            Kind::Whole(..) | Kind::Nothing => None,
        }
    }

    #[cfg(test)]
    pub(super) fn is_whole(&self) -> bool {
        matches!(self.kind, Kind::Whole(..))
    }

    /// Bytes it takes, roughly; includes parsed units if each is parsed on its own.
    pub(super) fn bytes(&self) -> usize {
        match &self.kind {
            Kind::Units(units, _) => self.bytes + units.opened_bytes(),
            Kind::Whole(..) | Kind::Nothing => self.bytes,
        }
    }
}

fn frames<T>(
    context: &Context<Bytes>,
    vaddr: u64,
    make: impl Fn(Option<&str>, Option<&str>, Option<u32>) -> T,
) -> Vec<T> {
    let mut found = Vec::new();
    let Ok(mut frames) = context.find_frames(vaddr).skip_all_loads() else { return found };
    while found.len() < MAX_INLINES {
        let Ok(Some(frame)) = frames.next() else { break };
        let name = frame.function.as_ref().and_then(|function| function.raw_name().ok());
        let location = frame.location.as_ref();
        let file = location.and_then(|location| location.file);
        found.push(make(name.as_deref(), file, location.and_then(|location| location.line)));
    }
    found
}

/// Sections that lines and inlined functions need, beside `.debug_info` and `.debug_line`, which are read in parts.
const USED: [SectionId; 7] = [
    SectionId::DebugAbbrev,
    SectionId::DebugAddr,
    SectionId::DebugLineStr,
    SectionId::DebugRanges,
    SectionId::DebugRngLists,
    SectionId::DebugStr,
    SectionId::DebugStrOffsets,
];

/// A section is larger than what is left, or packed in an unknown way.
#[derive(Debug)]
struct TooMuch;

/// A section's bytes, unpacked. Empty if the section does not exist.
fn section<R: ReadAt>(elf: &Elf<R>, name: &str, most: u64) -> Result<Arc<[u8]>, TooMuch> {
    let Some(section) = elf.section(name) else { return Ok(Arc::default()) };
    let bytes = elf.shared_section_bytes(section, most).map_err(|_| TooMuch)?;
    if section.flags & u64::from(elf::SHF_COMPRESSED) == 0 {
        return Ok(bytes);
    }
    let (header, packed) = from_bytes::<elf::CompressionHeader64<LE>>(&bytes).map_err(|()| TooMuch)?;
    let len = header.ch_size.get(LE);
    if len > most {
        return Err(TooMuch);
    }
    // Unpacked in its place: a copy of it would double the profiler's memory for a moment.
    let mut unpacked: Arc<[u8]> = std::iter::repeat_n(0, usize::try_from(len).map_err(|_| TooMuch)?).collect();
    let place = Arc::get_mut(&mut unpacked).ok_or(TooMuch)?;
    let read = match header.ch_type.get(LE) {
        elf::ELFCOMPRESS_ZLIB => flate2::read::ZlibDecoder::new(packed).read_exact(place),
        elf::ELFCOMPRESS_ZSTD => {
            let mut decoder = zstd::Decoder::new(packed).map_err(|_| TooMuch)?;
            decoder.window_log_max(MAX_WINDOW_LOG).map_err(|_| TooMuch)?;
            decoder.read_exact(place)
        }
        _ => return Err(TooMuch),
    };
    read.map_err(|_| TooMuch)?;
    Ok(unpacked)
}

/// A file's lines, from its debug file when it has one.
pub(super) fn of_either(debug: Option<&Arc<TargetFile>>, file: &Arc<TargetFile>) -> Option<Lines> {
    debug.and_then(Lines::of_file).or_else(|| Lines::of_file(file))
}
