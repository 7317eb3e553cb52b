//! Opens files as one profile.

use super::accounts::{Accounts, Recording};
use super::budget::{Budget, Exceeded};
use super::filter::{Filter, Sieve};
use super::identity::Processes;
use super::import::{Import, Unknown};
use super::looked::{Looked, join, meta, report, shift_us, statistics, union};
use super::{Found, InputError, find, open, recorder};
use crate::profile::{self, Meta, Process, Profile};
use crate::report::Report;
use crate::sinks::Sink;
use crate::sinks::metadata::Metadata;
use crate::sinks::tach::{Origin, TachOptions};
use crate::tach::{Compression, Features, Mode, Read, ReadAhead, ReadError, Reader, RecordCounts, Statistics};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A file that is read.
pub type FileReader = Reader<BufReader<File>>;

/// One profile in one file, or in several.
pub struct Source {
    /// In time order.
    files: Vec<Planned>,
    /// The only file, and what it says about its recording.
    only: Option<(FileReader, Option<Metadata>)>,
    profile: Profile,
    report: Report,
    notes: Vec<String>,
    cut: bool,
    mode: Option<Mode>,
    features: Option<Features>,
    statistics: Option<Statistics>,
    compression: Compression,
    has_metadata: bool,
    filter: Filter,
    budget: Option<Arc<Budget>>,
}

/// How a file fits into the profile.
#[derive(Clone, Debug, Default)]
struct Planned {
    path: PathBuf,
    /// Places of its processes in the profile.
    places: Vec<u32>,
    /// The process of threads that are not in its metadata.
    unknown: Unknown,
    /// What has to be added to its times to get the profile's; wraps.
    shift_us: u64,
}

/// What went to a sink.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fed {
    /// Samples.
    pub samples: u64,
    /// Distinct pairs of thread and interpreter.
    pub threads: u64,
    /// The account, as the sink got it.
    pub report: Report,
    /// Records in the files.
    pub records: RecordCounts,
    /// Decompressed size of those records, in bytes.
    pub sample_bytes: u64,
}

impl Source {
    /// Opens files as one profile. A directory stands for the TACH files in it.
    ///
    /// # Errors
    /// When one cannot be opened or is not a profile.
    pub fn open(paths: &[PathBuf]) -> Result<Self, InputError> {
        let Found { files, notes } = find(paths)?;
        let source = match &files[..] {
            [path] if paths.len() == 1 => {
                let named = path == &paths[0];
                let reader = reader(path).map_err(|fault| if named { fault.alone() } else { fault.of(path) })?;
                let mut source = Self::of_reader(reader);
                source.files[0].path.clone_from(path);
                source
            }
            files => Self::of_many(files)?,
        };
        Ok(Self { notes, ..source })
    }

    /// The profile in one file.
    #[must_use]
    pub fn of_reader(reader: FileReader) -> Self {
        let mut metadata = Metadata::find(reader.tables());
        let header = reader.header();
        let budget = Some(Arc::new(Budget::of_size(header.file_size)));
        let mut profile = Profile { meta: meta(&reader, metadata.as_ref()), ..Profile::default() };
        if let Some(metadata) = &metadata {
            profile.processes = metadata.processes.iter().cloned().map(Process::from).collect();
        }
        let places = (0..).take(profile.processes.len()).collect();
        let unknown = Unknown { comm: "unknown".to_owned(), place: None };
        Self {
            files: vec![Planned { places, unknown, ..Planned::default() }],
            profile,
            report: report(&reader, metadata.as_mut()),
            notes: Vec::new(),
            cut: false,
            mode: header.mode,
            features: header.features,
            statistics: reader.statistics().copied(),
            compression: header.compression,
            has_metadata: metadata.is_some(),
            filter: Filter::default(),
            budget,
            only: Some((reader, metadata)),
        }
    }

    /// The profile in several files. Each is opened twice: what a sink must know before the first sample is spread over all of them.
    fn of_many(paths: &[PathBuf]) -> Result<Self, InputError> {
        let mut files = Vec::with_capacity(paths.len());
        let size = |path: &PathBuf| std::fs::metadata(path).map_or(0, |stat| stat.len());
        let budget = Arc::new(Budget::of_size(paths.iter().map(size).sum()));
        for path in paths {
            let reader = reader(path).map_err(|fault| fault.of(path))?;
            files.push(Looked::at(path, &reader));
            budget.check().map_err(InputError::Exceeded)?;
        }
        files.sort_by(|a, b| {
            a.start_unix().total_cmp(&b.start_unix()).then_with(|| a.meta.start_us.cmp(&b.meta.start_us))
        });
        let mut processes = Processes::default();
        let mut accounts = Accounts::default();
        let mut whole: Option<Meta> = None;
        let mut planned = Vec::with_capacity(files.len());
        for file in &mut files {
            let shift_us = whole.as_ref().map_or(0, |first| shift_us(first, &file.meta));
            let start_us = file.meta.start_us.wrapping_add(shift_us);
            let meta = whole.get_or_insert_with(|| file.meta.clone());
            join(meta, &file.meta, start_us);
            let places = processes.of_file(&file.meta.hostname, std::mem::take(&mut file.processes));
            let comm = file.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned());
            let place =
                (!file.has_metadata).then(|| processes.push(Process { comm: comm.clone(), ..Process::default() }));
            let later_s = file.report.segment.map_or(0.0, |segment| segment.start_unix - file.meta.start_unix);
            let start_s = Duration::from_micros(start_us).as_secs_f64() + later_s;
            let of = Recording {
                host: &file.meta.hostname,
                start_us: file.meta.start_us,
                span_s: (start_s, start_s + file.report.duration_s),
                interval_us: file.meta.interval_us,
                samples: file.samples,
                places: &places,
            };
            accounts.add(&of, &file.report);
            file.report = Report::default();
            planned.push(Planned { path: file.path.clone(), places, unknown: Unknown { comm, place }, shift_us });
        }
        let mut meta = whole.unwrap_or_default();
        meta.interval_us = accounts.interval_us();
        // Threads of two processes must not share an id, and viewers group by the id alone.
        meta.many_processes |= processes.all.len() > 1;
        let report = accounts.into_report(processes.all.len());
        let mode = files.first().and_then(|file| file.mode);
        let features = files.iter().filter_map(|file| file.features).reduce(union);
        let compressed = files.iter().any(|file| file.compression == Compression::Zstd);
        Ok(Self {
            statistics: statistics(&report),
            files: planned,
            only: None,
            profile: Profile { meta, processes: processes.all, ..Profile::default() },
            report,
            notes: Vec::new(),
            cut: false,
            mode: mode.filter(|_| files.iter().all(|file| file.mode == mode)),
            features,
            compression: if compressed { Compression::Zstd } else { Compression::None },
            has_metadata: true,
            filter: Filter::default(),
            budget: Some(budget),
        })
    }

    /// What is known before the first sample: [`Profile::meta`] and the processes.
    #[must_use]
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// The account of all files.
    #[must_use]
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// What was left out, for users.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// How many files are read.
    #[must_use]
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// The options for writing a TACH file of this profile.
    #[must_use]
    pub fn tach_options(&self) -> TachOptions {
        let Self { mode, mut features, mut statistics, has_metadata: metadata, compression, .. } = *self;
        if !self.filter.is_all() {
            // These were for the whole profile.
            statistics = None;
        }
        if let Some(features) = &mut features {
            features.native &= !self.filter.no_native;
        }
        let origin = Origin { mode, features, statistics, metadata };
        TachOptions { compression, origin: Some(origin), ..TachOptions::default() }
    }

    /// The file, if it is only one.
    #[must_use]
    pub fn only_file(&self) -> Option<&FileReader> {
        self.only.as_ref().map(|(reader, _)| reader)
    }

    /// The file, if it is the only one and all of it may be copied to a TACH file as it is.
    ///
    /// # Errors
    /// Gives `self` back if not.
    pub fn into_copied(self) -> Result<FileReader, Box<Self>> {
        match self.only {
            Some((reader, _)) if reader.can_be_copied() && self.filter.is_all() => Ok(reader),
            only => Err(Box::new(Self { only, ..self })),
        }
    }

    /// Whether the files say which host and which processes they are from.
    #[must_use]
    pub fn has_metadata(&self) -> bool {
        self.has_metadata
    }

    /// Treats unreadable samples as the end, as in a recording that was cut; the account then counts those that were readable.
    #[must_use]
    pub fn cut(mut self) -> Self {
        self.cut = true;
        self
    }

    /// Gives the sink only a part of the profile.
    #[must_use]
    pub fn with_filter(mut self, filter: Filter) -> Self {
        self.profile.meta.native &= !filter.no_native;
        self.filter = filter;
        self
    }

    /// Lifts the limits on cost: for files that can be trusted.
    #[must_use]
    pub fn without_limits(mut self) -> Self {
        self.budget = None;
        self
    }

    /// Limits the cost to this.
    #[must_use]
    pub fn with_budget(mut self, budget: Budget) -> Self {
        self.budget = Some(Arc::new(budget));
        self
    }

    /// The limit on its cost.
    #[must_use]
    pub fn budget(&self) -> Option<Arc<Budget>> {
        self.budget.clone()
    }

    /// Gives all samples to the sink and finishes its file.
    ///
    /// # Errors
    /// When a file cannot be read to its end, or the sink cannot take a sample.
    pub fn feed(mut self, sink: &mut dyn Sink) -> Result<Fed, InputError> {
        let many = self.only.is_none();
        let sieve = Sieve::new(self.filter, &self.profile)?;
        let mut feed = Feed {
            import: Import::new(std::mem::take(&mut self.profile), many),
            sink,
            sieve,
            budget: self.budget,
            times_us: Vec::new(),
            cut: self.cut,
            was_cut: false,
            samples: 0,
            last_us: 0,
            read: Read::default(),
        };
        match self.only {
            Some((reader, metadata)) => {
                let planned = &self.files[0];
                feed.file(reader, metadata, planned).map_err(Fault::alone)?;
            }
            None => {
                for planned in &self.files {
                    let one_of = |fault: Fault| fault.of(&planned.path);
                    let reader = reader(&planned.path).map_err(one_of)?;
                    let metadata = Metadata::find(reader.tables());
                    feed.file(reader, metadata, planned).map_err(one_of)?;
                }
            }
        }
        let mut report = self.report;
        let profile = &feed.import.profile;
        report.cut |= feed.was_cut;
        if self.cut {
            let recorded_us = feed.last_us.saturating_sub(profile.meta.start_us);
            report.stored = feed.samples;
            report.duration_s = Duration::from_micros(recorded_us).as_secs_f64();
            report.rate_hz = 1e6 / profile.meta.interval_us.max(1) as f64;
        }
        if let Some(sieve) = &feed.sieve {
            sieve.account(&mut report, feed.samples);
        }
        feed.sink.finish(profile, &report).map_err(InputError::Sink)?;
        let Read { records, bytes: sample_bytes } = feed.read;
        Ok(Fed { samples: feed.samples, threads: feed.import.threads(), report, records, sample_bytes })
    }
}

/// Samples on their way to the sink.
struct Feed<'a> {
    import: Import,
    sink: &'a mut dyn Sink,
    sieve: Option<Sieve>,
    budget: Option<Arc<Budget>>,
    /// Times of the current samples, if some are left out.
    times_us: Vec<u64>,
    cut: bool,
    was_cut: bool,
    samples: u64,
    last_us: u64,
    read: Read,
}

impl Feed<'_> {
    fn file(&mut self, mut reader: FileReader, metadata: Option<Metadata>, planned: &Planned) -> Result<(), Fault> {
        self.import.begin(reader.tables(), metadata, &planned.places, planned.unknown.clone());
        std::thread::scope(|scope| {
            let samples = ReadAhead::start(scope, &mut reader).map_err(Fault::Thread)?;
            self.take(samples, planned.shift_us)
        })
    }

    fn take(&mut self, mut samples: ReadAhead, shift_us: u64) -> Result<(), Fault> {
        loop {
            // A file cut before its first sample has none.
            let (sample, times_us) = match samples.next_run() {
                Ok(Some(run)) => run,
                Ok(None) => {
                    let Read { records, bytes } = samples.read();
                    self.read.records += records;
                    self.read.bytes += bytes;
                    return Ok(());
                }
                Err(error) if self.cut && !matches!(error, ReadError::Io(_)) => {
                    self.was_cut = true;
                    return Ok(());
                }
                Err(error) => return Err(Fault::Read(error)),
            };
            if let Some(budget) = &self.budget {
                budget.step().map_err(Fault::Exceeded)?;
                if times_us.len() > MANY {
                    budget.check().map_err(Fault::Exceeded)?;
                }
            }
            if let Some(sieve) = &mut self.sieve
                && let Some(process) = self.import.process_of(sample.thread_id, sample.interpreter_id)
                && !sieve.wants(&self.import.profile, process)
            {
                sieve.left_out += times_us.len() as u64;
                continue;
            }
            let mut of_profile = self.import.sample(&sample).map_err(Fault::Read)?;
            if shift_us != 0 {
                times_us.iter_mut().for_each(|time_us| *time_us = time_us.wrapping_add(shift_us));
            }
            let mut times_us = &*times_us;
            if let Some(sieve) = &mut self.sieve {
                self.times_us.clear();
                self.times_us.extend_from_slice(times_us);
                let Import { profile, stack, .. } = &mut self.import;
                let process = profile.thread(of_profile.thread).process;
                sieve.take(profile, process, &mut of_profile.merge, stack, &mut self.times_us);
                times_us = &self.times_us;
            }
            let Some(&time_us) = times_us.first() else { continue };
            let sample = profile::Sample { time_us, frames: &self.import.stack, ..of_profile };
            let profile = &self.import.profile;
            match times_us {
                [_] => self.sink.sample(profile, &sample),
                _ => self.sink.repeated(profile, &sample, times_us),
            }
            .map_err(Fault::Sink)?;
            self.samples += times_us.len() as u64;
            self.last_us = times_us.iter().copied().max().unwrap_or_default().max(self.last_us);
        }
    }
}

/// This many samples in one step are worth a check of the budget.
const MANY: usize = 16 * 1024;

/// Why a file was not read, without its name.
enum Fault {
    Open(std::io::Error),
    BeingRecorded(Option<u32>),
    Read(ReadError),
    Exceeded(Exceeded),
    Thread(std::io::Error),
    Sink(std::io::Error),
}

impl Fault {
    /// For a single file: the caller names it.
    fn alone(self) -> InputError {
        match self {
            Self::Open(error) => InputError::Open(error),
            Self::BeingRecorded(by) => InputError::BeingRecorded { by },
            Self::Read(error) => InputError::Read(error),
            Self::Exceeded(error) => InputError::Exceeded(error),
            Self::Thread(error) => InputError::Thread(error),
            Self::Sink(error) => InputError::Sink(error),
        }
    }

    /// For one of several.
    fn of(self, path: &Path) -> InputError {
        let path = path.to_owned();
        match self {
            Self::Open(source) => InputError::OpenOneOf { path, source },
            Self::Read(source) => InputError::ReadOneOf { path, source },
            other => other.alone(),
        }
    }
}

/// Opens one file.
///
/// # Errors
/// When it cannot be opened or is not a profile.
pub fn read(path: &Path) -> Result<FileReader, InputError> {
    reader(path).map_err(Fault::alone)
}

fn reader(path: &Path) -> Result<FileReader, Fault> {
    let file = open(path).map_err(Fault::Open)?;
    let asked = file.try_clone().map_err(Fault::Open)?;
    Reader::new(BufReader::new(file)).map_err(|error| match recorder(&asked) {
        Some(by) => Fault::BeingRecorded(by),
        None => Fault::Read(error),
    })
}
