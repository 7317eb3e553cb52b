//! One profile for each process of a recording (`--split process`).
//!
//! Samples wait in one temporary file until the recording ends; then the processes' files are written one after the
//! other, so hundreds of processes need no more open files or memory than one. Meanwhile everything also goes to one
//! TACH file with its journal, from which a recording that is cut can be recovered.

use super::Sink;
use super::spool::{packed, unpacked};
use super::streams::{Streams, array, damaged, get, get_u32, put};
use crate::profile::{FrameId, Profile, Sample, ThreadId, WorkId};
use crate::report::{ProcessReport, Report};
use std::collections::HashMap;
use std::fs::File;
use std::io;

/// Makes the files.
pub trait ProcessFiles {
    /// Opens the file of a process, the only one of the profile. `lost_percent` is what its file reports as lost: which
    /// process a lost sample would have belonged to is unknown, so it is the whole recording's share.
    ///
    /// # Errors
    /// When it cannot be opened.
    fn open(&mut self, process: &Profile, lost_percent: Option<f64>) -> io::Result<Box<dyn Sink + Send>>;

    /// The sink has finished the file and has been dropped.
    ///
    /// # Errors
    /// When the file cannot be given its name.
    fn close(&mut self) -> io::Result<()>;

    /// Whether they record whose work samples were ([`Sink::tells_work`]).
    fn tell_work(&self) -> bool {
        false
    }

    /// Whether the directory of the files was removed, and they with it.
    fn are_gone(&self) -> bool;
}

/// Writes a file for each process. Memory grows with the number of processes and of distinct frames.
pub struct SplitSink<F> {
    /// The whole recording, until the files exist.
    whole: Box<dyn Sink + Send>,
    streams: Streams,
    /// By process: the last sample's time and stack, relative to which the next one is stored.
    last: Vec<(u64, Vec<FrameId>)>,
    files: F,
}

impl<F: ProcessFiles> SplitSink<F> {
    /// `whole` takes all samples too, and is finished only if the files are gone; `spool` is an empty file without a name.
    pub fn new(whole: Box<dyn Sink + Send>, spool: File, files: F) -> Self {
        Self { whole, streams: Streams::in_file(spool), last: Vec::new(), files }
    }

    /// Gives the samples of a process to `take`, in order of arrival.
    fn read(&self, process: usize, mut take: impl FnMut(&Sample<'_>) -> io::Result<()>) -> io::Result<()> {
        let mut time_us = 0_u64;
        // Outermost first, because stacks change at the other end.
        let mut stack: Vec<FrameId> = Vec::new();
        let mut frames = Vec::new();
        self.streams.read(process, |bytes| {
            let thread = ThreadId(get_u32(bytes)?);
            time_us = time_us.wrapping_add(get(bytes)?);
            let [byte] = array(bytes)?;
            let (status, merge) = unpacked(byte);
            let work = WorkId::from_number(get(bytes)?);
            let (shared, new) = (get_u32(bytes)? as usize, get_u32(bytes)?);
            if shared > stack.len() {
                return Err(damaged());
            }
            stack.truncate(shared);
            for _ in 0..new {
                stack.push(FrameId(get_u32(bytes)?));
            }
            frames.clear();
            frames.extend(stack.iter().rev());
            take(&Sample { thread, time_us, status, frames: &frames, merge, work })
        })
    }
}

impl<F: ProcessFiles> Sink for SplitSink<F> {
    fn streams(&self) -> bool {
        true
    }

    fn tells_work(&self) -> bool {
        self.files.tell_work()
    }

    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.whole.sample(profile, sample)?;
        let process = profile.thread(sample.thread).process as usize;
        if process >= self.last.len() {
            self.last.resize_with(process + 1, Default::default);
        }
        let (last_us, last) = &mut self.last[process];
        let (old, new) = (last.iter().rev(), sample.frames.iter().rev());
        let shared = old.zip(new).take_while(|(old, new)| old == new).count();
        self.streams.push(process, |out| {
            put(out, u64::from(sample.thread.0));
            put(out, sample.time_us.wrapping_sub(*last_us));
            out.push(packed(sample));
            put(out, sample.work.map_or(0, WorkId::number));
            put(out, shared as u64);
            let pushed = sample.frames.len() - shared;
            put(out, pushed as u64);
            for frame in sample.frames[..pushed].iter().rev() {
                put(out, u64::from(frame.0));
            }
        })?;
        *last_us = sample.time_us;
        last.clear();
        last.extend_from_slice(sample.frames);
        Ok(())
    }

    fn limit(&mut self, memory_bytes: u64) {
        self.whole.limit(memory_bytes);
    }

    /// The whole's file, and then the processes' one after the other, none of which is larger.
    fn finish_bytes(&self, profile: &Profile) -> u64 {
        self.whole.finish_bytes(profile).saturating_mul(2)
    }

    fn tick(&mut self, profile: &Profile) -> io::Result<()> {
        self.whole.tick(profile)
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        // If a file fails, everything is in the whole one.
        self.whole.tick(profile)?;
        if !self.files.are_gone() {
            let written = self.write_files(profile, report);
            if !self.files.are_gone() {
                return written;
            }
        }
        self.whole.finish(profile, report)
    }
}

impl<F: ProcessFiles> SplitSink<F> {
    fn write_files(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let lost: u64 = report.loss.values().sum();
        let lost_percent = super::tach::percent(lost, report.stored + lost);
        let mut view = Profile {
            strings: profile.strings.clone(),
            frames: profile.frames.clone(),
            native: profile.native.clone(),
            works: profile.works.clone(),
            ..Profile::default()
        };
        let mut threads = Threads::new(profile);
        // Each of thousands of processes gets a copy, without what concerns the others.
        let common = Report {
            stops: std::collections::BTreeMap::new(),
            refused: Vec::new(),
            processes: Vec::new(),
            ..report.clone()
        };
        for process in 0..profile.processes.len() {
            threads.show(profile, process, &mut view);
            let mut sink = self.files.open(&view, lost_percent)?;
            let mut stored = 0;
            self.read(process, |sample| {
                let thread = *threads.local.get(&sample.thread).ok_or_else(damaged)?;
                stored += 1;
                sink.sample(&view, &Sample { thread, ..*sample })
            })?;
            let own = report.processes.get(process);
            sink.finish(&view, &of_process(&common, own, stored, profile.meta.gil_only))?;
            drop(sink);
            self.files.close()?;
        }
        Ok(())
    }
}

/// Which threads a process has.
struct Threads {
    of_process: Vec<Vec<ThreadId>>,
    /// The handles of the process at hand, by those of the whole profile.
    local: HashMap<ThreadId, ThreadId>,
}

impl Threads {
    fn new(profile: &Profile) -> Self {
        let mut of_process = vec![Vec::new(); profile.processes.len()];
        for (id, thread) in (0..).map(ThreadId).zip(&profile.threads) {
            of_process[thread.process as usize].push(id);
        }
        Self { of_process, local: HashMap::new() }
    }

    /// Makes `view` the profile of one process.
    fn show(&mut self, profile: &Profile, process: usize, view: &mut Profile) {
        view.processes = vec![profile.processes[process].clone()];
        view.meta = profile.meta.clone();
        view.meta.many_processes = false;
        view.meta.python_version = version(&view.processes[0].python_version).unwrap_or_default();
        let threads = &self.of_process[process];
        view.threads = threads.iter().map(|&id| profile.thread(id).clone()).collect();
        view.threads.iter_mut().for_each(|thread| thread.process = 0);
        self.local = threads.iter().copied().zip((0..).map(ThreadId)).collect();
    }
}

/// Major, minor and micro of a version such as `3.13.0` or `3.15.0rc2`.
fn version(text: &str) -> Option<(u8, u8, u8)> {
    let mut parts = text.splitn(3, '.');
    let mut number = || {
        let part = parts.next()?;
        part[..part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len())].parse().ok()
    };
    Some((number()?, number()?, number()?))
}

/// The account as for a recording of this process alone: runs that met the others count as filtered. Lost samples stay
/// the whole recording's, and why stacks ended is not known per process.
fn of_process(report: &Report, process: Option<&ProcessReport>, stored: u64, gil_only: bool) -> Report {
    let expected =
        process.and_then(|process| process.cpu_s).map(|cpu_s| (cpu_s * report.mean_rate_hz()).round() as u64);
    Report {
        stored,
        filtered: report.filtered + report.stored.saturating_sub(stored),
        expected,
        // Firings that did not find the GIL held cannot be distinguished from those that never happened.
        not_fired: expected.filter(|_| !gil_only).map(|expected| expected.saturating_sub(stored)),
        processes: process.cloned().into_iter().collect(),
        ..report.clone()
    }
}
