//! Where a profile goes, and in which format.

use super::Surroundings;
use crate::cli::args::{ExportArgs, MergeArgs, RecordArgs};
use crate::cli::failure::Failure;
use crate::cli::format;
use crate::cli::output::{self, Destination, OutputError, OutputPlan};
use crate::cli::record::compact_utc;
use crate::sinks::Format;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Where an export goes, and in which format.
///
/// # Errors
/// [`Failure`] when the format cannot be determined, or the output is not available.
pub fn export_output(args: &ExportArgs, surroundings: &Surroundings) -> Result<OutputPlan, anyhow::Error> {
    let destination = Destination::from_argument(args.output.clone());
    let format = match (args.format, &destination) {
        (Some(format), _) => format,
        (None, Destination::Stdout) => Format::Collapsed,
        (None, Destination::Path(path)) => format_of_path(path)?,
    };
    source_wanted(args.source, format)?;
    let output = OutputPlan { destination, format, force: args.force };
    check_stream(&output, surroundings)?;
    output.check()?;
    Ok(output)
}

/// Where `merge` writes to.
///
/// # Errors
/// When it is not a suitable file for TACH.
pub fn merge_output(args: &MergeArgs) -> Result<OutputPlan, anyhow::Error> {
    let destination = Destination::from_argument(args.output.clone());
    let other = match &destination {
        Destination::Stdout => true,
        Destination::Path(path) => Format::from_extension(path).is_some_and(|format| format != Format::Tach),
    };
    if other {
        return Err(Failure::usage("merge writes a TACH file")
            .with_hint("`tachyon-bpf export IN... -o OUT` writes several files in other formats")
            .into());
    }
    let output = OutputPlan { destination, format: Format::Tach, force: args.force };
    output.check()?;
    Ok(output)
}

pub(super) fn record_output(args: &RecordArgs, surroundings: &Surroundings) -> Result<OutputPlan, anyhow::Error> {
    if args.split.is_some() || args.rotate.is_some() {
        return Ok(directory_output(args, surroundings)?);
    }
    let destination = match &args.output {
        Some(path) => Destination::from_argument(path.clone()),
        None => Destination::Path({
            let extension = args.format.unwrap_or(Format::Tach).extension();
            default_path(&format!(".{extension}"), surroundings.now)
        }),
    };
    let format = match (args.format, &destination) {
        (Some(format), _) => format,
        (None, Destination::Stdout) => Format::Tach,
        (None, Destination::Path(path)) => format_of_path(path)?,
    };
    let output = OutputPlan { destination, format, force: args.force };
    check_stream(&output, surroundings)?;
    Ok(output)
}

/// The plan for a directory, which has no extension that could give the format of its files.
fn directory_output(args: &RecordArgs, surroundings: &Surroundings) -> Result<OutputPlan, Failure> {
    let destination = match &args.output {
        Some(path) => Destination::from_argument(path.clone()),
        None => Destination::Path(default_path("", surroundings.now)),
    };
    if destination == Destination::Stdout {
        let what = if args.rotate.is_some() { "segment" } else { "process" };
        return Err(Failure::usage(format!("cannot write one file per {what} to standard output"))
            .with_hint("give a directory with -o"));
    }
    Ok(OutputPlan { destination, format: args.format.unwrap_or(Format::Tach), force: args.force })
}

fn format_of_path(path: &Path) -> Result<Format, Failure> {
    format::of_path(path).map_err(|extension| {
        Failure::usage(format!("cannot tell the format from the extension .{extension} of {}", path.display()))
            .with_hint(format!("known are {} and others; --format overrides the extension", format::extensions()))
    })
}

/// Whether source text is wanted; only the report shows it.
pub(super) fn source_wanted(wanted: bool, format: Format) -> Result<bool, Failure> {
    if wanted && format != Format::Report {
        return Err(Failure::usage(format!("{format} files have no source text"))
            .with_hint("--source is for reports: -o app.html, or --format report"));
    }
    Ok(wanted)
}

/// Refuses what cannot go to standard output.
fn check_stream(output: &OutputPlan, surroundings: &Surroundings) -> Result<(), Failure> {
    if output.destination == Destination::Stdout && output.format == Format::Gperftools {
        return Err(Failure::usage("cannot write a gperftools profile to standard output: it is two files")
            .with_hint("give a file with -o, or --format pprof, which is one"));
    }
    let to_terminal = output.destination == Destination::Stdout && surroundings.stdout_is_terminal;
    if to_terminal && output.format.is_binary() {
        return Err(Failure::usage("cannot write a binary profile to the terminal")
            .with_hint("redirect standard output, or give --format collapsed"));
    }
    Ok(())
}

/// `tachyon-<UTC date-time>.tach` in the current directory, e.g. `tachyon-20260131T080910Z.tach`; a second recording
/// of the same second gets `-2`.
pub(in crate::cli) fn default_path(ending: &str, now: SystemTime) -> PathBuf {
    let time = compact_utc(now);
    let path = |suffix: &str| PathBuf::from(format!("tachyon-{time}{suffix}{ending}"));
    let mut candidate = path("");
    for number in 2..100 {
        let taken = output::check(&Destination::Path(candidate.clone()), false);
        if !matches!(
            taken,
            Err(OutputError::Exists { .. } | OutputError::StalePart { .. } | OutputError::BusyPart { .. })
        ) {
            break;
        }
        candidate = path(&format!("-{number}"));
    }
    candidate
}
