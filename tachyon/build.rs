//! Puts the BPF object where `kernel` includes it from. It compiles nothing: the object is committed.
//!
//! `TACHYON_BPF_OBJECT` names another object, for instance one fresh from `cargo xtask bpf build`.

use std::path::PathBuf;
use std::{env, fs};

const OVERRIDE: &str = "TACHYON_BPF_OBJECT";

fn main() -> Result<(), String> {
    println!("cargo::rerun-if-env-changed={OVERRIDE}");
    let var = |name| env::var_os(name).map(PathBuf::from).ok_or_else(|| format!("cargo sets no {name}"));
    let object = match env::var_os(OVERRIDE).filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => var("CARGO_MANIFEST_DIR")?.join("prebuilt/tachyon.bpf.o"),
    };
    println!("cargo::rerun-if-changed={}", object.display());
    let target = var("OUT_DIR")?.join("tachyon.bpf.o");
    let bytes =
        fs::read(&object).map_err(|error| format!("cannot read the BPF object {}: {error}", object.display()))?;
    fs::write(&target, bytes).map_err(|error| format!("cannot write {}: {error}", target.display()))
}
