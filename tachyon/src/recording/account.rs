//! The account of a recording, put together from what each room counted.

use super::native::Mapped;
use super::registry::Registry;
use super::samples::{Made, Merges};
use super::throttle::Rates;
use crate::cli::plan::Plan;
use crate::events::ReaderStats;
use crate::kernel::{Event, Kernel};
use crate::profile::script;
use crate::report::{CostReport, NativeReport, ProcessReport, Report, StartReport};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::time::Duration;
use tachyon_common::event::Counters;
use tachyon_common::stop::{LossCause, StopReason};

/// Version of the report's schema.
pub(super) const SCHEMA: u32 = 1;

/// The kernel's own measuring of BPF programs, on while this lives.
pub(super) struct Stats {
    held: Result<OwnedFd, String>,
}

impl Stats {
    /// Asks the kernel to measure.
    pub fn start() -> Self {
        let held = aya::sys::enable_stats(aya::sys::Stats::RunTime).map_err(|error| {
            // The kernel wants CAP_SYS_ADMIN for it, always.
            format!("off: {}", error.io_error)
        });
        Self { held }
    }

    /// Whether the kernel tells what BPF programs cost.
    pub fn are_on(&self) -> bool {
        self.held.is_ok()
    }

    /// CPU time of this process, and of the BPF programs where the kernel tells it, up to now.
    pub fn used(&self, kernel: &Kernel) -> Duration {
        let bpf_ns = self.held.as_ref().ok().and_then(|_| kernel.run_stats().ok()).map_or(0, |stats| stats.run_ns);
        Duration::from_nanos(bpf_ns + super::registry::cpu_time_ns(std::process::id()).unwrap_or(0))
    }

    /// What it measured, and this process's own cost.
    pub fn finish(&self, kernel: &Kernel, ring_bytes: u32, start: StartReport) -> CostReport {
        let measured = self.held.as_ref().ok().and_then(|_| kernel.run_stats().ok());
        let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_SELF).ok();
        let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
        CostReport {
            bpf_run_count: measured.map(|stats| stats.run_count),
            bpf_run_ns: measured.map(|stats| stats.run_ns),
            bpf_stats: self.held.as_ref().map_or_else(Clone::clone, |_| "on".to_owned()),
            user_cpu_s: usage.map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time())),
            // Linux counts `ru_maxrss` in KiB (getrusage(2)).
            peak_rss_bytes: usage.map_or(0, |usage| usage.max_rss().unsigned_abs() * 1024),
            map_bytes: kernel.map_bytes(),
            ring_bytes: u64::from(ring_bytes),
            start,
        }
    }
}

/// What the account is made of.
pub(super) struct Facts<'a> {
    pub plan: &'a Plan,
    pub rates: &'a Rates,
    pub event: Event,
    pub duration: Duration,
    pub counters: &'a Counters,
    pub reader: &'a ReaderStats,
    pub made: &'a Made,
    pub registry: &'a Registry,
    pub mapped: Option<&'a Mapped>,
    pub cost: CostReport,
}

/// Puts the report together. `ran = stored + idle + filtered + not_python + Σ loss`, to the unit.
pub(super) fn report(facts: &Facts<'_>) -> Report {
    let Facts { plan, counters, made, registry, .. } = facts;
    let mut loss: BTreeMap<String, u64> =
        LossCause::ALL.into_iter().map(|cause| (cause.name().to_owned(), counters.loss[cause as usize])).collect();
    let mut add = |cause: LossCause, count: u64| *loss.entry(cause.name().to_owned()).or_default() += count;
    // A record that was sent and is neither stored nor refused by the sink was no record that could be read.
    add(LossCause::BadRecord, counters.sent.saturating_sub(made.stored + made.write_errors));
    add(LossCause::WriteError, made.write_errors);
    // Programs that turned out not to be CPython before anybody could look at them.
    let uninspected = loss.entry(LossCause::Uninspected.name().to_owned()).or_default();
    let reclaimed = registry.reclaimed().min(*uninspected);
    *uninspected -= reclaimed;
    let turned_away = registry.reclaimed_filtered().min(*uninspected);
    *uninspected -= turned_away;
    let gone = loss.entry(LossCause::ProcessGone.name().to_owned()).or_default();
    let reclaimed_gone = registry.reclaimed_gone().min(*gone);
    *gone -= reclaimed_gone;

    let cpu_ns = registry.python_cpu_ns();
    let expected = cpu_ns.map(|ns| facts.rates.expected(ns).round() as u64);
    let met = made.stored + loss.values().sum::<u64>();
    // Samples that did not hold the GIL were met too, though they are not wanted.
    let met = if plan.gil { met + counters.filtered } else { met };
    Report {
        schema: SCHEMA,
        ran: counters.ran,
        stored: made.stored,
        cut: false,
        idle: counters.idle,
        filtered: counters.filtered + turned_away,
        not_python: counters.not_python + reclaimed + reclaimed_gone,
        loss,
        expected,
        not_fired: expected.map(|expected| expected.saturating_sub(met)),
        stops: stops(&made.stops),
        native: native(made, facts.mapped),
        rate_hz: plan.rate_hz,
        effective_rate_hz: facts.rates.effective_hz(cpu_ns.unwrap_or(0)),
        event: facts.event.name().to_owned(),
        duration_s: facts.duration.as_secs_f64(),
        longest_reader_stall_s: facts.reader.longest_stall.as_secs_f64(),
        reader_stall_without_cpu_s: facts.reader.stalled_without_cpu.as_secs_f64(),
        codes_not_sent: counters.code_ring_full,
        process_events_lost: counters.events_lost,
        refused: registry.refused.clone(),
        notes: notes(registry),
        processes: processes(made, registry),
        cost: facts.cost.clone(),
    }
}

/// What was noted, and what is too much to be listed.
fn notes(registry: &Registry) -> Vec<String> {
    let mut notes: Vec<String> = registry.notes.iter().cloned().collect();
    if registry.refused_more > 0 {
        notes.push(format!("{} processes more could not be profiled than are listed", registry.refused_more));
    }
    if registry.forgotten > 0 {
        let forgotten = registry.forgotten;
        notes.push(format!("{forgotten} short-lived CPython processes without a sample are not listed one by one"));
    }
    notes
}

fn stops(by_number: &HashMap<u8, u64>) -> BTreeMap<String, u64> {
    let mut stops = BTreeMap::new();
    for (&number, &count) in by_number {
        let name = StopReason::from_number(number)
            .map_or_else(|| format!("reason_{number}"), |reason| reason.name().to_owned());
        *stops.entry(name).or_default() += count;
    }
    stops
}

fn native(made: &Made, mapped: Option<&Mapped>) -> Option<NativeReport> {
    let (native, mapped) = made.native.as_ref().zip(mapped)?;
    let sum = |of: fn(&Merges) -> u64| made.processes.iter().map(|process| of(&process.merges)).sum::<u64>();
    let [exact, repaired, failed] = [sum(|it| it.exact), sum(|it| it.repaired), sum(|it| it.failed)];
    Some(NativeReport {
        exact,
        repaired,
        failed,
        missing: made.stored.saturating_sub(exact + repaired + failed),
        repairs: native.repairs.iter().map(|(&reason, &count)| (reason.to_owned(), count)).collect(),
        stops: stops(&native.stops),
        table_bytes: mapped.table_bytes,
        refused: mapped.refused.clone(),
    })
}

/// Sampled processes in order of first sample, then those that were CPython and met only before they were inspected,
/// or not at all.
fn processes(made: &Made, registry: &Registry) -> Vec<ProcessReport> {
    let mut reports: Vec<ProcessReport> = made
        .processes
        .iter()
        .zip(&made.profile.processes)
        .map(|(counts, process)| {
            let info = registry.get(counts.instance);
            ProcessReport {
                pid: process.pid,
                comm: process.comm.clone(),
                python_version: process.python_version.clone(),
                samples: counts.samples,
                named: counts.named,
                not_initialized: counts.not_initialized,
                merge_exact: counts.merges.exact,
                merge_repaired: counts.merges.repaired,
                merge_failed: counts.merges.failed,
                uninspected: info.map_or(0, |info| info.uninspected),
                cpu_s: info.and_then(super::registry::ProcessInfo::cpu_ns).map(|ns| ns as f64 / 1e9),
                script: script(&process.cmdline),
                container: process.container.clone(),
                pod: process.pod.clone(),
            }
        })
        .collect();
    let sampled: HashSet<u64> = made.processes.iter().map(|counts| counts.instance).collect();
    let mut others: Vec<_> = registry
        .python()
        // A child of a Python process that ran something else is none, whatever its first moments were.
        .filter(|(instance, info)| !sampled.contains(instance) && !info.version().is_empty())
        .map(|(_, info)| ProcessReport {
            pid: info.pid,
            comm: info.comm.clone(),
            python_version: info.version().to_owned(),
            uninspected: info.uninspected,
            cpu_s: info.cpu_ns().map(|ns| ns as f64 / 1e9),
            script: script(&info.cmdline),
            container: info.container.clone(),
            pod: info.pod.clone(),
            ..ProcessReport::default()
        })
        .collect();
    others.sort_by_key(|process| process.pid);
    reports.append(&mut others);
    reports
}
