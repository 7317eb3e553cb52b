//! Events that are sampled in place of the clock alone (`--event`): perf's own, by perf's names, and tracepoints.

use crate::advice::{Advice, advises};
use perf_event::events::{Cache, CacheId, CacheOp, CacheResult, Hardware, Software};
use perf_event::{Builder, Counter};
use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Where the kernel shows tracepoints, today and before 4.1.
const TRACEFS: [&str; 2] = ["/sys/kernel/tracing/events", "/sys/kernel/debug/tracing/events"];

/// An event to sample, and how often.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChosenEvent {
    name: String,
    source: Source,
    period: NonZeroU32,
}

/// What makes an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The clock that is sampled when no event is chosen, at the requested rate.
    Clock,
    Software(Software),
    Hardware(Hardware),
    Cache(Cache),
    Tracepoint {
        category: String,
        name: String,
    },
}

/// One of perf's events that have a name of their own.
struct Named {
    /// perf's names for it, the usual one first.
    names: &'static [&'static str],
    source: Source,
    /// One of this many is sampled by default.
    period: u32,
    what: &'static str,
}

const fn named(names: &'static [&'static str], source: Source, period: u32, what: &'static str) -> Named {
    Named { names, source, period, what }
}

/// perf's software events (perf-list(1)) that a thread can cause.
static SOFTWARE: [Named; 9] = [
    named(&["cpu-clock"], Source::Clock, 1, "CPU time, at the rate of --frequency"),
    named(&["page-faults", "faults"], Source::Software(Software::PAGE_FAULTS), 1, "pages used for the first time"),
    named(&["minor-faults"], Source::Software(Software::PAGE_FAULTS_MIN), 1, "page faults without a read from a disk"),
    named(&["major-faults"], Source::Software(Software::PAGE_FAULTS_MAJ), 1, "page faults with one"),
    named(&["context-switches", "cs"], Source::Software(Software::CONTEXT_SWITCHES), 1, "the thread left its CPU"),
    named(&["cpu-migrations", "migrations"], Source::Software(Software::CPU_MIGRATIONS), 1, "it went to another CPU"),
    named(&["cgroup-switches"], Source::Software(Software::CGROUP_SWITCHES), 1, "switches between control groups"),
    named(
        &["alignment-faults"],
        Source::Software(Software::ALIGNMENT_FAULTS),
        1,
        "unaligned accesses that the kernel mended",
    ),
    named(&["emulation-faults"], Source::Software(Software::EMULATION_FAULTS), 1, "instructions that it emulated"),
];

/// perf's hardware events.
static HARDWARE: [Named; 10] = [
    named(&["cycles", "cpu-cycles"], Source::Hardware(Hardware::CPU_CYCLES), 10_000_000, "CPU cycles"),
    named(&["instructions"], Source::Hardware(Hardware::INSTRUCTIONS), 10_000_000, "instructions that were retired"),
    named(&["cache-references"], Source::Hardware(Hardware::CACHE_REFERENCES), 100_000, "accesses to the last cache"),
    named(&["cache-misses"], Source::Hardware(Hardware::CACHE_MISSES), 10_000, "those that it could not serve"),
    named(&["branches", "branch-instructions"], Source::Hardware(Hardware::BRANCH_INSTRUCTIONS), 1_000_000, "branches"),
    named(&["branch-misses"], Source::Hardware(Hardware::BRANCH_MISSES), 10_000, "branches that were mispredicted"),
    named(&["bus-cycles"], Source::Hardware(Hardware::BUS_CYCLES), 1_000_000, "cycles of the bus"),
    named(
        &["stalled-cycles-frontend", "idle-cycles-frontend"],
        Source::Hardware(Hardware::STALLED_CYCLES_FRONTEND),
        1_000_000,
        "cycles without an instruction to issue",
    ),
    named(
        &["stalled-cycles-backend", "idle-cycles-backend"],
        Source::Hardware(Hardware::STALLED_CYCLES_BACKEND),
        1_000_000,
        "cycles in which none could retire",
    ),
    named(&["ref-cycles"], Source::Hardware(Hardware::REF_CPU_CYCLES), 10_000_000, "cycles at a constant rate"),
];

/// perf's names of caches and of operations on them; one of each makes a name such as `LLC-load-misses`.
const CACHES: [(&str, CacheId); 7] = [
    ("L1-dcache", CacheId::L1D),
    ("L1-icache", CacheId::L1I),
    ("LLC", CacheId::LL),
    ("dTLB", CacheId::DTLB),
    ("iTLB", CacheId::ITLB),
    ("branch", CacheId::BPU),
    ("node", CacheId::NODE),
];
const ACCESSES: [(&str, CacheOp, CacheResult); 6] = [
    ("loads", CacheOp::READ, CacheResult::ACCESS),
    ("load-misses", CacheOp::READ, CacheResult::MISS),
    ("stores", CacheOp::WRITE, CacheResult::ACCESS),
    ("store-misses", CacheOp::WRITE, CacheResult::MISS),
    ("prefetches", CacheOp::PREFETCH, CacheResult::ACCESS),
    ("prefetch-misses", CacheOp::PREFETCH, CacheResult::MISS),
];
const CACHE_PERIOD: u32 = 100_000;

/// Why there is no such event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EventError {
    /// Neither one of perf's names nor the form of a tracepoint.
    #[error("no event has the name '{0}'")]
    Unknown(String),
    /// Not a valid period.
    #[error("'{0}' is no period: it is a number from 1 to 4294967295")]
    Period(String),
    /// The clock has a rate.
    #[error("cpu-clock has no period")]
    ClockPeriod,
    /// No such tracepoint.
    #[error("this kernel has no tracepoint {0}")]
    NoTracepoint(String),
    /// Tracepoints cannot be read.
    #[error("the kernel's tracepoints cannot be read: {0}")]
    NoTracefs(String),
}

advises!(EventError);

impl Advice for EventError {
    fn hint(&self) -> Option<String> {
        let mend = match self {
            Self::Unknown(_) | Self::NoTracepoint(_) => "`tachyon-bpf record -e list` shows what this machine has",
            Self::Period(_) => "as in -e page-faults:100, which samples every hundredth",
            Self::ClockPeriod => "--frequency says how often it is sampled",
            Self::NoTracefs(_) => {
                "mount tracefs: mount -t tracefs tracefs /sys/kernel/tracing; it takes root to read it"
            }
        };
        Some(mend.to_owned())
    }
}

impl FromStr for ChosenEvent {
    type Err = EventError;

    fn from_str(text: &str) -> Result<Self, EventError> {
        let (name, asked) = split_period(text)?;
        let named = SOFTWARE.iter().chain(&HARDWARE).find(|event| event.names.contains(&name));
        let (source, period) = match named {
            Some(Named { source: Source::Clock, .. }) if asked.is_some() => return Err(EventError::ClockPeriod),
            Some(event) => (event.source.clone(), event.period),
            None => match (cache(name), name.split_once(':')) {
                (Some(cache), _) => (Source::Cache(cache), CACHE_PERIOD),
                (None, Some((category, point))) if is_file_name(category) && is_file_name(point) => {
                    (Source::Tracepoint { category: category.to_owned(), name: point.to_owned() }, 1)
                }
                (None, _) => return Err(EventError::Unknown(name.to_owned())),
            },
        };
        let name = named.map_or(name, |event| event.names[0]);
        let period = asked.or(NonZeroU32::new(period)).unwrap_or(NonZeroU32::MIN);
        Ok(Self { name: name.to_owned(), source, period })
    }
}

/// Splits the period off an event; a tracepoint has a colon of its own.
fn split_period(text: &str) -> Result<(&str, Option<NonZeroU32>), EventError> {
    let Some((name, last)) = text.rsplit_once(':') else { return Ok((text, None)) };
    let is_number = last.bytes().all(|byte| byte.is_ascii_digit());
    // After one of perf's names, only a period can follow.
    if !is_number && !name.contains(':') && !is_perfs(name) {
        return Ok((text, None));
    }
    let period = last.parse().map_err(|_| EventError::Period(last.to_owned()))?;
    Ok((name, Some(period)))
}

fn is_perfs(name: &str) -> bool {
    SOFTWARE.iter().chain(&HARDWARE).any(|event| event.names.contains(&name)) || cache(name).is_some()
}

fn is_file_name(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)) && text != ".."
}

fn cache(name: &str) -> Option<Cache> {
    CACHES.iter().find_map(|&(cache, which)| {
        let access = name.strip_prefix(cache)?.strip_prefix('-')?;
        let &(_, operation, result) = ACCESSES.iter().find(|(name, ..)| *name == access)?;
        Some(Cache { which, operation, result })
    })
}

impl fmt::Display for ChosenEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.period.get() {
            1 => f.write_str(&self.name),
            period => write!(f, "{}:{period}", self.name),
        }
    }
}

impl ChosenEvent {
    /// Its name, without the period.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One of this many is sampled.
    #[must_use]
    pub const fn period(&self) -> u32 {
        self.period.get()
    }

    /// Whether it is the clock.
    #[must_use]
    pub fn is_clock(&self) -> bool {
        self.source == Source::Clock
    }

    pub(super) fn source(&self) -> &Source {
        &self.source
    }

    /// Checks that this machine has it, as far as that can be known before it is sampled.
    ///
    /// # Errors
    /// When it does not.
    pub fn check(&self) -> Result<(), EventError> {
        let Source::Tracepoint { category, name } = &self.source else { return Ok(()) };
        let root = tracefs()?;
        let there = root.join(category).join(name).join("id").exists();
        if there { Ok(()) } else { Err(EventError::NoTracepoint(self.name.clone())) }
    }

    /// The perf event for one CPU; `None`: it is made another way.
    pub(super) fn builder(&self) -> Option<Builder<'static>> {
        let mut builder = match &self.source {
            Source::Clock | Source::Tracepoint { .. } => return None,
            Source::Software(event) => Builder::new(*event),
            Source::Hardware(event) => Builder::new(*event),
            Source::Cache(event) => Builder::new(event.clone()),
        };
        builder.sample_period(u64::from(self.period()));
        Some(builder)
    }
}

/// The directory of tracepoints.
fn tracefs() -> Result<&'static Path, EventError> {
    let mut refused = String::new();
    for path in TRACEFS.map(Path::new) {
        match path.read_dir() {
            Ok(_) => return Ok(path),
            Err(error) => refused = format!("{}: {error}", path.display()),
        }
    }
    Err(EventError::NoTracefs(refused))
}

/// An event of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Other names for it.
    pub also: Vec<&'static str>,
    /// One of this many is sampled by default.
    pub period: u32,
    /// What it counts.
    pub what: &'static str,
}

/// The events of this machine.
#[derive(Debug)]
pub struct Events {
    /// perf's software events.
    pub software: Vec<Listed>,
    /// Its hardware events, caches last; none without a PMU.
    pub hardware: Vec<Listed>,
    /// Tracepoints by category, or why they cannot be read.
    pub tracepoints: Result<Vec<(String, Vec<String>)>, EventError>,
}

/// Finds out which events this machine has, by opening each.
#[must_use]
pub fn events() -> Events {
    let of = |events: &[Named]| events.iter().filter(|event| opens(&event.source)).map(Named::listed).collect();
    let mut hardware: Vec<Listed> = of(&HARDWARE);
    for (cache, which) in CACHES {
        for (access, operation, result) in ACCESSES {
            if opens(&Source::Cache(Cache { which, operation, result })) {
                let what = if result == CacheResult::MISS { "misses" } else { "accesses" };
                hardware.push(Listed {
                    name: format!("{cache}-{access}"),
                    also: Vec::new(),
                    period: CACHE_PERIOD,
                    what,
                });
            }
        }
    }
    Events { software: of(&SOFTWARE), hardware, tracepoints: tracefs().and_then(tracepoints) }
}

impl Named {
    fn listed(&self) -> Listed {
        let also = self.names[1..].to_vec();
        Listed { name: self.names[0].to_owned(), also, period: self.period, what: self.what }
    }
}

fn opens(source: &Source) -> bool {
    let event = ChosenEvent { name: String::new(), source: source.clone(), period: NonZeroU32::MAX };
    let opened: Option<io::Result<Counter>> =
        event.builder().map(|mut builder| builder.any_pid().one_cpu(0).include_kernel().build());
    opened.is_none_or(|counter| counter.is_ok())
}

/// Tracepoints under a directory, by category, both in alphabetical order.
fn tracepoints(root: &Path) -> Result<Vec<(String, Vec<String>)>, EventError> {
    let unreadable = |error: io::Error| EventError::NoTracefs(error.to_string());
    let directories = |path: PathBuf| -> io::Result<Vec<(String, PathBuf)>> {
        let mut found = Vec::new();
        for entry in path.read_dir()? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
            }
        }
        found.sort_unstable();
        Ok(found)
    };
    let mut categories = Vec::new();
    for (category, path) in directories(root.to_owned()).map_err(unreadable)? {
        let points = directories(path).map_err(unreadable)?;
        // `ftrace` has entries that cannot be enabled: those have no number.
        let named = points.into_iter().filter(|(_, path)| path.join("id").exists()).map(|(name, _)| name);
        let points: Vec<String> = named.collect();
        if !points.is_empty() && category != "ftrace" {
            categories.push((category, points));
        }
    }
    Ok(categories)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(String, u32), EventError> {
        text.parse::<ChosenEvent>().map(|event| (event.name().to_owned(), event.period()))
    }

    #[test]
    fn names_are_perfs() {
        let of = |name: &str, period| Ok((name.to_owned(), period));
        assert_eq!(parsed("page-faults"), of("page-faults", 1));
        assert_eq!(parsed("faults:100"), of("page-faults", 100));
        assert_eq!(parsed("cs"), of("context-switches", 1));
        assert_eq!(parsed("cycles"), of("cycles", 10_000_000));
        assert_eq!(parsed("LLC-load-misses:7"), of("LLC-load-misses", 7));
        assert_eq!(parsed("syscalls:sys_enter_openat"), of("syscalls:sys_enter_openat", 1));
        assert_eq!(parsed("block:block_rq_issue:10"), of("block:block_rq_issue", 10));
    }

    #[test]
    fn what_is_no_event_is_told() {
        for name in ["", "pagefaults", "LLC-", "LLC-reads", "../x:y", "sched:..", "a:b:c:4", "sched:"] {
            assert!(parsed(name).is_err(), "{name}");
        }
        assert_eq!(parsed("page-faults:0"), Err(EventError::Period("0".to_owned())));
        assert_eq!(parsed("page-faults:x"), Err(EventError::Period("x".to_owned())));
        assert_eq!(parsed("sched:sched_switch:99999999999"), Err(EventError::Period("99999999999".to_owned())));
        assert_eq!(parsed("cpu-clock:5"), Err(EventError::ClockPeriod));
    }

    #[test]
    fn a_period_of_one_is_not_told() {
        let shown = |text: &str| text.parse::<ChosenEvent>().unwrap().to_string();
        assert_eq!(shown("faults"), "page-faults");
        assert_eq!(shown("sched:sched_switch:10"), "sched:sched_switch:10");
    }
}
