//! Tables back to one TACH file, for `tachyon-bpf report`, `diff` and `export`.
//!
//! Totals, stacks, processes and losses are those of the tables. What tables lack is filled in simply: each process has one
//! thread, and the samples of a slice are evenly spaced.

use crate::hash::StackId;
use crate::load::Tables;
use crate::rows::{FrameRow, Labels, LossRow, SampleRow};
use anyhow::{Context as _, ensure};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::{Seek, Write};
use std::sync::Arc;
use tachyon::profile::{Frame, FrameId, Merge, Meta, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::{ProcessReport, Report, WallReport};
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Sink as _, TachSink};

/// Status of a sample whose thread was on a CPU, and of one that waited. Who held the GIL is no longer known (4).
const STATUS: [u8; 2] = [2 | 4, 4];
/// Length of a slice if tables have only one.
const SLICE_US: u64 = 60_000_000;
/// No TACH file has more samples than this.
const MOST_SAMPLES: u64 = 1 << 32;

/// One process of the tables.
type Key = (Arc<str>, Arc<str>, Arc<Labels>);

/// Writes tables as a TACH file; returns how many samples it has.
///
/// # Errors
/// When a row's stack or frame is missing, there are more samples than a file can hold, or it cannot be written.
pub fn write(tables: &Tables, out: impl Write + Seek) -> anyhow::Result<u64> {
    let total: u64 = tables.samples.iter().map(|row| row.samples.unsigned_abs()).fold(0, u64::saturating_add);
    ensure!(tables.samples.iter().all(|row| row.samples > 0), "a row of samples has none");
    ensure!(total <= MOST_SAMPLES, "there are {total} samples, and a TACH file takes {MOST_SAMPLES}");
    let mut profile = Profile { meta: meta(&tables.samples, total), ..Profile::default() };
    let frames = tables.frames.iter().map(|(&id, row)| (id, frame(&mut profile, row))).collect();
    let processes = processes(&mut profile, &tables.samples);
    let mut sink = TachSink::new(out, &profile.meta, TachOptions::default())?;
    let mut rows: Vec<(u32, &SampleRow)> = tables.samples.iter().map(|row| (processes[&key(row)], row)).collect();
    rows.sort_by(|(a, x), (b, y)| (a, x.slice_start_ms, x.stack_id).cmp(&(b, y.slice_start_ms, y.stack_id)));
    let slice_us = slice_us(&tables.samples);
    for slice in rows.chunk_by(|(a, x), (b, y)| (a, x.slice_start_ms) == (b, y.slice_start_ms)) {
        write_slice(&mut sink, &profile, slice, slice_us, &Stacks { tables, frames: &frames })?;
    }
    let report = report(&profile, tables, &processes, slice_us);
    sink.finish(&profile, &report)?;
    Ok(total)
}

/// Stacks of the tables with frames of the profile.
struct Stacks<'a> {
    tables: &'a Tables,
    frames: &'a HashMap<i64, FrameId>,
}

impl Stacks<'_> {
    fn get(&self, id: StackId) -> anyhow::Result<Vec<FrameId>> {
        let name = || format!("{:032x}", u128::from_be_bytes(id));
        let stack = self.tables.stacks.get(&id).with_context(|| format!("the stack {} is in no table", name()))?;
        let frame = |frame| {
            let missing = || format!("the frame {frame} of the stack {} is in no table", name());
            self.frames.get(frame).copied().with_context(missing)
        };
        stack.iter().map(frame).collect()
    }
}

fn write_slice<W: Write + Seek>(
    sink: &mut TachSink<W>,
    profile: &Profile,
    rows: &[(u32, &SampleRow)],
    slice_us: u64,
    stacks: &Stacks<'_>,
) -> anyhow::Result<()> {
    let count: u64 = rows.iter().map(|(_, row)| row.samples.unsigned_abs()).sum();
    let mut number: u64 = 0;
    for &(process, row) in rows {
        let frames = stacks.get(row.stack_id)?;
        let begin_us = row.slice_start_ms.unsigned_abs() * 1000;
        for (status, samples) in STATUS.into_iter().zip(split(row)) {
            let time = |number: u64| {
                begin_us + u64::try_from(u128::from(number) * u128::from(slice_us) / u128::from(count)).unwrap_or(0)
            };
            let times_us: Vec<u64> = (number..number + samples).map(time).collect();
            number += samples;
            if let Some(&time_us) = times_us.first() {
                let sample = Sample {
                    thread: ThreadId(process),
                    time_us,
                    status,
                    frames: &frames,
                    merge: Merge::None,
                    work: None,
                };
                sink.repeated(profile, &sample, &times_us)?;
            }
        }
    }
    Ok(())
}

/// Samples on a CPU and waiting ones: all stand for the same time.
fn split(row: &SampleRow) -> [u64; 2] {
    let (on_cpu, waiting) =
        (u128::from(row.on_cpu_ns.max(0).unsigned_abs()), u128::from(row.waiting_ns.max(0).unsigned_abs()));
    let (all, samples) = (on_cpu + waiting, row.samples.unsigned_abs());
    let waits = (waiting * u128::from(samples) + all / 2).checked_div(all).unwrap_or(0);
    let waits = u64::try_from(waits).unwrap_or(samples).min(samples);
    [samples - waits, waits]
}

fn meta(rows: &[SampleRow], total: u64) -> Meta {
    let hosts: BTreeSet<&str> = rows.iter().map(|row| &*row.host).collect();
    let start_ms = rows.iter().map(|row| row.slice_start_ms).min().unwrap_or(0).max(0).unsigned_abs();
    let ns: u128 = rows
        .iter()
        .map(|row| u128::from((row.on_cpu_ns.max(0)).unsigned_abs()) + u128::from(row.waiting_ns.max(0).unsigned_abs()))
        .sum();
    // Samples of chosen events stand for no time.
    let of_events =
        rows.iter().filter(|row| row.on_cpu_ns == 0 && row.waiting_ns == 0).map(|row| row.samples.unsigned_abs());
    let timed = total.saturating_sub(of_events.sum());
    let interval_us = u64::try_from(ns / u128::from(timed.max(1)) / 1000).unwrap_or(u64::MAX).max(1);
    Meta {
        start_us: start_ms * 1000,
        start_unix: start_ms as f64 / 1e3,
        interval_us,
        waits: rows.iter().any(|row| row.waiting_ns > 0),
        hostname: hosts.into_iter().collect::<Vec<_>>().join(", "),
        python_version: rows.iter().filter_map(|row| version(row.labels.python.as_deref()?)).max().unwrap_or_default(),
        ..Meta::default()
    }
}

fn version(text: &str) -> Option<(u8, u8, u8)> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next()??))
}

/// A frame in TACH's form: anything but Python is a single name.
fn frame(profile: &mut Profile, row: &FrameRow) -> FrameId {
    let name = match &*row.kind {
        "native" if !row.file.is_empty() => format!("{}!{}", row.file, row.function),
        "kernel" => format!("[k] {}", row.function),
        "python" => {
            let (file, function) = (profile.strings.intern(&row.file), profile.strings.intern(&row.function));
            let lineno = row.line.unwrap_or(-1);
            let frame = Frame { lineno, end_lineno: lineno, ..Frame::without_location(file, function) };
            return profile.frames.intern(frame);
        }
        _ => row.function.to_string(),
    };
    profile.meta.native |= row.kind.as_ref() == "native";
    if let Some(build_id) = &row.build_id {
        profile.native.tell_object(row.file.to_string(), build_id.to_string());
    }
    profile.special_frame(&name)
}

fn key(row: &SampleRow) -> Key {
    (Arc::clone(&row.host), Arc::clone(&row.service), Arc::clone(&row.labels))
}

/// One process for each host, service and set of labels, with one thread.
fn processes(profile: &mut Profile, rows: &[SampleRow]) -> BTreeMap<Key, u32> {
    let keys: BTreeSet<Key> = rows.iter().map(key).collect();
    profile.meta.many_processes = keys.len() > 1;
    let mut numbers = BTreeMap::new();
    for (number, key) in (0..).zip(keys) {
        let (_, service, labels) = &key;
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        profile.processes.push(Process {
            pid: labels.pid.unwrap_or(0).unsigned_abs(),
            comm: labels.comm.clone().unwrap_or_else(|| service.to_string()),
            cmdline: labels.script.as_deref().map(command_line).unwrap_or_default(),
            python_version: text(&labels.python),
            container: text(&labels.container),
            pod: text(&labels.pod),
            ..Process::default()
        });
        let tid = number + 1;
        profile.threads.push(Thread { process: number, tid, unique_tid: tid.into(), ns_tid: tid, ..Thread::default() });
        numbers.insert(key, number);
    }
    numbers
}

/// A command line with this script: `app.py`, `-m module`, `-c`.
fn command_line(script: &str) -> Vec<String> {
    let words = match script.strip_prefix("-m ") {
        Some(module) => vec!["python", "-m", module],
        None => vec!["python", script],
    };
    words.into_iter().map(str::to_owned).collect()
}

/// The shortest time between two slices.
fn slice_us(rows: &[SampleRow]) -> u64 {
    let starts: BTreeSet<i64> = rows.iter().map(|row| row.slice_start_ms).collect();
    let starts: Vec<i64> = starts.into_iter().collect();
    let shortest = starts.windows(2).map(|pair| pair[0].abs_diff(pair[1]) * 1000).min();
    shortest.unwrap_or(SLICE_US)
}

fn report(profile: &Profile, tables: &Tables, processes: &BTreeMap<Key, u32>, slice_us: u64) -> Report {
    let mut counts = vec![[0, 0]; processes.len()];
    for row in &tables.samples {
        let [on_cpu, waiting] = split(row);
        let count = &mut counts[processes[&key(row)] as usize];
        (count[0], count[1]) = (count[0] + on_cpu, count[1] + waiting);
    }
    let [stored, waiting] = counts.iter().fold([0, 0], |[a, b], [c, d]| [a + c, b + d]);
    let (ticks_lost, loss) = losses(&tables.loss);
    let last_ms = tables.samples.iter().map(|row| row.slice_start_ms).max().unwrap_or(0);
    let seconds = last_ms as f64 / 1e3 - profile.meta.start_unix;
    let wall = profile.meta.waits.then(|| WallReport {
        ticks_due: waiting + ticks_lost.values().sum::<u64>(),
        stored: waiting,
        loss: ticks_lost,
        ..WallReport::default()
    });
    let rate_hz = 1e6 / profile.meta.interval_us as f64;
    Report {
        schema: 1,
        ran: stored + loss.values().sum::<u64>(),
        stored,
        loss,
        wall,
        rate_hz,
        effective_rate_hz: rate_hz,
        duration_s: seconds + slice_us as f64 / 1e6,
        processes: process_reports(profile, processes, &counts),
        ..Report::default()
    }
}

fn process_reports(profile: &Profile, processes: &BTreeMap<Key, u32>, counts: &[[u64; 2]]) -> Vec<ProcessReport> {
    let mut reports = vec![ProcessReport::default(); processes.len()];
    for ((host, service, labels), &number) in processes {
        let process = &profile.processes[number as usize];
        let [on_cpu, waiting] = counts[number as usize];
        reports[number as usize] = ProcessReport {
            pid: process.pid,
            comm: process.comm.clone(),
            python_version: process.python_version.clone(),
            samples: on_cpu + waiting,
            container: process.container.clone(),
            pod: process.pod.clone(),
            service: process.service.clone(),
            script: labels.script.clone().unwrap_or_default(),
            labels: labels.by_name(host, service),
            ..ProcessReport::default()
        };
    }
    reports
}

/// Ticks of waiting threads by cause, and runs of the timer by cause.
fn losses(rows: &[LossRow]) -> (BTreeMap<String, u64>, BTreeMap<String, u64>) {
    let (mut waiting, mut running) = (BTreeMap::new(), BTreeMap::new());
    for row in rows {
        let (causes, cause) = match row.cause.strip_prefix("waiting.") {
            Some(cause) => (&mut waiting, cause),
            None => (&mut running, row.cause.as_str()),
        };
        *causes.entry(cause.to_owned()).or_default() += row.runs.max(0).unsigned_abs();
    }
    (waiting, running)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_tells_how_many_samples_waited() {
        let row = |on_cpu_ns, waiting_ns, samples| SampleRow {
            service: "s".into(),
            slice_start_ms: 0,
            stack_id: StackId::default(),
            labels: Arc::default(),
            host: "h".into(),
            on_cpu_ns,
            waiting_ns,
            samples,
        };
        for (on_cpu, waiting, samples, expected) in
            [(30, 0, 3, [3, 0]), (0, 30, 3, [0, 3]), (10, 20, 3, [1, 2]), (0, 0, 3, [3, 0]), (-5, 5, 2, [0, 2])]
        {
            assert_eq!(split(&row(on_cpu, waiting, samples)), expected);
        }
        let large = i64::MAX;
        assert_eq!(split(&row(large, large, large)).iter().sum::<u64>(), large.unsigned_abs());
    }

    #[test]
    fn scripts_have_command_lines() {
        for script in ["app.py", "-m gunicorn", "-c", "-"] {
            assert_eq!(tachyon::profile::script(&command_line(script)), script);
        }
    }
}
