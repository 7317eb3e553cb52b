//! Mappings as they are made: how a libpython that was not yet mapped at `exec` is noticed.
//!
//! In: nothing. Out: a [`WatchEvent`] for each file that any process maps executable, and for each `exec`, taken from
//! one dummy perf event per CPU. Whether a file is CPython is decided elsewhere. Memory is bounded by the rings: if
//! processes map faster than [`Watch::drain`] is called, events are lost, and counted by the kernel.

use crate::types::{KtimeNs, Pid};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use perf_event::data::Record;
use perf_event::events::Software;
use perf_event::{Builder, Clock, SampleFlag, Sampler};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

/// Bytes of one CPU's ring: 1,500 mappings of 170 bytes. Two such rings fit within what the kernel lets each user lock
/// per CPU (`kernel.perf_event_mlock_kb`, 516 KiB) without any privilege.
const RING_BYTES: usize = 256 << 10;

/// Most records one [`Watch::drain`] takes.
pub const MAX_DRAINED: usize = 1024;

/// Most records taken from one CPU's ring before the next one's turn, so that a process that maps in a loop does not
/// hide events on other CPUs.
const TURN: usize = 64;

/// `PERF_RECORD_MISC_COMM_EXEC`: the name changed because of `exec`.
#[doc(alias = "PERF_RECORD_MISC_COMM_EXEC")]
const MISC_COMM_EXEC: u16 = 1 << 13;

/// Why mappings cannot be watched.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The list of CPUs could not be read.
    #[error("cannot list the online CPUs in {path}")]
    Cpus {
        /// The file tried.
        path: &'static str,
        /// What happened.
        source: io::Error,
    },
    /// `perf_event_open(2)` refused.
    #[error("cannot open a perf event for mappings on CPU {cpu}")]
    Open {
        /// The CPU.
        cpu: u32,
        /// What happened.
        source: io::Error,
    },
    /// The ring could not be mapped or switched on.
    #[error("cannot map the perf ring of CPU {cpu}")]
    Ring {
        /// The CPU.
        cpu: u32,
        /// What happened.
        source: io::Error,
    },
    /// No descriptor to wait on could be made.
    #[error("cannot wait for {rings} perf rings")]
    Wait {
        /// How many rings there are.
        rings: usize,
        /// What happened.
        source: nix::Error,
    },
}

/// What a process did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WatchEvent<'a> {
    /// It mapped a file executable, or made a mapping of one executable.
    Mapped {
        /// The process, in the profiler's pid namespace.
        pid: Pid,
        /// The thread that did it, likewise.
        tid: u32,
        /// When.
        time: KtimeNs,
        /// First address.
        addr: u64,
        /// Length in bytes.
        len: u64,
        /// Offset in the file, in bytes.
        pgoff: u64,
        /// Major and minor number of the file system's device, as in `/proc/PID/maps`: on btrfs and overlayfs not
        /// what `stat` says.
        dev: (u32, u32),
        /// Inode number.
        inode: u64,
        /// Distinguishes uses of one inode number, on file systems that keep it.
        inode_generation: u64,
        /// Path in the process's own mount namespace; ` (deleted)` may follow.
        path: &'a OsStr,
    },
    /// It executes another program. Its mappings follow, beginning with that program.
    Exec {
        /// The process, in the profiler's pid namespace.
        pid: Pid,
        /// When.
        time: KtimeNs,
        /// The kernel's new short name of it.
        comm: &'a OsStr,
    },
    /// This many records found their ring full: what they would have reported must be looked up in `/proc`. This comes
    /// with the next record of that CPU, not at once.
    Lost {
        /// How many.
        n: u64,
    },
}

/// Whether [`Watch::drain`] left something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "when there is more, no wake-up will tell"]
pub enum Drained {
    /// The rings were empty: wait for the descriptor.
    All,
    /// [`MAX_DRAINED`] records were taken: call again soon.
    More,
}

/// Watches executable mappings and `exec` on all CPUs that are online now.
///
/// Wait until the descriptor is readable (level- or edge-triggered; `tokio::io::unix::AsyncFd` will do; its safety rule
/// holds: one descriptor, open as long as the watch), then call
/// [`Watch::drain`] until it says [`Drained::All`]. Processes outside of the profiler's pid namespace are left out.
/// Times order the events of different CPUs, whose rings are read one after the other.
///
/// Needs `CAP_PERFMON`, or `CAP_SYS_ADMIN` where `kernel.perf_event_paranoid` is above 2 (Debian, Ubuntu).
#[doc(alias = "PERF_COUNT_SW_DUMMY")]
pub struct Watch {
    rings: Vec<Sampler>,
    /// The ring whose turn is first.
    next: usize,
    /// Records taken so far.
    taken: u64,
    epoll: Epoll,
    /// Room for the results of `epoll`: an entry for each ring.
    woken: Vec<EpollEvent>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("rings", &self.rings.len()).finish_non_exhaustive()
    }
}

impl Watch {
    /// Starts watching.
    ///
    /// # Errors
    /// When perf events are not allowed or a ring cannot be mapped.
    pub fn open() -> Result<Self, WatchError> {
        let cpus = aya::util::online_cpus().map_err(|(path, source)| WatchError::Cpus { path, source })?;
        let mut rings = Vec::with_capacity(cpus.len());
        for cpu in cpus {
            match open_counter(cpu) {
                Ok(counter) => {
                    let enabled = counter.sampled(RING_BYTES).and_then(|mut ring| ring.enable().map(|()| ring));
                    rings.push(enabled.map_err(|source| WatchError::Ring { cpu, source })?);
                }
                // The CPU went offline since the list was read.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(source) => return Err(WatchError::Open { cpu, source }),
            }
        }
        let count = rings.len();
        let wait = |source| WatchError::Wait { rings: count, source };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(wait)?;
        for (index, ring) in (0..).zip(&rings) {
            // SAFETY: the descriptor belongs to `ring`, which is open during this call.
            let fd = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
            epoll.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, index)).map_err(wait)?;
        }
        Ok(Self { rings, next: 0, taken: 0, epoll, woken: vec![EpollEvent::empty(); count] })
    }

    /// Hands over what has happened, at most [`MAX_DRAINED`] records of it.
    pub fn drain(&mut self, on: &mut dyn FnMut(WatchEvent<'_>)) -> Drained {
        // Takes the wake-ups first: one that comes while the rings are read is for the next call. An error can only
        // be an interrupted call, after which the descriptor stays readable.
        let _ = self.epoll.wait(&mut self.woken, EpollTimeout::ZERO);
        let mut left = MAX_DRAINED;
        let mut empty = 0;
        while empty < self.rings.len() {
            let Some(ring) = self.rings.get_mut(self.next) else {
                self.next = 0;
                continue;
            };
            self.next += 1;
            let turn = TURN.min(left);
            let taken = take(ring, turn, on);
            empty = if taken < turn { empty + 1 } else { 0 };
            left -= taken;
            self.taken += taken as u64;
            if left == 0 {
                return Drained::More;
            }
        }
        Drained::All
    }
}

impl Watch {
    /// How many records were taken so far, those included that are no [`WatchEvent`]: any of them wakes whoever waits.
    #[must_use]
    pub const fn taken(&self) -> u64 {
        self.taken
    }
}

impl AsFd for Watch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl AsRawFd for Watch {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.0.as_raw_fd()
    }
}

/// An event that counts nothing and carries the kernel's notices of one CPU.
fn open_counter(cpu: u32) -> io::Result<perf_event::Counter> {
    Builder::new(Software::DUMMY)
        .any_pid()
        .one_cpu(cpu as usize)
        .mmap(true)
        .mmap2(true)
        .comm(true)
        .comm_exec(true)
        .sample(SampleFlag::TIME)
        .sample_id_all(true)
        .clockid(Clock::MONOTONIC)
        // Wakes at every record: an interpreter that is inspected late has lost samples.
        .wakeup_watermark(1)
        .build()
}

/// Takes up to `limit` records from one ring and returns how many.
fn take(ring: &mut Sampler, limit: usize, on: &mut dyn FnMut(WatchEvent<'_>)) -> usize {
    for taken in 0..limit {
        let Some(record) = ring.next_record() else { return taken };
        let bytes = record.to_contiguous();
        // `sample_id_all`: the time is at the end of every record.
        let time = KtimeNs(bytes.last_chunk().map_or(0, |time| u64::from_ne_bytes(*time)));
        match record.parse_record() {
            Ok(parsed) => {
                if let Some(event) = event(&parsed, record.misc(), time) {
                    on(event);
                }
            }
            Err(_) => on(WatchEvent::Lost { n: 1 }),
        }
    }
    limit
}

/// What a record of the kernel means, if it is relevant here.
fn event<'a>(record: &'a Record<'_>, misc: u16, time: KtimeNs) -> Option<WatchEvent<'a>> {
    match record {
        Record::Mmap2(mapping) => {
            let inode = mapping.ino()?;
            // Without an inode it is memory made for generated code, or the vdso.
            (inode != 0 && is_visible(mapping.pid)).then(|| WatchEvent::Mapped {
                pid: Pid(mapping.pid),
                tid: mapping.tid,
                time,
                addr: mapping.addr,
                len: mapping.len,
                pgoff: mapping.pgoff,
                dev: (mapping.maj().unwrap_or(0), mapping.min().unwrap_or(0)),
                inode,
                inode_generation: mapping.ino_generation().unwrap_or(0),
                path: OsStr::from_bytes(&mapping.filename),
            })
        }
        Record::Comm(comm) if misc & MISC_COMM_EXEC != 0 && is_visible(comm.pid) => {
            Some(WatchEvent::Exec { pid: Pid(comm.pid), time, comm: OsStr::from_bytes(&comm.comm) })
        }
        Record::Lost(lost) => Some(WatchEvent::Lost { n: lost.lost }),
        _ => None,
    }
}

/// The kernel writes 0 for a process without a pid in the opener's namespace, -1 for one that is gone (Linux 6.18,
/// `kernel/events/core.c`, `perf_event_pid_type`).
const fn is_visible(pid: u32) -> bool {
    pid != 0 && pid != u32::MAX
}

#[cfg(test)]
#[path = "watch/tests.rs"]
mod tests;
