//! A new frame is called by the frame that its `previous` names, or nothing is proven: the data stack of 3.11 and 3.12, made up.

mod image;

use image::{Family, Image, OWNER_SHIM, THREAD};
use tachyon_common::layout::{Layout, flags};
use tachyon_common::stop::StopReason;

const THREAD_OWNED: u8 = 0;
const GENERATOR: u8 = 1;
/// `FRAME_SUSPENDED`.
const SUSPENDED: u8 = 0xff;
/// Locals and stack of each code object, in words.
const WORDS: u32 = 5;

/// Frames that have a place: on one chunk of a data stack, or in a generator.
struct Stack {
    image: Image,
    chunk: u64,
    top: u32,
}

impl Stack {
    fn new(family: Family) -> Self {
        let mut image = Image::new(family);
        let chunk = image.alloc(4096);
        Self { image, chunk, top: 0 }
    }

    fn code(&mut self) -> u64 {
        let (layout, code) = (self.image.layout, self.image.code(1, b"table"));
        self.image.memory.put_u32(code, layout.code_nlocalsplus, 2);
        self.image.memory.put_u32(code, layout.code_stacksize, WORDS - 2);
        code
    }

    /// Fills in a frame that lies at `offset` of a piece of memory.
    fn fill(&mut self, (piece, offset): (u64, u32), owner: u8, unit: i32, previous: u64) -> u64 {
        let (layout, code) = (self.image.layout, self.code());
        let start = code + u64::from(layout.code_code_adaptive);
        let memory = &mut self.image.memory;
        memory.put_u64(piece, offset + layout.frame_code, code);
        memory.put_u64(piece, offset + layout.frame_previous, previous);
        memory.put_u64(piece, offset + layout.frame_instr, start.wrapping_add_signed(i64::from(unit) * 2));
        memory.put(piece, offset + layout.frame_owner, &[owner]);
        piece + u64::from(offset)
    }

    /// Pushes a frame that waits for a call.
    fn push(&mut self, previous: u64, unit: i32) -> u64 {
        let at = (self.chunk, self.top);
        self.top += self.image.layout.frame_localsplus + WORDS * 8;
        self.fill(at, THREAD_OWNED, unit, previous)
    }

    /// The outermost frame, which C has called.
    fn outermost(&mut self) -> u64 {
        let layout = self.image.layout;
        let shim = if layout.owner_shim_min < 255 { self.image.frame(0, 0, OWNER_SHIM, 0) } else { 0 };
        let frame = self.push(shim, 3);
        if Layout::present(layout.frame_is_entry) {
            self.image.memory.put(self.chunk, self.offset(frame) + layout.frame_is_entry, &[1]);
        }
        frame
    }

    /// A generator's frame, which waits for a call.
    fn generator(&mut self, state: u8, previous: u64) -> u64 {
        let before = self.image.layout.generator_state_before;
        let piece = self.image.alloc(256);
        self.image.memory.put(piece, 64 - before, &[state]);
        self.fill((piece, 64), GENERATOR, 2, previous)
    }

    fn offset(&self, frame: u64) -> u32 {
        u32::try_from(frame - self.chunk).expect("on the chunk")
    }

    /// Whether the frame, as the innermost one, is believed to be called by whom it names.
    fn believes(mut self, leaf: u64) -> bool {
        self.image.thread(self.image.interp, THREAD, leaf);
        let outcome = self.image.walk();
        assert_eq!(outcome.stop == StopReason::Complete, !outcome.frames.is_empty(), "all or nothing");
        outcome.stop == StopReason::Complete
    }
}

const FAMILIES: [Family; 2] = [Family::CFrame, Family::CFrameShims];

#[test]
fn the_frame_below_that_waits_for_a_call_has_called() {
    for family in FAMILIES {
        let mut stack = Stack::new(family);
        let root = stack.outermost();
        let caller = stack.push(root, 2);
        let leaf = stack.push(caller, -1);
        assert!(stack.believes(leaf), "{family:?}");
    }
}

/// What lies in `previous` is of an earlier call.
#[test]
fn another_frame_has_not() {
    for family in FAMILIES {
        // One further down.
        let mut stack = Stack::new(family);
        let root = stack.outermost();
        let _caller = stack.push(root, 2);
        let leaf = stack.push(root, -1);
        assert!(!stack.believes(leaf), "{family:?}");
        // One that the evaluator runs: it has called C, and that the leaf, through a generator perhaps.
        let mut stack = Stack::new(family);
        let (root, layout) = (stack.outermost(), stack.image.layout);
        let leaf = stack.push(root, -1);
        let at = stack.offset(root) + layout.frame_stacktop;
        stack.image.memory.put_u32(stack.chunk, at, u32::MAX);
        assert!(!stack.believes(leaf), "{family:?}");
        // One on another chunk.
        let mut stack = Stack::new(family);
        let root = stack.outermost();
        stack.top += 64;
        let leaf = stack.push(root, -1);
        assert!(!stack.believes(leaf), "{family:?}");
    }
}

/// 3.12 resumes generators without C: then what resumed one waits for that, and not for the leaf.
#[test]
fn one_that_has_resumed_a_generator_has_not() {
    let mut stack = Stack::new(Family::CFrameShims);
    let (root, layout) = (stack.outermost(), stack.image.layout);
    let leaf = stack.push(root, -1);
    let at = stack.offset(root) + layout.frame_return_offset;
    stack.image.memory.put(stack.chunk, at, &[7, 0]);
    assert!(!stack.believes(leaf));
}

#[test]
fn generators_that_run_have_called_what_lies_behind_their_caller() {
    for family in FAMILIES {
        for (state, adjacent, expected) in [(0, true, true), (SUSPENDED, true, false), (0, false, false)] {
            let mut stack = Stack::new(family);
            let root = stack.outermost();
            let inner = stack.generator(0, root);
            let caller = stack.generator(state, inner);
            stack.top += if adjacent { 0 } else { 16 };
            let leaf = stack.push(caller, -1);
            assert_eq!(stack.believes(leaf), expected, "{family:?} {state} {adjacent}");
        }
        // More of them than are looked at.
        let mut stack = Stack::new(family);
        let mut caller = stack.outermost();
        for _ in 0..8 {
            caller = stack.generator(0, caller);
        }
        let leaf = stack.push(caller, -1);
        assert!(!stack.believes(leaf), "{family:?}");
    }
}

/// A frame that C has called is believed where the machine code says so: the walk here stands at the evaluator's first
/// instruction.
#[test]
fn what_c_has_called_is_linked_where_no_call_is_on_its_way() {
    for family in FAMILIES {
        for (flag, place, expected) in [
            (flags::LINKS_FIRST, Layout::unlinked_place(1, 9), true),
            (flags::LINKS_FIRST, Layout::unlinked_place(0, 9), false),
            (0, Layout::unlinked_place(1, 9), false),
        ] {
            let mut stack = Stack::new(family);
            stack.image.layout.flags |= flag;
            stack.image.layout.unlinked[3] = place.expect("it fits");
            let leaf = stack.outermost();
            let instr = stack.offset(leaf) + stack.image.layout.frame_instr;
            let word = stack.offset(leaf) + stack.image.layout.frame_code;
            let code = u64::from_ne_bytes(
                stack.image.memory.pieces[&stack.chunk][word as usize..][..8].try_into().expect("a word"),
            );
            let before = code + u64::from(stack.image.layout.code_code_adaptive) - 2;
            stack.image.memory.put_u64(stack.chunk, instr, before);
            assert_eq!(stack.believes(leaf), expected, "{family:?} {flag} {place:?}");
        }
    }
}

#[test]
fn places_are_ranges_of_the_evaluators_code() {
    let mut layout = Layout::default();
    assert!(![0, 1, u64::MAX].into_iter().any(|distance| layout.may_be_unlinked(distance)), "there are none");
    layout.unlinked[0] = Layout::unlinked_place(0x1234, 0x10).expect("it fits");
    layout.unlinked[23] = Layout::unlinked_place(0xff_ffff, 0xff).expect("it fits");
    let may = |distance| layout.may_be_unlinked(distance);
    assert_eq!([0x1233, 0x1234, 0x1243, 0x1244].map(may), [false, true, true, false]);
    assert_eq!([0xff_fffe, 0xff_ffff, 0x100_00fd, 0x100_00fe].map(may), [false, true, true, false]);
    assert_eq!([0, u64::MAX, 1 << 63].map(may), [false; 3]);
    assert_eq!((Layout::unlinked_place(1 << 24, 1), Layout::unlinked_place(1, 256)), (None, None));
}
