//! Small newtypes that carry their unit or their namespace.

use std::fmt;

/// A process id in the pid namespace of the profiler itself (as `ps` next to it prints).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pid(pub u32);

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Pid {
    /// The same number as the C library's type.
    #[must_use]
    pub fn as_raw(self) -> libc::pid_t {
        libc::pid_t::try_from(self.0).unwrap_or(libc::pid_t::MAX)
    }
}

/// An address in a target process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RemoteAddr(pub u64);

impl fmt::LowerHex for RemoteAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::LowerHex::fmt(&self.0, f)
    }
}

impl RemoteAddr {
    /// The address `offset` bytes further, or `None` past the end of the address space.
    #[must_use]
    pub fn checked_add(self, offset: u64) -> Option<Self> {
        self.0.checked_add(offset).map(Self)
    }
}

/// A moment on `CLOCK_MONOTONIC`, in nanoseconds (the clock of `bpf_ktime_get_ns`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KtimeNs(pub u64);

impl KtimeNs {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC)
            .expect("CLOCK_MONOTONIC exists on every Linux");
        Self(now.tv_sec().unsigned_abs() * 1_000_000_000 + now.tv_nsec().unsigned_abs())
    }

    /// Whole microseconds, the unit of TACH.
    #[must_use]
    pub fn as_micros(self) -> u64 {
        self.0 / 1000
    }

    /// The moment this much later.
    #[must_use]
    pub fn after(self, time: std::time::Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
    }
}
