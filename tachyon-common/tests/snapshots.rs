//! The walk over memory of real processes: each interpreter that CI has, as `cargo xtask snapshots` recorded it, against the
//! stacks that its threads told themselves.

#[path = "../../tests/support/interpreters.rs"]
#[allow(dead_code, reason = "only the list is needed")]
mod interpreters;
mod snapshot;

use interpreters::{INTERPRETERS, Interpreter};
use snapshot::{Captured, Memory, Thread, Walked, compare, walk};
use std::path::Path;
use tachyon_common::event::status;
use tachyon_common::layout::{Layout, flags};
use tachyon_common::limits::SLOTS_READ;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::{THREAD_POINTER_REACH, ThreadPointer, Unreadable, UserMemory};

/// All snapshots: those of the list, without which this panics, and those that bugs have left. Under Miri, which is slow,
/// one of each way to find a thread and its frames.
fn snapshots() -> Vec<(String, Captured)> {
    const FEW: [&str; 3] = ["pyenv_3_9", "pyenv_3_12", "built_3_14t"];
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots");
    let listed = std::fs::read_dir(&dir).expect("the directory is there");
    let names = listed.filter_map(|entry| entry.ok()?.file_name().to_str()?.strip_suffix(".snap").map(str::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort();
    for (wanted, ..) in &INTERPRETERS[..Interpreter::everywhere()] {
        let hint = "hint: `cargo xtask snapshots`";
        assert!(names.iter().any(|name| name == wanted), "{wanted}: no snapshot of this interpreter\n{hint}");
    }
    names.retain(|name| !cfg!(miri) || FEW.contains(&&**name));
    let read = |name: String| {
        let bytes = std::fs::read(dir.join(&name).with_extension("snap")).expect("it can be read");
        (name, Captured::parse(&bytes))
    };
    names.into_iter().map(read).collect()
}

/// The walk of a thread as x86-64 has it.
fn walked(snapshot: &Captured, thread: &Thread) -> Walked {
    let pointer = ThreadPointer { address: thread.pointer, reach: 0 };
    walk(&snapshot.memory, (&snapshot.layout, &snapshot.entry), pointer, thread.sp, &thread.registers)
}

#[test]
fn every_thread_has_the_stack_that_it_told() {
    for (name, snapshot) in snapshots() {
        assert!(snapshot.threads.len() > 2 && snapshot.threads.iter().filter(|thread| thread.main).count() == 1);
        // Each takes Miri ten seconds.
        let most = if cfg!(miri) { 2 } else { snapshot.threads.len() };
        for thread in &snapshot.threads[..most] {
            let first = walked(&snapshot, thread);
            if let Err(differs) = compare(&snapshot.memory, &snapshot.layout, thread, &first) {
                panic!("{name}: {differs}");
            }
            // A second one takes Miri as long again.
            assert!(cfg!(miri) || walked(&snapshot, thread) == first, "{name}: another walk, another result");
            facts(&name, &snapshot, thread, &first);
            for (a, told_a) in first.frames.iter().zip(&thread.frames) {
                for (b, told_b) in first.frames.iter().zip(&thread.frames) {
                    let same = (&told_a.name, told_a.firstlineno) == (&told_b.name, told_b.firstlineno);
                    assert_eq!(a.0.fingerprint == b.0.fingerprint, same, "{name}: {told_a:?}, {told_b:?}");
                }
            }
        }
    }
}

/// The main thread runs, the others sleep.
fn facts(name: &str, snapshot: &Captured, thread: &Thread, walked: &Walked) {
    assert_eq!(walked.facts.interp_id, 0, "{name}");
    let running = thread.main && !snapshot.layout.has(flags::FREE_THREADED);
    let expected = [
        (status::MAIN_THREAD, thread.main),
        (status::HAS_GIL, running),
        (status::UNKNOWN, false),
        (status::HAS_EXCEPTION, false),
        (status::GC, false),
    ];
    for (bit, expected) in expected {
        assert_eq!(walked.facts.status & bit != 0, expected, "{name}: bit {bit:#x}, {thread:?}");
    }
}

/// Memory with a piece of it somewhere else, too.
struct Moved<'a> {
    memory: &'a Memory,
    from: u64,
    to: u64,
}

impl UserMemory for Moved<'_> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let offset = addr.wrapping_sub(self.to);
        let moved = offset < SLOTS_READ as u64;
        self.memory.read(if moved { self.from.wrapping_add(offset) } else { addr }, into)
    }
}

/// arm64, derived from x86-64 by what the C libraries document: the thread pointer lies behind the descriptor, and what
/// the C library keeps for a thread is looked for elsewhere around it. Structures of CPython are the same on both. A real
/// process of arm64 walks in `cargo xtask vm-test --kernel arm64`.
#[test]
#[cfg_attr(miri, ignore = "the same code over the same memory as the test above, and a minute")]
fn the_same_with_a_thread_pointer_of_arm64() {
    for (name, snapshot) in snapshots() {
        let layout = &snapshot.layout;
        for thread in &snapshot.threads {
            // `sizeof(struct pthread)` of glibc 2.36, and about that of musl 1.2.
            let musl = name.starts_with("musl");
            let descriptor = if musl { 200 } else { 1856 };
            let address = thread.pointer + descriptor;
            let thread_local = layout.version_hex >= 0x030f_0000;
            // `read_slots`: where x86-64 has them, and where arm64 does.
            let (from, to) = if musl {
                // It keeps nothing there on either: what happens to lie there is on the stack.
                (address, address)
            } else if thread_local {
                (thread.pointer - SLOTS_READ as u64, address)
            } else {
                (thread.pointer + 0x310, address - (1856 - 0x110))
            };
            let memory = Moved { memory: &snapshot.memory, from, to };
            let pointer = ThreadPointer { address, reach: u64::from(THREAD_POINTER_REACH) };
            // There a search for frame objects is not told the registers.
            let found = walk(&memory, (layout, &snapshot.entry), pointer, thread.sp, &[0; 16]);
            let by_frame = !Layout::present(layout.tstate_cframe) && layout.status_bound_gilstate == 0;
            if by_frame && thread.main && found.stop == StopReason::UnknownThread {
                // 3.8 and 3.9: x86-64's compiler had the running frame in a register, which says nothing of arm64's.
                assert!(found.frames.is_empty(), "{name}");
                continue;
            }
            if let Err(differs) = compare(&memory, layout, thread, &found) {
                panic!("{name}: {differs}");
            }
            facts(&name, &snapshot, thread, &found);
        }
    }
}

/// Whatever cannot be read, no walk gives a frame that the thread does not have there, and none is called complete that is
/// not.
#[test]
#[cfg_attr(miri, ignore = "thousands of walks")]
fn what_cannot_be_read_makes_no_other_stack() {
    for (name, snapshot) in snapshots() {
        for thread in &snapshot.threads {
            let whole = walked(&snapshot, thread);
            for addr in snapshot.memory.0.keys() {
                let mut less = snapshot.clone();
                less.memory.0.remove(addr);
                let found = walked(&less, thread);
                let places = |walked: &Walked| -> Vec<(u64, i32)> {
                    walked.frames.iter().map(|(raw, _)| (raw.code, raw.lasti)).collect()
                };
                let (found_places, all) = (places(&found), places(&whole));
                assert!(all.starts_with(&found_places), "{name} without {addr:#x}: {found:?}");
                if found.stop == StopReason::Complete {
                    assert_eq!(found_places.len(), all.len(), "{name} without {addr:#x}");
                }
            }
        }
    }
}

/// A thread pointer that is no thread's finds nothing, and one of a thread whose frames are not on this stack does not find
/// them.
#[test]
fn nobody_elses_stack() {
    for (name, snapshot) in snapshots() {
        let mut threads: Vec<&Thread> = snapshot.threads.iter().filter(|thread| !thread.main).collect();
        threads.sort_by_key(|thread| thread.pointer);
        let [lower, upper, ..] = threads[..] else { panic!("{name}: fewer than two threads") };
        for strange in [upper.pointer + 4096 * 16, 1] {
            let stranger = Thread { pointer: strange, sp: strange - 1, registers: [0; 16], ..Thread::default() };
            let found = walked(&snapshot, &stranger);
            assert!(found.frames.is_empty() && found.stop != StopReason::Complete, "{name}: {found:?}");
        }
        let layout = &snapshot.layout;
        if Layout::present(layout.tstate_cframe) || layout.status_bound_gilstate != 0 {
            // From there on upwards: the other one's frames lie below.
            assert!(upper.sp > lower.pointer, "{name}: stacks overlap");
            let mixed = Thread { sp: upper.sp, registers: upper.registers, ..lower.clone() };
            let found = walked(&snapshot, &mixed);
            let theirs = compare(&snapshot.memory, layout, lower, &found).is_ok();
            assert!(!theirs, "{name}: a stack that is not on the thread's own: {found:?}");
        }
    }
}
