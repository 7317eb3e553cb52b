//! How an error reaches the user: one line, a hint on its own line, an exit status.

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use tachyon::advice::Told;
use tachyon::sinks::text::escape_controls;

/// Exit status when the command line makes no sense.
const STATUS_USAGE: u8 = 2;

/// A command line that makes no sense.
#[derive(Debug)]
pub(crate) struct Usage {
    message: String,
    hint: String,
}

impl Usage {
    /// A message, and what to do.
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }
}

impl fmt::Display for Usage {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.message)
    }
}

impl Error for Usage {}

/// clap's several lines as one, with the remedy.
pub(crate) fn usage(error: &clap::Error) -> Usage {
    let text = error.render().to_string();
    let mut paragraphs =
        text.split("\n\n").map(|paragraph| paragraph.lines().map(str::trim).collect::<Vec<_>>().join(" "));
    let message = paragraphs.next().unwrap_or_default();
    let tip = paragraphs.find_map(|paragraph| paragraph.trim().strip_prefix("tip: ").map(str::to_owned));
    Usage {
        message: message.strip_prefix("error: ").unwrap_or(&message).to_owned(),
        hint: tip.unwrap_or_else(|| "tachyon-fleet --help explains all commands".to_owned()),
    }
}

/// Whether a reader that went away is behind an error.
pub(crate) fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// Writes `tachyon-fleet: …` and, if the error has a remedy, `hint: …`; returns the exit status.
pub(crate) fn show(error: &anyhow::Error, out: &mut dyn Write) -> u8 {
    let Told { message, hint, exit_status } = Told::of(error);
    let (hint, exit_status) = match error.downcast_ref::<Usage>() {
        Some(usage) => (Some(usage.hint.clone()), STATUS_USAGE),
        None => (hint, exit_status),
    };
    let mut lines = format!("tachyon-fleet: {}\n", escape_controls(&message));
    if let Some(hint) = hint {
        lines += &format!("hint: {}\n", escape_controls(&hint));
    }
    // One write, so that nothing gets between the lines; its failure cannot be reported.
    let _ = out.write_all(lines.as_bytes());
    exit_status
}

#[cfg(test)]
mod tests {
    use super::*;
    use tachyon::advice::Refusal;

    #[test]
    fn a_message_and_a_hint() {
        let error = Refusal::new("x\ny").with_hint("z").with_source(io::Error::from_raw_os_error(13));
        let mut out = Vec::new();
        assert_eq!(show(&error.into(), &mut out), 1);
        assert_eq!(String::from_utf8(out).unwrap(), "tachyon-fleet: x\\ny: permission denied\nhint: z\n");
    }

    #[test]
    fn what_clap_says_is_one_line() {
        let error = crate::args::parse(["tachyon-fleet", "convrt"].map(Into::into).to_vec()).unwrap_err();
        let mut out = Vec::new();
        assert_eq!(show(&usage(&error).into(), &mut out), STATUS_USAGE);
        let told = String::from_utf8(out).unwrap();
        assert!(told.starts_with("tachyon-fleet: unrecognized subcommand 'convrt'\nhint: "), "{told}");
        assert!(told.contains("'convert'") && told.lines().count() == 2, "{told}");
    }
}
