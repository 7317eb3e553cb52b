//! `debug_offsets` with coverage: `cargo xtask fuzz debug_offsets`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("debug_offsets", input));
