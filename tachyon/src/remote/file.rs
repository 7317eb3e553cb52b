//! Files that a process has mapped, opened without trusting where their paths lead, or that their bytes ever arrive.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::sys::statfs::fstatfs;

use super::aside::{self, For, Found};
use super::elf::ReadAt;
use super::ledger::Debtor;
use super::{Mapping, RemoteError, RemoteProcess, known};
use crate::types::Pid;

/// File systems of this machine's own disks and memory, by their numbers (`linux/magic.h`, statfs(2)): whoever could stall one
/// could stall the host. All others are read by helpers: FUSE, NFS and the like, but also overlays, whose lower layers may be
/// one of those.
const LOCAL: [i64; 16] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x0102_1994, // tmpfs, memfd_create(2)
    0x8584_58f6, // ramfs
    0xf2f5_2010, // F2FS
    0x2fc1_2fc1, // ZFS
    0xca45_1a4e, // bcachefs
    0x7371_7368, // SquashFS
    0xe0f5_e1e2, // EROFS
    0x9660,      // ISO 9660
    0x9584_58f6, // hugetlbfs
    0x3153_464a, // JFS
    0x5265_4973, // ReiserFS
    0x3434,      // NILFS
    0x2405_1905, // UBIFS
];

/// Local file systems on which files of several subvolumes or snapshots may share an inode number and device in mappings.
const NUMBERED_TWICE: [i64; 3] = [0x9123_683e, 0xca45_1a4e, 0x3434];

/// How much of a file is read by a helper at once.
const BLOCK: usize = 64 << 10;

/// Distinguishes one state of one file from all others.
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

impl FileIdentity {
    /// From what `stat` returns for a file.
    #[must_use]
    pub(super) fn of(stat: &FileStat) -> Self {
        Self {
            dev: stat.st_dev,
            inode: stat.st_ino,
            mtime_ns: i128::from(stat.st_mtime) * 1_000_000_000 + i128::from(stat.st_mtime_nsec),
            size: stat.st_size.unsigned_abs(),
        }
    }
}

/// What the file system says of a file that is open: as long as it says the same, the file is the same and its content has not
/// changed.
///
/// Everything but the time of the last change can be chosen by whoever owns a file: the time of its content with `utimensat`, the
/// inode number with patience. The time of the last change is the kernel's own clock's, and a file's owner cannot set it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Device, as `stat` gives it.
    pub dev: u64,
    /// Inode on that device.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// Last change of its content: seconds since 1970, and nanoseconds.
    pub modified: (i64, i64),
    /// Last change of its content or of anything that `stat` tells of it.
    pub changed: (i64, i64),
}

/// A regular file behind a mapping. Finding it costs no read; [`MappedFile::open`] makes it readable.
#[derive(Clone, Debug)]
pub struct MappedFile {
    /// An `O_PATH` descriptor: it names the file without opening it, so that no driver is woken.
    handle: Arc<OwnedFd>,
    /// The process that led there.
    pid: Pid,
    /// Whether its bytes are on this machine.
    local: bool,
    /// Whether device and inode number distinguish it from all files that exist at the same time.
    numbered: bool,
    /// The path by which it was found, for messages.
    found_at: PathBuf,
    identity: FileIdentity,
    /// User id of its owner.
    owner: u32,
}

impl RemoteProcess {
    /// The file behind a mapping, even if it is deleted or in another mount namespace.
    ///
    /// Taken from `/proc/PID/map_files` (needs `CAP_CHECKPOINT_RESTORE`), otherwise found by its path below
    /// `/proc/PID/root`, which symbolic links cannot leave; there only a file with the mapping's inode number is accepted.
    ///
    /// # Errors
    /// When there is no such file, it cannot be reached, or it is not a regular file.
    pub fn mapped_file(&self, mapping: &Mapping) -> Result<MappedFile, RemoteError> {
        if mapping.inode == 0 {
            // Memory without a file, or the vdso: looking it up would cost as much as for a file.
            return Err(RemoteError::NotRegular(self.proc_path("map_files")));
        }
        if let Some(file) = known::find(self, mapping) {
            return Ok(file);
        }
        let direct = self.map_file_path(mapping);
        let (major, minor) = mapping.dev;
        let system = Debtor::FileSystem(libc::makedev(major, minor));
        let found = match self.find(system, &[direct.as_os_str().as_bytes()], &direct) {
            Err(error) if error.is_not_waited_for() => Err(error),
            Err(RemoteError::File { source, .. }) => self.file_by_path(mapping, source),
            found => found,
        };
        if let Ok(file) = &found {
            known::remember(mapping, file);
        }
        found
    }

    /// Where the kernel shows the file behind a mapping.
    fn map_file_path(&self, mapping: &Mapping) -> PathBuf {
        self.proc_path(&format!("map_files/{:x}-{:x}", mapping.start, mapping.end))
    }

    /// The file at the mapping's path, below the target's root or, since the kernel shows a chrooted process's paths
    /// from outside, the profiler's own; `cause` is reported if there is none.
    fn file_by_path(&self, mapping: &Mapping, cause: io::Error) -> Result<MappedFile, RemoteError> {
        let mut error = RemoteError::File { path: self.proc_path("map_files"), source: cause };
        let Some(path) = mapping.file_path() else { return Err(error) };
        let mut below_own = false;
        for root in [self.proc_path("root"), PathBuf::from("/")] {
            match self.file_below(&root, path, Some(mapping.inode)) {
                Ok(file) => return Ok(file),
                // Without access to the target's root, another file may be found below the profiler's own, or none:
                // that says nothing new.
                Err(_) if below_own && error.is_denied() => {}
                Err(refused) => error = refused,
            }
            below_own = true;
        }
        Err(error)
    }

    /// The regular file at a path in the target's own root directory, which symbolic links cannot leave.
    ///
    /// # Errors
    /// When there is none, or it is not a regular file.
    pub fn file_at(&self, path: &Path) -> Result<MappedFile, RemoteError> {
        self.file_below(&self.proc_path("root"), path, None)
    }

    /// The process's executable, even if it is deleted or in another mount namespace.
    ///
    /// # Errors
    /// When it cannot be reached or is not a regular file.
    pub fn exe_file(&self) -> Result<MappedFile, RemoteError> {
        let path = self.proc_path("exe");
        self.find(Debtor::Paths(self.pid()), &[path.as_os_str().as_bytes()], &path)
    }

    /// The file at `path` below `root`, if it has this inode number (when one is given). Symbolic links cannot leave
    /// `root`.
    fn file_below(&self, root: &Path, path: &Path, inode: Option<u64>) -> Result<MappedFile, RemoteError> {
        let found_at = root.join(path.strip_prefix("/").unwrap_or(path));
        let paths = Debtor::Paths(self.pid());
        let file = self.find(paths, &[root.as_os_str().as_bytes(), path.as_os_str().as_bytes()], &found_at)?;
        if inode.is_none_or(|inode| file.identity.inode == inode) {
            Ok(file)
        } else {
            Err(RemoteError::File { path: found_at, source: io::Error::other("another file lies there now") })
        }
    }

    /// Finds a file by its path, or by one below a root directory.
    fn find(&self, debtor: Debtor, root_and_path: &[&[u8]], found_at: &Path) -> Result<MappedFile, RemoteError> {
        let found = aside::find(For { debtor, pid: self.pid() }, root_and_path);
        let (found, handle) =
            found.map_err(|error| RemoteError::File { path: found_at.to_owned(), source: error.into() })?;
        MappedFile::new(self.pid(), &found, handle, found_at)
    }
}

impl MappedFile {
    fn new(pid: Pid, found: &Found, handle: OwnedFd, found_at: &Path) -> Result<Self, RemoteError> {
        if found.regular == 0 {
            return Err(RemoteError::NotRegular(found_at.to_owned()));
        }
        let identity = FileIdentity {
            dev: found.dev,
            inode: found.inode,
            mtime_ns: i128::from(found.mtime_s) * 1_000_000_000 + i128::from(found.mtime_ns),
            size: found.size,
        };
        let local = LOCAL.contains(&found.system);
        let numbered = local && !NUMBERED_TWICE.contains(&found.system);
        let owner = found.owner as u32;
        Ok(Self { handle: Arc::new(handle), pid, local, numbered, found_at: found_at.to_owned(), identity, owner })
    }

    /// The same file behind another process's mapping.
    pub(super) fn behind(&self, process: &RemoteProcess, mapping: &Mapping, owner: u32) -> Self {
        Self { pid: process.pid(), found_at: process.map_file_path(mapping), owner, ..self.clone() }
    }

    /// Whether device and inode number distinguish it from all files that exist at the same time, and it is on this machine, so
    /// that `stat` answers at once.
    pub(super) fn is_numbered(&self) -> bool {
        self.numbered
    }

    /// What `stat` returns for it now.
    ///
    /// # Errors
    /// When its file system cannot say.
    pub(super) fn stat(&self) -> Result<FileStat, Errno> {
        fstat(&*self.handle)
    }

    /// What distinguishes it from other files.
    #[must_use]
    pub fn identity(&self) -> FileIdentity {
        self.identity
    }

    /// The user id of its owner.
    #[must_use]
    pub fn owner(&self) -> u32 {
        self.owner
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
    pub fn open(&self) -> Result<TargetFile, RemoteError> {
        if !self.local {
            // Whether it may be read shows when it is read.
            return Ok(TargetFile(Reached::Aside {
                handle: Arc::clone(&self.handle),
                whose: For { debtor: Debtor::FileSystem(self.identity.dev), pid: self.pid },
                len: self.identity.size,
                block: Mutex::default(),
            }));
        }
        let through = format!("/proc/self/fd/{}", self.handle.as_raw_fd());
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        let opened = open(through.as_str(), flags, Mode::empty());
        opened
            .map(|file| File::from(file).into())
            .map_err(|errno| RemoteError::File { path: self.found_at.clone(), source: errno.into() })
    }
}

/// A file to read from, whose bytes may be far away.
#[derive(Debug)]
pub struct TargetFile(Reached);

#[derive(Debug)]
enum Reached {
    /// By this process.
    Here(File),
    /// By helpers, which open it anew for each block. They also close it, which may take for ever as well.
    Aside {
        handle: Arc<OwnedFd>,
        whose: For,
        len: u64,
        /// The last block that was read, with its offset: most reads are small and close together.
        block: Mutex<(u64, Vec<u8>)>,
    },
}

impl From<File> for TargetFile {
    /// A file that only its reader has chosen.
    fn from(file: File) -> Self {
        Self(Reached::Here(file))
    }
}

impl TargetFile {
    /// Reads what is at an offset, at most as much as there is room for.
    ///
    /// # Errors
    /// When it cannot be read, or does not arrive.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.0 {
            Reached::Here(file) => std::os::unix::fs::FileExt::read_at(file, into, offset),
            Reached::Aside { handle, whose, .. } if into.len() >= BLOCK => {
                Ok(aside::file(*whose, handle.as_fd(), offset, into)?)
            }
            Reached::Aside { handle, whose, block, .. } => {
                let mut block = block.lock().unwrap_or_else(PoisonError::into_inner);
                let within = |(start, bytes): &(u64, Vec<u8>)| {
                    let from = usize::try_from(offset.checked_sub(*start)?).ok()?;
                    (from + into.len() <= bytes.len()).then_some(from)
                };
                let from = match within(&block) {
                    Some(from) => from,
                    None => {
                        let mut bytes = vec![0; BLOCK];
                        let got = aside::file(*whose, handle.as_fd(), offset, &mut bytes)?;
                        bytes.truncate(got);
                        *block = (offset, bytes);
                        0
                    }
                };
                let bytes = block.1.get(from..).unwrap_or_default();
                let len = bytes.len().min(into.len());
                into[..len].copy_from_slice(&bytes[..len]);
                Ok(len)
            }
        }
    }
}

impl TargetFile {
    /// What its file system says of it now; `None`: that is not one of this machine's own, and may say anything.
    #[must_use]
    pub fn state(&self) -> Option<FileState> {
        let Reached::Here(file) = &self.0 else { return None };
        let system = fstatfs(file).ok()?.filesystem_type();
        if !LOCAL.contains(&system.0) {
            return None;
        }
        let stat = fstat(file).ok()?;
        Some(FileState {
            dev: stat.st_dev,
            inode: stat.st_ino,
            size: stat.st_size.unsigned_abs(),
            modified: (stat.st_mtime, stat.st_mtime_nsec),
            changed: (stat.st_ctime, stat.st_ctime_nsec),
        })
    }
}

impl ReadAt for TargetFile {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.read_at(&mut into[done..], offset.saturating_add(done as u64)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => done += got,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn len_bytes(&self) -> io::Result<u64> {
        match &self.0 {
            Reached::Here(file) => file.metadata().map(|metadata| metadata.len()),
            Reached::Aside { len, .. } => Ok(*len),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::remote::MappedPath;
    use crate::types::Pid;

    /// As if a process had mapped it.
    pub(in crate::remote) fn mapping_of(path: &Path, inode: u64) -> Mapping {
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
        file.open().expect("readable").read_exact_at(0, &mut magic).expect("long enough");
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

    #[test]
    fn far_files_read_as_near_ones() {
        let process = RemoteProcess::open(Pid(std::process::id())).expect("this process exists");
        let exe = process.exe_file().expect("it was started from a file");
        let near = exe.open().expect("readable");
        let far = MappedFile { local: false, ..exe };
        let far = far.open().expect("readable");
        let len = near.len_bytes().expect("known");
        assert_eq!(far.len_bytes().expect("known"), len);
        for (offset, size) in
            [(0, 64), (64, 4096), (60_000, 70_000), (70_000, 8), (len - 100, 100), (len - 100, 1 << 20)]
        {
            let (mut here, mut there) = (vec![0; size], vec![0; size]);
            let exact = near.read_exact_at(offset, &mut here).map_err(|error| error.kind());
            assert_eq!(far.read_exact_at(offset, &mut there).map_err(|error| error.kind()), exact, "{offset}, {size}");
            assert!(exact.is_err() || here == there, "{offset}, {size}");
        }
    }
}
