//! Samples summed up: distinct stacks of named places, and how often each thread had them.

use crate::profile::{TASK_WAIT, WorkOf};
use crate::sinks::label::Kind;
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Index of a [`Place`] in an [`Aggregate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaceId(pub u32);

/// A place in a program, by its names. Columns, opcodes and native addresses are left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// What its code is.
    pub kind: Kind,
    /// Qualified name; for native code the symbol.
    pub function: Arc<str>,
    /// Source file; for native code its object. Empty if there is none.
    pub file: Arc<str>,
    /// First line of the running instruction.
    pub line: Option<u32>,
}

impl Place {
    /// Whether native code can be charged to it: Python code, or one of the marks that stand for no code (`<GC>`). An event's
    /// mark does not count: it is below everything.
    #[must_use]
    pub fn is_python(&self) -> bool {
        self.kind.is_python() && self.event().is_none()
    }

    /// The garbage collector's mark.
    #[must_use]
    pub fn is_gc(&self) -> bool {
        self.kind == Kind::Special && &*self.function == crate::merge::GC
    }

    /// What the thread whose leaf this is waited for; `None`: it is not such a mark.
    #[must_use]
    pub fn waits_for(&self) -> Option<&str> {
        if self.kind == Kind::Special { crate::profile::waited_for(&self.function) } else { None }
    }
}

impl Place {
    /// The task or greenlet whose frames are above this one; `None`: it stands for neither.
    #[must_use]
    pub fn work(&self) -> Option<WorkOf<'_>> {
        WorkOf::of(&self.file, &self.function).filter(|_| self.kind.is_python())
    }

    /// Its name.
    #[must_use]
    pub fn task(&self) -> Option<&str> {
        self.work().map(WorkOf::name)
    }

    /// Which event the stack with this root was taken at, and how many of them it stands for.
    #[must_use]
    pub fn event(&self) -> Option<(&str, u64)> {
        if self.kind == Kind::Special { crate::profile::event_of_root(&self.function) } else { None }
    }
}

impl Aggregate {
    /// The names of the asyncio tasks and greenlets of a stack, each once: whose work it was, then the others from the innermost on.
    #[must_use]
    pub fn tasks_of(&self, stack: &[PlaceId]) -> Vec<&str> {
        let mut all: Vec<WorkOf<'_>> = stack.iter().filter_map(|&place| self.place(place).work()).collect();
        let first = WorkOf::before_whose(all.iter().copied());
        if let Some(before) = all.get_mut(..=first) {
            before.rotate_right(1);
        }
        let mut names = Vec::new();
        for name in all.into_iter().map(WorkOf::name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    /// Which event a stack was taken at, and how many of them it stands for; `None`: the clock.
    #[must_use]
    pub fn event_of(&self, stack: &[PlaceId]) -> Option<(&str, u64)> {
        self.place(*stack.last()?).event()
    }
}

/// One file, or one recording that is not in a file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Recording {
    /// Host name; empty when not known.
    pub host: String,
    /// Samples taken from it.
    pub samples: u64,
    /// How long it took, seconds.
    pub seconds: f64,
    /// CPU time that one sample stands for, microseconds; at least 1.
    pub interval_us: u64,
    /// Samples lost, by any cause; `None` if that is not known.
    pub lost: Option<u64>,
    /// Length of a block of time, microseconds (see [`Entry::block`]).
    pub block_us: u64,
}

/// A thread of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct ThreadInfo {
    /// Pid of the process; 0 when not known.
    pub pid: u32,
    /// The process by name and pid, for people.
    pub process: String,
    /// What it runs; empty when not known.
    pub script: String,
    /// The thread by name and tid, for people.
    pub thread: String,
}

/// Samples that are the same in everything that is distinguished here.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Entry {
    /// Index of the recording.
    pub recording: u32,
    /// Index of the thread.
    pub thread: u32,
    /// Index of the stack.
    pub stack: u32,
    /// Number of the block of time since the recording's start.
    pub block: u16,
    /// Whether the thread held the GIL; `None`: not known.
    pub gil: Option<bool>,
    /// Whether it ran on a CPU.
    pub on_cpu: bool,
}

/// Recordings summed up. Memory grows with the number of distinct stacks and threads, not with samples.
#[derive(Clone, Debug, Default)]
pub struct Aggregate {
    places: Vec<Place>,
    place_ids: HashMap<Place, PlaceId, RandomState>,
    stacks: Vec<Arc<[PlaceId]>>,
    stack_ids: HashMap<Arc<[PlaceId]>, u32, RandomState>,
    threads: Vec<ThreadInfo>,
    thread_ids: HashMap<ThreadInfo, u32, RandomState>,
    texts: HashMap<Arc<str>, (), RandomState>,
    recordings: Vec<Recording>,
    entries: Vec<(Entry, u64)>,
    aside: BTreeMap<String, LeftAside>,
}

/// Samples that were set aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftAside {
    /// How many.
    pub samples: u64,
    /// The time that they would stand for if they were the clock's, microseconds.
    pub us: u64,
}

impl Aggregate {
    /// What was set aside, by event.
    #[must_use]
    pub fn left_aside(&self) -> &BTreeMap<String, LeftAside> {
        &self.aside
    }

    /// Sets samples of an event aside.
    pub fn leave_aside(&mut self, event: &str, samples: u64, interval_us: u64) {
        let aside = self.aside.entry(event.to_owned()).or_default();
        aside.samples += samples;
        aside.us = aside.us.saturating_add(samples.saturating_mul(interval_us));
    }

    /// The same places, stacks and threads, with no recording yet.
    #[cfg(any(test, feature = "internals"))]
    pub(crate) fn without_entries(&self) -> Self {
        Self { recordings: Vec::new(), entries: Vec::new(), ..self.clone() }
    }

    /// Whether samples of a stack stand for time: a thread's, or that of a task which waited.
    #[must_use]
    pub fn is_time(&self, stack: &[PlaceId]) -> bool {
        self.event_of(stack).is_none_or(|(event, _)| event == TASK_WAIT)
    }

    /// All places, in order of their handles.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places
    }

    /// The place behind a handle.
    ///
    /// # Panics
    /// When the handle belongs to another aggregate.
    #[must_use]
    pub fn place(&self, id: PlaceId) -> &Place {
        &self.places[id.0 as usize]
    }

    /// All stacks, leaf first.
    #[must_use]
    pub fn stacks(&self) -> &[Arc<[PlaceId]>] {
        &self.stacks
    }

    /// All threads.
    #[must_use]
    pub fn threads(&self) -> &[ThreadInfo] {
        &self.threads
    }

    /// All recordings, in the order in which they were added.
    #[must_use]
    pub fn recordings(&self) -> &[Recording] {
        &self.recordings
    }

    /// What was counted, with the number of samples.
    #[must_use]
    pub fn entries(&self) -> &[(Entry, u64)] {
        &self.entries
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.entries.iter().map(|(_, count)| count).sum()
    }

    /// Length of all recordings together, seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.recordings.iter().fold(0.0, |sum, recording| sum + recording.seconds)
    }

    /// Time that all samples stand for, seconds.
    #[must_use]
    pub fn sampled_seconds(&self) -> f64 {
        let of = |(entry, count): &(Entry, u64)| {
            *count as f64 * self.recordings[entry.recording as usize].interval_us as f64 / 1e6
        };
        // Samples of events other than the clock stand for no time.
        let is_time = |(entry, _): &&(Entry, u64)| self.is_time(&self.stacks[entry.stack as usize]);
        self.entries.iter().filter(is_time).map(of).fold(0.0, |sum, seconds| sum + seconds)
    }

    /// The handle of a text, so that equal ones are stored once.
    pub fn text(&mut self, text: &str) -> Arc<str> {
        if let Some((known, ())) = self.texts.get_key_value(text) {
            return Arc::clone(known);
        }
        let new: Arc<str> = text.into();
        self.texts.insert(Arc::clone(&new), ());
        new
    }

    /// The handle of a place.
    pub fn intern_place(&mut self, place: Place) -> PlaceId {
        if let Some(&id) = self.place_ids.get(&place) {
            return id;
        }
        let id = PlaceId(handle(self.places.len()));
        self.places.push(place.clone());
        self.place_ids.insert(place, id);
        id
    }

    /// The handle of a stack, leaf first.
    pub fn intern_stack(&mut self, stack: &[PlaceId]) -> u32 {
        if let Some(&id) = self.stack_ids.get(stack) {
            return id;
        }
        let (id, stack): (u32, Arc<[PlaceId]>) = (handle(self.stacks.len()), stack.into());
        self.stacks.push(Arc::clone(&stack));
        self.stack_ids.insert(stack, id);
        id
    }

    /// The handle of a thread. The same thread in several files of one recording is one thread.
    pub fn intern_thread(&mut self, thread: ThreadInfo) -> u32 {
        if let Some(&id) = self.thread_ids.get(&thread) {
            return id;
        }
        let id = handle(self.threads.len());
        self.threads.push(thread.clone());
        self.thread_ids.insert(thread, id);
        id
    }

    /// Adds a recording with its samples; returns its index.
    pub fn push_recording(&mut self, recording: Recording) -> u32 {
        self.recordings.push(recording);
        handle(self.recordings.len() - 1)
    }

    /// Adds samples.
    pub fn push_entry(&mut self, entry: Entry, count: u64) {
        self.entries.push((entry, count));
    }
}

fn handle(index: usize) -> u32 {
    u32::try_from(index).expect("fewer than 2^32 things fit in memory")
}
