//! Native stacks whose unwind tables the kernel side did not have yet, walked to their end: it has sent a copy of what lay on the
//! stack, and the rules are read from the files.

use super::News;
use super::spaces::{AddressSpace, Code, Spaces};
use crate::events::{head, with_native};
use crate::remote::ledger::{self, Work};
use crate::types::{KtimeNs, Pid};
use crate::unwind::{RuleAt, SparseRules};
use foldhash::fast::RandomState;
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};
use tachyon_common::event::{SampleRecord, StackRecord, status};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Rule, Space, StackBuffer, Tables, no_table};
use tachyon_common::walk::{Unreadable, UserMemory};

/// Most copies that wait for their samples, which follow at once: those of other CPUs may come in between.
const MAX_HELD: usize = 256;

/// Longest wait for the mapper to read what a process has mapped: it may be making tables.
const PATIENCE: Duration = Duration::from_millis(100);
/// After a wait in vain, there is none for this long.
const NO_PATIENCE: Duration = Duration::from_secs(1);

/// Copies of stacks, and the rules to walk them with.
pub(in crate::recording) struct Copies {
    spaces: Arc<Spaces>,
    mapper: Sender<News>,
    /// It is not waited for before then.
    waits_from: Instant,
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
    /// What could be read in one piece, by address.
    pieces: Vec<(u64, Vec<u8>)>,
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
    pub fn new(spaces: Arc<Spaces>, mapper: Sender<News>) -> Self {
        let (held, rules, buffer) = (HashMap::default(), SparseRules::default(), Box::default());
        Self { spaces, mapper, waits_from: Instant::now(), held, rules, buffer }
    }

    /// Lets go of rules, and of the files that they were read from: by now, the kernel side has tables of what goes on. What is held
    /// still is of samples that never came.
    pub fn begin_profile(&mut self) {
        self.held.clear();
        self.rules = SparseRules::default();
    }

    /// Keeps a part of a copy until its sample comes.
    pub fn hold(&mut self, record: &StackRecord, bytes: &[u8]) {
        if let Some(held) = self.held.get_mut(&record.tid).filter(|held| held.ktime_ns == record.ktime_ns) {
            held.add(record.start, bytes);
            return;
        }
        if self.held.len() >= MAX_HELD {
            self.held.clear();
        }
        let StackRecord { ktime_ns, entered_at, walk, start, .. } = *record;
        self.held.insert(record.tid, Held { ktime_ns, entered_at, walk, pieces: vec![(start, bytes.to_vec())] });
    }

    /// Walks the stack of a record with these native addresses on from where the kernel side ended, if it has sent a copy. `None`: that
    /// leads no further.
    pub fn finish(&mut self, bytes: &[u8], native: impl Iterator<Item = u64>) -> Option<Finished> {
        let before = head(bytes)?;
        let held = self.held.remove(&before.tid).filter(|held| held.ktime_ns == before.ktime_ns)?;
        let addresses: Vec<u64> = native.collect();
        // Otherwise it is of another walk of the same stack.
        if addresses.len() != held.walk.stored as usize {
            return None;
        }
        let walked = match self.walk(&held, &before, &addresses) {
            Some(walked) if walked.reason != StopReason::UnknownCode => walked,
            _ if self.catch_up(&before) => self.walk(&held, &before, &addresses)?,
            walked => walked?,
        };
        if walked.addresses.len() <= usize::from(before.native_frames) {
            return None;
        }
        let mut record = before;
        // Beyond the copy it is as it was.
        let beyond = walked.reason == StopReason::UnreadableStack;
        record.native_stop = if beyond { before.native_stop } else { walked.reason as u8 };
        record.entered = walked.entered;
        if walked.by_frame_pointer {
            record.status |= status::BY_FRAME_POINTER;
        }
        Some(Finished {
            bytes: with_native(bytes, &record, &walked.addresses)?,
            before,
            last: addresses.last().copied(),
        })
    }

    /// Walks a stack on from its first `addresses`. `None`: nothing is known of its process, or it has cost enough.
    fn walk(&mut self, held: &Held, before: &SampleRecord, addresses: &[u64]) -> Option<Walked> {
        let (space, pid) = (self.spaces.get(before.image, before.instance)?, Pid(before.tgid));
        if !ledger::may(Work::Tables, pid, Duration::ZERO) {
            return None;
        }
        let _charged = ledger::charge(Work::Tables, pid);
        let (mut walk, mut addresses) = (held.walk, addresses.to_vec());
        let again = walk.begin_again(addresses.last().copied());
        addresses.truncate(walk.stored as usize);
        let mut sink = Addresses { addresses, entered: before.entered, entered_at: held.entered_at, again };
        let tables = FileTables { space: &space, rules: RefCell::new(&mut self.rules) };
        let count = space.code().len() as u32;
        let all = Space { image: before.image, first: 0, count, version: 0, _pad: 0 };
        let reason = loop {
            if let Some(reason) = walk.step(held, &tables, all, &mut self.buffer, &mut sink) {
                break reason;
            }
        };
        self.spaces.assembly.add(self.rules.take_assembly());
        let Addresses { addresses, entered, .. } = sink;
        Some(Walked { reason, addresses, entered, by_frame_pointer: walk.by_frame_pointer > 0 })
    }

    /// Has all that a record's process had mapped by then published. Returns whether it was not, and now may be.
    fn catch_up(&mut self, record: &SampleRecord) -> bool {
        let time = KtimeNs(record.ktime_ns);
        if self.spaces.is_seen(record.image, record.instance, time) || Instant::now() < self.waits_from {
            return false;
        }
        let (done, wait) = channel();
        // Either fails if it has panicked, too, which is reported at the end.
        let _ended = self.mapper.send(News::Overtaken { pid: record.tgid, time, done });
        let replied = wait.recv_timeout(PATIENCE).is_ok();
        if !replied {
            self.waits_from = Instant::now() + NO_PATIENCE;
        }
        replied
    }
}

/// Where a walk led.
struct Walked {
    reason: StopReason,
    addresses: Vec<u64>,
    /// [`SampleRecord::entered`].
    entered: u32,
    by_frame_pointer: bool,
}

impl Held {
    /// The next part: the kernel side sends them by address, and [`tachyon_common::limits::STACK_PARTS`] at most.
    fn add(&mut self, start: u64, bytes: &[u8]) {
        let joins = |piece: &&mut (u64, Vec<u8>)| piece.0.wrapping_add(piece.1.len() as u64) == start;
        match self.pieces.last_mut().filter(joins) {
            Some((_, piece)) => piece.extend_from_slice(bytes),
            None => self.pieces.push((start, bytes.to_vec())),
        }
    }
}

impl UserMemory for Held {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let read = |(start, piece): &(u64, Vec<u8>)| {
            let from = usize::try_from(addr.checked_sub(*start)?).ok()?;
            into.copy_from_slice(piece.get(from..from.checked_add(into.len())?)?);
            Some(())
        };
        self.pieces.iter().find_map(read).ok_or(Unreadable)
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
        let mut copies = Copies::new(Arc::new(Spaces::default()), channel().0);
        let part = |ktime_ns, start, tid| StackRecord { ktime_ns, start, tid, ..StackRecord::default() };
        copies.hold(&part(1, 64, 5), &[1; 8]);
        copies.hold(&part(1, 64, 6), &[2; 8]);
        copies.hold(&part(1, 72, 5), &[3; 8]);
        // Behind pages that were never written.
        copies.hold(&part(1, 96, 5), &[4; 8]);
        let held = &copies.held[&5];
        let read = |at, len| {
            let mut bytes = vec![0; len];
            held.read(at, &mut bytes).ok().map(|()| bytes)
        };
        assert_eq!(read(64, 16), Some([[1; 8], [3; 8]].concat()));
        assert_eq!([read(79, 1), read(96, 8)], [Some(vec![3]), Some(vec![4; 8])]);
        let unreadable = [(63, 1), (72, 9), (80, 1), (95, 2), (97, 8), (104, 1), (u64::MAX, 1)];
        assert!(unreadable.iter().all(|&(at, len)| read(at, len).is_none()));
        copies.hold(&part(2, 80, 5), &[5; 8]);
        assert_eq!(copies.held[&5].pieces, [(80, vec![5; 8])]);
        assert_eq!(copies.held[&6].pieces, [(64, vec![2; 8])]);
    }

    #[test]
    fn the_mapper_is_waited_for_where_a_process_may_have_mapped_more() {
        let (spaces, (mapper, told)) = (Arc::new(Spaces::default()), channel());
        let mut copies = Copies::new(Arc::clone(&spaces), mapper);
        spaces.set(1, 2, AddressSpace::default(), KtimeNs(5));
        let record = |ktime_ns| SampleRecord { image: 1, instance: 2, tgid: 3, ktime_ns, ..SampleRecord::default() };
        assert!(!copies.catch_up(&record(5)) && told.try_recv().is_err(), "all that it had mapped is known");
        let replies = std::thread::spawn(move || {
            let Ok(News::Overtaken { pid: 3, time: KtimeNs(6), done }) = told.recv() else { return None };
            done.send(()).ok()?;
            Some(told)
        });
        assert!(copies.catch_up(&record(6)));
        let told = replies.join().expect("it replies").expect("it was asked");
        assert!(!copies.catch_up(&record(7)) && told.try_recv().is_ok(), "it was asked, and does not reply");
        assert!(!copies.catch_up(&record(7)) && told.try_recv().is_err(), "not again so soon");
    }
}
