//! Ends this program when files from elsewhere cost more than files of their size should, wherever it is at that moment.

use super::failure::{self, STATUS_FAILED};
use super::output::remove_unfinished;
use crate::input::budget::Watch;
use std::io;
use std::path::PathBuf;

/// Watches over what is done with these files (`verb`, for the message) until the result is dropped; `force_large`: over nothing.
/// What is being written when it is too much is removed.
#[must_use]
pub fn over(inputs: &[PathBuf], force_large: bool, verb: &str) -> Option<Watch> {
    if force_large {
        return None;
    }
    // What cannot be found is told by who opens it.
    let files = crate::input::find(inputs).map(|found| found.files).unwrap_or_default();
    let bytes = files.iter().filter_map(|file| std::fs::metadata(file).ok()).map(|stat| stat.len()).sum();
    let what = told(verb, inputs);
    Some(Watch::start(bytes, move |exceeded| {
        remove_unfinished();
        failure::show(&anyhow::Error::new(exceeded).context(what), &mut io::stderr());
        // SAFETY: the process ends, whatever its other threads do; what they have open the kernel closes.
        unsafe { libc::_exit(STATUS_FAILED.into()) };
    }))
}

/// How a message about these begins.
fn told(verb: &str, inputs: &[PathBuf]) -> String {
    match inputs {
        [input] => format!("cannot {verb} {}", input.display()),
        _ => format!("cannot {verb} these files"),
    }
}
