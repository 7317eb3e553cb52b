//! Verdicts: what is remembered of a process is found under the same number of changes only, and never for another process.

use std::cell::RefCell;
use tachyon_common::limits::{CHANGES_BY_HOOKS, CHANGES_BY_USER_SPACE, FIRST_VERDICT, VERDICT_SLOTS};
use tachyon_common::verdicts::{FILTERED, NOT_PYTHON, Words, changes, recall, remember};

struct Memory(RefCell<Vec<u64>>);

impl Memory {
    fn new() -> Self {
        Self(RefCell::new(vec![0; (FIRST_VERDICT + VERDICT_SLOTS) as usize]))
    }

    fn change(&self, index: u32) {
        self.0.borrow_mut()[index as usize] += 1;
    }
}

impl Words for Memory {
    fn read(&self, index: u32) -> Option<u64> {
        self.0.borrow().get(index as usize).copied()
    }

    fn write(&self, index: u32, word: u64) {
        self.0.borrow_mut()[index as usize] = word;
    }
}

#[test]
fn nothing_is_known_at_first() {
    let words = Memory::new();
    for tgid in [1, 2, VERDICT_SLOTS, 4_194_303] {
        assert_eq!(recall(&words, changes(&words), tgid), 0, "{tgid}");
    }
}

#[test]
fn the_last_verdict_holds_until_the_table_changes() {
    let words = Memory::new();
    for by in [CHANGES_BY_HOOKS, CHANGES_BY_USER_SPACE] {
        let before = changes(&words);
        remember(&words, before, 77, FILTERED);
        remember(&words, before, 77, NOT_PYTHON);
        assert_eq!(recall(&words, changes(&words), 77), NOT_PYTHON);
        words.change(by);
        assert_eq!(recall(&words, changes(&words), 77), 0, "{by}");
        // What was decided under an earlier table is written late.
        remember(&words, before, 77, FILTERED);
        assert_eq!(recall(&words, changes(&words), 77), 0, "{by}");
    }
}

#[test]
fn processes_that_share_a_slot_are_told_apart() {
    let words = Memory::new();
    let (one, other) = (5, 5 + VERDICT_SLOTS);
    let now = changes(&words);
    remember(&words, now, one, FILTERED);
    assert_eq!((recall(&words, now, one), recall(&words, now, other)), (FILTERED, 0));
    remember(&words, now, other, NOT_PYTHON);
    assert_eq!((recall(&words, now, one), recall(&words, now, other)), (0, NOT_PYTHON));
}

#[test]
fn the_largest_pids_are_told_apart_too() {
    let words = Memory::new();
    let now = changes(&words);
    // PID_MAX_LIMIT is 2^22.
    for tgid in (0..1 << 22).step_by(VERDICT_SLOTS as usize) {
        assert_eq!(recall(&words, now, tgid + 1), 0, "{tgid}");
        remember(&words, now, tgid + 1, FILTERED);
        assert_eq!(recall(&words, now, tgid + 1), FILTERED, "{tgid}");
    }
}
