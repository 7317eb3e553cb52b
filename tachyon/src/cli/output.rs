//! Files that appear whole or not at all.
//!
//! A file is written as `PATH.part`, created new and readable by its owner only, and takes its name when it is done;
//! nothing at `PATH` is replaced unless the user said `--force`, and then only a regular file. Under sudo it belongs to
//! the calling user. Standard output goes through an unnamed temporary file, because a TACH header is written last and
//! a pipe cannot seek.

mod directory;
mod error;
mod place;
mod stdout;
mod unfinished;

pub use directory::{OutputDirectory, WHOLE, check_directory, create_directory};
pub use error::OutputError;
pub use stdout::is_unread;
pub use unfinished::remove_unfinished;

use super::caller::Caller;
use crate::sinks::Format;
use crate::sinks::export::{Companion, ExportOptions};
use crate::sinks::gperftools::companion_path;
use error::CHOWN;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::fchown;
use place::Place;
use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use unfinished::Unfinished;

/// Where a file goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Destination {
    /// To this path.
    Path(PathBuf),
    /// To standard output (`-o -`), at the end.
    Stdout,
}

impl Destination {
    /// What `-o` or `--report` means: `-` is standard output.
    #[must_use]
    pub fn from_argument(path: PathBuf) -> Self {
        if path.as_os_str() == "-" { Self::Stdout } else { Self::Path(path) }
    }

    /// Whether both are the same place, however they are written.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Path(one), Self::Path(other)) => match (std::path::absolute(one), std::path::absolute(other)) {
                (Ok(one), Ok(other)) => one == other,
                _ => one == other,
            },
            _ => self == other,
        }
    }
}

/// A file to write, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputPlan {
    /// Where it goes.
    pub destination: Destination,
    /// Its format.
    pub format: Format,
    /// Whether to replace an existing regular file.
    pub force: bool,
}

impl OutputPlan {
    /// Where the second file goes, if the format has one.
    #[must_use]
    pub fn companion(&self) -> Option<PathBuf> {
        match (self.format, &self.destination) {
            (Format::Gperftools, Destination::Path(path)) => {
                let path = companion_path(path);
                // The profile contains the path, which must be valid wherever it is read.
                Some(std::path::absolute(&path).unwrap_or(path))
            }
            _ => None,
        }
    }

    /// Whether a flame graph is wanted as a bare SVG.
    #[must_use]
    pub fn is_svg(&self) -> bool {
        matches!(&self.destination, Destination::Path(path) if ExportOptions::svg_wanted(path))
    }

    /// Checks that all its files could be written now, without touching anything.
    ///
    /// # Errors
    /// The errors of [`OutputFile::create`].
    pub fn check(&self) -> Result<(), OutputError> {
        check(&self.destination, self.force)?;
        self.companion().map_or(Ok(()), |path| check(&Destination::Path(path), self.force))
    }

    /// Creates the second file, if the format has one; in `directory`, if the first one is there.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create_companion(
        &self,
        directory: Option<&OutputDirectory>,
    ) -> Result<Option<(OutputFile, Companion)>, OutputError> {
        let Some(path) = self.companion() else { return Ok(None) };
        let output = match directory {
            Some(directory) => directory.create_file(&path)?,
            None => OutputFile::create(&Destination::Path(path.clone()), self.force)?,
        };
        let file = output.try_clone_file().map_err(|source| OutputError::Part {
            action: "open",
            part: output.part_path().unwrap_or_default(),
            source,
        })?;
        Ok(Some((output, Companion { file: Box::new(file), path })))
    }
}

/// File name ending while a file is being written.
const PART: &str = ".part";

/// Checks that a file could be written to `destination` now, without touching anything.
///
/// # Errors
/// The errors of [`OutputFile::create`].
pub fn check(destination: &Destination, force: bool) -> Result<(), OutputError> {
    let Destination::Path(path) = destination else { return Ok(()) };
    let place = Place::of(path, PART)?;
    place.check_target(force)?;
    if place.stat(&place.part_name).is_ok() {
        // Whether it is stale is decided by `create`, which can replace it; without --force both cases are refused.
        place.judge_part(force)?;
    }
    Ok(())
}

/// A file that is being written. If dropped without [`OutputFile::commit`] or [`OutputFile::keep_part`] it is removed.
///
/// ```no_run
/// # use tachyon::cli::output::{Destination, OutputFile};
/// # use std::io::Write;
/// let output = OutputFile::create(&Destination::Path("out.tach".into()), false)?;
/// output.file().write_all(b"...")?;
/// output.commit()?;
/// # Ok::<(), anyhow::Error>(())
/// ```
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    /// `None` for standard output.
    place: Option<Place>,
    force: bool,
    /// Whether the `.part` file is to be removed on drop.
    pending: bool,
    /// Whether its journal and tail are, too.
    has_journal: bool,
    _unfinished: Option<Unfinished>,
}

impl OutputFile {
    /// Creates the `.part` file (mode 0600, never through a symlink) and locks it, so that a later run can distinguish
    /// a cut recording from a running one.
    ///
    /// # Errors
    /// When something exists at the path, or the directory cannot be written.
    pub fn create(destination: &Destination, force: bool) -> Result<Self, OutputError> {
        Self::create_as(destination, force, PART)
    }

    /// The same, but as `PATH.recovered.part`, for what is made from a `PATH.part` that must stay.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create_recovered(destination: &Destination, force: bool) -> Result<Self, OutputError> {
        Self::create_as(destination, force, ".recovered.part")
    }

    fn create_as(destination: &Destination, force: bool, ending: &str) -> Result<Self, OutputError> {
        let Destination::Path(path) = destination else {
            let file = tempfile::tempfile().map_err(OutputError::Stdout)?;
            let (place, _unfinished) = (None, None);
            return Ok(Self { file, place, force, pending: false, has_journal: false, _unfinished });
        };
        Self::create_at(Place::of(path, ending)?, force)
    }

    fn create_at(place: Place, force: bool) -> Result<Self, OutputError> {
        place.check_target(force)?;
        let file = match place.create_new(&place.part_name) {
            Err(nix::Error::EEXIST) => {
                place.judge_part(force)?;
                place.unlink(&place.part_name);
                place.create_new(&place.part_name)
            }
            other => other,
        };
        let file = file.map_err(|errno| place.part_error("create", errno.into()))?;
        let _unfinished = Unfinished::of(&place);
        let output = Self { file, place: Some(place), force, pending: true, has_journal: false, _unfinished };
        let place = output.place.as_ref().expect("a path has a place");
        // Without locks on the file system, only that distinction is lost.
        if let Err(TryLockError::WouldBlock) = output.file.try_lock() {
            return Err(OutputError::BusyPart { part: place.part_path() });
        }
        give_to_caller(&output.file).map_err(|source| place.part_error(CHOWN, source))?;
        Ok(output)
    }

    /// Makes the files `PATH.part.journal` and `PATH.part.tail` beside it, which live and die with the `.part` file;
    /// `None` for standard output.
    ///
    /// # Errors
    /// When they cannot be created, or one is left from a recording that was cut, unless existing files are replaced.
    pub fn create_journal(&mut self) -> Result<Option<(File, File)>, OutputError> {
        let Some(place) = &self.place else { return Ok(None) };
        let journal = self.create_beside(place, &place.journal_name)?;
        let tail = self.create_beside(place, &place.tail_name).inspect_err(|_| place.unlink(&place.journal_name))?;
        self.has_journal = true;
        Ok(Some((journal, tail)))
    }

    fn create_beside(&self, place: &Place, name: &OsStr) -> Result<File, OutputError> {
        let file = match place.create_new(name) {
            Err(nix::Error::EEXIST) if self.force => {
                place.unlink(name);
                place.create_new(name)
            }
            other => other,
        };
        let part = place.path.with_file_name(name);
        let file = file.map_err(|errno| match errno {
            nix::Error::EEXIST => OutputError::StalePart { part: part.clone() },
            errno => OutputError::Part { action: "create", part: part.clone(), source: errno.into() },
        })?;
        give_to_caller(&file).map_err(|source| {
            place.unlink(name);
            OutputError::Part { action: CHOWN, part, source }
        })?;
        Ok(file)
    }

    /// The file to write; seekable, even for standard output.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Another handle on the same open file, for a sink that owns its file.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Its name while it is written; `None` for standard output.
    #[must_use]
    pub fn part_path(&self) -> Option<PathBuf> {
        self.place.as_ref().map(Place::part_path)
    }

    /// Gives the finished file its name, or copies it to standard output. Buffered writers must be flushed before.
    ///
    /// # Errors
    /// When the name was taken meanwhile: the `.part` file then stays. When the directory was removed: the file is then
    /// copied to the directory for temporary files. When standard output cannot be written.
    pub fn commit(mut self) -> Result<(), OutputError> {
        let Some(place) = &self.place else { return stdout::copy(&mut self.file).map_err(OutputError::Stdout) };
        self.pending = false;
        if self.force {
            place.check_target(true)?;
        }
        if let Err(source) = place.rename(self.force) {
            let (part, path) = (place.part_path(), place.path.clone());
            if place.has_part() {
                return Err(OutputError::Rename { part, path, source });
            }
            return Err(OutputError::Gone { path, kept: keep_elsewhere(&self.file, &place.name) });
        }
        if self.has_journal {
            place.unlink_journal();
        }
        Ok(())
    }

    /// The same for a file that cannot be made again: if standard output does not take it, it is copied to a temporary
    /// file whose name ends with `name`. A reader that took a part and went away (`| head`) has what it wanted.
    ///
    /// # Errors
    /// As [`OutputFile::commit`].
    pub fn commit_or_keep(mut self, name: &str) -> Result<(), OutputError> {
        if self.place.is_some() {
            return self.commit();
        }
        let source = if is_unread() {
            io::Error::other("nobody reads it any more")
        } else {
            match stdout::copy(&mut self.file) {
                Err(error) if error.kind() != io::ErrorKind::BrokenPipe => error,
                taken => return taken.map_err(OutputError::Stdout),
            }
        };
        Err(OutputError::StdoutKept { source, kept: keep_elsewhere(&self.file, name.as_ref()) })
    }

    /// Leaves the unfinished file as `.part` (a cut recording can be recovered) and returns its name; `None`: it has
    /// none, or it was removed.
    #[must_use]
    pub fn keep_part(mut self) -> Option<PathBuf> {
        self.pending = false;
        self.place.as_ref().filter(|place| place.has_part()).map(Place::part_path)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let (true, Some(place)) = (self.pending, &self.place) {
            place.unlink(&place.part_name);
            if self.has_journal {
                place.unlink_journal();
            }
        }
    }
}

/// Writes `bytes` to `destination` by the same means.
///
/// # Errors
/// As [`OutputFile::create`] and [`OutputFile::commit`].
pub fn write_whole(destination: &Destination, force: bool, bytes: &[u8]) -> Result<(), OutputError> {
    let mut output = OutputFile::create(destination, force)?;
    output.file.write_all(bytes).map_err(|source| match &output.place {
        Some(place) => place.part_error("write", source),
        None => OutputError::Stdout(source),
    })?;
    output.commit()
}

/// Copies a complete file that no longer has a name to a new temporary file. Returns its path.
fn keep_elsewhere(mut file: &File, name: &OsStr) -> io::Result<PathBuf> {
    let mut ending = OsString::from("-");
    ending.push(name);
    let mut kept = tempfile::Builder::new().prefix("tachyon-bpf-").suffix(&ending).tempfile()?;
    file.seek(SeekFrom::Start(0))?;
    io::copy(&mut file, &mut kept)?;
    give_to_caller(kept.as_file())?;
    Ok(kept.keep().map_err(|error| error.error)?.1)
}

/// Makes a write past the limit on a file's size (`ulimit -f`) fail, like one to a full disk; the signal that comes
/// with it would end the program. Uses a handler, because a command would inherit an ignored signal.
pub fn refuse_instead_of_signal() {
    extern "C" fn nothing(_signal: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing, which is allowed at any moment.
    let before = unsafe { sigaction(Signal::SIGXFSZ, &action) };
    if let Ok(before) = before
        && before.handler() == SigHandler::SigIgn
    {
        // SAFETY: no handler at all is installed.
        let _restored = unsafe { sigaction(Signal::SIGXFSZ, &before) };
    }
}

/// Under sudo, files belong to the user behind it.
fn give_to_caller(made: impl AsFd) -> io::Result<()> {
    match Caller::through_sudo() {
        Some(caller) => Ok(fchown(made, Some(caller.uid), Some(caller.gid))?),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
