//! The search for a thread's state in made-up memory: whose it is, which of several, and how it goes on in the next sample.

mod image;

use image::{Family, Image, Memory, RUNTIME, THREAD, WANTED};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{MAX_THREAD_STEPS, THREADS_PER_STEP};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::StackBuffer;
use tachyon_common::walk::{
    Found, OwnStack, SlotBuffer, StackScan, THREAD_POINTER_REACH, ThreadPointer, ThreadSearch, entered_here,
    read_slots, read_u64, runs_here, verify_thread,
};

/// A stack that has every address.
const EVERYWHERE: OwnStack = OwnStack { sp: 1, end: u64::MAX };
/// One that is not known.
const NOT_KNOWN: OwnStack = OwnStack { sp: 0, end: 0 };

/// Whether a thread state is a thread's.
fn verified(image: &Image, wanted: ThreadPointer, tstate: u64) -> bool {
    image.copied(tstate).is_ok_and(|thread| verify_thread(&image.layout, wanted, &thread))
}

/// The state that a search gives, or why there is none.
fn searched(image: &Image, stack: OwnStack, slots: &SlotBuffer) -> Result<u64, StopReason> {
    let search = ThreadSearch::start(&image.memory, &image.layout, &image.entry, WANTED, stack, false);
    match search.expect("it starts").step(&image.memory, &image.layout, slots) {
        Found::State { tstate, .. } => Ok(tstate),
        Found::Stop(reason) => Err(reason),
        other => panic!("{other:?}"),
    }
}

/// A child that was just forked has an empty list and a main interpreter; where there is neither, nothing has begun.
#[test]
fn a_list_that_is_emptied_for_a_moment_has_the_main_interpreter() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        let (tstate, _) = image.stack(3);
        let head = image.layout.runtime_interpreters_head;
        image.memory.put_u64(RUNTIME, head, 0);
        let started =
            |image: &Image| ThreadSearch::start(&image.memory, &image.layout, &image.entry, WANTED, NOT_KNOWN, false);
        assert_eq!(started(&image).expect_err("no interpreter"), StopReason::RuntimeNotInitialized, "{family:?}");
        image.memory.put_u64(RUNTIME, head + Layout::MAIN_AFTER_HEAD, image.interp);
        let mut search = started(&image).expect("an interpreter");
        let found = search.step(&image.memory, &image.layout, &SlotBuffer::default());
        assert!(matches!(found, Found::State { tstate: it, .. } if it == tstate), "{family:?}: {found:?}");
    }
}

/// What cannot be read has not begun, or is being copied after a fork: that is no thread without a state.
#[test]
fn a_page_that_is_copied_is_no_runtime_that_has_not_begun() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        drop(image.memory.pieces.remove(&RUNTIME));
        let why = |forked| {
            let started = ThreadSearch::start(&image.memory, &image.layout, &image.entry, WANTED, NOT_KNOWN, forked);
            started.expect_err("nothing to read")
        };
        assert_eq!(why(false), StopReason::RuntimeNotInitialized, "{family:?}");
        assert_eq!(why(true), StopReason::UnreadableThread, "{family:?}");
    }
}

/// Whoever has the memory of a state that was freed during the search may have a zero where the next one stood.
#[test]
fn a_freed_state_ends_no_list() {
    for family in Family::ALL {
        let mut image = Image::new(family);
        image.stack(3);
        let freed = image.thread(image.interp, THREAD + 4096, 0);
        let (next, interp) = (image.layout.tstate_next, image.layout.tstate_interp);
        image.memory.put_u64(freed, next, 0);
        assert_eq!(searched(&image, NOT_KNOWN, &SlotBuffer::default()), Err(StopReason::NoThreadState), "{family:?}");
        image.memory.put_u64(freed, interp, 0x1234);
        assert_eq!(
            searched(&image, NOT_KNOWN, &SlotBuffer::default()),
            Err(StopReason::UnreadableThread),
            "{family:?}"
        );
    }
}

/// 3.10 to 3.12: what runs on the thread's own C stack, whoever made the state; of several the one that lies lower.
#[test]
fn a_state_is_its_whose_stack_it_runs_on() {
    for family in [Family::CFrame, Family::CFrameShims] {
        let mut image = Image::new(family);
        let (low, frames) = image.stack(1);
        let (high, _) = image.stack(2);
        let borrowed = image.thread(image.interp, THREAD + 4096, frames[0]);
        let cframe = |tstate| read_u64(&image.memory, tstate, image.layout.tstate_cframe).expect("readable");
        let from = |tstate| OwnStack { sp: cframe(tstate), end: u64::MAX };
        let slots = SlotBuffer::default();
        assert_eq!(searched(&image, EVERYWHERE, &slots), Ok(low), "{family:?}");
        assert_eq!(searched(&image, from(high), &slots), Ok(high), "{family:?}");
        assert_eq!(searched(&image, from(borrowed), &slots), Ok(borrowed), "{family:?}: made by another thread");
        let elsewhere = OwnStack { sp: 8, end: 16 };
        assert_eq!(searched(&image, elsewhere, &slots), Err(StopReason::UnknownThread), "{family:?}");
        let here = |stack, tstate| runs_here(&image.layout, tstate, stack, &image.copied(tstate).expect("readable"));
        assert!(here(from(low), low) && !here(from(high), low) && here(NOT_KNOWN, low), "{family:?}");
    }
}

/// 3.12 and later take the bound state, wherever it stands; of several the one that the C library keeps for the thread.
#[test]
fn one_of_several_thread_states() {
    for family in [Family::CurrentFrame, Family::Tagged, Family::BaseFrame] {
        let thread_local = family.layout().version_hex >= 0x030f_0000;
        let mut image = Image::new(family);
        let second = image.interpreter();
        let (unbound, frames) = image.stack(1);
        image.memory.put_u32(unbound, image.layout.tstate_status, 0);
        let bound = image.thread(second, THREAD, frames[0]);
        assert_eq!(image.walk().tstate, bound, "{family:?}");
        let holds = |address, tstate| verified(&image, ThreadPointer { address, reach: 0 }, tstate);
        assert!(holds(THREAD, bound));
        assert!(!holds(THREAD, unbound));
        assert!(!holds(THREAD + 8, bound));
        assert!(!holds(THREAD, 8));
        let borrowed = image.thread(second, THREAD + 4096, frames[0]);
        let other = image.thread(second, THREAD, frames[0]);
        let mut slots = SlotBuffer::default();
        assert_eq!(searched(&image, EVERYWHERE, &slots), Err(StopReason::AmbiguousThread), "{family:?}");
        for kept in [bound, other, borrowed] {
            let descriptor = image.descriptor(kept, if thread_local { 0x300 - 64 } else { 0x300 + 0x310 + 2 * 16 + 8 });
            read_slots(
                &image.memory,
                &image.layout,
                ThreadPointer { address: descriptor + 0x300, reach: 0 },
                &mut slots,
            );
            assert_eq!(searched(&image, EVERYWHERE, &slots), Ok(kept), "{family:?}");
        }
        let own = OwnStack { sp: 4096, end: 8192 };
        let entered = [0, 4096, 8191, 8192, 4095].map(|at| entered_here(&image.layout, own, at));
        assert_eq!(entered, [true, true, true, false, false], "{family:?}");
    }
}

#[test]
fn as_many_threads_as_one_sample_may_search() {
    for family in [Family::FrameObjects, Family::CurrentFrame] {
        let mut image = Image::new(family);
        let (tstate, _) = image.stack(1);
        let most = if cfg!(miri) { 70 } else { MAX_THREAD_STEPS as usize * THREADS_PER_STEP - 2 };
        for other in 0..most as u64 {
            image.thread(image.interp, THREAD + 64 + other, 0);
        }
        assert_eq!(image.walk().tstate, tstate, "{family:?}");
    }
}

/// arm64: the pointer lies behind the thread's descriptor, a libc's constant above the `thread_id`.
#[test]
fn a_thread_pointer_behind_the_descriptor() {
    const GLIBC: u64 = 1_856;
    let reach = u64::from(THREAD_POINTER_REACH);
    for family in [Family::CFrame, Family::CurrentFrame] {
        let mut image = Image::new(family);
        // Descriptors lie a stack apart, and lists are in no order.
        let below = image.thread(image.interp, THREAD - 0x2_0000, 0);
        let (tstate, _) = image.stack(1);
        image.thread(image.interp, THREAD + 0x2_0000, 0);
        let found = |address| {
            let wanted = ThreadPointer { address, reach };
            let mut search = ThreadSearch::start(&image.memory, &image.layout, &image.entry, wanted, NOT_KNOWN, false)
                .expect("it starts");
            search.step(&image.memory, &image.layout, &SlotBuffer::default())
        };
        assert_eq!(found(THREAD + GLIBC), Found::State { tstate, unique: true }, "{family:?}");
        assert_eq!(found(THREAD - 0x2_0000 + GLIBC), Found::State { tstate: below, unique: true }, "{family:?}");
        assert_eq!(found(THREAD - 8), Found::Stop(StopReason::NoThreadState), "{family:?}: it is never below");
        assert_eq!(found(THREAD + 0x1_0000), Found::Stop(StopReason::NoThreadState), "{family:?}: nor far above");
        let is_it = |address| verified(&image, ThreadPointer { address, reach }, tstate);
        assert!(is_it(THREAD + GLIBC) && !is_it(THREAD - 8) && !is_it(THREAD + reach + 1));
    }
}

/// A search that takes several samples, over a list that changes between them.
#[test]
fn a_search_goes_on_where_it_was_broken_off() {
    let families: &[Family] =
        if cfg!(miri) { &[Family::CFrame] } else { &[Family::FrameObjects, Family::CFrame, Family::CurrentFrame] };
    for &family in families {
        let mut image = Image::new(family);
        let last = image.stack(1).0;
        let mut others = Vec::new();
        for other in 0..3 * THREADS_PER_STEP as u64 {
            others.push(image.thread(image.interp, THREAD + 64 + other, 0));
        }
        let start = |image: &Image| {
            ThreadSearch::start(&image.memory, &image.layout, &image.entry, WANTED, NOT_KNOWN, false)
                .expect("the search starts")
        };
        let mut earlier = start(&image);
        // One step a sample; new threads come at the head.
        let mut samples = 0;
        let found = loop {
            samples += 1;
            image.thread(image.interp, THREAD + 8, 0);
            let mut search = start(&image);
            search.go_on_from(&image.memory, &image.layout, &earlier);
            match search.step(&image.memory, &image.layout, &SlotBuffer::default()) {
                Found::More => earlier = search,
                found => break found,
            }
            assert!(samples < 10, "{family:?}: it never ends");
        };
        assert_eq!(found, Found::State { tstate: last, unique: true }, "{family:?}");
        assert_eq!(samples, 4, "{family:?}");

        // The state where it stopped is freed, and its memory is something else's: the search starts over.
        let head = start(&image);
        let mut search = head;
        image.memory.put_u64(earlier.tstate, image.layout.tstate_interp, 0x6666);
        search.go_on_from(&image.memory, &image.layout, &earlier);
        assert_eq!((search.tstate, search.interp), (head.tstate, head.interp), "{family:?}");
        image.memory.put_u64(earlier.tstate, image.layout.tstate_interp, image.interp);
        // A match it had found is none any more, or there were several.
        let matched = ThreadSearch { matches: 1, best: others[0], ..earlier };
        search.go_on_from(&image.memory, &image.layout, &matched);
        assert_eq!((search.tstate, search.matches), (head.tstate, 0), "{family:?}");
        search.go_on_from(&image.memory, &image.layout, &ThreadSearch { matches: 2, best: last, ..earlier });
        assert_eq!((search.tstate, search.matches), (head.tstate, 0), "{family:?}");
        search.go_on_from(&image.memory, &image.layout, &ThreadSearch { matches: 1, best: last, ..earlier });
        assert_eq!((search.tstate, search.after, search.detour), (last, earlier.tstate, 1), "{family:?}");
    }
}

/// A function's large variable has pages that it never wrote: the look for a frame goes on behind them.
#[test]
fn a_frame_is_found_behind_pages_that_were_never_written() {
    const STACK: u64 = 0x7fff_0000_0000;
    const FRAME: u64 = 0x5555_0000_1230;
    let mut memory = Memory::default();
    for page in [0, 3 * 4096] {
        memory.pieces.insert(STACK + page, vec![0; 4096]);
    }
    memory.put_u64(STACK + 3 * 4096, 2048, FRAME);
    let stack = OwnStack { sp: STACK + 64, end: u64::MAX };
    let found = |frame, registers| {
        let (mut scan, mut buffer) = (StackScan::default(), StackBuffer::default());
        scan.frame = frame;
        (0..StackScan::PIECES).for_each(|_| scan.go_on(&memory, stack, &registers, &mut buffer));
        scan.place
    };
    assert_eq!(found(FRAME, [0; 16]), STACK + 3 * 4096 + 2048);
    assert_eq!(found(FRAME, [FRAME; 16]), 1, "a register has it, too");
    assert_eq!(found(FRAME + 8, [0; 16]), 0);
}
