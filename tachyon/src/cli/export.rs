//! `export`: a TACH file, ours or CPython's, to any other format.
//!
//! The file is read back into the [`Profile`] that a recording would have had, and its samples are fed to the sink
//! that a recording would have used, so that both give the same output.

use crate::profile::{self, FrameId, Merge, Profile, ThreadId};
use crate::report::Report;
use crate::sinks::export::{self as sinks, ExportOptions};
use crate::sinks::metadata::Metadata;
use crate::sinks::tach::{Origin, TachOptions};
use crate::sinks::{Format, Sink, TachSink, process_frame_name};
use crate::tach::{CopyError, Frame, ReadAhead, ReadError, Reader, Summary, Tables};
use anyhow::Context;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::io::{self, Read, Seek, Write};
use std::path::Path;
use std::time::Duration;

/// An output that can go back, which a TACH file's header needs.
pub trait WriteSeek: Write + Seek + Send {}

impl<T: Write + Seek + Send> WriteSeek for T {}

/// Where an export goes.
pub enum Output<'a> {
    /// A pipe or a terminal.
    Stream(&'a mut (dyn Write + Send)),
    /// An empty file.
    File(&'a mut dyn WriteSeek),
}

/// What was exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// The format.
    pub format: Format,
    /// Samples in the input and in the output.
    pub samples: u64,
    /// Distinct pairs of thread and interpreter.
    pub threads: u64,
}

/// Writes the profile in `input` to `output`. The output is flushed, not synchronised.
///
/// # Errors
/// When the input is no profile that can be read to its end, when the output cannot be written, or when the format
/// needs another kind of output.
pub fn run(input: &Path, output: Output<'_>, format: Format, options: ExportOptions) -> anyhow::Result<ExportSummary> {
    let reading = || format!("cannot export {}", input.display());
    let file = super::input::open(input).with_context(reading)?;
    let reader = Reader::new(io::BufReader::new(file)).with_context(reading)?;
    export(reader, output, format, options).with_context(reading)
}

fn export<R: Read + Seek + Send>(
    reader: Reader<R>,
    output: Output<'_>,
    format: Format,
    options: ExportOptions,
) -> anyhow::Result<ExportSummary> {
    let (mut sink, source) = match (format, output) {
        (Format::Tach, Output::File(out)) if reader.can_be_copied() => return copy(reader, out),
        (Format::Tach, Output::File(out)) => {
            let source = Import::new(&reader);
            let header = reader.header();
            let origin = Origin {
                mode: header.mode,
                features: header.features,
                statistics: reader.statistics().copied(),
                metadata: source.has_metadata,
            };
            let options =
                TachOptions { compression: header.compression, origin: Some(origin), ..TachOptions::default() };
            let mut sink = TachSink::new(out, &source.profile.meta, options)?;
            return Ok(source.feed(reader, &mut sink, format, false)?.0);
        }
        (format, Output::Stream(out)) => (sinks::open(format, out, options)?, Import::new(&reader)),
        (format, Output::File(out)) => (sinks::open(format, out, options)?, Import::new(&reader)),
    };
    Ok(source.feed(reader, &mut *sink, format, false)?.0)
}

/// From TACH to TACH the samples stay as they are, byte for byte.
fn copy<R: Read + Seek>(reader: Reader<R>, out: &mut dyn WriteSeek) -> anyhow::Result<ExportSummary> {
    let format = Format::Tach;
    match reader.copy_to(out) {
        Ok((_, Summary { samples, threads, .. })) => Ok(ExportSummary { format, samples, threads: threads.into() }),
        Err(CopyError::Read(error)) => Err(error.into()),
        Err(CopyError::Write(error)) => Err(error).with_context(|| writing(format)),
    }
}

/// Writes what can be read of a TACH file to a new one. Its samples end where `reader` says so, by an error. Gives the
/// account that the new file tells as well.
///
/// # Errors
/// When the input cannot be read at all, or the output cannot be written.
pub(super) fn rescue<R: Read + Seek + Send>(
    reader: Reader<R>,
    out: &mut dyn WriteSeek,
) -> anyhow::Result<(ExportSummary, Report)> {
    let source = Import::new(&reader);
    let header = reader.header();
    // What a file of ours says of its recording comes from the profile again; another program's is kept.
    let origin = (!source.has_metadata).then(|| Origin {
        mode: header.mode,
        features: header.features,
        statistics: reader.statistics().copied(),
        metadata: false,
    });
    let options =
        TachOptions { layout: header.layout, compression: header.compression, origin, ..TachOptions::default() };
    let mut sink = TachSink::new(out, &source.profile.meta, options)?;
    source.feed(reader, &mut sink, Format::Tach, true)
}

fn writing(format: Format) -> String {
    format!("cannot write the {format} output")
}

/// No frame's handle: there are never so many.
const NO_FRAME: FrameId = FrameId(u32::MAX);

/// A TACH file's tables as a profile's.
struct Import {
    profile: Profile,
    /// By index in the file; [`NO_FRAME`]: its names do not exist, no sample can use it.
    frames: Vec<FrameId>,
    report: Report,
    /// Process of each (thread id, interpreter) of a file with our metadata, with what else is known of the thread.
    known: HashMap<(u64, u32), profile::Thread>,
    /// By process: the frame that names it, which the sink will put there again.
    roots: Vec<Option<FrameId>>,
    /// Threads met so far.
    threads: HashMap<(u64, u32), ThreadId, RandomState>,
    /// The process of threads that no metadata tells.
    unknown_process: Option<u32>,
    /// The file has our metadata.
    has_metadata: bool,
}

impl Import {
    fn new<R: Read + Seek>(reader: &Reader<R>) -> Self {
        let header = reader.header();
        let tables = reader.tables();
        let mut profile = Profile::default();
        let frames = import_frames(&mut profile, tables);
        let [major, minor, micro] = header.python_version;
        profile.meta.start_us = header.start_time_us;
        profile.meta.interval_us = header.sample_interval_us;
        profile.meta.python_version = (major, minor, micro);
        profile.meta.gil_only = header.mode == Some(crate::tach::Mode::Gil);
        if let Some(features) = header.features {
            profile.meta.native = features.native;
            profile.meta.opcodes = features.opcodes;
        }

        let metadata = Metadata::find(tables);
        let statistics = reader.statistics();
        let report = metadata.as_ref().map_or_else(
            || Report {
                stored: header.sample_count,
                duration_s: statistics.map_or(0.0, |statistics| statistics.duration_sec),
                rate_hz: statistics.map_or(0.0, |statistics| statistics.sample_rate),
                ..Report::default()
            },
            |metadata| metadata.report.clone(),
        );
        let mut import = Self {
            profile,
            frames,
            report,
            known: HashMap::new(),
            roots: Vec::new(),
            threads: HashMap::default(),
            unknown_process: None,
            has_metadata: metadata.is_some(),
        };
        if let Some(metadata) = metadata {
            import.use_metadata(metadata);
        }
        import
    }

    fn use_metadata(&mut self, metadata: Metadata) {
        let profile = &mut self.profile;
        profile.meta.hostname = metadata.host;
        profile.meta.start_unix = metadata.start_unix;
        profile.meta.many_processes = metadata.many_processes;
        if metadata.report.effective_rate_hz > 0.0 && metadata.report.effective_rate_hz < metadata.report.rate_hz {
            profile.meta.interval_us = metadata.report.mean_interval_us();
        }
        for process in metadata.processes {
            let process = profile::Process {
                pid: process.pid,
                comm: process.comm,
                cmdline: process.cmdline,
                python_version: process.python_version,
                container: process.container,
                pod: process.pod,
            };
            self.roots.push(metadata.many_processes.then(|| profile.special_frame(&process_frame_name(&process))));
            profile.processes.push(process);
        }
        for thread in metadata.threads {
            // A process that is not listed: as if the thread were not listed either.
            if (thread.process as usize) < profile.processes.len() {
                self.known.insert(
                    (thread.thread_id, thread.interpreter),
                    profile::Thread {
                        process: thread.process,
                        tid: thread.tid,
                        unique_tid: thread.thread_id,
                        ns_tid: thread.ns_tid,
                        interpreter: thread.interpreter,
                        name: thread.name,
                    },
                );
            }
        }
    }

    /// Gives all samples to the sink and ends its file. With `cut`, samples that cannot be read are the end; the report
    /// then counts those that could.
    fn feed<R: Read + Seek + Send>(
        self,
        mut reader: Reader<R>,
        sink: &mut dyn Sink,
        format: Format,
        cut: bool,
    ) -> anyhow::Result<(ExportSummary, Report)> {
        std::thread::scope(|scope| {
            let samples = ReadAhead::start(scope, &mut reader).context("cannot start a thread")?;
            self.take(samples, sink, format, cut)
        })
    }

    fn take(
        mut self,
        mut samples: ReadAhead,
        sink: &mut dyn Sink,
        format: Format,
        cut: bool,
    ) -> anyhow::Result<(ExportSummary, Report)> {
        let writing = || writing(format);
        let mut stack = Vec::new();
        let mut count = 0;
        let mut last_us = 0;
        loop {
            // Cut before the first sample it has none.
            let sample = match samples.next_sample() {
                Ok(Some(sample)) => sample,
                Ok(None) => break,
                Err(error) if cut && !matches!(error, ReadError::Io(_)) => {
                    self.report.cut = true;
                    break;
                }
                Err(error) => return Err(error.into()),
            };
            let thread = self.thread(sample.thread_id, sample.interpreter_id);
            stack.clear();
            let frames = &self.frames;
            stack.extend(sample.frames.iter().map(|&index| frames.get(index as usize).copied().unwrap_or(NO_FRAME)));
            // The reader has checked them all.
            if let Some(place) = stack.iter().position(|&frame| frame == NO_FRAME) {
                let (index, count) = (sample.frames[place], frames.len());
                return Err(ReadError::InvalidFrameIndex { index, count }.into());
            }
            let root = self.roots.get(self.profile.thread(thread).process as usize).copied().flatten();
            if root.is_some() && stack.last() == root.as_ref() {
                stack.pop();
            }
            let time_us = sample.timestamp_us;
            let sample = profile::Sample { thread, time_us, status: sample.status, frames: &stack, merge: Merge::None };
            sink.sample(&self.profile, &sample).with_context(writing)?;
            count += 1;
            last_us = time_us.max(last_us);
        }
        if cut {
            let recorded_us = last_us.saturating_sub(self.profile.meta.start_us);
            self.report.stored = count;
            self.report.duration_s = Duration::from_micros(recorded_us).as_secs_f64();
            self.report.rate_hz = 1e6 / self.profile.meta.interval_us.max(1) as f64;
        }
        sink.finish(&self.profile, &self.report).with_context(writing)?;
        let summary = ExportSummary { format, samples: count, threads: self.threads.len() as u64 };
        Ok((summary, self.report))
    }

    fn thread(&mut self, id: u64, interpreter: u32) -> ThreadId {
        if let Some(&thread) = self.threads.get(&(id, interpreter)) {
            return thread;
        }
        let thread = self.known.remove(&(id, interpreter)).unwrap_or_else(|| {
            // Other systems' ids are wider than Linux's; `ns_tid` 0 makes sinks take the whole id.
            let tid = u32::try_from(id).unwrap_or(0);
            let process = self.unknown_process();
            profile::Thread { process, tid, unique_tid: id, ns_tid: tid, interpreter, name: String::new() }
        });
        let handle = ThreadId(u32::try_from(self.profile.threads.len()).expect("the header counts threads in 32 bits"));
        self.profile.threads.push(thread);
        self.threads.insert((id, interpreter), handle);
        handle
    }

    fn unknown_process(&mut self) -> u32 {
        let processes = &mut self.profile.processes;
        *self.unknown_process.get_or_insert_with(|| {
            processes.push(profile::Process { comm: "unknown".to_owned(), ..profile::Process::default() });
            u32::try_from(processes.len() - 1).expect("a file has fewer than 2^32 processes")
        })
    }
}

fn import_frames(profile: &mut Profile, tables: &Tables) -> Vec<FrameId> {
    let mut import = |frame: &Frame| {
        let filename = profile.strings.intern(tables.string(frame.filename)?);
        let function = profile.strings.intern(tables.string(frame.function)?);
        let mut imported = profile::Frame::without_location(filename, function);
        if let Some(location) = frame.location() {
            imported.lineno = location.lineno;
            imported.end_lineno = location.end_lineno;
            imported.column = location.column;
            imported.end_column = location.end_column;
        }
        imported.opcode = frame.opcode;
        Some(profile.frames.intern(imported))
    };
    tables.frames().iter().map(|frame| import(frame).unwrap_or(NO_FRAME)).collect()
}
