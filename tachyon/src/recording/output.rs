//! The files a recording writes, and the sink that fills them.

use crate::cli::args;
use crate::cli::output::{Destination, OutputError, OutputFile, OutputPlan};
use crate::cli::plan::Plan;
use crate::profile::Profile;
use crate::sinks::export::{self, ExportOptions};
use crate::sinks::tach::TachOptions;
use crate::sinks::{Format, Sink, TachSink};
use crate::tach::Compression;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Bytes gathered before a `write(2)`; what is gathered is written at least once a second all the same.
const BUFFER: usize = 256 * 1024;

/// All files of one recording: nearly always one.
pub(super) struct Outputs {
    first: OutputFile,
    /// Further files: of a recording that one TACH file cannot hold, or a gperftools profile's companion.
    more: Arc<Mutex<Vec<OutputFile>>>,
}

impl Outputs {
    /// Creates the first file and its sink.
    ///
    /// # Errors
    /// When a file cannot be had.
    pub fn open(plan: &Plan, profile: &Profile) -> anyhow::Result<(Self, Box<dyn Sink + Send>)> {
        let mut first = OutputFile::create(&plan.output.destination, plan.output.force)?;
        let more = Arc::new(Mutex::new(Vec::new()));
        let file = BufWriter::with_capacity(BUFFER, first.try_clone_file()?);
        let sink: Box<dyn Sink + Send> = match plan.output.format {
            Format::Tach => {
                let compression = match plan.compression {
                    args::Compression::Zstd => Compression::Zstd,
                    args::Compression::None => Compression::None,
                };
                let options = TachOptions { compression, layout: plan.tach_layout, ..TachOptions::default() };
                let mut sink = TachSink::new(file, &profile.meta, options)?;
                if plan.sync {
                    let (first, more) = (first.try_clone_file()?, Arc::clone(&more));
                    sink = sink.with_sync(move || sync(&first, &more));
                }
                if let Some(journal) = first.create_journal()? {
                    sink = sink.with_journal(journal, profile)?;
                }
                let (plan, files) = (plan.output.clone(), Arc::clone(&more));
                Box::new(sink.with_next_output(move |number| next(&plan, number, &files)))
            }
            format => {
                let companion = plan.output.create_companion()?.map(|(output, companion)| {
                    super::follow::lock(&more).push(output);
                    companion
                });
                let svg = plan.output.is_svg();
                export::open(format, file, ExportOptions { by_thread: plan.threads, svg, companion })?
            }
        };
        Ok((Self { first, more }, sink))
    }

    /// Gives the files their names.
    ///
    /// # Errors
    /// When a name was taken meanwhile.
    pub fn commit(self) -> Result<(), OutputError> {
        self.first.commit()?;
        for file in std::mem::take(&mut *super::follow::lock(&self.more)) {
            file.commit()?;
        }
        Ok(())
    }

    /// Leaves what was written where it is, and tells where.
    pub fn keep(self) -> Vec<PathBuf> {
        let more = std::mem::take(&mut *super::follow::lock(&self.more));
        std::iter::once(self.first).chain(more).filter_map(OutputFile::keep_part).collect()
    }
}

/// Brings all files of a recording to the disk (`--sync`).
fn sync(first: &File, more: &Mutex<Vec<OutputFile>>) -> std::io::Result<()> {
    first.sync_data()?;
    super::follow::lock(more).iter().try_for_each(|output| output.file().sync_data())
}

/// The next file of a recording that has filled one: `name.0001.tach`, …
fn next(plan: &OutputPlan, number: u32, files: &Mutex<Vec<OutputFile>>) -> std::io::Result<BufWriter<File>> {
    let Destination::Path(path) = &plan.destination else {
        return Err(std::io::Error::other("a TACH file is full, and standard output holds only one"));
    };
    let path = numbered(path, number - 1);
    let file = OutputFile::create(&Destination::Path(path), plan.force).map_err(std::io::Error::other)?;
    let writer = BufWriter::with_capacity(BUFFER, file.try_clone_file()?);
    super::follow::lock(files).push(file);
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
