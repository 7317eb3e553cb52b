//! Periodic work while a recording runs, on one thread that wakes about twice a second at first, later once in two seconds.
//!
//! The intervals between samples are drawn anew ([`Kernel::vary_intervals`]). It also looks for CPUs that went offline and came back: the
//! kernel ends the sampling event of a CPU that goes and gives it none when it is back, so the event is attached anew. Where waits are
//! sampled, it also ends the measuring of BPF after the first turns ([`Stats`]).

use super::follow::lock;
use super::give_back::give_back;
use super::registry::Registry;
use super::stats::Stats;
use crate::kernel::{Kernel, drop_privileges_but_sampling, online_cpus};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often CPUs are checked where no intervals are drawn; otherwise both are done at the same time. Reading the list takes
/// some microseconds.
const TURN: Duration = Duration::from_millis(500);

/// The thread.
pub(super) struct Timer {
    /// Dropping it ends the thread.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Timer {
    /// Starts, once the event is attached. `gives_back`: after the first turn, what only the first samples needed is given back.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(
        kernel: &Arc<Mutex<Kernel>>,
        registry: &Arc<Mutex<Registry>>,
        stats: &Arc<Stats>,
        mut gives_back: bool,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let (kernel, registry, stats) = (Arc::clone(kernel), Arc::clone(registry), Arc::clone(stats));
        let mut known = Known::of(online_cpus().unwrap_or_default());
        let thread = std::thread::Builder::new().name("tachyon-timer".to_owned()).spawn(move || {
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges_but_sampling();
            loop {
                let due = lock(&kernel).vary_intervals();
                let wait = due.map_or(TURN, |due| due.saturating_duration_since(Instant::now()));
                if stopped.recv_timeout(wait) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                look_for_cpus(&mut known, &kernel, &registry);
                stats.turn(&lock(&kernel));
                if std::mem::take(&mut gives_back) {
                    give_back();
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends it: from now on the event stays as it is.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        // Its panic is on standard error.
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Attaches the event anew if a CPU has come back.
fn look_for_cpus(known: &mut Known, kernel: &Mutex<Kernel>, registry: &Mutex<Registry>) {
    let Some(back) = online_cpus().ok().and_then(|now| known.turn(now)) else { return };
    let attached = lock(kernel).reattach_sampling();
    let mut registry = lock(registry);
    for cpu in back {
        registry.note(match &attached {
            Ok(()) => format!("CPU {cpu} was not there for a while: what ran on it since it is back is sampled"),
            Err(error) => format!("CPU {cpu} has come back, and nothing on it is sampled: {error}"),
        });
    }
}

/// Which CPUs have an event.
#[derive(Debug)]
struct Known(BTreeSet<u32>);

impl Known {
    fn of(online: Vec<u32>) -> Self {
        Self(online.into_iter().collect())
    }

    /// CPUs that have come online, if any. The event of a CPU that has gone is gone as well.
    fn turn(&mut self, online: Vec<u32>) -> Option<Vec<u32>> {
        let online: BTreeSet<u32> = online.into_iter().collect();
        let come: Vec<u32> = online.difference(&self.0).copied().collect();
        self.0 = online;
        (!come.is_empty()).then_some(come)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_comes_back_is_told_once() {
        let mut known = Known::of(vec![0, 1, 2, 3]);
        assert_eq!(known.turn(vec![0, 1, 2, 3]), None);
        assert_eq!(known.turn(vec![0, 3]), None);
        assert_eq!(known.turn(vec![0, 2, 3]), Some(vec![2]));
        assert_eq!(known.turn(vec![0, 2, 3]), None);
        assert_eq!(known.turn(vec![0, 1, 2, 3, 4]), Some(vec![1, 4]), "one that was never there, too");
    }
}
