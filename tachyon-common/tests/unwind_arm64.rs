//! The native walk of arm64 over made-up stacks and tables: what a function has saved and where, signed return addresses,
//! signal handlers, frame pointers, and every reason to stop that is its own.

mod stack;

use stack::Machine;
use tachyon_common::config::machine;
use tachyon_common::limits::MAX_NATIVE_FRAMES;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::arm64::{Rule, saved};
use tachyon_common::unwind::{self, NativeWalk, Range, kind, no_table};

const CODE: u64 = 0xaaaa_0000_0000;
const STACK: u64 = 0xffff_0000_0000;
const FP: u64 = STACK + 0x100;

/// A signature, in the bits that no address has.
const SIGNED: u64 = 0x005a_0000_0000_0000;

/// Generated code lies before the code with rules.
const GENERATED: u64 = CODE - 64;

impl Machine {
    /// Code whose rules hold for 16 bytes each, in order, and generated code before it.
    fn with(rules: &[unwind::Rule], words: &[(u64, u64)]) -> Self {
        let generated = Range { start: GENERATED, end: CODE, first_row: no_table::FRAME_POINTERS, ..Range::default() };
        let mut machine = Self::with_code(CODE, rules);
        machine.processor = machine::ARM64;
        machine.ranges.insert(0, generated);
        machine.words = words.iter().map(|(at, value)| (STACK + at, *value)).collect();
        machine
    }

    /// From `ip` with these registers: how it ended, the walk, and the addresses.
    fn walk(&self, ip: u64, fp: u64, link: u64) -> (StopReason, NativeWalk, Vec<u64>) {
        let mut walk = NativeWalk::start(ip, STACK, fp);
        walk.link = link;
        self.finish(walk)
    }
}

/// The return address into the code of a rule.
fn place(rule: u64) -> u64 {
    CODE + rule * 16 + 8
}

fn rule(kind: u32, offset: i64, saved: u32, at: i64) -> unwind::Rule {
    Rule::new(kind, offset, saved, at).expect("fits").0
}

/// Rule, words of the stack (offset, value), and the caller's sp and x29.
type Caller<'a> = (unwind::Rule, &'a [(u64, u64)], u64, u64);

/// Rules, words of the stack, x29, how the walk ends and after how many frames.
type Ending<'a> = (&'a [unwind::Rule], &'a [(u64, u64)], u64, StopReason, usize);

#[test]
fn whatever_was_saved_wherever_it_lies_the_caller_is_found() {
    let caller = place(1);
    let cases: &[Caller<'_>] = &[
        (Rule::LEAF.0, &[], STACK, FP),
        (rule(kind::SP, 32, saved::NOTHING, 0), &[], STACK + 32, FP),
        (rule(kind::SP, 16, saved::LINK, -16), &[(0, caller)], STACK + 16, FP),
        (rule(kind::SP, 16, saved::FP, -16), &[(0, 77)], STACK + 16, 77),
        (rule(kind::SP, 48, saved::PAIR, -48), &[(0, 78), (8, caller)], STACK + 48, 78),
        // LLVM's pair lies at the top, GCC's at the bottom of a large frame.
        (rule(kind::FP, 16, saved::PAIR, -16), &[(0x100, 79), (0x108, caller)], FP + 16, 79),
        (rule(kind::SP, 500_000, saved::PAIR, -499_984), &[(16, 80), (24, caller)], STACK + 500_000, 80),
        // The dynamic linker's trampolines, for which the linkage table has saved it.
        (rule(kind::SP, 0, saved::LINK, 8), &[(8, caller)], STACK, FP),
    ];
    for &(rule, words, sp, fp) in cases {
        for signature in [0, SIGNED] {
            let mut machine = Machine::with(&[rule, unwind::Rule::END], words);
            for word in machine.words.values_mut().filter(|word| **word == caller) {
                *word |= signature;
            }
            let (stop, walk, addresses) = machine.walk(CODE + 4, FP, caller | signature);
            assert_eq!((stop, walk.sp, walk.fp), (StopReason::Complete, sp, fp), "{rule:x?}");
            assert_eq!(addresses, [CODE + 4, caller - 1], "{rule:x?}");
        }
    }
}

#[test]
fn rules_that_do_not_fit_are_refused() {
    assert_eq!(Rule::new(kind::SP, 4, saved::NOTHING, 0), None, "no multiple of a word");
    assert_eq!(Rule::new(kind::SP, -8, saved::NOTHING, 0), None, "the frame lies above the stack pointer");
    assert_eq!(Rule::new(kind::SP, 1 << 20, saved::NOTHING, 0), None, "half a megabyte is the most");
    assert_eq!(Rule::new(kind::SP, 100_000, saved::PAIR, -50_000), None, "far from both ends");
    assert_eq!(Rule::new(kind::SP, i64::MAX & !7, saved::PAIR, i64::MIN), None);
    assert_eq!(Rule::new(kind::SP, 8, saved::PAIR, i64::MAX & !7), None);
}

#[test]
fn a_signal_handler_returns_to_the_very_instruction_with_its_link() {
    // A leaf was interrupted at its first instruction: less 1 would be another's, and x30 is where it returns to.
    let rules = [unwind::Rule::SIGNAL, Rule::LEAF.0, unwind::Rule::END];
    let words = [(544, 5), (552, place(2) | SIGNED), (560, STACK - 0x1000), (568, CODE + 16)];
    let (stop, walk, addresses) = Machine::with(&rules, &words).walk(CODE, FP, 0);
    assert_eq!((stop, walk.fp), (StopReason::Complete, 5), "a handler may run on a stack of its own");
    assert_eq!(addresses, [CODE, CODE + 16, place(2) - 1]);
}

#[test]
fn behind_frame_pointers_only_a_pair_tells_where_a_frame_ends() {
    let end = unwind::Rule::END;
    // Generated code, whose frame pointer leads to a function with a frame of 64 bytes that has x29 at its pair.
    let words = [(0x100, FP + 0x100), (0x108, place(0)), (0x200, 5), (0x208, place(1))];
    let machine = Machine::with(&[rule(kind::SP, 64, saved::PAIR, -64), end], &words);
    let (stop, walk, addresses) = machine.walk(GENERATED + 8, FP, 0);
    assert_eq!((stop, addresses.len(), walk.by_frame_pointer), (StopReason::Complete, 3, 2));
    assert_eq!((walk.sp, walk.fp), (FP + 0x140, 5), "and from there on the stack pointer is known again");
    // One that saved x30 alone does not tell.
    for lone in [rule(kind::SP, 64, saved::LINK, -64), unwind::Rule::SIGNAL] {
        let machine = Machine::with(&[lone, end], &words);
        assert_eq!(machine.walk(GENERATED + 8, FP, 0).0, StopReason::NoFramePointer);
    }
    // One with its frame at x29 does.
    let machine = Machine::with(&[rule(kind::FP, 64, saved::PAIR, -64), end], &words);
    assert_eq!(machine.walk(GENERATED + 8, FP, 0).0, StopReason::Complete);
}

#[test]
fn code_without_rules_beside_a_trampoline_keeps_frame_pointers() {
    // The vdso: one part of it is the way back from a signal handler, the rest has no rules.
    let rules = [unwind::Rule::CHAIN, rule(kind::FP, 32, saved::PAIR, -32), unwind::Rule::END];
    let words = [(0x100, FP + 0x100), (0x108, place(1)), (0x200, 5), (0x208, place(2))];
    let (stop, walk, addresses) = Machine::with(&rules, &words).walk(CODE + 4, FP, 0);
    assert_eq!((stop, walk.by_frame_pointer), (StopReason::Complete, 1));
    assert_eq!(addresses, [CODE + 4, place(1) - 1, place(2) - 1]);
}

#[test]
fn a_walk_that_cannot_go_on_says_why() {
    let link = rule(kind::SP, 16, saved::LINK, -16);
    let cases: &[Ending<'_>] = &[
        // What has called has no use of x30 for its return.
        (&[link, Rule::LEAF.0], &[(0, place(1))], FP, StopReason::UnsupportedUnwindRule, 2),
        (&[unwind::Rule::UNSUPPORTED], &[], FP, StopReason::UnsupportedUnwindRule, 1),
        (&[link], &[], FP, StopReason::UnreadableStack, 1),
        (&[link], &[(0, 0)], FP, StopReason::Complete, 1),
        (&[unwind::Rule::GAP], &[], FP, StopReason::NoUnwindRule, 1),
        (&[unwind::Rule::GAP], &[], 0, StopReason::Complete, 1),
        (&[rule(kind::FP, 0, saved::PAIR, -16)], &[], STACK - 8, StopReason::StackNotRising, 1),
        (&[link, rule(kind::SP, 0, saved::LINK, 0)], &[(0, place(1))], FP, StopReason::StackNotRising, 2),
    ];
    for &(rules, words, fp, expected, frames) in cases {
        let (stop, _, addresses) = Machine::with(rules, words).walk(CODE + 4, fp, 0);
        assert_eq!((stop, addresses.len()), (expected, frames), "{rules:x?}");
    }
}

#[test]
fn each_read_that_fails_ends_the_walk_where_it_is() {
    // A handler on a stack of its own, the function that it interrupted, and two callers.
    let pair = rule(kind::SP, 32, saved::PAIR, -32);
    let rules = [unwind::Rule::SIGNAL, pair, rule(kind::FP, 32, saved::PAIR, -32), unwind::Rule::END];
    let words = [
        (544, FP),
        (552, 0),
        (560, STACK + 0x80),
        (568, CODE + 16),
        (0x80, FP),
        (0x88, place(2)),
        (0x100, 5),
        (0x108, place(3)),
    ];
    let mut machine = Machine::with(&rules, &words);
    let (stop, _, whole) = machine.walk(CODE, 0, 0);
    assert_eq!((stop, whole.len()), (StopReason::Complete, 4));
    for ((unreadable, _), found) in words.into_iter().zip([1, 1, 1, 1, 2, 2, 3, 3]) {
        let word = machine.words.remove(&(STACK + unreadable)).expect("it is on the stack");
        let (stop, _, addresses) = machine.walk(CODE, 0, 0);
        assert_eq!(stop, StopReason::UnreadableStack, "{unreadable:#x}");
        assert_eq!(addresses, whole[..found], "{unreadable:#x}: what was found before is as it was");
        machine.words.insert(STACK + unreadable, word);
    }
}

#[test]
#[cfg_attr(miri, ignore = "three minutes in the loop that x86-64's walks, too")]
fn the_deepest_stack_is_whole_and_one_more_frame_is_told() {
    for (depth, expected) in [(MAX_NATIVE_FRAMES, StopReason::Complete), (MAX_NATIVE_FRAMES + 1, StopReason::TooDeep)] {
        let mut machine = Machine::with(&[rule(kind::SP, 16, saved::PAIR, -16), unwind::Rule::END], &[]);
        for frame in 1..depth as u64 {
            let next = u64::from(frame == depth as u64 - 1);
            machine.words.insert(STACK + frame * 16 - 16, FP);
            machine.words.insert(STACK + frame * 16 - 8, place(next));
        }
        let (stop, walk, _) = machine.walk(CODE + 4, FP, 0);
        assert_eq!((stop, walk.stored as usize), (expected, MAX_NATIVE_FRAMES));
    }
}
