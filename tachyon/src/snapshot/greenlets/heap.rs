//! All greenlets of a process, found among the objects that its garbage collector tracks.
//!
//! Nothing else leads to them: greenlet keeps no list, and one that is switched away is on no thread. The collector links all objects
//! that may be part of a reference cycle into a few circular lists, which may have millions of entries. The newest are at the end of a
//! list, so each look goes back from there to where the previous look began; it also goes forward from where the previous look stopped,
//! so that after some looks everything has been visited, and is visited again.

use super::super::Deadline;
use super::super::memory::Pages;
use crate::inspect::GreenletLayout;
use std::collections::{BTreeSet, HashMap};
use tachyon_common::walk::{UserMemory, read_u64};

/// Bytes before an object that hold the collector's links (`PyGC_Head`): next, previous.
const HEAD: u64 = 16;

/// Bits of both links that the collector uses for other things (`Include/internal/pycore_gc.h`).
const FLAGS: u64 = 7;

/// Most lists per interpreter: 3.8 to 3.15 have four or five.
const MAX_LISTS: usize = 16;

/// Most objects that a look goes back over in a list, and that it goes forward over once all have been visited.
const BACK: usize = 1 << 14;
const FORWARD: usize = 1 << 10;

/// How many objects are looked at between two checks of the clock. Each may be on its own page, which is kept until then.
const AT_A_TIME: usize = 1 << 12;

/// Most greenlets.
pub(super) const MAX_GREENLETS: usize = 65_536;

/// Most base classes between a type and greenlet's own, and most types whose answer is kept.
const MAX_BASES: usize = 64;
const MAX_TYPES: usize = 1 << 16;

/// Looks after which types are asked anew.
const TYPES_LAST: u32 = 64;

/// `tp_name` of greenlet's own type.
const TYPE_NAME: &[u8] = b"greenlet.greenlet\0";

/// The greenlets that have been found, and where the search goes on.
#[derive(Debug, Default)]
pub(in crate::snapshot) struct Heap {
    pub(in crate::snapshot) greenlets: BTreeSet<u64>,
    /// Types by their addresses: whether their instances are greenlets. Another type may take the place of one that is freed, so they
    /// are asked anew now and then.
    types: HashMap<u64, bool>,
    looks: u32,
    /// By the address of a list's head.
    lists: HashMap<u64, Progress>,
}

/// How far a list has been gone through.
#[derive(Debug, Default)]
struct Progress {
    /// The last entry at the previous look.
    last: u64,
    /// Where to go on forward: an entry that has already been looked at.
    reached: Option<u64>,
    /// Its end has been reached at least once.
    complete: bool,
}

/// How a walk along a list ended.
enum Part {
    /// At its head: everything on that side has been visited.
    Head,
    /// At the entry that was asked for.
    Known,
    /// There is more after this entry.
    More(u64),
    /// The list is changing: the collector is running, or the entry has been taken out of it.
    Torn,
}

/// The list to walk along.
struct List<'a> {
    head: u64,
    /// The heads of all lists.
    heads: &'a [u64],
    layout: &'a GreenletLayout,
    deadline: Deadline,
}

/// An object and its links.
struct Entry {
    next: u64,
    previous: u64,
    kind: u64,
}

impl Heap {
    /// Looks for greenlets in an interpreter whose collector's state is at `state`. Returns whether all of its objects have been visited,
    /// including those made since the previous look.
    pub(super) fn look<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &GreenletLayout,
        state: u64,
        deadline: Deadline,
    ) -> bool {
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(TYPES_LAST) {
            self.types.clear();
        }
        let heads = heads(memory, state, layout.collector.size);
        let mut complete = !heads.is_empty();
        for &head in &heads {
            let mut progress = self.lists.remove(&head).unwrap_or_default();
            complete &= self.look_at(memory, &List { head, heads: &heads, layout, deadline }, &mut progress);
            self.lists.insert(head, progress);
        }
        complete
    }

    fn look_at<M: UserMemory + ?Sized>(&mut self, memory: &M, list: &List<'_>, progress: &mut Progress) -> bool {
        let Ok(last) = read_u64(memory, list.head, 8) else { return false };
        let back = self.go(memory, list, (list.head, progress.last), BACK, |entry| entry.previous);
        progress.last = last & !FLAGS;
        match back {
            Part::Head => (progress.reached, progress.complete) = (None, true),
            Part::Torn => {
                progress.last = 0;
                return false;
            }
            Part::Known | Part::More(_) => {
                // The first time through, as far as time allows.
                let most = if progress.complete { FORWARD } else { usize::MAX };
                let from = progress.reached.unwrap_or(list.head);
                match self.go(memory, list, (from, 0), most, |entry| entry.next) {
                    Part::Head | Part::Known => (progress.reached, progress.complete) = (None, true),
                    Part::More(reached) => progress.reached = Some(reached),
                    Part::Torn => progress.reached = None,
                }
            }
        }
        progress.complete
    }

    /// Walks along a list from an entry that has been looked at, up to the head or to the entry `until`.
    fn go<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        list: &List<'_>,
        (from, until): (u64, u64),
        most: usize,
        step: impl Fn(&Entry) -> u64,
    ) -> Part {
        let mut pages = Pages::new(memory);
        let Some(mut entry) = entry_at(&pages, from) else { return Part::Torn };
        let mut at = from;
        for count in 1..=most {
            let next = step(&entry);
            if next == list.head {
                return Part::Head;
            }
            if next == until {
                return Part::Known;
            }
            // If an entry was taken out, or the collector is working on it, its neighbour does not link back, or it leads to another list.
            let following = entry_at(&pages, next).filter(|following| following.next == at || following.previous == at);
            let Some(following) = following.filter(|_| !list.heads.contains(&next)) else { return Part::Torn };
            if self.is_greenlet(&pages, list.layout, following.kind) && self.greenlets.len() < MAX_GREENLETS {
                self.greenlets.insert(next + HEAD);
            }
            (at, entry) = (next, following);
            if count % AT_A_TIME == 0 {
                if list.deadline.passed() {
                    return Part::More(at);
                }
                pages = Pages::new(memory);
            }
        }
        Part::More(at)
    }

    /// Whether the instances of a type are greenlets.
    pub(super) fn is_greenlet<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &GreenletLayout,
        kind: u64,
    ) -> bool {
        if let Some(&known) = self.types.get(&kind) {
            return known;
        }
        if self.types.len() >= MAX_TYPES {
            self.types.clear();
        }
        let base =
            |&kind: &u64| read_u64(memory, kind.checked_add(layout.type_base)?, 0).ok().filter(|&base| base != 0);
        let is_it = |kind: u64| {
            let name = kind.checked_add(layout.awaits.type_name).and_then(|at| read_u64(memory, at, 0).ok());
            let mut bytes = [0; TYPE_NAME.len()];
            name.is_some_and(|name| memory.read(name, &mut bytes).is_ok() && bytes == TYPE_NAME)
        };
        let found = std::iter::successors(Some(kind), base).take(MAX_BASES).any(is_it);
        self.types.insert(kind, found);
        found
    }
}

fn entry_at<M: UserMemory + ?Sized>(memory: &M, at: u64) -> Option<Entry> {
    // The object begins with its reference count and its type.
    let mut bytes = [0; HEAD as usize + 16];
    memory.read(at, &mut bytes).ok()?;
    let [next, previous, _, kind] = *bytes.as_chunks::<8>().0 else { return None };
    let link = |bytes| u64::from_ne_bytes(bytes) & !FLAGS;
    Some(Entry { next: link(next), previous: link(previous), kind: u64::from_ne_bytes(kind) })
}

/// The heads of the lists: circles that lead through words of `state` and back.
fn heads<M: UserMemory + ?Sized>(memory: &M, state: u64, size: u64) -> Vec<u64> {
    let link = |at: u64| read_u64(memory, at, 0).ok().map(|link| link & !FLAGS).filter(|&link| link != 0);
    let is_head = |&head: &u64| {
        let neighbours = link(head).zip(link(head.wrapping_add(8)));
        neighbours.is_some_and(|(next, last)| {
            next != head && link(next.wrapping_add(8)) == Some(head) && link(last) == Some(head)
        })
    };
    let words = (0..size.saturating_sub(8) / 8).filter_map(|word| state.checked_add(word * 8));
    words.filter(is_head).take(MAX_LISTS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::{AwaitLayout, Collector, CoroutineLayout, FrameStates, GreenletClasses, StackTop};
    use std::cell::RefCell;
    use std::time::{Duration, Instant};
    use tachyon_common::walk::Unreadable;

    const STATE: u64 = 0x1000;
    const GREENLET: u64 = 0x100_0000;
    const DERIVED: u64 = 0x100_1000;
    const OTHER: u64 = 0x100_2000;

    fn layout() -> GreenletLayout {
        let states = FrameStates { awaits: 0, by_resume: false, awaits_locked: None, executing: 0, ended: 0 };
        let top = StackTop::Count { count: 0, values: 0 };
        let awaits = AwaitLayout {
            coroutine: CoroutineLayout::Embedded { frame: 0, state: 0, states, top },
            set_mask: 0,
            set_table: 0,
            type_name: 24,
            type_flags: 168,
            long_tag: 0,
            long_digit: 0,
            node_next: 0,
            node_prev: 8,
        };
        GreenletLayout {
            collector: Collector { of_runtime: false, state: 0, size: 0x80 },
            awaits,
            type_base: 256,
            classes: GreenletClasses { dict: 24, implementation: 32, stack_state: 56, frame_interp: None },
        }
    }

    /// Words by their addresses; all others are 0.
    #[derive(Default)]
    struct Memory(RefCell<HashMap<u64, u64>>);

    impl UserMemory for Memory {
        fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
            if addr < STATE || !addr.is_multiple_of(8) {
                return Err(Unreadable);
            }
            let words = self.0.borrow();
            for (at, to) in into.chunks_mut(8).enumerate() {
                let word = words.get(&(addr + 8 * at as u64)).copied().unwrap_or(0).to_ne_bytes();
                to.copy_from_slice(word.get(..to.len()).expect("a word has eight bytes"));
            }
            Ok(())
        }
    }

    impl Memory {
        /// Three types, and lists of objects by the numbers of their places, each with its head's number.
        fn new(lists: &[(u64, Vec<u64>)]) -> Self {
            let memory = Self::default();
            let text = |bytes: &[u8], at: usize| {
                let mut word = [0; 8];
                let rest = bytes.get(at * 8..).unwrap_or_default();
                word.iter_mut().zip(rest).for_each(|(to, byte)| *to = *byte);
                u64::from_ne_bytes(word)
            };
            for (kind, name) in [(GREENLET, TYPE_NAME), (DERIVED, b"gevent.Greenlet\0"), (OTHER, b"list\0")] {
                memory.set(kind + 24, kind + 0x800);
                (0..3).for_each(|at| memory.set(kind + 0x800 + 8 * at as u64, text(name, at)));
            }
            memory.set(DERIVED + 256, GREENLET);
            lists.iter().for_each(|(head, objects)| memory.link(STATE + head * 24, objects));
            memory
        }

        fn set(&self, at: u64, word: u64) {
            self.0.borrow_mut().insert(at, word);
        }

        fn link(&self, head: u64, objects: &[u64]) {
            let circle: Vec<u64> = std::iter::once(head).chain(objects.iter().map(|&at| place(at))).collect();
            for (at, &entry) in circle.iter().enumerate() {
                let next = circle.get(at + 1).copied().unwrap_or(head);
                // The collector keeps flags in both words.
                self.set(entry, next | u64::from(at % 2 == 1));
                self.set(next + 8, entry | 2);
            }
        }

        fn kind(&self, object: u64, kind: u64) {
            self.set(place(object) + HEAD + 8, kind);
        }
    }

    fn place(object: u64) -> u64 {
        0x10_0000_0000 + object * 0x40
    }

    fn found(heap: &Heap) -> Vec<u64> {
        heap.greenlets.iter().map(|at| (at - HEAD - place(0)) / 0x40).collect()
    }

    fn soon() -> Deadline {
        Deadline(Instant::now() + Duration::from_secs(60))
    }

    fn look(heap: &mut Heap, memory: &Memory) -> bool {
        heap.look(memory, &layout(), STATE, soon())
    }

    #[test]
    fn greenlets_are_found_in_all_lists() {
        // Before the heads is a word that is not a head: a circle that leads elsewhere.
        let long: Vec<u64> = (100..100 + BACK as u64 + 5_000).collect();
        let memory = Memory::new(&[(1, vec![1, 2, 3]), (2, vec![]), (3, long.clone())]);
        memory.set(STATE, place(1));
        (1..4).chain(long).for_each(|object| memory.kind(object, OTHER));
        memory.kind(2, GREENLET);
        memory.kind(101, DERIVED);
        memory.kind(100 + BACK as u64 + 4_999, GREENLET);
        let mut heap = Heap::default();
        assert!(look(&mut heap, &memory));
        assert_eq!(found(&heap), [2, 101, 100 + BACK as u64 + 4_999]);
    }

    #[test]
    fn what_is_new_is_met_at_the_next_look() {
        let memory = Memory::new(&[(1, (1..20_000).collect())]);
        let mut heap = Heap::default();
        assert!(look(&mut heap, &memory) && found(&heap).is_empty());
        memory.link(STATE + 24, &(1..=20_001).collect::<Vec<_>>());
        memory.kind(20_000, GREENLET);
        // The memory there may become another object, which is seen within a few looks.
        memory.kind(9_000, GREENLET);
        assert!(look(&mut heap, &memory));
        assert_eq!(found(&heap), [20_000]);
        for _ in 0..20_000 / FORWARD + 1 {
            assert!(look(&mut heap, &memory));
        }
        assert_eq!(found(&heap), [9_000, 20_000]);
    }

    #[test]
    fn a_list_that_is_being_changed_is_told() {
        let memory = Memory::new(&[(1, (1..100).collect()), (2, (200..300).collect())]);
        // In an object that the collector is working on, this word counts references.
        memory.set(place(50) + 8, 7 << 2);
        let mut heap = Heap::default();
        assert!(!look(&mut heap, &memory));
        // One list that leads into another, and one into a circle that does not lead back to a head.
        memory.link(STATE + 24, &(1..100).collect::<Vec<_>>());
        memory.set(place(30) + 8, place(250));
        assert!(!look(&mut heap, &memory));
        memory.set(place(30) + 8, place(29));
        assert!(look(&mut heap, &memory));
        memory.link(STATE + 24, &(1..40_000).collect::<Vec<_>>());
        memory.set(place(20_000), place(10_000));
        memory.set(place(10_000) + 8, place(20_000));
        assert!(!look(&mut Heap::default(), &memory));
        assert!(!look(&mut Heap::default(), &Memory::default()), "no list at all");
    }

    #[test]
    fn where_the_time_is_up_it_goes_on_later() {
        let memory = Memory::new(&[(1, (1..60_000).collect())]);
        memory.kind(1, GREENLET);
        memory.kind(30_000, GREENLET);
        let (mut heap, past) = (Heap::default(), Deadline(Instant::now()));
        let mut looks = 0;
        while !heap.look(&memory, &layout(), STATE, past) {
            looks += 1;
            assert!(looks < 100, "{:?}", heap.lists);
        }
        assert!(looks > 5, "{looks}");
        assert_eq!(found(&heap), [1, 30_000]);
    }
}
