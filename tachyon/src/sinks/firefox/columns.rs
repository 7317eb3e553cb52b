//! The tables of samples and markers of one thread, column by column: each is made by reading the temporary file again,
//! so memory does not grow with the number of samples.

use crate::profile::ThreadId;
use crate::sinks::spool::{Spool, Spooled};
use crate::sinks::stacks::{StackId, gil_held};
use crate::sinks::streams::{Streams, damaged, get as get_varint, put as put_varint};
use foldhash::fast::RandomState;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

/// How times are expressed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock {
    /// Where the time line starts.
    pub start_us: u64,
    /// Microseconds between samples.
    pub interval_us: u64,
}

/// What the samples of all threads contain, found in one pass over each thread's.
pub(super) struct Told {
    clock: Clock,
    /// By thread: its distinct stacks, in order of first use.
    stacks: Vec<Vec<StackId>>,
    /// By thread: its markers.
    runs: Streams,
}

impl Told {
    pub fn new(clock: Clock) -> Self {
        Self { clock, stacks: Vec::new(), runs: Streams::default() }
    }

    /// The distinct stacks of a thread.
    pub fn stacks(&self, thread: ThreadId) -> &[StackId] {
        self.stacks.get(thread.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Reads a thread's samples. Returns the kinds of markers it has, in order of first use.
    pub fn read(&mut self, spool: &Spool, thread: ThreadId) -> io::Result<Vec<bool>> {
        let place = thread.0 as usize;
        if place >= self.stacks.len() {
            self.stacks.resize_with(place + 1, Vec::new);
        }
        let Self { clock, stacks, runs } = self;
        let mut seen = HashSet::<StackId, RandomState>::default();
        let (mut last, mut kinds) = (None, Vec::new());
        let (mut joined, mut last_us) = (GilRuns::default(), 0);
        let mut put_run = |run: &Run| {
            runs.push(place, |out| {
                // Wraps, like times that step back.
                put_varint(out, run.start_us.wrapping_sub(std::mem::replace(&mut last_us, run.start_us)));
                put_varint(out, run.end_us.wrapping_sub(run.start_us));
                put_varint(out, u64::from(run.samples) << 1 | u64::from(run.held));
            })
        };
        spool.read(place, |sample| {
            if last.replace(sample.stack) != Some(sample.stack) && seen.insert(sample.stack) {
                stacks[place].push(sample.stack);
            }
            let held = gil_held(sample.status);
            if let Some(held) = held
                && !kinds.contains(&held)
            {
                kinds.push(held);
            }
            joined.sample(held, sample.time_us, clock.interval_us).as_ref().map_or(Ok(()), &mut put_run)
        })?;
        joined.end().as_ref().map_or(Ok(()), put_run)?;
        Ok(kinds)
    }
}

/// What the encoder made of a thread's stacks and markers.
pub(super) struct Columns<'a> {
    spool: &'a Spool,
    told: &'a Told,
    thread: ThreadId,
    /// Index in the thread's table of stacks, as it is written.
    stacks: HashMap<StackId, Box<str>, RandomState>,
    /// Index of a marker's name, for the GIL not held and held.
    names: [Option<u64>; 2],
    /// Index of a marker's category.
    category: u64,
}

impl<'a> Columns<'a> {
    /// `samples` has one for each distinct stack, `markers` one for each kind that occurs, with the kind in its data.
    /// `None`: they do not.
    pub fn new(spool: &'a Spool, told: &'a Told, samples: &Option<Value>, markers: &Option<Value>) -> Option<Self> {
        let (samples, markers) = (samples.as_ref()?, markers.as_ref()?);
        let thread = ThreadId(u32::try_from(samples["weight"][0].as_u64()?).ok()?);
        let (distinct, encoded) = (told.stacks(thread), samples["stack"].as_array()?);
        if distinct.len() != encoded.len() {
            return None;
        }
        let texts = encoded.iter().map(|index| index.to_string().into_boxed_str());
        let stacks = distinct.iter().copied().zip(texts).collect();
        let mut names = [None; 2];
        for (name, data) in markers["name"].as_array()?.iter().zip(markers["data"].as_array()?) {
            names[usize::from(data["samples"].as_f64()? > 0.0)] = Some(name.as_u64()?);
        }
        let category = markers["category"][0].as_u64().unwrap_or(0);
        Some(Self { spool, told, thread, stacks, names, category })
    }

    /// Writes both members.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let Clock { start_us, interval_us } = self.told.clock;
        let mut count = 0_u64;
        out.write_all(b"\"samples\":{\"weightType\":\"samples\",\"stack\":[")?;
        let mut list = List::default();
        self.read(|sample| {
            count += 1;
            list.next(out)?;
            let index = self.stacks.get(&sample.stack).ok_or_else(super::changed)?;
            out.write_all(index.as_bytes())
        })?;
        out.write_all(b"],\"timeDeltas\":[")?;
        let (mut list, mut last_us) = (List::default(), start_us);
        self.read(|sample| {
            list.next(out)?;
            // Time steps back only in files from other programs; the viewer cannot handle that.
            let now_us = sample.time_us.max(last_us);
            put_ms(out, now_us - last_us)?;
            last_us = now_us;
            Ok(())
        })?;
        out.write_all(b"],\"weight\":[")?;
        repeat(out, "1", count)?;
        out.write_all(b"],\"threadCPUDelta\":[")?;
        repeat(out, &interval_us.to_string(), count)?;
        write!(out, "],\"length\":{count}}},\"markers\":{{\"data\":[")?;

        let mut count = 0;
        self.run_column(out, |out, run| {
            count += 1;
            out.write_all(b"{\"type\":\"GIL\",\"samples\":")?;
            put(out, u64::from(run.samples))?;
            out.write_all(b".0}")
        })?;
        out.write_all(b"],\"startTime\":[")?;
        self.run_column(out, |out, run| put_ms(out, run.start_us.saturating_sub(start_us)))?;
        out.write_all(b"],\"endTime\":[")?;
        self.run_column(out, |out, run| put_ms(out, run.end_us.saturating_sub(start_us)))?;
        out.write_all(b"],\"name\":[")?;
        self.run_column(out, |out, run| put(out, self.names[usize::from(run.held)].ok_or_else(super::changed)?))?;
        out.write_all(b"],\"phase\":[")?;
        repeat(out, "1", count)?;
        out.write_all(b"],\"category\":[")?;
        repeat(out, &self.category.to_string(), count)?;
        write!(out, "],\"length\":{count}}}")
    }

    fn read(&self, take: impl FnMut(Spooled) -> io::Result<()>) -> io::Result<()> {
        self.spool.read(self.thread.0 as usize, take)
    }

    /// Writes one value for each run.
    fn run_column<W: Write>(
        &self,
        out: &mut W,
        mut put_entry: impl FnMut(&mut W, Run) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut list = List::default();
        self.runs(|run| {
            list.next(out)?;
            put_entry(out, run)
        })
    }

    fn runs(&self, mut take: impl FnMut(Run) -> io::Result<()>) -> io::Result<()> {
        let mut last_us = 0_u64;
        self.told.runs.read(self.thread.0 as usize, |bytes| {
            last_us = last_us.wrapping_add(get_varint(bytes)?);
            let end_us = last_us.wrapping_add(get_varint(bytes)?);
            let packed = get_varint(bytes)?;
            let samples = u32::try_from(packed >> 1).map_err(|_| damaged())?;
            take(Run { held: packed & 1 != 0, start_us: last_us, end_us, samples })
        })
    }
}

/// Commas between entries.
#[derive(Default)]
struct List {
    begun: bool,
}

impl List {
    fn next(&mut self, out: &mut impl Write) -> io::Result<()> {
        if std::mem::replace(&mut self.begun, true) { out.write_all(b",") } else { Ok(()) }
    }
}

fn repeat(out: &mut impl Write, text: &str, count: u64) -> io::Result<()> {
    /// How many entries are written at once.
    const MANY: u64 = 4096;
    let Some(mut left) = count.checked_sub(1) else { return Ok(()) };
    out.write_all(text.as_bytes())?;
    let many = format!(",{text}").repeat(usize::try_from(left.min(MANY)).expect("at most MANY"));
    let one = text.len() + 1;
    while left > 0 {
        let now = left.min(MANY);
        out.write_all(&many.as_bytes()[..one * usize::try_from(now).expect("at most MANY")])?;
        left -= now;
    }
    Ok(())
}

fn put(out: &mut impl Write, number: u64) -> io::Result<()> {
    out.write_all(itoa::Buffer::new().format(number).as_bytes())
}

/// Microseconds as milliseconds.
fn put_ms(out: &mut impl Write, time_us: u64) -> io::Result<()> {
    put(out, time_us / 1000)?;
    let rest = time_us % 1000;
    let digit = |value: u64| b'0' + u8::try_from(value % 10).expect("a digit fits a byte");
    let digits = [b'.', digit(rest / 100), digit(rest / 10), digit(rest)];
    let len = digits.iter().rposition(|&digit| digit != b'0').unwrap_or(0);
    if len == 0 { Ok(()) } else { out.write_all(&digits[..=len]) }
}

/// Consecutive samples of a thread in one state.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Run {
    held: bool,
    start_us: u64,
    end_us: u64,
    samples: u32,
}

/// Joins samples to runs.
#[derive(Debug, Default)]
struct GilRuns {
    run: Option<Run>,
}

impl GilRuns {
    /// Takes a sample; returns the run that it ended. A thread that was not sampled for two intervals did not run.
    fn sample(&mut self, held: Option<bool>, time_us: u64, interval_us: u64) -> Option<Run> {
        let end_us = time_us.saturating_add(interval_us);
        if let (Some(run), Some(held)) = (&mut self.run, held)
            && run.held == held
            && time_us <= run.end_us.saturating_add(interval_us)
        {
            run.end_us = run.end_us.max(end_us);
            run.samples = run.samples.saturating_add(1);
            return None;
        }
        let new = held.map(|held| Run { held, start_us: time_us, end_us, samples: 1 });
        // It lasts until the next one's start at most.
        std::mem::replace(&mut self.run, new)
            .map(|run| Run { end_us: run.end_us.min(time_us.max(run.start_us)), ..run })
    }

    fn end(self) -> Option<Run> {
        self.run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_entries() {
        for count in [0, 1, 2, 4096, 4097, 4098, 10_000] {
            let mut out = Vec::new();
            repeat(&mut out, "17", count).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), vec!["17"; usize::try_from(count).unwrap()].join(","));
        }
    }

    #[test]
    fn milliseconds() {
        for (time_us, text) in
            [(0, "0"), (5, "0.005"), (120, "0.12"), (1000, "1"), (12_345, "12.345"), (10_100, "10.1")]
        {
            let mut out = Vec::new();
            put_ms(&mut out, time_us).unwrap();
            assert_eq!(String::from_utf8(out).unwrap(), text);
        }
    }
}
