//! Ends this program if files from elsewhere cost more than files of their size should, whatever it is doing at that moment.

use super::failure::{self, STATUS_FAILED};
use super::output::remove_unfinished;
use crate::input::budget::Watch;
use std::io;
use std::path::PathBuf;

/// Watches what is done with these files (`verb`, for the message) until the result is dropped; with `force_large`, watches
/// nothing. If it is too much, files being written are removed.
#[must_use]
pub fn over(inputs: &[PathBuf], force_large: bool, verb: &str) -> Option<Watch> {
    if force_large {
        return None;
    }
    // A file that cannot be found is reported when it is opened.
    let files = crate::input::find(inputs).map(|found| found.files).unwrap_or_default();
    let bytes = files.iter().filter_map(|file| std::fs::metadata(file).ok()).map(|stat| stat.len()).sum();
    let what = told(verb, inputs);
    Some(Watch::start(bytes, move |exceeded| {
        remove_unfinished();
        failure::show(&anyhow::Error::new(exceeded).context(what), &mut io::stderr());
        // SAFETY: the process ends, whatever its other threads do; the kernel closes what they have open.
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
