//! `line_table` with coverage: `cargo xtask fuzz line_table`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("line_table", input));
