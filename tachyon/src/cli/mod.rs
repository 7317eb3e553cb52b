//! The command line: what the user typed, what it means, and how the answer is shown.
//!
//! [`args`] is syntax. [`plan`] is meaning: it turns arguments into a [`plan::Plan`], which [`record`] carries out with the
//! library's recorder. [`output`] and [`command`] are the two things that a plan needs from the system: the file that appears
//! whole or not at all, and the child that waits to be profiled. [`progress`] and [`account`] only show numbers, [`failure`]
//! is how an error reaches the user, and each verb has a file. Nothing here reads a BPF map or a target's memory.

pub mod account;
pub mod agent;
pub mod args;
pub mod caller;
pub mod command;
pub mod diff;
pub mod distributions;
pub mod doctor;
pub mod dump;
pub mod escape;
pub mod events;
pub mod export;
pub mod failure;
pub mod format;
pub mod habits;
pub mod info;
mod lines;
pub mod output;
pub mod plan;
pub mod profiles;
pub mod program;
pub mod progress;
pub mod record;
pub mod recover;
pub mod report;
pub mod source;
pub mod symbolize;
pub mod table;
pub mod top;
mod watch;
