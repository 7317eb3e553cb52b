//! The native walk over made-up stacks and tables: every kind of rule, every reason to stop, the bounds.

use std::collections::BTreeMap;
use tachyon_common::limits::{MAX_NATIVE_FRAMES, NATIVE_FRAMES_PER_STEP};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Space, Tables, kind, no_table, saved};
use tachyon_common::walk::{Unreadable, UserMemory};

#[derive(Default)]
struct Machine {
    words: BTreeMap<u64, u64>,
    ranges: Vec<Range>,
    rows: Vec<Row>,
    addresses: Vec<u64>,
}

impl UserMemory for Machine {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        into.copy_from_slice(&self.words.get(&addr).ok_or(Unreadable)?.to_ne_bytes());
        Ok(())
    }
}

impl Tables for Machine {
    fn range(&self, index: u32) -> Option<Range> {
        self.ranges.get(index as usize).copied()
    }

    fn row(&self, index: u32) -> Option<Row> {
        self.rows.get(index as usize).copied()
    }
}

struct Addresses(Vec<u64>);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        assert!(index < MAX_NATIVE_FRAMES && index == self.0.len());
        self.0.push(address);
    }
}

const CODE: u64 = 0x7f00_0000_0000;
const STACK: u64 = 0x7ffc_0000_0000;

impl Machine {
    /// Code whose rules hold for 16 bytes each, in order.
    fn with(rules: &[Rule]) -> Self {
        let rows: Vec<Row> = (0..).zip(rules).map(|(at, rule)| Row::new(at * 16, *rule)).collect();
        let range = Range {
            start: CODE,
            end: CODE + rows.len() as u64 * 16,
            bias: CODE,
            first_row: 0,
            rows: rows.len() as u32,
        };
        Self { rows, ranges: vec![range], ..Self::default() }
    }

    /// The return address into the code of a rule.
    fn place(rule: u64) -> u64 {
        CODE + rule * 16 + 8
    }

    fn walk_from(&mut self, ip: u64, fp: u64) -> (StopReason, NativeWalk) {
        let mut walk = NativeWalk::start(ip, STACK, fp);
        let mut addresses = Addresses(Vec::new());
        let space = Space { image: 1, first: 0, count: self.ranges.len() as u32 };
        let most = MAX_NATIVE_FRAMES / NATIVE_FRAMES_PER_STEP + 1;
        let stop = (0..most).find_map(|_| walk.step(self, self, space, &mut addresses));
        self.addresses = addresses.0;
        (stop.expect("a walk ends within its steps"), walk)
    }
}

fn sp(bytes: i64) -> Rule {
    Rule::new(kind::SP, bytes, saved::UNCHANGED).expect("fits")
}

/// Rule, rbp, words of the stack (offset, value), rbp of the caller.
type Case<'a> = (Rule, u64, &'a [(u64, u64)], u64);

#[test]
fn each_kind_of_rule_finds_its_caller() {
    let end = Rule::END;
    let caller = Machine::place(1);
    let fp = STACK + 0x100;
    let table: &[Case<'_>] = &[
        (sp(24), fp, &[(16, caller)], fp),
        (Rule::new(kind::SP, 24, 2).expect("fits"), fp, &[(16, caller), (8, 77)], 77),
        (Rule::new(kind::FP, 16, 2).expect("fits"), fp, &[(0x108, caller), (0x100, 78)], 78),
        (
            Rule::deref(kind::DEREF_FP, -8, 0, saved::AT_FP).expect("fits"),
            fp,
            &[(0xf8, STACK + 0x200), (0x1f8, caller), (0x100, 79)],
            79,
        ),
        (
            Rule::deref(kind::DEREF_SP, 32, 8, saved::UNCHANGED).expect("fits"),
            fp,
            &[(32, STACK + 0x200), (0x200, caller)],
            fp,
        ),
    ];
    for (rule, fp, words, caller_fp) in table {
        let mut machine = Machine::with(&[*rule, end]);
        machine.words = words.iter().map(|(at, value)| (STACK + at, *value)).collect();
        let (stop, walk) = machine.walk_from(CODE + 3, *fp);
        assert_eq!((stop, walk.fp), (StopReason::Complete, *caller_fp), "{rule:x?}");
        assert_eq!(machine.addresses, [CODE + 3, caller - 1], "a caller's address lies inside of its call");
    }
}

#[test]
fn a_linkage_table_has_pushed_a_word_from_some_byte_on() {
    let rule = Rule::new(kind::PLT, 11 * 8, saved::UNCHANGED).expect("fits");
    for (byte, word) in [(0, 0), (10, 0), (11, 8), (15, 8)] {
        let mut machine = Machine::with(&[rule, Rule::END]);
        machine.words.insert(STACK + word, Machine::place(1));
        assert_eq!(machine.walk_from(CODE + byte, 0).0, StopReason::Complete, "byte {byte}");
    }
}

#[test]
fn a_signal_handler_returns_to_the_very_instruction() {
    // The interrupted instruction is the first one of its function: less 1 would be another's.
    let mut machine = Machine::with(&[Rule::SIGNAL, sp(8), Rule::END]);
    let below = STACK - 0x1000;
    machine.words.extend([
        (STACK + 120, 5),
        (STACK + 160, below),
        (STACK + 168, CODE + 16),
        (below, Machine::place(2)),
    ]);
    let (stop, walk) = machine.walk_from(CODE, 0);
    assert_eq!((stop, walk.fp), (StopReason::Complete, 5), "a handler may run on a stack of its own");
    assert_eq!(machine.addresses, [CODE, CODE + 16, Machine::place(2) - 1]);
}

#[test]
fn every_native_reason_is_reached() {
    let mut reached = Vec::new();
    let mut case = |rules: &[Rule], words: &[(u64, u64)], (ip, fp): (u64, u64), expected: StopReason, frames: usize| {
        let mut machine = Machine::with(rules);
        machine.words = words.iter().map(|(at, value)| (STACK + at, *value)).collect();
        let file = Range { start: CODE - 64, end: CODE - 32, first_row: no_table::STOP, ..Range::default() };
        let jit = Range { start: CODE - 32, end: CODE, first_row: no_table::FRAME_POINTERS, ..Range::default() };
        machine.ranges.splice(0..0, [file, jit]);
        let (stop, walk) = machine.walk_from(ip, fp);
        assert_eq!((stop, machine.addresses.len()), (expected, frames), "{rules:x?} {words:x?}");
        reached.push(stop);
        walk.by_frame_pointer
    };
    let up = Machine::place(1);
    case(&[Rule::END], &[], (CODE, 1), StopReason::Complete, 1);
    case(&[sp(8)], &[(0, 0)], (CODE, 1), StopReason::Complete, 1);
    case(&[Rule::GAP], &[], (CODE, 0), StopReason::Complete, 1);
    case(&[Rule::GAP], &[], (CODE, 1), StopReason::NoUnwindRule, 1);
    case(&[sp(8), Rule::UNSUPPORTED], &[(0, up)], (CODE, 1), StopReason::UnsupportedUnwindRule, 2);
    case(&[sp(8)], &[(0, 42)], (CODE, 1), StopReason::UnknownCode, 1);
    case(&[sp(8)], &[], (42, 1), StopReason::UnknownCode, 1);
    case(&[sp(8)], &[], (CODE, 1), StopReason::UnreadableStack, 1);
    case(&[sp(0)], &[], (CODE, 1), StopReason::StackNotRising, 1);
    case(&[sp(-8)], &[], (CODE, 1), StopReason::StackNotRising, 1);
    case(&[sp(8)], &[], (CODE - 64, STACK + 8), StopReason::NoUnwindTables, 1);
    for fp in [STACK - 8, STACK + 4] {
        assert_eq!(case(&[sp(8)], &[], (CODE - 9, fp), StopReason::NoFramePointer, 1), 1);
    }
    let frame = [(16, 0), (24, up)];
    assert_eq!(case(&[sp(8), Rule::END], &frame, (CODE - 9, STACK + 16), StopReason::Complete, 2), 1);
    let told_elsewhere = [StopReason::NoRegisters];
    for reason in StopReason::ALL.into_iter().filter(|reason| reason.is_native()) {
        assert!(reached.contains(&reason) || told_elsewhere.contains(&reason), "{reason:?}");
    }
}

#[test]
fn the_deepest_stack_is_whole_and_one_more_frame_is_told() {
    for (depth, expected) in [(MAX_NATIVE_FRAMES, StopReason::Complete), (MAX_NATIVE_FRAMES + 1, StopReason::TooDeep)] {
        let mut machine = Machine::with(&[sp(16), Rule::END]);
        for frame in 1..depth as u64 {
            let rule = u64::from(frame == depth as u64 - 1);
            machine.words.insert(STACK + frame * 16 - 8, Machine::place(rule));
        }
        let (stop, walk) = machine.walk_from(CODE, 1);
        assert_eq!((stop, walk.stored as usize), (expected, MAX_NATIVE_FRAMES));
    }
}
