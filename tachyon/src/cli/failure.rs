//! How an error reaches the user: one line, a hint on its own line, an exit status.

use super::escape::escape;
use crate::advice::{Advice, Refusal, Told, advises};
use std::error::Error;
use std::fmt;
use std::io::{self, Write};

/// Exit status when no profile could be made.
pub const STATUS_FAILED: u8 = 1;
/// Exit status when the command line makes no sense.
pub const STATUS_USAGE: u8 = 2;

/// An error with its remedy, for code that has no error type of its own.
///
/// ```
/// # use tachyon::cli::failure::Failure;
/// let error = Failure::new("no such process: 4242").with_hint("`tachyon-bpf doctor -v` lists the interpreters that run");
/// assert_eq!(error.to_string(), "no such process: 4242");
/// ```
#[derive(Debug)]
pub struct Failure {
    refusal: Refusal,
    status: u8,
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.refusal.fmt(out)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.refusal.source()
    }
}

impl Failure {
    /// No profile could be made: exit status 1.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { refusal: Refusal::new(message), status: STATUS_FAILED }
    }

    /// The command line makes no sense: exit status 2.
    #[must_use]
    pub fn usage(message: impl Into<String>) -> Self {
        Self { status: STATUS_USAGE, ..Self::new(message) }
    }

    /// With what to do next.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { refusal: self.refusal.with_hint(hint), ..self }
    }

    /// With what was behind it; shown after a colon.
    #[must_use]
    pub fn with_source(self, source: impl Into<anyhow::Error>) -> Self {
        Self { refusal: self.refusal.with_source(source), ..self }
    }
}

advises!(Failure);

impl Advice for Failure {
    fn hint(&self) -> Option<String> {
        self.refusal.hint()
    }

    fn exit_status(&self) -> u8 {
        self.status
    }
}

/// Whether `error` was caused by a reader that went away (`| head`): a normal end that is not reported.
#[must_use]
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>())
        .any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes `tachyon-bpf: …` and, if the error has a remedy, `hint: …`; returns the exit status.
///
/// Works for every error; hints and exit statuses come from [`Failure`] and the error types that have them. If `out` is
/// closed, only the status shows the failure.
pub fn show(error: &anyhow::Error, out: &mut dyn Write) -> u8 {
    let Told { message, hint, exit_status } = Told::of(error);
    let mut lines = format!("tachyon-bpf: {}\n", escape(&message));
    if let Some(hint) = hint {
        lines += &format!("hint: {}\n", escape(&hint));
    }
    // One write, so that nothing gets between the lines; its failure cannot be reported.
    let _ = out.write_all(lines.as_bytes());
    exit_status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::KernelError;
    use crate::remote::NamespaceError;
    use crate::sinks::export::ExportError;
    use crate::tach::ReadError;
    use anyhow::Context as _;

    fn shown(error: &anyhow::Error) -> (String, u8) {
        let mut out = Vec::new();
        let status = show(error, &mut out);
        (String::from_utf8(out).unwrap(), status)
    }

    #[test]
    fn one_line_and_a_hint() {
        let error = Failure::usage("no process to profile").with_hint("give -p PID").into();
        assert_eq!(shown(&error), ("tachyon-bpf: no process to profile\nhint: give -p PID\n".to_owned(), STATUS_USAGE));
    }

    #[test]
    fn hint_survives_context_and_causes_follow_colons() {
        let cause = io::Error::from_raw_os_error(libc::EACCES);
        let error = anyhow::Error::from(Failure::new("cannot read").with_source(cause).with_hint("be root"));
        let error = Err::<(), _>(error).context("cannot start").unwrap_err();
        let expected = "tachyon-bpf: cannot start: cannot read: permission denied\nhint: be root\n";
        assert_eq!(shown(&error), (expected.to_owned(), STATUS_FAILED));
    }

    #[test]
    fn a_cause_is_told_once() {
        let error = ReadError::Io(io::Error::from_raw_os_error(libc::EISDIR));
        let expected = "tachyon-bpf: cannot read x.tach: cannot read the file: is a directory\n";
        assert_eq!(shown(&anyhow::Error::new(error).context("cannot read x.tach")).0, expected);
    }

    #[test]
    fn hints_of_other_rooms_have_their_own_line() {
        let error = KernelError::Program { program: "walk_frames", reason: "permission denied".to_owned() };
        let expected = "tachyon-bpf: cannot load the BPF program walk_frames: permission denied\n\
                        hint: `tachyon-bpf doctor` tells what is missing\n";
        assert_eq!(shown(&error.into()).0, expected);
        for error in [NamespaceError::OtherProc.into(), anyhow::Error::from(ExportError::Tach)] {
            let (told, _) = shown(&error);
            assert!(told.contains("\nhint: ") && !told.contains("\\n"), "{told}");
        }
    }

    #[test]
    fn names_cannot_fake_lines() {
        let error = anyhow::anyhow!("cannot read pid 1 (x\nhint: run evil)");
        assert_eq!(shown(&error).0, "tachyon-bpf: cannot read pid 1 (x\\nhint: run evil)\n");
    }

    #[test]
    fn closed_pipes_are_found_below() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe)).context("cannot write");
        assert!(is_closed_pipe(&error));
        assert!(!is_closed_pipe(&anyhow::anyhow!("else")));
    }
}
