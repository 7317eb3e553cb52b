//! Choices made before the object is loaded.

use super::chosen::ChosenEvent;
use super::made_for::MadeFor;
use super::waits::Waits;
use crate::kept::Folder;
use std::sync::Arc;
use std::time::Duration;
use tachyon_common::config::flags;
use tachyon_common::limits::{MAX_PROCESSES, MAX_RANGES, MAX_SPACE_RANGES};

/// Choices fixed at load.
#[derive(Clone, Debug)]
pub struct Options {
    /// Time between two samples of a running thread.
    pub interval: Duration,
    /// Processes that are in no table are wanted if they turn out to be CPython.
    pub all_python: bool,
    /// Only samples whose thread holds the GIL are wanted.
    pub gil_only: bool,
    /// Not every process is wanted: user space decides at each `exec`.
    pub filtered: bool,
    /// The opcode of each frame is wanted.
    pub opcodes: bool,
    /// Kernel stacks are wanted.
    pub kernel_stacks: bool,
    /// Whether waiting threads are sampled, each once in `interval`.
    pub waits: Waits,
    /// The stack of the thread that ends a wait is wanted, too.
    pub wakers: bool,
    /// The tasks that await the running one are wanted, too.
    pub awaiting: bool,
    /// What each thread did with its time is reported when it exits.
    pub thread_times: bool,
    /// Events to sample, in place of the clock alone; [`MAX_EVENTS`](tachyon_common::limits::MAX_EVENTS) at most.
    pub events: Vec<ChosenEvent>,
    /// Processes for which the tables have room ([`processes`]).
    pub processes: u32,
    /// Bytes for unwind rows, where native stacks are wanted.
    pub unwind_memory: Option<u32>,
    /// Size of the sample ring in bytes, a power of two of whole pages ([`ring_bytes`]).
    pub ring_bytes: u32,
    /// Inode number of the profiler's pid namespace, unless that is the initial one ([`own_pid_namespace`]).
    ///
    /// [`own_pid_namespace`]: crate::remote::own_pid_namespace
    pub pid_namespace: Option<u32>,
    /// What all processes that it begins with have in common, if that is known; not used with waits or chosen events.
    pub made_for: Option<MadeFor>,
    /// Where the kernel's offsets are kept between recordings; `None`: nowhere.
    pub kept: Option<Arc<Folder>>,
}

impl Default for Options {
    /// Running threads of chosen processes, 100 times a second: nothing more of them than Python frames.
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(10),
            all_python: false,
            gil_only: false,
            filtered: false,
            opcodes: false,
            kernel_stacks: false,
            waits: Waits::Not,
            wakers: false,
            awaiting: false,
            thread_times: false,
            events: Vec::new(),
            processes: processes(Some(1)),
            unwind_memory: None,
            ring_bytes: 1 << 20,
            pid_namespace: None,
            made_for: None,
            kept: None,
        }
    }
}

impl Options {
    /// Whether [`Options::made_for`] is used.
    #[must_use]
    pub fn may_be_made_for_less(&self) -> bool {
        !self.waits.are_wanted() && self.events.is_empty()
    }

    /// What the programs are made for, in place of everything.
    pub(super) fn made_for(&self) -> Option<MadeFor> {
        self.made_for.filter(|_| self.may_be_made_for_less())
    }

    /// What of this the programs are told as flags of their configuration.
    pub(super) fn flags(&self) -> u32 {
        let chosen = [
            (self.all_python, flags::ALL_PYTHON),
            (self.gil_only, flags::GIL_ONLY),
            (self.filtered, flags::FILTERED),
            (self.opcodes, flags::OPCODES),
            (self.kernel_stacks, flags::KERNEL),
            (self.unwind_memory.is_some(), flags::NATIVE),
            (self.awaiting, flags::AWAITING),
            (self.wakers, flags::WAKERS),
            (self.thread_times, flags::THREAD_TIMES),
            (!self.events.is_empty(), flags::EVENTS),
        ];
        chosen.into_iter().filter(|(is_chosen, _)| *is_chosen).fold(0, |all, (_, flag)| all | flag)
    }

    /// Size of the ring of process starts and ends, a power of two of whole pages: smaller where those of only a few processes and
    /// their children are told.
    pub(super) const fn events_ring_bytes(&self) -> u32 {
        if self.all_python { 1 << 20 } else { 1 << 18 }
    }

    /// Ranges of all address spaces together. A process that maps a library has new ones, while those it had rest for a second
    /// before they are freed: eight times the largest address space, where only a few processes are recorded.
    pub(super) const fn ranges(&self) -> u32 {
        if self.processes < MAX_PROCESSES { 8 * (MAX_SPACE_RANGES + 1) } else { MAX_RANGES }
    }
}

/// Room for the processes of a recording that only has these from its start to its end, or for as many as there may be. (Each place
/// takes half a kilobyte in three tables, whether it is used or not.)
#[must_use]
pub fn processes(only: Option<usize>) -> u32 {
    // The profiler's own and those that have just ended have places too, and a hash table is never quite full.
    const BESIDE: usize = 62;
    // Their address spaces have room in `Options::ranges`.
    const FEW: usize = 2;
    match only {
        Some(only) if only <= FEW => u32::try_from(2 * only + BESIDE).unwrap_or(MAX_PROCESSES).next_power_of_two(),
        _ => MAX_PROCESSES,
    }
}

/// Size of the sample ring: what every CPU sends in two seconds at 2 KiB a sample (80 frames), at least 1 MiB, at most
/// 64 MiB, rounded up to a power of two. At 99 Hz and 2 CPUs that is 1 MiB, at 1 kHz and 16 CPUs 64 MiB.
#[must_use]
pub fn ring_bytes(rate_hz: f64, cpus: usize) -> u32 {
    const MIN: u32 = 1 << 20;
    const MAX: u32 = 1 << 26;
    // The cast saturates, which is right for an absurd rate.
    let wanted = (rate_hz * cpus as f64 * 2.0 * 2048.0) as u32;
    wanted.clamp(MIN, MAX).next_power_of_two()
}
