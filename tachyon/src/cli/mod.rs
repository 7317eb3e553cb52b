//! The command line: what the user typed, what it means, and how the answer is shown.
//!
//! [`args`] is syntax, [`plan`] is meaning: it turns arguments into a [`plan::Plan`], which `recording` executes.
//! [`output`] and [`command`] are the two things a plan needs from the system, the file that appears whole or not at
//! all and the child that waits to be profiled, and [`input`] opens the files it reads. [`progress`] and [`account`] only show numbers, [`failure`] is how an
//! error reaches the user, [`doctor`], [`preflight`] and [`access`] ask the machine. Nothing here knows BPF maps or interpreters.

pub mod access;
pub mod account;
pub mod args;
pub mod caller;
pub mod command;
pub mod doctor;
pub mod dump;
pub mod escape;
pub mod export;
pub mod failure;
pub mod format;
pub mod info;
pub mod input;
pub mod output;
pub mod plan;
pub mod preflight;
pub mod progress;
pub mod recover;
