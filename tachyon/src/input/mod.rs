//! TACH files, ours or CPython's, back to the [`Profile`](crate::profile::Profile) that a recording would have had.
//!
//! In: files and directories, out: one profile, whose samples go to a [`Sink`](crate::sinks::Sink) as those of a recording
//! do. Several files are one profile: a process that is in two of them is one (`identity`), their accounts add up
//! (`accounts`), and samples come in time order for each thread. What samples are for is the sink's business.
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

/// Why files are no profile.
#[derive(Debug, thiserror::Error)]
pub enum InputError {
    /// The one file cannot be opened.
    #[error("{0}")]
    Open(#[source] io::Error),
    /// The one file is no profile, or cannot be read to its end.
    #[error("{0}")]
    Read(#[source] ReadError),
    /// The file is not finished: somebody records to it.
    #[error("it is being recorded{}", by.map(|pid| format!(" by pid {pid}")).unwrap_or_default())]
    BeingRecorded {
        /// Who, as far as that can be seen.
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
    /// One file of several is no profile, or cannot be read to its end.
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
    /// It costs more than it should.
    #[error("{0}")]
    Exceeded(#[source] budget::Exceeded),
    /// A thread that reads ahead cannot be had.
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
