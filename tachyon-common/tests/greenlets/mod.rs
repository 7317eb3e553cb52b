//! The running greenlet and its parents, in made-up memory: what is there, what is torn, and every read that fails.

use crate::program::{INT_TYPE, LAYOUT, Memory, STR_TYPE, program};
use tachyon_common::walk::{FrameWalk, GreenletWalk, MAX_NAME_LOOKS, TaskReader};
use tachyon_common::whose::{Greenlets, MAX_GREENLETS, Task, ThreadLocal, flags};

/// As in CPython 3.13.
const PLACE: Greenlets = Greenlets {
    state: ThreadLocal { offset: 8, module: 1, entry_size: 16, vector_at: 8 },
    dict: 24,
    implementation: 32,
    stack_state: 56,
    frame_interp: 24,
    type_name: 24,
    dict_used: 16,
    keys_nentries: 24,
    keys_indices: 32,
    values_start: 8,
    _pad: 0,
};

/// The thread's variable, and greenlet's own state of it.
const VARIABLE: u64 = 0x5000;
const STATE: u64 = 0x5100;
const MAIN: u64 = 0x10_0000;
/// A type whose name has a module.
const TYPE: u64 = 0x3000;

/// Words from a greenlet's frame to the main greenlet: they differ between versions.
const TO_MAIN: u64 = 9;

/// A thread whose main greenlet has begun others, each of which has begun the next; the last one runs.
fn thread(count: u64) -> Memory {
    let mut memory = program();
    memory.object(TYPE, 176, 0);
    memory.word(TYPE + 24, TYPE + 0x100);
    memory.put(TYPE + 0x100, b"gevent._gevent_cgreenlet.Greenlet\0");
    memory.put(TYPE + 0x122, &[7; 64]);
    memory.word(VARIABLE, STATE);
    memory.word(STATE, MAIN);
    for number in 0..count {
        greenlet(&mut memory, number, number + 1 == count);
    }
    memory.word(STATE + 8, MAIN + (count - 1) * 0x1_0000);
    memory
}

fn greenlet(memory: &mut Memory, number: u64, running: bool) {
    let at = MAIN + number * 0x1_0000;
    let (state, frame) = (at + 0x1000, at + 0x2000);
    memory.object(at, 40, TYPE);
    memory.word(at + 32, state);
    (0..32).for_each(|word| memory.word(state + word * 8, 0x77));
    memory.word(state + 8, at);
    memory.word(state + 56, 1);
    memory.word(state + 64, if number == 0 { u64::MAX } else { 0x7fff_0000 - number * 0x100 });
    memory.word(state + 104, if running { 0 } else { frame });
    memory.word(frame + 24, frame + 0x100);
    if number > 0 {
        memory.word(state + 104 + 8 * TO_MAIN, MAIN);
        memory.word(state + 104 + 8 * (TO_MAIN + 2), at - 0x1_0000);
    }
}

/// Attributes of a greenlet; its table has hashes, or none, or is shared and has no values.
fn attributes(memory: &mut Memory, number: u64, names: &[(&str, u64)], kind: u8) {
    let at = MAIN + number * 0x1_0000;
    let (dict, keys, values) = (at + 0x4000, at + 0x4100, at + 0x4800);
    memory.word(at + 24, dict);
    memory.object(dict, 48, 0);
    memory.word(dict + 16, names.len() as u64);
    memory.word(dict + 32, keys);
    memory.word(keys, 1);
    memory.put(keys + 8, &[3, 3, kind, 0, 0, 0, 0, 0]);
    memory.word(keys + 16, 0);
    // The number of entries has four bytes.
    memory.word(keys + 24, names.len() as u64);
    memory.word(keys + 32, 0);
    if kind == 2 {
        memory.word(dict + 40, values);
        memory.word(values, 0);
    }
    let (bytes, key) = if kind == 0 { (24, 8) } else { (16, 0) };
    for (slot, (name, value)) in (0..).zip(names) {
        let entry = keys + 40 + slot * bytes;
        let text = at + 0x5000 + slot * 0x100;
        memory.word(entry, 0xdead);
        string(memory, text, name);
        memory.word(entry + key, text);
        memory.word(entry + key + 8, if kind == 2 { 0 } else { *value });
        if kind == 2 {
            memory.word(values + 8 + slot * 8, *value);
        }
    }
}

fn string(memory: &mut Memory, at: u64, text: &str) {
    memory.object(at, 48, STR_TYPE);
    memory.word(at + 16, text.len() as u64);
    memory.put(at + 32, &u32::to_ne_bytes(1 << 2 | 1 << 5 | 1 << 6));
    memory.put(at + 40, text.as_bytes());
    memory.put(at + 40 + text.len() as u64, &[0; 8]);
}

/// The greenlets, as the kernel side finds them, each with the frame at which its stack is walked.
fn look(memory: &Memory) -> (Vec<Task>, Vec<u64>, bool) {
    let mut walk = GreenletWalk::none();
    let (mut reader, mut frames) = (TaskReader::default(), FrameWalk::default());
    let mut found = Vec::new();
    if walk.begin(memory, VARIABLE) {
        while walk.look(memory, &LAYOUT, &PLACE, &mut reader) {
            let mut looks = walk.begin_name(memory, &PLACE);
            assert!(looks <= MAX_NAME_LOOKS);
            while looks > 0 && walk.look_at_name(memory, &LAYOUT, &mut reader) {
                looks -= 1;
            }
            walk.take_name(memory, &LAYOUT, &PLACE, &mut reader);
            if walk.go_on(&mut frames) {
                found.push(frames.next);
                frames.stored += 2;
                walk.walked(frames.stored, true);
            }
        }
    }
    (walk.greenlets[..walk.found as usize].to_vec(), found, walk.more != 0)
}

fn name(task: &Task) -> String {
    let bytes = &task.name[..usize::from(task.name_bytes)];
    let end = bytes.iter().position(|&byte| byte == 0 && task.flags & flags::TYPE_NAME != 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

const OF_TYPE: &str = "gevent._gevent_cgreenlet.Greenlet";

#[test]
fn a_running_greenlet_is_told_with_its_parents() {
    let (greenlets, frames, more) = look(&thread(3));
    let told: Vec<_> = greenlets.iter().map(|task| (task.address, task.frames, task.flags)).collect();
    let at = |number: u64| MAIN + number * 0x1_0000;
    assert_eq!(told, [(at(2), 0, flags::TYPE_NAME), (at(1), 2, flags::TYPE_NAME), (at(0), 2, flags::MAIN)]);
    assert_eq!((frames, more), (vec![at(1) + 0x2100, at(0) + 0x2100], false));
    assert_eq!(greenlets[..2].iter().map(name).collect::<Vec<_>>(), [OF_TYPE; 2]);
}

#[test]
fn parents_can_be_looked_at_again() {
    let (memory, mut walk, mut reader) = (thread(4), GreenletWalk::none(), TaskReader::default());
    assert!(walk.begin(&memory, VARIABLE) && walk.look(&memory, &LAYOUT, &PLACE, &mut reader));
    let mut look_at_parents = || {
        let mut frames = FrameWalk::default();
        frames.stored = 5;
        walk.begin_parents();
        while walk.look(&memory, &LAYOUT, &PLACE, &mut reader) {
            assert!(walk.go_on(&mut frames));
            frames.stored += 2;
            walk.walked(frames.stored, true);
        }
        let told = walk.greenlets[..walk.found as usize].iter().map(|task| (task.address, task.frames));
        (told.collect::<Vec<_>>(), walk.more)
    };
    let first = look_at_parents();
    assert_eq!((first.0.len(), first.1), (4, 0));
    assert_eq!(look_at_parents(), first);
}

#[test]
fn greenlet_2_has_a_word_less() {
    let mut memory = thread(2);
    for number in 0..2 {
        let state = MAIN + number * 0x1_0000 + 0x1000;
        // Everything after the table of virtual functions begins a word earlier.
        let words: Vec<u64> = (2..31).map(|word| word_of(&memory, state + word * 8)).collect();
        words.iter().zip(1..).for_each(|(word, at)| memory.word(state + at * 8, *word));
    }
    let (greenlets, frames, more) = look(&memory);
    assert_eq!((greenlets.len(), frames, more), (2, vec![MAIN + 0x2100], false));
}

fn word_of(memory: &Memory, at: u64) -> u64 {
    tachyon_common::walk::read_u64(memory, at, 0).expect("it is there")
}

#[test]
fn a_thread_that_runs_its_main_one_has_none_to_tell() {
    assert!(look(&thread(1)).0.is_empty());
    for state in [0, 1, 0x9999_0000] {
        let mut memory = thread(3);
        memory.word(VARIABLE, state);
        assert!(look(&memory).0.is_empty(), "{state:#x}");
    }
    assert!(!GreenletWalk::none().begin(&thread(3), 0), "it has no variable");
}

/// While a thread goes from one greenlet to another, the one that is called current has a frame set aside, or has ended.
#[test]
fn while_it_switches_nothing_is_told() {
    for (word, value) in [(104, 0x1234), (56, 0), (64, 0), (64, u64::MAX)] {
        let mut memory = thread(3);
        memory.word(MAIN + 0x2_1000 + word, value);
        assert_eq!(look(&memory), (Vec::new(), Vec::new(), false), "{word}");
    }
}

#[test]
fn more_than_there_is_room_for_are_told() {
    let (greenlets, frames, more) = look(&thread(20));
    assert_eq!((greenlets.len(), frames.len(), more), (MAX_GREENLETS, MAX_GREENLETS - 1, true));
    let (all, _, more) = look(&thread(MAX_GREENLETS as u64));
    assert_eq!((all.len(), more), (MAX_GREENLETS, false));
}

#[test]
fn a_parent_that_is_none_ends_the_stack() {
    let mut memory = thread(3);
    memory.word(MAIN + 0x2_1000 + 104 + 8 * (TO_MAIN + 2), TYPE);
    let (greenlets, frames, more) = look(&memory);
    assert_eq!((greenlets.len(), frames.len(), more), (1, 0, true));
    // One that is its own parent.
    memory.word(MAIN + 0x2_1000 + 104 + 8 * (TO_MAIN + 2), MAIN + 0x1_0000);
    memory.word(MAIN + 0x1_1000 + 104 + 8 * (TO_MAIN + 2), MAIN + 0x1_0000);
    let (greenlets, _, more) = look(&memory);
    assert_eq!((greenlets.len(), more), (MAX_GREENLETS, true));
}

#[test]
fn a_parent_that_has_ended_has_no_frames() {
    let mut memory = thread(3);
    memory.word(MAIN + 0x1_1000 + 56, 0);
    memory.word(MAIN + 0x1_1000 + 104, 0);
    let (greenlets, frames, more) = look(&memory);
    let told: Vec<_> = greenlets.iter().map(|task| (task.frames, task.flags & flags::OUTER_CUT)).collect();
    assert_eq!((told, frames.len(), more), (vec![(0, 0), (0, 0), (2, 0)], 1, false));
}

#[test]
fn its_own_name_comes_first() {
    for kind in 0..3 {
        for before in [0, 1, 15, 16] {
            let mut memory = thread(2);
            string(&mut memory, 0x9000, "pay");
            let others: Vec<String> = (0..before).map(|number| format!("x{number:03}")).collect();
            let mut names: Vec<(&str, u64)> = others.iter().map(|name| (name.as_str(), INT_TYPE)).collect();
            names.extend([("names", INT_TYPE), ("name", 0x9000)]);
            if before < 15 {
                attributes(&mut memory, 1, &names, kind);
                let (greenlets, ..) = look(&memory);
                assert_eq!((name(&greenlets[0]).as_str(), greenlets[0].flags), ("pay", 0), "{kind} {before}");
            } else {
                attributes(&mut memory, 1, &names, kind);
                assert_eq!(name(&look(&memory).0[0]), OF_TYPE, "too far behind: {kind} {before}");
            }
        }
    }
    // A name that is none.
    let mut memory = thread(2);
    attributes(&mut memory, 1, &[("name", TYPE)], 1);
    assert_eq!(name(&look(&memory).0[0]), OF_TYPE);
}

/// Whatever cannot be read, nothing is told that is not so.
#[test]
fn each_read_may_fail() {
    let mut memory = thread(4);
    string(&mut memory, 0x9000, "pay");
    attributes(&mut memory, 3, &[("names", INT_TYPE), ("name", 0x9000)], 0);
    let (whole, ..) = look(&memory);
    assert_eq!(whole.len(), 4);
    let mut cut = 0;
    for fails in (0..80).step_by(if cfg!(miri) { 20 } else { 1 }) {
        memory.reads.set(0);
        memory.fails = Some(fails);
        let (greenlets, _, more) = look(&memory);
        for (found, true_one) in greenlets.iter().zip(&whole) {
            assert_eq!(found.address, true_one.address, "{fails}");
            let unreadable = found.flags & flags::NAME_UNREADABLE != 0;
            assert!(unreadable || name(found) == name(true_one) || name(found) == OF_TYPE, "{fails}: {found:?}");
        }
        let is_short = greenlets.len() < whole.len() && !greenlets.is_empty();
        assert!(!is_short || more, "{fails}");
        cut += usize::from(is_short);
    }
    assert!(cut > 0);
}

#[test]
fn what_lies_at_the_end_of_memory_is_read_nevertheless() {
    let mut memory = thread(2);
    // Its state ends with its parent, where the page does.
    let (old, bytes) = (MAIN + 0x1_1000, 104 + 8 * (TO_MAIN + 3));
    let new = 0x80_0000 - bytes;
    for word in 0..bytes / 8 {
        let value = word_of(&memory, old + word * 8);
        memory.word(new + word * 8, value);
    }
    memory.word(MAIN + 0x1_0000 + 32, new);
    // So does its type's name.
    memory.word(TYPE + 24, 0x90_0000 - 9);
    memory.put(0x90_0000 - 9, b"Greenlet\0");
    let (greenlets, frames, more) = look(&memory);
    assert_eq!((greenlets.len(), frames.len(), more), (2, 1, false));
    assert_eq!(name(&greenlets[0]), "Greenlet");
}
