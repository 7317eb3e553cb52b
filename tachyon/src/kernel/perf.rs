//! The sampling event: one on each CPU, with intervals that are drawn anew from time to time.

use super::KernelError;
use super::chosen::ChosenEvent;
use super::jitter::{Jitter, Mean};
use aya::programs::trace_point::TracePointLink;
use aya::programs::{PerfEvent, ProgramError};
use aya::sys::SyscallError;
use aya::util::online_cpus;
use perf_event::events::{Hardware, Software};
use perf_event::{Builder, Counter};
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

/// The call that opens an event.
const OPEN: &str = "perf_event_open";

/// What makes the timer's program run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `PERF_COUNT_SW_CPU_CLOCK`: a high-resolution timer on each CPU; available everywhere.
    CpuClock,
    /// `PERF_COUNT_HW_CPU_CYCLES`: the processor's counter, where there is one; samples also where interrupts are off.
    Cycles,
    /// Events that were chosen, none of which is the clock.
    Chosen,
}

impl Event {
    /// The event's name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpuClock => "cpu-clock",
            Self::Cycles => "cycles",
            Self::Chosen => "chosen events",
        }
    }

    /// How far an interval may lie from the mean, as a share of it. The kernel itself keeps adapting those of `cycles`.
    #[must_use]
    pub const fn jitter(self) -> f64 {
        match self {
            Self::CpuClock => super::jitter::SPREAD,
            Self::Cycles | Self::Chosen => 0.0,
        }
    }
}

/// The events of all CPUs, with the timer's program attached to each. Once this is dropped the program no longer runs.
pub(super) struct Sampling {
    pub(super) event: Event,
    /// Present if the events are clocks.
    jitter: Option<Jitter>,
    clocks: Vec<Counter>,
    /// Counters of other events.
    others: Vec<Counter>,
    tracepoints: Vec<TracePointLink>,
}

/// Attaches `program` on every online CPU: to hardware cycles if there is a PMU, otherwise to cpu-clock.
///
/// # Errors
/// When no event can be opened, with the reason of the last try.
pub(super) fn attach(program: &PerfEvent, interval: Duration) -> Result<Sampling, KernelError> {
    attach_first(program, interval, Event::Cycles)
}

/// Starts without any event.
pub(super) fn nothing(event: Event) -> Sampling {
    Sampling { event, jitter: None, clocks: Vec::new(), others: Vec::new(), tracepoints: Vec::new() }
}

impl Sampling {
    /// Draws the intervals of clocks anew if it is time. Returns when it will next be time; `None`: never.
    pub(super) fn vary(&mut self) -> Option<Instant> {
        Some(self.jitter.as_mut()?.turn(&self.clocks))
    }

    /// Samples a tracepoint too.
    pub(super) fn add_tracepoint(&mut self, link: TracePointLink) {
        self.tracepoints.push(link);
    }

    /// Samples the clock too, with its own `program`.
    ///
    /// # Errors
    /// As [`attach`].
    pub(super) fn add_clock(&mut self, program: &PerfEvent, interval: Duration) -> Result<(), KernelError> {
        let clock = attach_first(program, interval, Event::CpuClock)?;
        (self.event, self.jitter, self.clocks) = (clock.event, clock.jitter, clock.clocks);
        Ok(())
    }

    /// Samples one of perf's events too, on every online CPU.
    ///
    /// # Errors
    /// When the machine has no such event, or the kernel refuses.
    pub(super) fn add_event(&mut self, program: &PerfEvent, event: &ChosenEvent) -> Result<(), KernelError> {
        for cpu in cpus()? {
            let Some(builder) = event.builder() else { return Ok(()) };
            let counter = attach_to(program, cpu, builder).map_err(|source| match missing(&source) {
                true => KernelError::NoEvent(event.name().to_owned()),
                false => KernelError::Attach { what: format!("{} on CPU {cpu}", event.name()), source },
            })?;
            self.others.push(counter);
        }
        Ok(())
    }
}

/// Whether the reason is that there is no such event.
fn missing(error: &ProgramError) -> bool {
    let ProgramError::SyscallError(error) = error else { return false };
    let none = [libc::ENOENT, libc::EOPNOTSUPP, libc::ENODEV, libc::EINVAL];
    error.call == OPEN && error.io_error.raw_os_error().is_some_and(|number| none.contains(&number))
}

/// The CPUs that are online now.
///
/// # Errors
/// When their list cannot be read.
pub fn cpus() -> Result<Vec<u32>, KernelError> {
    online_cpus().map_err(|(path, source)| KernelError::Cpus { path: path.to_owned(), source })
}

/// The same, with `first` as the event to try first.
///
/// # Errors
/// As [`attach`].
pub(super) fn attach_first(program: &PerfEvent, interval: Duration, first: Event) -> Result<Sampling, KernelError> {
    let cpus = cpus()?;
    let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX).max(1);
    let mut event = first;
    let mut counters = Vec::with_capacity(cpus.len());
    for (index, cpu) in cpus.into_iter().enumerate() {
        if index == 0 {
            if let Ok(counter) = attach_one(program, cpu, event, nanos) {
                counters.push(counter);
                continue;
            }
            event = Event::CpuClock;
        }
        let counter = attach_one(program, cpu, event, nanos)
            .map_err(|source| KernelError::Attach { what: format!("{} on CPU {cpu}", event.name()), source })?;
        counters.push(counter);
    }
    let jitter = (event == Event::CpuClock).then(|| Jitter::begin(&counters, Mean::of(nanos)));
    Ok(Sampling { jitter, clocks: counters, ..nothing(event) })
}

/// Opens its own event rather than the library's: that one keeps no descriptor, and without one the interval cannot be
/// changed.
fn attach_one(program: &PerfEvent, cpu: u32, event: Event, interval_ns: u64) -> Result<Counter, ProgramError> {
    let mut builder = match event {
        Event::CpuClock | Event::Chosen => Builder::new(Software::CPU_CLOCK),
        Event::Cycles => Builder::new(Hardware::CPU_CYCLES),
    };
    match event {
        Event::CpuClock | Event::Chosen => builder.sample_period(interval_ns),
        Event::Cycles => builder.sample_frequency((1_000_000_000 / interval_ns).max(1)),
    };
    attach_to(program, cpu, builder)
}

/// Opens an event on a CPU, and lets it run the program.
fn attach_to(program: &PerfEvent, cpu: u32, mut builder: Builder<'_>) -> Result<Counter, ProgramError> {
    let cpu = usize::try_from(cpu).unwrap_or(usize::MAX);
    let mut counter = builder.any_pid().one_cpu(cpu).include_kernel().include_hv().build().map_err(refused(OPEN))?;
    counter.set_bpf(program.fd()?.as_fd().as_raw_fd()).map_err(refused("PERF_EVENT_IOC_SET_BPF"))?;
    counter.enable().map_err(refused("PERF_EVENT_IOC_ENABLE"))?;
    Ok(counter)
}

fn refused(call: &'static str) -> impl FnOnce(std::io::Error) -> ProgramError {
    move |io_error| SyscallError { call, io_error }.into()
}
