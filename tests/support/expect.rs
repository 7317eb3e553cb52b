//! What a program says about its own stacks, and how many samples agree.
//!
//! Exact means: callers exactly where they call, and the leaf at one of the places in its code.

use crate::{Place, Recorded, ShownFrame};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use tachyon::report::{ProcessReport, Report};
use tachyon_common::stop::StopReason;

/// A function that is or may be the innermost one.
#[derive(Debug, Deserialize)]
pub struct Leaf {
    /// Qualified name.
    pub function: String,
    /// Source file.
    pub filename: String,
    /// All places in it.
    pub positions: BTreeSet<Place>,
}

/// One stack.
#[derive(Debug, Deserialize)]
pub struct Stack {
    /// The innermost function that the program knows of.
    pub leaf: Leaf,
    /// Its callers, innermost first: function, file, line, end line, column, end column.
    pub callers: Vec<(String, String, i32, i32, i32, i32)>,
}

impl Leaf {
    fn is(&self, frame: &ShownFrame) -> bool {
        frame.function == self.function
            && frame.filename == self.filename
            && frame.place.is_some_and(|place| self.positions.contains(&place))
    }
}

impl Stack {
    /// Whether these frames, leaf first, are this stack; `below` is a function that the leaf may have called.
    pub fn is<'a>(&self, frames: impl ExactSizeIterator<Item = &'a ShownFrame>, below: Option<&Leaf>) -> bool {
        let mut frames = frames.peekable();
        if let (Some(below), Some(innermost)) = (below, frames.peek())
            && below.is(innermost)
        {
            frames.next();
        }
        frames.len() == self.callers.len() + 1
            && frames.next().is_some_and(|frame| self.leaf.is(frame))
            && frames.zip(&self.callers).all(|(frame, (function, filename, line, end_line, column, end_column))| {
                frame.function == *function
                    && frame.filename == *filename
                    && frame.place == Some([*line, *end_line, *column, *end_column])
            })
    }
}

/// The stacks under a program's fact `stacks`.
///
/// # Panics
/// When there are none.
#[must_use]
pub fn stacks(facts: &Value) -> Vec<Stack> {
    serde_json::from_value(facts["stacks"].clone()).expect("the program tells its stacks")
}

/// Checks that at least `share` of the samples are one of the program's stacks, and that each of those was seen.
/// Returns how many samples agree with each; last those with a stack of `between`, which need not be seen.
///
/// # Panics
/// When they are not, with the stacks that should not be there.
pub fn check_stacks(recorded: &Recorded, facts: &Value, share: f64) -> Vec<usize> {
    let expected = stacks(facts);
    let below: Option<Leaf> = serde_json::from_value(facts["below"].clone()).expect("`below` is a leaf or nothing");
    let between: Option<Vec<Stack>> =
        serde_json::from_value(facts["between"].clone()).expect("`between` are stacks, or it is not there");
    let mut seen = vec![0; expected.len()];
    let mut seen_between = 0;
    let mut others = Vec::new();
    for (stack, count) in recorded.counts().into_iter().enumerate() {
        let frames = || recorded.stacks[stack].iter().map(|&frame| &recorded.frames[frame]);
        match expected.iter().position(|expected| expected.is(frames(), below.as_ref())) {
            Some(index) => seen[index] += count,
            None if between.iter().flatten().any(|stack| stack.is(frames(), None)) => seen_between += count,
            None => others.push((count, stack)),
        }
    }
    let (total, agreeing) = (recorded.samples.len(), seen.iter().sum::<usize>() + seen_between);
    others.sort_unstable();
    println!("{agreeing} of {total} stacks are right");
    let shown: String =
        others.iter().rev().take(3).map(|(count, stack)| format!("{count} x\n{}", recorded.shown(*stack))).collect();
    assert!(
        agreeing as f64 >= share * total as f64 && total > 0,
        "{agreeing} of {total} samples are right; others:\n{shown}"
    );
    assert!(seen.iter().all(|&count| count > 0), "not every stack was seen: {seen:?}; others:\n{shown}");
    seen.extend(between.is_some().then_some(seen_between));
    seen
}

/// Whether every complete stack of a process has all its names; `cut` of its stacks were incomplete, and marked so.
#[must_use]
pub const fn all_named(process: &ProcessReport, cut: u64) -> bool {
    process.named + cut >= process.samples
}

/// How many stacks of a recording were cut.
#[must_use]
pub fn cut(report: &Report) -> u64 {
    let whole = |name: &str| StopReason::ALL.iter().any(|reason| reason.is_whole() && reason.name() == name);
    report.stops.iter().filter(|(name, _)| !whole(name)).map(|(_, count)| count).sum()
}
