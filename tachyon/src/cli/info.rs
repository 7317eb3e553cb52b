//! `info`: what a TACH file holds, ours or CPython's, for people and as JSON.

use crate::report::Report;
use crate::sinks::metadata::Metadata;
use crate::sinks::text::{escape_controls, write_json};
use crate::tach::{Features, ReadError, Reader, RecordCounts, Sample, Statistics};
use anyhow::Context;
use serde::Serialize;
use std::collections::HashMap;
use std::io::{BufReader, Read, Seek, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// What is known of a file. The JSON's schema; `docs/formats/tach.md` names the keys.
#[derive(Debug, Serialize)]
struct Info {
    file: String,
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
    /// Why the samples cannot be read to their end; the counts are of what comes before.
    error: Option<String>,
}

/// A thread that has samples.
#[derive(Debug, Serialize)]
struct ThreadSamples {
    thread_id: u64,
    interpreter: u32,
    samples: u64,
}

/// Writes what the file at `path` holds. The samples are read to their end, so that what is said is true.
///
/// # Errors
/// When the file is no profile, when its samples cannot be read to their end (which is said in the output, too), or
/// when `out` fails.
pub fn run(path: &Path, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let reading = || format!("cannot read {}", path.display());
    let file = super::input::open(path).with_context(reading)?;
    let mut reader = Reader::new(BufReader::new(file)).with_context(reading)?;
    let (info, error) = inspect(path, &mut reader);
    if json {
        write_json(&mut *out, &info)?;
        writeln!(out)?;
    } else {
        info.print(out)?;
    }
    out.flush()?;
    error.map_or(Ok(()), |error| Err(error).with_context(reading))
}

fn inspect<R: Read + Seek>(path: &Path, reader: &mut Reader<R>) -> (Info, Option<ReadError>) {
    let header = *reader.header();
    let statistics = reader.statistics().copied();
    let metadata = Metadata::find(reader.tables());
    let mut threads = Threads::default();
    let (records, sample_bytes, error) = match reader.samples() {
        Ok(mut samples) => {
            let error = loop {
                match samples.next_sample() {
                    Ok(Some(sample)) => threads.count(&sample),
                    Ok(None) => break None,
                    Err(error) => break Some(error),
                }
            };
            (samples.records(), samples.bytes_read(), error)
        }
        Err(error) => (RecordCounts::default(), 0, Some(error)),
    };
    let stored_bytes = header.string_table_offset.saturating_sub(crate::tach::HEADER_LEN);
    let [major, minor, micro] = header.python_version;
    let info = Info {
        file: path.display().to_string(),
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

/// Threads in order of their first samples.
#[derive(Default)]
struct Threads {
    list: Vec<ThreadSamples>,
    places: HashMap<(u64, u32), usize>,
}

impl Threads {
    fn count(&mut self, sample: &Sample<'_>) {
        let (thread_id, interpreter) = (sample.thread_id, sample.interpreter_id);
        let place = *self.places.entry((thread_id, interpreter)).or_insert_with(|| {
            self.list.push(ThreadSamples { thread_id, interpreter, samples: 0 });
            self.list.len() - 1
        });
        self.list[place].samples += 1;
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

    /// All that a file of another program tells of its threads.
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
    if let Some(not_fired) = report.not_fired {
        let expected = report.expected.map_or_else(|| "unknown".to_owned(), |expected| expected.to_string());
        writeln!(out, "  not fired    {not_fired} of {expected} expected")?;
    }
    Ok(())
}

fn print_processes(metadata: &Metadata, counts: &[ThreadSamples], out: &mut dyn Write) -> std::io::Result<()> {
    let report = &metadata.report;
    writeln!(out, "  processes    {}", metadata.processes.len())?;
    for process in &metadata.processes {
        let known = report.processes.iter().find(|known| known.pid == process.pid);
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

/// A moment for people; what no calendar has stays a number.
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
