//! What follows from a look at a process: the same decision no matter who looked, or when.

use crate::inspect::{self, InspectError, Interpreter, Refusal};
use crate::remote::RemoteError;
use std::ffi::OsStr;

/// What a look at a process has found.
#[derive(Debug)]
pub(super) enum Found {
    /// A CPython that can be profiled.
    Python(Box<Interpreter>),
    /// A Python that cannot be profiled.
    Refused(String),
    /// A CPython about which nothing more can be said yet: the dynamic linker first maps a whole library, then its parts
    /// over that. In between, the mappings do not show where the library was loaded; they do once the next one is mapped.
    Unclear(String),
    /// Nothing that looks like Python is mapped.
    Nothing,
    /// It could not be looked at.
    Unreadable(InspectError),
    /// It is gone.
    Gone(RemoteError),
}

impl Found {
    /// From the verdict of the inspection; the layout has not been tested yet.
    pub fn of(inspected: Result<inspect::Verdict, InspectError>) -> Self {
        match inspected {
            Ok(inspect::Verdict::Python(interpreter)) => Self::Python(interpreter),
            Ok(inspect::Verdict::NotPython) => Self::Nothing,
            Ok(inspect::Verdict::Unsupported { implementation, reason }) => {
                let why = format!("it runs {implementation}: {reason}");
                if reason == Refusal::NoLoadBias { Self::Unclear(why) } else { Self::Refused(why) }
            }
            Err(InspectError::Process(error)) if error.is_gone() => Self::Gone(error),
            Err(error) => Self::Unreadable(error),
        }
    }

    /// As an error, for a caller that asked for this very process.
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Refused(why) | Self::Unclear(why) => anyhow::anyhow!(why),
            Self::Unreadable(error) => error.into(),
            Self::Gone(error) => error.into(),
            Self::Python(_) | Self::Nothing => anyhow::anyhow!("it is not a Python process"),
        }
    }
}

/// What was decided about a program before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// Nothing, and it still has time.
    Open,
    /// Nothing, and this is the last look for a while.
    LastLook,
    /// That it is not CPython. It may have loaded it since.
    Other,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// It is CPython.
    Python,
    /// It is something else. `tell`: the user should know why.
    Other { tell: bool },
    /// Nothing changes.
    Leave { tell: bool },
    /// The look was inconclusive; there will be another.
    Wait { looked_at: bool },
}

/// The decision.
pub(super) fn decide(found: &Found, before: Before) -> Step {
    match (found, before) {
        (Found::Python(_), _) => Step::Python,
        (Found::Gone(_), Before::Other) => Step::Leave { tell: false },
        (Found::Gone(_), _) => Step::Wait { looked_at: false },
        (Found::Refused(_), Before::Other) => Step::Leave { tell: true },
        (Found::Refused(_), _) => Step::Other { tell: true },
        (Found::Nothing, Before::Open) => Step::Wait { looked_at: true },
        (Found::Unclear(_) | Found::Unreadable(_), Before::Open) => Step::Wait { looked_at: false },
        (Found::Nothing, Before::LastLook) => Step::Other { tell: false },
        (Found::Unclear(_) | Found::Unreadable(_), Before::LastLook) => Step::Other { tell: true },
        // Between two mappings of a library that is being loaded: the next mapping will show more.
        (Found::Nothing | Found::Unclear(_) | Found::Unreadable(_), Before::Other) => Step::Leave { tell: false },
    }
}

/// Whether a mapped file is named like a library.
pub(super) fn is_library(path: &OsStr) -> bool {
    path.as_encoded_bytes().windows(3).any(|part| part == b".so")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Pid;

    #[test]
    fn one_decision_for_every_look() {
        use Before::{LastLook, Open, Other};
        let refused = || Found::Refused("it runs PyPy".to_owned());
        let unclear = || Found::of(Ok(unsupported(Refusal::NoLoadBias)));
        let unreadable = || Found::Unreadable(InspectError::File(RemoteError::NoSuchProcess(Pid(1))));
        let gone = || Found::of(Err(InspectError::Process(RemoteError::NoSuchProcess(Pid(1)))));
        let wait = |looked_at| Step::Wait { looked_at };
        let (other, leave) = (|tell| Step::Other { tell }, |tell| Step::Leave { tell });
        for (found, steps) in [
            (Found::Nothing, [wait(true), other(false), leave(false)]),
            (refused(), [other(true), other(true), leave(true)]),
            (Found::of(Ok(unsupported(Refusal::NotCPython))), [other(true), other(true), leave(true)]),
            (unclear(), [wait(false), other(true), leave(false)]),
            (unreadable(), [wait(false), other(true), leave(false)]),
            (gone(), [wait(false), wait(false), leave(false)]),
        ] {
            for (before, step) in [Open, LastLook, Other].into_iter().zip(steps) {
                assert_eq!(decide(&found, before), step, "{found:?}, {before:?}");
            }
        }
    }

    fn unsupported(reason: Refusal) -> inspect::Verdict {
        inspect::Verdict::Unsupported { implementation: "CPython 3.12.1".to_owned(), reason }
    }

    #[test]
    fn errors_say_what_was_found() {
        let found = Found::of(Ok(unsupported(Refusal::NotCPython)));
        assert_eq!(found.into_error().to_string(), "it runs CPython 3.12.1: only CPython can be profiled");
    }

    #[test]
    fn libraries() {
        for (path, is) in [("/usr/lib/libc.so.6", true), ("/a/b.so", true), ("/usr/bin/python3", false)] {
            assert_eq!(is_library(OsStr::new(path)), is, "{path}");
        }
    }
}
