//! What all workers share: the spool, the segments last read, counts, health, and where to report.
//!
//! Workers ask it what there is and for segments, each of which is read once for all of them; it sends nothing and knows nothing about
//! backends.

use super::clock::Clock;
use super::health::Health;
use super::metrics::Metrics;
use super::spool::{Item, Opened, Spool};
use crate::segment::{Options, Segment};
use std::collections::VecDeque;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tachyon::sinks::text::escape_controls;

/// Most segments that are kept in memory: backends read the same ones at about the same time.
const KEPT: usize = 4;

/// What all workers share.
pub struct Shared {
    spool: Mutex<Spool>,
    pub(super) directory: PathBuf,
    pub(super) state: PathBuf,
    /// Counts.
    pub(super) metrics: Metrics,
    /// The time.
    pub(super) clock: Clock,
    recent: Mutex<VecDeque<(String, Arc<Segment>)>>,
    health: Mutex<Health>,
    /// Pids of the newest segment.
    sampled: Mutex<Vec<u32>>,
    told: Box<dyn Fn(&str) + Send + Sync>,
}

impl Shared {
    /// For a spool and the directory of the state.
    pub(super) fn new(spool: Spool, state: &Path, clock: Clock, told: Box<dyn Fn(&str) + Send + Sync>) -> Self {
        let directory = spool.directory().to_owned();
        Self {
            spool: Mutex::new(spool),
            directory,
            state: state.to_owned(),
            metrics: Metrics::default(),
            clock,
            recent: Mutex::default(),
            health: Mutex::default(),
            sampled: Mutex::default(),
            told,
        }
    }

    /// Reports a line to the user.
    pub(super) fn tell(&self, line: &str) {
        (self.told)(&escape_controls(line));
    }

    /// Sets the spool's limits, after the configuration was reloaded.
    pub(super) fn renew(&self, largest: u64, options: Options) {
        self.spool().renew(largest, options);
        // They were cut into other slices.
        lock(&self.recent).clear();
    }

    /// The answer to `/metrics`.
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let healthy = self.trouble().is_empty();
        self.metrics.text(&self.directory, healthy)
    }

    /// What is wrong with profiling on this host.
    pub(super) fn trouble(&self) -> Vec<String> {
        lock(&self.health).trouble().to_vec()
    }

    /// Checks on the agent.
    pub(super) fn look_after(&self) {
        let sampled = std::mem::take(&mut *lock(&self.sampled));
        lock(&self.health).look(&self.directory, &sampled, self.clock.unix());
    }

    /// What is in the spool, oldest first.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(super) fn look(&self) -> anyhow::Result<Vec<Item>> {
        let mut spool = self.spool();
        let look = spool.look();
        self.tell_of_bad(&mut spool);
        let look = look?;
        self.metrics.bad_files_left.set(i64::try_from(look.bad).unwrap_or(i64::MAX));
        let oldest = look.items.iter().map(|item| item.modified_unix).min_by(f64::total_cmp);
        self.metrics.spool_age_seconds.set(oldest.map_or(0.0, |oldest| (self.clock.unix() - oldest).max(0.0)));
        Ok(look.items)
    }

    fn tell_of_bad(&self, spool: &mut Spool) {
        for (name, why) in spool.news() {
            self.metrics.bad_files.inc();
            self.tell(&format!("set aside {name}: {why}"));
        }
    }

    /// The spool itself, locked while in use.
    pub(super) fn spool(&self) -> MutexGuard<'_, Spool> {
        lock(&self.spool)
    }

    /// Reads a segment, unless it has already been read.
    pub(super) fn read(&self, item: &Item) -> Read {
        // One at a time: the cost limits for reading apply to the whole process.
        let mut spool = self.spool();
        if let Some((_, known)) = lock(&self.recent).iter().find(|(key, _)| *key == item.key) {
            return Read::Segment(Arc::clone(known));
        }
        let opened = spool.read(item);
        self.tell_of_bad(&mut spool);
        match opened {
            Opened::Gone => Read::Gone,
            Opened::Bad => Read::Bad,
            Opened::Segment(segment) => {
                let segment = Arc::new(*segment);
                let pids = segment.samples.iter().filter_map(|row| row.labels.pid).map(i32::unsigned_abs);
                let mut pids: Vec<u32> = pids.collect();
                pids.sort_unstable();
                pids.dedup();
                *lock(&self.sampled) = pids;
                let mut recent = lock(&self.recent);
                recent.push_back((item.key.clone(), Arc::clone(&segment)));
                while recent.len() > KEPT {
                    recent.pop_front();
                }
                Read::Segment(segment)
            }
        }
    }
}

/// The outcome of reading a segment.
pub(super) enum Read {
    /// It was read, now or before.
    Segment(Arc<Segment>),
    /// It left the spool.
    Gone,
    /// It cannot be read, and was set aside.
    Bad,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A thread that panicked leaves only counts and caches behind, all of which are intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes to standard error, a line at a time.
pub(super) fn tell_standard_error(line: &str) {
    // A failure cannot be reported anywhere.
    let _closed = writeln!(std::io::stderr(), "tachyon-fleet: {line}");
}
