//! The outcome of a push, classified by what can be done about it.

use std::error::Error;
use std::fmt;
use std::time::Duration;

/// Why it failed: the label `reason` of metrics, and the first word of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The server cannot be reached.
    Unreachable,
    /// The server does not answer in time.
    Timeout,
    /// The connection ended in the middle.
    Broken,
    /// The client's or the server's certificate is wrong.
    Tls,
    /// The proxy refuses.
    Proxy,
    /// No token, a wrong one, or one without permission.
    Unauthorized,
    /// Wrong address, or a server that does not support profiles.
    NotFound,
    /// A file of the configuration (a token, a certificate) cannot be read.
    Configuration,
    /// The server has too much to do.
    Busy,
    /// The server failed.
    ServerError,
    /// The server refuses this content.
    Rejected,
    /// Older than the server accepts.
    TooOld,
    /// Larger than the server accepts.
    TooLarge,
    /// More series than the server accepts.
    SeriesLimit,
    /// Too many labels, too long ones, or a required one missing.
    Labels,
}

impl Reason {
    /// Its name in messages and metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unreachable => "unreachable",
            Self::Timeout => "timeout",
            Self::Broken => "broken",
            Self::Tls => "tls",
            Self::Proxy => "proxy",
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not_found",
            Self::Configuration => "configuration",
            Self::Busy => "busy",
            Self::ServerError => "server_error",
            Self::Rejected => "rejected",
            Self::TooOld => "too_old",
            Self::TooLarge => "too_large",
            Self::SeriesLimit => "series_limit",
            Self::Labels => "labels",
        }
    }

    /// What to do.
    #[must_use]
    pub const fn class(self) -> Class {
        match self {
            Self::Unreachable | Self::Timeout | Self::Broken | Self::Busy | Self::ServerError => Class::Retry,
            Self::Tls | Self::Proxy | Self::Unauthorized | Self::NotFound | Self::Configuration => Class::Wait,
            Self::Rejected | Self::TooOld | Self::TooLarge | Self::SeriesLimit | Self::Labels => Class::Refused,
        }
    }
}

/// What to do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// It may work soon.
    Retry,
    /// Someone has to fix something first. Nothing is given up meanwhile.
    Wait,
    /// It will never be accepted.
    Refused,
}

/// A push that failed.
#[derive(Debug)]
pub struct PushError {
    /// Why.
    pub reason: Reason,
    /// In words, without secrets.
    pub message: String,
    /// What to do, if that is known.
    pub hint: Option<String>,
    /// Whether the server may have accepted it all the same: then another try may count it twice.
    pub doubtful: bool,
    /// When the server wants to be asked again.
    pub retry_after: Option<Duration>,
}

impl PushError {
    /// An error with this reason.
    #[must_use]
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), hint: None, doubtful: false, retry_after: None }
    }

    /// With what to do.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Marks that the server may have accepted it.
    #[must_use]
    pub fn in_doubt(mut self) -> Self {
        self.doubtful = true;
        self
    }

    /// Sets when the server wants to be asked again.
    #[must_use]
    pub fn after(mut self, after: Option<Duration>) -> Self {
        self.retry_after = after;
        self
    }
}

impl fmt::Display for PushError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.reason.name(), self.message)
    }
}

impl Error for PushError {}

/// What an HTTP status says about a push.
#[must_use]
pub fn of_status(status: u16) -> Option<(Reason, bool)> {
    Some(match status {
        200..=299 => return None,
        401 | 403 => (Reason::Unauthorized, false),
        407 => (Reason::Proxy, false),
        300..=399 | 404 | 405 | 410 | 501 => (Reason::NotFound, false),
        408 => (Reason::Timeout, true),
        413 => (Reason::TooLarge, false),
        // These say that nothing was done.
        429 | 503 => (Reason::Busy, false),
        400..=499 => (Reason::Rejected, false),
        // A gateway does not know what the server behind it did.
        _ => (Reason::ServerError, true),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statuses() {
        for (status, expected) in [
            (200, None),
            (202, None),
            (401, Some((Reason::Unauthorized, false))),
            (404, Some((Reason::NotFound, false))),
            (413, Some((Reason::TooLarge, false))),
            (422, Some((Reason::Rejected, false))),
            (429, Some((Reason::Busy, false))),
            (503, Some((Reason::Busy, false))),
            (504, Some((Reason::ServerError, true))),
        ] {
            assert_eq!(of_status(status), expected, "{status}");
        }
        assert_eq!(Reason::Unauthorized.class(), Class::Wait, "nothing is given up for a wrong token");
    }
}
