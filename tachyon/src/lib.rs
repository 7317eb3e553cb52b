//! tachyon-bpf: a Linux profiler for CPython that needs nothing from the program it profiles.
//!
//! Besides the program, this is a library. [`recording`] records live processes with eBPF and hands out segments; its
//! documentation has an example that prints a process's hottest lines. [`tach`] reads and writes CPython 3.15's profile
//! format and can be used on its own. [`sinks`] writes a [`profile`] in all formats, and [`report`] is the account of a
//! recording.
//!
//! The other modules are public for this project's own program, tests and fuzzers, and hidden here: they change without
//! notice. `ARCHITECTURE.md` describes all of them, in the order in which data flows through them.

pub mod advice;
#[doc(hidden)]
pub mod analysis;
#[doc(hidden)]
pub mod cli;
pub mod discover;
#[doc(hidden)]
pub mod events;
#[doc(hidden)]
pub mod input;
#[doc(hidden)]
pub mod inspect;
#[doc(hidden)]
pub mod kernel;
pub(crate) mod machine;
#[doc(hidden)]
pub mod merge;
#[cfg(test)]
#[path = "../../tests/support/not_run.rs"]
mod not_run;
pub mod profile;
pub mod recording;
#[doc(hidden)]
pub mod remote;
pub mod report;
pub mod sinks;
#[doc(hidden)]
pub mod snapshot;
#[doc(hidden)]
pub mod symbolize;
pub mod tach;
pub mod types;
#[doc(hidden)]
pub mod unwind;
