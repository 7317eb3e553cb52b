//! Where the bytecode evaluator's machine code is: a set of address ranges, because one function may be compiled to many.
//!
//! A native stack is joined with Python's by its evaluator frames, so one missing range makes a wrong stack. With a
//! symbol table the parts have names: `_PyEval_EvalFrameDefault`, its `.cold` and other clones, and the
//! `_TAIL_CALL_*` handlers of tail-calling builds. Without one (Debian's static 3.14 and 3.15: the exported symbol
//! covers 1 kB, the bytecode loop is a part without a symbol) the parts are found by what only parts of one function
//! do: they jump into each other's middle, or to a place whose stack frame already exists. Unwind tables
//! (`.eh_frame`) show where parts begin and end. A part that is entered only through a table of addresses, and jumps
//! nowhere, is not found this way (a stripped 3.11 of pyenv's has one of 4 bytes, which aborts). Code of x86-64 and arm64
//! is decoded.

use std::collections::BTreeMap;
use std::ops::Range;

use gimli::{
    AArch64, BaseAddresses, CfaRule, CieOrFde, EhFrame, LittleEndian, UnwindContext, UnwindSection as _, Vendor, X86_64,
};
use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, OpKind};
use object::elf;

use super::entering::arm64;
use crate::remote::elf::{Elf, ElfError, ReadAt};

const NAME: &str = "_PyEval_EvalFrameDefault";

/// Prefix of the handlers of CPython 3.14's tail-calling interpreter (`Python/generated_cases.c.h`).
const HANDLER: &str = "_TAIL_CALL_";

/// Most bytes of `.eh_frame` and of symbol names: CPython's have 1 MB at most.
const MAX_TABLE: u64 = 16 << 20;

/// Longest part that is decoded; CPython's evaluators have 34 to 80 kB.
const MAX_PART: u64 = 1 << 20;

/// Most parts, and how many of the largest functions are checked for being one.
const MAX_PARTS: usize = 32;
const LARGEST: usize = 8;

/// Where the evaluator's code is in a file. Addresses are the file's, before relocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evaluator {
    /// First address of `_PyEval_EvalFrameDefault`.
    entry: u64,
    parts: Vec<Range<u64>>,
    handlers: Vec<Range<u64>>,
}

/// Why the evaluator was not found.
#[derive(Debug, thiserror::Error)]
pub enum EvaluatorError {
    /// The file cannot be read, or makes no sense.
    #[error(transparent)]
    Elf(#[from] ElfError),
    /// The file has no name for it.
    #[error("the file has no symbol {NAME}")]
    NoSymbol,
}

/// What the code at an address of the file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvaluatorCode {
    /// The evaluator: its frame on the native stack is one activation.
    Evaluator,
    /// A handler of a tail-calling build: its frame belongs to the evaluator's frame below it.
    Handler,
}

impl Evaluator {
    /// Finds the evaluator of a file.
    ///
    /// # Errors
    /// When the file has no name for the evaluator or makes no sense.
    pub fn of_file<R: ReadAt>(source: R) -> Result<Self, EvaluatorError> {
        let elf = Elf::parse(source)?;
        let mut found = by_symbols(&elf)?;
        if found.parts.is_empty() {
            let exported = elf.dynamic_symbol(NAME)?.filter(|symbol| symbol.vaddr != 0);
            let exported = exported.ok_or(EvaluatorError::NoSymbol)?;
            let own = exported.vaddr..exported.vaddr.saturating_add(exported.size.max(1));
            found.entry = exported.vaddr;
            found.parts = by_jumps(&elf, own);
        }
        found.parts = joined(found.parts);
        found.handlers = joined(found.handlers);
        Ok(found)
    }

    /// Its ranges, sorted and without overlap.
    #[must_use]
    pub fn parts(&self) -> &[Range<u64>] {
        &self.parts
    }

    /// Ranges of the handlers of a tail-calling build.
    #[must_use]
    pub fn handlers(&self) -> &[Range<u64>] {
        &self.handlers
    }

    /// What the code at an address of the file is.
    #[must_use]
    pub fn code_at(&self, vaddr: u64) -> Option<EvaluatorCode> {
        let within = |ranges: &[Range<u64>]| {
            let at = ranges.partition_point(|range| range.end <= vaddr);
            ranges.get(at).is_some_and(|range| range.contains(&vaddr))
        };
        if within(&self.parts) {
            Some(EvaluatorCode::Evaluator)
        } else {
            within(&self.handlers).then_some(EvaluatorCode::Handler)
        }
    }

    /// Whether a thread at this address may not have linked its Python frame yet: the first instructions, which save
    /// registers and set up the frame (at most 0xf0 bytes in the builds seen).
    #[must_use]
    pub fn is_prologue(&self, vaddr: u64) -> bool {
        (self.entry..self.entry.saturating_add(256)).contains(&vaddr)
    }
}

/// Parts that `.symtab` names; none if there is no such table.
fn by_symbols<R: ReadAt>(elf: &Elf<R>) -> Result<Evaluator, ElfError> {
    let mut found = Evaluator::default();
    let Some(table) = elf.functions(elf::SHT_SYMTAB, elf.loads())? else { return Ok(found) };
    let names = elf.section_bytes(&table.names, MAX_TABLE)?;
    for function in table.functions.iter().filter(|function| function.size > 0) {
        let name = usize::try_from(function.name).ok().and_then(|at| names.get(at..)).unwrap_or_default();
        let range = function.vaddr..function.vaddr.saturating_add(function.size);
        match name.strip_prefix(NAME.as_bytes()).and_then(<[u8]>::first) {
            Some(0) => {
                found.entry = function.vaddr;
                found.parts.push(range);
            }
            Some(b'.') => found.parts.push(range),
            _ if name.starts_with(HANDLER.as_bytes()) => found.handlers.push(range),
            _ => {}
        }
    }
    if found.entry == 0 {
        // Clones alone belong to some other program.
        return Ok(Evaluator::default());
    }
    Ok(found)
}

/// A function or a part of one, as unwind tables know it.
#[derive(Clone, Debug)]
struct Part {
    end: u64,
    /// Its first instruction finds a stack frame in place: it is not the beginning of a function.
    continues: bool,
}

/// Parts that belong with the one at `own`, found by how they jump to each other.
fn by_jumps<R: ReadAt>(elf: &Elf<R>, own: Range<u64>) -> Vec<Range<u64>> {
    let parts = parts(elf).unwrap_or_default();
    let part_at = |vaddr: u64| {
        let (&start, part) = parts.range(..=vaddr).next_back()?;
        Some((start..part.end, part.continues)).filter(|(range, _)| range.contains(&vaddr))
    };
    let mut found = vec![own.clone()];
    if let Some((range, _)) = part_at(own.start)
        && range != own
    {
        found.push(range);
    }
    let mut largest: Vec<Range<u64>> = parts.iter().map(|(&start, part)| start..part.end).collect();
    largest.sort_by_key(|range| std::cmp::Reverse(range.end - range.start));
    largest.truncate(LARGEST);
    let into_middle =
        |target: u64, of: &[Range<u64>]| of.iter().any(|range| range.start < target && target < range.end);
    let mut decoded = 0;
    while decoded < found.len() && found.len() < MAX_PARTS {
        for target in jumps(elf, &found[decoded]) {
            if found.iter().any(|range| range.contains(&target)) {
                continue;
            }
            if let Some((range, continues)) = part_at(target)
                && (target != range.start || continues)
            {
                found.push(range);
            }
        }
        decoded += 1;
        // The loop's own jumps reveal it when it is entered through a table only.
        let back = |range: &&Range<u64>| !found.contains(range) && jumps(elf, range).any(|to| into_middle(to, &found));
        if decoded == found.len()
            && let Some(range) = largest.iter().find(back)
        {
            found.push(range.clone());
        }
    }
    found
}

/// Targets of the direct jumps (not calls) in a range.
fn jumps<R: ReadAt>(elf: &Elf<R>, range: &Range<u64>) -> impl Iterator<Item = u64> + use<R> {
    let len = usize::try_from((range.end - range.start).min(MAX_PART)).unwrap_or(0);
    let mut bytes = vec![0; len];
    if elf.read_vaddr(range.start, &mut bytes).is_err() {
        bytes.clear();
    }
    let mut targets = match elf.machine() {
        elf::EM_X86_64 => jumps_of_x86_64(&bytes, range.start),
        elf::EM_AARCH64 => jumps_of_arm64(&bytes, range.start),
        _ => Vec::new(),
    };
    targets.retain(|target| !range.contains(target));
    targets.sort_unstable();
    targets.dedup();
    targets.into_iter()
}

fn jumps_of_x86_64(bytes: &[u8], start: u64) -> Vec<u64> {
    let mut targets = Vec::new();
    let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let jumps =
            matches!(instruction.flow_control(), FlowControl::ConditionalBranch | FlowControl::UnconditionalBranch);
        if jumps && instruction.op0_kind() == OpKind::NearBranch64 {
            targets.push(instruction.near_branch_target());
        }
    }
    targets
}

fn jumps_of_arm64(bytes: &[u8], start: u64) -> Vec<u64> {
    let target = |(at, bytes): (u64, &[u8; 4])| {
        let (offset, _) = arm64::branch(u32::from_le_bytes(*bytes))?;
        Some(start.wrapping_add(at * 4).wrapping_add_signed(offset))
    };
    (0..).zip(bytes.as_chunks().0).filter_map(target).collect()
}

/// All parts of functions that `.eh_frame` describes.
fn parts<R: ReadAt>(elf: &Elf<R>) -> Option<BTreeMap<u64, Part>> {
    let section = elf.section(".eh_frame")?;
    let bytes = elf.section_bytes(section, MAX_TABLE).ok()?;
    let mut frames = EhFrame::new(&bytes, LittleEndian);
    // A call leaves only the return address on the stack; on arm64 nothing at all.
    let (register, offset) = match elf.machine() {
        elf::EM_AARCH64 => (AArch64::SP, 0),
        _ => (X86_64::RSP, 8),
    };
    let entered = CfaRule::RegisterAndOffset { register, offset };
    if register == AArch64::SP {
        frames.set_vendor(Vendor::AArch64);
    }
    let bases = BaseAddresses::default().set_eh_frame(section.vaddr);
    let mut context = UnwindContext::new();
    let mut parts = BTreeMap::new();
    let mut entries = frames.entries(&bases);
    while let Ok(Some(entry)) = entries.next() {
        let CieOrFde::Fde(fde) = entry else { continue };
        let Ok(fde) = fde.parse(EhFrame::cie_from_offset) else { continue };
        let (start, end) = (fde.initial_address(), fde.initial_address().saturating_add(fde.len()));
        let mut rows = fde.rows(&frames, &bases, &mut context).ok()?;
        let continues = rows.next_row().ok().flatten().is_some_and(|row| *row.cfa() != entered);
        parts.insert(start, Part { end, continues });
    }
    Some(parts)
}

/// Sorts ranges and joins those that touch.
fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::entering::CframeOffsets;

    #[test]
    fn ranges_are_joined_and_searched() {
        let parts = joined(vec![10..20, 30..40, 15..25, 40..50]);
        assert_eq!(parts, [10..25, 30..50]);
        let evaluator = Evaluator { entry: 30, parts, handlers: joined(vec![65..70, 60..65]) };
        let code = |vaddr| evaluator.code_at(vaddr);
        assert_eq!([9, 10, 24, 25, 49, 50].map(|at| code(at).is_some()), [false, true, true, false, true, false]);
        assert_eq!((code(30), code(60)), (Some(EvaluatorCode::Evaluator), Some(EvaluatorCode::Handler)));
        assert_eq!([29, 30, 285, 286].map(|at| evaluator.is_prologue(at)), [false, true, true, false]);
    }

    #[test]
    fn jumps_of_arm64_are_decoded() {
        // b .+8; b .-4; b.eq .+16; bc.ne .-16; cbz w0, .+4; cbnz x3, .-8; tbz w1, #3, .+12; tbnz x2, #40, .-12; then bl .+8,
        // br x16, ret, adr x0, . and a nop, which are not jumps to a place given in the instruction.
        let words: [u32; 13] = [
            0x1400_0002,
            0x17ff_ffff,
            0x5400_0080,
            0x54ff_ff91,
            0x3400_0020,
            0xb5ff_ffc3,
            0x3618_0061,
            0xb747_ffa2,
            0x9400_0002,
            0xd61f_0200,
            0xd65f_03c0,
            0x1000_0000,
            0xd503_201f,
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let expected = [0x1008, 0x1000, 0x1018, 0xffc, 0x1014, 0x100c, 0x1024, 0x1010];
        assert_eq!(jumps_of_arm64(&bytes, 0x1000), expected);
    }

    /// Debian's static 3.11 for arm64, where `cargo xtask test` unpacked it: stripped, its evaluator in one part.
    #[test]
    fn the_evaluator_of_a_stripped_arm64_python_is_found() {
        let cache = std::env::var_os("TACHYON_CACHE").or_else(|| {
            let home = std::path::PathBuf::from(std::env::var_os("HOME")?);
            Some(home.join(".cache/tachyon-bpf").into())
        });
        let python = cache.map(|cache| std::path::Path::new(&cache).join("vm/userland-arm64/usr/bin/python3.11"));
        let Some(file) = python.and_then(|path| std::fs::File::open(path).ok()) else {
            crate::not_run::not_run("Debian's python3.11 for arm64\nhint: cargo xtask test --setup-only");
            return;
        };
        let found = Evaluator::of_file(&file).expect("it is CPython");
        let elf = Elf::parse(&file).expect("an ELF file");
        let parts = parts(&elf).expect("it has rules");
        let offsets =
            CframeOffsets { tstate_cframe: 56, current_frame: 8, previous: 48, is_entry: Some(68), owner: 69 };
        let window = arm64::entering_window(found.parts()[0].clone(), offsets, |vaddr| {
            let mut bytes = [0; 4];
            elf.read_vaddr(vaddr, &mut bytes).ok().map(|()| bytes)
        });
        let window = window.expect("3.11 publishes its `cframe` before it fills it");
        assert!(window.addresses.start > found.entry && window.addresses.end < found.entry + 256, "{window:x?}");
        assert_eq!(window.cframe_offset, Some(256));
        let (&start, largest) = parts.iter().max_by_key(|(start, part)| part.end - *start).expect("some");
        assert_eq!((found.entry, found.parts().len(), &found.parts()[0]), (start, 1, &(start..largest.end)));
        // As in builds whose symbol covers only the function's beginning, or a part that only jumps into it.
        let beginning = by_jumps(&elf, start..start + 844);
        assert!(beginning.contains(&(start..largest.end)), "{beginning:x?}");
        let inside = found.parts()[0].start + 2048..largest.end;
        assert!(jumps(&elf, &inside).any(|target| (start..start + 2048).contains(&target)), "jumps are decoded");
    }

    #[test]
    fn a_file_without_python_has_none() {
        let own = std::fs::File::open("/proc/self/exe").expect("this test");
        assert!(matches!(Evaluator::of_file(own), Err(EvaluatorError::NoSymbol)));
    }
}
