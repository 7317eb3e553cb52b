//! What two profilers say about the native functions of one program. The live tests judge by it, and `cargo xtask bench`
//! uses this file too, for its page.

use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// How far apart two shares may be and still count as the same, beyond the sampling error.
pub const TOLERATED: f64 = 0.03;

/// 99.999 % of a normal distribution lie within this many standard deviations of its mean.
const DEVIATIONS: f64 = 4.4172;

#[derive(Deserialize)]
struct Sample {
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    function: String,
    kind: String,
}

/// The innermost Python function of a stack, and a native function above it.
pub type Pair = (String, String);

/// In how many stacks each pair was seen.
#[derive(Default)]
pub struct Shares {
    /// All stacks with a Python function.
    pub stacks: u64,
    /// The native function anywhere above the Python function.
    pub above: BTreeMap<Pair, u64>,
    /// The one that was running.
    pub running: BTreeMap<Pair, u64>,
}

impl Shares {
    /// Counts stacks: the native functions above a Python function, the innermost first, `None` for those without a name.
    fn add(&mut self, python: &str, native: &[Option<&str>], count: u64) {
        self.stacks += count;
        let names: Vec<_> = native.iter().map(|name| name.map(plain)).collect();
        if let Some(Some(running)) = names.first() {
            *self.running.entry((python.to_owned(), running.clone())).or_default() += count;
        }
        for name in names.into_iter().flatten().collect::<BTreeSet<_>>() {
            *self.above.entry((python.to_owned(), name)).or_default() += count;
        }
    }
}

/// A C++ function's name without what is in brackets, which demanglers write in different ways.
fn plain(name: &str) -> String {
    let name = name.replace("(anonymous namespace)", "{anonymous}");
    let name = name.split(['<', '(']).next().unwrap_or_default();
    name.trim_end().rsplit(' ').next().unwrap_or_default().to_owned()
}

/// From py-spy's raw output: lines `name (place);name (place) count`, the leaf last. A function without a name is an
/// address.
#[must_use]
pub fn py_spys(text: &str) -> Shares {
    let mut shares = Shares::default();
    for line in text.lines() {
        let Some((stack, count)) = line.rsplit_once(' ') else { continue };
        let frames: Vec<_> = stack.split(';').collect();
        let Some(at) = frames.iter().rposition(|frame| frame.contains(".py:")) else { continue };
        let named = |frame: &&'_ str| !frame.starts_with("0x");
        let native: Vec<_> = frames[at + 1..].iter().rev().map(|frame| Some(*frame).filter(named)).collect();
        let python = frames[at].split(" (").next().unwrap_or_default();
        shares.add(python, &native, count.parse().unwrap_or(0));
    }
    shares
}

/// From the profiler's JSON lines, the leaf first.
///
/// # Errors
/// A line is not a sample.
pub fn ours(text: &str) -> serde_json::Result<Shares> {
    let mut shares = Shares::default();
    for line in text.lines() {
        let Sample { frames } = serde_json::from_str(line)?;
        let Some(at) = frames.iter().position(|frame| frame.kind == "python") else { continue };
        // A frame without a symbol has its object's name.
        let named = |frame: &Frame| !frame.function.contains(".so");
        let native: Vec<_> = frames[..at].iter().map(|frame| Some(&*frame.function).filter(|_| named(frame))).collect();
        // py-spy's names lack the class or the enclosing function.
        shares.add(frames[at].function.rsplit('.').next().unwrap_or_default(), &native, 1);
    }
    Ok(shares)
}

/// What both say about a pair, as shares of their stacks.
#[derive(Debug)]
pub struct Compared<'a> {
    /// The functions.
    pub pair: &'a Pair,
    /// 0 to 1.
    pub ours: f64,
    /// 0 to 1.
    pub theirs: f64,
    /// They differ by no more than the sampling error and [`TOLERATED`].
    pub same: bool,
}

/// The pairs that the other profiler saw most often, at most `most`.
pub fn compared<'a>(
    ours: &Shares,
    theirs: &'a Shares,
    of: fn(&Shares) -> &BTreeMap<Pair, u64>,
    most: usize,
) -> Vec<Compared<'a>> {
    let mut top: Vec<_> = of(theirs).iter().collect();
    top.sort_by_key(|&(pair, &count)| std::cmp::Reverse((count, pair)));
    top.truncate(most);
    let compare = |(pair, &count): (&'a Pair, &u64)| {
        let share = of(ours).get(pair).copied().unwrap_or(0) as f64 / ours.stacks as f64;
        let their = count as f64 / theirs.stacks as f64;
        let mean = f64::midpoint(share, their);
        let variance = mean * (1.0 - mean) * (1.0 / ours.stacks as f64 + 1.0 / theirs.stacks as f64);
        let same = (share - their).abs() <= DEVIATIONS * variance.sqrt() + TOLERATED;
        Compared { pair, ours: share, theirs: their, same }
    };
    top.into_iter().map(compare).collect()
}
