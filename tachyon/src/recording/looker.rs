//! A thread that looks at targets from outside now and then, until it is stopped.

use crate::kernel::drop_privileges;
use crate::remote::{End, Patience};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Such a thread, and the way to stop it.
pub(super) struct Looker {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Looker {
    /// Runs `run`, which looks until the sender of its channel is gone. The thread has no privileges but those to read.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(name: &str, end: End, run: impl FnOnce(&Receiver<()>) + Send + 'static) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // It reads through helper processes. If the kernel refuses, the thread merely has more rights than it needs.
            let _refused = drop_privileges();
            let _concerned = end.concerns_this_thread(Patience::Short);
            run(&stopped);
        })?;
        Ok(Self { stop, thread })
    }

    /// Stops looking.
    pub fn stop(self) {
        drop(self.stop);
        // If it panicked, the panic has been printed; what it would have seen is missing.
        let _panicked = self.thread.join();
    }
}
