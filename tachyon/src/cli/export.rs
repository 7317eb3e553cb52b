//! `export` and `merge`: TACH files, from this program or CPython, to any format.
//!
//! The files are read back into the [`Profile`](crate::profile::Profile) that a recording would have had, and their samples
//! are fed to the sink that a recording would have used, so that both give the same output.

use super::args::ExportArgs;
use crate::input::budget::Guarded;
use crate::input::{Fed, Filter, InputError, Source};
use crate::sinks::export::{self as sinks, ExportOptions};
use crate::sinks::tach::TachOptions;
use crate::sinks::{Format, TachSink};
use crate::tach::{CopyError, Reader, Summary};
use anyhow::Context;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

/// An output that can seek, which a TACH file's header needs.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSummary {
    /// The format.
    pub format: Format,
    /// Samples in the input and in the output.
    pub samples: u64,
    /// Distinct pairs of thread and interpreter.
    pub threads: u64,
    /// What was left out of the input, for people.
    pub notes: Vec<String>,
}

/// Writes the profile in one file to `output`. The output is flushed, not synchronised.
///
/// # Errors
/// When the input is not a profile that can be read to its end, when the output cannot be written, or when the format
/// needs another kind of output.
pub fn run(input: &Path, output: Output<'_>, format: Format, options: ExportOptions) -> anyhow::Result<ExportSummary> {
    run_many(&[input.to_owned()], output, format, options, Wanted::default())
}

/// Which part of the input is wanted.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Selects a part of it.
    pub filter: Filter,
    /// Read it whatever it costs.
    pub force_large: bool,
}

impl From<&ExportArgs> for Wanted {
    fn from(args: &ExportArgs) -> Self {
        let pids = args.pids.iter().map(|pid| pid.0).collect();
        let event = args.event.clone();
        let filter = Filter { no_native: args.no_native, pids, from: args.from, to: args.to, event };
        Self { filter, force_large: args.force_large }
    }
}

/// The same for several files and directories, as one profile.
///
/// # Errors
/// As [`run`].
pub fn run_many(
    inputs: &[PathBuf],
    output: Output<'_>,
    format: Format,
    options: ExportOptions,
    wanted: Wanted,
) -> anyhow::Result<ExportSummary> {
    let reading = || match inputs {
        [input] => format!("cannot export {}", input.display()),
        _ => "cannot export these files as one profile".to_owned(),
    };
    let event = wanted.filter.event.clone();
    let mut source = Source::open(inputs).with_context(reading)?.with_filter(wanted.filter);
    if wanted.force_large {
        source = source.without_limits();
    }
    let mut summary = export(source, output, format, options).with_context(reading)?;
    if let Some(event) = event.filter(|_| summary.samples == 0) {
        summary.notes.push(format!("no sample was taken at the event {event}"));
    }
    Ok(summary)
}

fn export(source: Source, output: Output<'_>, format: Format, options: ExportOptions) -> anyhow::Result<ExportSummary> {
    let notes = source.notes().to_vec();
    let budget = source.budget();
    let budget = budget.as_deref();
    let fed = match (format, output) {
        (Format::Tach, Output::File(out)) => {
            let source = match source.into_copied() {
                Ok(reader) => {
                    let (samples, threads) = copy(reader, out)?;
                    return Ok(ExportSummary { format, samples, threads, notes });
                }
                Err(source) => *source,
            };
            let mut sink = TachSink::new(out, &source.profile().meta, source.tach_options())?;
            source.feed(&mut sink)
        }
        (format, Output::Stream(out)) => source.feed(&mut *sinks::open(format, Guarded::new(out, budget), options)?),
        (format, Output::File(out)) => source.feed(&mut *sinks::open(format, Guarded::new(out, budget), options)?),
    };
    let Fed { samples, threads, .. } = fed.map_err(|error| told(error, format))?;
    Ok(ExportSummary { format, samples, threads, notes })
}

/// From TACH to TACH the samples stay as they are, byte for byte.
fn copy<R: Read + Seek>(reader: Reader<R>, out: &mut dyn WriteSeek) -> anyhow::Result<(u64, u64)> {
    match reader.copy_to(out) {
        Ok((_, Summary { samples, threads, .. })) => Ok((samples, threads.into())),
        Err(CopyError::Read(error)) => Err(error.into()),
        Err(CopyError::Write(error)) => Err(error).with_context(|| writing(Format::Tach)),
    }
}

/// Writes what can be read of a TACH file to a new one. Its samples end where its reader reports an error. The returned
/// account is also in the new file.
///
/// # Errors
/// When the input cannot be read at all, or the output cannot be written.
pub(super) fn rescue(source: Source, out: &mut dyn WriteSeek) -> anyhow::Result<Fed> {
    let source = source.cut();
    let layout = source.only_file().map_or_else(Default::default, |reader| reader.header().layout);
    let mut options = TachOptions { layout, ..source.tach_options() };
    if source.has_metadata() {
        // What this program's files say about their recording comes from the profile again; another program's is kept.
        options.origin = None;
    }
    let mut sink = TachSink::new(out, &source.profile().meta, options)?;
    source.feed(&mut sink).map_err(|error| told(error, Format::Tach))
}

/// Marks an output's failure as such.
fn told(error: InputError, format: Format) -> anyhow::Error {
    match error {
        InputError::Sink(error) => anyhow::Error::from(error).context(writing(format)),
        other => other.into(),
    }
}

fn writing(format: Format) -> String {
    format!("cannot write the {format} output")
}
