//! A TACH file with its account, counted: one row for each stack, set of labels and slice.

use crate::hash::{FrameHash, StackId, stack_id};
use crate::place;
use crate::rows::{FrameRow, Labels, LossRow, SampleRow};
use anyhow::{Context as _, ensure};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tachyon::advice::Refusal;
use tachyon::input::{self, Source};
use tachyon::profile::{Frame, FrameId, Process, Profile, Sample, address_of_name, event_of_root};
use tachyon::report::{ProcessReport, Report};
use tachyon::sinks::{FrameLabel, Sink};
use tachyon::tach::Reader;

/// Most bytes of an account: a host with 100,000 processes needs less.
const LARGEST_ACCOUNT: u64 = 64 << 20;
/// Bit of a sample's status: its thread was on a CPU.
const ON_CPU: u8 = 2;
/// The cause of losses in a recovered segment.
const CUT: &str = "cut";
/// An interval between samples is not longer than a day, whatever a file says.
const LONGEST_INTERVAL_US: u64 = 24 * 60 * 60 * 1_000_000;

/// How to count.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Length of a slice.
    pub slice: Duration,
    /// Start of recordings that do not give theirs.
    pub start: Option<SystemTime>,
}

/// Everything that goes into tables from one file.
#[derive(Clone, Debug, Default)]
pub struct Segment {
    /// `HOST-START-SEQ`.
    pub name: String,
    /// Its start, milliseconds since 1970, UTC.
    pub start_ms: i64,
    /// Length of a slice, milliseconds.
    pub slice_ms: i64,
    /// Time that a sample stands for, nanoseconds.
    pub interval_ns: i64,
    /// The host it comes from.
    pub host: Arc<str>,
    /// In order.
    pub samples: Vec<SampleRow>,
    /// By id: frames, innermost first.
    pub stacks: HashMap<StackId, Arc<[i64]>>,
    /// By id.
    pub frames: HashMap<i64, FrameRow>,
    /// In order; causes without a loss are left out.
    pub loss: Vec<LossRow>,
    /// Samples of the file.
    pub sample_count: u64,
    /// The file does not say when it was recorded.
    pub is_undated: bool,
}

impl Segment {
    /// Joins several segments of one recorder, in order.
    #[must_use]
    pub fn joined(segments: &[Arc<Self>]) -> Self {
        let mut whole = segments.first().map(|first| Self::clone(first)).unwrap_or_default();
        for segment in segments.iter().skip(1) {
            whole.samples.extend(segment.samples.iter().cloned());
            whole.loss.extend(segment.loss.iter().cloned());
            whole.stacks.extend(segment.stacks.iter().map(|(id, frames)| (*id, Arc::clone(frames))));
            whole.frames.extend(segment.frames.iter().map(|(id, frame)| (*id, frame.clone())));
            whole.sample_count += segment.sample_count;
        }
        whole.samples.sort();
        whole.loss.sort();
        whole
    }

    /// The event that the samples of a row were taken at, and how many each stands for.
    #[must_use]
    pub fn event_of(&self, row: &SampleRow) -> Option<(&str, i64)> {
        let root = self.stacks.get(&row.stack_id)?.last()?;
        let frame = self.frames.get(root).filter(|frame| &*frame.kind == "special")?;
        let (name, period) = event_of_root(&frame.function)?;
        Some((name, i64::try_from(period).unwrap_or(i64::MAX)))
    }
}

/// Reads a TACH file, and the account beside it if the file is a segment.
///
/// # Errors
/// When it cannot be read to its end, costs more than a file of its size should, or its account belongs to another file.
pub fn read(path: &Path, options: Options) -> anyhow::Result<Segment> {
    let source = Source::open(std::slice::from_ref(&path.to_owned()))?;
    of_source(source, path, options, &input::open)
}

/// The same for an open file. `open` opens the account.
///
/// # Errors
/// As [`read`].
pub fn read_open(file: File, path: &Path, options: Options, open: Open<'_>) -> anyhow::Result<Segment> {
    let source = Source::of_reader(Reader::new(BufReader::new(file))?);
    of_source(source, path, options, open)
}

/// Opens a file.
pub type Open<'a> = &'a dyn Fn(&Path) -> io::Result<File>;

fn of_source(source: Source, path: &Path, options: Options, open: Open<'_>) -> anyhow::Result<Segment> {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let account = if place::is_segment(&stem) { account(&path.with_extension("json"), open)? } else { None };
    let told = source.has_metadata();
    let report = account.unwrap_or_else(|| source.report().clone());
    let clock = Clock::new(source.profile(), &report, options)?;
    let mut collector = Collector { clock, report, stem, told, ..Collector::default() };
    let fed = source.feed(&mut collector)?;
    let stored = collector.report.stored;
    let wall = collector.report.wall.as_ref().map_or(0, |wall| wall.stored);
    ensure!(
        !told || stored + wall == fed.samples,
        Refusal::new(format!("its account tells of {} samples, and it has {}", stored + wall, fed.samples))
            .with_hint("the account is another file's: if it lies beside the file as .json, move that away")
    );
    Ok(Segment {
        start_ms: clock.start_ms,
        slice_ms: i64::try_from(clock.slice_us / 1000).unwrap_or(i64::MAX),
        sample_count: fed.samples,
        is_undated: clock.is_undated,
        ..collector.segment
    })
}

/// The account of a segment, with labels; `None`: there is none.
fn account(path: &Path, open: Open<'_>) -> anyhow::Result<Option<Report>> {
    let cannot = || format!("cannot read its account {}", path.display());
    let file = match open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other.with_context(cannot)?,
    };
    let size = file.metadata().with_context(cannot)?.len();
    ensure!(size <= LARGEST_ACCOUNT, "{}: it has {size} bytes", cannot());
    serde_json::from_reader(BufReader::new(file.take(LARGEST_ACCOUNT))).with_context(cannot).map(Some)
}

/// Converts a file's clock to slices.
#[derive(Clone, Copy, Debug, Default)]
struct Clock {
    /// On the file's clock.
    start_us: u64,
    /// Since 1970.
    start_ms: i64,
    slice_us: u64,
    last_slice: u64,
    is_undated: bool,
}

impl Clock {
    fn new(profile: &Profile, report: &Report, options: Options) -> anyhow::Result<Self> {
        let meta = &profile.meta;
        let given = options.start.map(|start| start.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let is_undated = meta.start_unix == 0.0;
        let recorded = if is_undated { given.unwrap_or_default().as_secs_f64() } else { meta.start_unix };
        let start = report.segment.map_or(recorded, |segment| segment.start_unix);
        let start_ms =
            place::milliseconds(start).with_context(|| format!("it began at {start} s, which is no date"))?;
        // The clock of a segment is its recording's.
        let later = Duration::try_from_secs_f64(start - recorded).unwrap_or_default();
        let later_us = u64::try_from(later.as_micros()).unwrap_or(u64::MAX);
        let slice_us = u64::try_from(options.slice.as_micros()).unwrap_or(u64::MAX).max(1);
        Ok(Self {
            start_us: meta.start_us.saturating_add(later_us),
            start_ms,
            slice_us,
            last_slice: last_slice(report.duration_s, options.slice),
            is_undated: is_undated && given.is_none(),
        })
    }

    /// The slice of a moment. Moments just beyond the recording's ends, because clocks differ, belong to the slice there.
    fn slice(&self, time_us: u64) -> u64 {
        (time_us.saturating_sub(self.start_us) / self.slice_us).min(self.last_slice)
    }

    /// When a slice begins, in milliseconds since 1970.
    fn begin_ms(&self, slice: u64) -> i64 {
        let later_ms = u128::from(slice) * u128::from(self.slice_us) / 1000;
        self.start_ms.saturating_add(i64::try_from(later_ms).unwrap_or(i64::MAX))
    }
}

/// Slices begin with the recording: so a segment of 60 s has one, even if it ends some milliseconds late. A remainder shorter
/// than half a slice belongs to the slice before.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float that is too large becomes the largest number"
)]
fn last_slice(duration_s: f64, slice: Duration) -> u64 {
    if duration_s > 0.0 { ((duration_s / slice.as_secs_f64()).round() as u64).saturating_sub(1) } else { u64::MAX }
}

/// Samples of one stack.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    on_cpu: u64,
    waiting: u64,
    /// Samples of chosen events (`tachyon-bpf -e`), which stand for no time.
    of_events: u64,
}

/// The sink that counts.
#[derive(Default)]
struct Collector {
    clock: Clock,
    report: Report,
    stem: String,
    /// Whether the file has this project's metadata.
    told: bool,
    stacks: HashMap<Arc<[FrameId]>, u32>,
    /// By slice, process and stack.
    counts: BTreeMap<(u64, u32, u32), Count>,
    /// The resulting segment.
    segment: Segment,
}

impl Sink for Collector {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        let stack = match self.stacks.get(sample.frames) {
            Some(&stack) => stack,
            None => {
                let next = u32::try_from(self.stacks.len()).map_err(io::Error::other)?;
                *self.stacks.entry(sample.frames.into()).or_insert(next)
            }
        };
        let process = profile.thread(sample.thread).process;
        let waits = sample.status & ON_CPU == 0 || profile.waits_for(sample.frames).is_some();
        let of_event = profile.event_of(sample.frames).is_some();
        for &time_us in times_us {
            let count = self.counts.entry((self.clock.slice(time_us), process, stack)).or_default();
            *match (of_event, waits) {
                (true, _) => &mut count.of_events,
                (false, true) => &mut count.waiting,
                (false, false) => &mut count.on_cpu,
            } += 1;
        }
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, _account: &Report) -> io::Result<()> {
        let host = self.host(profile);
        let ids = self.stack_ids(profile);
        let processes = self.processes(profile, &host);
        let interval_ns = profile.meta.interval_us.clamp(1, LONGEST_INTERVAL_US) * 1000;
        let mut rows: BTreeMap<_, Count> = BTreeMap::new();
        for (&(slice, process, stack), count) in &self.counts {
            // Processes whose labels do not differ are one.
            let (service, labels) = &processes[process as usize];
            let row = rows.entry((service, self.clock.begin_ms(slice), ids[stack as usize], labels)).or_default();
            row.on_cpu += count.on_cpu;
            row.waiting += count.waiting;
            row.of_events += count.of_events;
        }
        let ns = |samples: u64| i64::try_from(samples.saturating_mul(interval_ns)).unwrap_or(i64::MAX);
        let rows = rows.into_iter().map(|((service, slice_start_ms, stack_id, labels), count)| SampleRow {
            service: Arc::clone(service),
            slice_start_ms,
            stack_id,
            labels: Arc::clone(labels),
            host: Arc::clone(&host),
            on_cpu_ns: ns(count.on_cpu),
            waiting_ns: ns(count.waiting),
            samples: i64::try_from(count.on_cpu + count.waiting + count.of_events).unwrap_or(i64::MAX),
        });
        self.segment.samples = rows.collect();
        self.segment.interval_ns = i64::try_from(interval_ns).unwrap_or(i64::MAX);
        self.segment.host = Arc::clone(&host);
        self.segment.name = place::segment_name(&self.stem, &profile.meta.hostname, self.clock.start_ms);
        self.segment.loss = loss(&self.report, self.clock.start_ms, &host);
        Ok(())
    }
}

impl Collector {
    fn host(&self, profile: &Profile) -> Arc<str> {
        let host = profile.meta.hostname.as_str();
        if host.is_empty() { "unknown".into() } else { host.into() }
    }

    /// Names all stacks; returns their ids by number.
    fn stack_ids(&mut self, profile: &Profile) -> Vec<StackId> {
        let build_ids = build_ids(profile);
        let mut frames: HashMap<FrameId, FrameHash> = HashMap::new();
        let mut ids = vec![StackId::default(); self.stacks.len()];
        for (stack, &number) in &self.stacks {
            let mut hashes = Vec::with_capacity(stack.len());
            for &frame in stack.iter() {
                hashes.push(*frames.entry(frame).or_insert_with(|| {
                    let (hash, row) = describe(profile, profile.frames.get(frame), &build_ids);
                    self.segment.frames.insert(row.frame_id, row);
                    hash
                }));
            }
            let id = stack_id(&hashes);
            self.segment.stacks.insert(id, hashes.iter().map(FrameHash::frame_id).collect());
            ids[number as usize] = id;
        }
        ids
    }

    /// Service and labels of each process.
    fn processes(&self, profile: &Profile, host: &str) -> Vec<(Arc<str>, Arc<Labels>)> {
        let described = |(place, process): (usize, &Process)| {
            // An account lists them in the order of the file.
            let of_account = self.report.processes.get(place).filter(|of_account| of_account.pid == process.pid);
            let (labels, service) = Labels::new(labels(process, of_account, self.told), host);
            let service = service.unwrap_or_else(|| if self.told { process.program() } else { self.stem.clone() });
            let service = if service.is_empty() { "unknown".to_owned() } else { service };
            (service.into(), Arc::new(labels))
        };
        profile.processes.iter().enumerate().map(described).collect()
    }
}

/// Labels of a process: the account's, if it has any, otherwise what the file says.
fn labels(process: &Process, of_account: Option<&ProcessReport>, told: bool) -> BTreeMap<String, String> {
    if let Some(of_account) = of_account.filter(|of_account| !of_account.labels.is_empty()) {
        return of_account.labels.clone();
    }
    if !told {
        return BTreeMap::new();
    }
    let names =
        [("pid", process.pid.to_string()), ("comm", process.comm.clone()), ("python", process.python_version.clone())];
    let named = names.into_iter().filter(|(_, value)| !value.is_empty());
    let labels = process.labels().map(|(name, value)| (name.into_owned(), value));
    named.map(|(name, value)| (name.to_owned(), value)).chain(labels).collect()
}

/// Build ids of objects, by their names in frames.
fn build_ids(profile: &Profile) -> HashMap<&str, &str> {
    let objects = profile.native.objects().into_iter().filter(|(_, build_id)| !build_id.is_empty());
    objects.map(|(path, build_id)| (path.rsplit('/').next().unwrap_or(path), build_id)).collect()
}

/// A frame as a row. A function known only by its address is identified by its object's build, too: in another build that
/// address is other code.
fn describe(profile: &Profile, frame: &Frame, build_ids: &HashMap<&str, &str>) -> (FrameHash, FrameRow) {
    let label = FrameLabel::of(profile, frame);
    let object = address_of_name(profile.strings.get(frame.function)).map(|(object, _)| object);
    let build_id = object.and_then(|object| build_ids.get(object).copied());
    let line = (frame.lineno != -1).then_some(frame.lineno);
    let kind = label.kind.name();
    let hash = FrameHash::new(kind, label.function, label.filename, line, build_id);
    let row = FrameRow {
        frame_id: hash.frame_id(),
        function: label.function.into(),
        file: label.filename.into(),
        line,
        kind: kind.into(),
        build_id: build_id.map(Into::into),
    };
    (hash, row)
}

fn loss(report: &Report, slice_start_ms: i64, host: &Arc<str>) -> Vec<LossRow> {
    let waiting =
        report.wall.iter().flat_map(|wall| &wall.loss).map(|(cause, &runs)| (format!("waiting.{cause}"), runs));
    let all = report.loss.iter().map(|(cause, &runs)| (cause.clone(), runs)).chain(waiting);
    let row = |(cause, runs): (String, u64)| {
        let runs = i64::try_from(runs).unwrap_or(i64::MAX);
        LossRow { slice_start_ms, host: Arc::clone(host), cause, runs }
    };
    let mut rows: Vec<LossRow> = all.filter(|&(_, runs)| runs > 0).map(row).collect();
    if report.cut {
        // How many there were is not known.
        rows.push(row((CUT.to_owned(), 0)));
    }
    rows.sort();
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_begin_with_the_recording() {
        for (duration_s, last) in
            [(60.001, 0), (59.9, 0), (89.0, 0), (91.0, 1), (600.4, 9), (0.0, u64::MAX), (f64::NAN, u64::MAX)]
        {
            assert_eq!(last_slice(duration_s, Duration::from_secs(60)), last, "{duration_s}");
        }
        let clock =
            Clock { start_us: 1_000_000, start_ms: 5_000, slice_us: 60_000_000, last_slice: 1, is_undated: false };
        for (time_us, slice) in [(0, 0), (60_999_999, 0), (61_000_000, 1), (u64::MAX, 1)] {
            assert_eq!(clock.slice(time_us), slice, "{time_us}");
        }
        assert_eq!(clock.begin_ms(1), 65_000);
        assert_eq!(clock.begin_ms(u64::MAX), i64::MAX);
    }

    #[test]
    fn samples_of_chosen_events_are_no_time() {
        let mut profile = Profile::default();
        profile.meta.interval_us = 10_000;
        profile.processes.push(tachyon::profile::Process::default());
        profile.threads.push(tachyon::profile::Thread::default());
        let leaf = profile.special_frame("work");
        let root = profile.special_frame(&tachyon::profile::event_root("page-faults"));
        let clock = Clock { slice_us: 60_000_000, ..Clock::default() };
        let mut collector = Collector { clock, ..Collector::default() };
        for frames in [&[leaf][..], &[leaf, root], &[leaf, root]] {
            let thread = tachyon::profile::ThreadId(0);
            let merge = tachyon::profile::Merge::None;
            collector
                .sample(&profile, &Sample { thread, time_us: 5, status: ON_CPU, frames, merge, work: None })
                .unwrap();
        }
        collector.finish(&profile, &Report::default()).unwrap();
        let mut rows: Vec<_> =
            collector.segment.samples.iter().map(|row| (row.samples, row.on_cpu_ns, row.waiting_ns)).collect();
        rows.sort_unstable();
        assert_eq!(rows, [(1, 10_000_000, 0), (2, 0, 0)]);
    }
}
