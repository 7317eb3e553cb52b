//! One worker for each backend: takes what is in the spool in order of time, pushes it, and notes what has arrived.
//!
//! This module decides what happens with a push: what is retried and when, what is given up, and what the user is told
//! about it.

use super::backend::{Backend, Parts};
use super::batches::{batches, begins_unix, begun};
use super::metrics::{because, of};
use super::progress::{Progress, Sending};
use super::shared::{Read, Shared};
use super::spool::Item;
use crate::net::push::{Class, PushError, Reason};
use crate::place;
use crate::segment::Segment;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The first pause after a failure, and the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The pause if someone has to fix something first.
const WAITING_PAUSE: Duration = Duration::from_secs(300);
/// Longest wait for a server, whatever it says.
const LONGEST_AFTER: Duration = Duration::from_secs(600);
/// Tries with `--once`.
const TRIES: u32 = 3;
/// A failure that goes on is reported again after this.
const REMINDER_S: f64 = 600.0;

/// The outcome of a backend's work.
#[derive(Debug, Default)]
pub struct Summary {
    /// Its name.
    pub name: String,
    /// Segments that have arrived.
    pub segments: u64,
    /// Samples in them.
    pub samples: u64,
    /// Samples that will never be accepted, by reason.
    pub refused: BTreeMap<Reason, u64>,
    /// Segments left.
    pub pending: usize,
    /// Segments that are not due yet: their batch is not complete.
    pub not_due: usize,
    /// Pushes that may have arrived twice.
    pub doubts: u64,
    /// Why it stopped.
    pub error: Option<PushError>,
}

/// A backend at work.
pub struct Worker {
    shared: Arc<Shared>,
    backend: Arc<Backend>,
    progress: Progress,
    /// `--once`.
    once: bool,
    stop: watch::Receiver<bool>,
    summary: Summary,
    failing: Option<Failing>,
    /// What was refused, by reason: when that was last reported, and samples and segments since then.
    refusals: BTreeMap<Reason, (f64, u64, u64)>,
    /// Segments of the last look that were left.
    left: BTreeSet<String>,
}

/// Since when pushes have failed, and when that was last reported.
struct Failing {
    since_unix: f64,
    told_unix: f64,
}

/// Why a worker stops.
enum End {
    /// It was told to stop.
    Stopped,
    /// With `--once`: tries are used up.
    GivenUp(PushError),
    /// Its progress cannot be written, so nothing may be sent.
    Broken(anyhow::Error),
}

impl From<anyhow::Error> for End {
    fn from(error: anyhow::Error) -> Self {
        Self::Broken(error)
    }
}

impl Worker {
    /// With its progress.
    ///
    /// # Errors
    /// When that cannot be read.
    pub fn new(
        shared: &Arc<Shared>,
        backend: Backend,
        once: bool,
        stop: watch::Receiver<bool>,
    ) -> anyhow::Result<Self> {
        let progress = Progress::open(&shared.state, &backend.name)?;
        let summary = Summary { name: backend.name.clone(), ..Summary::default() };
        let (shared, backend) = (Arc::clone(shared), Arc::new(backend));
        Ok(Self {
            shared,
            backend,
            progress,
            once,
            stop,
            summary,
            failing: None,
            refusals: BTreeMap::new(),
            left: BTreeSet::new(),
        })
    }

    /// Works until it is stopped, or with `--once` until everything that is due has been tried.
    pub async fn run(mut self, look: Duration) -> anyhow::Result<Summary> {
        self.take_up();
        loop {
            match self.round().await {
                Ok(()) if self.once => return Ok(self.summary),
                Ok(()) => {}
                Err(End::Stopped) => return Ok(self.summary),
                Err(End::GivenUp(error)) => {
                    self.summary.error = Some(error);
                    return Ok(self.summary);
                }
                // A full disk, for example: it is retried, and nothing is sent meanwhile.
                Err(End::Broken(error)) if self.once => return Err(error),
                Err(End::Broken(error)) => self.shared.tell(&format!("{}: {error:#}", self.backend.name)),
            }
            if self.pause(look).await.is_err() {
                return Ok(self.summary);
            }
        }
    }

    /// Takes up what was being sent when the last process ended; it is unknown whether that arrived.
    fn take_up(&mut self) {
        let doubtful = self.progress.sending().is_some_and(|sending| sending.doubtful);
        if doubtful && !self.backend.is_exact() {
            self.doubt();
        }
    }

    fn doubt(&mut self) {
        self.summary.doubts += 1;
        self.shared.metrics.doubts.get_or_create(&of(&self.backend.name)).inc();
    }

    async fn round(&mut self) -> Result<(), End> {
        let shared = Arc::clone(&self.shared);
        let items = blocking(move || shared.look()).await??;
        self.progress.keep(&items);
        let pending: Vec<Item> = items.into_iter().filter(|item| !self.progress.has(item)).collect();
        self.note_expired(&pending).await?;
        let length = self.backend.batch();
        let (mut due, not_due) = batches(pending, length, self.shared.clock.unix());
        // A batch that was begun comes first: beginning another one would overwrite its record.
        due.sort_by_key(|batch| begun(batch, length, self.progress.sending()).is_none());
        self.summary.not_due = not_due;
        let mut left: usize = due.iter().map(Vec::len).sum();
        self.note_pending(left + not_due, due.first().and_then(|batch| batch.first()));
        for batch in due {
            if *self.stop.borrow() {
                return Err(End::Stopped);
            }
            let count = batch.len();
            self.summary.pending = left;
            self.ship(batch).await?;
            left -= count;
            self.summary.pending = left;
            self.note_pending(left + not_due, None);
        }
        self.tell_of_refusals();
        Ok(())
    }

    /// Counts segments that were left the last time and are gone without having been shipped.
    async fn note_expired(&mut self, pending: &[Item]) -> anyhow::Result<()> {
        let now: BTreeSet<String> = pending.iter().map(|item| item.key.clone()).collect();
        let gone: Vec<String> = self.left.difference(&now).cloned().collect();
        let shared = Arc::clone(&self.shared);
        // What another backend's worker set aside has already been reported.
        let gone = blocking(move || gone.iter().filter(|key| !shared.spool().is_bad(key)).count()).await? as u64;
        if gone > 0 {
            self.shared.metrics.expired_segments.get_or_create(&of(&self.backend.name)).inc_by(gone);
            self.shared
                .tell(&format!("{}: {gone} segments left the spool before they were shipped", self.backend.name));
        }
        self.left = now;
        Ok(())
    }

    fn note_pending(&self, count: usize, oldest: Option<&Item>) {
        let (metrics, name) = (&self.shared.metrics, &self.backend.name);
        metrics.pending_segments.get_or_create(&of(name)).set(i64::try_from(count).unwrap_or(i64::MAX));
        if let Some(oldest) = oldest {
            let age = (self.shared.clock.unix() - oldest.modified_unix).max(0.0);
            metrics.pending_age_seconds.get_or_create(&of(name)).set(age);
        } else if count == 0 {
            metrics.pending_age_seconds.get_or_create(&of(name)).set(0.0);
        }
    }

    /// Ships one batch.
    async fn ship(&mut self, mut items: Vec<Item>) -> Result<(), End> {
        let length = self.backend.batch();
        let (window, begun) = (begins_unix(&items, length), begun(&items, length, self.progress.sending()));
        let Some((segment, parts)) = self.prepare(&mut items, begun.as_deref()).await? else { return Ok(()) };
        let Parts { parts, refused } = parts;
        let key = begun.unwrap_or_else(|| items[0].key.clone());
        let of_all = Sending { segment: key.clone(), parts: 0, of: parts.len(), doubtful: false, window };
        if window.is_some() {
            self.progress.begin(of_all.clone())?;
        }
        let resumed = self.progress.sending().filter(|sending| sending.segment == key && sending.of == parts.len());
        let first = resumed.map_or(0, |sending| sending.parts);
        for (reason, samples) in refused {
            self.refuse(reason, samples, &items, None);
        }
        for (number, part) in parts.iter().enumerate().skip(first) {
            let mut sending = Sending { parts: number, doubtful: true, ..of_all.clone() };
            if !self.backend.is_exact() {
                self.progress.begin(sending.clone())?;
            }
            let mut tries = 0;
            loop {
                self.shared.metrics.pushes.get_or_create(&of(&self.backend.name)).inc();
                let error = match self.backend.push(part).await {
                    Ok(()) => {
                        self.summary.samples += part.samples;
                        self.taken(part.samples, part.bytes);
                        break;
                    }
                    Err(error) => error,
                };
                tries += 1;
                self.failed(&error);
                match error.reason.class() {
                    Class::Refused => {
                        self.refuse(error.reason, part.samples, &items, Some(&error));
                        break;
                    }
                    class @ (Class::Retry | Class::Wait) => {
                        if error.doubtful && !self.backend.is_exact() {
                            self.doubt();
                        } else if sending.doubtful && !self.backend.is_exact() {
                            sending.doubtful = false;
                            self.progress.begin(sending.clone())?;
                        }
                        if self.once && (class == Class::Wait || tries >= TRIES) {
                            return Err(End::GivenUp(error));
                        }
                        self.pause(pause(class, tries, error.retry_after)).await?;
                        // Meanwhile it may have become too old, or have been removed.
                        if self.is_stale(&items, &segment) {
                            return Ok(());
                        }
                        if self.backend.too_old(&segment, self.shared.clock.unix()) {
                            self.refuse(Reason::TooOld, part.samples, &items, None);
                            break;
                        }
                    }
                }
            }
        }
        let count = items.len() as u64;
        self.summary.segments += count;
        self.shared.metrics.shipped_segments.get_or_create(&of(&self.backend.name)).inc_by(count);
        self.progress.done(&items)?;
        for item in &items {
            self.left.remove(&item.key);
        }
        Ok(())
    }

    /// Reads and encodes; unreadable segments are left out. `begun` names a batch. `None`: nothing is left.
    async fn prepare(
        &mut self,
        items: &mut Vec<Item>,
        begun: Option<&str>,
    ) -> Result<Option<(Arc<Segment>, Parts)>, End> {
        let mut read = Vec::new();
        let mut kept = Vec::new();
        for item in items.drain(..) {
            let (shared, of) = (Arc::clone(&self.shared), item.clone());
            match blocking(move || shared.read(&of)).await? {
                Read::Segment(segment) => {
                    read.push(segment);
                    kept.push(item);
                }
                // The next look will report it.
                Read::Gone => {}
                Read::Bad => {
                    self.left.remove(&item.key);
                }
            }
        }
        *items = kept;
        if items.is_empty() {
            return Ok(None);
        }
        let (shared, backend, own) = (Arc::clone(&self.shared), Arc::clone(&self.backend), items.clone());
        let now = self.shared.clock.unix();
        let name = begun.map(|file| place::part(file.strip_suffix(".tach").unwrap_or(file)));
        let prepared = blocking(move || -> anyhow::Result<(Arc<Segment>, Parts)> {
            let mut segment = if let [only] = &read[..] { Arc::clone(only) } else { Arc::new(Segment::joined(&read)) };
            if let Some(name) = name.filter(|name| *name != segment.name) {
                Arc::make_mut(&mut segment).name = name;
            }
            let mut parts = backend.encode(&segment, now)?;
            if backend.wants_files() {
                let spool = shared.spool();
                for (item, segment) in own.iter().zip(&read) {
                    parts.parts.extend(backend.files(&spool, item, segment)?);
                }
                if let Some(last) = parts.parts.last_mut().filter(|_| segment.sample_count > 0) {
                    last.samples = last.samples.max(if backend.counts_with_files() { segment.sample_count } else { 0 });
                }
            }
            Ok((segment, parts))
        });
        match prepared.await? {
            Ok(prepared) => Ok(Some(prepared)),
            // It was removed while it was read, or no backend can take it.
            Err(error) => {
                self.shared.tell(&format!("{}: {}: {error:#}", self.backend.name, items[0].name));
                self.refuse(Reason::Rejected, 0, items, None);
                self.progress.done(items)?;
                Ok(None)
            }
        }
    }

    /// Whether all of it was removed from the spool.
    fn is_stale(&mut self, items: &[Item], segment: &Segment) -> bool {
        let directory = &self.shared.directory;
        let gone = items.iter().all(|item| std::fs::symlink_metadata(directory.join(&item.name)).is_err());
        if gone {
            self.shared.tell(&format!("{}: {} left the spool before it was shipped", self.backend.name, segment.name));
            self.shared.metrics.expired_segments.get_or_create(&of(&self.backend.name)).inc_by(items.len() as u64);
            for item in items {
                self.left.remove(&item.key);
            }
        }
        gone
    }

    fn taken(&mut self, samples: u64, bytes: usize) {
        let (metrics, name) = (&self.shared.metrics, &self.backend.name);
        metrics.shipped_samples.get_or_create(&of(name)).inc_by(samples);
        metrics.sent_bytes.get_or_create(&of(name)).inc_by(bytes as u64);
        metrics.last_success.get_or_create(&of(name)).set(self.shared.clock.unix());
        metrics.up.get_or_create(&of(name)).set(1);
        if let Some(failing) = self.failing.take() {
            let seconds = (self.shared.clock.unix() - failing.since_unix).max(0.0).round();
            let time = humantime::format_duration(Duration::from_secs_f64(seconds));
            self.shared.tell(&format!("{name}: works again after {time}, {} segments wait", self.summary.pending));
        }
    }

    fn failed(&mut self, error: &PushError) {
        let (metrics, name) = (&self.shared.metrics, &self.backend.name);
        metrics.errors.get_or_create(&because(name, error.reason.name())).inc();
        if error.reason.class() == Class::Refused {
            return;
        }
        metrics.up.get_or_create(&of(name)).set(0);
        let now = self.shared.clock.unix();
        let is_due = self.failing.as_ref().is_none_or(|failing| now - failing.told_unix >= REMINDER_S);
        let since_unix = self.failing.as_ref().map_or(now, |failing| failing.since_unix);
        if is_due {
            self.shared.tell(&format!("{name}: {}; segments stay in the spool", with_hint(error)));
            self.failing = Some(Failing { since_unix, told_unix: now });
        }
    }

    fn refuse(&mut self, reason: Reason, samples: u64, items: &[Item], error: Option<&PushError>) {
        let name = &self.backend.name;
        *self.summary.refused.entry(reason).or_default() += samples;
        self.shared.metrics.refused_samples.get_or_create(&because(name, reason.name())).inc_by(samples);
        let now = self.shared.clock.unix();
        // After an outage there are hundreds: the first is reported, the others as a sum.
        if let Some((told_unix, more, segments)) = self.refusals.get_mut(&reason)
            && now - *told_unix < REMINDER_S
        {
            (*more, *segments) = (*more + samples, *segments + 1);
            return;
        }
        self.tell_of_refusals();
        let why = error.map_or_else(|| reason.name().to_owned(), with_hint);
        self.shared
            .tell(&format!("{}: {samples} samples of {} are not taken: {why}", self.backend.name, items[0].name));
        self.refusals.insert(reason, (now, 0, 0));
    }

    /// Reports what was not reported one by one.
    fn tell_of_refusals(&mut self) {
        for (reason, (_, samples, segments)) in &mut self.refusals {
            let (samples, segments) = (std::mem::take(samples), std::mem::take(segments));
            if segments > 0 {
                let line = format!("{samples} samples of {segments} more segments are not taken: {}", reason.name());
                self.shared.tell(&format!("{}: {line}", self.backend.name));
            }
        }
    }

    /// Waits, unless it is told to stop.
    async fn pause(&mut self, time: Duration) -> Result<(), End> {
        let clock = self.shared.clock;
        tokio::select! {
            () = clock.sleep(time) => Ok(()),
            // If the sender is gone, that is an end, too.
            _ = self.stop.wait_for(|stop| *stop) => Err(End::Stopped),
        }
    }
}

/// How long to wait after this many tries, with some jitter.
fn pause(class: Class, tries: u32, after: Option<Duration>) -> Duration {
    let longest = if class == Class::Wait { WAITING_PAUSE } else { LONGEST_PAUSE };
    let doubled = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(tries.saturating_sub(1))).min(longest);
    let asked = after.unwrap_or_default().min(LONGEST_AFTER);
    doubled.max(asked).mul_f64(0.8 + 0.4 * fastrand::f64())
}

/// A failure, and what to do about it if that is known.
fn with_hint(error: &PushError) -> String {
    error.hint.as_ref().map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
}

/// Runs work that computes or reads files on a thread of its own, without blocking other tasks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> anyhow::Result<T> {
    Ok(tokio::task::spawn_blocking(work).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_end() {
        for (class, tries, after, low, high) in [
            (Class::Retry, 1, None, 0.8, 1.2),
            (Class::Retry, 3, None, 3.2, 4.8),
            (Class::Retry, 40, None, 48.0, 72.0),
            (Class::Wait, 40, None, 240.0, 360.0),
            (Class::Retry, 1, Some(30), 24.0, 36.0),
            (Class::Retry, 1, Some(86_400), 480.0, 720.0),
        ] {
            let time = pause(class, tries, after.map(Duration::from_secs)).as_secs_f64();
            assert!((low..=high).contains(&time), "{time}");
        }
    }
}
