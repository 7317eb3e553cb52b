//! Threads that are recorded, found by their tasks.
//!
//! Most have a slot of an array, whose look-up is some instructions of the program itself; those whose slot is another thread's are in
//! a hash map.

use super::counts;
use crate::maps::{SLOTS_TAKEN, THREAD_SLOTS, THREADS_SEEN};
use crate::sample;
use tachyon_common::wait::{self, SeenThread, ThreadSlot};

/// `BPF_NOEXIST`.
const ONLY_IF_NEW: u64 = 1;

/// A slot, and whose it is.
#[inline(always)]
fn slot(index: u32) -> Option<(&'static mut ThreadSlot, u64)> {
    let slot = THREAD_SLOTS.get_ptr_mut(index)?;
    // SAFETY: a live map value; one CPU at a time switches the thread that has it, and who wakes that one writes fields of its own.
    let slot = unsafe { &mut *slot };
    // SAFETY: a field of it, which is written whole.
    let task = unsafe { core::ptr::read_volatile(&raw const slot.task) };
    Some((slot, task))
}

/// Gives a slot to a task, or to none.
#[inline(always)]
fn set_task(slot: &mut ThreadSlot, task: u64) {
    // SAFETY: a field of a live map value.
    unsafe { core::ptr::write_volatile(&raw mut slot.task, task) };
}

/// A thread that is followed.
#[inline(always)]
pub fn find(task: u64) -> Option<&'static mut SeenThread> {
    let (slot, holder) = slot(wait::thread_slot(task))?;
    if holder == task {
        return Some(&mut slot.thread);
    }
    // SAFETY: as of a slot.
    THREADS_SEEN.get_ptr_mut(&task).map(|seen| unsafe { &mut *seen })
}

/// Follows a thread from now on; false when there is no room.
#[inline(always)]
pub fn follow(task: u64, seen: &SeenThread) -> bool {
    if take_slot(task, seen) || THREADS_SEEN.insert(&task, seen, 0).is_ok() {
        return true;
    }
    counts(sample::bank(), |counts| counts.threads_without_room += 1);
    false
}

#[inline(always)]
fn take_slot(task: u64, seen: &SeenThread) -> bool {
    let index = wait::thread_slot(task);
    let Some((slot, holder)) = slot(index) else { return false };
    // Of several CPUs that find it free one is let in.
    if holder != 0 || SLOTS_TAKEN.insert(&index, &task, ONLY_IF_NEW).is_err() {
        return false;
    }
    slot.thread = *seen;
    // Last: now it is found.
    set_task(slot, task);
    true
}

/// Follows it no more: it never runs again.
#[inline(always)]
pub fn forget(task: u64) {
    let index = wait::thread_slot(task);
    match slot(index) {
        Some((slot, holder)) if holder == task => {
            set_task(slot, 0);
            // Last: whoever takes the slot from now on finds it free.
            let _free = SLOTS_TAKEN.remove(&index);
        }
        _ => {
            let _gone = THREADS_SEEN.remove(&task);
        }
    }
}
