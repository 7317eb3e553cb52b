//! What tables say, summed up as far as the three questions need it: CPU time by service, version and stack; samples by host; losses. Its
//! size depends on the distinct stacks, not on the rows.

use crate::args::Period;
use crate::columns::{Columns, id, list};
use crate::hash::StackId;
use crate::lake::{Lake, LakeFile};
use crate::place;
use crate::rows::FrameRow;
use crate::tables::Table;
use arrow_array::{Array as _, Int32Array, ListArray, RecordBatch};
use foldhash::fast::RandomState;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// A fast hash map.
pub type Map<K, V> = HashMap<K, V, RandomState>;

/// Service and version.
pub type Release = (Arc<str>, Option<Arc<str>>);

/// The sums.
#[derive(Debug, Default)]
pub struct Facts {
    /// CPU time, nanoseconds.
    pub time: Map<(Release, StackId), i64>,
    /// First slice of each release, milliseconds since 1970.
    pub first_ms: BTreeMap<Release, i64>,
    /// Samples and losses of each host: stored, lost, recovered segments.
    pub hosts: BTreeMap<Arc<str>, [i64; 3]>,
    /// Stacks and frames of what took CPU time.
    pub names: Names,
}

/// Stacks and frames by id.
#[derive(Debug, Default)]
pub struct Names {
    /// Innermost first.
    pub stacks: Map<StackId, Arc<[i64]>>,
    /// By id.
    pub frames: Map<i64, FrameRow>,
}

/// Which parts of the tables are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// CPU time and names.
    pub time: bool,
    /// Hosts and losses.
    pub hosts: bool,
}

/// Sums of one thread.
#[derive(Default)]
struct Sum {
    releases: Vec<Release>,
    first_ms: Vec<i64>,
    time: Map<(u32, StackId), i64>,
    hosts: Map<Arc<str>, [i64; 3]>,
}

impl Sum {
    fn release(&mut self, service: &str, version: Option<&str>, time_ms: i64) -> u32 {
        let is = |(known, of): &Release| &**known == service && of.as_deref() == version;
        // There are only a few, and neighbouring rows have the same.
        let found = self.releases.iter().rposition(is).unwrap_or_else(|| {
            self.releases.push((service.into(), version.map(Into::into)));
            self.first_ms.push(time_ms);
            self.releases.len() - 1
        });
        self.first_ms[found] = self.first_ms[found].min(time_ms);
        u32::try_from(found).expect("releases are counted in 32 bits")
    }

    fn host(&mut self, host: &str) -> &mut [i64; 3] {
        if !self.hosts.contains_key(host) {
            self.hosts.insert(host.into(), [0; 3]);
        }
        self.hosts.get_mut(host).expect("it is there")
    }
}

/// Bounds of a period, in milliseconds since 1970.
#[must_use]
pub fn bounds(period: Period) -> (i64, i64) {
    let ms = |time: SystemTime| place::milliseconds(time.duration_since(UNIX_EPOCH).ok()?.as_secs_f64());
    (period.since.and_then(ms).unwrap_or(i64::MIN), period.until.and_then(ms).unwrap_or(i64::MAX))
}

impl Facts {
    /// Reads tables.
    ///
    /// # Errors
    /// When there is none, or a file is not what this program writes.
    pub fn read(lake: &Lake, period: Period, wanted: Wanted) -> anyhow::Result<Self> {
        let files = lake.files(Table::Samples, period)?;
        lake.expect_some(&files)?;
        let (since, until) = bounds(period);
        let mut columns = vec!["slice_start"];
        if wanted.time {
            columns.extend(["service", "version", "stack_id", "on_cpu_ns"]);
        }
        if wanted.hosts {
            columns.extend(["host", "samples"]);
        }
        let add = |sum: &mut Sum, _: &LakeFile, batch: &RecordBatch| {
            let columns = Columns { batch };
            let times = columns.times("slice_start")?;
            let within = |row: &usize| (since..until).contains(&times[*row]);
            if wanted.hosts {
                let (hosts, samples) = (columns.texts("host")?, columns.numbers("samples")?);
                let mut last: Option<(&str, i64)> = None;
                for row in (0..times.len()).filter(within) {
                    let host = hosts.value(row);
                    match &mut last {
                        Some((of, count)) if *of == host => *count += samples.value(row),
                        _ => {
                            if let Some((of, count)) = last.replace((host, samples.value(row))) {
                                sum.host(of)[0] += count;
                            }
                        }
                    }
                }
                if let Some((of, count)) = last {
                    sum.host(of)[0] += count;
                }
            }
            if wanted.time {
                let (services, versions) = (columns.texts("service")?, columns.texts("version")?);
                let (ids, on_cpu) = (columns.ids("stack_id")?, columns.numbers("on_cpu_ns")?);
                for row in (0..times.len()).filter(within) {
                    let version = versions.is_valid(row).then(|| versions.value(row));
                    let release = sum.release(services.value(row), version, times[row]);
                    let ns = on_cpu.value(row);
                    if ns > 0 {
                        *sum.time.entry((release, id(ids, row)?)).or_default() += ns;
                    }
                }
            }
            Ok(())
        };
        let sums = lake.sums(&files, &columns, add)?;
        let mut facts = Self::default();
        for sum in sums {
            for (release, first_ms) in sum.releases.iter().zip(&sum.first_ms) {
                let known = facts.first_ms.entry(release.clone()).or_insert(i64::MAX);
                *known = (*known).min(*first_ms);
            }
            for ((release, stack), ns) in sum.time {
                *facts.time.entry((sum.releases[release as usize].clone(), stack)).or_default() += ns;
            }
            for (host, [stored, ..]) in sum.hosts {
                facts.hosts.entry(host).or_default()[0] += stored;
            }
        }
        if wanted.hosts {
            facts.losses(lake, period)?;
        }
        if wanted.time {
            let stacks: HashSet<StackId, RandomState> = facts.time.keys().map(|(_, stack)| *stack).collect();
            facts.names = Names::read(lake, period, &stacks, &|_| true)?;
        }
        Ok(facts)
    }

    fn losses(&mut self, lake: &Lake, period: Period) -> anyhow::Result<()> {
        let (since, until) = bounds(period);
        for file in lake.files(Table::Loss, period)? {
            for batch in lake.batches(&file, &["slice_start", "host", "cause", "runs"])? {
                let columns = Columns { batch: &batch };
                let (times, runs) = (columns.times("slice_start")?, columns.numbers("runs")?);
                let (hosts, causes) = (columns.texts("host")?, columns.texts("cause")?);
                for row in (0..times.len()).filter(|row| (since..until).contains(&times[*row])) {
                    let host = hosts.value(row);
                    let of = match self.hosts.get_mut(host) {
                        Some(of) => of,
                        None => self.hosts.entry(host.into()).or_default(),
                    };
                    of[1] += runs.value(row);
                    of[2] += i64::from(causes.value(row) == "cut");
                }
            }
        }
        Ok(())
    }
}

impl Names {
    /// Reads wanted stacks, and their frames, of wanted services.
    ///
    /// # Errors
    /// When a file is not what this program writes.
    pub fn read(
        lake: &Lake,
        period: Period,
        wanted: &HashSet<StackId, RandomState>,
        is_of: &dyn Fn(&LakeFile) -> bool,
    ) -> anyhow::Result<Self> {
        let mut names = Self::default();
        let files = |table| -> anyhow::Result<Vec<LakeFile>> {
            Ok(lake.files(table, period)?.into_iter().filter(|file| is_of(file)).collect())
        };
        let add = |sum: &mut Map<StackId, Arc<[i64]>>, _: &LakeFile, batch: &RecordBatch| {
            let columns = Columns { batch };
            let (ids, lists): (_, &ListArray) = (columns.ids("stack_id")?, columns.get("frame_ids")?);
            for row in 0..batch.num_rows() {
                let stack = id(ids, row)?;
                if wanted.contains(&stack) && !sum.contains_key(&stack) {
                    sum.insert(stack, list(lists, row)?);
                }
            }
            Ok(())
        };
        for sum in lake.sums(&files(Table::Stacks)?, &["stack_id", "frame_ids"], add)? {
            names.stacks.extend(sum);
        }
        let used: HashSet<i64, RandomState> = names.stacks.values().flat_map(|frames| frames.iter().copied()).collect();
        let add = |sum: &mut Map<i64, FrameRow>, _: &LakeFile, batch: &RecordBatch| {
            let columns = Columns { batch };
            let (ids, lines): (_, &Int32Array) = (columns.numbers("frame_id")?, columns.get("line")?);
            let [function, file, kind] = ["function", "file", "type"].map(|name| columns.texts(name));
            let (function, file, kind) = (function?, file?, kind?);
            for row in 0..batch.num_rows() {
                let frame_id = ids.value(row);
                if used.contains(&frame_id) {
                    sum.entry(frame_id).or_insert_with(|| FrameRow {
                        frame_id,
                        function: function.value(row).into(),
                        file: file.value(row).into(),
                        line: lines.is_valid(row).then(|| lines.value(row)),
                        kind: kind.value(row).into(),
                        build_id: None,
                    });
                }
            }
            Ok(())
        };
        let columns = ["frame_id", "function", "file", "line", "type"];
        for sum in lake.sums(&files(Table::Frames)?, &columns, add)? {
            names.frames.extend(sum);
        }
        Ok(names)
    }
}
