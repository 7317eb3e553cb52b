//! `eh_frame` with coverage: `cargo xtask fuzz eh_frame`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("eh_frame", input));
