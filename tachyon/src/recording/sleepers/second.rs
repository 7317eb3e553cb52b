//! The periodic look: a thread that has waited for a second is reported within the next one.

use super::Sleepers;
use crate::kernel::Kernel;
use crate::recording::follow::lock;
use crate::recording::looker::Looker;
use crate::recording::registry::Registry;
use crate::recording::samples::{Lasting, Told};
use crate::remote::End;
use crate::remote::ledger::thread_time;
use crate::types::KtimeNs;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a thread must have waited to be looked at, and how often looks happen.
const SECOND: Duration = Duration::from_secs(1);
/// How long one look may take on a busy machine.
const LOOK: Duration = Duration::from_secs(2);
/// CPU time that looks may use, per second and at first: threads that sleep are read once, but those that keep sleeping for a little
/// over a second are read again and again.
const SHARE: f64 = 0.02;
const AT_FIRST: Duration = Duration::from_secs(1);

/// What it looks with.
pub(in crate::recording) struct Means {
    pub sleepers: Arc<Mutex<Sleepers>>,
    pub registry: Arc<Mutex<Registry>>,
    pub kernel: Arc<Mutex<Kernel>>,
    /// Where to report waits that last, if samples are written as they come.
    pub told: Option<Sender<Told>>,
}

/// Looks once a second from now on.
///
/// # Errors
/// When the thread cannot be made.
pub(in crate::recording) fn start(means: Means, end: End) -> std::io::Result<Looker> {
    Looker::start("tachyon-sleepers", end, move |stopped| run(&means, stopped))
}

/// Threads that are asleep when the recording begins are looked at this soon: what is then learned about their files is ready at the
/// first cut.
const FIRST: Duration = Duration::from_millis(50);

fn run(means: &Means, stopped: &Receiver<()>) {
    let (mut credit, mut pause) = (AT_FIRST, FIRST);
    while matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
        pause = SECOND;
        let begun = thread_time();
        let mut sleepers = lock(&means.sleepers);
        if !credit.is_zero() {
            sleepers.look(&means.registry, &means.kernel, SECOND, LOOK);
        }
        credit = (credit.saturating_sub(thread_time().saturating_sub(begun)) + SECOND.mul_f64(SHARE)).min(AT_FIRST);
        let Some(told) = &means.told else { continue };
        // Sent while the lock is held: a cut must not come in between.
        let parts = sleepers.tell(&mut lock(&means.kernel), KtimeNs::now());
        if !parts.is_empty() && told.send(Told::Lasting(Lasting { parts, unread: 0 })).is_err() {
            return;
        }
    }
}
