//! The same functions as GCC makes them for arm64: they save `x0` to `x3`, which no other function does, and leave with `add
//! sp, sp, x4; ret`, or by `x6`, in an epilogue that may lie elsewhere in the function. Where a throw leads is not read here:
//! a stack that is met at these instructions is cut.

use crate::unwind::compile::RuleRow;
use gimli::{AArch64, RegisterRule};
use std::ops::Range;

/// Most instructions from the last call to the function's end; they are some 20.
const MOST: usize = 64;

/// What an instruction does, as far as that matters here (Arm ARM, C4.1 and C6.2).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    /// `bl`, `blr`
    Calls,
    /// `b.cond`: the call's result is tested, so it was not the last call. (GCC's epilogues use `cbz` to test how they are left.)
    Asks,
    /// `b`, to this many instructions from here.
    Goes(isize),
    /// `add sp, sp, xN`
    MovesStack,
    /// `ret`, `br`, signed or not.
    Leaves,
    Other,
}

const fn effect(word: u32) -> Effect {
    let forward = ((word << 6).cast_signed() >> 6) as isize;
    match word {
        _ if word & 0xfc00_0000 == 0x9400_0000 || word & 0xffff_fc1f == 0xd63f_0000 => Effect::Calls,
        _ if word & 0xfc00_0000 == 0x1400_0000 => Effect::Goes(forward),
        _ if word & 0xff00_0000 == 0x5400_0000 => Effect::Asks,
        _ if word & 0xffe0_ffff == 0x8b20_63ff => Effect::MovesStack,
        0xd65f_0bff | 0xd65f_0fff => Effect::Leaves,
        _ if word & 0xffff_fc1f == 0xd65f_0000 || word & 0xffff_fc1f == 0xd61f_0000 => Effect::Leaves,
        _ => Effect::Other,
    }
}

/// Whether a row of a function says that it saves the registers that carry an exception.
pub(in crate::unwind::compile) fn saves(row: &RuleRow) -> bool {
    [AArch64::X0, AArch64::X3].iter().all(|register| matches!(row.register(*register), RegisterRule::Offset(_)))
}

/// Addresses at which such a function's saved registers are no longer its own: from the call of `uw_install_context_1` on,
/// except its first byte, because during the call rules are looked up by the return address less 1.
pub(in crate::unwind::compile) fn installed(code: &[u8], start: u64) -> Vec<Range<u64>> {
    let words: Vec<u32> = code.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
    let address = |at: usize| start + 4 * at as u64;
    let calls: Vec<usize> = (0..words.len()).filter(|&at| effect(words[at]) == Effect::Calls).collect();
    let mut found = Vec::new();
    // `_Unwind_DebugHook` is the call from which the function's end is reached, the one before it is the one in question.
    for pair in calls.windows(2) {
        if let Some(path) = end(&words, pair[1] + 1) {
            found.push(address(pair[0]) + 1..address(pair[1] + 1));
            found.extend(path.into_iter().map(|at| address(at)..address(at + 1)));
        }
    }
    found
}

/// The instructions from `first` to the one that leaves, if the stack pointer is moved on the way and nothing is called.
fn end(words: &[u32], first: usize) -> Option<Vec<usize>> {
    let (mut at, mut path, mut moves) = (first, Vec::new(), false);
    while path.len() < MOST {
        path.push(at);
        match effect(*words.get(at)?) {
            Effect::Calls | Effect::Asks => return None,
            Effect::Goes(by) => at = at.checked_add_signed(by)?,
            Effect::Leaves => return moves.then_some(path),
            other => {
                moves |= other == Effect::MovesStack;
                at += 1;
            }
        }
    }
    None
}
