//! The words of `tachyon_common::verdicts`, in a BPF map.

use crate::maps::VERDICTS;
use tachyon_common::limits::CHANGES_BY_HOOKS;
use tachyon_common::verdicts::{self, Words};
pub use tachyon_common::verdicts::{FILTERED, NOT_PYTHON};

struct Map;

impl Words for Map {
    #[inline(always)]
    fn read(&self, index: u32) -> Option<u64> {
        // SAFETY: a word of a map value, which is written whole.
        VERDICTS.get_ptr(index).map(|word| unsafe { core::ptr::read_volatile(word) })
    }

    #[inline(always)]
    fn write(&self, index: u32, value: u64) {
        if let Some(word) = VERDICTS.get_ptr_mut(index) {
            // SAFETY: as above.
            unsafe { core::ptr::write_volatile(word, value) };
        }
    }
}

/// A word that is no verdict; 0 where there is none.
#[inline(always)]
pub fn word(index: u32) -> u64 {
    Map.read(index).unwrap_or(0)
}

/// Writes one.
#[inline(always)]
pub fn set_word(index: u32, value: u64) {
    Map.write(index, value);
}

/// [`verdicts::changes`].
#[inline(always)]
pub fn changes() -> u64 {
    verdicts::changes(&Map)
}

/// [`verdicts::recall`].
#[inline(always)]
pub fn recall(changes: u64, tgid: u32) -> u64 {
    verdicts::recall(&Map, changes, tgid)
}

/// [`verdicts::remember`].
#[inline(always)]
pub fn remember(changes: u64, tgid: u32, verdict: u64) {
    verdicts::remember(&Map, changes, tgid, verdict);
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
