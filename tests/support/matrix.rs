//! Figures for `docs/support-matrix.md`: what the live tests measured, for `cargo xtask docs matrix` to collect.

use crate::{Interpreter, Recording};
use std::io::Write as _;

/// Records how many samples of a test were exactly right, if `TACHYON_MATRIX` names a file for that.
///
/// # Panics
/// When the file cannot be written.
pub fn note(interpreter: &Interpreter, test: &str, right: usize, recording: &Recording) {
    let Some(path) = std::env::var_os("TACHYON_MATRIX") else { return };
    let line = serde_json::json!({
        "interpreter": interpreter.name,
        "version": recording.report.processes[0].python_version,
        "test": test,
        "right": right,
        "samples": recording.recorded.samples.len(),
    });
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    let written = file.and_then(|mut file| writeln!(file, "{line}"));
    written.expect("the file of figures can be written");
}
