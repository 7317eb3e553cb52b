//! Code in assembly language without unwind rules in `.eh_frame`: the mapper reports where it is, and samples are labelled by
//! it.

use crate::recording::follow::lock;
use crate::remote::FileIdentity;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Most functions that are remembered. Beyond that, those of the file with most are forgotten, and stacks through them are not
/// labelled. OpenBLAS has 869.
const MAX_FUNCTIONS: usize = 1 << 18;

/// Where such code lies.
#[derive(Debug, Default)]
pub struct Assembly {
    parts: Mutex<Parts>,
    /// How often more of it was added.
    version: AtomicU64,
}

/// By file: parts of it by offset, start to end.
#[derive(Debug, Default)]
pub struct Parts(HashMap<FileIdentity, BTreeMap<u64, u64>>);

impl Assembly {
    /// Adds parts of files, by offset.
    pub fn add(&self, parts: Vec<(FileIdentity, Range<u64>)>) {
        if parts.is_empty() {
            return;
        }
        self.parts().add(parts, MAX_FUNCTIONS);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// A number that changes whenever more of it is added.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// All that is known.
    pub fn parts(&self) -> MutexGuard<'_, Parts> {
        lock(&self.parts)
    }
}

impl Parts {
    fn add(&mut self, parts: Vec<(FileIdentity, Range<u64>)>, most: usize) {
        for (file, part) in parts {
            self.0.entry(file).or_default().insert(part.start, part.end);
        }
        while self.0.values().map(BTreeMap::len).sum::<usize>() > most {
            let largest = self.0.iter().max_by_key(|(_, parts)| parts.len()).map(|(&file, _)| file);
            self.0.remove(&largest.expect("there are too many"));
        }
    }

    /// Where the function that holds an offset of a file begins.
    pub fn start(&self, file: FileIdentity, offset: u64) -> Option<u64> {
        let (&start, &end) = self.0.get(&file)?.range(..=offset).next_back()?;
        (offset < end).then_some(start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_found_by_file_and_offset() {
        let file = |inode| FileIdentity { dev: 1, inode, mtime_ns: 0, size: 0 };
        let assembly = Assembly::default();
        assembly.add(Vec::new());
        assert_eq!(assembly.version(), 0, "nothing is no news");
        assembly.add(vec![(file(1), 0x100..0x180), (file(1), 0x200..0x280), (file(2), 0x140..0x150)]);
        assert_eq!(assembly.version(), 1);
        let parts = assembly.parts();
        let starts = [0xff, 0x100, 0x17f, 0x180, 0x200].map(|at| parts.start(file(1), at));
        assert_eq!(starts, [None, Some(0x100), Some(0x100), None, Some(0x200)]);
        assert_eq!([0x13f, 0x140].map(|at| parts.start(file(2), at)), [None, Some(0x140)]);
        assert_eq!(parts.start(file(3), 0x140), None);
    }

    #[test]
    fn the_file_with_most_gives_way() {
        let file = |inode| FileIdentity { dev: 1, inode, mtime_ns: 0, size: 0 };
        let of = |inode, count: u64| (0..count).map(|at| (file(inode), at * 16..at * 16 + 1)).collect();
        let mut parts = Parts::default();
        parts.add(of(1, 3), 10);
        parts.add(of(2, 7), 10);
        assert_eq!([1, 2].map(|inode| parts.start(file(inode), 0)), [Some(0), Some(0)]);
        parts.add(of(3, 1), 10);
        assert_eq!([1, 2, 3].map(|inode| parts.start(file(inode), 0)), [Some(0), None, Some(0)]);
    }
}
