//! `info`: what a TACH file from this program or CPython holds, for people and as JSON.

use super::args::InfoArgs;
use super::lines::{Lines, terminal_width};
use crate::input::Source;
use crate::input::budget::Budget;
use crate::profile::{self, Meta, Profile};
use crate::report::{ProcessReport, Report};
use crate::sinks::metadata::Metadata;
use crate::sinks::text::{escape_controls, write_json};
use crate::sinks::{Sink, file_thread_id};
use crate::tach::{Features, Reader, RecordCounts, Sample, Statistics};
use anyhow::Context;
use serde::Serialize;
use std::collections::HashMap;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What is known about a file. The JSON's schema; `docs/formats/tach.md` names the keys.
#[derive(Debug, Serialize)]
struct Info {
    file: String,
    /// The single files, if there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    files: Vec<OneOf>,
    file_bytes: u64,
    format: &'static str,
    version: u32,
    layout: &'static str,
    byte_order: &'static str,
    python_version: String,
    start_time_us: u64,
    sample_interval_us: u64,
    mode: Option<&'static str>,
    features: Option<Vec<&'static str>>,
    samples: u64,
    threads: u32,
    strings: u32,
    frames: u32,
    records: RecordCounts,
    thread_samples: Vec<ThreadSamples>,
    compression: &'static str,
    sample_bytes: u64,
    stored_bytes: u64,
    compression_ratio: Option<f64>,
    statistics: Option<Statistics>,
    metadata: Option<Metadata>,
    /// Why the samples cannot be read to their end; the counts cover what comes before.
    error: Option<String>,
}

/// A thread that has samples.
#[derive(Debug, Serialize)]
struct ThreadSamples {
    thread_id: u64,
    interpreter: u32,
    samples: u64,
}

/// Writes what files hold: the contents of one, or several combined into one profile. The samples are read to their
/// end, so that the answer is true.
///
/// # Errors
/// When a file is not a profile, when its samples cannot be read to their end (for a single file the output says so,
/// too), when they cost too much, or when `out` fails.
pub fn run(args: &InfoArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let found = crate::input::find(&args.files)?;
    let (info, error) = match &found.files[..] {
        [path] if args.files.len() == 1 => {
            let reading = || format!("cannot read {}", path.display());
            let mut reader = crate::input::read(path).with_context(reading)?;
            let budget = (!args.force_large).then(|| Budget::of_size(reader.header().file_size));
            let (info, error) = inspect(path, &mut reader, budget.as_ref());
            (info, error.map(|error| error.context(reading())))
        }
        files => (inspect_all(files, args.force_large)?, None),
    };
    for note in &found.notes {
        writeln!(std::io::stderr(), "{}", escape_controls(note))?;
    }
    if args.json {
        write_json(&mut *out, &info)?;
        writeln!(out)?;
    } else {
        info.print(&mut Lines::new(out, terminal_width()))?;
    }
    out.flush()?;
    error.map_or(Ok(()), Err)
}

/// Samples that are read in one step.
const RUN: usize = 64 * 1024;

fn inspect<R: Read + Seek>(
    path: &Path,
    reader: &mut Reader<R>,
    budget: Option<&Budget>,
) -> (Info, Option<anyhow::Error>) {
    let header = *reader.header();
    let statistics = reader.statistics().copied();
    let metadata = Metadata::find(reader.tables());
    let mut threads = Threads::default();
    let mut times_us = Vec::new();
    let (records, sample_bytes, error) = match reader.samples() {
        Ok(mut samples) => {
            let error = loop {
                if let Some(Err(exceeded)) = budget.map(Budget::step) {
                    break Some(exceeded.into());
                }
                times_us.clear();
                match samples.next_run(&mut times_us, RUN) {
                    Ok(Some(sample)) => threads.count(&sample, times_us.len()),
                    Ok(None) => break None,
                    Err(error) => break Some(error.into()),
                }
            };
            (samples.records(), samples.bytes_read(), error)
        }
        Err(error) => (RecordCounts::default(), 0, Some(anyhow::Error::from(error))),
    };
    let stored_bytes = header.string_table_offset.saturating_sub(crate::tach::HEADER_LEN);
    let [major, minor, micro] = header.python_version;
    let info = Info {
        file: path.display().to_string(),
        files: Vec::new(),
        file_bytes: header.file_size,
        format: "tach",
        version: crate::tach::VERSION,
        layout: header.layout.name(),
        byte_order: header.byte_order.name(),
        python_version: format!("{major}.{minor}.{micro}"),
        start_time_us: header.start_time_us,
        sample_interval_us: header.sample_interval_us,
        mode: header.mode.map(crate::tach::Mode::name),
        features: header.features.map(feature_names),
        samples: if error.is_some() { records.samples() } else { header.sample_count },
        threads: header.thread_count,
        strings: header.string_count,
        frames: header.frame_count,
        records,
        thread_samples: threads.list,
        compression: header.compression.name(),
        sample_bytes,
        stored_bytes,
        compression_ratio: ratio(sample_bytes, stored_bytes),
        statistics,
        metadata,
        error: error.as_ref().map(ToString::to_string),
    };
    (info, error)
}

/// One of several files.
#[derive(Debug, Serialize)]
struct OneOf {
    file: String,
    file_bytes: u64,
    samples: u64,
    start_unix: f64,
}

/// Several files as one profile. What they do not have in common is shown as `mixed`.
fn inspect_all(paths: &[PathBuf], force_large: bool) -> anyhow::Result<Info> {
    let mut files = Vec::new();
    let (mut stored_bytes, mut ways) = (0, Vec::new());
    for path in paths {
        let reading = || format!("cannot read {}", path.display());
        let reader = crate::input::read(path).with_context(reading)?;
        let header = reader.header();
        stored_bytes += header.string_table_offset.saturating_sub(crate::tach::HEADER_LEN);
        ways.push([header.layout.name(), header.byte_order.name(), header.compression.name()]);
        files.push(OneOf {
            file: path.display().to_string(),
            file_bytes: header.file_size,
            samples: header.sample_count,
            start_unix: Metadata::find(reader.tables()).map_or(0.0, |metadata| metadata.start_unix),
        });
    }
    let way = |place: usize| {
        let first = ways.first().map_or("mixed", |way: &[&'static str; 3]| way[place]);
        if ways.iter().all(|way| way[place] == first) { first } else { "mixed" }
    };
    let mut source = Source::open(paths).context("cannot read these files as one profile")?;
    if force_large {
        source = source.without_limits();
    }
    let options = source.tach_options();
    let origin = options.origin.unwrap_or_default();
    let mut all = All::default();
    let fed = source.feed(&mut all).context("cannot read these files as one profile")?;
    let (meta, metadata) = all.told.unwrap_or_default();
    let (major, minor, micro) = meta.python_version;
    Ok(Info {
        file: format!("{} files", files.len()),
        file_bytes: files.iter().map(|file| file.file_bytes).sum(),
        files,
        format: "tach",
        version: crate::tach::VERSION,
        layout: way(0),
        byte_order: way(1),
        python_version: format!("{major}.{minor}.{micro}"),
        start_time_us: meta.start_us,
        sample_interval_us: meta.interval_us,
        mode: origin.mode.map(crate::tach::Mode::name),
        features: origin.features.map(feature_names),
        samples: fed.samples,
        threads: u32::try_from(fed.threads).unwrap_or(u32::MAX),
        strings: all.strings,
        frames: all.frames,
        records: fed.records,
        thread_samples: all.threads,
        compression: way(2),
        sample_bytes: fed.sample_bytes,
        stored_bytes,
        compression_ratio: ratio(fed.sample_bytes, stored_bytes),
        statistics: origin.statistics,
        metadata: Some(metadata),
        error: None,
    })
}

/// Counts the samples of each thread.
#[derive(Default)]
struct All {
    counts: Vec<u64>,
    threads: Vec<ThreadSamples>,
    strings: u32,
    frames: u32,
    told: Option<(Meta, Metadata)>,
}

impl Sink for All {
    fn sample(&mut self, profile: &Profile, sample: &profile::Sample<'_>) -> std::io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, _: &Profile, sample: &profile::Sample<'_>, times_us: &[u64]) -> std::io::Result<()> {
        let place = sample.thread.0 as usize;
        if place >= self.counts.len() {
            self.counts.resize(place + 1, 0);
        }
        self.counts[place] += times_us.len() as u64;
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> std::io::Result<()> {
        self.threads = (0..)
            .map(profile::ThreadId)
            .zip(&self.counts)
            .map(|(id, &samples)| ThreadSamples {
                thread_id: file_thread_id(profile, id),
                interpreter: profile.thread(id).interpreter,
                samples,
            })
            .collect();
        let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        (self.strings, self.frames) = (count(profile.strings.len()), count(profile.frames.len()));
        self.told = Some((profile.meta.clone(), Metadata::new(profile, report)));
        Ok(())
    }
}

/// Threads in order of their first samples.
#[derive(Default)]
struct Threads {
    list: Vec<ThreadSamples>,
    places: HashMap<(u64, u32), usize>,
}

impl Threads {
    fn count(&mut self, sample: &Sample<'_>, count: usize) {
        let (thread_id, interpreter) = (sample.thread_id, sample.interpreter_id);
        let place = *self.places.entry((thread_id, interpreter)).or_insert_with(|| {
            self.list.push(ThreadSamples { thread_id, interpreter, samples: 0 });
            self.list.len() - 1
        });
        self.list[place].samples += count as u64;
    }
}

fn feature_names(features: Features) -> Vec<&'static str> {
    let Features { all_threads, native, gc, opcodes, blocking } = features;
    let names =
        [(all_threads, "all_threads"), (native, "native"), (gc, "gc"), (opcodes, "opcodes"), (blocking, "blocking")];
    names.into_iter().filter_map(|(on, name)| on.then_some(name)).collect()
}

impl Info {
    fn print(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let file = escape_controls(&self.file);
        writeln!(
            out,
            "{file}: TACH version {}, {} layout, {}, {} bytes",
            self.version, self.layout, self.byte_order, self.file_bytes
        )?;
        for OneOf { file, file_bytes, samples, .. } in &self.files {
            writeln!(out, "    {}: {file_bytes} bytes, {samples} samples", escape_controls(file))?;
        }
        if let Some(error) = &self.error {
            writeln!(out, "  DAMAGED      {}", error.replace('\n', "; "))?;
        }
        self.print_recording(out)?;
        let mode = self.mode.unwrap_or("not recorded");
        let features = self.features.as_ref().map_or_else(|| "not recorded".to_owned(), |names| names.join(", "));
        writeln!(out, "  mode         {mode}; features: {features}")?;
        writeln!(out, "  samples      {} of {} threads", self.samples, self.threads)?;
        let RecordCounts { repeat, repeat_samples, full, suffix, pop_push } = self.records;
        writeln!(
            out,
            "  records      {full} full, {suffix} suffix, {pop_push} pop-push, {repeat} repeat ({repeat_samples} samples)"
        )?;
        writeln!(out, "  tables       {} strings, {} frames", self.strings, self.frames)?;
        write!(out, "  compression  {}", self.compression)?;
        match self.compression_ratio {
            Some(ratio) if self.compression != "none" => {
                writeln!(out, ": {} of {} bytes, {ratio:.1} to 1", self.stored_bytes, self.sample_bytes)?;
            }
            _ => writeln!(out, ": {} bytes", self.stored_bytes)?,
        }
        match &self.metadata {
            Some(metadata) => print_metadata(metadata, &self.thread_samples, out),
            None => self.print_threads(out),
        }
    }

    /// All that another program's file says about its threads.
    fn print_threads(&self, out: &mut dyn Write) -> std::io::Result<()> {
        writeln!(out, "  threads      {}", self.thread_samples.len())?;
        for ThreadSamples { thread_id, interpreter, samples } in &self.thread_samples {
            writeln!(out, "    {thread_id}  interpreter {interpreter}, {samples} samples")?;
        }
        Ok(())
    }

    fn print_recording(&self, out: &mut dyn Write) -> std::io::Result<()> {
        match &self.metadata {
            Some(metadata) => {
                let start = time(metadata.start_unix);
                let (tool, host) = (escape_controls(&metadata.tool), escape_controls(&metadata.host));
                writeln!(out, "  recorded     {start} on {host} by {tool}; CPython {}", self.python_version)?;
                if metadata.parts > 1 {
                    writeln!(out, "  part         {} of {}", metadata.part, metadata.parts)?;
                }
            }
            None => writeln!(out, "  recorded     by CPython {}", self.python_version)?,
        }
        let start_us = self.start_time_us;
        writeln!(out, "  interval     {} us, from {start_us} us on the monotonic clock", self.sample_interval_us)?;
        if let Some(statistics) = &self.statistics {
            write!(out, "  duration     {:.3} s at {:.1} Hz", statistics.duration_sec, statistics.sample_rate)?;
            if let Some(errors) = statistics.error_rate {
                write!(out, ", {errors:.2} % errors")?;
            }
            if let Some(missed) = statistics.missed_samples {
                write!(out, ", {missed:.2} % missed")?;
            }
            writeln!(out)?;
        }
        Ok(())
    }
}

fn print_metadata(metadata: &Metadata, counts: &[ThreadSamples], out: &mut dyn Write) -> std::io::Result<()> {
    print_loss(&metadata.report, out)?;
    print_processes(metadata, counts, out)
}

fn print_loss(report: &Report, out: &mut dyn Write) -> std::io::Result<()> {
    if report.cut {
        return writeln!(out, "  loss         unknown: the recording was cut; so is what came after its last sample");
    }
    let lost: u64 = report.loss.values().fold(0, |sum, &count| sum.saturating_add(count));
    write!(out, "  loss         {lost} of {} runs", report.ran)?;
    if let Some(share) = ratio(lost, report.ran) {
        write!(out, " ({:.2} %)", share * 100.0)?;
    }
    let causes = report.loss.iter().filter(|&(_, &count)| count > 0);
    for (index, (cause, count)) in causes.enumerate() {
        write!(out, "{} {} {count}", if index == 0 { ":" } else { "," }, escape_controls(cause))?;
    }
    writeln!(out)?;
    for (reason, count) in report.cut_stacks() {
        writeln!(out, "  stacks cut   {count}: {}", escape_controls(reason))?;
    }
    if let Some((missed, expected)) = report.missed() {
        writeln!(out, "  missed       about {missed} of {expected} expected")?;
    }
    Ok(())
}

fn print_processes(metadata: &Metadata, counts: &[ThreadSamples], out: &mut dyn Write) -> std::io::Result<()> {
    let report = &metadata.report;
    writeln!(out, "  processes    {}", metadata.processes.len())?;
    // In this program's files they are in the same order; this avoids a search among many processes.
    let mut by_pid: HashMap<u32, &ProcessReport> = HashMap::new();
    for known in report.processes.iter().rev() {
        by_pid.insert(known.pid, known);
    }
    for (place, process) in metadata.processes.iter().enumerate() {
        let here = report.processes.get(place).filter(|known| known.pid == process.pid);
        let known = here.or_else(|| by_pid.get(&process.pid).copied());
        let samples =
            known.map_or_else(String::new, |known| format!(", {} samples, {} named", known.samples, known.named));
        let version = if process.python_version.is_empty() { "unknown" } else { &process.python_version };
        let command = if process.cmdline.is_empty() { process.comm.clone() } else { process.cmdline.join(" ") };
        let (version, command) = (escape_controls(version), escape_controls(&command));
        writeln!(out, "    {}  CPython {version}{samples}  {command}", process.pid)?;
        for (what, text) in [("script", &process.script), ("container", &process.container), ("pod", &process.pod)] {
            if !text.is_empty() {
                writeln!(out, "      {what} {}", escape_controls(text))?;
            }
        }
    }
    writeln!(out, "  threads      {}", metadata.threads.len())?;
    let counts: HashMap<_, _> = counts.iter().map(|of| ((of.thread_id, of.interpreter), of.samples)).collect();
    for thread in &metadata.threads {
        let samples = counts.get(&(thread.thread_id, thread.interpreter)).unwrap_or(&0);
        let pid = metadata.processes.get(thread.process as usize).map_or(0, |process| process.pid);
        let name = escape_controls(&thread.name);
        writeln!(
            out,
            "    {}  process {pid}, tid {}, interpreter {}, {samples} samples  {name}",
            thread.thread_id, thread.tid, thread.interpreter
        )?;
    }
    Ok(())
}

/// A moment for people; what is beyond the calendar stays a number.
fn time(unix: f64) -> String {
    let moment = Duration::try_from_secs_f64(unix).ok().and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
    // humantime's calendar ends with the year 9999.
    const LAST: f64 = 253_402_300_799.0;
    match moment {
        Some(moment) if unix < LAST => humantime::format_rfc3339_seconds(moment).to_string(),
        _ => format!("{unix} s since 1970"),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts below 2^53 are exact, and this is a share for people")]
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
