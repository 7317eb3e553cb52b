//! What was decided of processes that are not recorded: on a busy host most runs meet one of these.

use crate::maps::VERDICTS;
use tachyon_common::limits::{CHANGES_BY_HOOKS, CHANGES_BY_USER_SPACE, FIRST_VERDICT, VERDICT_SLOTS};

/// Samples of the process are not wanted.
pub const FILTERED: u64 = 1;
/// It is known not to be CPython.
pub const NOT_PYTHON: u64 = 2;

/// Changes of the process table so far. Read before the table is: what is decided afterwards may be older than that, and
/// then holds under a number that has passed.
#[inline(always)]
pub fn changes() -> u64 {
    let count = |index: u32| match VERDICTS.get_ptr(index) {
        // SAFETY: a word of a map value.
        Some(count) => unsafe { core::ptr::read_volatile(count) },
        None => 0,
    };
    count(CHANGES_BY_HOOKS).wrapping_add(count(CHANGES_BY_USER_SPACE)) << 32
}

#[inline(always)]
fn slot(tgid: u32) -> Option<*mut u64> {
    VERDICTS.get_ptr_mut(FIRST_VERDICT + (tgid & (VERDICT_SLOTS - 1)))
}

/// The process and when it was decided, without what: pids have 22 bits.
#[inline(always)]
fn of(changes: u64, tgid: u32) -> u64 {
    changes | u64::from(tgid & 0xff_ffff) << 8
}

/// What was decided of a process under this number of changes; 0: nothing.
#[inline(always)]
pub fn recall(changes: u64, tgid: u32) -> u64 {
    let Some(slot) = slot(tgid) else { return 0 };
    // SAFETY: a word of a map value, which is written whole.
    let verdict = unsafe { core::ptr::read_volatile(slot) } ^ of(changes, tgid);
    if verdict <= 0xff { verdict } else { 0 }
}

/// Remembers it.
#[inline(always)]
pub fn remember(changes: u64, tgid: u32, verdict: u64) {
    let Some(slot) = slot(tgid) else { return };
    // SAFETY: as above.
    unsafe { core::ptr::write_volatile(slot, of(changes, tgid) | verdict) };
}

/// Says that the process table has been changed.
#[inline(always)]
pub fn changed() {
    if let Some(count) = VERDICTS.get_ptr_mut(CHANGES_BY_HOOKS) {
        add(count, 1);
    }
}

/// Adds to a word of a map value, to which others add too. (The target has no such method of its own.)
#[inline(always)]
pub fn add(word: *mut u64, value: u64) {
    // SAFETY: the callers have the word from a checked lookup.
    unsafe {
        core::arch::asm!("lock *(u64 *)({word} + 0) += {value}", word = in(reg) word, value = in(reg) value);
    }
}
