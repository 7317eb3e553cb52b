//! The files that `report` and `diff` are asked about, summed up.

use super::escape::escape;
use crate::analysis::{Aggregate, Collector};
use crate::input::{InputError, Source, find};
use crate::sinks::Sink;
use anyhow::Context as _;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

/// Sums up files and directories as one profile, or only one event's samples; with `force_large` whatever it costs.
///
/// # Errors
/// When one of them is not a profile that can be read to its end, or a directory contains none.
pub fn as_one(paths: &[PathBuf], event: Option<&str>, force_large: bool) -> anyhow::Result<Aggregate> {
    let reading = || match paths {
        [path] => format!("cannot read {}", path.display()),
        _ => format!("cannot read {} files", paths.len()),
    };
    let source = open(paths, force_large).with_context(reading)?;
    tell(source.notes());
    let mut aggregate = Aggregate::default();
    source.feed(&mut Collector::new(&mut aggregate).only(event)).with_context(reading)?;
    Ok(aggregate)
}

/// Gives the samples of files and directories to a sink, as one profile. What was left out has already been reported.
///
/// # Errors
/// As [`as_one`].
pub fn feed(paths: &[PathBuf], force_large: bool, sink: &mut dyn Sink) -> anyhow::Result<()> {
    let found = find(paths).context("cannot compare")?;
    open(&found.files, force_large).and_then(|source| source.feed(sink)).context("cannot compare")?;
    Ok(())
}

/// Sums up files and directories, each file as a recording of its own.
///
/// # Errors
/// As [`as_one`].
pub fn as_recordings(paths: &[PathBuf], force_large: bool) -> anyhow::Result<Aggregate> {
    let found = find(paths).context("cannot compare")?;
    tell(&found.notes);
    let mut aggregate = Aggregate::default();
    let mut read = |file: &Path| -> Result<(), InputError> {
        open(&[file.to_owned()], force_large)?.feed(&mut Collector::new(&mut aggregate))?;
        Ok(())
    };
    for file in &found.files {
        read(file).with_context(|| format!("cannot read {}", file.display()))?;
    }
    Ok(aggregate)
}

fn open(paths: &[PathBuf], force_large: bool) -> Result<Source, InputError> {
    let source = Source::open(paths)?;
    Ok(if force_large { source.without_limits() } else { source })
}

/// Reports what was left out to standard error: standard output may be JSON.
fn tell(notes: &[String]) {
    for note in notes {
        // It may be closed: that is no reason to stop.
        let _closed = writeln!(io::stderr(), "note: {}", escape(note));
    }
}
