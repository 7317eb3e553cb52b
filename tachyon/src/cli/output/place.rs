//! A name in a directory: creating, judging and renaming the file there.

use super::OutputError;
use crate::input::not_regular;
use nix::fcntl::{AtFlags, OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, fstatat};
use nix::unistd::{AccessFlags, UnlinkatFlags, faccessat, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::{File, TryLockError};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// A name in a directory that is held open, so that creating and renaming happen in the same one.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) directory: OwnedFd,
    pub(super) name: OsString,
    pub(super) part_name: OsString,
    pub(super) journal_name: OsString,
    pub(super) tail_name: OsString,
}

impl Place {
    pub(super) fn of(path: &Path, ending: &str) -> Result<Self, OutputError> {
        // `Path::file_name` accepts a trailing slash, the kernel does not.
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
        Ok(Self::within(directory, path.to_owned(), name, ending))
    }

    /// A name in a directory that is open.
    pub(super) fn within(directory: OwnedFd, path: PathBuf, name: &OsStr, ending: &str) -> Self {
        let mut part_name = name.to_owned();
        part_name.push(ending);
        let beside = |ending| {
            let mut name = part_name.clone();
            name.push(ending);
            name
        };
        let (journal_name, tail_name) = (beside(".journal"), beside(".tail"));
        Self { name: name.to_owned(), path, directory, part_name, journal_name, tail_name }
    }

    pub(super) fn part_path(&self) -> PathBuf {
        self.path.with_file_name(&self.part_name)
    }

    pub(super) fn part_error(&self, action: &'static str, source: io::Error) -> OutputError {
        OutputError::Part { action, part: self.part_path(), source }
    }

    pub(super) fn stat(&self, name: &OsStr) -> nix::Result<FileStat> {
        fstatat(&self.directory, name, AtFlags::AT_SYMLINK_NOFOLLOW)
    }

    /// Whether the `.part` file is still there.
    pub(super) fn has_part(&self) -> bool {
        self.stat(&self.part_name).is_ok()
    }

    /// Checks that nothing is at the path, or a regular file that may be replaced.
    pub(super) fn check_target(&self, force: bool) -> Result<(), OutputError> {
        match self.stat(&self.name) {
            Err(nix::Error::ENOENT) => Ok(()),
            Err(errno) => Err(OutputError::Directory { directory: self.path.clone(), source: errno.into() }),
            Ok(stat) => match not_regular(&stat) {
                None if force => Ok(()),
                None => Err(OutputError::Exists { path: self.path.clone() }),
                Some(found) => Err(OutputError::NotRegular { path: self.path.clone(), found }),
            },
        }
    }

    pub(super) fn create_new(&self, name: &OsStr) -> nix::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(&self.directory, name, flags, Mode::S_IRUSR | Mode::S_IWUSR).map(File::from)
    }

    /// `Ok` if the existing `.part` file may be replaced.
    pub(super) fn judge_part(&self, force: bool) -> Result<(), OutputError> {
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
        // Non-blocking, in case it has become a FIFO since.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        if let Ok(fd) = openat(&self.directory, self.part_name.as_os_str(), flags, Mode::empty())
            && let Err(TryLockError::WouldBlock) = File::from(fd).try_lock()
        {
            return Err(OutputError::BusyPart { part });
        }
        if force { Ok(()) } else { Err(OutputError::StalePart { part }) }
    }

    pub(super) fn unlink(&self, name: &OsStr) {
        // A file that is already gone is fine.
        let _ = unlinkat(&self.directory, name, UnlinkatFlags::NoRemoveDir);
    }

    /// Removes the files beside the `.part` file.
    pub(super) fn unlink_journal(&self) {
        self.unlink(&self.journal_name);
        self.unlink(&self.tail_name);
    }

    pub(super) fn rename(&self, replace: bool) -> io::Result<()> {
        let (directory, part, name) = (self.directory.as_fd(), self.part_name.as_os_str(), self.name.as_os_str());
        if replace {
            return Ok(renameat(directory, part, directory, name)?);
        }
        match rename_no_replace(directory.as_raw_fd(), part, name) {
            // The file system does not support it (FUSE, some network ones): take the name first, then rename over it.
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
