//! Tasks, those that await them, greenlets, and spans, in made-up memory: what is there, what is torn, and every read that fails.

mod greenlets;
mod program;

use program::{ASYNCIO, CORO_TYPE, INT_TYPE, LAYOUT, Memory, STR_TYPE, TASK_TYPE, TSTATE, program, task};
use tachyon_common::walk::{
    Awaiting, CurrentTasks, MAX_CURRENT_LOOKS, TaskReader, ThreadPointer, running_span, running_task,
};
use tachyon_common::whose::{
    Asyncio, MAX_AWAITING, MAX_AWAITING_SET, MAX_COROUTINES, MAX_LOOPS, Task, ThreadLocal, Whose, flags,
};

fn running(memory: &mut Memory, task: u64) {
    memory.word(TSTATE + 64, task);
}

fn look(memory: &Memory) -> (Whose, u64) {
    let mut whose = Whose::NOBODY;
    let frame = running_task(memory, &LAYOUT, &ASYNCIO, TSTATE, &mut TaskReader::default(), &mut whose);
    (whose, frame)
}

fn name(task: &Task) -> &str {
    std::str::from_utf8(&task.name[..usize::from(task.name_bytes)]).expect("ASCII")
}

/// Follows those that await a task, as the kernel side does: each with the frames of its coroutines.
fn follow(memory: &Memory, task: u64) -> (Awaiting, Task, Vec<Vec<u64>>) {
    let (mut awaiting, mut running, mut stored, mut frames) = (Awaiting::NONE, Task::NONE, 7, Vec::new());
    awaiting.begin(task);
    let mut reader = TaskReader::default();
    let mut turns = 0;
    while turns < 2 * MAX_AWAITING && awaiting.find(memory, &ASYNCIO, &mut reader).is_some() {
        turns += 1;
        let mut looks = 0;
        while awaiting.look(memory) {
            looks += 1;
            assert!(looks <= MAX_AWAITING_SET);
        }
        let before = awaiting.found;
        if !awaiting.take(memory, &LAYOUT, &ASYNCIO, &mut reader, &mut running, stored) {
            break;
        }
        let mut coroutines = 0;
        while awaiting.coroutine(memory, &LAYOUT, &ASYNCIO, &mut reader) {
            coroutines += 1;
            assert!(coroutines <= MAX_COROUTINES);
        }
        let mut own = Vec::new();
        loop {
            let frame = awaiting.frame();
            if frame == 0 {
                break;
            }
            own.push(frame);
            stored += 1;
            awaiting.walked(stored, true);
        }
        if awaiting.found > before {
            frames.push(own);
        }
    }
    (awaiting, running, frames)
}

#[test]
fn the_running_task_is_told() {
    let mut memory = program();
    assert_eq!(look(&memory).0, Whose::NOBODY);
    task(&mut memory, 0x1_0000, "fetch", 2);
    running(&mut memory, 0x1_0000);
    let (whose, frame) = look(&memory);
    assert_eq!((whose.flags, whose.task.address, name(&whose.task)), (flags::TASK, 0x1_0000, "fetch"));
    assert_eq!(frame, 0x1_0400 + 72, "the frame of its outermost coroutine");
}

#[test]
fn a_name_may_be_a_number_and_too_long() {
    let mut memory = program();
    task(&mut memory, 0x1_0000, &"n".repeat(65), 1);
    running(&mut memory, 0x1_0000);
    let long = look(&memory).0.task;
    assert_eq!((name(&long), long.flags), (&*"n".repeat(64), flags::NAME_CUT));
    memory.object(0x1_0100, 48, INT_TYPE);
    memory.word(0x1_0110, 2 << 3);
    memory.put(0x1_0118, &[5_u32.to_ne_bytes(), 1_u32.to_ne_bytes()].concat());
    let numbered = look(&memory).0.task;
    assert_eq!((numbered.number, numbered.flags, numbered.name_bytes), (5 | 1 << 30, flags::NUMBERED, 0));
    memory.word(0x1_0110, 3 << 3);
    assert_eq!(look(&memory).0.task.flags, flags::NAME_UNREADABLE, "no number of tasks has three digits");
    memory.word(0x1_0108, CORO_TYPE);
    assert_eq!(look(&memory).0.task.flags, flags::NAME_UNREADABLE, "neither string nor number");
}

#[test]
fn a_task_of_python_s_own_is_none() {
    let mut memory = program();
    task(&mut memory, 0x1_0000, "small", 1);
    memory.word(TASK_TYPE + 32, 16);
    running(&mut memory, 0x1_0000);
    assert_eq!(look(&memory), (Whose::NOBODY, 0));
}

#[test]
fn those_that_await_are_followed() {
    let mut memory = program();
    for (number, name, depth) in [(1, "child", 1), (2, "parent", 3), (3, "root", 20)] {
        task(&mut memory, number * 0x1_0000, name, depth);
    }
    // A future between the first two, as of `gather`.
    memory.object(0x9_0000, 168, TASK_TYPE);
    memory.word(0x1_0000 + 96, 0x9_0000);
    memory.word(0x9_0000 + 96, 0x2_0000);
    memory.word(0x2_0000 + 96, 0x3_0000);
    let (awaiting, child, frames) = follow(&memory, 0x1_0000);
    let names: Vec<_> = awaiting.tasks[..awaiting.found as usize].iter().map(name).collect();
    assert_eq!((names, child.awaited_by, awaiting.more), (vec!["parent", "root"], 1, 0));
    // Innermost first.
    assert_eq!(frames[0], [0x2_0600, 0x2_0500, 0x2_0400].map(|coro| coro + 72));
    assert_eq!((frames[1].len(), awaiting.tasks[0].frames, awaiting.tasks[1].frames), (16, 3, 16));
    assert_eq!((awaiting.tasks[0].flags, awaiting.tasks[1].flags), (0, flags::INNER_CUT));
}

#[test]
fn of_several_the_least_is_taken_and_their_number_is_told() {
    let mut memory = program();
    task(&mut memory, 0x1_0000, "child", 1);
    memory.object(0x8_0000, 64, 0);
    memory.word(0x8_0000 + 32, 7);
    memory.word(0x8_0000 + 40, 0x8_1000);
    memory.put(0x1_0000 + 109, &[1]);
    memory.word(0x1_0000 + 96, 0x8_0000);
    // Free, taken, taken out, taken.
    for (slot, key, hash) in [(0, 0, 0), (1, 0x3_0000, 5), (2, 0x1_5000, u64::MAX), (3, 0x2_0000, 9)] {
        memory.word(0x8_1000 + slot * 16, key);
        memory.word(0x8_1008 + slot * 16, hash);
    }
    (4..8).for_each(|slot| {
        memory.word(0x8_1000 + slot * 16, 0);
        memory.word(0x8_1008 + slot * 16, 0);
    });
    task(&mut memory, 0x2_0000, "least", 1);
    task(&mut memory, 0x3_0000, "other", 1);
    let (awaiting, child, _) = follow(&memory, 0x1_0000);
    assert_eq!((name(&awaiting.tasks[0]), awaiting.found, child.awaited_by), ("least", 1, 2));
}

/// The chain ends where what awaits is none of C's futures and tasks, or cannot be read, and says so.
#[test]
fn what_is_not_known_is_no_end() {
    let mut memory = program();
    task(&mut memory, 0x1_0000, "child", 1);
    let more = |memory: &Memory| {
        let (awaiting, ..) = follow(memory, 0x1_0000);
        (awaiting.found, awaiting.more)
    };
    assert_eq!(more(&memory), (0, 0), "nobody awaits it");
    memory.word(0x1_0000 + 96, 0xa_0000);
    assert_eq!(more(&memory), (0, 1), "what awaits it cannot be read");
    // An object of Python's own, too small to have a future's fields.
    memory.object(0xa_0000, 168, CORO_TYPE);
    memory.word(CORO_TYPE + 32, 100);
    assert_eq!(more(&memory), (0, 1));
    memory.word(CORO_TYPE + 32, 112);
    assert_eq!(more(&memory), (0, 0), "a future that nobody awaits");
    memory.put(0x1_0000 + 109, &[1]);
    memory.word(0x1_0000 + 96, 0xb_0000);
    assert_eq!(more(&memory), (0, 1), "nor a set");
}

/// A coroutine that runs, in another thread, is called by others; one that has ended has no frame.
#[test]
fn only_frames_that_stand_are_of_a_task_that_awaits() {
    let mut memory = program();
    task(&mut memory, 0x1_0000, "child", 1);
    task(&mut memory, 0x2_0000, "parent", 2);
    memory.word(0x1_0000 + 96, 0x2_0000);
    for state in [0, 1, 4] {
        memory.put(0x2_0500 + 67, &[state]);
        let (awaiting, _, frames) = follow(&memory, 0x1_0000);
        assert_eq!((frames[0].as_slice(), awaiting.tasks[0].flags), (&[0x2_0400 + 72][..], flags::INNER_CUT));
    }
}

/// Tasks that await each other, as a broken program may have them: it ends, and says that there may be more.
/// A dictionary of running tasks in a table of 2^5 indices: 0 is an entry that was taken out.
fn dictionary(memory: &mut Memory, asyncio: &Asyncio, tasks: &[u64]) {
    let held = tasks.iter().filter(|&&task| task != 0).count();
    memory.object(DICT, 48, 0);
    memory.word(DICT + 16, held as u64);
    memory.word(DICT + 32, KEYS);
    memory.object(KEYS, 48 + 32 + 24 * tasks.len() as u64, 0);
    // `dk_log2_size` and `dk_log2_index_bytes`, or `dk_size`.
    memory.word(KEYS + 8, if asyncio.keys_nentries == 24 { 5 | 5 << 8 } else { 32 });
    memory.word(KEYS + u64::from(asyncio.keys_nentries), tasks.len() as u64);
    let start = KEYS + u64::from(asyncio.keys_indices) + 32;
    for (number, task) in tasks.iter().enumerate() {
        memory.word(start + 24 * number as u64 + 16, *task);
    }
}

const DICT: u64 = 0x4000;
const KEYS: u64 = 0x4100;

/// The frames of the running tasks, and what is taken down for each of them.
fn current(memory: &Memory, asyncio: &Asyncio) -> ([u64; MAX_LOOPS], Vec<Whose>) {
    let (mut current, mut frames, mut looks) = (CurrentTasks::NONE, [0; MAX_LOOPS], 0);
    let mut reader = TaskReader::default();
    current.begin(memory, asyncio, DICT);
    while current.look(memory, &LAYOUT, asyncio, &mut reader, &mut frames) {
        looks += 1;
        assert!(looks <= MAX_CURRENT_LOOKS);
    }
    let take = |met| {
        let mut whose = Whose::NOBODY;
        current.take(memory, &LAYOUT, asyncio, met, &mut reader, &mut whose);
        whose
    };
    (frames, (0..=MAX_LOOPS as u32 + 1).map(take).collect())
}

#[test]
fn tasks_of_all_loops_are_told() {
    let mut memory = program();
    (1..=5).for_each(|number| task(&mut memory, number * 0x1_0000, &format!("task {number}"), 1));
    let frame = |number: u64| number * 0x1_0000 + 0x400 + u64::from(ASYNCIO.coro_frame);
    dictionary(&mut memory, &ASYNCIO, &[0x1_0000, 0, 0x2_0000, 0]);
    let (frames, taken) = current(&memory, &ASYNCIO);
    assert_eq!(frames, [frame(2), frame(1), 0, 0], "the newest comes first");
    assert_eq!([name(&taken[1].task), name(&taken[2].task)], ["task 2", "task 1"]);
    assert_eq!(taken[1].task.address, 0x2_0000);
    for none in [0, MAX_LOOPS + 1] {
        assert_eq!(taken[none].flags, 0, "none was met");
    }
    // Of more than four the newest are known.
    dictionary(&mut memory, &ASYNCIO, &[0x1_0000, 0x2_0000, 0x3_0000, 0x4_0000, 0x5_0000]);
    assert_eq!(current(&memory, &ASYNCIO).0, [frame(5), frame(4), frame(3), frame(2)]);
    // What lies further back than is looked at.
    dictionary(&mut memory, &ASYNCIO, &[&[0x1_0000][..], &[0; 16]].concat());
    assert_eq!(current(&memory, &ASYNCIO).0, [0; MAX_LOOPS]);
    // An object that is smaller than a task is none of C's.
    memory.object(0x1_0000, 168, STR_TYPE);
    dictionary(&mut memory, &ASYNCIO, &[0x1_0000]);
    assert_eq!(current(&memory, &ASYNCIO).0, [0; MAX_LOOPS]);
    dictionary(&mut memory, &ASYNCIO, &[0x2_0000, 0x1_0000]);
    assert_eq!(current(&memory, &ASYNCIO).0, [frame(2), 0, 0, 0]);
    // What has no type is nothing, whatever the types were that were looked at before.
    memory.word(0x2_0000 + 8, 0);
    dictionary(&mut memory, &ASYNCIO, &[0x2_0000]);
    assert_eq!(current(&memory, &ASYNCIO).0, [0; MAX_LOOPS]);
    memory.word(0x2_0000 + 8, TASK_TYPE);
    memory.word(0x2_0100 + 8, 0);
    let (frames, taken) = current(&memory, &ASYNCIO);
    assert_eq!((frames[0], taken[1].task.flags), (frame(2), flags::NAME_UNREADABLE));
    memory.word(0x2_0100 + 8, STR_TYPE);
    for empty in [DICT + 16, KEYS + 24] {
        dictionary(&mut memory, &ASYNCIO, &[0x2_0000]);
        memory.word(empty, 0);
        assert_eq!(current(&memory, &ASYNCIO).0, [0; MAX_LOOPS]);
    }
    // A table that is absurdly large.
    dictionary(&mut memory, &ASYNCIO, &[0x2_0000]);
    memory.word(KEYS + 8, 5 | 9 << 8);
    assert_eq!(current(&memory, &ASYNCIO).0, [0; MAX_LOOPS]);
}

/// Up to 3.10: a table says its size, and a coroutine points to its frame.
#[test]
fn tasks_of_all_loops_before_3_11() {
    let asyncio = Asyncio { keys_nentries: 32, keys_indices: 40, coro_frame: 16, coro_points: 1, ..ASYNCIO };
    let mut memory = program();
    task(&mut memory, 0x1_0000, "old", 1);
    memory.word(0x1_0000 + 0x400 + 16, 0xbeef8);
    dictionary(&mut memory, &asyncio, &[0, 0x1_0000]);
    let (frames, taken) = current(&memory, &asyncio);
    assert_eq!((frames[0], name(&taken[1].task)), (0xbeef8, "old"));
    memory.word(KEYS + 8, 0x100);
    assert_eq!(current(&memory, &asyncio).0, [0; MAX_LOOPS], "its indices have two bytes each");
}

#[test]
fn a_circle_ends() {
    let mut memory = program();
    for (number, next) in [(1, 2), (2, 1)] {
        task(&mut memory, number * 0x1_0000, "circle", 1);
        memory.word(number * 0x1_0000 + 96, next * 0x1_0000);
    }
    let (awaiting, _, frames) = follow(&memory, 0x1_0000);
    assert_eq!((awaiting.found as usize, awaiting.more, frames.len()), (MAX_AWAITING, 1, MAX_AWAITING));
    // A coroutine that awaits itself.
    memory.put(0x2_0400 + 67, &[0xff]);
    memory.word(0x2_0400 + 0xf0, 0x2_0400);
    let (awaiting, ..) = follow(&memory, 0x1_0000);
    assert_eq!((awaiting.tasks[0].frames as usize, awaiting.tasks[0].flags), (MAX_COROUTINES, flags::INNER_CUT));
}

#[test]
fn a_span_is_where_its_thread_has_it() {
    let mut memory = Memory::default();
    let pointer = ThreadPointer { address: 0x5000, reach: 0 };
    let span = |memory: &Memory, at: &ThreadLocal| {
        let mut whose = Whose::NOBODY;
        running_span(memory, at, pointer, &mut whose);
        (whose.flags == flags::SPAN).then_some((whose.trace_id, whose.span_id))
    };
    let fixed = ThreadLocal { offset: -16, module: 0, entry_size: 16, vector_at: 8 };
    assert_eq!(span(&memory, &fixed), None);
    memory.word(0x4ff0, 0x7000);
    memory.put(0x7000, &[7; 16]);
    memory.put(0x7010, &[9; 8]);
    memory.put(0x7018, &[1, 0, 0, 0]);
    assert_eq!(span(&memory, &fixed), Some(([7; 16], [9; 8])));
    assert_eq!(span(&memory, &ThreadLocal { entry_size: 0, ..fixed }), None, "no entry of the table");
    // By the vector: glibc's has its length before it, musl's in its first entry.
    for (entry_size, count) in [(16, 0x6000 - 16), (8, 0x6000)] {
        let by_vector = ThreadLocal { offset: 32, module: 3, entry_size, vector_at: 8 };
        memory.word(0x5008, 0x6000);
        memory.word(count, 2);
        memory.word(0x6000 + 3 * u64::from(entry_size), 0x8000);
        memory.word(0x8020, 0x7000);
        assert_eq!(span(&memory, &by_vector), None, "the vector ends before it");
        memory.word(count, 3);
        assert_eq!(span(&memory, &by_vector), Some(([7; 16], [9; 8])));
        memory.word(0x6000 + 3 * u64::from(entry_size), u64::MAX);
        assert_eq!(span(&memory, &by_vector), None, "the thread has not touched it");
    }
    memory.put(0x7018, &[0]);
    assert_eq!(span(&memory, &fixed), None, "it is being written");
    memory.put(0x7018, &[1]);
    memory.put(0x7000, &[0; 16]);
    assert_eq!(span(&memory, &fixed), None, "no trace has the id 0");
}

/// Whatever cannot be read, nothing is told that is not so: each name is one of the program's, or told to be unreadable.
#[test]
fn every_read_may_fail() {
    let mut memory = program();
    for (number, name, depth) in [(1, "child", 1), (2, "parent", 3), (3, "root", 2)] {
        task(&mut memory, number * 0x1_0000, name, depth);
    }
    memory.word(0x1_0000 + 96, 0x2_0000);
    memory.word(0x2_0000 + 96, 0x3_0000);
    running(&mut memory, 0x1_0000);
    dictionary(&mut memory, &ASYNCIO, &[0x2_0000, 0x1_0000]);
    let believable = |task: &Task| {
        ["child", "parent", "root"].contains(&name(task))
            || task.flags & flags::NAME_UNREADABLE != 0 && task.name_bytes == 0
    };
    // Miri takes seconds for each.
    for fails in (0..100).step_by(if cfg!(miri) { 50 } else { 1 }) {
        memory.fails = Some(fails);
        memory.reads.set(0);
        let (whose, _) = look(&memory);
        assert!(whose.flags == 0 || believable(&whose.task), "{fails}: {whose:?}");
        memory.reads.set(0);
        let (_, taken) = current(&memory, &ASYNCIO);
        assert!(
            taken.iter().all(|whose| whose.flags == 0 || whose.task.address == 0 || believable(&whose.task)),
            "{fails}"
        );
        memory.reads.set(0);
        let (awaiting, ..) = follow(&memory, 0x1_0000);
        assert!(awaiting.tasks[..awaiting.found as usize].iter().all(believable), "{fails}: {awaiting:?}");
    }
}
