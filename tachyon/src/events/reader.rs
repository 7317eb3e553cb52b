//! Empties the sample ring on a thread of its own.

use super::pace::Pace;
use aya::maps::{MapData, RingBuf};
use bytes::{Bytes, BytesMut};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tachyon_common::event::kind;
use tachyon_common::segment::ALL_BANKS;

/// Records as they were in the ring, one after another ([`super::Events`] decodes them).
pub type Batch = Bytes;

/// Largest batch, so that the next stage can begin.
const BATCH_BYTES: usize = 256 * 1024;

/// Most bytes that may wait for the next stage. Beyond that the reader leaves records in the ring, and the kernel counts
/// what no longer fits: memory stays bounded and every loss is counted.
const QUEUE_BYTES: usize = 64 * 1024 * 1024;

/// What woke the reader: the ring's forced wake-up, or another thread.
const RING: u64 = 0;
const ASKED: u64 = 1;

/// What the reader did since the last query.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReaderStats {
    /// Sample records read since the start, by the bank of counters that their runs counted in.
    pub samples: [u64; ALL_BANKS as usize],
    /// Records of code objects, likewise.
    pub codes: [u64; ALL_BANKS as usize],
    /// Malformed records read since the start.
    pub bad_records: u64,
    /// Longest delay of a read of the ring, past the time when it was due.
    pub longest_stall: Duration,
    /// The part of it in which the reader was ready but no CPU ran it.
    pub stalled_without_cpu: Duration,
}

/// Records that a bank's runs have sent since the start.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sent {
    pub bank: u32,
    /// Those of samples or of waits.
    pub samples: u64,
    /// Those of code objects.
    pub codes: u64,
}

/// The reading thread.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Shared {
    /// Wakes the reader.
    ask: EventFd,
    stopping: AtomicBool,
    stats: Mutex<ReaderStats>,
}

impl Reader {
    /// Starts reading `ring`; batches go to `batches`, whose receiver subtracts their size from `queued` when it has
    /// dealt with them. About `most_queued` bytes may wait there, and 64 MiB at most.
    ///
    /// # Errors
    /// When the thread or its signal cannot be made.
    pub fn start<T: From<Batch> + Send + 'static>(
        ring: RingBuf<MapData>,
        batches: Sender<T>,
        queued: Arc<AtomicUsize>,
        most_queued: usize,
    ) -> std::io::Result<Self> {
        let ask = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        // Edge-triggered: the ring is hardly ever empty, and only the kernel's forced wake-up is to wake this thread.
        epoll.add(ring.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, RING))?;
        epoll.add(ask.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, ASKED))?;
        let shared = Arc::new(Shared { ask, stopping: AtomicBool::new(false), stats: Mutex::default() });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("tachyon-reader".to_owned()).spawn(move || {
            crate::kernel::make_immediate();
            // It reads a mapped ring, which needs no privileges; if the kernel refuses, it reads with more rights than it needs.
            let _refused = crate::kernel::drop_privileges();
            let queue = Queue { batches, queued, most: most_queued.min(QUEUE_BYTES) };
            read_all(ring, &epoll, &queue, &of_thread);
        })?;
        Ok(Self { shared, thread })
    }

    /// Has the ring read until this many records of each bank are with the next stage, for at most `patience`. Returns what
    /// the reader did; from then on its stall is measured afresh.
    pub fn read_until(&self, wanted: &[Sent], patience: Duration) -> ReaderStats {
        let asked = Instant::now();
        loop {
            self.shared.ask();
            let mut stats = self.shared.stats();
            let read = |counts: &[u64], bank: u32| counts.get(bank as usize).copied().unwrap_or(u64::MAX);
            let complete = wanted.iter().all(|&Sent { bank, samples, codes }| {
                read(&stats.samples, bank) >= samples && read(&stats.codes, bank) >= codes
            });
            if complete || asked.elapsed() > patience || self.thread.is_finished() {
                let taken = *stats;
                (stats.longest_stall, stats.stalled_without_cpu) = (Duration::ZERO, Duration::ZERO);
                return taken;
            }
            drop(stats);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Reads what is left and ends. The timer's program must not run any more.
    pub fn stop(self) -> ReaderStats {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.ask();
        // A panic of the reader is on standard error; what it had read by then is all there is.
        let _panicked = self.thread.join();
        *self.shared.stats()
    }
}

impl Shared {
    fn ask(&self) {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.ask.write(1);
    }

    fn stats(&self) -> MutexGuard<'_, ReaderStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the next stage takes from.
struct Queue<T> {
    batches: Sender<T>,
    /// Bytes in it.
    queued: Arc<AtomicUsize>,
    most: usize,
}

fn read_all<T: From<Batch>>(mut ring: RingBuf<MapData>, epoll: &Epoll, queue: &Queue<T>, shared: &Shared) {
    let mut last_look = Instant::now();
    let mut run_delay = RunDelay::of_this_thread();
    // One buffer for all batches: its parts return to it when the next stage has dropped them, so that the reader
    // rarely allocates memory, which it might have to wait for.
    let mut batch = BytesMut::with_capacity(BATCH_BYTES);
    let timeout = |poll: Duration| EpollTimeout::try_from(poll).unwrap_or(EpollTimeout::NONE);
    let mut pace = Pace::new(last_look);
    loop {
        let poll = pace.wait();
        let mut ready = [EpollEvent::empty(); 2];
        // An interrupted wait leads to a read of the ring like any other.
        let _count = epoll.wait(&mut ready, timeout(poll)).unwrap_or(0);
        let stopping = shared.stopping.load(Ordering::Acquire);
        let (stall, without_cpu) = (last_look.elapsed().saturating_sub(poll), run_delay.since_last());
        last_look = Instant::now();
        pace.look(last_look);
        let mut read = ReaderStats::default();
        let listened_to = drain(&mut ring, queue, &mut batch, (&mut read, &mut pace), stopping);
        // Counted only once they are with the next stage, so that the count can be relied on.
        let mut held = shared.stats();
        let stats = &mut *held;
        for (sums, read) in [(&mut stats.samples, read.samples), (&mut stats.codes, read.codes)] {
            sums.iter_mut().zip(read).for_each(|(sum, read)| *sum += read);
        }
        stats.bad_records += read.bad_records;
        if stall > stats.longest_stall {
            (stats.longest_stall, stats.stalled_without_cpu) = (stall, without_cpu.min(stall));
        }
        if !listened_to || stopping {
            return;
        }
    }
}

/// Sends on everything in the ring; false if the receiver is gone.
fn drain<T: From<Batch>>(
    ring: &mut RingBuf<MapData>,
    queue: &Queue<T>,
    batch: &mut BytesMut,
    (read, pace): (&mut ReaderStats, &mut Pace),
    last: bool,
) -> bool {
    let mut of_others = 0;
    while last || queue.queued.load(Ordering::Relaxed) < queue.most {
        let Some(item) = ring.next() else { break };
        let count = match kind_and_bank(&item) {
            Some((kind::SAMPLE | kind::WAIT | kind::WAIT_END, bank)) => read.samples.get_mut(usize::from(bank)),
            Some((kind::CODE, bank)) => read.codes.get_mut(usize::from(bank)),
            // They belong to other records, which count.
            Some((kind::WAIT_BEGIN | kind::WAKER | kind::STACK, _)) => Some(&mut of_others),
            _ => None,
        };
        *count.unwrap_or(&mut read.bad_records) += 1;
        pace.meet(&item);
        batch.extend_from_slice(&item);
        drop(item);
        if batch.len() >= BATCH_BYTES && !queue.send(batch) {
            return false;
        }
    }
    batch.is_empty() || queue.send(batch)
}

/// Two fields of a record's header.
pub(super) fn kind_and_bank(record: &[u8]) -> Option<(u16, u8)> {
    let [a, b, bank, _event] = *record.first_chunk()?;
    Some((u16::from_ne_bytes([a, b]), bank))
}

impl<T: From<Batch>> Queue<T> {
    fn send(&self, batch: &mut BytesMut) -> bool {
        let batch = batch.split().freeze();
        self.queued.fetch_add(batch.len(), Ordering::Relaxed);
        self.batches.send(batch.into()).is_ok()
    }
}

/// How long the calling thread has been ready to run without running: the second number of its `schedstat`, nanoseconds
/// (Documentation/scheduler/sched-stats.rst). Zero if the kernel does not say.
struct RunDelay {
    file: Option<File>,
    last_ns: u64,
}

impl RunDelay {
    fn of_this_thread() -> Self {
        let mut delay = Self { file: File::open("/proc/thread-self/schedstat").ok(), last_ns: 0 };
        delay.since_last();
        delay
    }

    fn since_last(&mut self) -> Duration {
        let mut text = [0; 64];
        let length = self.file.as_ref().and_then(|file| file.read_at(&mut text, 0).ok()).unwrap_or(0);
        let text = str::from_utf8(&text[..length]).unwrap_or_default();
        let now_ns = text.split(' ').nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(self.last_ns);
        let since = now_ns.saturating_sub(self.last_ns);
        self.last_ns = now_ns;
        Duration::from_nanos(since)
    }
}
