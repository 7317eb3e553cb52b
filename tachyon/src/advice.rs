//! Errors that know what to do next.
//!
//! Every room has its own errors; most of them know their remedy. [`Advice`] is how they state it; the command line
//! shows it as a `hint:` line.
//!
//! Errors travel as `dyn Error`, which can only be tested for types by name. So each type states beside its [`Advice`]
//! that it has some (`advises!`), and [`of`] tests for them all; no room has to know the errors of another.

use std::error::Error;
use std::io;

/// An error that may know its remedy.
pub trait Advice: Error {
    /// What to do next, as one line; `None` if unknown.
    fn hint(&self) -> Option<String>;

    /// The exit status of a program that ends because of it.
    fn exit_status(&self) -> u8 {
        1
    }
}

/// Casts an error to a certain type.
pub(crate) struct Adviser(pub(crate) for<'a> fn(&'a (dyn Error + 'static)) -> Option<&'a dyn Advice>);

inventory::collect!(Adviser);

/// Lets [`of`] know that errors of a type have advice.
macro_rules! advises {
    ($error:ty) => {
        inventory::submit! {
            $crate::advice::Adviser(|error| error.downcast_ref::<$error>().map(|error| error as &dyn $crate::advice::Advice))
        }
    };
}
pub(crate) use advises;

/// The advice that an error has, or that of an error inside an I/O error.
#[must_use]
pub fn of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a dyn Advice> {
    let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let errors = [Some(error), held.map(|held| held as &(dyn Error + 'static))];
    let advice = |error| inventory::iter::<Adviser>.into_iter().find_map(|Adviser(adviser)| adviser(error));
    errors.into_iter().flatten().find_map(advice)
}

/// An error in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// What happened, causes after colons. It may contain names from anywhere: escape it where it is shown.
    pub message: String,
    /// What to do next, likewise.
    pub hint: Option<String>,
    /// The exit status of a program that ends because of it.
    pub exit_status: u8,
}

impl Told {
    /// Takes an error with its causes; hint and exit status are those of the first that has some.
    #[must_use]
    pub fn of(error: &anyhow::Error) -> Self {
        let mut message = String::new();
        for cause in error.chain() {
            // If an error's own text ends with its cause's, as with some libraries, the cause is not repeated.
            match message.strip_suffix(&cause.to_string()).map(str::len) {
                Some(before) => message.truncate(before),
                None if message.is_empty() => {}
                None => message += ": ",
            }
            message += &cause_text(cause);
        }
        let (hint, exit_status) = error.chain().find_map(mend).unwrap_or((None, 1));
        Self { message, hint, exit_status }
    }
}

/// A cause in our own style: the kernel's errors in lower case and without their number.
pub(crate) fn cause_text(cause: &(dyn Error + 'static)) -> String {
    match cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
        Some(errno) => nix::Error::from_raw(errno).desc().to_lowercase(),
        None => cause.to_string(),
    }
}

/// Hint and exit status of an error that has them.
fn mend(cause: &(dyn Error + 'static)) -> Option<(Option<String>, u8)> {
    let advice = of(cause)?;
    let (hint, status) = (advice.hint(), advice.exit_status());
    // An error further down may know more than one that knows nothing.
    (hint.is_some() || status != 1).then_some((hint, status))
}

/// A message with its remedy, for failures that have no error type of their own.
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

    /// Adds what to do next.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the underlying cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<anyhow::Error>) -> Self {
        self.source = Some(source.into());
        self
    }
}

advises!(Refusal);

impl Advice for Refusal {
    fn hint(&self) -> Option<String> {
        self.hint.clone()
    }
}
