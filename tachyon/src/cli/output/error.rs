//! Why a file could not be written, and what to do about it.

use crate::advice::{Advice, advises};
use std::io;
use std::path::PathBuf;

/// The action in [`OutputError::Part`] for changing a file's owner.
pub(super) const CHOWN: &str = "give to the calling user";

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// Something exists at the path.
    #[error("cannot write {}: it exists", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// Something that `--force` does not replace exists at the path.
    #[error("cannot replace {}: it is {found}", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What exists there.
        found: &'static str,
    },
    /// Something that is not a directory exists where one is to be.
    #[error("cannot write into {}: it is {found}", path.display())]
    NotDirectory {
        /// The path.
        path: PathBuf,
        /// What exists there.
        found: &'static str,
    },
    /// The path has no file name.
    #[error("cannot write {}: it names no file", path.display())]
    NoFileName {
        /// The path.
        path: PathBuf,
    },
    /// The directory cannot take a file.
    #[error("cannot write into {}", directory.display())]
    Directory {
        /// The directory.
        directory: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A `.part` file of a recording that was cut is in the way.
    #[error("cannot create {}: it is left from a run that was cut", part.display())]
    StalePart {
        /// The `.part` file.
        part: PathBuf,
    },
    /// The same for a directory (`--split process`).
    #[error("cannot create {}: it is left from a recording that was cut", part.display())]
    StaleDirectory {
        /// The `.part` directory.
        part: PathBuf,
    },
    /// Another process is writing the same file.
    #[error("cannot create {}: another tachyon-bpf is writing it", part.display())]
    BusyPart {
        /// The `.part` file.
        part: PathBuf,
    },
    /// The `.part` file could not be made or changed.
    #[error("cannot {action} {}", part.display())]
    Part {
        /// What was attempted.
        action: &'static str,
        /// The `.part` file.
        part: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The finished file could not take its name; it is kept as `.part`.
    #[error("cannot rename {} to {}", part.display(), path.display())]
    Rename {
        /// The `.part` file, which is complete and stays.
        part: PathBuf,
        /// The name it should have.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The `.part` file was removed, or the directory with it.
    #[error("cannot write {}: {}", path.display(), gone(kept))]
    Gone {
        /// The name it should have.
        path: PathBuf,
        /// Where the complete file is instead.
        kept: io::Result<PathBuf>,
    },
    /// Standard output did not take a profile, which is kept.
    #[error("cannot write to standard output{}", not_kept(kept))]
    StdoutKept {
        /// Why not.
        source: io::Error,
        /// Where the complete file is instead.
        kept: io::Result<PathBuf>,
    },
    /// Standard output could not be written.
    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),
}

fn gone(kept: &io::Result<PathBuf>) -> String {
    const GONE: &str = "its directory, or the unfinished file in it, was removed meanwhile";
    format!("{GONE}{}", not_kept(kept))
}

fn not_kept(kept: &io::Result<PathBuf>) -> String {
    match kept {
        Ok(_) => String::new(),
        Err(error) => format!(", and a copy among the temporary files cannot be made: {error}"),
    }
}

advises!(OutputError);

impl Advice for OutputError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::Exists { .. } => Some("give another path, or --force to replace it".to_owned()),
            Self::NotRegular { .. } => Some("only a regular file is replaced: give another path".to_owned()),
            Self::NotDirectory { .. } => Some("give the path of a directory that is not there yet".to_owned()),
            Self::NoFileName { .. } => Some("give the path of a file".to_owned()),
            Self::Directory { source, .. } => Some(match source.kind() {
                io::ErrorKind::NotFound => "create the directory first, or give another path".to_owned(),
                _ => "give a path in a directory that you may write".to_owned(),
            }),
            // Other formats have nothing to recover.
            Self::StalePart { part } => Some(match part.to_string_lossy().contains(".tach.") {
                true => "`tachyon-bpf recover` makes it readable; give --force to replace it".to_owned(),
                false => "give --force to replace it".to_owned(),
            }),
            Self::StaleDirectory { part } => {
                let whole = part.join(super::directory::WHOLE).with_added_extension("part");
                let whole = whole.display();
                Some(format!("`tachyon-bpf recover {whole}` makes it readable; give --force to replace it"))
            }
            Self::BusyPart { .. } => Some("give another path".to_owned()),
            Self::Part { action: CHOWN, .. } => {
                Some("unset SUDO_UID and SUDO_GID to leave the file to root".to_owned())
            }
            Self::Rename { part, .. } => Some(format!("the whole file is kept as {}", part.display())),
            Self::Gone { kept: Ok(kept), .. } | Self::StdoutKept { kept: Ok(kept), .. } => {
                Some(format!("the whole file is kept as {}", kept.display()))
            }
            Self::Gone { .. } | Self::Part { .. } | Self::StdoutKept { .. } | Self::Stdout(_) => None,
        }
    }
}
