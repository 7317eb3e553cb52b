//! A running recording: reports how it is doing, and hands out segments until it is ended.
//!
//! A segment ends at a moment of the monotonic clock. The kernel side counts runs from then on in its other bank and marks
//! their records ([`crate::kernel::Cut`]); when no run of the old bank is left, its count of records sent is final. The ring
//! is read until they have all arrived, and the thread that makes samples begins the next profile. Nothing is detached. The
//! end works the same way, but with the event detached, so that the counters stand still.

mod status;

pub use status::{Over, Status};

use super::account::{self, Facts, Read};
use super::bell::Bells;
use super::follow::{Follow, lock};
use super::give_back::give_back;
use super::looker::Looker;
use super::made::Made;
use super::memory;
use super::native::{Mapped, Mapper};
use super::open::{meta, unix_now};
use super::registry::{Registry, SegmentCounts, read_details};
use super::request::{Request, Targets};
use super::samples::{Cut, Lasting, Live, SETTLED, Told};
use super::segment::Segment;
use super::sleepers::{self, Sleepers};
use super::stats::{Stats, Used};
use super::targets::{self, Children};
use super::throttle::Limiter;
use super::timer::Timer;
use super::times::{self, Times};
use super::waiting;
use crate::events::{Reader, ReaderStats, Sent};
use crate::kernel::{self, Event, Kernel, WaitTotals, Waits};
use crate::machine::max_sample_rate;
use crate::profile::Profile;
use crate::remote::{End, Patience, forget_files, ledger};
use crate::report::{SegmentReport, StartReport};
use crate::sinks::Sink;
use crate::types::KtimeNs;
use std::collections::BTreeSet;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tachyon_common::event::Counters;
use tachyon_common::segment::{ALL_BANKS, BANKS, WAIT_BANKS};

/// Longest time the ring is read at a cut: after that the thread behind the reader is hopelessly late, which the account shows.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a running recording is made of.
pub(super) struct Parts {
    pub request: Request,
    pub kernel: Arc<Mutex<Kernel>>,
    pub registry: Arc<Mutex<Registry>>,
    pub stats: Arc<Stats>,
    pub children: Children,
    pub sleepers: Arc<Mutex<Sleepers>>,
    pub live: Arc<Live>,
    pub limiter: Limiter,
    pub timer: Timer,
    pub bells: Bells,
    pub event: Event,
    pub start: StartReport,
    pub opened: Instant,
    pub end: End,
    pub started: Instant,
    pub start_unix: f64,
    pub ring_bytes: u32,
}

/// The threads that records go through; the end waits for them in this order.
pub(super) struct Threads {
    pub reader: Reader,
    pub follow: Follow,
    pub sender: Sender<Told>,
    pub maker: JoinHandle<Made>,
    pub mapper: Option<Mapper>,
    /// If waits are sampled.
    pub second_look: Option<Looker>,
    /// If tasks that await others are wanted, too.
    pub task_looks: Option<Looker>,
}

/// A running recording. If dropped, it ends and its samples are lost.
///
/// ```no_run
/// # use std::time::Duration;
/// # use tachyon::recording::{Request, Targets};
/// let request = Request::new(Targets::AllPython, Duration::from_millis(50));
/// let mut running = request.open()?.start()?;
/// for _minute in 0..60 {
///     std::thread::sleep(Duration::from_secs(60));
///     let segment = running.cut()?;
///     println!("{}: {} samples", segment.sequence, segment.report.stored);
/// }
/// let last = running.finish()?;
/// assert_eq!(last.report.inconsistent, 0);
/// # Ok::<(), anyhow::Error>(())
/// ```
pub struct Running {
    parts: Parts,
    threads: Option<Threads>,
    since: Since,
    /// Notes already reported by [`Running::status`]: segments do not repeat them.
    said: BTreeSet<String>,
    mapped: Option<Mapped>,
    /// Runs of earlier segments that the kernel side counts as lost but that are not.
    not_lost: u64,
    /// Whether any requested CPython has been met.
    met: bool,
    times: Times,
}

/// Where a segment's counts begin.
#[derive(Clone, Copy, Debug)]
struct Since {
    sequence: u64,
    start: Instant,
    start_unix: f64,
    /// The last readings of both banks.
    counters: [Counters; BANKS as usize],
    waits: [WaitTotals; BANKS as usize],
    samples_read: [u64; ALL_BANKS as usize],
    codes_read: [u64; ALL_BANKS as usize],
    bad_records: u64,
    events_lost: u64,
    used: Used,
    cpu_ns: u64,
    expected: f64,
}

/// What is known about a segment when its samples are complete.
struct Ended {
    bank: u32,
    counters: Counters,
    unsettled: bool,
    waits: Option<WaitTotals>,
    reader: ReaderStats,
    end: Instant,
    end_unix: f64,
    made: Made,
    counts: SegmentCounts,
    times: Option<times::Read>,
}

impl Running {
    pub(super) fn new(parts: Parts, threads: Threads) -> Self {
        let since = Since {
            sequence: 0,
            start: parts.started,
            start_unix: parts.start_unix,
            counters: Default::default(),
            waits: Default::default(),
            samples_read: Default::default(),
            codes_read: Default::default(),
            bad_records: 0,
            events_lost: 0,
            // The cost of the start belongs to the first segment.
            used: Used::default(),
            cpu_ns: 0,
            expected: 0.0,
        };
        let mut running = Self {
            parts,
            threads: Some(threads),
            since,
            said: BTreeSet::new(),
            mapped: None,
            not_lost: 0,
            met: false,
            times: Times::default(),
        };
        if let Some(now) = running.read_times() {
            running.times.begin(now);
        }
        running
    }

    /// Ends the present segment now, and begins the next without a gap. Its samples are kept by stack, if that was asked for.
    ///
    /// # Errors
    /// When the kernel refuses, or a thread of the recorder has ended early.
    pub fn cut(&mut self) -> anyhow::Result<Segment> {
        self.cut_with(|_| Ok(None))
    }

    /// The same; samples of the next segment go into the sink that `open` returns for its profile.
    ///
    /// # Errors
    /// As [`Running::cut`], and any error of `open`, in which case nothing was cut.
    pub fn cut_into(
        &mut self,
        open: impl FnOnce(&Profile) -> anyhow::Result<Box<dyn Sink + Send>>,
    ) -> anyhow::Result<Segment> {
        self.cut_with(|profile| open(profile).map(Some))
    }

    /// Reads what could not be read from processes when they were met, where more than their names is wanted.
    fn look_again(&self) {
        // Each may take some tenths of a second in the worst case: the rest is read at the next cut.
        const MOST: usize = 8;
        let Some(variables) = &self.parts.request.variables else { return };
        let lacking = lock(&self.parts.registry).lacking_details(MOST);
        for (instance, image, pid) in lacking {
            let details = read_details(pid, variables);
            lock(&self.parts.registry).add_details(instance, image, details);
        }
    }

    fn cut_with(
        &mut self,
        open: impl FnOnce(&Profile) -> anyhow::Result<Option<Box<dyn Sink + Send>>>,
    ) -> anyhow::Result<Segment> {
        let threads = self.threads.as_ref().expect("only the end takes them");
        let mut profile = Profile { meta: meta(&self.parts.request), ..Profile::default() };
        profile.meta.python_version = targets::newest_version(&lock(&self.parts.registry)).unwrap_or_default();
        let sink = open(&profile)?;
        let request = &self.parts.request;
        let mut next = Made::new(profile, sink, request.keep_stacks).within(request.max_memory);
        self.look_again();
        let waits = self.parts.request.waits.are_wanted();
        let mut sleepers = lock(&self.parts.sleepers);
        if waits {
            sleepers.look(&self.parts.registry, &self.parts.kernel, Duration::ZERO, sleepers::AT_CUT);
        }
        let (cut, parts) = {
            let mut kernel = lock(&self.parts.kernel);
            let cut = kernel.cut()?;
            let parts = if waits { sleepers.tell(&mut kernel, cut.at) } else { Vec::new() };
            (cut, parts)
        };
        let no_maker = || anyhow::anyhow!("the thread that makes samples ended early");
        threads.sender.send(Told::Lasting(Lasting { parts, unread: 0 })).map_err(|_| no_maker())?;
        // Now, so that it matches the processes' CPU time, which is of this moment.
        let times = self.read_times();
        let counts = take_counts(&self.parts.registry, &mut self.not_lost);
        let (end, end_unix) = at(cut.at);
        (next.profile.meta.start_us, next.profile.meta.start_unix) = (cut.at.as_micros(), end_unix);
        let runs = Sent { bank: cut.bank, samples: cut.counters.sent, codes: cut.counters.codes_sent };
        let of_waits = cut.waits.map(|WaitTotals { before, walked }| Sent {
            bank: WAIT_BANKS + cut.bank,
            samples: before.records,
            codes: walked.codes_sent,
        });
        let sent: Vec<Sent> = of_waits.into_iter().chain([runs]).collect();
        let reader = threads.reader.read_until(&sent, PATIENCE);
        let (reply, ended) = mpsc::channel();
        let message = Told::Cut(Box::new(Cut { next, bank: cut.bank ^ 1, reply }));
        threads.sender.send(message).map_err(|_| no_maker())?;
        // Until here nothing after the cut may be reported: it would land in the segment that ends.
        drop(sleepers);
        let made = ended.recv().map_err(|_| no_maker())?;
        if let Some(mapped) = threads.mapper.as_ref().and_then(Mapper::left) {
            self.mapped = Some(mapped);
        }
        let kernel::Cut { bank, counters, unsettled, waits, .. } = cut;
        let segment =
            self.account(Ended { bank, counters, unsettled, waits, reader, end, end_unix, made, counts, times });
        // The previous segment's memory is free by now, in pieces between what lives on.
        if self.parts.request.give_back {
            give_back();
        } else {
            memory::return_freed();
        }
        Ok(segment)
    }

    /// What the threads of live processes have done with their time, where waits are sampled.
    fn read_times(&self) -> Option<times::Read> {
        let programs = self.parts.request.waits.are_wanted().then(|| lock(&self.parts.registry).live_programs())?;
        Some(times::read(&programs, &lock(&self.parts.kernel)))
    }

    /// The account of a segment whose samples are complete, and the end of its file.
    fn account(&mut self, ended: Ended) -> Segment {
        let Ended { bank, counters, unsettled, waits, reader, end, end_unix, mut made, mut counts, times } = ended;
        let times = times.map(|now| self.times.cut(&now, &counts)).unwrap_or_default();
        let Parts { request, stats, limiter, ring_bytes, start, .. } = &self.parts;
        let bank = bank as usize;
        let (events_lost, used, method) = {
            let kernel = lock(&self.parts.kernel);
            let events_lost = kernel.counters().map_or(self.since.events_lost, |all| all.events_lost);
            (events_lost, stats.used(&kernel), kernel.wait_method())
        };
        let read = Read {
            samples: reader.samples[bank] - self.since.samples_read[bank],
            codes: reader.codes[bank] - self.since.codes_read[bank],
            bad_records: reader.bad_records - self.since.bad_records,
            longest_stall: reader.longest_stall,
            stalled_without_cpu: reader.stalled_without_cpu,
        };
        let start = if self.since.sequence == 0 { *start } else { StartReport::default() };
        let cost = stats.cost(&self.since.used, &used, &lock(&self.parts.kernel), *ring_bytes, start);
        if let Some(mapped) = &self.mapped {
            counts.notes.extend(mapped.notes.iter().cloned());
        }
        let since = if self.since.sequence == 0 { self.parts.opened } else { self.since.start };
        counts.notes.extend(ledger::refused(since));
        targets::complete(&mut made, &counts, request.told());
        counts.notes.extend(targets::unknown_variables(&made, request));
        let cpu_ns = counts.python_cpu_ns();
        let expected = limiter.rates().expected(self.since.cpu_ns + cpu_ns.unwrap_or(0));
        let runs_since_load = counters.ran + self.since.counters[bank ^ 1].ran;
        let (mut report, unsampled) = account::report(&Facts {
            request,
            // Without samples of running threads there is no expected number.
            expected: cpu_ns
                .filter(|_| request.waits != Waits::Alone && request.events.is_empty())
                .map(|_| expected - self.since.expected),
            cpu_ns: cpu_ns.unwrap_or(0),
            event: self.parts.event,
            duration: end.duration_since(self.since.start),
            counters: &kernel::since(&self.since.counters[bank], &counters),
            events_lost: events_lost - self.since.events_lost,
            unsettled,
            runs_by_kernel: used.runs.filter(|_| self.threads.is_none()).map(|runs| (runs_since_load, runs)),
            reader: &read,
            waits: waits.map(|totals| (method, totals.since(&self.since.waits[bank]))),
            made: &made,
            counts: &counts,
            times: &times,
            mapped: self.mapped.as_ref(),
            cost,
        });
        self.met |= targets::met(&counts);
        let nobody = request.targets == Targets::AllPython && !self.met;
        let notes = counts.notes.iter().filter(|note| !self.said.contains(*note)).cloned().collect();
        if self.since.sequence == 0 && self.threads.is_none() {
            // It is the whole recording.
            report.segments = Some(1);
        } else {
            let (sequence, start_unix) = (self.since.sequence, self.since.start_unix);
            report.segment = Some(SegmentReport { sequence, start_unix, end_unix });
        }
        if report.effective_rate_hz < report.rate_hz {
            // Formats that show times count samples: each stands for the mean interval.
            made.profile.meta.interval_us = report.mean_interval_us();
        }
        self.since = Since {
            sequence: self.since.sequence + 1,
            start: end,
            start_unix: end_unix,
            counters: self.since.counters,
            waits: self.since.waits,
            samples_read: self.since.samples_read,
            codes_read: self.since.codes_read,
            bad_records: reader.bad_records,
            events_lost,
            used,
            cpu_ns: self.since.cpu_ns + cpu_ns.unwrap_or(0),
            expected,
        };
        self.since.counters[bank] = counters;
        self.since.waits[bank] = waits.unwrap_or_default();
        (self.since.samples_read[bank], self.since.codes_read[bank]) = (reader.samples[bank], reader.codes[bank]);
        let finished = made.sink.take().map(|mut sink| sink.finish(&made.profile, &report));
        let stacks = made.take_stacks();
        let sink_error = made.first_error.take().or(finished.and_then(Result::err));
        Segment {
            sequence: self.since.sequence - 1,
            stacks,
            unsampled,
            sink_error,
            notes,
            nobody,
            ..Segment::new(report, made.profile, made.own.into_iter().collect())
        }
    }

    /// Ends the recording. Returns its last segment, which is the whole recording if it was never cut.
    ///
    /// # Errors
    /// When the kernel refuses, or a thread of the recorder has ended early: its samples are lost then.
    pub fn finish(mut self) -> anyhow::Result<Segment> {
        self.parts.limiter.stop();
        self.parts.timer.stop();
        let waits = self.parts.request.waits.are_wanted();
        if let Some(task_looks) = self.threads.as_mut().and_then(|threads| threads.task_looks.take()) {
            task_looks.stop();
        }
        // It takes a while: running threads are sampled for as long as waiting ones are.
        if let Some(second_look) = self.threads.as_mut().and_then(|threads| threads.second_look.take()) {
            second_look.stop();
        }
        if waits {
            let mut sleepers = lock(&self.parts.sleepers);
            sleepers.look(&self.parts.registry, &self.parts.kernel, Duration::ZERO, sleepers::AT_END);
            // Threads that were switched while the others were read.
            sleepers.look(&self.parts.registry, &self.parts.kernel, Duration::ZERO, sleepers::AGAIN);
        }
        lock(&self.parts.kernel).detach_sampling();
        let waits_ended = lock(&self.parts.kernel).detach_waits()?;
        self.parts.request.release();
        self.parts.end.come();
        let _concerned = self.parts.end.concerns_this_thread(Patience::Usual);
        lock(&self.parts.registry).sampling_ended();
        let times = self.read_times();
        self.look_again();
        let (end, end_unix) = if waits { at(waits_ended) } else { (Instant::now(), unix_now()) };
        let rate_hz = self.parts.request.rate_hz;
        if let Some(limit) = max_sample_rate().filter(|&limit| f64::from(limit) < rate_hz) {
            lock(&self.parts.registry).note(format!(
                "kernel.perf_event_max_sample_rate is {limit}, the most that a CPU samples in a second: ask for less, or raise it"
            ));
        }
        // Where the targets wait and what their children do is read before the slower part of the end.
        let elapsed = self.parts.started.elapsed();
        let waiting = waiting::place(&self.parts.request.targets, &self.parts.registry, elapsed);
        let busy_children = self.parts.children.busy(elapsed);
        let bank = lock(&self.parts.kernel).bank();
        let (counters, settled) = lock(&self.parts.kernel).bank_counters(bank)?;
        // The last kicks may have been on their way when everything ended.
        let totals = lock(&self.parts.kernel).waits(bank)?.map(WaitTotals::without_kicks_to_come);
        // The order follows the messages: the reader sends to the maker, and the maker and the follower send to the mapper.
        let Threads { reader, follow, sender, maker, mapper, .. } =
            self.threads.take().expect("only the end takes them");
        let reader = reader.stop();
        if let Err(early) = follow.stop() {
            lock(&self.parts.registry).note(early.to_owned());
        }
        lock(&self.parts.kernel).detach_lifecycle()?;
        if waits {
            let lasting = lock(&self.parts.sleepers).end(&lock(&self.parts.kernel), waits_ended);
            // A maker that has ended is reported below.
            let _ended = sender.send(Told::Lasting(lasting));
        }
        drop(sender);
        let made = maker.join().map_err(|_| anyhow::anyhow!("the thread that makes samples ended early"))?;
        self.mapped = mapper.map(Mapper::stop);
        let counts = take_counts(&self.parts.registry, &mut self.not_lost);
        let segment = self.account(Ended {
            bank,
            counters,
            unsettled: !settled,
            waits: totals,
            reader,
            end,
            end_unix,
            made,
            counts,
            times,
        });
        Ok(Segment { waiting, busy_children, ..segment })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Only if `finish` was not called.
        if let Some(threads) = self.threads.take() {
            self.abandon(threads);
        }
        forget_files();
    }
}

impl Running {
    fn abandon(&mut self, threads: Threads) {
        let Threads { reader, follow, sender, maker, mapper, second_look, task_looks } = threads;
        [second_look, task_looks].into_iter().flatten().for_each(Looker::stop);
        self.parts.limiter.stop();
        self.parts.timer.stop();
        self.parts.end.come();
        // Failures can no longer be reported to anyone.
        lock(&self.parts.kernel).detach_sampling();
        let _read = reader.stop();
        let _followed = follow.stop();
        let _detached = lock(&self.parts.kernel).detach_lifecycle();
        drop(sender);
        let _made = maker.join();
        let _mapped = mapper.map(Mapper::stop);
    }
}

/// What the registry knows about the segment that ends.
fn take_counts(registry: &Mutex<Registry>, not_lost: &mut u64) -> SegmentCounts {
    let mut registry = lock(registry);
    *not_lost += registry.not_lost();
    registry.cut(SETTLED)
}

/// Converts a moment of the monotonic clock to the other clocks. It is at most some milliseconds ago.
fn at(moment: KtimeNs) -> (Instant, f64) {
    let ago = Duration::from_nanos(KtimeNs::now().0.saturating_sub(moment.0));
    let now = Instant::now();
    (now.checked_sub(ago).unwrap_or(now), unix_now() - ago.as_secs_f64())
}
