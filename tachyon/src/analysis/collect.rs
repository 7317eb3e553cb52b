//! Collects samples into an [`Aggregate`].

use super::aggregate::{Aggregate, Entry, Place, PlaceId, Recording, ThreadInfo};
use crate::profile::{FrameId, Profile, Sample, TASK_WAIT, ThreadId};
use crate::report::Report;
use crate::sinks::label::{Label, thread_name};
use crate::sinks::stacks::{Stacks, gil_held};
use crate::sinks::{Sink, process_frame_name};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::io;
use tachyon_common::event::status;

/// Most blocks of time that one recording is cut into: beyond that, pairs are merged.
const MAX_BLOCKS: u64 = 128;
/// The first length of a block: 128 of them are half a minute.
const FIRST_BLOCK_US: u64 = 250_000;

/// What samples that are counted together have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Key {
    thread: u32,
    stack: u32,
    block: u16,
    gil: Option<bool>,
    on_cpu: bool,
}

/// Takes one recording and adds it to an aggregate at its end. It is a [`Sink`], so that whatever feeds a file's sink
/// can feed it.
#[derive(Debug)]
pub struct Collector<'a> {
    into: &'a mut Aggregate,
    stacks: Stacks,
    counts: HashMap<Key, u64, RandomState>,
    buffer: Vec<FrameId>,
    origin_us: Option<u64>,
    last_us: u64,
    block_us: u64,
    event: Option<String>,
}

impl<'a> Collector<'a> {
    /// Adds samples to `into`. Concurrent waits of asyncio tasks are set aside, since they are not part of any thread's time.
    pub fn new(into: &'a mut Aggregate) -> Self {
        Self {
            into,
            event: None,
            stacks: Stacks::default(),
            counts: HashMap::default(),
            buffer: Vec::new(),
            origin_us: None,
            last_us: 0,
            block_us: FIRST_BLOCK_US,
        }
    }

    /// The same with the samples of one event only, by its name.
    #[must_use]
    pub fn only(self, event: Option<&str>) -> Self {
        Self { event: event.map(str::to_owned), ..self }
    }

    /// Whether samples of an event are taken.
    fn takes(&self, event: Option<&str>) -> bool {
        match &self.event {
            Some(wanted) => event == Some(wanted),
            None => event != Some(TASK_WAIT),
        }
    }

    /// The block that a moment lies in.
    fn block(&mut self, time_us: u64, start_us: u64) -> u16 {
        // A header may have no start, or one of another clock.
        let origin = *self.origin_us.get_or_insert(if (1..=time_us).contains(&start_us) { start_us } else { time_us });
        self.last_us = self.last_us.max(time_us);
        let since = time_us.saturating_sub(origin);
        let mut halvings = 0;
        while since / self.block_us >= MAX_BLOCKS {
            self.block_us *= 2;
            halvings += 1;
        }
        if halvings > 0 {
            let counts = std::mem::take(&mut self.counts);
            for (key, count) in counts {
                let block = u16::try_from(u32::from(key.block) >> halvings).unwrap_or(0);
                *self.counts.entry(Key { block, ..key }).or_default() += count;
            }
        }
        u16::try_from(since / self.block_us).expect("there are at most 128 blocks")
    }

    fn places(&mut self, profile: &Profile) -> Vec<PlaceId> {
        let frames = profile.frames.iter();
        let mut place = |frame| {
            let Label { kind, function, filename, line } = Label::of(profile, frame);
            let (function, file) = (self.into.text(function), self.into.text(filename));
            self.into.intern_place(Place { kind, function, file, line })
        };
        frames.map(&mut place).collect()
    }

    fn thread(&mut self, profile: &Profile, id: ThreadId) -> u32 {
        let process = profile.process_of(id);
        let script = crate::profile::script(&process.cmdline);
        let name = if process.pid == 0 { process.comm.clone() } else { process_frame_name(process) };
        let thread = ThreadInfo { pid: process.pid, process: name, script, thread: thread_name(profile, id) };
        self.into.intern_thread(thread)
    }
}

impl Sink for Collector<'_> {
    fn sample(&mut self, profile: &Profile, sample: &Sample<'_>) -> io::Result<()> {
        self.repeated(profile, sample, &[sample.time_us])
    }

    fn repeated(&mut self, profile: &Profile, sample: &Sample<'_>, times_us: &[u64]) -> io::Result<()> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let stack = self.stacks.intern(profile.shown_stack(sample.frames, &mut buffer)).0;
        self.buffer = buffer;
        let on_cpu = u32::from(sample.status) & status::ON_CPU != 0;
        let of_block = |block| Key { thread: sample.thread.0, stack, block, gil: gil_held(sample.status), on_cpu };
        let (mut rest, start_us) = (times_us, profile.meta.start_us);
        while let Some(&time_us) = rest.first() {
            let block = self.block(time_us, start_us);
            // As long as they lie in it the length of a block does not change.
            let same = |&&other: &&u64| {
                let since = other.saturating_sub(self.origin_us.unwrap_or(other));
                since / self.block_us == u64::from(block)
            };
            let here = rest.iter().take_while(same).count().max(1);
            self.last_us = self.last_us.max(rest[..here].iter().copied().max().unwrap_or(0));
            *self.counts.entry(of_block(block)).or_default() += here as u64;
            rest = &rest[here..];
        }
        Ok(())
    }

    fn finish(&mut self, profile: &Profile, report: &Report) -> io::Result<()> {
        let interval_us = profile.meta.interval_us.max(1);
        let lasted_us = self.last_us.saturating_sub(self.origin_us.unwrap_or(self.last_us));
        let seconds = if report.duration_s > 0.0 { report.duration_s } else { (lasted_us + interval_us) as f64 / 1e6 };
        // This profiler's reports count runs; those of other programs say nothing about losses.
        let told = report.ran > 0 && !report.cut;
        let mut counts: Vec<_> = std::mem::take(&mut self.counts).into_iter().collect();
        let events: Vec<Option<&str>> =
            self.stacks.iter().map(|stack| profile.event_of(stack).map(|(name, _)| name)).collect();
        counts.retain(|(Key { stack, .. }, count)| {
            let event = events[*stack as usize];
            let taken = self.takes(event);
            if let Some(event) = event.filter(|_| !taken) {
                self.into.leave_aside(event, *count, interval_us);
            }
            taken
        });
        counts.sort_unstable();
        let recording = self.into.push_recording(Recording {
            host: profile.meta.hostname.clone(),
            samples: counts.iter().map(|(_, count)| count).sum(),
            seconds,
            interval_us,
            lost: told.then(|| report.loss.values().sum()),
            block_us: self.block_us,
        });
        let places = self.places(profile);
        let stacks: Vec<u32> = std::mem::take(&mut self.stacks)
            .iter()
            .map(|stack| {
                let stack: Vec<PlaceId> = stack.iter().map(|frame| places[frame.0 as usize]).collect();
                self.into.intern_stack(&stack)
            })
            .collect();
        let threads: Vec<u32> =
            (0..).map(ThreadId).take(profile.threads.len()).map(|id| self.thread(profile, id)).collect();
        for (Key { thread, stack, block, gil, on_cpu }, count) in counts {
            let (thread, stack) = (threads[thread as usize], stacks[stack as usize]);
            self.into.push_entry(Entry { recording, thread, stack, block, gil, on_cpu }, count);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{Frame, Merge, Process, Thread, event_root};

    #[test]
    fn waiting_tasks_are_left_aside_unless_asked_for() {
        let mut profile = Profile::default();
        profile.meta.interval_us = 10_000;
        profile.processes.push(Process::default());
        profile.threads.push(Thread::default());
        let (faults, tasks) =
            (profile.special_frame(&event_root("page-faults")), profile.special_frame(&event_root(TASK_WAIT)));
        let leaf = profile.special_frame("leaf");
        let collect = |event| {
            let mut aggregate = Aggregate::default();
            let mut collector = Collector::new(&mut aggregate).only(event);
            for (frames, count) in [(&[leaf][..], 3), (&[leaf, faults], 5), (&[leaf, tasks], 7)] {
                let (thread, merge) = (ThreadId(0), Merge::None);
                let sample = Sample { thread, time_us: 1, status: 0, frames, merge, work: None };
                collector.repeated(&profile, &sample, &vec![1; count]).unwrap();
            }
            collector.finish(&profile, &Report::default()).unwrap();
            let aside = aggregate.left_aside().clone();
            (
                aggregate.samples(),
                aside.into_iter().map(|(event, sum)| (event, sum.samples, sum.us)).collect::<Vec<_>>(),
            )
        };
        let told = |event: &str, samples| (event.to_owned(), samples, samples * 10_000);
        assert_eq!(collect(None), (8, vec![told(TASK_WAIT, 7)]));
        assert_eq!(collect(Some(TASK_WAIT)), (7, vec![told("page-faults", 5)]));
        assert_eq!(collect(Some("page-faults")), (5, vec![told(TASK_WAIT, 7)]));
        assert_eq!(collect(Some("cycles")).0, 0);
    }

    #[test]
    fn long_recordings_have_longer_blocks_and_lose_no_sample() {
        let mut profile = Profile::default();
        profile.meta.start_us = 1_000_000;
        profile.processes.push(Process { pid: 7, comm: "app".into(), ..Process::default() });
        profile.threads.push(Thread { ns_tid: 7, ..Thread::default() });
        let (file, function) = (profile.strings.intern("a.py"), profile.strings.intern("f"));
        let frames =
            [1, 2].map(|lineno| profile.frames.intern(Frame { lineno, ..Frame::without_location(file, function) }));
        let mut aggregate = Aggregate::default();
        let mut collector = Collector::new(&mut aggregate);
        for second in 0..1000 {
            let sample = Sample {
                thread: ThreadId(0),
                time_us: 1_000_000 * (1 + second),
                status: 3,
                frames: &frames,
                merge: Merge::None,
                work: None,
            };
            collector.sample(&profile, &sample).unwrap();
        }
        collector.finish(&profile, &Report::default()).unwrap();
        assert_eq!(aggregate.samples(), 1000);
        // 250 ms, doubled until 1,000 s are at most 128 of it.
        assert_eq!(aggregate.recordings()[0].block_us, 8_000_000);
        let blocks: Vec<_> = aggregate.entries().iter().map(|(entry, count)| (entry.block, *count)).collect();
        assert_eq!(blocks[..2], [(0, 8), (1, 8)]);
        assert_eq!(blocks.len(), 125);
        assert_eq!(aggregate.threads()[0].process, "app (7)");
        assert!((aggregate.seconds() - 999.0).abs() < 0.01);
    }
}
