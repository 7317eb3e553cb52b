//! Greenlets (of the package greenlet, hence gevent's and eventlet's): those that are switched away, each where it switched.
//!
//! They are listed like asyncio's tasks: a thread's greenlets are one [`EventLoop`], whose address is that of the main greenlet.

mod heap;

pub(super) use heap::Heap;

use super::memory::Pages;
use super::objects::Objects;
use super::stack::{self, Frames, MAX_LOOKS, Stack};
use super::tasks::{EventLoop, MAX_FRAMES, Task, Tasks, type_name};
use super::threads::ThreadState;
use super::{Deadline, Namer, SEED, Target};
use crate::inspect::{GreenletLayout, ObjectLayout};
use crate::profile::MAIN_GREENLET;
use crate::remote::{MappedPath, Mapping};
use crate::types::Pid;
use heap::MAX_GREENLETS;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use tachyon_common::event::RawFrame;
use tachyon_common::stop::StopReason;
use tachyon_common::walk::greenlet::{TOP_FRAME, WHOLE_STACK};
use tachyon_common::walk::{CodeBuffer, FrameBuffer, FrameWalk, Unreadable, UserMemory, read_u64};

/// Words after the frame that are searched for the main greenlet and the parent: in greenlet 2.0 to 3.5 they are 2 to 9 words after it.
const SEARCHED: usize = 24;

/// Readings of all greenlets of a running process: those on which two in a row agree are steady.
const MAX_READINGS: usize = 8;

/// Why some greenlets may be missing, for users.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum GreenletProblem {
    #[error("greenlets were not searched for to the end: it has many objects, and the time was up")]
    Late,
    #[error("the lists of the garbage collector changed while they were read: some greenlets may be missing")]
    Torn,
    #[error("there are more than {MAX_GREENLETS} greenlets: the others are left out")]
    TooMany,
    #[error("greenlets have more than {MAX_FRAMES} frames together: the others are left out")]
    TooManyFrames,
}

/// A greenlet that has begun and has not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RawGreenlet {
    name: Option<String>,
    /// The main greenlet of its thread.
    main: u64,
    /// That thread has ended.
    ended: bool,
    parent: u64,
    /// An address on its thread's stack; `None`: unknown.
    on_stack: Option<u64>,
    running: bool,
    frames: Vec<RawFrame>,
    whole: bool,
}

/// What a greenlet says about its stack and its frame.
struct State {
    on_stack: Option<u64>,
    main: bool,
    /// Address of `PythonState._top_frame`, and its value: NULL while the greenlet runs.
    top_frame: (u64, u64),
    stack: SavedStack,
}

/// The part of a greenlet's C stack that has been copied away because another greenlet uses its place.
#[derive(Clone, Copy, Debug)]
struct SavedStack {
    start: u64,
    size: u64,
    copy: u64,
}

/// Memory as a greenlet sees it when it runs. From 3.12 on, some of the interpreter's frames are on the C stack.
struct OwnMemory<'a, M: ?Sized> {
    memory: &'a M,
    stack: SavedStack,
}

impl<M: UserMemory + ?Sized> UserMemory for OwnMemory<'_, M> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        let SavedStack { start, size, copy } = self.stack;
        let Some(at) = addr.checked_sub(start).filter(|&at| at < size) else { return self.memory.read(addr, into) };
        let saved = usize::try_from(size - at).map_or(into.len(), |rest| rest.min(into.len()));
        let (saved, rest) = into.split_at_mut(saved);
        self.memory.read(copy.checked_add(at).ok_or(Unreadable)?, saved)?;
        if rest.is_empty() {
            return Ok(());
        }
        self.memory.read(start.checked_add(size).ok_or(Unreadable)?, rest)
    }
}

/// The C stacks of threads.
#[derive(Clone, Debug, Default)]
pub(super) struct CStacks(Vec<CStack>);

#[derive(Clone, Debug)]
struct CStack {
    range: Range<u64>,
    /// The thread that the stack belongs to.
    thread_id: u64,
}

/// How far the first thread's stack may grow after the look; the kernel keeps twice that free below it.
const GROWTH: u64 = 64 << 20;

impl CStacks {
    /// glibc and musl put a thread's descriptor, whose address is its id, at the end of the mapping that has its stack; only the first
    /// thread's stack was made by the kernel.
    pub(super) fn of(states: &[ThreadState], tids: &HashMap<u32, u32>, pid: Pid, maps: &[Mapping]) -> Self {
        let is_main_stack =
            |mapping: &&Mapping| matches!(&mapping.path, MappedPath::Special(name) if name == b"[stack]");
        let of_state = |state: &ThreadState| {
            let is_main = state.ns_tid.is_some_and(|tid| tids.get(&tid) == Some(&pid.0));
            let mut maps = maps.iter();
            let range = if is_main {
                let stack = maps.find(is_main_stack)?;
                stack.start.saturating_sub(GROWTH)..stack.end
            } else {
                let stack = maps.find(|mapping| mapping.contains(state.thread_id))?;
                stack.start..state.thread_id
            };
            Some(CStack { range, thread_id: state.thread_id })
        };
        Self(states.iter().filter_map(of_state).collect())
    }
}

/// A process whose greenlets are read and whose thread states are known.
pub(super) struct GreenletsOf<'a, M: ?Sized> {
    pub memory: &'a M,
    pub target: &'a Target<'a>,
    pub layout: &'a GreenletLayout,
    pub states: &'a [ThreadState],
    /// Tids in the profiler's pid namespace, by the threads' tids in their own.
    pub tids: &'a HashMap<u32, u32>,
    /// Their threads' C stacks.
    pub stacks: &'a CStacks,
    pub deadline: Deadline,
}

impl<M: UserMemory> GreenletsOf<'_, M> {
    /// Searches for greenlets in all interpreters, as far as time allows.
    pub(super) fn search<N: UserMemory + ?Sized>(&self, memory: &N, heap: &mut Heap) -> Option<GreenletProblem> {
        let collector = self.layout.collector;
        let interpreters: BTreeSet<u64> = self.states.iter().map(|state| state.interp).collect();
        let of_all = if collector.of_runtime { BTreeSet::from([self.target.entry.runtime]) } else { interpreters };
        // Other threads make and free objects meanwhile.
        let mut complete = false;
        for _ in 0..MAX_READINGS {
            let look = |state: &u64| heap.look(memory, self.layout, state.wrapping_add(collector.state), self.deadline);
            complete = of_all.iter().map(look).fold(true, |all, one| all & one);
            if complete || self.deadline.passed() {
                break;
            }
        }
        if heap.greenlets.len() >= MAX_GREENLETS {
            Some(GreenletProblem::TooMany)
        } else if complete {
            None
        } else if self.deadline.passed() {
            Some(GreenletProblem::Late)
        } else {
            Some(GreenletProblem::Torn)
        }
    }

    /// Reads all of them, including those that run, until two readings agree.
    pub(super) fn read(&self, namer: &mut Namer<'_, M>) -> (Tasks, Vec<GreenletProblem>) {
        let mut heap = Heap::default();
        let mut problems = Vec::from_iter(self.search(self.memory, &mut heap));
        let mut before = self.at_once(&mut heap, &mut Vec::new());
        let mut last = self.at_once(&mut heap, &mut problems);
        for _ in 2..MAX_READINGS {
            if last == before || self.deadline.passed() {
                break;
            }
            before = std::mem::replace(&mut last, self.at_once(&mut heap, &mut Vec::new()));
        }
        (self.told(&last, &before, Some(&|greenlet, tstate| self.called(greenlet, tstate)), namer), problems)
    }

    /// The stack of the thread that runs a greenlet, which is that greenlet's; `None`: it no longer runs.
    fn called(&self, greenlet: u64, tstate: u64) -> Option<Stack> {
        let stack = stack::read(self.memory, self.target, tstate, self.deadline);
        self.state(greenlet).filter(|state| state.top_frame.1 == 0).map(|_| stack)
    }

    /// The same in one reading of memory that does not change, for the greenlets already found.
    pub(super) fn read_still(&self, heap: &mut Heap, namer: &mut Namer<'_, M>) -> (Tasks, Vec<GreenletProblem>) {
        let mut problems = Vec::new();
        let read = self.once(heap, &mut problems);
        (self.told(&read, &read, None, namer), problems)
    }

    /// One reading of memory that keeps changing: each page of it is read once.
    fn at_once(&self, heap: &mut Heap, problems: &mut Vec<GreenletProblem>) -> BTreeMap<u64, RawGreenlet> {
        let Self { memory, target, layout, states, tids, stacks, deadline } = *self;
        let memory = &Pages::new(memory);
        GreenletsOf { memory, target, layout, states, tids, stacks, deadline }.once(heap, problems)
    }

    fn once(&self, heap: &mut Heap, problems: &mut Vec<GreenletProblem>) -> BTreeMap<u64, RawGreenlet> {
        let (mut read, mut frames_left) = (BTreeMap::new(), MAX_FRAMES);
        let mut wanted: Vec<u64> = heap.greenlets.iter().rev().copied().collect();
        while let Some(address) = wanted.pop() {
            if self.deadline.passed() {
                problems.push(GreenletProblem::Late);
                break;
            }
            let kind = self.word(address, u64::from(self.target.layout.ob_type));
            if !kind.is_some_and(|kind| heap.is_greenlet(self.memory, self.layout, kind)) {
                heap.greenlets.remove(&address);
                continue;
            }
            let Some(raw) = self.greenlet(heap, address) else { continue };
            let Some(left) = frames_left.checked_sub(raw.frames.len()) else {
                problems.push(GreenletProblem::TooManyFrames);
                break;
            };
            frames_left = left;
            // Objects that the collector was moving may have been missed, and without its main one a thread's greenlets are nobody's.
            for relative in [raw.main, raw.parent].into_iter().filter(|&relative| relative != 0) {
                if heap.greenlets.len() < MAX_GREENLETS && heap.greenlets.insert(relative) {
                    wanted.push(relative);
                }
            }
            read.insert(address, raw);
        }
        read
    }

    /// A greenlet; `None`: it has not begun, has ended, or is none.
    fn greenlet(&self, heap: &mut Heap, address: u64) -> Option<RawGreenlet> {
        let state = self.state(address)?;
        let (at, top_frame) = state.top_frame;
        let (main, parent) = if state.main { (address, 0) } else { self.relatives(heap, at)? };
        let ended = state.main && self.has_ended(address, at);
        let (frames, whole) = if top_frame == 0 { (Vec::new(), true) } else { self.frames(top_frame, state.stack)? };
        Some(RawGreenlet {
            name: if state.main { Some(MAIN_GREENLET.to_owned()) } else { self.name(address) },
            main,
            ended,
            parent,
            on_stack: state.on_stack,
            running: top_frame == 0,
            frames,
            whole,
        })
    }

    fn state(&self, address: u64) -> Option<State> {
        let implementation = self.word(address, self.layout.classes.implementation).filter(|&pointer| pointer != 0)?;
        let without_self = if self.word(implementation, 8)? == address { 0 } else { 8 };
        let stack_state = implementation.checked_add(self.layout.classes.stack_state - without_self)?;
        let mut bytes = [0; 56];
        self.memory.read(stack_state, &mut bytes).ok()?;
        // StackState: the stack's present start, its original stop, and what has been copied away of it; then PythonState.
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let [start, stop, copy, size, _previous, _context, top_frame] = *words.collect::<Vec<_>>() else { return None };
        let main = stop == WHOLE_STACK;
        // A greenlet that has not begun has no stop; one that has ended has no start.
        if stop == 0 || start == 0 && !main {
            return None;
        }
        let on_stack = if main { start } else { stop };
        Some(State {
            on_stack: Some(on_stack).filter(|&at| at > 1),
            main,
            top_frame: (stack_state + u64::from(TOP_FRAME), top_frame),
            stack: SavedStack { start, size, copy },
        })
    }

    /// The main greenlet and the parent, which follow the Python state, with the greenlet's function between them.
    fn relatives(&self, heap: &mut Heap, top_frame: u64) -> Option<(u64, u64)> {
        let words = self.after(top_frame);
        let mut is_greenlet = |object: u64| {
            let kind = || self.word(object, u64::from(self.target.layout.ob_type));
            object != 0 && kind().is_some_and(|kind| heap.is_greenlet(self.memory, self.layout, kind))
        };
        let found = words
            .windows(3)
            .find(|words| matches!(words, [main, _, parent] if is_greenlet(*main) && is_greenlet(*parent)));
        found.and_then(|words| Some((*words.first()?, *words.get(2)?)))
    }

    /// Whether the thread with this main greenlet has ended: until then the address of its thread state follows the greenlet's own.
    fn has_ended(&self, main: u64, top_frame: u64) -> bool {
        self.after(top_frame).windows(2).find(|words| words[0] == main).is_some_and(|words| words[1] == 0)
    }

    /// The words after the frame, as far as they can be read: it may be the last thing on a page.
    fn after(&self, top_frame: u64) -> Vec<u64> {
        let word = |at: usize| self.word(top_frame, 8 * (at as u64 + 1));
        (0..SEARCHED).map_while(word).collect()
    }

    /// The frames, from the innermost one of a function on; `None`: it is no frame.
    fn frames(&self, top_frame: u64, stack: SavedStack) -> Option<(Vec<RawFrame>, bool)> {
        let innermost = match self.layout.classes.frame_interp {
            Some(offset) => self.word(top_frame, offset).filter(|&frame| frame != 0)?,
            None => top_frame,
        };
        let memory = OwnMemory { memory: self.memory, stack };
        let (mut walk, mut frames) = (FrameWalk::start(innermost), Frames::default());
        let (mut frame, mut code) = (FrameBuffer::default(), CodeBuffer::default());
        for _ in 0..MAX_LOOKS {
            let code_type = self.target.entry.code_type;
            let stop = walk.frame(&memory, &self.target.layout, code_type, SEED, &mut frame, &mut code, &mut frames);
            if let Some(stop) = stop {
                return (!frames.0.is_empty()).then_some((frames.0, stop == StopReason::Complete));
            }
        }
        Some((frames.0, false))
    }

    /// Its own name, which gevent's greenlets have if they were given one, else its type's.
    fn name(&self, address: u64) -> Option<String> {
        let own = || {
            let objects = ObjectLayout::of_dictionaries(&self.target.layout)?;
            let objects = Objects { memory: self.memory, layout: &self.target.layout, objects };
            objects.text(objects.find(objects.pointer(address, self.layout.classes.dict)?, "name")?)
        };
        own().or_else(|| {
            let kind = self.word(address, u64::from(self.target.layout.ob_type))?;
            type_name(self.memory, &self.layout.awaits, kind)
        })
    }

    /// The state of the thread whose stack contains an address.
    fn thread_at(&self, address: u64) -> Option<&ThreadState> {
        let stack = self.stacks.0.iter().find(|stack| stack.range.contains(&address))?;
        let of_thread = |state: &&ThreadState| state.thread_id == stack.thread_id;
        // A thread that has been in several interpreters began in the oldest, which is listed last.
        self.states.iter().rev().find(of_thread)
    }

    fn told(
        &self,
        last: &BTreeMap<u64, RawGreenlet>,
        before: &BTreeMap<u64, RawGreenlet>,
        called: Option<&dyn Fn(u64, u64) -> Option<Stack>>,
        namer: &mut Namer<'_, M>,
    ) -> Tasks {
        let mut found = Tasks::default();
        // A thread that only asked for its current greenlet, and began none, has a main greenlet too.
        let others: BTreeSet<u64> = last.iter().filter(|(at, raw)| raw.main != **at).map(|(_, raw)| raw.main).collect();
        let last: BTreeMap<u64, &RawGreenlet> =
            last.iter().filter(|(_, raw)| others.contains(&raw.main)).map(|(at, raw)| (*at, raw)).collect();
        let mut threads: BTreeMap<u64, Option<u64>> = BTreeMap::new();
        // One that is being switched at this moment may have been read only a moment ago.
        let ended = |main: &u64| last.get(main).copied().or_else(|| before.get(main)).is_none_or(|main| main.ended);
        for raw in last.values() {
            let known = threads.entry(raw.main).or_default();
            *known = known.or(raw.on_stack.filter(|_| !ended(&raw.main)));
        }
        let mut places = HashMap::new();
        for (&main, &on_stack) in &threads {
            let state = on_stack.and_then(|at| self.thread_at(at));
            let tid = state.and_then(|state| self.tids.get(&state.ns_tid?).copied());
            let interp = state.and_then(|state| read_u64(self.memory, state.interp, self.target.layout.interp_id).ok());
            places.insert(main, (found.loops.len(), state.map_or(0, |state| state.interp)));
            found.loops.push(EventLoop {
                address: main,
                kind: None,
                tid,
                tstate: state.map_or(0, |state| state.tstate),
                interpreter: interp,
                runs: Some(true),
            });
        }
        for (&address, &raw) in &last {
            let Some(&(event_loop, interp)) = places.get(&raw.main) else { continue };
            let mut steady = before.get(&address) == Some(raw);
            let mut name = |frame: &RawFrame| {
                let (frame, named) = namer.frame(frame);
                steady &= named;
                frame
            };
            let tstate = found.loops.get(event_loop).map_or(0, |thread| thread.tstate);
            let stack = called.filter(|_| raw.running && tstate != 0).map(|called| called(address, tstate));
            let (frames, whole) = match &stack {
                Some(Some(stack)) => (&stack.frames, stack.stop == StopReason::Complete),
                _ => (&raw.frames, raw.whole),
            };
            let frames = frames.iter().filter_map(&mut name).collect();
            steady &= stack.is_none_or(|stack| stack.is_some_and(|stack| stack.steady));
            found.tasks.push(Task {
                address,
                name: raw.name.clone(),
                greenlet: true,
                event_loop,
                interp,
                running: raw.running,
                frames,
                whole,
                awaited_by: if raw.parent == 0 { Vec::new() } else { vec![raw.parent] },
                steady,
            });
        }
        found.sorted(self.target.process.pid().0)
    }

    fn word(&self, base: u64, offset: u64) -> Option<u64> {
        read_u64(self.memory, base.checked_add(offset)?, 0).ok()
    }
}
