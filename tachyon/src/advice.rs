//! Errors that know what to do next.
//!
//! Every room has its own errors; what they have in common is that most know their mend. [`Advice`] is how they say it;
//! the command line shows it as a `hint:` line.

use std::error::Error;

/// An error that may know its mend.
pub trait Advice: Error {
    /// What to do next, as one line; `None` where nothing is known.
    fn hint(&self) -> Option<String>;

    /// The exit status of a program that ends for it.
    fn exit_status(&self) -> u8 {
        1
    }
}

/// A message with its mend, for what has no error type of its own.
///
/// ```
/// # use tachyon::advice::{Advice as _, Refusal};
/// let error = Refusal::new("pid 4242 is not a Python process").with_hint("`tachyon-bpf doctor -v` lists those that run");
/// assert!(error.hint().is_some_and(|hint| hint.contains("doctor")));
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    message: String,
    hint: Option<String>,
    source: Option<anyhow::Error>,
}

impl Refusal {
    /// What was attempted, on what, and what was found.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), hint: None, source: None }
    }

    /// With what to do next.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// With what was behind it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<anyhow::Error>) -> Self {
        self.source = Some(source.into());
        self
    }
}

impl Advice for Refusal {
    fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}
