//! Which thread states exist, and which threads of the kernel they belong to.

use super::{Deadline, Target};
use crate::remote::Task;
use std::collections::{HashMap, HashSet};
use tachyon_common::layout::Layout;
use tachyon_common::walk::{Unreadable, UserMemory, newest_interpreter, read_u64};

/// Most thread states looked at: further ones that a target lists are not believed.
const MAX_STATES: usize = 65_536;

/// Readings of the thread list: it may change while it is read, which shows as a state that is not one.
const MAX_READINGS: usize = 8;

/// Bytes of a thread's control block (`struct pthread`: glibc's has 2,304, musl's 200) that are searched for its tid.
const CONTROL_BLOCK: usize = 1024;

/// A `PyThreadState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThreadState {
    pub tstate: u64,
    /// Its `PyInterpreterState`.
    pub interp: u64,
    /// `pthread_self()`.
    pub thread_id: u64,
    /// `gettid()` in its own pid namespace, where known.
    pub ns_tid: Option<u32>,
}

/// Why the list of thread states could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum ListProblem {
    #[error("the list of its threads leads in a circle")]
    Circle,
    #[error("the list of its threads has more than {MAX_STATES} entries")]
    TooLong,
    #[error("the list of its threads cannot be read to its end")]
    Unreadable,
    #[error("its runtime is not initialized, or finalized already")]
    NotInitialized,
}

/// All thread states of all interpreters, newest interpreter and newest thread first, as far as they could be read.
pub(super) fn states<M: UserMemory + ?Sized>(
    memory: &M,
    target: &Target<'_>,
    deadline: Deadline,
) -> (Vec<ThreadState>, Option<ListProblem>) {
    let mut last = once(memory, target);
    for _ in 1..MAX_READINGS {
        if !matches!(last.1, Some(ListProblem::Unreadable)) || deadline.passed() {
            break;
        }
        last = once(memory, target);
    }
    last
}

fn once<M: UserMemory + ?Sized>(memory: &M, target: &Target<'_>) -> (Vec<ThreadState>, Option<ListProblem>) {
    let mut states = Vec::new();
    let problem = collect(memory, target, &mut states).unwrap_or(Some(ListProblem::Unreadable));
    (states, problem)
}

fn collect<M: UserMemory + ?Sized>(
    memory: &M,
    target: &Target<'_>,
    states: &mut Vec<ThreadState>,
) -> Result<Option<ListProblem>, Unreadable> {
    let layout = &target.layout;
    let mut seen = HashSet::new();
    let mut interp = newest_interpreter(memory, layout, target.entry.runtime)?;
    if interp == 0 {
        return Ok(Some(ListProblem::NotInitialized));
    }
    while interp != 0 {
        if !seen.insert(interp) {
            return Ok(Some(ListProblem::Circle));
        }
        let mut tstate = read_u64(memory, interp, layout.interp_threads_head)?;
        while tstate != 0 {
            if !seen.insert(tstate) {
                return Ok(Some(ListProblem::Circle));
            }
            if seen.len() > MAX_STATES {
                return Ok(Some(ListProblem::TooLong));
            }
            // A state that is freed while the list is walked may lead anywhere.
            if read_u64(memory, tstate, layout.tstate_interp)? != interp {
                return Err(Unreadable);
            }
            let native = match Layout::present(layout.tstate_native_thread_id) {
                true => u32::try_from(read_u64(memory, tstate, layout.tstate_native_thread_id)?).ok(),
                false => None,
            };
            let thread_id = read_u64(memory, tstate, layout.tstate_thread_id)?;
            states.push(ThreadState { tstate, interp, thread_id, ns_tid: native.filter(|&tid| tid != 0) });
            tstate = read_u64(memory, tstate, layout.tstate_next)?;
        }
        interp = read_u64(memory, interp, layout.interp_next)?;
    }
    Ok(None)
}

/// Fills in the tids of thread states that do not have them.
///
/// `thread_id` is the address of the thread's control block, in which the C library keeps the tid. Where in the block
/// differs between libraries: it is the place at which every thread's block holds the tid of one of the process's
/// threads, each a different one. Returns whether there is such a place.
pub(super) fn find_tids<M: UserMemory + ?Sized>(memory: &M, states: &mut [ThreadState], tasks: &[Task]) -> bool {
    let wanted: HashSet<u32> = tasks.iter().map(|task| task.ns_tid).collect();
    let unknown = |state: &&mut ThreadState| state.ns_tid.is_none() && state.thread_id != 0;
    let addresses: HashSet<u64> = states.iter_mut().filter(unknown).map(|state| state.thread_id).collect();
    let blocks: HashMap<u64, Vec<u32>> = addresses.into_iter().map(|at| (at, control_block(memory, at))).collect();
    let place = (0..CONTROL_BLOCK / 4).find(|&place| {
        let mut met = HashSet::new();
        let tid = |words: &Vec<u32>| words.get(place).copied().filter(|tid| wanted.contains(tid));
        !blocks.is_empty() && blocks.values().all(|words| tid(words).is_some_and(|tid| met.insert(tid)))
    });
    let Some(place) = place else { return blocks.is_empty() };
    for state in states.iter_mut().filter(unknown) {
        state.ns_tid = blocks.get(&state.thread_id).and_then(|words| words.get(place)).copied();
    }
    true
}

/// The words at `address`, as many as can be read.
pub(super) fn control_block<M: UserMemory + ?Sized>(memory: &M, address: u64) -> Vec<u32> {
    let mut bytes = [0; CONTROL_BLOCK];
    let mut len = CONTROL_BLOCK;
    while len >= 128 {
        let (block, _) = bytes.split_at_mut(len);
        if memory.read(address, block).is_ok() {
            return block.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
        }
        len /= 2;
    }
    Vec::new()
}

/// Address of the GIL that an interpreter's threads take; a free-threaded build has one too, usually switched off.
pub(super) fn gil_of<M: UserMemory + ?Sized>(memory: &M, target: &Target<'_>, interp: u64) -> Option<u64> {
    let layout = &target.layout;
    if Layout::present(layout.interp_ceval_gil) {
        return read_u64(memory, interp, layout.interp_ceval_gil).ok();
    }
    Some(target.entry.runtime.wrapping_add(u64::from(layout.runtime_gil)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Control blocks of 256 bytes from address 0x1000 on.
    struct Blocks(Vec<[u32; 64]>);

    impl UserMemory for Blocks {
        fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
            let bytes: Vec<u8> = self.0.iter().flatten().flat_map(|word| word.to_ne_bytes()).collect();
            let start = usize::try_from(addr.checked_sub(0x1000).ok_or(Unreadable)?).map_err(|_| Unreadable)?;
            into.copy_from_slice(bytes.get(start..start + into.len()).ok_or(Unreadable)?);
            Ok(())
        }
    }

    fn state(thread_id: u64) -> ThreadState {
        ThreadState { tstate: thread_id, interp: 8, thread_id, ns_tid: None }
    }

    fn tasks(tids: &[u32]) -> Vec<Task> {
        tids.iter().map(|&tid| Task { tid: tid + 5000, ns_tid: tid, comm: String::new(), state: 'S' }).collect()
    }

    #[test]
    fn the_place_of_the_tid_is_the_one_that_fits_all_threads() {
        let mut blocks = [[0; 64]; 2];
        // Both hold the first thread's tid in one place, and their own in another.
        (blocks[0][4], blocks[1][4]) = (70, 70);
        (blocks[0][9], blocks[1][9]) = (70, 71);
        let mut states = vec![state(0x1000), state(0x1100), state(0)];
        assert!(find_tids(&Blocks(blocks.to_vec()), &mut states, &tasks(&[70, 71, 72])));
        assert_eq!(states.iter().map(|state| state.ns_tid).collect::<Vec<_>>(), [Some(70), Some(71), None]);
        let mut states = vec![state(0x1000), state(0x1100)];
        assert!(!find_tids(&Blocks(blocks.to_vec()), &mut states, &tasks(&[70, 72])), "no place fits both");
        assert_eq!(states[1].ns_tid, None);
        assert!(!find_tids(&Blocks(Vec::new()), &mut states, &tasks(&[70])));
        assert!(find_tids(&Blocks(Vec::new()), &mut [], &tasks(&[70])));
    }
}
