//! Files that a process has mapped, opened without trusting what their paths lead to.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

use super::{Mapping, RemoteError, RemoteProcess};

/// What tells one state of one file from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileIdentity {
    /// Device, as `stat` gives it.
    pub dev: u64,
    /// Inode on that device.
    pub inode: u64,
    /// Last change of its content, in nanoseconds since 1970.
    pub mtime_ns: i128,
    /// Size in bytes.
    pub size: u64,
}

/// A regular file behind a mapping. Finding it costs no read; [`MappedFile::open`] makes it readable.
#[derive(Debug)]
pub struct MappedFile {
    /// An `O_PATH` descriptor: it names the file without opening it, so that no driver is woken.
    handle: OwnedFd,
    /// The path by which it was found, for messages.
    found_at: PathBuf,
    identity: FileIdentity,
}

impl RemoteProcess {
    /// The file behind a mapping, also when it is deleted or lies in another mount namespace.
    ///
    /// Taken from `/proc/PID/map_files` (needs `CAP_CHECKPOINT_RESTORE`), else by its path below `/proc/PID/root`,
    /// where no symbolic link leads out; there only a file with the mapping's inode number is accepted.
    ///
    /// # Errors
    /// When there is no such file, it cannot be reached, or it is not a regular file.
    pub fn mapped_file(&self, mapping: &Mapping) -> Result<MappedFile, RemoteError> {
        let direct = self.proc_path(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end));
        match open(&direct, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(handle) => MappedFile::new(handle, direct),
            Err(errno) => self.file_by_path(mapping, io::Error::from(errno)),
        }
    }

    /// The file at the mapping's path, below the target's root or (the kernel shows a chrooted process's paths
    /// from outside) our own; `cause` is told when there is none.
    fn file_by_path(&self, mapping: &Mapping, cause: io::Error) -> Result<MappedFile, RemoteError> {
        let mut error = RemoteError::File { path: self.proc_path("map_files"), source: cause };
        let Some(path) = mapping.file_path() else { return Err(error) };
        for root in [self.proc_path("root"), PathBuf::from("/")] {
            match file_below(&root, path, Some(mapping.inode)) {
                Ok(file) => return Ok(file),
                Err(refused) => error = refused,
            }
        }
        Err(error)
    }

    /// The regular file at a path of the target's own root directory, which no symbolic link leads out of.
    ///
    /// # Errors
    /// When there is none, or it is not a regular file.
    pub fn file_at(&self, path: &Path) -> Result<MappedFile, RemoteError> {
        file_below(&self.proc_path("root"), path, None)
    }

    /// The process's executable, also when it is deleted or lies in another mount namespace.
    ///
    /// # Errors
    /// When it cannot be reached or is not a regular file.
    pub fn exe_file(&self) -> Result<MappedFile, RemoteError> {
        let path = self.proc_path("exe");
        match open(&path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()) {
            Ok(handle) => MappedFile::new(handle, path),
            Err(errno) => Err(RemoteError::File { path, source: errno.into() }),
        }
    }
}

/// The file at `path` below `root`, if it has this inode number (when one is given). No symbolic link leads out of
/// `root`.
fn file_below(root: &Path, path: &Path, inode: Option<u64>) -> Result<MappedFile, RemoteError> {
    let found_at = root.join(path.strip_prefix("/").unwrap_or(path));
    let error = |errno: nix::errno::Errno| RemoteError::File { path: found_at.clone(), source: errno.into() };
    let root = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty()).map_err(error)?;
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    let handle = openat2(&root, path, how).map_err(error)?;
    let file = MappedFile::new(handle, found_at.clone())?;
    if inode.is_none_or(|inode| file.identity.inode == inode) {
        Ok(file)
    } else {
        Err(RemoteError::File { path: found_at, source: io::Error::other("another file lies there now") })
    }
}

impl MappedFile {
    fn new(handle: OwnedFd, found_at: PathBuf) -> Result<Self, RemoteError> {
        // fstat works on O_PATH descriptors since Linux 3.6.
        let handle = File::from(handle);
        let stat = handle.metadata().map_err(|source| RemoteError::File { path: found_at.clone(), source })?;
        if !stat.is_file() {
            return Err(RemoteError::NotRegular(found_at));
        }
        let identity = FileIdentity {
            dev: stat.dev(),
            inode: stat.ino(),
            mtime_ns: i128::from(stat.mtime()) * 1_000_000_000 + i128::from(stat.mtime_nsec()),
            size: stat.size(),
        };
        Ok(Self { handle: handle.into(), found_at, identity })
    }

    /// What tells it from other files.
    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The path by which the profiler reaches it (below `/proc/PID`).
    #[must_use]
    pub fn found_at(&self) -> &Path {
        &self.found_at
    }

    /// Opens it for reading.
    ///
    /// # Errors
    /// When the file may not be read.
    pub fn open(&self) -> Result<File, RemoteError> {
        let through = format!("/proc/self/fd/{}", self.handle.as_raw_fd());
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let opened = open(through.as_str(), flags, Mode::empty());
        opened.map(File::from).map_err(|errno| RemoteError::File { path: self.found_at.clone(), source: errno.into() })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::FileExt as _;

    use super::*;
    use crate::remote::MappedPath;
    use crate::types::Pid;

    fn mapping_of(path: &Path, inode: u64) -> Mapping {
        let path = MappedPath::File { path: path.as_os_str().as_encoded_bytes().to_vec(), deleted: false };
        Mapping {
            start: 0x1000,
            end: 0x2000,
            readable: true,
            writable: false,
            executable: true,
            private: true,
            offset: 0,
            dev: (0, 0),
            inode,
            path,
        }
    }

    #[test]
    fn a_mapped_file_is_found_and_read() {
        let process = RemoteProcess::open(Pid(std::process::id())).expect("this process exists");
        let maps = process.maps().expect("own maps");
        let exe = std::env::current_exe().expect("known");
        let mapping = maps.iter().find(|map| map.file_path() == Some(&exe)).expect("the test itself is mapped");
        let file = process.mapped_file(mapping).expect("it is a file");
        assert_eq!(file.identity().inode, mapping.inode);
        let mut magic = [0; 4];
        file.open().expect("readable").read_exact_at(&mut magic, 0).expect("long enough");
        assert_eq!(&magic, b"\x7fELF");
    }

    #[test]
    fn fifos_and_links_out_are_refused_and_inodes_compared() {
        let process = RemoteProcess::open(Pid(std::process::id())).expect("this process exists");
        let dir = tempfile::tempdir().expect("a folder");
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, Mode::S_IRUSR).expect("a fifo");
        let inode = std::fs::metadata(&fifo).expect("there").ino();
        let refused = process.mapped_file(&mapping_of(&fifo, inode)).expect_err("a fifo is no file");
        assert!(matches!(refused, RemoteError::NotRegular(_)), "{refused}");
        let refused = process.mapped_file(&mapping_of(Path::new("/dev/null"), 1)).expect_err("a device");
        assert!(matches!(refused, RemoteError::NotRegular(_)), "{refused}");
        let file = dir.path().join("file");
        File::create(&file).and_then(|mut file| file.write_all(b"text")).expect("a file");
        let inode = std::fs::metadata(&file).expect("there").ino();
        assert!(process.mapped_file(&mapping_of(&file, inode)).is_ok());
        assert!(process.mapped_file(&mapping_of(&file, inode + 1)).is_err());
        let magic = dir.path().join("magic");
        std::os::unix::fs::symlink(format!("/proc/self/fd/{}", File::open(&file).expect("there").as_raw_fd()), &magic)
            .expect("a link");
        assert!(process.mapped_file(&mapping_of(&magic, inode)).is_err());
    }
}
