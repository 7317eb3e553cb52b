//! `tach` with coverage: `cargo xtask fuzz tach`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("tach", input));
