//! The walk over made-up memory: exact stacks for each family of layouts, every reason to stop, every read that fails.

mod image;

use image::{CODE_TYPE, Family, Image, OWNER_SHIM, RUNTIME, THREAD, UNITS, WANTED};
use std::collections::BTreeSet;
use tachyon_common::event::{frame as frame_flags, status};
use tachyon_common::layout::{Layout, flags};
use tachyon_common::limits::MAX_PY_FRAMES;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{InterpBuffer, ThreadFacts, thread_facts};

/// Deep stacks take Miri minutes.
const DEPTHS: &[u32] = if cfg!(miri) { &[1, 5] } else { &[1, 2, 30, 104, 105, MAX_PY_FRAMES as u32] };

/// All families; under Miri, which is slow, one of each way to find a frame.
fn families() -> &'static [Family] {
    const FEW: [Family; 2] = [Family::FrameObjects310, Family::BaseFrame];
    if cfg!(miri) { &FEW } else { &Family::ALL }
}

/// What is told of a thread.
fn facts(image: &Image, tstate: u64) -> ThreadFacts {
    let thread = image.copied(tstate).expect("readable");
    thread_facts(&image.memory, &image.layout, (&image.entry, WANTED), tstate, &thread, &mut InterpBuffer::default())
}

#[test]
fn exact_stacks_of_every_family() {
    for &family in families() {
        for &depth in DEPTHS {
            let mut image = Image::new(family);
            let (tstate, _) = image.stack(depth);
            let outcome = image.walk();
            assert_eq!((outcome.stop, outcome.tstate), (StopReason::Complete, tstate), "{family:?}, {depth} frames");
            assert_eq!(outcome.frames.len(), depth as usize, "{family:?}");
            let fingerprints: BTreeSet<u64> = outcome.frames.iter().map(|frame| frame.fingerprint).collect();
            assert_eq!(fingerprints.len(), depth as usize, "{family:?}: each code object is another");
            for (number, frame) in (1_u32..).zip(&outcome.frames) {
                let code = image.memory.pieces.get(&frame.code).expect("the code object's own address, without tags");
                let at = image.layout.code_firstlineno as usize;
                assert_eq!(code[at..at + 4], number.to_ne_bytes(), "{family:?}: in order");
                assert_eq!(frame.lasti, (number % UNITS).cast_signed() * 2, "{family:?}: in bytes");
            }
        }
    }
}

#[test]
fn new_frames_generators_and_shims() {
    for family in [Family::CFrameShims, Family::CurrentFrame, Family::Tagged, Family::FreeThreaded] {
        let mut image = Image::new(family);
        let code = image.code(1, b"table");
        let root = image.frame(code, 3, 0, 0);
        let shim = image.frame(0, 0, OWNER_SHIM, root);
        let generator = image.frame(code, 2, 1, shim);
        let fresh = if image.layout.has(flags::PREV_INSTR) { 1 } else { 0 };
        let leaf = image.frame(code, fresh, 0, generator);
        image.thread(image.interp, THREAD, leaf);
        let outcome = image.walk();
        let shown: Vec<_> = outcome.frames.iter().map(|frame| (frame.lasti, frame.flags, frame.shims)).collect();
        let generator = frame_flags::GENERATOR | frame_flags::ENTRY;
        assert_eq!(shown, [(fresh * 2, 0, 0), (4, generator, 0), (6, frame_flags::ENTRY, 1)], "{family:?}");
        assert_eq!(outcome.stop, StopReason::Complete, "{family:?}: shims take no slot");
    }
}

/// A frame that is being pushed may not be linked to its caller yet: nothing of such a chain is believed.
#[test]
fn frames_being_pushed() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let layout = image.layout;
        if layout.has(flags::FRAME_OBJECTS) {
            continue;
        }
        let code = image.code(1, b"table");
        let root = image.frame(code, 3, 0, 0);
        let pushed = image.frame(code, if layout.has(flags::PREV_INSTR) { -1 } else { 0 }, 0, root);
        if !layout.has(flags::PREV_INSTR) {
            image.memory.put_u64(pushed, layout.frame_previous, 0);
        }
        image.thread(image.interp, THREAD, pushed);
        let outcome = image.walk();
        assert_eq!((outcome.stop, outcome.frames.len()), (StopReason::EnteringEval, 0), "{family:?}");
    }
}

/// The evaluator's own frame on the C stack is linked, and is not yet marked as one: it has no code object either. With a
/// frame before it the same chain was cut, and its frames are kept.
#[test]
fn an_entry_frame_before_it_has_its_owner() {
    for family in Family::ALL {
        let layout = family.layout();
        let linked = Layout::present(layout.frame_owner);
        for (callees, expected) in [(0, StopReason::EnteringEval), (1, StopReason::NotACodeObject)] {
            let mut image = Image::new(family);
            let none = image.code(0, b"");
            image.memory.put_u64(none, layout.ob_type, CODE_TYPE + 8);
            let code = image.code(1, b"table");
            let root = image.frame(code, 3, 0, 0);
            let entry = image.frame(none, 1, 0, root);
            let mut leaf = image.frame(code, 1, 0, entry);
            for _ in 0..callees {
                leaf = image.frame(code, 1, 0, leaf);
            }
            image.thread(image.interp, THREAD, leaf);
            let outcome = image.walk();
            let expected = if linked { expected } else { StopReason::NotACodeObject };
            let kept = if expected == StopReason::EnteringEval { 0 } else { callees + 1 };
            assert_eq!((outcome.stop, outcome.frames.len()), (expected, kept), "{family:?}");
        }
    }
}

#[test]
fn the_root_sentinel_is_no_frame() {
    let mut image = Image::new(Family::BaseFrame);
    let sentinel = image.frame(0, 0, 0, 0);
    let shim = image.frame(0, 0, OWNER_SHIM, sentinel);
    let code = image.code(1, b"");
    let leaf = image.frame(code, 1, 0, shim);
    let tstate = image.thread(image.interp, THREAD, leaf);
    image.memory.put_u64(tstate, image.layout.tstate_base_frame, sentinel);
    let outcome = image.walk();
    assert_eq!((outcome.stop, outcome.frames.len()), (StopReason::Complete, 1));
}

/// Not mapped, not canonical, the kernel's.
const NOWHERE: [u64; 5] = [8, 0xdead_0000, 0x8000_0000_0000_0000, 0xffff_8880_0000_0000, u64::MAX];

/// Every reason that the walk itself can give, each by the smallest lie that leads to it.
#[test]
fn every_reason_is_reached() {
    let mut reached = BTreeSet::new();
    let mut case = |family, expected: StopReason, lie: &dyn Fn(&mut Image)| {
        let mut image = Image::new(family);
        lie(&mut image);
        let outcome = image.walk();
        assert_eq!(outcome.stop, expected, "{family:?}");
        reached.insert(expected);
    };
    for &family in families() {
        let objects = family.layout().has(flags::FRAME_OBJECTS);
        case(family, StopReason::Complete, &|image| drop(image.stack(3)));
        case(family, StopReason::NoThreadState, &|image| {
            image.thread(image.interp, THREAD + 1, 0);
        });
        case(family, StopReason::RuntimeNotInitialized, &|image| {
            image.memory.put_u64(RUNTIME, image.layout.runtime_interpreters_head, 0);
        });
        case(family, StopReason::RuntimeNotInitialized, &|image| drop(image.memory.pieces.remove(&RUNTIME)));
        case(family, StopReason::NoFrame, &|image| {
            image.thread(image.interp, THREAD, 0);
        });
        // What ends with a bound of thousands of steps takes Miri minutes.
        let slow = !cfg!(miri);
        if slow {
            case(family, StopReason::ThreadListTooLong, &|image| {
                let tstate = image.thread(image.interp, THREAD + 1, 0);
                image.memory.put_u64(tstate, image.layout.tstate_next, tstate);
            });
        }
        // A ring of interpreters without threads.
        if slow {
            case(family, StopReason::ThreadListTooLong, &|image| {
                image.memory.put_u64(image.interp, image.layout.interp_next, image.interp);
            });
        }
        for nowhere in NOWHERE {
            case(family, StopReason::UnreadableThread, &|image| {
                image.memory.put_u64(image.interp, image.layout.interp_threads_head, nowhere);
            });
            case(family, StopReason::UnreadableFrame, &|image| {
                let (_, frames) = image.stack(3);
                image.memory.put_u64(frames[1], image.layout.frame_previous, nowhere);
            });
            case(family, StopReason::UnreadableCode, &|image| {
                let (_, frames) = image.stack(3);
                image.memory.put_u64(frames[1], image.layout.frame_code, nowhere);
            });
        }
        case(family, StopReason::NotACodeObject, &|image| {
            let code = image.code(1, b"");
            image.memory.put_u64(code, image.layout.ob_type, CODE_TYPE + 8);
            let frame = image.frame(code, 1, 0, 0);
            image.thread(image.interp, THREAD, frame);
        });
        if slow {
            case(family, StopReason::TooDeep, &|image| {
                let (_, frames) = image.stack(2);
                image.memory.put_u64(frames[1], image.layout.frame_previous, frames[0]);
            });
        }
        case(family, StopReason::BadInstruction, &|image| {
            let (_, frames) = image.stack(1);
            if objects {
                // Overflows in units of two only.
                image.memory.put_u32(frames[0], image.layout.frame_instr, i32::MAX.cast_unsigned());
                image.layout.instr_unit = 2;
            } else {
                image.memory.put_u64(frames[0], image.layout.frame_instr, 0x1234);
            }
        });
        if slow && image_has_owners(family) {
            case(family, StopReason::TailCallFailed, &|image| {
                let (_, frames) = image.stack(2);
                let shim = image.frame(0, 0, OWNER_SHIM, 0);
                image.memory.put_u64(shim, image.layout.frame_previous, shim);
                image.memory.put_u64(frames[1], image.layout.frame_previous, shim);
            });
        }
        if objects {
            case(family, StopReason::AmbiguousThread, &|image| {
                let (_, frames) = image.stack(1);
                image.thread(image.interp, THREAD, frames[0]);
            });
        }
    }
    // Neither of the last can be without a known stack.
    let mut others = vec![StopReason::EnteringEval, StopReason::UnknownThread];
    if cfg!(miri) {
        others.extend([StopReason::ThreadListTooLong, StopReason::TooDeep, StopReason::TailCallFailed]);
    }
    for reason in StopReason::ALL.into_iter().filter(|reason| !reason.is_native()) {
        assert_eq!(!others.contains(&reason), reached.contains(&reason), "{reason:?}");
    }
}

fn image_has_owners(family: Family) -> bool {
    family.layout().owner_shim_min <= u32::from(OWNER_SHIM)
}

#[test]
fn the_gil_is_told_exactly() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let (tstate, _) = image.stack(1);
        let layout = image.layout;
        let holds = |image: &Image| {
            let facts = facts(image, tstate);
            assert_eq!(facts.status & status::UNKNOWN, 0, "{family:?}");
            facts.status & status::HAS_GIL != 0
        };
        assert!(!holds(&image), "{family:?}");
        let (gil, base) = if image.gil == 0 { (RUNTIME, layout.runtime_gil) } else { (image.gil, 0) };
        if Layout::present(layout.runtime_gil) || image.gil != 0 {
            image.memory.put_u32(gil, base + layout.gil_locked, 1);
            image.memory.put_u64(gil, base + layout.gil_last_holder, tstate);
        }
        assert!(!holds(&image), "{family:?}: the thread's own mark is missing");
        if Layout::present(layout.tstate_holds_gil) {
            image.memory.put_u32(tstate, layout.tstate_holds_gil, 1);
        } else if Layout::present(layout.tstate_status) {
            image.memory.put_u32(tstate, layout.tstate_status, u32::MAX);
        } else {
            image.memory.put_u64(RUNTIME, layout.runtime_tstate_current, tstate);
        }
        assert!(holds(&image), "{family:?}");
    }
}

/// Functions that call themselves, and functions of one file, have what is read of them once.
#[test]
fn what_was_just_read_is_not_read_again() {
    for &family in families() {
        let reads = |of: &str| {
            let mut image = Image::new(family);
            image.interpreter();
            let mut codes = [1, 2, 3].map(|line| image.code(line, b"12345678"));
            if of == "one function" {
                codes = [codes[0]; 3];
            } else if of == "one file" {
                let file = image.text("f.py");
                for code in codes {
                    image.memory.put_u64(code, image.layout.code_filename, file);
                }
            }
            let leaf = codes.iter().fold(0, |previous, &code| image.frame(code, 3, 0, previous));
            image.thread(image.interp, THREAD, leaf);
            let outcome = image.walk();
            assert_eq!((outcome.stop, outcome.frames.len()), (StopReason::Complete, 3), "{family:?}");
            image.memory.reads.get()
        };
        let (different, file, function) = (reads("three files"), reads("one file"), reads("one function"));
        assert!(function < file && file < different, "{family:?}: {function}, {file}, {different}");
    }
}

/// Whichever read fails, the walk ends, with a reason, and what it gave until then is what it gives without the fault.
#[test]
fn every_read_may_fail() {
    for &family in families() {
        let mut image = Image::new(family);
        image.interpreter();
        image.thread(image.interp, THREAD + 8, 0);
        let (tstate, _) = image.stack(if cfg!(miri) { 2 } else { 5 });
        image.thread(image.interp, THREAD + 16, 0);
        let whole = image.walk();
        assert_eq!(whole.stop, StopReason::Complete);
        let reads = image.memory.reads.get();
        assert!(reads > 10, "{family:?}: {reads}");
        let mut reasons = BTreeSet::new();
        for failing in 0..reads {
            image.memory.reads.set(0);
            image.memory.failing = Some(failing);
            let outcome = image.walk();
            reasons.insert(outcome.stop);
            // A table that cannot be read gives another fingerprint; nothing else may change.
            for (cut, frame) in outcome.frames.iter().zip(&whole.frames) {
                assert_eq!((cut.code, cut.lasti), (frame.code, frame.lasti), "{family:?}, read {failing}");
            }
            assert!(outcome.frames.len() == whole.frames.len() || outcome.stop != StopReason::Complete);
        }
        for reason in [StopReason::UnreadableThread, StopReason::UnreadableFrame, StopReason::UnreadableCode] {
            assert!(reasons.contains(&reason), "{family:?}: {reasons:?}");
        }
        image.memory.reads.set(0);
        image.memory.failing = None;
        let thread = image.copied(tstate).expect("readable");
        let facts = || {
            thread_facts(
                &image.memory,
                &image.layout,
                (&image.entry, WANTED),
                tstate,
                &thread,
                &mut InterpBuffer::default(),
            )
        };
        let whole = facts();
        let reads = image.memory.reads.get();
        for failing in 0..reads {
            let memory = image::Memory { failing: Some(failing), reads: 0.into(), ..image.memory.clone() };
            let cut = thread_facts(
                &memory,
                &image.layout,
                (&image.entry, WANTED),
                tstate,
                &thread,
                &mut InterpBuffer::default(),
            );
            assert!(cut.status & status::HAS_GIL == 0 && cut.status & status::ON_CPU != 0, "{family:?}");
            assert!(cut.interp_id == whole.interp_id || cut.interp_id == -1);
        }
    }
}
