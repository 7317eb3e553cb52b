//! Fuzzers of everything that decodes foreign bytes. `docs/dev/fuzzing.md` has the numbers.
//!
//! This crate's program runs them all with random inputs, seeded and deterministic, on stable Rust. Those in `coverage/` are the
//! decoders of whole files and records once more, guided by the code that an input reaches (libFuzzer): `cargo xtask fuzz`.

pub mod covered;
pub mod gauge;
pub mod input;
mod native;
mod recover;
mod symbols;
pub mod targets;
mod writer;

use std::time::Duration;

/// Longest CPU time that one execution may take. Inputs have at most some hundred kilobytes.
pub const SLOW: Duration = Duration::from_secs(5);

/// Most bytes that one execution may have allocated at any one time.
pub const MOST_BYTES: usize = 192 << 20;

/// CPU time of this thread: on a loaded machine an execution may have to wait for seconds.
///
/// # Panics
/// Never on Linux.
#[must_use]
pub fn cpu_time() -> Duration {
    let time = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.expect("every Linux has this clock").into()
}
