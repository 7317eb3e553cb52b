//! `symbols` with coverage: `cargo xtask fuzz symbols`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("symbols", input));
