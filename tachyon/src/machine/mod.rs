//! What this machine, and this user on it, can profile: finds out by trying, and names the remedy for what is missing.
//!
//! [`preflight`] makes and closes a ring buffer, a program and an event; [`access`] says why a process may not be read.
//! This module knows nothing about CPython or recordings.

pub mod access;
pub mod preflight;

pub use preflight::{max_sample_rate, preflight, raise_open_files, target_hint};
