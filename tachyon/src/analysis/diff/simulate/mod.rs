//! Recordings drawn at random from real ones, to test the statistics: pairs of the same program, and of a program with a known change.
//!
//! Blocks of time are drawn in runs, so that dependence on what came just before is preserved in the drawn recording.

mod trials;

use crate::analysis::aggregate::{Aggregate, Entry, Place, PlaceId, Recording};
use crate::analysis::rows::Charged;
use fastrand::Rng;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

pub use trials::{Trials, binomial};

/// What was sampled in a block of time.
type Block = Vec<(Entry, u64)>;

/// Most blocks of a recording, as when one is collected: if more are drawn, neighbours are merged.
const MOST_BLOCKS: usize = 128;
/// What the drawn part of a function is called.
pub const SMALL: &str = "small";
/// What a changed program's new function is called.
pub const NEW: &str = "new";

/// Real recordings of one program, by block.
///
/// A drawn recording has as many processes as a recording has on average, and what each does is drawn from all: if one process happened to
/// do more of something, that is not a property of the program.
#[derive(Debug)]
pub struct Pool {
    whole: Aggregate,
    /// By process of a recording, and block.
    processes: Vec<Vec<Block>>,
    /// Processes of a recording, by a thread of each.
    drawn: Vec<u32>,
    block_us: u64,
}

/// How one side differs from what was recorded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edit<'a> {
    /// Not at all.
    None,
    /// Part of a function's samples becomes another function, [`SMALL`], with this share of all samples; `slower` makes it take
    /// more.
    Small {
        /// The function it is part of.
        function: &'a str,
        /// Of all samples.
        share: f64,
        /// 0.05: it takes five percent more.
        slower: f64,
    },
    /// The function has another name, [`NEW`].
    Renamed(&'a str),
    /// Half of what the function does is moved to another one that it calls: [`NEW`].
    Split(&'a str),
    /// The function was inlined into its callers.
    Inlined(&'a str),
    /// Its file has another path.
    Moved(&'a str),
    /// One sample out of this many is taken.
    Thinned(u64),
}

impl Pool {
    /// All recordings of an aggregate.
    #[must_use]
    pub fn new(whole: Aggregate) -> Self {
        let block_us = whole.recordings().iter().map(|recording| recording.block_us).max().unwrap_or(1);
        let mut lengths = vec![0; whole.recordings().len()];
        for (entry, _) in whole.entries() {
            let length = &mut lengths[entry.recording as usize];
            // The last block of a recording is seldom complete, and is left out.
            *length = usize::from(entry.block).max(*length);
        }
        let mut processes: BTreeMap<(u32, &str), Vec<Block>> = BTreeMap::new();
        let mut drawn: BTreeMap<&str, u32> = BTreeMap::new();
        for (entry, count) in whole.entries() {
            let process = &*whole.threads()[entry.thread as usize].process;
            let length = lengths[entry.recording as usize];
            let blocks = processes.entry((entry.recording, process)).or_insert_with(|| vec![Vec::new(); length]);
            if let Some(block) = blocks.get_mut(usize::from(entry.block)) {
                block.push((entry.clone(), *count));
            }
            drawn.entry(process).or_insert(entry.thread);
        }
        let processes: Vec<_> = processes.into_values().filter(|blocks| !blocks.is_empty()).collect();
        let each = (processes.len() / whole.recordings().len().max(1)).max(1);
        let drawn: Vec<u32> = drawn.into_values().take(each).collect();
        Self { processes, drawn, whole, block_us }
    }

    /// Average number of samples in a block.
    #[must_use]
    pub fn samples_a_block(&self) -> f64 {
        let blocks: Vec<_> = self.processes.iter().flatten().collect();
        let samples: u64 = blocks.iter().flat_map(|block| block.iter().map(|(_, count)| count)).sum();
        samples as f64 / blocks.len().max(1) as f64 * self.drawn.len() as f64
    }

    /// Python functions by their self share of all samples, the largest first.
    #[must_use]
    pub fn functions(&self) -> Vec<(Arc<str>, f64)> {
        let mut own: HashMap<Arc<str>, u64> = HashMap::new();
        for (entry, count) in self.whole.entries() {
            if let Some(place) = Charged::of(&self.whole, &self.whole.stacks()[entry.stack as usize]).python {
                *own.entry(Arc::clone(&self.whole.place(place).function)).or_default() += count;
            }
        }
        let all = self.whole.samples().max(1) as f64;
        let mut own: Vec<_> = own.into_iter().map(|(name, count)| (name, count as f64 / all)).collect();
        own.sort_by(|a, b| b.1.total_cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        own.retain(|(name, _)| !name.starts_with('<'));
        own
    }

    /// Draws a recording of `blocks` blocks, in runs of about `run`.
    #[must_use]
    pub fn draw(&self, random: &mut Rng, blocks: usize, run: usize, edit: Edit<'_>) -> Aggregate {
        let mut drawn = self.whole.without_entries();
        let joined = blocks.div_ceil(MOST_BLOCKS).max(1);
        let mut editor = Editor::new(&self.whole, edit);
        let mut counts: HashMap<Entry, u64> = HashMap::new();
        for &thread in &self.drawn {
            let (mut process, mut at, mut left) = (0, 0, 0);
            for block in 0..blocks {
                if left == 0 || at >= self.processes[process].len() {
                    process = random.usize(..self.processes.len());
                    at = random.usize(..self.processes[process].len());
                    left = 1 + (-(1.0 - random.f64()).ln() * (run as f64 - 0.5)) as usize;
                }
                for (entry, count) in &self.processes[process][at] {
                    let block = u16::try_from(block / joined).expect("there are at most 128 blocks");
                    editor.edit(&mut drawn, random, entry.stack, *count, |stack, count| {
                        let entry = Entry { recording: 0, thread, block, stack, ..entry.clone() };
                        *counts.entry(entry).or_default() += count;
                    });
                }
                (at, left) = (at + 1, left - 1);
            }
        }
        let mut counts: Vec<_> = counts.into_iter().filter(|(_, count)| *count > 0).collect();
        counts.sort_unstable();
        let old = &self.whole.recordings()[0];
        let interval_us = old.interval_us * if let Edit::Thinned(of) = edit { of } else { 1 };
        drawn.push_recording(Recording {
            samples: counts.iter().map(|(_, count)| count).sum(),
            seconds: (blocks as u64 * self.block_us) as f64 / 1e6,
            block_us: self.block_us * joined as u64,
            interval_us,
            ..old.clone()
        });
        for (entry, count) in counts {
            drawn.push_entry(entry, count);
        }
        drawn
    }
}

/// Changes stacks as an [`Edit`] says.
struct Editor<'a> {
    edit: Edit<'a>,
    /// Share of the function's samples that are [`SMALL`].
    small: f64,
    /// By stack: what it becomes.
    changed: HashMap<u32, Option<u32>>,
}

impl<'a> Editor<'a> {
    fn new(whole: &Aggregate, edit: Edit<'a>) -> Self {
        let small = match edit {
            Edit::Small { function, share, .. } => {
                let mut own = 0;
                for (entry, count) in whole.entries() {
                    let python = Charged::of(whole, &whole.stacks()[entry.stack as usize]).python;
                    own +=
                        if python.is_some_and(|place| &*whole.place(place).function == function) { *count } else { 0 };
                }
                share * whole.samples() as f64 / own.max(1) as f64
            }
            _ => 0.0,
        };
        Self { edit, small, changed: HashMap::new() }
    }

    fn edit(&mut self, drawn: &mut Aggregate, random: &mut Rng, stack: u32, count: u64, mut add: impl FnMut(u32, u64)) {
        if let Edit::Thinned(of) = self.edit {
            return add(stack, (0..count).filter(|_| random.u64(..of) == 0).count() as u64);
        }
        let Some(changed) = self.changed(drawn, stack) else { return add(stack, count) };
        let mut chance = |share: f64| (0..count).filter(|_| random.f64() < share).count() as u64;
        match self.edit {
            Edit::Small { slower, .. } => {
                let small = chance(self.small);
                add(stack, count - small);
                let more = (0..small).filter(|_| random.f64() < slower).count() as u64;
                add(changed, small + more);
            }
            Edit::Split(_) => {
                let part = chance(0.5);
                add(stack, count - part);
                add(changed, part);
            }
            _ => add(changed, count),
        }
    }

    /// What a stack becomes; `None`: what it is.
    fn changed(&mut self, drawn: &mut Aggregate, stack: u32) -> Option<u32> {
        if let Some(known) = self.changed.get(&stack) {
            return *known;
        }
        let frames = Arc::clone(&drawn.stacks()[stack as usize]);
        let changed = self.frames(drawn, &frames).map(|frames| drawn.intern_stack(&frames));
        self.changed.insert(stack, changed);
        changed
    }

    fn frames(&self, drawn: &mut Aggregate, frames: &[PlaceId]) -> Option<Vec<PlaceId>> {
        let is = |place: PlaceId, drawn: &Aggregate, name: &str| &*drawn.place(place).function == name;
        let named = |drawn: &mut Aggregate, place: PlaceId, name: &str| {
            let function = drawn.text(name);
            let place = Place { function, ..drawn.place(place).clone() };
            drawn.intern_place(place)
        };
        let own = frames.iter().position(|&place| drawn.place(place).is_python());
        match self.edit {
            Edit::None | Edit::Thinned(_) => None,
            Edit::Small { function, .. } => {
                let own = own.filter(|&own| is(frames[own], drawn, function))?;
                let mut frames = frames.to_vec();
                frames[own] = named(drawn, frames[own], SMALL);
                Some(frames)
            }
            Edit::Split(function) => {
                let own = own.filter(|&own| is(frames[own], drawn, function))?;
                let part = named(drawn, frames[own], NEW);
                let mut frames = frames.to_vec();
                frames.insert(own, part);
                Some(frames)
            }
            Edit::Renamed(function) => {
                frames.iter().any(|&place| is(place, drawn, function)).then_some(())?;
                let mut renamed = Vec::with_capacity(frames.len());
                for &place in frames {
                    renamed.push(if is(place, drawn, function) { named(drawn, place, NEW) } else { place });
                }
                Some(renamed)
            }
            Edit::Inlined(function) => {
                let kept: Vec<_> = frames.iter().copied().filter(|&place| !is(place, drawn, function)).collect();
                (kept.len() < frames.len() && !kept.is_empty()).then_some(kept)
            }
            Edit::Moved(function) => {
                frames.iter().any(|&place| is(place, drawn, function)).then_some(())?;
                let mut out = Vec::with_capacity(frames.len());
                for &place in frames {
                    let moved = drawn.place(place).clone();
                    out.push(if &*moved.function == function {
                        let file = drawn.text(&format!("{}.moved/{}", moved.file, NEW));
                        drawn.intern_place(Place { file, ..moved })
                    } else {
                        place
                    });
                }
                Some(out)
            }
        }
    }
}
