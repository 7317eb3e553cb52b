//! Joins native frames and Python frames into one stack in call order.
//!
//! C enters the evaluator, the evaluator runs Python frames, one of them calls C, which may enter the evaluator again.
//! So each *activation* of the evaluator is one evaluator frame of the native stack and a run of Python frames, and the
//! two stacks are joined activation by activation. Where one of them does not reach the root, or has more activations
//! than the other for a known reason, the stack is put together all the same and labelled accordingly ([`Quality`]);
//! where the counts contradict each other no mixed stack is made, and the label says that.
//!
//! Pure: works on indices and kinds, without addresses or names.

mod kind;

pub use kind::NativeKind;

use tachyon_common::layout::{Layout, flags};
use tachyon_common::stop::StopReason;

/// Most activations without Python frames in a row that are plausible: even two are rare.
const MAX_EMPTY: u16 = 64;

/// How a Python stack shows where activations begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Boundaries {
    /// Each frame has its own activation (up to 3.10).
    EveryFrame,
    /// An activation's outermost frame is marked (3.11: `is_entry`).
    EntryFrame,
    /// An activation ends in a shim frame (from 3.12 on).
    Shim,
}

impl Boundaries {
    /// The boundaries of an interpreter.
    #[must_use]
    pub fn of(layout: &Layout) -> Self {
        if layout.has(flags::FRAME_OBJECTS) {
            Self::EveryFrame
        } else if Layout::present(layout.frame_is_entry) {
            Self::EntryFrame
        } else {
            Self::Shim
        }
    }
}

/// A native stack.
#[derive(Clone, Copy, Debug)]
pub struct Native<'a> {
    /// Its frames, leaf first.
    pub frames: &'a [NativeKind],
    /// It reaches the thread's first function.
    pub whole: bool,
    /// Its outer part may be another interpreter's or greenlet's, whose Python frames are not this thread state's.
    pub foreign: bool,
    /// The innermost activation has called code that switches between greenlets, up to this frame: for a moment the native stack
    /// behind it belongs to one and the Python stack to the other.
    pub switching: Option<usize>,
    /// The frame on which the evaluator keeps the record of having entered the innermost Python frames.
    pub entered: Option<usize>,
}

/// A native stack, and how its frames stand for activations.
#[derive(Clone, Copy, Debug)]
struct Stack<'a> {
    native: Native<'a>,
    /// A generator that an exception is being thrown through has a Python frame, and no evaluator ([`NativeKind::Throw`]).
    links_throws: bool,
    /// Frames that stand for an activation.
    activations: usize,
}

impl<'a> std::ops::Deref for Stack<'a> {
    type Target = Native<'a>;

    fn deref(&self) -> &Native<'a> {
        &self.native
    }
}

impl<'a> Stack<'a> {
    /// The stack, counted the way the Python stack does: that one shows whether this version links frames that it
    /// throws through.
    fn of(native: &Native<'a>, python: &Python<'_>, activations: usize) -> Self {
        let counted = |links_throws| {
            let mut stack = Self { native: *native, links_throws, activations: 0 };
            stack.activations = (0..stack.frames.len()).filter(|&index| stack.entering(index).is_some()).count();
            stack
        };
        let without = counted(false);
        if python.boundaries == Boundaries::Shim || without.activations >= activations {
            return without;
        }
        let linked = counted(true);
        if linked.activations == activations { linked } else { without }
    }

    /// For a frame that stands for an activation, whether its evaluator may just be being entered; `None` for all other
    /// frames.
    fn entering(&self, index: usize) -> Option<bool> {
        match self.frames[index] {
            NativeKind::Evaluator { entering } => Some(entering),
            NativeKind::Handler => {
                let called_by_evaluator = matches!(self.frames.get(index + 1), Some(NativeKind::Evaluator { .. }));
                (!called_by_evaluator).then_some(false)
            }
            NativeKind::Throw if self.links_throws => {
                let callee = index.checked_sub(1).map(|callee| self.frames[callee]);
                (callee == Some(NativeKind::Throw)).then_some(false)
            }
            _ => None,
        }
    }

    /// Whether all of its activations are there: it reaches the thread's first function, or the interpreter's first one.
    /// (musl's first functions have no unwind tables: all main threads' stacks are cut there.)
    fn has_all_evaluators(&self) -> bool {
        let outer = self
            .frames
            .iter()
            .rev()
            .take_while(|kind| !matches!(kind, NativeKind::Evaluator { .. } | NativeKind::Handler));
        self.whole || outer.into_iter().any(|kind| *kind == NativeKind::Root)
    }

    /// How many evaluators lie further in than that of the innermost Python frames: they are being entered or left. `None`:
    /// unknown. (Greenlets move their parts of the stack to and from one place.)
    fn without_python(&self) -> Option<usize> {
        let at = self.entered.filter(|&at| at < self.frames.len() && !self.foreign)?;
        // Where the evaluator is inlined into its caller, the handler before that stands for it.
        let at = if self.entering(at).is_some() { at } else { at.checked_sub(1)? };
        self.entering(at)?;
        Some((0..at).filter(|&index| self.entering(index).is_some()).count())
    }

    /// Whether the outermost activation may belong to another thread state than the rest: code outside the interpreter
    /// lies in between and could have changed it.
    fn outermost_may_be_foreign(&self) -> bool {
        let mut evaluators = (0..self.frames.len()).rev().filter(|&index| self.entering(index).is_some());
        match (evaluators.next(), evaluators.next()) {
            (Some(outer), Some(inner)) => self.frames[inner..outer].contains(&NativeKind::Other),
            _ => true,
        }
    }
}

/// A Python frame: [`tachyon_common::event::RawFrame`] has both fields.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PythonFrame {
    /// The evaluator was entered anew for it.
    pub entry: bool,
    /// Shim frames between it and its callee.
    pub shims: u16,
}

/// A Python stack.
#[derive(Clone, Copy, Debug)]
pub struct Python<'a> {
    /// Its frames, leaf first.
    pub frames: &'a [PythonFrame],
    /// Shim frames below the outermost one.
    pub root_shims: u16,
    /// How it ended.
    pub stop: StopReason,
    /// Where its activations begin.
    pub boundaries: Boundaries,
}

/// A frame of the joined stack: an index into one of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// A Python frame.
    Python(usize),
    /// A native frame.
    Native(usize),
    /// The garbage collector, above what asked for it.
    Collector,
}

/// How far a joined stack can be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Quality {
    /// Both stacks are whole and have the same activations, except for one that is just being entered or left.
    Exact,
    /// They differ in a way that has an explanation.
    Repaired(Repair),
    /// They contradict each other: native frames between Python frames are left out.
    Failed,
}

/// Why two stacks differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Repair {
    /// The thread was just entering or leaving the evaluator: its innermost activation has no Python frame yet or no
    /// longer has one, and the outermost one may be another thread state's.
    Entering,
    /// There is no Python stack for the evaluators in the native one: it could not be read.
    NoPython,
    /// The native stack has evaluators that the Python stack does not: another interpreter's or greenlet's, or the
    /// Python stack was cut. The innermost ones belong together.
    OuterNative,
    /// The native stack was cut: nothing native is known about the outer Python frames.
    OuterPython,
    /// Code that switches between greenlets was running, and what called it may be another greenlet's than the Python frames: it
    /// is left out.
    Switching,
    /// One of the stacks was cut, but they have the same activations.
    Cut,
    /// Part of the native stack was walked by frame pointers, for want of a table: a frame may be missing there.
    FramePointers,
    /// It leads through a function in assembly language, whose rules were derived from its instructions.
    Assembly,
}

impl Quality {
    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Repaired(Repair::Entering) => "repaired: entering or leaving the evaluator",
            Self::Repaired(Repair::NoPython) => "repaired: no Python stack",
            Self::Repaired(Repair::OuterNative) => "repaired: outer evaluators without Python frames",
            Self::Repaired(Repair::OuterPython) => "repaired: native stack cut",
            Self::Repaired(Repair::Switching) => "repaired: between two greenlets",
            Self::Repaired(Repair::Cut) => "repaired: stack cut",
            Self::Repaired(Repair::FramePointers) => "repaired: walked by frame pointers",
            Self::Repaired(Repair::Assembly) => "repaired: through assembly without unwind rules",
            Self::Failed => "failed",
        }
    }
}

/// Native frames to keep even though they say nothing about the Python code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep {
    /// The interpreter's own frames; the evaluator's goes below the Python frames it runs.
    pub interpreter: bool,
    /// What called the outermost Python frame, such as `_start` or `clone3`.
    pub roots: bool,
}

/// Joins two stacks of one thread at one moment; `out` gets the frames, leaf first.
pub fn join(native: &Native<'_>, python: &Python<'_>, keep: Keep, out: &mut Vec<Joined>) -> Quality {
    out.clear();
    let activations = activations(python);
    if let Some(end) = native.switching {
        let switch = Native { frames: &native.frames[..end.min(native.frames.len())], ..*native };
        let native = &Stack::of(&switch, python, activations.len());
        let keep_interpreter = keep.interpreter;
        Joining { native, activations: &activations, keep_interpreter, trims: false, out }.apart();
        return Quality::Repaired(Repair::Switching);
    }
    let native = &Stack::of(native, python, activations.len());
    let (first, quality) = align(native, python, activations.len());
    let python_whole = matches!(python.stop, StopReason::Complete | StopReason::NoFrame);
    let trims = !native.has_all_evaluators()
        && python_whole
        && native.activations == activations.len()
        && !activations.is_empty();
    let mut joining = Joining { native, activations: &activations, keep_interpreter: keep.interpreter, trims, out };
    match first {
        Some(first) => joining.interleave(first),
        None => joining.apart(),
    }
    if !keep.roots {
        fold_roots(native, out);
    }
    quality
}

/// Folds what called the outermost Python frame, or the outermost evaluator if its Python frames are not known. A stack
/// without either keeps all its frames.
fn fold_roots(native: &Stack<'_>, out: &mut Vec<Joined>) {
    let runs_python = |frame: &Joined| match *frame {
        Joined::Python(_) => true,
        Joined::Native(index) => native.entering(index).is_some(),
        Joined::Collector => false,
    };
    let Some(outermost) = out.iter().rposition(runs_python) else { return };
    let mut place = 0;
    out.retain(|frame| {
        place += 1;
        // No other frame shows that the collector called it.
        place <= outermost + 1 || *frame == Joined::Collector
    });
}

/// A run of Python frames, leaf first: indices. Empty for an activation that has none (yet, or no longer).
type Activation = std::ops::Range<usize>;

/// The activations of a Python stack, leaf first.
fn activations(python: &Python<'_>) -> Vec<Activation> {
    let mut found = Vec::new();
    let mut start = 0;
    for (index, frame) in python.frames.iter().enumerate() {
        match python.boundaries {
            Boundaries::EveryFrame => {
                found.push(index..index + 1);
                start = index + 1;
            }
            Boundaries::EntryFrame if frame.entry => {
                found.push(start..index + 1);
                start = index + 1;
            }
            Boundaries::EntryFrame => {}
            Boundaries::Shim => {
                for _ in 0..frame.shims.min(MAX_EMPTY) {
                    found.push(start..index);
                    start = index;
                }
            }
        }
    }
    if python.boundaries == Boundaries::Shim {
        for _ in 0..python.root_shims.min(MAX_EMPTY) {
            found.push(start..python.frames.len());
            start = python.frames.len();
        }
    }
    if start < python.frames.len() {
        // A stack that was cut, or whose root has no entry mark: counts as a run all the same.
        found.push(start..python.frames.len());
    }
    found
}

/// Which evaluator frame (counted from the leaf) the innermost activation belongs to; `None`: the stacks cannot be
/// joined.
fn align(native: &Stack<'_>, python: &Python<'_>, activations: usize) -> (Option<usize>, Quality) {
    let evaluators = native.activations;
    let python_whole = matches!(python.stop, StopReason::Complete | StopReason::NoFrame);
    let entering = (0..native.frames.len()).find_map(|index| native.entering(index)) == Some(true);
    let native_whole = native.has_all_evaluators();
    let both_whole = native_whole && python_whole;
    if activations == 0 && evaluators > 0 {
        let entering = evaluators == 1 && entering && both_whole;
        // The thread state has no frame, so its first one is being entered or left.
        let sure = entering && python.stop == StopReason::NoFrame && !native.foreign;
        let repair = if entering { Repair::Entering } else { Repair::NoPython };
        return (Some(evaluators), if sure { Quality::Exact } else { Quality::Repaired(repair) });
    }
    let without_python = native.without_python();
    if let Some(empty) = without_python.filter(|&empty| empty > 0) {
        let quality = match (evaluators - empty).cmp(&activations) {
            std::cmp::Ordering::Equal if both_whole && empty == 1 => Quality::Exact,
            std::cmp::Ordering::Equal if both_whole => Quality::Repaired(Repair::Entering),
            std::cmp::Ordering::Equal => Quality::Repaired(Repair::Cut),
            std::cmp::Ordering::Greater => Quality::Repaired(Repair::OuterNative),
            std::cmp::Ordering::Less if !native_whole => Quality::Repaired(Repair::OuterPython),
            std::cmp::Ordering::Less => return (None, Quality::Failed),
        };
        return (Some(empty), quality);
    }
    let sure = without_python == Some(0);
    match evaluators.cmp(&activations) {
        // A thread that never entered Python has no thread state: then nothing is missing either. Nor if there is no
        // interpreter, before it starts and after it ends.
        std::cmp::Ordering::Equal
            if native_whole && (python.stop.is_whole() || python.stop == StopReason::RuntimeNotInitialized) =>
        {
            (Some(0), Quality::Exact)
        }
        // Its Python frame is not linked yet, so the part that was cut off has one more evaluator than is visible.
        std::cmp::Ordering::Equal if !native_whole && python_whole && entering && !sure => {
            (Some(1), Quality::Repaired(Repair::OuterPython))
        }
        std::cmp::Ordering::Equal => (Some(0), Quality::Repaired(Repair::Cut)),
        // The innermost has Python frames, so the surplus lies further out.
        std::cmp::Ordering::Greater if sure => (Some(0), Quality::Repaired(Repair::OuterNative)),
        // In the evaluator's first and last instructions its Python frame is not linked.
        std::cmp::Ordering::Greater if both_whole && (entering || !native.foreign) && evaluators == activations + 1 => {
            // Then the others are all there, unless the surplus one is the outermost, of a thread state that C code has
            // replaced by another in between.
            let sure = !native.foreign && !native.outermost_may_be_foreign();
            (Some(1), if sure { Quality::Exact } else { Quality::Repaired(Repair::Entering) })
        }
        std::cmp::Ordering::Greater => (Some(0), Quality::Repaired(Repair::OuterNative)),
        std::cmp::Ordering::Less if !native_whole => (Some(0), Quality::Repaired(Repair::OuterPython)),
        std::cmp::Ordering::Less => (None, Quality::Failed),
    }
}

struct Joining<'a> {
    native: &'a Stack<'a>,
    activations: &'a [Activation],
    keep_interpreter: bool,
    /// Whatever follows the outermost Python frame is left out: if a native stack was cut and the innermost evaluator
    /// was about to return, it belongs to an inner call whose evaluator was cut off.
    trims: bool,
    out: &'a mut Vec<Joined>,
}

impl Joining<'_> {
    /// Joins them, the evaluator frame number `first` (from the leaf) being that of the innermost activation.
    fn interleave(&mut self, first: usize) {
        let mut evaluators = 0_usize;
        let mut left = self.activations.iter();
        for (index, kind) in self.native.frames.iter().enumerate() {
            if self.trims && evaluators > 0 && left.len() == 0 {
                break;
            }
            if self.native.entering(index).is_none() {
                self.native_frame(index, *kind, evaluators == 0);
                continue;
            }
            // An evaluator that is just being entered runs nothing yet; one without Python frames stands for the
            // unknown ones.
            let entered = evaluators >= first;
            let activation = if entered { left.next() } else { None };
            evaluators += 1;
            self.out.extend(activation.into_iter().flat_map(Clone::clone).map(Joined::Python));
            if self.keep_interpreter || (activation.is_none() && (entered || self.activations.is_empty())) {
                self.out.push(Joined::Native(index));
            }
        }
        self.out.extend(left.flat_map(Clone::clone).map(Joined::Python));
    }

    /// The innermost evaluator's callees above all Python frames.
    fn apart(&mut self) {
        for (index, kind) in self.native.frames.iter().enumerate() {
            if self.native.entering(index).is_some() {
                break;
            }
            self.native_frame(index, *kind, true);
        }
        self.out.extend(self.activations.iter().flat_map(Clone::clone).map(Joined::Python));
    }

    fn native_frame(&mut self, index: usize, kind: NativeKind, above_all: bool) {
        let told = match kind {
            NativeKind::Other => true,
            NativeKind::Interpreter | NativeKind::Collector | NativeKind::Throw => above_all,
            NativeKind::Plumbing | NativeKind::Root | NativeKind::Handler | NativeKind::Evaluator { .. } => false,
        };
        if told || self.keep_interpreter {
            self.out.push(Joined::Native(index));
        }
        // The collector's functions call each other: one mark for them all.
        if kind == NativeKind::Collector && self.native.frames.get(index + 1) != Some(&NativeKind::Collector) {
            self.out.push(Joined::Collector);
        }
    }
}

#[cfg(test)]
mod tests;
