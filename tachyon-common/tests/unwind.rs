//! The native walk over made-up stacks and tables: every kind of rule, every reason to stop, the bounds.

mod stack;

use stack::Machine;
use tachyon_common::limits::MAX_NATIVE_FRAMES;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{NativeWalk, Range, Rule, kind, may_call, no_table, saved};

const CODE: u64 = 0x7f00_0000_0000;
const STACK: u64 = 0x7ffc_0000_0000;

impl Machine {
    /// Code whose rules hold for 16 bytes each, in order.
    fn with(rules: &[Rule]) -> Self {
        Self::with_code(CODE, rules)
    }

    /// The return address into the code of a rule.
    fn place(rule: u64) -> u64 {
        CODE + rule * 16 + 8
    }

    fn walk_from(&self, ip: u64, fp: u64) -> (StopReason, NativeWalk, Vec<u64>) {
        self.finish(NativeWalk::start(ip, STACK, fp))
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
        let (stop, walk, addresses) = machine.walk_from(CODE + 3, *fp);
        assert_eq!((stop, walk.fp), (StopReason::Complete, *caller_fp), "{rule:x?}");
        assert_eq!(addresses, [CODE + 3, caller - 1], "a caller's address lies inside of its call");
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
    let (stop, walk, addresses) = machine.walk_from(CODE, 0);
    assert_eq!((stop, walk.fp), (StopReason::Complete, 5), "a handler may run on a stack of its own");
    assert_eq!(addresses, [CODE, CODE + 16, Machine::place(2) - 1]);
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
        let (stop, walk, addresses) = machine.walk_from(ip, fp);
        assert_eq!((stop, addresses.len()), (expected, frames), "{rules:x?} {words:x?}");
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

/// The frame that is thrown to is met at the very instruction at which it goes on.
#[test]
fn a_throw_goes_on_where_it_leads() {
    let fp = STACK + 0x300;
    let mut machine =
        Machine::with(&[Rule::throw(-0x220).expect("fits"), Rule::new(kind::FP, 16, 2).expect("fits"), Rule::END]);
    let (context, frame) = (fp - 0x220 - 144, STACK + 0x800);
    let words = [
        (context + 144, STACK + 0x600),
        (context + 152, CODE + 16),
        (context + 48, STACK + 0x500),
        (STACK + 0x500, frame),
        (frame, 7),
        (frame + 8, Machine::place(2)),
    ];
    machine.words.extend(words);
    let (stop, walk, whole) = machine.walk_from(CODE, fp);
    assert_eq!((stop, walk.fp), (StopReason::Complete, 7));
    assert_eq!(whole, [CODE, CODE + 16, Machine::place(2) - 1], "its first instruction is no return address");
    for ((unreadable, word), found) in words.into_iter().zip([1, 1, 1, 1, 2, 2]) {
        machine.words.remove(&unreadable);
        let (stop, _, addresses) = machine.walk_from(CODE, fp);
        assert_eq!((stop, &addresses[..]), (StopReason::UnreadableStack, &whole[..found]), "{unreadable:#x}");
        machine.words.insert(unreadable, word);
    }
    for sp in [0, STACK] {
        machine.words.insert(context + 144, sp);
        assert_eq!(machine.walk_from(CODE, fp).0, StopReason::StackNotRising, "a throw leads up the stack");
    }
    assert_eq!([Rule::throw(-12), Rule::throw(i64::MIN), Rule::throw(1 << 30)], [None; 3]);
}

#[test]
fn each_read_that_fails_ends_the_walk_where_it_is() {
    let deref = Rule::deref(kind::DEREF_FP, -8, 0, saved::AT_FP).expect("fits");
    let mut machine = Machine::with(&[Rule::SIGNAL, Rule::new(kind::SP, 24, 2).expect("fits"), deref, Rule::END]);
    let fp = STACK + 0x300;
    let words = [
        (STACK + 120, 5),
        (STACK + 160, STACK + 0x200),
        (STACK + 168, CODE + 16),
        (STACK + 0x208, fp),
        (STACK + 0x210, Machine::place(2)),
        (fp - 8, STACK + 0x400),
        (fp, 7),
        (STACK + 0x3f8, Machine::place(3)),
    ];
    machine.words.extend(words);
    let (stop, _, whole) = machine.walk_from(CODE, 0);
    assert_eq!((stop, whole.len()), (StopReason::Complete, 4));
    for ((unreadable, word), found) in words.into_iter().zip([1, 1, 1, 2, 2, 3, 3, 3]) {
        machine.words.remove(&unreadable);
        let (stop, _, addresses) = machine.walk_from(CODE, 0);
        assert_eq!(stop, StopReason::UnreadableStack, "{unreadable:#x}");
        assert_eq!(addresses, whole[..found], "{unreadable:#x}: what was found before is as it was");
        machine.words.insert(unreadable, word);
    }
}

/// What lies behind a word on its page is read with it, and no other page.
#[test]
fn callers_on_one_page_are_read_together() {
    let mut machine = Machine::with(&[sp(16), Rule::END]);
    let page = |words: std::ops::Range<u64>| words.map(|at| STACK + at * 8);
    machine.words.extend(page(0..512).map(|at| (at, Machine::place(0))));
    for depth in [1, 2, 60, 100] {
        machine.reads.set(0);
        machine.words.insert(STACK + 8 + 16 * depth, Machine::place(1));
        let (stop, _, addresses) = machine.walk_from(CODE, 0);
        assert_eq!((stop, addresses.len() as u64), (StopReason::Complete, depth + 2));
        assert_eq!(machine.reads.get() as u64, 1 + 16 * depth / 1024, "{depth} frames of 16 bytes");
        machine.words.insert(STACK + 8 + 16 * depth, Machine::place(0));
    }
    // Without the page's end, its words are read one by one.
    machine.words.retain(|at, _| *at < STACK + 64);
    machine.words.insert(STACK + 24, Machine::place(1));
    let (stop, _, addresses) = machine.walk_from(CODE, 0);
    assert_eq!((stop, addresses.len()), (StopReason::Complete, 3));
}

#[test]
fn the_deepest_stack_is_whole_and_one_more_frame_is_told() {
    let depths = [(MAX_NATIVE_FRAMES, StopReason::Complete), (MAX_NATIVE_FRAMES + 1, StopReason::TooDeep)];
    // Half a minute each under Miri.
    for (depth, expected) in depths.into_iter().skip(usize::from(cfg!(miri))) {
        let mut machine = Machine::with(&[sp(16), Rule::END]);
        for frame in 1..depth as u64 {
            let rule = u64::from(frame == depth as u64 - 1);
            machine.words.insert(STACK + frame * 16 - 8, Machine::place(rule));
        }
        let (stop, walk, _) = machine.walk_from(CODE, 1);
        assert_eq!((stop, walk.stored as usize), (expected, MAX_NATIVE_FRAMES));
    }
}

/// Where a table was missing, the walk goes on from there with all tables, and gives what it would have given at once.
#[test]
fn a_walk_that_lacked_a_table_is_finished_with_it() {
    let mut whole = Machine::with(&[sp(16); 4]);
    // Each function calls the next inner one: 3 is the outermost.
    let rules = [sp(16), sp(32), sp(16), Rule::END];
    whole.rows = Machine::with(&rules).rows;
    whole.words = (0..32).map(|word| (STACK + word * 8, 0)).collect();
    for (at, function) in [(8, 1), (40, 2), (56, 3)] {
        whole.words.insert(STACK + at, Machine::place(function));
    }
    let (stop, _, all) = whole.walk_from(CODE + 8, 0);
    assert_eq!((stop, all.len()), (StopReason::Complete, 4));
    for missing in 0..4 {
        let start = CODE + missing * 16;
        let part = |start, end| Range { start, end, ..whole.ranges[0] };
        let (before, after) = (part(CODE, start), part(start + 16, CODE + 64));
        let unmade = Range { first_row: no_table::STOP, rows: 0, ..part(start, start + 16) };
        let cases = [
            (vec![before, unmade, after], StopReason::NoUnwindTables, missing as usize + 1),
            // The interrupted instruction's own address is stored whatever it is.
            (vec![before, after], StopReason::UnknownCode, (missing as usize).max(1)),
        ];
        for (ranges, expected, stored) in cases {
            let (words, rows) = (whole.words.clone(), whole.rows.clone());
            let partly = Machine { words, rows, ranges, ..Machine::default() };
            let (stop, mut walk, mut addresses) = partly.walk_from(CODE + 8, 0);
            assert_eq!((stop, addresses.len()), (expected, stored), "{missing}");
            assert!(walk.lacks_tables(stop as u32));
            let again = walk.begin_again(addresses.last().copied());
            assert_eq!(again, expected == StopReason::NoUnwindTables || missing == 0);
            addresses.truncate(walk.stored as usize);
            let (stop, _, rest) = whole.finish_from(walk, addresses);
            assert_eq!((stop, &rest), (StopReason::Complete, &all), "{missing}");
        }
    }
}

/// Rules that make no sense are none that come later, and what a believed frame pointer leads to is no code that comes later.
#[test]
fn what_will_never_have_a_table_lacks_none() {
    let mut machine = Machine::with(&[sp(16)]);
    (machine.ranges[0].rows, machine.ranges[0].first_row) = (0, no_table::NEVER);
    let (stop, walk, _) = machine.walk_from(CODE + 8, 0);
    assert_eq!((stop, walk.lacks_tables(stop as u32)), (StopReason::NoUnwindTables, false));
    machine.ranges[0].first_row = no_table::FRAME_POINTERS;
    machine.words = [(STACK + 16, 0), (STACK + 24, 5)].into();
    let (stop, walk, _) = machine.walk_from(CODE + 8, STACK + 16);
    assert_eq!((stop, walk.lacks_tables(stop as u32)), (StopReason::UnknownCode, false));
    assert!(!walk.lacks_tables(StopReason::UnreadableStack as u32));
}

#[test]
fn what_precedes_a_return_address_is_a_call() {
    let before = |bytes: &[u8]| {
        let mut word = [0x90; 8];
        word[8 - bytes.len()..].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    // As assemblers write: `call f`, `*%rax`, `*%r11`, `*f(%rip)`, `*(%rax)`, `*8(%rax)`, `*16(%rsp)`, `*(%rsp)`, `*128(%rax)`,
    // `*128(%rsp)`, `*(%r13)`.
    let calls: [&[u8]; 11] = [
        &[0xe8, 1, 2, 3, 4],
        &[0xff, 0xd0],
        &[0x41, 0xff, 0xd3],
        &[0xff, 0x15, 1, 2, 3, 4],
        &[0xff, 0x10],
        &[0xff, 0x50, 8],
        &[0xff, 0x54, 0x24, 16],
        &[0xff, 0x14, 0x24],
        &[0xff, 0x90, 128, 0, 0, 0],
        &[0xff, 0x94, 0x24, 128, 0, 0, 0],
        &[0x41, 0xff, 0x55, 0],
    ];
    for call in calls {
        assert!(may_call(before(call), false), "{call:x?}");
    }
    // Nothing, a pointer, `jmp *%rax`, `push (%rax)`, a call that ended two bytes before.
    for other in [
        &[0; 8][..],
        &0x7fff_1234_5678_u64.to_le_bytes(),
        &[0xff, 0xe0],
        &[0xff, 0x30],
        &[0xe8, 1, 2, 3, 4, 0x90, 0x90],
    ] {
        assert!(!may_call(before(other), false), "{other:x?}");
    }
    // `bl .`, `blr x3`, `blraa x3, x4`; `b .`, `br x3`, `ret`.
    let word = |instruction: u32| u64::from(instruction) << 32;
    assert!([0x9400_0000, 0x97ff_ffff, 0xd63f_0060, 0xd73f_0864].iter().all(|call| may_call(word(*call), true)));
    assert!(![0x1400_0000, 0xd61f_0060, 0xd65f_03c0, 0].iter().any(|other| may_call(word(*other), true)));
}
