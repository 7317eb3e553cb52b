//! The account of a recording, put together from what each part of the recorder counted.

use super::made::{Made, Merges, known_of};
use super::native::Mapped;
use super::registry::{ProcessInfo, SegmentCounts};
use super::request::Request;
use super::times::{self, Passed, ThreadLife};
use super::waits;
use crate::kernel::{ChosenEvent, Event, WaitMethod, WaitTotals};
use crate::merge::ProgramKey;
use crate::profile::{Process, ThreadId, script};
use crate::report::{CostReport, EventReport, NativeReport, ProcessReport, Report, ThreadReport};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;
use tachyon_common::event::Counters;
use tachyon_common::stop::{LossCause, StopReason};

/// Version of the report's schema.
pub(super) const SCHEMA: u32 = 1;

/// What the account of a segment is made of.
pub(super) struct Facts<'a> {
    pub request: &'a Request,
    /// Samples to expect for the segment's CPU time; `None` if no CPU time could be measured.
    pub expected: Option<f64>,
    pub cpu_ns: u64,
    pub event: Event,
    pub duration: Duration,
    pub counters: &'a Counters,
    /// Lifecycle records that found their ring full.
    pub events_lost: u64,
    /// Whether a run was under way when the counters were read.
    pub unsettled: bool,
    /// Runs since the object was loaded, as counted by the timer's program and by the kernel. Read at the end, when no run
    /// is under way, and only where the kernel counts.
    pub runs_by_kernel: Option<(u64, u64)>,
    pub reader: &'a Read,
    /// Where waits were sampled.
    pub waits: Option<(WaitMethod, WaitTotals)>,
    pub made: &'a Made,
    pub counts: &'a SegmentCounts,
    /// What each process's threads did with their time, where waits are sampled.
    pub times: &'a HashMap<ProgramKey, Passed>,
    pub mapped: Option<&'a Mapped>,
    pub cost: CostReport,
}

/// What the reader did in a segment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Read {
    /// Sample records of the segment's bank.
    pub samples: u64,
    /// Records of code objects, likewise.
    pub codes: u64,
    /// Records that are neither samples nor code objects.
    pub bad_records: u64,
    pub longest_stall: Duration,
    pub stalled_without_cpu: Duration,
}

/// By how much two counts of the same thing differ, summed over everything that is counted twice: the kernel side's runs and
/// their ends, records sent, read, received and dealt with; at the end also the runs that the kernel counted. Anything but 0
/// is a bug in the recorder.
fn inconsistent(facts: &Facts<'_>) -> u64 {
    let Facts { counters, reader, made, .. } = facts;
    let dealt_with = made.stored + made.write_errors + made.bad_samples;
    counters.ran.abs_diff(counters.ended())
        + counters.sent.abs_diff(reader.samples)
        + counters.codes_sent.abs_diff(reader.codes)
        + facts.runs_by_kernel.map_or(0, |(ours, kernels)| ours.abs_diff(kernels))
        + reader.samples.abs_diff(made.received)
        + made.received.abs_diff(dealt_with)
        + reader.bad_records
        + u64::from(facts.unsettled)
}

/// Puts the report together. `ran = stored + idle + filtered + not_python + Σ loss` holds exactly. Also returns what is
/// known of its last processes: those without a sample, which are not in the profile.
pub(super) fn report(facts: &Facts<'_>) -> (Report, Vec<Process>) {
    let Facts { request, counters, made, counts, .. } = facts;
    let mut loss: BTreeMap<String, u64> =
        LossCause::ALL.into_iter().map(|cause| (cause.name().to_owned(), counters.loss[cause as usize])).collect();
    let mut add = |cause: LossCause, count: u64| *loss.entry(cause.name().to_owned()).or_default() += count;
    // What was sent and never arrived is as lost as what arrived and could not be read; `inconsistent` shows that it happened.
    let never_came = counters.sent.saturating_sub(made.stored + made.write_errors + made.bad_samples);
    add(LossCause::BadRecord, made.bad_samples + never_came);
    add(LossCause::WriteError, made.write_errors);
    add(LossCause::Internal, counters.ran.saturating_sub(counters.ended()));
    // Programs that turned out not to be CPython, or were over, before anybody could look at them.
    let reclaimed = { counts.reclaimed }.reclassify(&mut loss);

    let expected = facts.expected.map(|expected| expected.round() as u64);
    let met = made.stored + loss.values().sum::<u64>();
    // Samples without the GIL count as met, too, although they are not wanted.
    let met = if request.gil { met + counters.filtered } else { met };
    let cpu_s = facts.cpu_ns as f64 / 1e9;
    let (processes, unsampled) = processes(made, counts, facts.times, request);
    let (wall, of_waits) = facts
        .waits
        .as_ref()
        .map(|(method, totals)| {
            waits::account((*method, totals), &made.waited, request.awaiting && made.sink.is_some(), &made.profile)
        })
        .unzip();
    let report = Report {
        schema: SCHEMA,
        ran: counters.ran,
        stored: made.stored,
        cut: false,
        idle: counters.idle,
        filtered: counters.filtered + reclaimed.filtered,
        not_python: counters.not_python + reclaimed.not_python + reclaimed.not_python_gone,
        loss,
        wall,
        inconsistent: inconsistent(facts) + of_waits.unwrap_or(0),
        expected,
        not_fired: expected.map(|expected| expected.saturating_sub(met)),
        stops: stops(&made.stops),
        native: native(made, facts.mapped),
        rate_hz: request.rate_hz,
        effective_rate_hz: facts
            .expected
            .filter(|_| cpu_s > 0.0)
            .map_or(request.rate_hz, |expected| effective_rate(request.rate_hz, expected, cpu_s)),
        event: event_names(facts),
        events: events(request, made),
        jitter: facts.event.jitter(),
        duration_s: facts.duration.as_secs_f64(),
        longest_reader_stall_s: facts.reader.longest_stall.as_secs_f64(),
        reader_stall_without_cpu_s: facts.reader.stalled_without_cpu.as_secs_f64(),
        codes_sent: counters.codes_sent,
        codes_not_sent: counters.code_ring_full,
        codes_put_off: counters.codes_put_off,
        process_events_lost: facts.events_lost,
        refused: counts.refused.clone(),
        notes: notes(counts),
        processes,
        cost: facts.cost.clone(),
        ..Report::default()
    };
    (report, unsampled)
}

fn event_names(facts: &Facts<'_>) -> String {
    let chosen = &facts.request.events;
    if chosen.is_empty() {
        return facts.event.name().to_owned();
    }
    chosen.iter().map(ChosenEvent::name).collect::<Vec<_>>().join(", ")
}

/// Samples of each chosen event.
fn events(request: &Request, made: &Made) -> Vec<EventReport> {
    let counted = request.events.iter().zip(made.by_event);
    let report = |(event, stored): (&ChosenEvent, u64)| EventReport {
        name: event.name().to_owned(),
        period: (!event.is_clock()).then(|| u64::from(event.period())),
        stored,
    };
    counted.map(report).collect()
}

/// The notes, and how much was left out because there was too much to list.
fn notes(counts: &SegmentCounts) -> Vec<String> {
    let mut notes: Vec<String> = counts.notes.iter().cloned().collect();
    if counts.refused_more > 0 {
        notes.push(format!("{} more processes could not be profiled and are not listed", counts.refused_more));
    }
    if counts.forgotten > 0 {
        let forgotten = counts.forgotten;
        notes.push(format!("{forgotten} short-lived CPython processes without a sample are not listed one by one"));
    }
    notes
}

fn stops<S>(by_number: &HashMap<u8, u64, S>) -> BTreeMap<String, u64> {
    let mut stops = BTreeMap::new();
    for (&number, &count) in by_number {
        let name = StopReason::from_number(number)
            .map_or_else(|| format!("reason_{number}"), |reason| reason.name().to_owned());
        *stops.entry(name).or_default() += count;
    }
    stops
}

fn native(made: &Made, mapped: Option<&Mapped>) -> Option<NativeReport> {
    let mapped = mapped?;
    let sum = |of: fn(&Merges) -> u64| made.processes.iter().map(|process| of(&process.merges)).sum::<u64>();
    let [exact, repaired, failed] = [sum(|it| it.exact), sum(|it| it.repaired), sum(|it| it.failed)];
    Some(NativeReport {
        exact,
        repaired,
        failed,
        missing: made.stored.saturating_sub(exact + repaired + failed),
        repairs: made.native.repairs.iter().map(|(&reason, &count)| (reason.to_owned(), count)).collect(),
        stops: stops(&made.native.stops),
        copied: made.native.copied,
        table_bytes: mapped.table_bytes,
        table_bytes_wanted: mapped.table_bytes_wanted,
        refused: mapped.refused.clone(),
    })
}

/// Sampled processes in order of first sample, then CPython processes that were met only before they were inspected, or
/// not at all; and what is known of the latter.
fn processes(
    made: &Made,
    segment: &SegmentCounts,
    times: &HashMap<ProgramKey, Passed>,
    request: &Request,
) -> (Vec<ProcessReport>, Vec<Process>) {
    let (ticks, nothing) = (made.waited.by_process(&made.profile), BTreeMap::new());
    let time = |program: ProgramKey, info: Option<&ProcessInfo>, number: u32| {
        let ticks = ticks.get(&number).unwrap_or(&nothing);
        Some(times::told(times.get(&program)?.lives, info?.cpu_ns()?, ticks))
    };
    let mut threads_of: HashMap<u32, Vec<ThreadId>> = HashMap::new();
    if request.thread_times {
        for (thread, id) in made.profile.threads.iter().zip(0..) {
            threads_of.entry(thread.process).or_default().push(ThreadId(id));
        }
    }
    let threads = |program: ProgramKey, number: u32| match times.get(&program).filter(|_| request.thread_times) {
        Some(passed) => threads(made, passed, threads_of.get(&number).map_or(&[], Vec::as_slice)),
        None => Vec::new(),
    };
    let mut reports: Vec<ProcessReport> = made
        .processes
        .iter()
        .zip(&made.profile.processes)
        .zip(0..)
        .map(|((counts, process), number)| {
            let info = segment.get(counts.program);
            ProcessReport {
                instance: (counts.program.instance, counts.program.image),
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
                cpu_s: info.and_then(ProcessInfo::cpu_ns).map(|ns| ns as f64 / 1e9),
                time: time(counts.program, info, number),
                threads: threads(counts.program, number),
                script: script(&process.cmdline),
                container: process.container.clone(),
                pod: process.pod.clone(),
                service: process.service.clone(),
                environment: process.environment.clone(),
                labels: BTreeMap::new(),
            }
        })
        .collect();
    let sampled: HashSet<ProgramKey> = made.processes.iter().map(|counts| counts.program).collect();
    let mut others: Vec<_> = segment
        .processes
        .iter()
        // A Python process's child that went on to run something else does not count as one, even if it began as a copy
        // of its parent.
        .filter(|(key, info)| !sampled.contains(*key) && !info.version().is_empty())
        .filter(|(_, info)| info.uninspected > 0 || !info.execs_later())
        .map(|(&key, info)| {
            let known = known_of(info, request.told());
            let report = ProcessReport {
                instance: (key.instance, key.image),
                pid: known.pid,
                comm: known.comm.clone(),
                python_version: known.python_version.clone(),
                uninspected: info.uninspected,
                cpu_s: info.cpu_ns().map(|ns| ns as f64 / 1e9),
                time: time(key, Some(info), u32::MAX),
                threads: threads(key, u32::MAX),
                script: script(&known.cmdline),
                container: known.container.clone(),
                pod: known.pod.clone(),
                service: known.service.clone(),
                environment: known.environment.clone(),
                ..ProcessReport::default()
            };
            (report, known)
        })
        .collect();
    others.sort_by_key(|(process, _)| process.pid);
    let (mut others, unsampled) = others.into_iter().unzip();
    reports.append(&mut others);
    (reports, unsampled)
}

/// Most threads of one process that the account lists.
const MOST_THREADS: usize = 1000;

/// What each thread of a process did with its time, the longest-lived first. `sampled`: its threads in the profile.
fn threads(made: &Made, passed: &Passed, sampled: &[ThreadId]) -> Vec<ThreadReport> {
    let mut by_tid: HashMap<u32, (&str, Vec<ThreadId>)> = HashMap::new();
    for &id in sampled {
        let thread = made.profile.thread(id);
        by_tid.entry(thread.tid).or_insert_with(|| (&thread.name, Vec::new())).1.push(id);
    }
    let mut threads = passed.threads.clone();
    threads.sort_by_key(|(tid, life)| (std::cmp::Reverse(life.lives.lives_ns), *tid));
    threads.truncate(MOST_THREADS);
    let report = |(tid, life): &(u32, ThreadLife)| {
        let (name, ids) = by_tid.get(tid).map_or(("", &[][..]), |(name, ids)| (*name, ids));
        let ticks = made.waited.of(ids);
        ThreadReport { tid: *tid, name: name.to_owned(), time: times::told(life.lives, life.ran_ns, &ticks) }
    };
    threads.iter().map(report).collect()
}

/// Samples to expect in a second of CPU time. If the rate was never changed, this is exactly the rate asked for, free of rounding
/// errors.
fn effective_rate(asked: f64, expected: f64, cpu_s: f64) -> f64 {
    let rate = expected / cpu_s;
    if (rate - asked).abs() <= asked * 1e-9 { asked } else { rate }
}
