//! Turns tables of many small files, as in a store without batches, into few large ones, with longer slices if wanted.

use crate::args::Period;
use crate::facts::Map;
use crate::lake::{Lake, LakeFile, on_threads};
use crate::load::{Tables, Texts};
use crate::rows::SampleRow;
use crate::segment::Segment;
use crate::tables::{self, Table, TableFile};
use anyhow::{Context as _, anyhow};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Slices of this length are left as they are.
const MINUTE: Duration = Duration::from_secs(60);
const HOUR_MS: i64 = 3_600_000;
/// Most hours that are in memory at a time.
const THREADS: usize = 4;

/// Columns of each table.
fn columns(table: Table) -> &'static [&'static str] {
    match table {
        Table::Samples => &[
            "slice_start",
            "host",
            "service",
            "version",
            "python",
            "script",
            "comm",
            "container",
            "pod",
            "pid",
            "labels",
            "stack_id",
            "on_cpu_ns",
            "waiting_ns",
            "samples",
        ],
        Table::Stacks => &["stack_id", "frame_ids"],
        Table::Frames => &["frame_id", "function", "file", "line", "type", "build_id"],
        Table::Loss => &["slice_start", "host", "cause", "runs"],
    }
}

/// Rewrites the tables of a place: one file per table, hour and service, some hours at a time. Returns how many samples there are.
///
/// # Errors
/// When a file cannot be read, or `write` fails.
pub fn compact(
    lake: &Lake,
    slice: Duration,
    write: impl FnMut(TableFile) -> anyhow::Result<()> + Send,
) -> anyhow::Result<u64> {
    let mut hours: BTreeMap<String, Vec<(Table, LakeFile)>> = BTreeMap::new();
    for table in Table::ALL {
        for file in lake.files(table, Period::default())? {
            // Files that become one slice are read together.
            hours.entry(part(&file.hour, slice)).or_default().push((table, file));
        }
    }
    let (hours, write) = (Mutex::new(hours), Mutex::new(write));
    let work = || -> anyhow::Result<u64> {
        let mut samples = 0;
        while let Some((hour, files)) = next(&hours) {
            let made = joined(lake, slice, &hour, &files).and_then(|segment| {
                samples += segment.samples.iter().map(|row| row.samples.unsigned_abs()).sum::<u64>();
                let files = tables::files(&segment)?;
                let mut write = write.lock().map_err(|_| anyhow!("a thread that wrote tables failed"))?;
                files.into_iter().try_for_each(&mut *write)
            });
            if made.is_err() {
                // The others need not go on.
                hours.lock().map(|mut hours| hours.clear()).ok();
            }
            made?;
        }
        Ok(samples)
    };
    Ok(on_threads(THREADS, work)?.into_iter().sum())
}

fn next<T>(hours: &Mutex<BTreeMap<String, T>>) -> Option<(String, T)> {
    hours.lock().ok()?.pop_first()
}

/// The rows of an hour, or of several hours that form one slice.
fn joined(lake: &Lake, slice: Duration, hour: &str, files: &[(Table, LakeFile)]) -> anyhow::Result<Segment> {
    let (mut tables, mut texts) = (Tables::default(), Texts::default());
    for (table, file) in files {
        for batch in lake.batches(file, columns(*table))? {
            tables.add(*table, &batch, &mut texts).with_context(|| format!("cannot read {}", file.path))?;
        }
    }
    Ok(segment(tables, hour, slice))
}

/// The hours of a slice.
fn part(hour: &str, slice: Duration) -> String {
    let hours = slice.as_secs() / 3600;
    let number: u64 = hour[11..].parse().unwrap_or(0);
    format!("{}T{:02}", &hour[..10], if hours > 1 { number / hours * hours } else { number })
}

fn segment(tables: Tables, hour: &str, slice: Duration) -> Segment {
    let slice_ms = i64::try_from(slice.as_millis()).unwrap_or(i64::MAX);
    let begin = |ms: i64| if slice > MINUTE { ms.div_euclid(slice_ms) * slice_ms } else { ms };
    let mut sums: Map<SampleRow, [i64; 3]> = Map::default();
    for row in tables.samples {
        let added = [row.on_cpu_ns, row.waiting_ns, row.samples];
        let key =
            SampleRow { slice_start_ms: begin(row.slice_start_ms), on_cpu_ns: 0, waiting_ns: 0, samples: 0, ..row };
        let sum = sums.entry(key).or_default();
        *sum = [sum[0] + added[0], sum[1] + added[1], sum[2] + added[2]];
    }
    let mut samples: Vec<SampleRow> = sums
        .into_iter()
        .map(|(row, [on_cpu_ns, waiting_ns, samples])| SampleRow { on_cpu_ns, waiting_ns, samples, ..row })
        .collect();
    samples.sort();
    let mut loss = tables.loss;
    loss.iter_mut().for_each(|row| row.slice_start_ms = begin(row.slice_start_ms));
    loss.sort();
    let start_ms = loss.iter().map(|row| row.slice_start_ms).chain(samples.iter().map(|row| row.slice_start_ms)).min();
    Segment {
        // In the form of a segment's name: for all hosts, with the hour's start.
        name: format!("all-{}0000Z-000000", hour.replace('-', "")),
        start_ms: start_ms.unwrap_or(0).max(0) / HOUR_MS * HOUR_MS,
        slice_ms,
        host: Arc::from("all"),
        samples,
        stacks: tables.stacks,
        frames: tables.frames,
        loss,
        ..Segment::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hours_of_one_slice_are_read_together() {
        let of = |hours: u64| part("2026-11-22T19", Duration::from_secs(3600 * hours));
        assert_eq!([of(0), of(1), of(6), of(24)], ["2026-11-22T19", "2026-11-22T19", "2026-11-22T18", "2026-11-22T00"]);
    }
}
