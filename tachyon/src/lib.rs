//! tachyon-bpf: a Linux profiler for CPython that needs nothing from the program it profiles.
//!
//! Besides the program, this is a library. [`recording`] records live processes with eBPF and hands out segments; its
//! documentation has an example that prints a process's hottest lines. [`tach`] reads and writes CPython 3.15's profile
//! format and can be used on its own; [`input`] reads such files back as a [`profile`]. [`sinks`] writes a profile in all
//! formats, and [`report`] is the account of a recording. [`analysis`] sums profiles up and compares them.
//!
//! The other modules are private. This project's own tests, benchmarks and fuzzers reach them through the feature
//! `internals`, which promises nothing: what it opens changes without notice. `ARCHITECTURE.md` describes all modules, in the
//! order in which data flows through them.

// Tests and fuzzers are the only users of some items: unused code is checked for only with the feature.
#![cfg_attr(not(feature = "internals"), allow(dead_code, unused_imports))]

pub mod advice;
pub mod analysis;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod cli;
#[cfg(not(feature = "internals"))]
pub(crate) mod cli;
pub mod discover;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod events;
#[cfg(not(feature = "internals"))]
pub(crate) mod events;
pub mod input;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod inspect;
#[cfg(not(feature = "internals"))]
pub(crate) mod inspect;
pub(crate) mod kept;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod kernel;
#[cfg(not(feature = "internals"))]
pub(crate) mod kernel;
pub(crate) mod machine;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod merge;
#[cfg(not(feature = "internals"))]
pub(crate) mod merge;
#[cfg(test)]
#[path = "../../tests/support/not_run.rs"]
mod not_run;
pub mod profile;
pub mod recording;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod remote;
#[cfg(not(feature = "internals"))]
pub(crate) mod remote;
pub mod report;
pub mod sinks;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod snapshot;
#[cfg(not(feature = "internals"))]
pub(crate) mod snapshot;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod symbolize;
#[cfg(not(feature = "internals"))]
pub(crate) mod symbolize;
pub mod tach;
pub mod types;
#[cfg(feature = "internals")]
#[doc(hidden)]
pub mod unwind;
#[cfg(not(feature = "internals"))]
pub(crate) mod unwind;

#[doc(hidden)]
pub use cli::program::main;
