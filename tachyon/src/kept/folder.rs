//! The folder of what is kept between recordings: of the user's own, and bounded.
//!
//! What is in it is believed. So the folder and each file in it must belong to the effective user and not be writable by anybody
//! else; otherwise it is as if there were none. Everything is opened relative to the folder, and no symbolic link in it is
//! followed. A file is written beside its place and renamed, so several recorders may share a folder. Nothing here is an error: a
//! folder that cannot be made, read or written only costs the time that it would have saved.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::dir::Dir;
use nix::fcntl::{OFlag, open, openat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, User, geteuid, unlinkat};

use super::Kind;
use super::sealed::MAX_PACKED;

/// Most bytes of all files in the folder, and how many remain when the least recently used ones are removed.
const MAX_BYTES: u64 = 64 << 20;
const AFTER_TIDYING: u64 = 48 << 20;

/// Most files in it.
const MAX_FILES: usize = 4096;

/// What names of files that are being written end with.
const PART: &str = ".part";

/// A file that was to be renamed this long ago never will be.
const GIVEN_UP: Duration = Duration::from_secs(3600);

/// A file's time of use is noted again after this.
const USED_AGAIN: Duration = Duration::from_secs(3600);

/// `off`, or the folder to use.
const VARIABLE: &str = "TACHYON_SYMBOL_CACHE";

/// Where names of functions, unwind rules and offsets in the kernel are kept between recordings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SymbolCache {
    base: PathBuf,
    /// Folders in it, each in the one before, that are made if need be.
    below: &'static [&'static str],
}

impl SymbolCache {
    /// In this folder, which is made if the one above it exists.
    #[must_use]
    pub fn at(folder: PathBuf) -> Self {
        Self { base: folder, below: &[] }
    }

    /// Where the environment says (`docs/native.md`); `None`: nowhere.
    #[must_use]
    pub fn of_environment() -> Option<Self> {
        Self::of(|name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
    }

    fn of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<Self> {
        if let Some(asked) = variable(VARIABLE) {
            return (asked != Path::new("off")).then(|| Self::at(asked));
        }
        // Several are separated by colons (systemd.exec(5)).
        let of_service = variable("CACHE_DIRECTORY").and_then(|folders| {
            let first = folders.as_os_str().as_bytes().split(|&byte| byte == b':').next()?;
            Some(PathBuf::from(OsStr::from_bytes(first)))
        });
        // Under sudo these may be the calling user's, who must not say what root's recordings believe.
        let own = |folder: &PathBuf| {
            let owner = std::fs::metadata(folder).map(|metadata| metadata.uid());
            folder.is_absolute() && owner.is_ok_and(|owner| owner == geteuid().as_raw())
        };
        if let Some(base) = of_service.filter(own) {
            return Some(Self { base, below: &["symbols"] });
        }
        if let Some(base) = variable("XDG_CACHE_HOME").filter(own) {
            return Some(Self { base, below: &["tachyon-bpf", "symbols"] });
        }
        let home = variable("HOME").filter(own);
        let home = home.or_else(|| Some(User::from_uid(geteuid()).ok()??.dir).filter(own));
        Some(Self { base: home?, below: &[".cache", "tachyon-bpf", "symbols"] })
    }

    /// Opens the folder, and makes it first if need be. `None`: it cannot be used.
    #[must_use]
    pub fn open(&self) -> Option<Folder> {
        if self.below.is_empty() {
            // It is there already, or shows now that it cannot be.
            let _there = nix::unistd::mkdir(&self.base, Mode::S_IRWXU);
        }
        let mut folder = open(&self.base, FOLDER, Mode::empty()).ok().filter(is_own)?;
        for &name in self.below {
            let _there = mkdirat(&folder, name, Mode::S_IRWXU);
            folder = openat(&folder, name, FOLDER | OFlag::O_NOFOLLOW, Mode::empty()).ok().filter(is_own)?;
        }
        Some(Folder(folder))
    }
}

const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// Whether it belongs to the effective user alone.
fn is_own(file: &impl AsFd) -> bool {
    fstat(file).is_ok_and(|stat| stat.st_uid == geteuid().as_raw() && stat.st_mode & 0o022 == 0)
}

fn is_regular(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG
}

/// The folder, open.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// The content of a file, which counts as used. `None`: it is not there, not to be trusted, or too large.
    #[must_use]
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let file = openat(&self.0, name, flags, Mode::empty()).ok().filter(is_own)?;
        let stat = fstat(&file).ok().filter(is_regular)?;
        let size = usize::try_from(stat.st_size).ok().filter(|size| *size <= MAX_PACKED)?;
        let file = File::from(file);
        let mut content = Vec::with_capacity(size);
        (&file).take(MAX_PACKED as u64 + 1).read_to_end(&mut content).ok()?;
        if age(&stat) > USED_AGAIN {
            let now = TimeSpec::new(0, libc::UTIME_NOW);
            let _read_only = futimens(&file, &now, &now);
        }
        Some(content)
    }

    /// Writes a file, in place of another of that name.
    ///
    /// # Errors
    /// When the folder cannot be written, or there is no room.
    pub fn write(&self, name: &str, content: &[u8]) -> std::io::Result<()> {
        let part = format!("{name}.{:016x}{PART}", fastrand::u64(..));
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(&self.0, part.as_str(), flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let written = File::from(file).write_all(content);
        // A file that is incomplete after a crash is seen to be, by its checksum.
        let renamed = written.and_then(|()| Ok(renameat(&self.0, part.as_str(), &self.0, name)?));
        if renamed.is_err() {
            let _gone = unlinkat(&self.0, part.as_str(), UnlinkatFlags::NoRemoveDir);
        }
        renamed
    }

    /// Removes the least recently used files if there are too many bytes or files, and what other recorders left unfinished.
    pub fn tidy(&self) {
        self.tidy_to(MAX_BYTES, AFTER_TIDYING);
    }

    fn tidy_to(&self, most: u64, after: u64) {
        let mut files = self.files();
        let total: u64 = files.iter().map(|file| file.bytes).sum();
        files.sort_by_key(|file| std::cmp::Reverse(file.age));
        let full = total > most || files.len() > MAX_FILES;
        let (mut bytes, mut count) = (total, files.len());
        for file in files {
            let too_much = full && (bytes > after || count > MAX_FILES / 4 * 3);
            if too_much || (file.is_part && file.age > GIVEN_UP) {
                // Another recorder may have removed it.
                let _gone = unlinkat(&self.0, file.name.as_str(), UnlinkatFlags::NoRemoveDir);
                (bytes, count) = (bytes - file.bytes, count - 1);
            }
        }
    }

    /// The files in it that are ours by their names; all others are left alone.
    fn files(&self) -> Vec<Listed> {
        let Ok(mut folder) = Dir::openat(&self.0, ".", FOLDER, Mode::empty()) else { return Vec::new() };
        let entries = folder.iter().flatten().filter_map(|entry| {
            let name = entry.file_name().to_str().ok()?.to_owned();
            let is_part = name.ends_with(PART);
            if !is_part && !Kind::ALL.iter().any(|kind| name.ends_with(kind.extension())) {
                return None;
            }
            let stat =
                nix::sys::stat::fstatat(&self.0, name.as_str(), nix::fcntl::AtFlags::AT_SYMLINK_NOFOLLOW).ok()?;
            Some(Listed { name, bytes: stat.st_size.unsigned_abs(), age: age(&stat), is_part })
        });
        entries.collect()
    }
}

struct Listed {
    name: String,
    bytes: u64,
    /// Since it was last used.
    age: Duration,
    is_part: bool,
}

fn age(stat: &FileStat) -> Duration {
    let modified = Duration::new(u64::try_from(stat.st_mtime).unwrap_or(0), 0);
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH + modified).unwrap_or_default()
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
