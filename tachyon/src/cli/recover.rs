//! `recover`: makes a complete TACH file from one whose recording was cut.
//!
//! A TACH file has its names at its end, and gets its samples in large blocks. While it is recorded, names are also in a
//! journal beside it ([`crate::sinks::journal`]) and the newest samples in its tail ([`crate::sinks::tail`]); with both,
//! everything up to the last second before the cut can be read.

use super::export::{self, WriteSeek};
use crate::advice::{Advice, advises};
use crate::input::{self, Source};
use crate::report::Report;
use crate::sinks::journal::{self, Start};
use crate::sinks::metadata::Metadata;
use crate::sinks::tail;
use crate::tach::{Compression, Features, HEAD_LEN, Layout, Mode, Options, ReadError, Reader, Section, start_time_of};
use anyhow::Context;
use std::fs::File;
use std::io::{self, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What was recovered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Samples.
    pub samples: u64,
    /// Threads.
    pub threads: u64,
    /// The names came from a journal.
    pub from_journal: bool,
    /// Why the newest samples are not among them.
    pub lost_tail: Option<LostTail>,
    /// From the recording's start to the last sample.
    pub recorded: Duration,
    /// It is still being recorded: this is a snapshot.
    pub live: bool,
    /// The file was cut: what came later, and what was lost, is not known.
    pub cut: bool,
}

/// Why a file cannot be recovered.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    /// Neither tables nor journal.
    #[error("its names cannot be read, and there is no journal at {}", journal.display())]
    NoJournal {
        /// Where it would be.
        journal: PathBuf,
        /// Why the file alone cannot be read.
        source: ReadError,
    },
    /// The journal ends before it begins.
    #[error("the journal {} has no first line: nothing was recorded yet", .0.display())]
    EmptyJournal(PathBuf),
    /// The journal does not belong to the file.
    #[error("the journal {} is of another recording", .0.display())]
    OtherRecording(PathBuf),
    /// The journal is of a later version.
    #[error("the journal has schema {0}, only 1 is known")]
    Schema(u32),
}

advises!(RecoverError);

impl Advice for RecoverError {
    fn hint(&self) -> Option<String> {
        match self {
            Self::NoJournal { .. } => Some("give its journal with --journal".to_owned()),
            Self::OtherRecording(_) => Some("give the file's own with --journal".to_owned()),
            Self::EmptyJournal(_) | Self::Schema(_) => None,
        }
    }
}

/// Writes what can be read of `broken` to `good`, an empty file.
///
/// # Errors
/// When nothing can be read: the names are lost, or it is not a profile. When `good` cannot be written.
pub fn run(broken: &Path, journal: Option<&Path>, good: &mut dyn WriteSeek) -> anyhow::Result<Recovered> {
    run_at_any_cost(broken, journal, good, false)
}

/// The same; with `force_large` whatever it costs.
///
/// # Errors
/// As [`run`].
pub fn run_at_any_cost(
    broken: &Path,
    journal: Option<&Path>,
    good: &mut dyn WriteSeek,
    force_large: bool,
) -> anyhow::Result<Recovered> {
    let recovering = || format!("cannot recover {}", broken.display());
    let file = input::open(broken).with_context(recovering)?;
    let whole = match Reader::new(BufReader::new(file.try_clone()?)) {
        Ok(reader) => Ok(reader),
        Err(ReadError::Io(error)) if error.kind() != io::ErrorKind::UnexpectedEof => {
            return Err(error).with_context(recovering);
        }
        Err(error) => Err(error),
    };
    let journal_path = journal.map_or_else(|| default_journal(broken), Path::to_owned);
    let with_journal = |source| with_journal(journal_path.clone(), &file, source).with_context(recovering);
    let ((reader, lost_tail), from_journal) = match whole {
        // The footer is not a real one: that was cut off, and what would be read as tables is something else.
        Ok(reader) if reader.header().declared_size != reader.header().file_size && journal_path.exists() => {
            (with_journal(ReadError::Cut(Section::Strings))?, true)
        }
        Ok(reader) => ((reader, None), false),
        Err(source) => (with_journal(source)?, true),
    };
    let mut source = Source::of_reader(reader);
    if force_large {
        source = source.without_limits();
    }
    let fed = export::rescue(source, good).with_context(recovering)?;
    Ok(Recovered {
        samples: fed.samples,
        threads: fed.threads,
        from_journal,
        lost_tail,
        recorded: Duration::try_from_secs_f64(fed.report.duration_s).unwrap_or_default(),
        live: input::recorder(&file).is_some(),
        cut: fed.report.cut,
    })
}

/// The file in which the newest samples would be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LostTail {
    /// There is no such file.
    #[error("there is no {}", .0.display())]
    Missing(PathBuf),
    /// It belongs to another recording, or is too old.
    #[error("{} does not fit the file", .0.display())]
    Unfit(PathBuf),
}

/// A file that was cut, combined with its journal and tail as far as they go; and why its tail could not be used.
type Cut = (Reader<BufReader<File>>, Option<LostTail>);

fn with_journal(path: PathBuf, file: &File, source: ReadError) -> anyhow::Result<Cut> {
    let journal = match input::open(&path) {
        Ok(journal) => journal,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(match source {
                // Cutting a profile never causes these.
                ReadError::BadMagic(_) | ReadError::UnsupportedVersion(_) => source.into(),
                source => RecoverError::NoJournal { journal: path, source }.into(),
            });
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let read =
        journal::Read::new(BufReader::new(journal)).with_context(|| format!("cannot read {}", path.display()))?;
    let start = read.start.as_ref().ok_or_else(|| RecoverError::EmptyJournal(path.clone()))?;
    if start.schema != Start::SCHEMA {
        return Err(RecoverError::Schema(start.schema).into());
    }
    if !is_of(file, start)? {
        return Err(RecoverError::OtherRecording(path).into());
    }
    let metadata = Metadata {
        objects: read.objects.clone(),
        tool: concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")).to_owned(),
        host: start.host.clone(),
        start_unix: start.start_unix,
        many_processes: start.many_processes,
        part: 1,
        parts: 1,
        merge_in_status: start.merge_in_status,
        processes: read.processes.clone(),
        threads: read.threads.clone(),
        report: Report { cut: true, ..Report::default() },
    };
    let tables = read.tables(metadata.to_entry());
    let cut = || -> anyhow::Result<_> {
        Ok(Reader::cut(BufReader::new(file.try_clone()?), &options(start), tables.clone(), read.samples_end)?)
    };
    let tail_path = path.with_extension("tail");
    let tail = match input::open(&tail_path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok((cut()?, Some(LostTail::Missing(tail_path))));
        }
        other => other.with_context(|| format!("cannot read {}", tail_path.display()))?,
    };
    let mut alone = cut()?;
    let slots = tail::Found::all(&tail, start.id);
    for slot in slots.with_context(|| format!("cannot read {}", tail_path.display()))? {
        let Some(records) = slot.records(&tail)? else { continue };
        let mut continued = cut()?;
        if continued.continue_with(&slot.base(), records)? {
            // Older slots have no more. But the file itself may have more after the slot's base, if much was sampled
            // since then.
            let more = count(&mut continued)? > count(&mut alone)?;
            return Ok((if more { continued } else { alone }, None));
        }
    }
    // An empty one has no samples yet.
    let unfit = tail.metadata()?.len() > 0;
    Ok((alone, unfit.then_some(LostTail::Unfit(tail_path))))
}

/// Whether the file's header, as far as it has one, belongs to the journal's recording: otherwise its frames would get
/// wrong names.
fn is_of(file: &File, start: &Start) -> io::Result<bool> {
    let mut head = [0; HEAD_LEN];
    match file.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(true),
        other => other?,
    }
    Ok(start_time_of(&head).is_none_or(|time| time == start.start_time_us))
}

/// How many samples there are before the error that ends a file that was cut.
fn count(reader: &mut Reader<BufReader<File>>) -> Result<u64, ReadError> {
    let mut samples = match reader.samples() {
        Err(ReadError::Io(error)) => return Err(ReadError::Io(error)),
        Err(_) => return Ok(0),
        Ok(samples) => samples,
    };
    let mut times_us = Vec::new();
    loop {
        times_us.clear();
        match samples.next_run(&mut times_us, 64 * 1024) {
            Ok(Some(_)) => {}
            Err(ReadError::Io(error)) => return Err(ReadError::Io(error)),
            Ok(None) | Err(_) => return Ok(samples.records().samples()),
        }
    }
}

/// `app.tach.part.journal` of `app.tach.part`, or of `app.tach`, if it was renamed.
fn default_journal(broken: &Path) -> PathBuf {
    let beside = |ending: &str| {
        let mut path = broken.as_os_str().to_owned();
        path.push(ending);
        PathBuf::from(path)
    };
    let renamed = beside(".part.journal");
    if renamed.exists() { renamed } else { beside(".journal") }
}

fn options(start: &Start) -> Options {
    Options {
        layout: if start.early { Layout::Early } else { Layout::Released },
        compression: if start.zstd { Compression::Zstd } else { Compression::None },
        start_time_us: start.start_time_us,
        sample_interval_us: start.sample_interval_us,
        python_version: start.python_version,
        mode: Some(match (start.gil_only, start.waits) {
            (true, _) => Mode::Gil,
            (false, true) => Mode::Wall,
            (false, false) => Mode::Cpu,
        }),
        features: Some(Features {
            all_threads: true,
            native: start.native,
            opcodes: start.opcodes,
            ..Features::default()
        }),
        ..Options::default()
    }
}
