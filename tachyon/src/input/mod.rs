//! TACH files, ours or CPython's, back to the [`Profile`](crate::profile::Profile) that a recording would have had.
//!
//! Takes files and directories and gives one profile, whose samples go to a [`Sink`](crate::sinks::Sink) like those of a
//! recording. Several files become one profile: a process that is in two of them is one (`identity`), their accounts add up
//! (`accounts`), and samples come in time order for each thread. What is done with samples is up to the sink.
//!
//! ```no_run
//! # fn main() -> Result<(), tachyon::input::InputError> {
//! use tachyon::input::Source;
//! use tachyon::sinks::CollapsedSink;
//!
//! let source = Source::open(&["rotated/".into(), "app.tach".into()])?;
//! let mut sink = CollapsedSink::new(std::io::stdout());
//! let fed = source.feed(&mut sink)?;
//! eprintln!("{} samples of {} threads", fed.samples, fed.threads);
//! # Ok(())
//! # }
//! ```

mod accounts;
pub mod budget;
mod file;
mod filter;
mod find;
mod identity;
mod import;
mod looked;
mod source;
#[cfg(test)]
mod tests;

pub(crate) use file::not_regular;
pub use file::{open, recorder};
pub use filter::Filter;
pub use find::{Found, find};
pub use source::{Fed, FileReader, Source, read};

use crate::advice::{Advice, advises};
use crate::tach::ReadError;
use std::io;
use std::path::PathBuf;

/// Why files are not a profile.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The one file cannot be opened.
    #[error("{0}")]
    Open(#[source] io::Error),
    /// The one file is not a profile, or cannot be read to its end.
    #[error("{0}")]
    Read(#[source] ReadError),
    /// The file is not finished: it is still being recorded.
    #[error("it is being recorded{}", by.map(|pid| format!(" by pid {pid}")).unwrap_or_default())]
    BeingRecorded {
        /// By which process, as far as that can be seen.
        by: Option<u32>,
    },
    /// One file of several, or a directory, cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    OpenOneOf {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// One file of several is not a profile, or cannot be read to its end.
    #[error("cannot read {}: {source}", path.display())]
    ReadOneOf {
        /// Which.
        path: PathBuf,
        /// Why.
        source: ReadError,
    },
    /// A directory without TACH files.
    #[error("there is no TACH file in {}{}", path.display(), if *live { ", only one that is being recorded" } else { "" })]
    Empty {
        /// Which.
        path: PathBuf,
        /// It has a `.part` file.
        live: bool,
    },
    /// No file has a process with this pid.
    #[error("there is no process {0} in the profile")]
    NoSuchPid(u32),
    /// Reading costs more than it should.
    #[error("{0}")]
    Exceeded(#[source] budget::Exceeded),
    /// No thread can be started for reading ahead.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] io::Error),
    /// The sink cannot take what it was given.
    #[error("{0}")]
    Sink(#[source] io::Error),
}

advises!(InputError);

impl Advice for InputError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::BeingRecorded { .. } => Some("`tachyon-bpf recover` makes a snapshot of it".to_owned()),
            _ => None,
        }
    }
}
