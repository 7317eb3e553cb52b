//! Rules for code that has none: functions written in assembly language, read instruction by instruction (x86-64).
//!
//! Assemblers write no rules unless the source asks for them, and the sources of OpenBLAS, libjpeg-turbo and many others do not. In: the
//! gaps between the functions that `.eh_frame` describes. Out: pieces with a rule each, for functions that can be verified: every path was
//! followed ([`frame`], [`state`]) from the first instruction, where the caller's registers are in place, to returns where they are in
//! place again. Everything else stays a gap. A stack that leads through such a rule is labelled as repaired.

mod frame;
mod state;

use self::frame::{Code, Function};
use super::Piece;
use crate::remote::elf::{Elf, ElfError, ReadAt};
use iced_x86::{FlowControl, Mnemonic};
use std::collections::BTreeMap;
use std::ops::Range;

/// Longest gap that is read; OpenBLAS, which groups its functions by processor, has gaps of up to 0.5 MB.
const MAX_GAP: u64 = 4 << 20;

/// Most bytes of gaps that are read at a time; all of OpenBLAS has 2.7 MB.
const MAX_CODE: u64 = 8 << 20;

/// Most segments that are searched; linkers make one or two.
const MAX_PARTS: usize = 16;

/// Shorter gaps are padding.
const MIN_GAP: u64 = 16;

/// Instructions that are followed at a time, plus one per so many bytes of gaps; OpenBLAS has seven bytes per instruction.
const STEPS: u64 = 1 << 16;
const BYTES_PER_STEP: u64 = 2;

/// Functions in assembly language.
#[derive(Default)]
pub(super) struct Assembly {
    pub pieces: Vec<Piece>,
    /// Where they lie: for a function in several places, each of them.
    pub functions: Vec<Range<u64>>,
}

/// The functions without rules in these parts of a file, apart from the known ones, which are sorted.
///
/// # Errors
/// When the code cannot be read.
pub(super) fn functions<R: ReadAt>(
    elf: &Elf<R>,
    known: &[Piece],
    parts: impl Iterator<Item = Range<u64>>,
) -> Result<Assembly, ElfError> {
    let (mut left, mut steps, mut found) = (MAX_CODE, STEPS, Assembly::default());
    for gap in parts.take(MAX_PARTS).flat_map(|part| gaps(known, part)) {
        let len = gap.end - gap.start;
        if len > left {
            break;
        }
        left -= len;
        steps += len / BYTES_PER_STEP;
        let mut bytes = vec![0; len as usize];
        elf.read_vaddr(gap.start, &mut bytes)?;
        follow(Code::new(&bytes, gap.start), gap.start, &mut steps, &mut found);
    }
    Ok(found)
}

/// Stretches of a part that no piece covers and that are neither too short nor too long.
fn gaps(known: &[Piece], part: Range<u64>) -> Vec<Range<u64>> {
    let (mut gaps, mut next) = (Vec::new(), part.start);
    let mut add = |gap: Range<u64>| {
        if gap.start < gap.end && (MIN_GAP..=MAX_GAP).contains(&(gap.end - gap.start)) {
            gaps.push(gap);
        }
    };
    for piece in known {
        add(next..piece.start.min(part.end));
        next = next.max(piece.end);
    }
    add(next..part.end);
    gaps
}

/// Follows one function after the other in the code between two that have rules.
fn follow(mut code: Code<'_>, start: u64, steps: &mut u64, found: &mut Assembly) {
    let mut at = behind_padding(&code, start);
    // Where parts of functions begin and end: others may have jumped there.
    let mut followed: BTreeMap<u64, u64> = BTreeMap::new();
    while !code.from(at).is_empty() {
        let part = followed.range(..=at).next_back().map(|(_, &end)| end).filter(|&end| at < end);
        let end = match part {
            Some(end) => end,
            None => match Function::follow(&mut code, at, steps) {
                Some(function) => {
                    followed.extend(function.parts().map(|part| (part.start, part.end)));
                    found.functions.extend(function.parts());
                    found.pieces.extend(&function.pieces);
                    // Never back into code that it jumped to.
                    function.parts().find(|part| part.contains(&at)).map_or(at + 1, |own| own.end)
                }
                None => behind_end(&code, at),
            },
        };
        at = behind_padding(&code, end);
    }
}

/// First address from here on that is not padding.
fn behind_padding(code: &Code<'_>, mut at: u64) -> u64 {
    while let Some(&byte) = code.from(at).first() {
        if matches!(byte, 0 | 0xcc) {
            at += 1;
            continue;
        }
        let instruction = code.decoder(at).decode();
        if instruction.mnemonic() != Mnemonic::Nop {
            break;
        }
        at = instruction.next_ip();
    }
    at
}

/// Where a function that cannot be verified seems to end: after a return or a jump, where the next one would begin.
fn behind_end(code: &Code<'_>, at: u64) -> u64 {
    let mut decoder = code.decoder(at);
    while decoder.can_decode() {
        let flow = decoder.decode().flow_control();
        let ends = matches!(flow, FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch);
        if ends && behind_padding(code, decoder.ip()).is_multiple_of(16) {
            break;
        }
    }
    decoder.ip()
}
