//! Empties the sample ring on a thread of its own.

use aya::maps::{MapData, RingBuf};
use bytes::{Bytes, BytesMut};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Records as they lay in the ring, one after another ([`super::Events`] takes them apart).
pub type Batch = Bytes;

/// How often the ring is looked at when the kernel does not ask for more: a wake-up for each sample would cost more
/// than the samples.
const POLL: Duration = Duration::from_millis(200);

/// Batches are cut here, so that the next stage can begin.
const BATCH_BYTES: usize = 256 * 1024;

/// Most bytes that may wait for the next stage. Beyond that the reader leaves records in the ring, where the kernel counts
/// what no longer fits: memory stays bounded and nothing is lost uncounted.
const QUEUE_BYTES: usize = 64 * 1024 * 1024;

/// What woke the reader: the ring's forced wake-up, or the stop signal.
const RING: u64 = 0;
const STOP: u64 = 1;

/// What the reader did.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReaderStats {
    /// Records read.
    pub records: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Longest time between two looks at the ring, beyond the polling interval.
    pub longest_stall: Duration,
    /// Of it, the time in which the reader could have run and no CPU ran it.
    pub stalled_without_cpu: Duration,
}

/// The reading thread.
#[derive(Debug)]
pub struct Reader {
    stop: Arc<EventFd>,
    thread: JoinHandle<ReaderStats>,
}

impl Reader {
    /// Starts reading `ring`; batches go to `batches`, whose receiver subtracts their size from `queued` when it has
    /// dealt with them. About `most_queued` bytes may wait there, and 64 MiB at most.
    ///
    /// # Errors
    /// When the thread or its stop signal cannot be made.
    pub fn start(
        ring: RingBuf<MapData>,
        batches: Sender<Batch>,
        queued: Arc<AtomicUsize>,
        most_queued: usize,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        // Edge-triggered: the ring holds something nearly always, and only the kernel's forced wake-up shall wake us.
        epoll.add(ring.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, RING))?;
        epoll.add(stop.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let thread = std::thread::Builder::new().name("tachyon-reader".to_owned()).spawn(move || {
            crate::kernel::make_immediate();
            // It reads a mapped ring, which needs nothing; where the kernel refuses, the main thread says so.
            let _refused = crate::kernel::drop_privileges();
            let queue = Queue { batches, queued, most: most_queued.min(QUEUE_BYTES) };
            read_all(ring, &epoll, &queue)
        })?;
        Ok(Self { stop, thread })
    }

    /// Reads what is left and ends. The timer's program must not run any more.
    pub fn stop(self) -> ReaderStats {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.stop.write(1);
        self.thread.join().unwrap_or_default()
    }
}

/// What the next stage takes from.
struct Queue {
    batches: Sender<Batch>,
    /// Bytes in it.
    queued: Arc<AtomicUsize>,
    most: usize,
}

fn read_all(mut ring: RingBuf<MapData>, epoll: &Epoll, queue: &Queue) -> ReaderStats {
    let mut stats = ReaderStats::default();
    let mut last_look = Instant::now();
    let mut run_delay = RunDelay::of_this_thread();
    // One buffer for all batches: its parts go back into it when the next stage has let go of them, so that the reader
    // hardly ever asks for memory, which it might have to wait for.
    let mut batch = BytesMut::with_capacity(BATCH_BYTES);
    let timeout = EpollTimeout::try_from(POLL).unwrap_or(EpollTimeout::NONE);
    loop {
        let mut ready = [EpollEvent::empty(); 2];
        // An interrupted wait is a look at the ring like any other.
        let count = epoll.wait(&mut ready, timeout).unwrap_or(0);
        let stopping = ready.iter().take(count).any(|event| event.data() == STOP);
        let (stall, without_cpu) = (last_look.elapsed().saturating_sub(POLL), run_delay.since_last());
        if stall > stats.longest_stall {
            (stats.longest_stall, stats.stalled_without_cpu) = (stall, without_cpu.min(stall));
        }
        last_look = Instant::now();
        if !drain(&mut ring, queue, &mut batch, &mut stats, stopping) || stopping {
            return stats;
        }
    }
}

/// Sends everything in the ring on; false when nobody listens any more.
fn drain(
    ring: &mut RingBuf<MapData>,
    queue: &Queue,
    batch: &mut BytesMut,
    stats: &mut ReaderStats,
    last: bool,
) -> bool {
    while last || queue.queued.load(Ordering::Relaxed) < queue.most {
        let Some(item) = ring.next() else { break };
        stats.records += 1;
        stats.bytes += item.len() as u64;
        batch.extend_from_slice(&item);
        drop(item);
        if batch.len() >= BATCH_BYTES && !queue.send(batch) {
            return false;
        }
    }
    batch.is_empty() || queue.send(batch)
}

impl Queue {
    fn send(&self, batch: &mut BytesMut) -> bool {
        let batch = batch.split().freeze();
        self.queued.fetch_add(batch.len(), Ordering::Relaxed);
        self.batches.send(batch).is_ok()
    }
}

/// How long the calling thread has been ready to run without running: the second number of its `schedstat`, nanoseconds
/// (Documentation/scheduler/sched-stats.rst). Zero where the kernel does not tell.
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
