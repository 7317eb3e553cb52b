//! Opening the files that a command reads.

use nix::sys::stat::{FileStat, SFlag, fstat};
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Opens a regular file, also through a symbolic link. Anything else is refused by its kind: there may be no writer
/// for a FIFO, and a device may have no end.
///
/// # Errors
/// When it cannot be opened, or is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    // Without waiting for the other end of a FIFO.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    match not_regular(&fstat(&file)?) {
        None => Ok(file),
        Some(found) => Err(io::Error::other(format!("it is {found}"))),
    }
}

/// Whether a recorder is writing this file, and which, as far as that can be seen: a recorder holds a lock on it.
pub fn recorder(file: &File) -> Option<Option<u32>> {
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Some(holder(file)),
        // Not held longer than necessary; without locks nothing is known.
        _ => file.unlock().ok().and(None),
    }
}

/// The process that holds a lock on a file. `/proc/locks` has one line for each (Linux 6.18, `fs/locks.c`, `lock_get_status`):
/// `1: FLOCK  ADVISORY  WRITE 4242 fd:01:1234 0 EOF`, with pids of this namespace.
fn holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino().to_string();
    let locks = std::fs::read_to_string("/proc/locks").ok()?;
    locks.lines().find_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, "WRITE", pid, place, ..] = words[..] else { return None };
        (place.rsplit(':').next() == Some(inode.as_str())).then(|| pid.parse().ok().filter(|&pid| pid != 0))?
    })
}

/// What it is instead, if not a regular file.
pub(crate) fn not_regular(stat: &FileStat) -> Option<&'static str> {
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
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::fs::symlink;

    #[test]
    fn who_records_holds_a_lock() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tach.part");
        let part = File::create(&path).unwrap();
        let seen = || recorder(&open(&path).unwrap());
        assert_eq!(seen(), None);
        part.try_lock().unwrap();
        assert_eq!(seen(), Some(Some(std::process::id())));
        drop(part);
        assert_eq!(seen(), None);
    }

    #[test]
    fn regular_files_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("file"), "x").unwrap();
        nix::unistd::mkfifo(&path("fifo"), Mode::S_IRWXU).unwrap();
        symlink("/dev/zero", path("device")).unwrap();
        symlink("file", path("link")).unwrap();
        for (name, refused) in [
            ("file", None),
            ("link", None),
            ("fifo", Some("it is a FIFO")),
            ("device", Some("it is a device")),
            (".", Some("it is a directory")),
        ] {
            assert_eq!(open(&path(name)).err().map(|error| error.to_string()).as_deref(), refused, "{name}");
        }
        assert_eq!(open(&path("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
