//! Code in assembly language whose unwind rules are in no `.eh_frame`: the mapper tells where it is, samples are labelled by it.

use crate::recording::follow::lock;
use crate::remote::FileIdentity;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

/// Most files of which that is remembered; then it is forgotten, and stacks through it are not labelled.
const MAX_FILES: usize = 1 << 14;

/// Where such code lies.
#[derive(Debug, Default)]
pub struct Assembly {
    parts: Mutex<Parts>,
    /// How often there was more of it.
    version: AtomicU64,
}

/// By file: parts of it by offset, start and end.
#[derive(Debug, Default)]
pub struct Parts(HashMap<FileIdentity, BTreeMap<u64, u64>>);

impl Assembly {
    /// Adds parts of files, by offset.
    pub fn add(&self, parts: Vec<(FileIdentity, Range<u64>)>) {
        if parts.is_empty() {
            return;
        }
        let mut known = lock(&self.parts);
        if known.0.len() >= MAX_FILES {
            known.0.clear();
        }
        for (file, part) in parts {
            known.0.entry(file).or_default().insert(part.start, part.end);
        }
        drop(known);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Another number each time that there is more of it.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// All that is known.
    pub fn parts(&self) -> MutexGuard<'_, Parts> {
        lock(&self.parts)
    }
}

impl Parts {
    /// Where the function begins that holds an offset of a file.
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
}
