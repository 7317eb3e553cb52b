//! What was decided of processes that are not recorded: on a busy host most runs meet one of these.
//!
//! One word for each slot, written by all CPUs without a lock and never torn. It holds the process, what was decided, and the
//! number of changes of the process table under which it was: the next change makes all words void. Where they lie is behind
//! [`Words`]: a BPF map, or a test's memory.

use crate::limits::{CHANGES_BY_HOOKS, CHANGES_BY_USER_SPACE, FIRST_VERDICT, VERDICT_SLOTS};

/// Samples of the process are not wanted.
pub const FILTERED: u64 = 1;
/// It is known not to be CPython.
pub const NOT_PYTHON: u64 = 2;

/// Where the words lie. Reading one that is not there gives nothing, writing one does nothing.
pub trait Words {
    /// Reads a word, once and whole.
    fn read(&self, index: u32) -> Option<u64>;
    /// Writes a word, once and whole.
    fn write(&self, index: u32, word: u64);
}

/// Changes of the process table so far. Read before the table is: what is decided afterwards may be older than that, and
/// then holds under a number that has passed.
#[inline(always)]
#[must_use]
pub fn changes(words: &impl Words) -> u64 {
    let count = |index| words.read(index).unwrap_or(0);
    count(CHANGES_BY_HOOKS).wrapping_add(count(CHANGES_BY_USER_SPACE)) << 32
}

#[inline(always)]
const fn slot(tgid: u32) -> u32 {
    FIRST_VERDICT + (tgid & (VERDICT_SLOTS - 1))
}

/// The process and when it was decided, without what: pids have 22 bits.
#[inline(always)]
fn of(changes: u64, tgid: u32) -> u64 {
    changes | u64::from(tgid & 0xff_ffff) << 8
}

/// What was decided of a process under this number of changes; 0: nothing.
#[inline(always)]
#[must_use]
pub fn recall(words: &impl Words, changes: u64, tgid: u32) -> u64 {
    let Some(word) = words.read(slot(tgid)) else { return 0 };
    let verdict = word ^ of(changes, tgid);
    if verdict <= 0xff { verdict } else { 0 }
}

/// Remembers it.
#[inline(always)]
pub fn remember(words: &impl Words, changes: u64, tgid: u32, verdict: u64) {
    words.write(slot(tgid), of(changes, tgid) | verdict);
}
