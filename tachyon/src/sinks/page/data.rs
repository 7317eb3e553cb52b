//! The block of data: a JSON document, then numbers as in TACH and protobuf (LEB128).

use super::source::Source;
use super::tree::Tree;
use super::{State, merged};
use crate::profile::{Profile, ThreadId};
use crate::report::Report;
use crate::sinks::label::{Kind, thread_name};
use crate::sinks::process_title;
use crate::sinks::spool::{Spool, Spooled};
use crate::sinks::streams::put;
use crate::sinks::text::escape_controls;
use foldhash::fast::RandomState;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

/// Version of the layout.
const VERSION: u32 = 2;
/// Most pieces that the time line is cut into.
const MOST_BUCKETS: u64 = 600;
/// Least samples of a running thread in a piece.
const LEAST_SAMPLES: u64 = 4;

#[derive(Serialize)]
struct Document<'a> {
    version: u32,
    tool: &'static str,
    host: String,
    start_unix: f64,
    seconds: f64,
    interval_us: u64,
    bucket_us: u64,
    buckets: u64,
    strings: &'a [String],
    functions: Functions,
    /// Absent if nodes do not distinguish columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    positions: Option<&'a [(i32, i32)]>,
    /// Absent if no source text was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    source: Option<&'a Source>,
    processes: Vec<ProcessInfo>,
    threads: Vec<ThreadInfo>,
    quality: Quality,
}

/// Functions, as one list per field.
#[derive(Default, Serialize)]
struct Functions {
    kind: Vec<u8>,
    name: Vec<u32>,
    file: Vec<u32>,
    place: Vec<u32>,
    module: Vec<u32>,
}

#[derive(Serialize)]
struct ProcessInfo {
    name: String,
    pid: u32,
    python: String,
    labels: BTreeMap<Cow<'static, str>, String>,
}

#[derive(Serialize)]
struct ThreadInfo {
    name: String,
    process: u32,
}

/// How far the numbers can be trusted.
#[derive(Serialize)]
struct Quality {
    rate_hz: f64,
    event: String,
    cut: bool,
    loss: BTreeMap<String, u64>,
    not_fired: Option<u64>,
    inconsistent: u64,
    stops: BTreeMap<String, u64>,
    merges: BTreeMap<&'static str, u64>,
    notes: Vec<String>,
    refused: Vec<String>,
}

/// Writes it.
pub fn write(
    out: &mut impl Write,
    profile: &Profile,
    report: &Report,
    spool: &Spool,
    tree: &Tree,
    source: Option<&Source>,
    merges: [u64; 4],
) -> io::Result<()> {
    let line = TimeLine::new(profile, spool);
    let document = document(profile, report, (tree, source), &line, merges);
    let json = serde_json::to_vec(&document)?;
    let mut numbers = Vec::new();
    put(&mut numbers, json.len() as u64);
    out.write_all(&numbers)?;
    out.write_all(&json)?;
    numbers.clear();
    put(&mut numbers, tree.nodes.len() as u64);
    for (own, node) in (0_u32..).zip(&tree.nodes) {
        put(&mut numbers, u64::from(own - node.parent));
        put(&mut numbers, u64::from(node.function));
        put(&mut numbers, u64::from(node.line));
        if source.is_some() {
            put(&mut numbers, u64::from(node.position));
        }
        if numbers.len() > 1 << 16 {
            out.write_all(&numbers)?;
            numbers.clear();
        }
    }
    let (ends, stacks) = tree.ends();
    put(&mut numbers, ends.len() as u64);
    let mut last = 0;
    for end in ends {
        put(&mut numbers, u64::from(end - last));
        last = end;
    }
    out.write_all(&numbers)?;
    for thread in spool.threads() {
        let mut group = Group::default();
        spool.read_with(thread.0 as usize, |samples, _| {
            let mut left = samples;
            while left.count > 0 {
                let (bucket, here) = line.first_of(&left);
                if bucket != group.bucket {
                    group.write(out, thread)?;
                    group.bucket = bucket;
                }
                group.add(&stacks, &left, here);
                left.count -= here;
                left.time_us = left.time_us.wrapping_add(left.step_us.wrapping_mul(here));
            }
            Ok(())
        })?;
        group.write(out, thread)?;
    }
    // An empty group ends them.
    out.write_all(&[0])
}

/// Samples of a thread in one piece of the time line.
#[derive(Default)]
struct Group {
    bucket: u64,
    counts: HashMap<(u32, State), u64, RandomState>,
    sorted: Vec<((u32, State), u64)>,
    bytes: Vec<u8>,
}

impl std::hash::Hash for State {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        state.write_u8(*self as u8);
    }
}

impl Group {
    /// `stacks`: the page's stack for each of the profile's.
    fn add(&mut self, stacks: &[u32], sample: &Spooled, count: u64) {
        let stack = stacks[sample.stack.0 as usize];
        *self.counts.entry((stack, State::of(sample.status))).or_default() += count;
    }

    fn write(&mut self, out: &mut impl Write, thread: ThreadId) -> io::Result<()> {
        if self.counts.is_empty() {
            return Ok(());
        }
        self.sorted.extend(self.counts.drain());
        self.sorted.sort_unstable();
        self.bytes.clear();
        put(&mut self.bytes, self.sorted.len() as u64);
        put(&mut self.bytes, u64::from(thread.0));
        put(&mut self.bytes, self.bucket);
        let mut last = 0;
        for ((stack, state), count) in self.sorted.drain(..) {
            put(&mut self.bytes, u64::from(stack - last));
            put(&mut self.bytes, (count - 1) << 2 | state as u64);
            last = stack;
        }
        out.write_all(&self.bytes)
    }
}

/// Pieces of equal length that the recording is cut into.
struct TimeLine {
    start_us: u64,
    bucket_us: u64,
    buckets: u64,
}

impl TimeLine {
    fn new(profile: &Profile, spool: &Spool) -> Self {
        let (first, last) = spool.span().unwrap_or_default();
        let meta = &profile.meta;
        // A header may have no start, or one of another clock.
        let start_us = if (1..=first).contains(&meta.start_us) { meta.start_us } else { first };
        let span = last - start_us;
        let least = (span / MOST_BUCKETS).saturating_add(1).max(meta.interval_us.saturating_mul(LEAST_SAMPLES));
        let bucket_us = round(least);
        Self { start_us, bucket_us, buckets: span / bucket_us + 1 }
    }

    fn bucket(&self, time_us: u64) -> u64 {
        time_us.saturating_sub(self.start_us) / self.bucket_us
    }

    /// The piece that holds the first of the samples, and how many of them in a row it holds.
    fn first_of(&self, samples: &Spooled) -> (u64, u64) {
        let bucket = self.bucket(samples.time_us);
        let end_us = self.start_us.saturating_add(self.bucket_us.saturating_mul(bucket + 1));
        let here = match end_us.saturating_sub(1).saturating_sub(samples.time_us).checked_div(samples.step_us) {
            // A step back shows as one that wraps: take only one sample.
            Some(_) if samples.step_us > i64::MAX as u64 => 1,
            Some(steps) => steps.saturating_add(1),
            None => samples.count,
        };
        (bucket, here.clamp(1, samples.count))
    }
}

/// The next number that is 1, 2 or 5 with zeros.
fn round(least: u64) -> u64 {
    let mut power = 1_u64;
    loop {
        for digit in [1, 2, 5] {
            match power.checked_mul(digit) {
                Some(number) if number >= least => return number,
                Some(_) => {}
                None => return u64::MAX,
            }
        }
        let Some(next) = power.checked_mul(10) else { return u64::MAX };
        power = next;
    }
}

fn document<'a>(
    profile: &Profile,
    report: &Report,
    (tree, source): (&'a Tree, Option<&'a Source>),
    line: &TimeLine,
    merges: [u64; 4],
) -> Document<'a> {
    let shown = |text: &str| escape_controls(text).into_owned();
    let mut functions = Functions::default();
    for function in &tree.functions {
        functions.kind.push(match function.kind {
            Kind::Python => 0,
            Kind::Native => 1,
            Kind::Kernel => 2,
            Kind::Special => 3,
        });
        functions.name.push(function.name);
        functions.file.push(function.file);
        functions.place.push(function.place);
        functions.module.push(function.module);
    }
    let processes = profile.processes.iter().map(|process| ProcessInfo {
        name: shown(&process_title(process)),
        pid: process.pid,
        python: shown(&process.python_version),
        labels: process.labels().map(|(name, text)| (name, shown(&text))).collect(),
    });
    let threads = (0..)
        .map(ThreadId)
        .take(profile.threads.len())
        .map(|id| ThreadInfo { name: shown(&thread_name(profile, id)), process: profile.thread(id).process });
    let nonzero = |counts: &BTreeMap<String, u64>| {
        counts.iter().filter(|(_, count)| **count > 0).map(|(name, &count)| (shown(name), count)).collect()
    };
    Document {
        version: VERSION,
        tool: concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")),
        host: shown(&profile.meta.hostname),
        start_unix: profile.meta.start_unix,
        seconds: report.duration_s,
        interval_us: profile.meta.interval_us.max(1),
        bucket_us: line.bucket_us,
        buckets: line.buckets,
        strings: &tree.strings,
        functions,
        positions: source.map(|_| &tree.positions[..]),
        source,
        processes: processes.collect(),
        threads: threads.collect(),
        quality: Quality {
            rate_hz: report.mean_rate_hz(),
            event: shown(&report.event),
            cut: report.cut,
            loss: nonzero(&report.loss),
            not_fired: report.not_fired,
            inconsistent: report.inconsistent,
            stops: nonzero(&report.stops),
            merges: merged(merges).filter(|(_, count)| *count > 0).collect(),
            notes: report.notes.iter().map(|note| shown(note)).collect(),
            refused: report.refused.iter().map(|refused| shown(refused)).collect(),
        },
    }
}
