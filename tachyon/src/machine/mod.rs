//! What this machine, and this user on it, can profile: asks by trying, and names the mend of what is missing.
//!
//! [`preflight`] makes and closes a ring buffer, a program and an event; [`access`] tells why a process may not be read.
//! The room knows neither CPython nor recordings.

pub mod access;
pub mod preflight;

pub use preflight::{max_sample_rate, preflight, raise_open_files, target_hint};
