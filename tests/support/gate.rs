//! Decides whether live tests may run, and runs one at a time: they measure shares and rates, and would disturb each other.

use crate::not_run;
use std::fs::File;
use std::path::Path;

/// Held while a live test runs; no other one does, in this process or another.
#[derive(Debug)]
pub struct LiveGuard {
    _lock: File,
}

/// The right to run a live test, or `None` if this machine cannot, after saying why.
///
/// # Panics
/// In CI, or with `TACHYON_LIVE_TESTS=required` (which `cargo xtask test` sets), when this machine cannot.
#[must_use]
pub fn live() -> Option<LiveGuard> {
    if let Err(reason) = possible() {
        not_run(&format!("root and BPF: {reason}"));
        return None;
    }
    let path = std::env::temp_dir().join("tachyon-live-tests.lock");
    let lock = File::create(&path).unwrap_or_else(|error| panic!("cannot create {}: {error}", path.display()));
    lock.lock().unwrap_or_else(|error| panic!("cannot lock {}: {error}", path.display()));
    Some(LiveGuard { _lock: lock })
}

fn possible() -> Result<(), String> {
    // SAFETY: geteuid(2) has no precondition and cannot fail.
    if unsafe { libc::geteuid() } != 0 {
        return Err("not root".to_owned());
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        return Err("this kernel has no /sys/kernel/btf/vmlinux".to_owned());
    }
    Ok(())
}
