//! The second look: a thread that has waited for a second shows up within the next one.

use super::Sleepers;
use crate::kernel::{Kernel, drop_privileges};
use crate::recording::follow::lock;
use crate::recording::registry::Registry;
use crate::recording::samples::{Lasting, Told};
use crate::remote::{End, Patience};
use crate::types::KtimeNs;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads that have waited for so long are looked at, so often.
const SECOND: Duration = Duration::from_secs(1);
/// How long one look may take, where the machine is busy.
const LOOK: Duration = Duration::from_secs(2);
/// How much CPU time looks have, in a second and at first: threads that sleep are read once, those that sleep a little longer than a
/// second again and again.
const SHARE: f64 = 0.02;
const AT_FIRST: Duration = Duration::from_secs(1);

/// The thread that looks.
pub(in crate::recording) struct SecondLook {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

/// What it looks with.
pub(in crate::recording) struct Means {
    pub sleepers: Arc<Mutex<Sleepers>>,
    pub registry: Arc<Mutex<Registry>>,
    pub kernel: Arc<Mutex<Kernel>>,
    pub end: End,
    /// Whom to tell of waits that last, where samples are written as they come.
    pub told: Option<Sender<Told>>,
}

impl SecondLook {
    /// Looks once a second from now on.
    ///
    /// # Errors
    /// When there can be no thread for it.
    pub fn start(means: Means) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("tachyon-sleepers".to_owned()).spawn(move || {
            // What it reads it reads through helpers. Where the kernel refuses, it has more rights than it needs.
            let _refused = drop_privileges();
            let _concerned = means.end.concerns_this_thread(Patience::Short);
            run(&means, &stopped);
        })?;
        Ok(Self { stop, thread })
    }

    /// Looks no more.
    pub fn stop(self) {
        drop(self.stop);
        // One that has panicked has said so; the last look is another's.
        let _panicked = self.thread.join();
    }
}

/// Threads that are asleep when the recording begins are looked at so soon: what is known of their files then is known at the first cut.
const FIRST: Duration = Duration::from_millis(50);

fn run(means: &Means, stopped: &Receiver<()>) {
    let (mut credit, mut pause) = (AT_FIRST, FIRST);
    while matches!(stopped.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
        pause = SECOND;
        let begun = cpu_time();
        let mut sleepers = lock(&means.sleepers);
        if !credit.is_zero() {
            sleepers.look(&means.registry, &means.kernel, SECOND, LOOK);
        }
        credit = (credit.saturating_sub(cpu_time().saturating_sub(begun)) + SECOND.mul_f64(SHARE)).min(AT_FIRST);
        let Some(told) = &means.told else { continue };
        // Told while they are held: a cut must not come between.
        let parts = sleepers.tell(&mut lock(&means.kernel), KtimeNs::now());
        if !parts.is_empty() && told.send(Told::Lasting(Lasting { parts, unread: 0 })).is_err() {
            return;
        }
    }
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}
