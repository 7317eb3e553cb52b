//! How many files this process may have open, how many of them a recording needs for itself, and closing what is not needed.

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};
use std::io;
use std::os::fd::RawFd;
use std::sync::LazyLock;

/// Maps, programs and what else a recording has open at once, but for targets' files: 93 with native frames, 112 where waits are sampled
/// as well, on two CPUs; a few more are room for what its threads open for a moment.
const OF_A_RECORDING: u64 = 120;
/// One for mappings and one for samples.
const OF_A_CPU: u64 = 2;

/// How many files may be open at once; `None`: the limit cannot be read, then it is not enforced either.
#[must_use]
pub fn limit() -> Option<u64> {
    getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft)
}

/// Counting processors opens a file.
static NEEDED: LazyLock<u64> = LazyLock::new(|| {
    let cpus = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().map_or(1, i64::unsigned_abs);
    OF_A_RECORDING + OF_A_CPU * cpus
});

/// How many a recording needs on this machine, whatever it records.
#[must_use]
pub fn needed() -> u64 {
    *NEEDED
}

/// How many may be open besides: targets' files are held only as far as there is room.
#[must_use]
pub fn spare() -> u64 {
    limit().map_or(u64::MAX, |limit| limit.saturating_sub(needed()))
}

/// Closes all of the calling process's open files but these, which are in ascending order; of the calling thread's, if it has a table of
/// its own. Allocates nothing.
///
/// # Errors
/// When the kernel refuses (Linux before 5.9, a seccomp filter): some may be closed by then.
///
/// # Safety
/// Nothing that uses this table may use the others any more.
pub unsafe fn close_all_but(kept: &[RawFd]) -> io::Result<()> {
    let close = |first: u32, last: u32| {
        // SAFETY: takes numbers only; the caller says that nothing uses them.
        let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if closed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    let mut first = 0;
    for fd in kept.iter().map(|fd| fd.unsigned_abs()) {
        if first < fd {
            close(first, fd - 1)?;
        }
        first = fd + 1;
    }
    close(first, u32::MAX)
}
