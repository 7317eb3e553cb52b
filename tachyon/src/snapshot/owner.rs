//! Who owns a thread state that another thread has made: the thread on whose C stack it runs.
//!
//! The same rule as the recorder's (`tachyon-common/src/walk/owner.rs`), the other way round: the kernel side knows one
//! thread's stack and asks which state is on it; here a state is known, and all threads' stacks are searched.

use super::threads::{ThreadState, control_block};
use super::{Deadline, Target, stack};
use crate::remote::{Blocked, MappedPath, Mapping, Task};
use std::collections::HashMap;
use tachyon_common::walk::UserMemory;

/// The upper end of a stack, in which glibc puts the thread's control block.
const UPPER_END: u64 = 16 << 10;

/// Gives each state that runs something the thread on whose stack it runs, as far as that can be found. The others keep the
/// thread that made them.
pub(super) fn settle<M: UserMemory>(
    memory: &M,
    target: &Target<'_>,
    states: &mut [ThreadState],
    tasks: &[Task],
    maps: &[Mapping],
    deadline: Deadline,
) {
    let stack_pointer = |task: &Task| match target.process.blocked(task.tid) {
        Some(Blocked::At { sp, .. }) => Some((sp, task.ns_tid)),
        _ => None,
    };
    let mut sleeping: Vec<(u64, u32)> = Vec::new();
    for task in tasks {
        if deadline.passed() {
            return;
        }
        sleeping.extend(stack_pointer(task));
    }
    let first = tasks.iter().find(|task| task.tid == target.process.pid().0).map(|task| task.ns_tid);
    let blocks = states.iter().filter_map(|state| Some((state.thread_id, state.ns_tid?))).collect();
    let asleep = |task: &&Task| sleeping.iter().any(|(_, ns_tid)| task.ns_tid == *ns_tid);
    let running = tasks.iter().filter(|task| !asleep(task)).map(|task| task.ns_tid).collect();
    let stacks = Stacks { maps, running, sleeping, blocks, first, place: place_of_tid(memory, states) };
    for state in states.iter_mut() {
        if deadline.passed() {
            return;
        }
        let Some(entered) = stack::entered_at(memory, target, state.tstate) else { continue };
        match stacks.owner(memory, state, entered) {
            Owner::Maker => {}
            Owner::Other { ns_tid, thread_id } => (state.ns_tid, state.thread_id) = (Some(ns_tid), thread_id),
            Owner::Unknown => state.ns_tid = None,
        }
    }
}

/// What is known about the threads' stacks.
struct Stacks<'a> {
    maps: &'a [Mapping],
    /// Tids of threads that are running: nothing says where their stacks are.
    running: Vec<u32>,
    /// Stack pointers and tids of threads that are not running.
    sleeping: Vec<(u64, u32)>,
    /// Control blocks and tids of the threads that have made a state: such a block is the upper end of its thread's stack.
    blocks: Vec<(u64, u32)>,
    /// Tid of the process's first thread.
    first: Option<u32>,
    /// Which word of a control block is the thread's tid.
    place: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// The thread whose id it has, or nothing contradicts that.
    Maker,
    Other {
        ns_tid: u32,
        /// 0 where it is not known.
        thread_id: u64,
    },
    /// Not its maker's; nothing says whose.
    Unknown,
}

impl Stacks<'_> {
    /// The owner of a state that has entered the evaluator at this place on a stack.
    fn owner<M: UserMemory + ?Sized>(&self, memory: &M, state: &ThreadState, entered: u64) -> Owner {
        let Some(mapping) = self.maps.iter().find(|mapping| mapping.contains(entered)) else { return Owner::Maker };
        let maker_sleeps = self.sleeping.iter().any(|(_, ns_tid)| state.ns_tid == Some(*ns_tid));
        if !maker_sleeps && self.ends_at(mapping, entered, state.thread_id) {
            return Owner::Maker;
        }
        // On it, and nearest: from glibc 2.42 on, nothing that the kernel shows separates the stacks of two threads.
        let block_of = |ns_tid: u32| self.blocks.iter().find(|(_, of)| *of == ns_tid).map(|(address, _)| *address);
        let on_it = |(sp, ns_tid): &&(u64, u32)| {
            mapping.contains(*sp)
                && *sp <= entered
                && block_of(*ns_tid).is_none_or(|block| entered < block || !mapping.contains(block))
        };
        let sleeper = self.sleeping.iter().filter(on_it).max().map(|(_, ns_tid)| *ns_tid);
        let block = self.control_block(memory, mapping).filter(|(address, _)| self.ends_at(mapping, entered, *address));
        match sleeper.or(block.map(|(_, ns_tid)| ns_tid)) {
            Some(ns_tid) if state.ns_tid == Some(ns_tid) => Owner::Maker,
            Some(ns_tid) => {
                let thread_id = block.filter(|(_, of)| *of == ns_tid).map_or(0, |(address, _)| address);
                Owner::Other { ns_tid, thread_id }
            }
            None if self.ends_at(mapping, entered, state.thread_id) => Owner::Maker,
            None if is_first_stack(mapping) && state.ns_tid != self.first => {
                self.first.map_or(Owner::Unknown, |ns_tid| Owner::Other { ns_tid, thread_id: 0 })
            }
            // Its maker sleeps on another stack.
            None if maker_sleeps => Owner::Unknown,
            // Its maker has a stack elsewhere, and another thread runs: the maker may run on a stack that it made itself, or
            // the other thread may run with this state.
            None if !self.is_own_stack(mapping, state) && self.others_run(state) => Owner::Unknown,
            None => Owner::Maker,
        }
    }

    /// Whether a mapping holds the stack that a state's maker was given: with its control block, or the first thread's.
    fn is_own_stack(&self, mapping: &Mapping, state: &ThreadState) -> bool {
        if state.ns_tid == self.first { is_first_stack(mapping) } else { mapping.contains(state.thread_id) }
    }

    fn others_run(&self, state: &ThreadState) -> bool {
        self.running.iter().any(|ns_tid| state.ns_tid != Some(*ns_tid))
    }

    /// Whether the stack that contains this place may end at that control block: no other thread's stack is known to lie between.
    fn ends_at(&self, mapping: &Mapping, entered: u64, block: u64) -> bool {
        let between = |address: u64| entered < address && address < block;
        mapping.contains(block)
            && entered < block
            && !self.blocks.iter().any(|(address, _)| between(*address))
            && !self.sleeping.iter().any(|(sp, _)| between(*sp))
    }

    /// The control block of the thread whose stack a mapping is, and its tid. The block begins with its own address, which
    /// is repeated two words further on (glibc's `tcbhead_t` on x86-64).
    fn control_block<M: UserMemory + ?Sized>(&self, memory: &M, mapping: &Mapping) -> Option<(u64, u32)> {
        let place = self.place?;
        if cfg!(not(target_arch = "x86_64")) || is_first_stack(mapping) {
            return None;
        }
        let start = mapping.start.max(mapping.end.saturating_sub(UPPER_END));
        let mut bytes = vec![0; usize::try_from(mapping.end - start).ok()?];
        memory.read(start, &mut bytes).ok()?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let itself = |&at: &usize| {
            let address = start + at as u64 * 8;
            words[at] == address && words.get(at + 2) == Some(&address)
        };
        let address = start + (0..words.len()).find(itself)? as u64 * 8;
        Some((address, *control_block(memory, address).get(place)?))
    }
}

fn is_first_stack(mapping: &Mapping) -> bool {
    mapping.path == MappedPath::Special(b"[stack]".to_vec())
}

/// The place in control blocks where the tid is: the one at which the blocks of all states' makers have theirs.
fn place_of_tid<M: UserMemory + ?Sized>(memory: &M, states: &[ThreadState]) -> Option<usize> {
    let makers: HashMap<u64, u32> = states.iter().filter_map(|state| Some((state.thread_id, state.ns_tid?))).collect();
    let blocks: Vec<_> = makers.iter().map(|(&at, &tid)| (control_block(memory, at), tid)).collect();
    let longest = blocks.iter().map(|(block, _)| block.len()).min()?;
    (0..longest).find(|&place| blocks.iter().all(|(block, tid)| block[place] == *tid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tachyon_common::walk::Unreadable;

    /// Memory that cannot be read at all: no control blocks are found in it.
    struct Nothing;

    impl UserMemory for Nothing {
        fn read(&self, _addr: u64, _into: &mut [u8]) -> Result<(), Unreadable> {
            Err(Unreadable)
        }
    }

    fn state(thread_id: u64, ns_tid: u32) -> ThreadState {
        ThreadState { tstate: 1, interp: 2, thread_id, ns_tid: Some(ns_tid) }
    }

    /// The stacks of threads 11, 12 and 13 share one mapping, as from glibc 2.42 on, and end at 0x2000, 0x3000 and 0x4000.
    fn owner(sleeping: &[(u64, u32)], state: &ThreadState, entered: u64) -> Owner {
        beside(sleeping, &[], state, entered)
    }

    fn beside(sleeping: &[(u64, u32)], running: &[u32], state: &ThreadState, entered: u64) -> Owner {
        let line = "1000-5000 rw-p 00000000 00:00 0 \n";
        let maps = crate::remote::parse_maps(line.as_bytes()).expect("a line of maps");
        let blocks = vec![(0x2000, 11), (0x3000, 12), (0x4000, 13)];
        let (running, sleeping) = (running.to_vec(), sleeping.to_vec());
        Stacks { maps: &maps, running, sleeping, blocks, first: Some(10), place: None }.owner(&Nothing, state, entered)
    }

    /// On 3.15 of Debian sid the busy one of three threads was shown as running no Python, 7 times out of 25: its state went to
    /// the thread that slept below it.
    #[test]
    fn a_running_thread_keeps_its_state_beside_sleeping_ones() {
        let asleep = [(0x1800, 11), (0x2800, 12)];
        assert_eq!(owner(&asleep, &state(0x4000, 13), 0x3f00), Owner::Maker);
        assert_eq!(owner(&asleep, &state(0x2000, 11), 0x1f00), Owner::Maker);
        // A thread without a state sleeps on a stack of its own.
        assert_eq!(owner(&[(0x1100, 19)], &state(0x4000, 13), 0x3f00), Owner::Maker);
    }

    #[test]
    fn a_borrowed_state_is_that_of_the_thread_on_whose_stack_it_runs() {
        let asleep = [(0x1800, 11), (0x2800, 12), (0x3800, 13)];
        let other = |ns_tid| Owner::Other { ns_tid, thread_id: 0 };
        assert_eq!(owner(&asleep, &state(0x4000, 13), 0x1f00), other(11));
        assert_eq!(owner(&asleep[..2], &state(0x4000, 13), 0x2f00), other(12));
        // Made by the first thread, which also runs: 1 of some 500 dumps on 3.15 showed it as the first thread's.
        let of_first = state(0x9000, 10);
        assert_eq!(beside(&[], &[10, 11], &of_first, 0x1f00), Owner::Unknown);
        assert_eq!(beside(&[(0x1800, 11)], &[10], &of_first, 0x1f00), other(11));
        // Alone, it may have made itself a stack.
        assert_eq!(beside(&[], &[10], &of_first, 0x4800), Owner::Maker);
        // Its maker sleeps elsewhere, and it is not known who runs.
        assert_eq!(owner(&asleep[..1], &state(0x2000, 11), 0x3f00), Owner::Unknown);
    }
}
