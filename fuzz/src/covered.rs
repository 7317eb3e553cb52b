//! Inputs of the fuzzers that are guided by coverage: a decoder's bytes, and eight more that seed the dice.

use crate::input::Rng;
use crate::targets::{Run, TARGETS, Target, corpus_of};
use crate::{MOST_BYTES, SLOW, cpu_time, gauge};

/// Bytes at an input's end that seed the dice: anything chosen at random besides the bytes is changed by changing these.
pub const DICE: usize = 8;

/// Splits an input.
#[must_use]
pub fn split(input: &[u8]) -> (&[u8], Rng) {
    let (bytes, dice) = input.split_last_chunk::<DICE>().map_or((input, [0; DICE]), |(bytes, dice)| (bytes, *dice));
    (bytes, Rng::new(u64::from_le_bytes(dice), 0))
}

/// Runs a target on one input, and holds it to the bounds of memory and time.
///
/// # Panics
/// On a finding.
fn decode(target: &Target, input: &[u8]) {
    let Run::Bytes(run) = target.run else { panic!("{} makes its own inputs", target.name) };
    let (bytes, mut rng) = split(input);
    let (before, begin) = (gauge::begin(), cpu_time());
    run(bytes, &mut rng);
    let (took, peak) = (cpu_time().saturating_sub(begin), gauge::peak_since(before));
    assert!(peak <= MOST_BYTES, "it allocated {peak} bytes");
    assert!(took <= SLOW, "it took {took:?}");
}

/// The same for libFuzzer.
///
/// # Panics
/// On a finding.
#[cfg(feature = "coverage")]
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("each has its decoder");
    decode(target, input);
}

/// Runs the committed corpus of each decoder, and returns how many inputs they have.
///
/// # Panics
/// On a finding, and when there are no inputs.
#[must_use]
pub fn run_corpora() -> usize {
    let inputs = TARGETS.iter().flat_map(|target| corpus_of(target.name).into_iter().map(move |input| (target, input)));
    let mut count = 0;
    for (target, input) in inputs {
        decode(target, &input);
        count += 1;
    }
    assert!(count > 0, "the corpora are empty");
    count
}
