//! What follows from a verdict on a process.

use crate::inspect;
use std::ffi::OsStr;
use tachyon_common::process::{ProcessEntry, flags};

/// Entry of what is not CPython.
pub(super) fn other() -> ProcessEntry {
    ProcessEntry { flags: flags::NOT_PYTHON, ..ProcessEntry::default() }
}

/// Why a Python is not profiled, as an error.
pub(super) fn refusal(verdict: &inspect::Verdict) -> anyhow::Error {
    match verdict {
        inspect::Verdict::Unsupported { implementation, reason } => {
            anyhow::anyhow!("it runs {implementation}: {reason}")
        }
        inspect::Verdict::Python(_) | inspect::Verdict::NotPython => anyhow::anyhow!("it is not a Python process"),
    }
}

/// Whether a mapped file is named like a library.
pub(super) fn is_library(path: &OsStr) -> bool {
    path.as_encoded_bytes().windows(3).any(|part| part == b".so")
}
