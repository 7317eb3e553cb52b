//! What is read from single objects: a task's name, who awaits it, the name of a type.

use super::Reader;
use crate::inspect::AwaitLayout;
use crate::symbolize::text;
use std::collections::HashSet;
use tachyon_common::walk::{UserMemory, read_u32, read_u64};

/// Most entries of a set's table, up to four fifths of which may be empty: enough for all tasks that are looked at.
const MAX_SET: u64 = 1 << 20;

/// Most futures that are followed from a task to those that await it.
const MAX_FUTURES: usize = 4096;

/// Longest name of a task, in characters.
const MAX_NAME: u64 = 4096;

/// Longest name of a type that is read.
const MAX_TYPE_NAME: usize = 128;

/// `Py_TPFLAGS_LONG_SUBCLASS` and `Py_TPFLAGS_UNICODE_SUBCLASS` (Include/object.h).
const LONG: u64 = 1 << 24;
const UNICODE: u64 = 1 << 28;

/// Hash of an entry of a set that was removed (`Objects/setobject.c`, `dummy`): no object has it.
const REMOVED: u64 = u64::MAX;

impl<M: UserMemory + ?Sized> Reader<'_, M> {
    /// A task's name. A task without a name of its own has a number: N for `Task-N`.
    pub(super) fn name(&self, task: u64, offset: u64) -> Option<String> {
        let name = self.pointer(task, offset)?;
        let flags = self.word(self.type_of(name)?, self.layout.awaits.type_flags)?;
        match flags & (LONG | UNICODE) {
            LONG => Some(format!("Task-{}", self.integer(name)?)),
            // One that claims to be longer than any name would show the memory behind it.
            UNICODE => {
                let length = self.word(name, u64::from(self.target.layout.unicode_length))?;
                text::read(self.memory, &self.target.layout, name).ok().filter(|_| length <= MAX_NAME)
            }
            _ => None,
        }
    }

    /// The entries of a set.
    pub(super) fn set(&self, set: u64) -> Option<Vec<u64>> {
        let mask = self.word(set, self.layout.awaits.set_mask).filter(|&mask| mask < MAX_SET)?;
        let table = self.pointer(set, self.layout.awaits.set_table)?;
        let mut bytes = vec![0; (usize::try_from(mask).ok()? + 1) * 16];
        self.memory.read(table, &mut bytes).ok()?;
        let entry = |entry: &[[u8; 8]; 2]| (u64::from_ne_bytes(entry[0]), u64::from_ne_bytes(entry[1]));
        let entries = bytes.as_chunks::<8>().0.as_chunks::<2>().0.iter().map(entry);
        Some(entries.filter(|&(key, hash)| key != 0 && hash != REMOVED).map(|(key, _)| key).collect())
    }

    /// The name of an object's type, without its module.
    pub(super) fn kind_of(&self, object: u64) -> Option<String> {
        type_name(self.memory, &self.layout.awaits, self.type_of(object)?)
    }

    pub(super) fn type_of(&self, object: u64) -> Option<u64> {
        self.pointer(object, u64::from(self.target.layout.ob_type))
    }

    /// A positive integer below 2^64, of digits of 30 bits.
    fn integer(&self, object: u64) -> Option<u64> {
        let awaits = &self.layout.awaits;
        // The number of digits from bit 3 on, and the sign below it: 0 is positive, 1 is zero (pycore_long.h).
        let tag = self.word(object, awaits.long_tag)?;
        let digits = match tag & 3 {
            0 => tag >> 3,
            1 => 0,
            _ => return None,
        };
        if digits > 3 {
            return None;
        }
        (0..digits).rev().try_fold(0_u64, |sum, at| {
            let place = object.checked_add(awaits.long_digit + at * 4)?;
            let digit = read_u32(self.memory, place, 0).ok()?;
            sum.checked_mul(1 << 30)?.checked_add(u64::from(digit))
        })
    }
}

/// The name of a type, without its module.
pub(in crate::snapshot) fn type_name<M: UserMemory + ?Sized>(
    memory: &M,
    awaits: &AwaitLayout,
    kind: u64,
) -> Option<String> {
    let name = read_u64(memory, kind.checked_add(awaits.type_name)?, 0).ok().filter(|&name| name != 0)?;
    let mut bytes = [0; MAX_TYPE_NAME];
    // Piece by piece: the memory after a short name may not be there.
    for (at, piece) in bytes.chunks_exact_mut(16).enumerate() {
        if memory.read(name.checked_add(at as u64 * 16)?, piece).is_err() || piece.contains(&0) {
            break;
        }
    }
    let end = bytes.iter().position(|&byte| byte == 0)?;
    let name = String::from_utf8_lossy(bytes.get(..end)?).into_owned();
    Some(name.rsplit('.').next().unwrap_or_default().to_owned())
}

/// Tasks that await a task, also through futures that are not tasks, in order of address: a set's own order depends on addresses.
/// `awaiters` gives what awaits a future; `is_task` tells tasks from other futures.
pub(super) fn awaited_by(
    task: u64,
    awaiters: impl Fn(u64) -> Vec<u64>,
    is_task: impl Fn(u64) -> Option<bool>,
) -> Vec<u64> {
    let (mut tasks, mut seen) = (Vec::new(), HashSet::new());
    let mut futures = vec![task];
    while let Some(future) = futures.pop() {
        for awaiter in awaiters(future) {
            // A task that awaits itself is a cycle of one.
            if seen.len() >= MAX_FUTURES || !seen.insert(awaiter) {
                continue;
            }
            match is_task(awaiter) {
                Some(true) => tasks.push(awaiter),
                Some(false) => futures.push(awaiter),
                None => {}
            }
        }
    }
    tasks.sort_unstable();
    tasks
}
