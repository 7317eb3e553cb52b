//! How much of one process's files may be read before the process is given up.
//!
//! Each file is bounded by itself, but a process may map thousands of them, made to cost us time: without a bound on their
//! sum it could keep the profiler from looking at any other process.

use std::cell::Cell;
use std::io;

use crate::remote::elf::ReadAt;

/// Bytes for all files of one process: CPython's own take 1 to 17 MB (the search for a version string), any other
/// library about 10 kB.
const MAX_BYTES: u64 = 64 << 20;

/// What a read costs beyond its bytes: most reads are of a few bytes, and each is a system call.
const EACH_READ: u64 = 512;

/// What is left for one process.
#[derive(Debug)]
pub(super) struct ReadBudget {
    left: Cell<u64>,
}

impl ReadBudget {
    /// The budget for one process.
    pub(super) fn new() -> Self {
        Self { left: Cell::new(MAX_BYTES) }
    }

    /// Whether a read was refused because of the budget.
    pub(super) fn is_spent(&self) -> bool {
        self.left.get() == 0
    }

    /// Takes the cost of a read, or all that is left if that is not enough.
    fn take(&self, len: usize) -> bool {
        let cost = EACH_READ.saturating_add(len as u64);
        let left = self.left.get().saturating_sub(cost);
        self.left.set(left);
        left > 0
    }
}

/// A file whose reads are paid for.
#[derive(Debug)]
pub(super) struct Metered<'a, R> {
    pub(super) source: R,
    pub(super) budget: &'a ReadBudget,
}

impl<R: ReadAt> ReadAt for Metered<'_, R> {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if !self.budget.take(into.len()) {
            return Err(io::Error::other("the files of this process are too large"));
        }
        self.source.read_exact_at(offset, into)
    }

    fn len_bytes(&self) -> io::Result<u64> {
        self.source.len_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_and_stays_ended() {
        let budget = ReadBudget::new();
        let file = vec![7; 1 << 20];
        let metered = Metered { source: &file[..], budget: &budget };
        let mut into = vec![0; 1 << 20];
        let reads = (0..100).take_while(|_| metered.read_exact_at(0, &mut into).is_ok()).count();
        assert_eq!((reads, into[0], budget.is_spent()), (63, 7, true));
        assert!(metered.read_exact_at(0, &mut [0]).is_err(), "small reads are refused, too");
    }
}
