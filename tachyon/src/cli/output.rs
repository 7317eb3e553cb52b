//! Files that appear whole or not at all.
//!
//! A file is written as `PATH.part`, created new and readable by its owner only, and takes its name when it is done;
//! nothing that stands at `PATH` is replaced unless the user said `--force`, and then only a regular file. Under sudo
//! it belongs to the calling user. Standard output goes through an unnamed temporary file, because a TACH header is
//! written last and a pipe cannot seek.

use super::caller::Caller;
use crate::sinks::Format;
use crate::sinks::export::{Companion, ExportOptions};
use crate::sinks::gperftools::companion_path;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, fchown, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

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

    /// Whether both are one place, however it is written.
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
    /// Where to.
    pub destination: Destination,
    /// As what.
    pub format: Format,
    /// Whether a regular file that stands there is replaced.
    pub force: bool,
}

impl OutputPlan {
    /// Where the second file goes, of a format that has one.
    #[must_use]
    pub fn companion(&self) -> Option<PathBuf> {
        match (self.format, &self.destination) {
            (Format::Gperftools, Destination::Path(path)) => {
                let path = companion_path(path);
                // The profile tells the path: it must hold wherever it is read.
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

    /// Looks whether all its files could be written now, without touching anything.
    ///
    /// # Errors
    /// What [`OutputFile::create`] would say.
    pub fn check(&self) -> Result<(), OutputError> {
        check(&self.destination, self.force)?;
        self.companion().map_or(Ok(()), |path| check(&Destination::Path(path), self.force))
    }

    /// Creates the second file, of a format that has one.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create_companion(&self) -> Result<Option<(OutputFile, Companion)>, OutputError> {
        let Some(path) = self.companion() else { return Ok(None) };
        let output = OutputFile::create(&Destination::Path(path.clone()), self.force)?;
        let file = output.try_clone_file().map_err(|source| OutputError::Part {
            action: "open",
            part: output.part_path().unwrap_or_default(),
            source,
        })?;
        Ok(Some((output, Companion { file: Box::new(file), path })))
    }
}

/// Why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// Something stands at the path.
    #[error("cannot write {}: it exists", path.display())]
    Exists {
        /// The path.
        path: PathBuf,
    },
    /// Something that `--force` does not replace stands at the path.
    #[error("cannot replace {}: it is {found}", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// What stands there.
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
        /// What the kernel said.
        source: io::Error,
    },
    /// A `.part` file of a recording that was cut is in the way.
    #[error("cannot create {}: it is left from a recording that was cut", part.display())]
    StalePart {
        /// The `.part` file.
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
        /// What the kernel said.
        source: io::Error,
    },
    /// The finished file could not take its name; it is kept as `.part`.
    #[error("cannot rename {} to {}", part.display(), path.display())]
    Rename {
        /// The `.part` file, which is whole and stays.
        part: PathBuf,
        /// The name it should have.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Standard output could not be written.
    #[error("cannot write to standard output")]
    Stdout(#[source] io::Error),
}

impl OutputError {
    /// What to do next.
    #[must_use]
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Exists { .. } => Some("give another path, or --force to replace it".to_owned()),
            Self::NotRegular { .. } => Some("only a regular file is replaced: give another path".to_owned()),
            Self::NoFileName { .. } => Some("give the path of a file".to_owned()),
            Self::Directory { source, .. } => Some(match source.kind() {
                io::ErrorKind::NotFound => "create the directory first, or give another path".to_owned(),
                _ => "give a path in a directory that you may write".to_owned(),
            }),
            Self::StalePart { .. } => {
                Some("`tachyon-bpf recover` makes it readable; give --force to replace it".to_owned())
            }
            Self::BusyPart { .. } => Some("give another path".to_owned()),
            Self::Part { action: CHOWN, .. } => {
                Some("unset SUDO_UID and SUDO_GID to leave the file to root".to_owned())
            }
            Self::Rename { part, .. } => Some(format!("the whole file is kept as {}", part.display())),
            Self::Part { .. } | Self::Stdout(_) => None,
        }
    }
}

/// Ending of a file that is being written.
const PART: &str = ".part";
const CHOWN: &str = "give to the calling user";

/// Looks whether a file could be written to `destination` now, without touching anything.
///
/// # Errors
/// What [`OutputFile::create`] would say.
pub fn check(destination: &Destination, force: bool) -> Result<(), OutputError> {
    let Destination::Path(path) = destination else { return Ok(()) };
    let place = Place::of(path, PART)?;
    place.check_target(force)?;
    if place.stat(&place.part_name).is_ok() {
        // Whether it is stale is for `create`, which can replace it; without --force both are refused.
        place.judge_part(force)?;
    }
    Ok(())
}

/// A file that is being written. Dropped without [`OutputFile::commit`] or [`OutputFile::keep_part`] it vanishes.
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
    /// The `.part` file is ours to remove.
    pending: bool,
    /// So is its journal.
    has_journal: bool,
}

impl OutputFile {
    /// Makes the `.part` file (mode 0600, never through a symlink) and locks it, so that a later run can tell a cut
    /// recording from a running one.
    ///
    /// # Errors
    /// When something stands at the path, or the directory cannot be written.
    pub fn create(destination: &Destination, force: bool) -> Result<Self, OutputError> {
        Self::create_as(destination, force, PART)
    }

    /// The same, but as `PATH.recovered.part`, for what is made of a `PATH.part` that must stay.
    ///
    /// # Errors
    /// As [`OutputFile::create`].
    pub fn create_recovered(destination: &Destination, force: bool) -> Result<Self, OutputError> {
        Self::create_as(destination, force, ".recovered.part")
    }

    fn create_as(destination: &Destination, force: bool, ending: &str) -> Result<Self, OutputError> {
        let Destination::Path(path) = destination else {
            let file = tempfile::tempfile().map_err(OutputError::Stdout)?;
            return Ok(Self { file, place: None, force, pending: false, has_journal: false });
        };
        let place = Place::of(path, ending)?;
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
        let output = Self { file, place: Some(place), force, pending: true, has_journal: false };
        let place = output.place.as_ref().expect("a path has a place");
        // A file system without locks costs only the distinction.
        if let Err(TryLockError::WouldBlock) = output.file.try_lock() {
            return Err(OutputError::BusyPart { part: place.part_path() });
        }
        if let Some(caller) = Caller::through_sudo() {
            fchown(&output.file, Some(caller.uid), Some(caller.gid))
                .map_err(|errno| place.part_error(CHOWN, errno.into()))?;
        }
        Ok(output)
    }

    /// Makes the file `PATH.part.journal` beside it, which lives and dies with the `.part` file; `None` for standard
    /// output.
    ///
    /// # Errors
    /// When it cannot be made; when one is left from a recording that was cut, unless existing files are replaced.
    pub fn create_journal(&mut self) -> Result<Option<File>, OutputError> {
        let Some(place) = &self.place else { return Ok(None) };
        let file = match place.create_new(&place.journal_name) {
            Err(nix::Error::EEXIST) if self.force => {
                place.unlink(&place.journal_name);
                place.create_new(&place.journal_name)
            }
            other => other,
        };
        let part = place.path.with_file_name(&place.journal_name);
        let file = file.map_err(|errno| match errno {
            nix::Error::EEXIST => OutputError::StalePart { part: part.clone() },
            errno => OutputError::Part { action: "create", part: part.clone(), source: errno.into() },
        })?;
        self.has_journal = true;
        if let Some(caller) = Caller::through_sudo() {
            fchown(&file, Some(caller.uid), Some(caller.gid)).map_err(|errno| OutputError::Part {
                action: CHOWN,
                part,
                source: errno.into(),
            })?;
        }
        Ok(Some(file))
    }

    /// The file to write; seekable, also for standard output.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Another handle on the same open file, for a sink that owns its file.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub fn try_clone_file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// The name under which it lies while it is written; `None` for standard output.
    #[must_use]
    pub fn part_path(&self) -> Option<PathBuf> {
        self.place.as_ref().map(Place::part_path)
    }

    /// Gives the finished file its name, or copies it to standard output. Buffered writers must be flushed before.
    ///
    /// # Errors
    /// When the name was taken meanwhile: the `.part` file then stays. When standard output cannot be written.
    pub fn commit(mut self) -> Result<(), OutputError> {
        let Some(place) = &self.place else {
            self.file.seek(SeekFrom::Start(0)).map_err(OutputError::Stdout)?;
            let mut stdout = io::stdout().lock();
            io::copy(&mut self.file, &mut stdout).map_err(OutputError::Stdout)?;
            return stdout.flush().map_err(OutputError::Stdout);
        };
        self.pending = false;
        if self.force {
            place.check_target(true)?;
        }
        place.rename(self.force).map_err(|source| OutputError::Rename {
            part: place.part_path(),
            path: place.path.clone(),
            source,
        })?;
        if self.has_journal {
            place.unlink(&place.journal_name);
        }
        Ok(())
    }

    /// Leaves the unfinished file as `.part` (a cut recording can be recovered) and tells its name.
    #[must_use]
    pub fn keep_part(mut self) -> Option<PathBuf> {
        self.pending = false;
        self.part_path()
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let (true, Some(place)) = (self.pending, &self.place) {
            place.unlink(&place.part_name);
            if self.has_journal {
                place.unlink(&place.journal_name);
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

/// A name in a directory that is held open, so that creating and renaming happen in the same one.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    part_name: OsString,
    journal_name: OsString,
}

impl Place {
    fn of(path: &Path, ending: &str) -> Result<Self, OutputError> {
        // `Path::file_name` forgives a trailing slash, the kernel does not.
        let trailing_slash = path.as_os_str().as_bytes().last() == Some(&b'/');
        let (Some(name), false) = (path.file_name(), trailing_slash) else {
            return Err(OutputError::NoFileName { path: path.to_owned() });
        };
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let cannot = |errno: nix::Error| OutputError::Directory { directory: parent.to_owned(), source: errno.into() };
        let directory =
            open(parent, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).map_err(cannot)?;
        faccessat(&directory, ".", AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::AT_EACCESS).map_err(cannot)?;
        let mut part_name = name.to_owned();
        part_name.push(ending);
        let mut journal_name = part_name.clone();
        journal_name.push(".journal");
        Ok(Self { path: path.to_owned(), directory, name: name.to_owned(), part_name, journal_name })
    }

    fn part_path(&self) -> PathBuf {
        self.path.with_file_name(&self.part_name)
    }

    fn part_error(&self, action: &'static str, source: io::Error) -> OutputError {
        OutputError::Part { action, part: self.part_path(), source }
    }

    fn stat(&self, name: &OsStr) -> nix::Result<FileStat> {
        fstatat(&self.directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// Nothing stands at the path, or a regular file that may be replaced.
    fn check_target(&self, force: bool) -> Result<(), OutputError> {
        match self.stat(&self.name) {
            Err(nix::Error::ENOENT) => Ok(()),
            Err(errno) => Err(OutputError::Directory { directory: self.path.clone(), source: errno.into() }),
            Ok(_) if !force => Err(OutputError::Exists { path: self.path.clone() }),
            Ok(stat) => match not_regular(&stat) {
                None => Ok(()),
                Some(found) => Err(OutputError::NotRegular { path: self.path.clone(), found }),
            },
        }
    }

    fn create_new(&self, name: &OsStr) -> nix::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(&self.directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR).map(File::from)
    }

    /// `Ok` when the `.part` file that stands there may be replaced.
    fn judge_part(&self, force: bool) -> Result<(), OutputError> {
        let part = self.part_path();
        match self.stat(&self.part_name) {
            Err(nix::Error::ENOENT) => return Ok(()),
            Err(errno) => return Err(self.part_error("look at", errno.into())),
            Ok(stat) => {
                if let Some(found) = not_regular(&stat) {
                    return Err(OutputError::NotRegular { path: part, found });
                }
            }
        }
        // Non-blocking, should it have become a FIFO since.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        if let Ok(fd) = openat(&self.directory, self.part_name.as_os_str(), flags, Mode::empty())
            && let Err(TryLockError::WouldBlock) = File::from(fd).try_lock()
        {
            return Err(OutputError::BusyPart { part });
        }
        if force { Ok(()) } else { Err(OutputError::StalePart { part }) }
    }

    fn unlink(&self, name: &OsStr) {
        // A file that is gone already is what was wanted.
        let _ = unlinkat(&self.directory, name, UnlinkatFlags::NoRemoveDir);
    }

    fn rename(&self, replace: bool) -> io::Result<()> {
        let (directory, part, name) = (self.directory.as_fd(), self.part_name.as_os_str(), self.name.as_os_str());
        if replace {
            return Ok(renameat(directory, part, directory, name)?);
        }
        match rename_no_replace(directory.as_raw_fd(), part, name) {
            // The file system cannot (FUSE, some network ones): take the name first, then rename over it.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                openat(directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
                Ok(renameat(directory, part, directory, name)?)
            }
            result => result,
        }
    }
}

/// `renameat2(RENAME_NOREPLACE)`; nix has it for glibc only.
fn rename_no_replace(directory: libc::c_int, from: &OsStr, to: &OsStr) -> io::Result<()> {
    let from = std::ffi::CString::new(from.as_bytes())?;
    let to = std::ffi::CString::new(to.as_bytes())?;
    // SAFETY: both names are NUL-terminated and outlive the call; the kernel only reads them.
    let result = unsafe {
        libc::syscall(
            libc::SYS_renameat2,
            directory,
            from.as_ptr(),
            directory,
            to.as_ptr(),
            libc::c_ulong::from(libc::RENAME_NOREPLACE),
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What stands there, when it is no regular file.
fn not_regular(stat: &FileStat) -> Option<&'static str> {
    match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
        SFlag::S_IFREG => None,
        SFlag::S_IFLNK => Some("a symbolic link"),
        SFlag::S_IFDIR => Some("a directory"),
        SFlag::S_IFIFO => Some("a FIFO"),
        SFlag::S_IFCHR | SFlag::S_IFBLK => Some("a device"),
        _ => Some("no regular file"),
    }
}

#[cfg(test)]
mod tests;
