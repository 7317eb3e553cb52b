//! Native stacks whose unwind tables the kernel side did not have yet, walked to their end: it has sent a copy of what lay on the
//! stack, and the rules are read from the files.

use super::spaces::{AddressSpace, Code, Spaces};
use crate::events::{head, with_native};
use crate::remote::ledger::{self, Work};
use crate::types::Pid;
use crate::unwind::{RuleAt, SparseRules};
use foldhash::fast::RandomState;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tachyon_common::event::{SampleRecord, StackRecord, status};
use tachyon_common::limits::{STACK_PART, STACK_PARTS};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Space, StackBuffer, Tables, no_table};
use tachyon_common::walk::{Unreadable, UserMemory};

/// Most copies that wait for their samples, which follow at once: those of other CPUs may come in between.
const MAX_HELD: usize = 256;

/// Copies of stacks, and the rules to walk them with.
pub(in crate::recording) struct Copies {
    spaces: Arc<Spaces>,
    /// By thread.
    held: HashMap<u32, Held, RandomState>,
    rules: SparseRules,
    buffer: Box<StackBuffer>,
}

/// What lay on a stack.
struct Held {
    ktime_ns: u64,
    entered_at: u64,
    walk: NativeWalk,
    start: u64,
    bytes: Vec<u8>,
}

/// A record whose native stack goes on beyond where the kernel side had no tables.
pub(in crate::recording) struct Finished {
    /// It, as the kernel side would have sent it.
    pub bytes: Vec<u8>,
    /// The record that it did send.
    pub before: SampleRecord,
    /// The last address in that one.
    pub last: Option<u64>,
}

impl Copies {
    /// Holds none yet.
    pub fn new(spaces: Arc<Spaces>) -> Self {
        let held = HashMap::default();
        Self { spaces, held, rules: SparseRules::default(), buffer: Box::default() }
    }

    /// Lets go of rules, and of the files that they were read from: by now, the kernel side has tables of what goes on. What is held
    /// still is of samples that never came.
    pub fn begin_profile(&mut self) {
        self.held.clear();
        self.rules = SparseRules::default();
    }

    /// Keeps a part of a copy until its sample comes.
    pub fn hold(&mut self, record: &StackRecord, bytes: &[u8]) {
        let whole = STACK_PARTS as usize * STACK_PART;
        let goes_on = |held: &&mut Held| {
            held.ktime_ns == record.ktime_ns && held.start.wrapping_add(held.bytes.len() as u64) == record.start
        };
        if let Some(held) = self.held.get_mut(&record.tid).filter(goes_on) {
            if held.bytes.len() + bytes.len() <= whole {
                held.bytes.extend_from_slice(bytes);
            }
            return;
        }
        if self.held.len() >= MAX_HELD {
            self.held.clear();
        }
        let StackRecord { ktime_ns, entered_at, walk, start, .. } = *record;
        self.held.insert(record.tid, Held { ktime_ns, entered_at, walk, start, bytes: bytes.to_vec() });
    }

    /// Walks the stack of a record with these native addresses on from where the kernel side ended, if it has sent a copy. `None`: that
    /// leads no further.
    pub fn finish(&mut self, bytes: &[u8], native: impl Iterator<Item = u64>) -> Option<Finished> {
        let before = head(bytes)?;
        let held = self.held.remove(&before.tid).filter(|held| held.ktime_ns == before.ktime_ns)?;
        let mut addresses: Vec<u64> = native.collect();
        // Otherwise it is of another walk of the same stack.
        if addresses.len() != held.walk.stored as usize {
            return None;
        }
        let pid = Pid(before.tgid);
        let space = self.spaces.get(before.image, before.instance)?;
        if !ledger::may(Work::Tables, pid, Duration::ZERO) {
            return None;
        }
        let _charged = ledger::charge(Work::Tables, pid);
        let (last, mut walk) = (addresses.last().copied(), held.walk);
        let again = walk.begin_again(last);
        addresses.truncate(walk.stored as usize);
        let mut sink = Addresses { addresses, entered: before.entered, entered_at: held.entered_at, again };
        let tables = FileTables { space: &space, rules: RefCell::new(&mut self.rules) };
        let count = space.code().len() as u32;
        let all = Space { image: before.image, first: 0, count, version: 0, _pad: 0 };
        let reason = loop {
            if let Some(reason) = walk.step(&held, &tables, all, &mut self.buffer, &mut sink) {
                break reason;
            }
        };
        self.spaces.assembly.add(self.rules.take_assembly());
        if sink.addresses.len() <= usize::from(before.native_frames) {
            return None;
        }
        let mut record = before;
        // Beyond the copy it is as it was.
        let beyond = reason == StopReason::UnreadableStack;
        record.native_stop = if beyond { before.native_stop } else { reason as u8 };
        record.entered = sink.entered;
        if walk.by_frame_pointer > 0 {
            record.status |= status::BY_FRAME_POINTER;
        }
        Some(Finished { bytes: with_native(bytes, &record, &sink.addresses)?, before, last })
    }
}

impl UserMemory for Held {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let from = addr.checked_sub(self.start).and_then(|from| usize::try_from(from).ok());
        let bytes = from.and_then(|from| self.bytes.get(from..from.checked_add(into.len())?)).ok_or(Unreadable)?;
        into.copy_from_slice(bytes);
        Ok(())
    }
}

/// Takes the addresses.
struct Addresses {
    addresses: Vec<u64>,
    /// [`SampleRecord::entered`].
    entered: u32,
    entered_at: u64,
    /// The next address has been counted already.
    again: bool,
}

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        self.addresses.truncate(index);
        self.addresses.push(address);
    }

    fn arrived(&mut self, _address: u64, sp: u64) {
        if !std::mem::take(&mut self.again) {
            self.entered += u32::from(sp <= self.entered_at);
        }
    }
}

/// Rules of all files of an address space. A range is a mapping.
struct FileTables<'a> {
    space: &'a AddressSpace,
    rules: RefCell<&'a mut SparseRules>,
}

impl FileTables<'_> {
    fn known(&self, code: &Code, address: u64) -> RuleAt {
        let Some(file) = &code.file else { return RuleAt::Refused };
        let offset = address.wrapping_sub(code.start).wrapping_add(code.offset);
        self.rules.borrow_mut().at(file.number(), offset, || file.file().zip(file.identity()))
    }
}

impl Tables for FileTables<'_> {
    type Chunk = ();

    fn range(&self, index: u32) -> Option<Range> {
        let code = self.space.code().get(index as usize)?;
        let bare = code.is_made() || (code.file.is_some() && self.known(code, code.start) == RuleAt::Bare);
        let first_row = if bare { no_table::FRAME_POINTERS } else { no_table::STOP };
        Some(Range { start: code.start, end: code.end, bias: 0, first_row, rows: 0, pages: 0 })
    }

    fn range_start(&self, index: u32) -> Option<u64> {
        self.space.code().get(index as usize).map(|code| code.start)
    }

    fn chunk(&self, _: u32) -> Option<()> {
        None
    }

    fn row(&self, (): (), _: u32) -> Option<Row> {
        None
    }

    /// All rules come from here: there is nothing to search for.
    fn remembered(&self, _: u32, at: u64) -> Option<Rule> {
        let code = self.space.at(at)?;
        match self.known(code, at) {
            RuleAt::Rule(rule) => Some(rule),
            RuleAt::Bare | RuleAt::Refused => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_stack_are_joined_and_those_of_an_older_one_are_dropped() {
        let mut copies = Copies::new(Arc::new(Spaces::default()));
        let part = |ktime_ns, start, tid| StackRecord { ktime_ns, start, tid, ..StackRecord::default() };
        copies.hold(&part(1, 64, 5), &[1; 8]);
        copies.hold(&part(1, 64, 6), &[2; 8]);
        copies.hold(&part(1, 72, 5), &[3; 8]);
        let held = &copies.held[&5];
        let read = |at, len| {
            let mut bytes = vec![0; len];
            held.read(at, &mut bytes).ok().map(|()| bytes)
        };
        assert_eq!(read(64, 16), Some([[1; 8], [3; 8]].concat()));
        assert_eq!(read(79, 1), Some(vec![3]));
        assert_eq!([read(63, 1), read(72, 9), read(80, 1), read(u64::MAX, 1)], [const { None }; 4]);
        copies.hold(&part(2, 80, 5), &[4; 8]);
        assert_eq!((copies.held[&5].start, copies.held[&5].bytes.len()), (80, 8));
        assert_eq!(copies.held[&6].bytes, [2; 8]);
    }
}
