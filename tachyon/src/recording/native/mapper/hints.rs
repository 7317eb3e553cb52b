//! What a process's memory shows about the code that it runs: words of its stacks, and generated code.

use crate::remote::{MappedPath, Mapping, PAGE, RemoteProcess};
use crate::types::RemoteAddr;
use crate::unwind::{PREFIX, Slice, Table, trampolines};
use gimli::LittleEndian;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Bytes that are read of such a stack.
const STACK: u64 = 32 << 10;

/// Most pieces of code that are taken from the words of stacks at a time.
const MAX_HINTS: usize = 128;

/// Words that point into the same piece of code, of this size, count as one.
const HINT_SHIFT: u32 = 18;

/// An address in the main thread's stack, as far from its end as [`hints`] reads.
pub(super) fn main_stack(maps: &[Mapping]) -> Option<u64> {
    let stack = maps.iter().find(|mapping| mapping.path == MappedPath::Special(b"[stack]".to_vec()))?;
    Some(stack.end.saturating_sub(STACK).max(stack.start))
}

/// Where the callers may be on stacks that end for want of rules: a walk shows one such caller at a time, and a stack goes
/// through many files. Any word may be a return address; one that is not merely costs some rules that nobody needed.
pub(super) fn hints(process: &RemoteProcess, maps: &[Mapping], stacks: &BTreeSet<u64>) -> Vec<u64> {
    let mut found: HashMap<u64, u64> = HashMap::new();
    for &sp in stacks {
        let first = sp / PAGE as u64;
        let pages: Vec<u64> = (first..=sp.saturating_add(STACK - 1) / PAGE as u64).collect();
        for (number, page) in pages.iter().zip(process.read_pages(&pages)) {
            let begin = if *number == first { (sp % PAGE as u64) as usize & !7 } else { 0 };
            for word in page[begin..].as_chunks::<8>().0 {
                let word = u64::from_le_bytes(*word).wrapping_sub(1);
                let at = maps.partition_point(|mapping| mapping.end <= word);
                let of_file =
                    maps.get(at).is_some_and(|mapping| mapping.contains(word) && mapping.file_path().is_some());
                if of_file && found.len() < MAX_HINTS {
                    found.entry(word >> HINT_SHIFT).or_insert(word);
                }
            }
        }
    }
    found.into_values().collect()
}

/// Rules of generated code that is recognised by its instructions, by the start of its mapping.
pub(super) fn trampolines_of(process: &RemoteProcess, maps: &[Mapping]) -> HashMap<u64, Arc<Table>> {
    let mut found: HashMap<u64, Arc<Table>> = HashMap::new();
    for mapping in maps.iter().filter(|mapping| mapping.path == MappedPath::Anonymous) {
        let mut bytes = [0; PREFIX];
        if process.read_memory(RemoteAddr(mapping.start), &mut bytes).is_err() {
            continue;
        }
        if let Some(table) = trampolines(Slice::new(&bytes, LittleEndian)) {
            let same = found.values().find(|known| ***known == table).cloned();
            found.insert(mapping.start, same.unwrap_or_else(|| Arc::new(table)));
        }
    }
    found
}
