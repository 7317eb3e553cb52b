//! Tests that need something a machine may lack: in CI nothing may be missing. Also compiled into the tests of the
//! crate `tachyon`, whose unit tests cannot use this package.

/// Says that a test was not run, and why.
///
/// # Panics
/// In CI, and with `TACHYON_LIVE_TESTS=required` (which `cargo xtask test` sets).
pub fn not_run(needs: &str) {
    let says = |name: &str, value: &str| std::env::var(name).is_ok_and(|found| found == value);
    let required = says("CI", "true") || says("TACHYON_LIVE_TESTS", "required");
    assert!(!required, "this test must run here, and needs {needs}");
    println!("NOT RUN: needs {needs}");
}
