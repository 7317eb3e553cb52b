//! The sampling event: one on each CPU.

use super::KernelError;
use aya::programs::PerfEvent;
use aya::programs::perf_event::PerfEventLinkId;
use aya::programs::perf_event::{HardwareEvent, PerfEventConfig, PerfEventScope, SamplePolicy, SoftwareEvent};
use aya::util::online_cpus;
use std::time::Duration;

/// What makes the timer's program run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// `PERF_COUNT_SW_CPU_CLOCK`: a high-resolution timer on each CPU; everywhere.
    CpuClock,
    /// `PERF_COUNT_HW_CPU_CYCLES`: the processor's counter, where there is one; samples also where interrupts are off.
    Cycles,
}

impl Event {
    /// The event's name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpuClock => "cpu-clock",
            Self::Cycles => "cycles",
        }
    }
}

/// Attaches `program` on every online CPU: to hardware cycles where there is a PMU, else to cpu-clock. Adds what was
/// attached to `links`.
///
/// # Errors
/// When no event can be opened, with the reason of the last try.
pub(super) fn attach(
    program: &mut PerfEvent,
    interval: Duration,
    links: &mut Vec<PerfEventLinkId>,
) -> Result<Event, KernelError> {
    let cpus = online_cpus().map_err(|(path, source)| KernelError::Cpus { path: path.to_owned(), source })?;
    let nanos = u64::try_from(interval.as_nanos()).unwrap_or(u64::MAX).max(1);
    let mut event = Event::Cycles;
    for (index, cpu) in cpus.into_iter().enumerate() {
        if index == 0 {
            if let Ok(link) = attach_one(program, cpu, event, nanos) {
                links.push(link);
                continue;
            }
            event = Event::CpuClock;
        }
        let link = attach_one(program, cpu, event, nanos)
            .map_err(|source| KernelError::Attach { what: format!("{} on CPU {cpu}", event.name()), source })?;
        links.push(link);
    }
    Ok(event)
}

fn attach_one(
    program: &mut PerfEvent,
    cpu: u32,
    event: Event,
    interval_ns: u64,
) -> Result<PerfEventLinkId, aya::programs::ProgramError> {
    let (config, policy) = match event {
        Event::CpuClock => (PerfEventConfig::Software(SoftwareEvent::CpuClock), SamplePolicy::Period(interval_ns)),
        Event::Cycles => (
            PerfEventConfig::Hardware(HardwareEvent::CpuCycles),
            SamplePolicy::Frequency((1_000_000_000 / interval_ns).max(1)),
        ),
    };
    program.attach(config, PerfEventScope::AllProcessesOneCpu { cpu }, policy, false)
}
