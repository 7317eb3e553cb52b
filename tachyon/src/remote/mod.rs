//! Reading another process: its memory, its mappings, the files behind them, and what `/proc` says about it.
//!
//! Everything here only reads: it never writes to the target, stops it or attaches to it. What is read comes from elsewhere and is
//! untrusted: short and failed reads are errors, sizes are bounded, and of the files behind mappings only regular ones are opened. What may
//! never arrive is read by processes that can be left behind. What the bytes mean is left to the calling modules.
//!
//! The crate `procfs` was considered and does not fit a hostile target: one path that is not UTF-8 hides all mappings
//! of the process, and one named `/SYSV` panics its parser (`procfs-core` 0.18, `MMapPath::from`).

mod aside;
mod asleep;
mod cgroup;
pub mod elf;
mod file;
mod known;
pub mod ledger;
mod maps;
mod memory;
mod namespace;
pub mod open_files;
mod status;
mod tasks;

use std::io;
use std::path::PathBuf;

use crate::types::{Pid, RemoteAddr};

pub use aside::PAGE;
pub use aside::{Concerned, End, Patience, helpers_cpu_time, prepare_to_read};
pub use asleep::CpuClocks;
pub use cgroup::Cgroups;
pub use file::{FileIdentity, FileState, MappedFile, TargetFile};
pub use known::{forget_files, let_go_of_files};
pub use maps::{MappedPath, Mapping, parse_maps};
pub use namespace::{NamespaceError, own_pid_namespace};
pub use status::{Stat, parse_stat};
pub use tasks::{Blocked, Task, TaskTimes};

/// Most bytes read from one file of `/proc`: 65,530 mappings (`vm.max_map_count`) of 256 bytes each fit.
const MAX_PROC_FILE_BYTES: u64 = 32 << 20;

/// Why a process, or some part of it, could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// There is no such process, or no longer.
    #[error("no process has pid {0}")]
    NoSuchProcess(Pid),
    /// Its memory cannot be read at this address.
    #[error("cannot read {len} bytes at {addr:#x} of pid {pid}: {source}")]
    Memory {
        /// The process.
        pid: Pid,
        /// Where the read started.
        addr: RemoteAddr,
        /// How many bytes were wanted.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// The kernel read less than was wanted: the rest is not mapped.
    #[error("read only {got} of {len} bytes at {addr:#x} of pid {pid}")]
    Short {
        /// The process.
        pid: Pid,
        /// Where the read started.
        addr: RemoteAddr,
        /// How many bytes were wanted.
        len: usize,
        /// How many were read.
        got: usize,
    },
    /// A file of `/proc/PID`, or one that the process has mapped, cannot be opened or read.
    #[error("cannot read {}: {source}", .path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file of `/proc/PID` does not have the kernel's format.
    #[error("cannot parse {}: odd line {line:?}", .path.display())]
    Odd {
        /// The file.
        path: PathBuf,
        /// What was found.
        line: String,
    },
    /// Behind a mapping is a device, a FIFO or the like, which must not be opened.
    #[error("{} is not a regular file", .0.display())]
    NotRegular(PathBuf),
}

impl RemoteError {
    /// Whether the process has ended, which is normal.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self {
            Self::NoSuchProcess(_) => true,
            Self::Memory { source, .. } => source.raw_os_error() == Some(libc::ESRCH),
            Self::File { path, source } => {
                source.raw_os_error() == Some(libc::ESRCH)
                    || (source.kind() == io::ErrorKind::NotFound && path.starts_with("/proc"))
            }
            _ => false,
        }
    }

    /// Whether permissions are missing.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        match self {
            Self::Memory { source, .. } | Self::File { source, .. } => source.kind() == io::ErrorKind::PermissionDenied,
            _ => false,
        }
    }

    /// Whether it did not arrive in time, and waiting was given up.
    #[must_use]
    pub fn is_not_waited_for(&self) -> bool {
        match self {
            Self::Memory { source, .. } | Self::File { source, .. } => source.kind() == io::ErrorKind::TimedOut,
            _ => false,
        }
    }
}

/// A process to read from, named by its pid in the profiler's own namespace.
///
/// Holds nothing open. A pid can be reused after the process ended: compare [`Stat::start_ticks`] where it matters.
#[derive(Clone, Debug)]
pub struct RemoteProcess {
    pid: Pid,
}

impl RemoteProcess {
    /// The process with this pid.
    ///
    /// # Errors
    /// [`RemoteError::NoSuchProcess`] when there is none.
    pub fn open(pid: Pid) -> Result<Self, RemoteError> {
        let process = Self::at(pid);
        if process.proc_path("stat").exists() { Ok(process) } else { Err(RemoteError::NoSuchProcess(pid)) }
    }

    /// The process with this pid, if there is one: the first read will show.
    #[must_use]
    pub fn at(pid: Pid) -> Self {
        Self { pid }
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Its mappings in order of address.
    ///
    /// # Errors
    /// When `/proc/PID/maps` cannot be read (other users' processes need `CAP_SYS_PTRACE`) or parsed.
    pub fn maps(&self) -> Result<Vec<Mapping>, RemoteError> {
        let text = self.proc_file("maps")?;
        parse_maps(&text).map_err(|line| RemoteError::Odd { path: self.proc_path("maps"), line })
    }

    /// A path below `/proc/PID`.
    fn proc_path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.pid))
    }
}
