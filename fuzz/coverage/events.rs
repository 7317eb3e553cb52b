//! `events` with coverage: `cargo xtask fuzz events`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("events", input));
