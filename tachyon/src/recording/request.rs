//! What to record: targets, sampling, limits. No paths, formats or texts.

use super::made::Told;
use super::native::NativePlan;
use crate::discover::Filter;
use crate::kept::SymbolCache;
use crate::kernel::{ChosenEvent, Waits};
use crate::types::Pid;
use std::path::PathBuf;
use std::time::Duration;

/// Which processes are recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// These, in the order given, each once.
    Pids(Vec<Pid>),
    /// Every CPython process.
    AllPython,
    /// A process that has not started its program yet: it is looked at when it executes one.
    Child(Pid),
}

/// A recording to make.
///
/// ```
/// use std::time::Duration;
/// use tachyon::recording::{Request, Targets};
/// use tachyon::types::Pid;
///
/// let request = Request { native: None, ..Request::new(Targets::Pids(vec![Pid(4242)]), Duration::from_millis(10)) };
/// assert!((request.rate_hz - 100.0).abs() < 1e-9);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Which processes.
    pub targets: Targets,
    /// What [`Targets::Child`] will execute, if known: its files are examined before it runs, so that its first samples have whole
    /// stacks.
    pub program: Option<PathBuf>,
    /// Their children too, from now on.
    pub follow_children: bool,
    /// Which of those processes to record.
    pub filter: Filter,
    /// CPU time between two samples, in whole nanoseconds.
    pub interval: Duration,
    /// The same as samples for each second of CPU time, as it was asked for.
    pub rate_hz: f64,
    /// Share of one core that the recorder may use, its BPF programs included; above that, it samples less often.
    pub max_cpu: Option<f64>,
    /// Bytes of memory that this process and the recorder's maps may use together; near that, it gives things up.
    pub max_memory: Option<u64>,
    /// Only samples that hold the GIL.
    pub gil: bool,
    /// The opcode of each frame too.
    pub opcodes: bool,
    /// Native frames, if they are wanted.
    pub native: Option<NativePlan>,
    /// Where names of native functions, unwind rules and offsets in the kernel are kept for other recordings, and taken from; `None`:
    /// nowhere.
    pub symbol_cache: Option<SymbolCache>,
    /// Kernel frames too.
    pub kernel: bool,
    /// Whether waiting threads are sampled, each once in `interval`.
    pub waits: Waits,
    /// Record who ends waits, too: thread and stack.
    pub wakers: bool,
    /// Stacks of asyncio tasks show their names and (CPython 3.14+) the tasks that await them, in place of the event loop that called
    /// them.
    pub awaiting: bool,
    /// Where waits are sampled, the account has the times of each thread.
    pub thread_times: bool,
    /// Events to sample, in place of the clock alone: [`MAX_EVENTS`](tachyon_common::limits::MAX_EVENTS) at most, and not with
    /// waits or a limit of CPU time.
    pub events: Vec<ChosenEvent>,
    /// Each segment keeps its samples by stack, in memory ([`Segment::stacks`](super::Segment::stacks)).
    pub keep_stacks: bool,
    /// Each process has its [`Details`](crate::profile::Details), with these variables of its environment.
    pub variables: Option<Vec<String>>,
    /// Those variables are labels of its samples.
    pub label_env: bool,
    /// Whole command lines; otherwise only programs and their scripts.
    pub arguments: bool,
    /// Bytes of the sample ring, a power of two of whole pages; `None`: chosen by rate and number of CPUs.
    pub ring_bytes: Option<u32>,
    /// What only the start needed is given back to the system: freed memory, and those pages of the files of the calling program
    /// and its libraries that it does not go on using.
    pub give_back: bool,
}

/// Bytes for unwind tables by default.
const UNWIND_MEMORY: u32 = 64 << 20;

impl Request {
    /// Records Python and native frames of `targets`, one sample per `interval` of CPU time, without limits; samples are
    /// kept by stack.
    #[must_use]
    pub fn new(targets: Targets, interval: Duration) -> Self {
        Self {
            targets,
            program: None,
            follow_children: false,
            filter: Filter::default(),
            interval,
            rate_hz: 1.0 / interval.as_secs_f64(),
            max_cpu: None,
            max_memory: None,
            gil: false,
            opcodes: false,
            native: Some(NativePlan::new(UNWIND_MEMORY)),
            symbol_cache: None,
            kernel: false,
            waits: Waits::Not,
            wakers: false,
            awaiting: false,
            thread_times: false,
            events: Vec::new(),
            keep_stacks: true,
            variables: None,
            label_env: false,
            arguments: true,
            ring_bytes: None,
            give_back: false,
        }
    }

    /// Samples per second that the ring must have room for, on each CPU: events other than the clock come in bursts.
    pub(super) fn samples_a_second(&self) -> f64 {
        const OF_EVENTS: f64 = 2_000.0;
        if self.events.is_empty() { self.rate_hz } else { self.rate_hz.max(OF_EVENTS) }
    }

    /// What the profile may have of processes.
    pub(super) const fn told(&self) -> Told {
        Told { arguments: self.arguments, environment: self.label_env }
    }

    /// How many processes are recorded from the start to the end; `None`: others may come.
    pub(super) fn only(&self) -> Option<usize> {
        match &self.targets {
            _ if self.follow_children => None,
            Targets::Pids(pids) => Some(pids.len()),
            Targets::Child(_) => Some(1),
            Targets::AllPython => None,
        }
    }

    /// Whether samples may come from more than one process: stacks then start with `comm (pid)`.
    #[must_use]
    pub fn many_processes(&self) -> bool {
        self.follow_children || !matches!(&self.targets, Targets::Pids(pids) if pids.len() == 1)
    }
}
