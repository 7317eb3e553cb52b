//! `elf` with coverage: `cargo xtask fuzz elf`.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| tachyon_fuzz::covered::run("elf", input));
