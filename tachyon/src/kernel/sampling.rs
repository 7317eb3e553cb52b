//! Samples: their programs are verified, attached and detached, and their runs counted.

use super::chosen::{ChosenEvent, Source};
use super::error::{KernelError, program_error};
use super::made_for::put_stages;
use super::object::{Kernel, take};
use super::perf::{self, Event, Sampling};
use super::programs::{
    ENTRY, EVENT_PROGRAMS, TRACE_PROGRAMS, TRACE_STAGES, Verified, Verifying, perf_program, trace_program,
};
use aya::Ebpf;
use aya::maps::{MapData, MapError, PerCpuArray, ProgramArray};
use std::time::{Duration, Instant};

/// What sampled tracepoints need.
pub(super) struct TraceMaps {
    // Tail calls work only as long as the table's descriptor is open.
    stages: ProgramArray<MapData>,
    hits: PerCpuArray<MapData, u64>,
}

impl TraceMaps {
    pub(super) fn of(ebpf: &mut Ebpf) -> Result<Self, KernelError> {
        Ok(Self { stages: take(ebpf, "TRACE_STAGES")?, hits: take(ebpf, "TRACE_HITS")? })
    }
}

/// What the kernel says about the programs' cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// Runs that count: of the timer's program or those of chosen events, without the hits of tracepoints between periods.
    pub run_count: u64,
    /// Nanoseconds of all programs together.
    pub run_ns: u64,
    /// Nanoseconds of those that make samples (with their tail calls).
    pub sample_ns: u64,
}

impl Kernel {
    /// Has the verifier check the programs that make samples; meanwhile nothing can be attached or detached.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn verify(&mut self) -> Result<Verifying, KernelError> {
        let ebpf = self.ebpf.take().ok_or(KernelError::Verifying)?;
        Verifying::begin(ebpf, self.samplers.clone()).map_err(KernelError::Thread)
    }

    /// Takes the programs that make samples.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_samplers(&mut self, verified: Verified) -> Result<(), KernelError> {
        let Verified { mut ebpf, took } = verified;
        if self.wide.is_none() {
            // The place of the first is that of one that is made for more.
            let narrow = self.is_narrow();
            put_stages(&mut ebpf, &mut self.stages, &self.samplers, |name| !narrow || name != ENTRY)?;
        }
        if let Some(traces) = &mut self.traces {
            for (index, name) in (0_u32..).zip(TRACE_STAGES) {
                if self.samplers.contains(&name) {
                    let fd = trace_program(&mut ebpf, name)?.fd().map_err(program_error(name))?;
                    traces.stages.set(index, fd, 0).map_err(KernelError::map("TRACE_STAGES"))?;
                }
            }
        }
        self.add_wait_stages(&mut ebpf)?;
        self.ebpf = Some(ebpf);
        self.load_times.programs = took;
        Ok(())
    }

    /// Starts sampling.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn attach_sampling(&mut self, interval: Duration) -> Result<Event, KernelError> {
        let ebpf = self.ebpf.as_mut().ok_or(KernelError::Verifying)?;
        let sampling = if self.events.is_empty() {
            let program = perf_program(ebpf, ENTRY)?;
            match (self.running, &self.waits) {
                (false, _) => perf::nothing(Event::CpuClock),
                // Its interrupt could come in the middle of a waiting thread's walk.
                (true, Some(_)) => perf::attach_first(program, interval, Event::CpuClock)?,
                (true, None) => perf::attach(program, interval)?,
            }
        } else {
            attach_events(ebpf, &self.events, interval)?
        };
        let event = sampling.event;
        self.sampling = Some(sampling);
        self.interval = interval;
        self.set_wait_period(interval)?;
        Ok(event)
    }

    /// Attaches everything that is attached anew, on the CPUs that are online now.
    ///
    /// # Errors
    /// When the kernel refuses; then as much as possible is attached as before.
    pub fn reattach_sampling(&mut self) -> Result<(), KernelError> {
        if self.sampling.is_none() {
            return Ok(());
        }
        self.detach_sampling();
        // A CPU may have gone offline while the others got their events.
        let first = self.attach_sampling(self.interval);
        first.or_else(|_| self.attach_sampling(self.interval)).map(drop)
    }

    /// Draws the intervals between samples anew if it is time and the profiler is to do it. Returns when it will next be time;
    /// `None`: not before another event is attached.
    pub fn vary_intervals(&mut self) -> Option<Instant> {
        self.sampling.as_mut()?.vary()
    }

    /// Detaches the timer's program, or those of chosen events: when this returns none of them runs any more, and the
    /// counters stand still.
    pub fn detach_sampling(&mut self) {
        self.sampling = None;
    }

    /// What the kernel measured about the programs; zeros unless it was asked to measure.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn run_stats(&self) -> Result<RunStats, KernelError> {
        let mut stats = RunStats::default();
        for (name, program) in self.ebpf.iter().flat_map(Ebpf::programs) {
            let Ok(info) = program.info() else { continue };
            let info_ns = u64::try_from(info.run_time().as_nanos()).unwrap_or(u64::MAX);
            stats.run_ns += info_ns;
            if self.begins_samples(name) {
                stats.run_count += info.run_count();
                stats.sample_ns += info_ns;
            }
        }
        stats.run_count -= self.hits_between_periods()?.min(stats.run_count);
        Ok(stats)
    }

    /// Whether it is one of the programs that are attached.
    fn begins_samples(&self, program: &str) -> bool {
        let mut of_events = EVENT_PROGRAMS.iter().chain(&TRACE_PROGRAMS);
        if self.events.is_empty() { program == ENTRY } else { of_events.any(|name| *name == program) }
    }

    /// Hits of tracepoints that were not sampled, because of their periods.
    fn hits_between_periods(&self) -> Result<u64, KernelError> {
        let Some(traces) = &self.traces else { return Ok(0) };
        let mut between = 0;
        for (index, event) in (0_u32..).zip(&self.events) {
            let hits = match traces.hits.get(&index, 0) {
                Ok(hits) => hits,
                Err(MapError::KeyNotFound) => continue,
                Err(reason) => return Err(KernelError::map("TRACE_HITS")(reason)),
            };
            between += hits.iter().map(|hits| hits - hits / u64::from(event.period())).sum::<u64>();
        }
        Ok(between)
    }
}

/// Attaches the programs of chosen events, each by its position among them.
fn attach_events(ebpf: &mut Ebpf, events: &[ChosenEvent], interval: Duration) -> Result<Sampling, KernelError> {
    let mut sampling = perf::nothing(Event::Chosen);
    for (event, (perf, trace)) in events.iter().zip(EVENT_PROGRAMS.into_iter().zip(TRACE_PROGRAMS)) {
        match event.source() {
            Source::Tracepoint { category, name } => {
                let program = trace_program(ebpf, trace)?;
                let attached = program.attach(category, name).and_then(|link| program.take_link(link));
                let what = format!("tracepoint {}", event.name());
                sampling.add_tracepoint(attached.map_err(|source| KernelError::Attach { what, source })?);
            }
            Source::Clock => sampling.add_clock(perf_program(ebpf, perf)?, interval)?,
            Source::Software(_) | Source::Hardware(_) | Source::Cache(_) => {
                sampling.add_event(perf_program(ebpf, perf)?, event)?;
            }
        }
    }
    Ok(sampling)
}
