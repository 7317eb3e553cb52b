//! The files a recording writes, and the sink that fills them.

mod split;

use crate::cli::args;
use crate::cli::output::{Destination, OutputDirectory, OutputError, OutputFile, OutputPlan};
use crate::cli::plan::{Plan, Targets};
use crate::cli::source::Files;
use crate::profile::{Meta, Profile};
use crate::sinks::export::{self, ExportOptions};
use crate::sinks::tach::TachOptions;
use crate::sinks::{Format, Sink, TachSink};
use crate::tach::Compression;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Bytes gathered before a `write(2)`; if a recording can be recovered, what is gathered is still written at least once a second.
const BUFFER: usize = 256 * 1024;

/// Further files of one profile: of a recording too large for one TACH file, or a gperftools profile's companion.
type More = Arc<Mutex<Vec<OutputFile>>>;

/// Files that one thread pushes and another takes: intact even if either panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All files of one recording: nearly always one.
pub(in crate::cli) struct Outputs {
    first: OutputFile,
    more: More,
    /// With `--split process`: where the processes' files go. The other files then hold the recording as a whole, which
    /// is no longer needed once those exist.
    directory: Option<Arc<OutputDirectory>>,
}

impl Outputs {
    /// Creates the first file and its sink.
    ///
    /// # Errors
    /// When a file cannot be created.
    pub fn open(plan: &Plan, profile: &Profile) -> anyhow::Result<(Self, Box<dyn Sink + Send>)> {
        let more = More::default();
        if plan.split {
            return split::open(plan, profile, more);
        }
        let mut first = OutputFile::create(&plan.output.destination, plan.output.force)?;
        let sink: Box<dyn Sink + Send> = match plan.output.format {
            Format::Tach => {
                let sink = tach_sink(plan, &plan.output, None, &first, &more, &profile.meta)?;
                Box::new(match first.create_journal()? {
                    Some((journal, tail)) => sink.with_journal(journal, tail, profile)?,
                    None => sink,
                })
            }
            _ => export_sink(plan, &plan.output, None, &first, &more)?,
        };
        Ok((Self { first, more, directory: None }, sink))
    }

    /// Gives the files their names.
    ///
    /// # Errors
    /// When a name was taken meanwhile, or the file's directory is gone: it is then kept.
    pub fn commit(self, format: Format) -> Result<(), OutputError> {
        match self.directory {
            // The processes' files are lost with the directory; then the whole one is finished.
            Some(directory) if directory.is_gone() => commit(self.first, &self.more),
            Some(directory) => {
                drop((self.first, std::mem::take(&mut *lock(&self.more))));
                directory.commit()
            }
            None => {
                let first = self.first.commit_or_keep(&format!("stdout.{}", format.extension()));
                first.and(commit_all(&self.more))
            }
        }
    }

    /// Leaves what was written where it is, and returns where.
    pub fn keep(self) -> Vec<PathBuf> {
        if let Some(directory) = &self.directory {
            directory.keep();
        }
        let more = std::mem::take(&mut *lock(&self.more));
        std::iter::once(self.first).chain(more).filter_map(OutputFile::keep_part).collect()
    }
}

fn commit(first: OutputFile, more: &More) -> Result<(), OutputError> {
    first.commit().and(commit_all(more))
}

/// Commits all of them, even after one has failed: those without a name would vanish. Returns the first error.
fn commit_all(files: &More) -> Result<(), OutputError> {
    let files = std::mem::take(&mut *lock(files));
    files.into_iter().map(OutputFile::commit).fold(Ok(()), Result::and)
}

/// The sink for a TACH file, `first`, that may continue in further ones.
fn tach_sink(
    plan: &Plan,
    output: &OutputPlan,
    directory: Option<&Arc<OutputDirectory>>,
    first: &OutputFile,
    more: &More,
    meta: &Meta,
) -> anyhow::Result<TachSink<BufWriter<File>>> {
    let compression = match plan.compression {
        args::Compression::Zstd => Compression::Zstd,
        args::Compression::None => Compression::None,
    };
    let options = TachOptions { compression, layout: plan.tach_layout, ..TachOptions::default() };
    let mut sink = TachSink::new(BufWriter::with_capacity(BUFFER, first.try_clone_file()?), meta, options)?;
    if plan.sync {
        let (first, more) = (first.try_clone_file()?, Arc::clone(more));
        sink = sink.with_sync(move || sync(&first, &more));
    }
    let (output, directory, files) = (output.clone(), directory.cloned(), Arc::clone(more));
    Ok(sink.with_next_output(move |number| next(&output, directory.as_deref(), number, &files)))
}

/// The sink of any other format.
fn export_sink(
    plan: &Plan,
    output: &OutputPlan,
    directory: Option<&OutputDirectory>,
    first: &OutputFile,
    more: &More,
) -> anyhow::Result<Box<dyn Sink + Send>> {
    let companion = output.create_companion(directory)?.map(|(file, companion)| {
        lock(more).push(file);
        companion
    });
    let file = BufWriter::with_capacity(BUFFER, first.try_clone_file()?);
    let options = ExportOptions {
        by_thread: plan.threads,
        merge_processes: plan.merge_processes,
        svg: output.is_svg(),
        companion,
        task_waits: false,
        source: plan.source.then(|| Files::of_targets(matches!(plan.targets, Targets::Command { .. }))),
    };
    Ok(export::open(output.format, file, options)?)
}

/// Syncs all files of a recording to disk (`--sync`).
fn sync(first: &File, more: &Mutex<Vec<OutputFile>>) -> std::io::Result<()> {
    first.sync_data()?;
    lock(more).iter().try_for_each(|output| output.file().sync_data())
}

/// The next file of a recording that has filled one: `name.0001.tach`, …
fn next(
    output: &OutputPlan,
    directory: Option<&OutputDirectory>,
    number: u32,
    files: &Mutex<Vec<OutputFile>>,
) -> std::io::Result<BufWriter<File>> {
    let Destination::Path(path) = &output.destination else {
        return Err(std::io::Error::other("a TACH file is full, and standard output holds only one"));
    };
    let path = numbered(path, number - 1);
    let file = match directory {
        Some(directory) => directory.create_file(&path),
        None => OutputFile::create(&Destination::Path(path), output.force),
    };
    let file = file.map_err(std::io::Error::other)?;
    let writer = BufWriter::with_capacity(BUFFER, file.try_clone_file()?);
    lock(files).push(file);
    Ok(writer)
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let extension = path.extension().map_or("tach".into(), |extension| extension.to_string_lossy().into_owned());
    path.with_extension(format!("{number:04}.{extension}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_files_are_numbered() {
        assert_eq!(numbered(Path::new("a/b.tach"), 1), Path::new("a/b.0001.tach"));
        assert_eq!(numbered(Path::new("b"), 12), Path::new("b.0012.tach"));
    }
}
