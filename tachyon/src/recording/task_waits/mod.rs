//! Tasks and greenlets that wait side by side while their event loop is idle (`--wall --async`): read from outside, again and again. A
//! thread's greenlets are one event loop's tasks here.
//!
//! Time is cut into stretches of a tenth of a second, or longer ones where looks are expensive. At a random moment in each of them every
//! event loop is looked at once. If its thread sleeps and runs no task, it is idle: what its tasks await does not change while the
//! thread is not switched, and each of them gets the thread's ticks of that stretch. So no program that does not know the random
//! moments is sampled more or less often than it waits. A loop that goes on while its tasks are read gets no such samples then: its
//! ticks are counted as lost.

mod look;

pub(super) use look::LookedTasks;

use super::looker::Looker;
use super::registry::Registry;
use super::samples::Told;
use crate::kernel::Kernel;
use crate::remote::ledger::thread_time;
use crate::remote::{End, helpers_cpu_time};
use crate::types::KtimeNs;
use look::Looks;
use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Shortest and longest stretch of time with one look.
const SHORTEST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);
/// How much of one CPU looks may take: if they cost more, stretches are longer. A build that is not optimised may take more: its looks
/// are slower, and it is there for tests, which want many.
const SHARE: f64 = 0.01 * SLOWER;
const SLOWER: f64 = if cfg!(debug_assertions) { 20.0 } else { 1.0 };
/// How many times as long as the previous one a stretch is, at most.
const MOST_GROWTH: u32 = 4;

/// Why tasks of an idle loop have no samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum NotRead {
    /// The loop went on while they were read.
    WentOn,
    /// They could not be read.
    Unreadable,
    /// Other processes used up the time, or this one has taken too much of it.
    Late,
}

impl NotRead {
    pub const ALL: [Self; 3] = [Self::WentOn, Self::Unreadable, Self::Late];

    /// Its key in the account.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WentOn => "went_on",
            Self::Unreadable => "unreadable",
            Self::Late => "late",
        }
    }
}

/// An event loop that was idle at a look.
#[derive(Clone, Debug)]
pub(super) struct IdleLoop {
    pub of: Arc<LookedTasks>,
    /// Index of the loop.
    pub event_loop: usize,
    /// The loop's thread.
    pub tid: u32,
    /// Ticks for which each task waited.
    pub weight: u64,
}

/// The result of one look.
#[derive(Clone, Debug, Default)]
pub(super) struct TaskWaits {
    /// The moment.
    pub at: KtimeNs,
    pub idle: Vec<IdleLoop>,
    /// Ticks of idle loops whose tasks could not be read.
    pub not_read: BTreeMap<NotRead, u64>,
}

impl TaskWaits {
    pub fn is_empty(&self) -> bool {
        self.idle.is_empty() && self.not_read.is_empty()
    }
}

/// What it looks with.
pub(super) struct Means {
    pub registry: Arc<Mutex<Registry>>,
    pub kernel: Arc<Mutex<Kernel>>,
    pub told: Sender<Told>,
}

/// Starts looking.
///
/// # Errors
/// When no thread can be started for it.
pub(super) fn start(means: Means, end: End) -> std::io::Result<Looker> {
    Looker::start("tachyon-tasks", end, move |stopped| run(&means, stopped))
}

fn run(means: &Means, stopped: &Receiver<()>) {
    let mut looks = Looks::default();
    // The cost of this thread, and of the helpers that read for it and others.
    let cost = || thread_time() + helpers_cpu_time();
    let (mut begin, mut length) = (KtimeNs::now().0, SHORTEST);
    loop {
        let stretch = begin..begin + nanos(length);
        let drawn = fastrand::u64(stretch.clone());
        if !sleep_until(drawn, stopped) {
            return;
        }
        let used = cost();
        let waits = looks.look(&means.registry, &means.kernel, stretch.clone());
        length = next_length(cost().saturating_sub(used), length);
        if !waits.is_empty() && means.told.send(Told::TaskWaits(waits)).is_err() {
            return;
        }
        if !sleep_until(stretch.end, stopped) {
            return;
        }
        begin = stretch.end;
    }
}

/// How long the next stretch is, given the CPU time of a look and the length of the stretch that it ended. The first look at a
/// process costs more than those after it.
fn next_length(cost: Duration, length: Duration) -> Duration {
    cost.div_f64(SHARE).clamp(SHORTEST, LONGEST).min(length * MOST_GROWTH)
}

/// False when there is to be no further look.
fn sleep_until(moment: u64, stopped: &Receiver<()>) -> bool {
    let rest = Duration::from_nanos(moment.saturating_sub(KtimeNs::now().0));
    matches!(stopped.recv_timeout(rest), Err(RecvTimeoutError::Timeout))
}

fn nanos(length: Duration) -> u64 {
    u64::try_from(length.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_cost_much_are_rare() {
        assert_eq!(next_length(Duration::ZERO, LONGEST), SHORTEST);
        assert_eq!(next_length(Duration::from_micros(500), LONGEST), SHORTEST);
        assert_eq!(next_length(Duration::from_millis(20).mul_f64(SLOWER), LONGEST), Duration::from_secs(2));
        assert_eq!(next_length(Duration::from_secs(2), LONGEST), LONGEST);
        assert_eq!(next_length(Duration::from_secs(2), SHORTEST), SHORTEST * 4);
    }
}
