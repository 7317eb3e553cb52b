//! tachyon-bpf: a Linux profiler for CPython that needs nothing from the program it profiles.
//!
//! The rooms, in the order in which data walks through them; only [`recording`] knows them all.
//! [`tach`] is CPython 3.15's profile format and can be used by itself.

pub mod cli;
pub mod discover;
pub mod events;
pub mod inspect;
pub mod kernel;
pub mod merge;
#[cfg(test)]
#[path = "../../tests/support/not_run.rs"]
mod not_run;
pub mod profile;
pub mod recording;
pub mod remote;
pub mod report;
pub mod sinks;
pub mod snapshot;
pub mod symbolize;
pub mod tach;
pub mod types;
pub mod unwind;
