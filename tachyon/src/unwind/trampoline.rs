//! The trampolines of `-X perf` (`Python/asm_trampoline.S`): CPython copies one small function over and over into anonymous
//! memory and calls each Python function through a copy of its own, so that `perf` can tell them apart. There are no rules for
//! them, but the function is so small that they can be derived from its instructions.

use super::{Slice, Table};
use tachyon_common::unwind::{Row, Rule, kind, saved};

/// Bytes that are filled with copies at once (`new_code_arena` in `Python/perf_trampoline.c`).
pub const ARENA: u64 = 64 << 10;

/// How many bytes of memory are enough to recognise an arena.
pub const PREFIX: usize = 1024;

/// Longest function that is taken for a trampoline.
const LONGEST: usize = 64;

/// What an instruction does to the distance between stack pointer and caller's frame.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    None,
    Push,
    Pop,
    Down,
    Up,
    Call,
    Return,
}

/// Instructions that x86-64 compilers use for it, with and without frame pointers and `-fcf-protection`.
const INSTRUCTIONS: [(&[u8], Effect); 8] = [
    (&[0xf3, 0x0f, 0x1e, 0xfa], Effect::None),
    (&[0x55], Effect::Push),
    (&[0x48, 0x89, 0xe5], Effect::None),
    (&[0x48, 0x83, 0xec, 0x08], Effect::Down),
    (&[0xff, 0xd1], Effect::Call),
    (&[0x48, 0x83, 0xc4, 0x08], Effect::Up),
    (&[0x5d], Effect::Pop),
    (&[0xc3], Effect::Return),
];

/// The rules of an arena of trampolines, given its first bytes; `None`: it is not one.
#[must_use]
pub fn trampolines(bytes: Slice<'_>) -> Option<Table> {
    if !cfg!(target_arch = "x86_64") {
        return None;
    }
    let bytes = bytes.slice();
    let (rows, len) = rules(bytes)?;
    // 3.12 has copies directly after each other; other versions round up or leave room between them.
    let stride = (len..=bytes.len() / 2).find(|&stride| bytes[stride..].starts_with(&bytes[..len]))?;
    let mut table = Table::default();
    let copies = ARENA as usize / stride;
    for start in (0..copies).map(|copy| (copy * stride) as u32) {
        // The next copy, or nothing, begins where this one ends.
        let rows = rows.iter().filter(|row| stride > len || (row.pc() as usize) < len);
        table.rows.extend(rows.map(|row| Row::new(start + row.pc(), row.rule())));
    }
    if stride == len {
        table.rows.push(Row::new((copies * stride) as u32, Rule::GAP));
    }
    Some(table)
}

/// The rules of one copy, and its length.
fn rules(bytes: &[u8]) -> Option<(Vec<Row>, usize)> {
    let (mut at, mut cfa, mut fp, mut called) = (0, 8, saved::UNCHANGED, false);
    let mut rows = vec![Row::new(0, Rule::new(kind::SP, cfa, fp)?)];
    while at < LONGEST {
        let (code, effect) =
            INSTRUCTIONS.iter().find(|(code, _)| bytes.get(at..).is_some_and(|at| at.starts_with(code)))?;
        at += code.len();
        match effect {
            Effect::None => continue,
            Effect::Push => (cfa, fp) = (cfa + 8, 2),
            Effect::Pop => (cfa, fp) = (cfa - 8, saved::UNCHANGED),
            Effect::Down => cfa += 8,
            Effect::Up => cfa -= 8,
            Effect::Call => {
                called = true;
                continue;
            }
            Effect::Return if called && cfa == 8 => {
                rows.push(Row::new(at as u32, Rule::GAP));
                return Some((rows, at));
            }
            Effect::Return => return None,
        }
        rows.push(Row::new(at as u32, Rule::new(kind::SP, cfa, fp)?));
    }
    None
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    fn table(code: &[u8], stride: usize) -> Option<Table> {
        let copy = [code, &vec![0; stride - code.len()]].concat();
        trampolines(Slice::new(&copy.repeat(PREFIX / stride)[..], gimli::LittleEndian))
    }

    #[test]
    fn both_shapes_are_told_by_their_instructions() {
        let bare = [0x48, 0x83, 0xec, 8, 0xff, 0xd1, 0x48, 0x83, 0xc4, 8, 0xc3];
        let found = table(&bare, 16).expect("3.12's");
        let sp = |offset| Rule::new(kind::SP, offset, saved::UNCHANGED).unwrap();
        let all = [0, 3, 4, 9, 10, 11, 16, 32 + 5].map(|at| found.rule(at));
        assert_eq!(all, [sp(8), sp(8), sp(16), sp(16), sp(8), Rule::GAP, sp(8), sp(16)]);
        let close = table(&bare, 11).expect("3.12 with nothing between");
        assert_eq!(
            [0, 5, 10, 11, 11 * 50 + 5, 11 * 5957].map(|at| close.rule(at)),
            [sp(8), sp(16), sp(8), sp(8), sp(16), Rule::GAP]
        );
        assert!(close.rows.is_sorted_by(|one, next| one.pc() < next.pc()));
        let framed = [0xf3, 0x0f, 0x1e, 0xfa, 0x55, 0x48, 0x89, 0xe5, 0xff, 0xd1, 0x5d, 0xc3];
        let found = table(&framed, 272).expect("a newer one with room between");
        assert_eq!(found.rule(272 + 9), Rule::new(kind::SP, 16, 2).unwrap());
        assert_eq!(found.rule(272 + 11), sp(8));
        assert_eq!(found.rule(100), Rule::GAP);
    }

    #[test]
    fn other_code_is_not_taken_for_one() {
        for code in [&[0x48, 0x83, 0xec, 8, 0xc3][..], &[0xff, 0xd1, 0x5d, 0xc3], &[0x90; 16], &[]] {
            assert_eq!(table(code, 16), None, "{code:x?}");
        }
        let alone = [&[0x48, 0x83, 0xec, 8, 0xff, 0xd1, 0x48, 0x83, 0xc4, 8, 0xc3][..], &[0; 600]].concat();
        assert_eq!(trampolines(Slice::new(&alone, gimli::LittleEndian)), None, "there are many copies, or it is none");
    }
}
