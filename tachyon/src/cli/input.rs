//! Opening the files that a command reads.

use super::output::not_regular;
use nix::sys::stat::fstat;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Opens a regular file, also through a symbolic link. What else stands there is refused by its kind: nobody may write
/// into a FIFO, and a device may have no end.
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

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::stat::Mode;
    use std::os::unix::fs::symlink;

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
