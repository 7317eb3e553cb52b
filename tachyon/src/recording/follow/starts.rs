//! Executables that do not start as CPython.
//!
//! Most programs that start on a host are not CPython, and are the same few again and again. Looking at each takes longer than
//! everything else that is done for it, and delays whatever starts beside it. What a process has mapped at its `exec` follows
//! from its executable. So once an executable has turned out to have nothing to do with Python, its next process is not looked
//! at until it maps something more: a mapping event reports that, and shows a CPython in a library (`libpython`).

use crate::kernel::FileKey;
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tachyon_common::event::ProcessRecord;

/// How long this is remembered: a file that replaces another may get its inode number. If the new one is a CPython in an
/// executable, it is found when it maps an unknown library, or at the look that follows when nothing has been decided for
/// too long.
pub(super) const KNOWN_FOR: Duration = Duration::from_secs(10);
/// Most executables that are remembered. With more distinct ones at a time, all are forgotten.
const MOST: usize = 4096;

/// Executables whose processes had mapped no CPython when they were looked at after their `exec`.
#[derive(Debug, Default)]
pub(super) struct Starts(HashMap<FileKey, Start>);

/// What is known about one executable.
#[derive(Clone, Copy, Debug)]
struct Start {
    /// When that was seen.
    seen: Instant,
    /// Such a process turned out to be CPython after it had mapped more.
    becomes_python: bool,
}

pub(super) const fn executable(exec: &ProcessRecord) -> FileKey {
    FileKey { dev: exec.exe_dev, inode: exec.exe_inode }
}

impl Starts {
    /// Whether a program that starts has mapped no CPython so far.
    pub fn is_other(&self, exec: &ProcessRecord, now: Instant) -> bool {
        self.known(exec, now).is_some()
    }

    /// Whether a program that starts is one that is not expected to become CPython.
    pub fn is_dull(&self, exec: &ProcessRecord, now: Instant) -> bool {
        self.known(exec, now).is_some_and(|known| !known.becomes_python)
    }

    fn known(&self, exec: &ProcessRecord, now: Instant) -> Option<&Start> {
        let known = self.0.get(&executable(exec));
        known.filter(|known| now.saturating_duration_since(known.seen) < KNOWN_FOR)
    }

    /// Notes that a process of this executable runs CPython. True if that was not expected.
    pub fn became_python(&mut self, executable: FileKey) -> bool {
        let known = self.0.get_mut(&executable);
        known.is_some_and(|known| !std::mem::replace(&mut known.becomes_python, true))
    }

    /// Notes that a program was looked at after its start and had mapped no CPython.
    pub fn was_other(&mut self, exec: &ProcessRecord, now: Instant) {
        // The kernel side could not read which executable it is.
        if exec.exe_inode == 0 {
            return;
        }
        if self.0.len() >= MOST {
            self.0.clear();
        }
        self.0.entry(executable(exec)).or_insert(Start { seen: now, becomes_python: false }).seen = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exec_of(dev: u64, inode: u64) -> ProcessRecord {
        ProcessRecord { exe_dev: dev, exe_inode: inode, ..ProcessRecord::default() }
    }

    #[test]
    fn what_was_looked_at_is_known_for_a_while() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        starts.was_other(&exec_of(1, 2), now);
        assert!(starts.is_other(&exec_of(1, 2), now + KNOWN_FOR / 2));
        for other in [exec_of(1, 3), exec_of(2, 2)] {
            assert!(!starts.is_other(&other, now), "{other:?}");
        }
        assert!(!starts.is_other(&exec_of(1, 2), now + KNOWN_FOR));
    }

    #[test]
    fn what_became_python_is_waited_for() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        let exec = exec_of(1, 2);
        assert!(!starts.is_dull(&exec, now), "it is not known");
        starts.was_other(&exec, now);
        assert!(starts.is_dull(&exec, now) && !starts.is_dull(&exec, now + KNOWN_FOR));
        assert!(starts.became_python(executable(&exec)) && !starts.became_python(executable(&exec)));
        assert!(!starts.became_python(executable(&exec_of(1, 3))), "it is not known");
        starts.was_other(&exec, now + KNOWN_FOR);
        assert!(starts.is_other(&exec, now + KNOWN_FOR) && !starts.is_dull(&exec, now + KNOWN_FOR));
        assert_eq!(starts.0.len(), 1);
    }

    #[test]
    fn nothing_is_known_of_what_the_kernel_could_not_read() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        starts.was_other(&exec_of(0, 0), now);
        assert!(!starts.is_other(&exec_of(0, 0), now));
    }

    #[test]
    fn it_is_bounded() {
        let (mut starts, now) = (Starts::default(), Instant::now());
        for inode in 0..10 * MOST as u64 {
            starts.was_other(&exec_of(1, inode), now);
            assert!(starts.0.len() <= MOST);
        }
    }
}
