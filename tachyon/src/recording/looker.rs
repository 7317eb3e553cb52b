//! A thread that looks at targets from outside now and then, until it is stopped.

use crate::kernel::drop_privileges;
use crate::remote::{End, Patience};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Such a thread.
pub(super) struct Looker {
    stop: Sender<()>,
    thread: JoinHandle<()>,
}

impl Looker {
    /// Has `run` look until what it is given has no sender any more. The thread has no privileges but those to read.
    ///
    /// # Errors
    /// When there can be no thread for it.
    pub fn start(name: &str, end: End, run: impl FnOnce(&Receiver<()>) + Send + 'static) -> std::io::Result<Self> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            // What it reads it reads through helpers. Where the kernel refuses, it has more rights than it needs.
            let _refused = drop_privileges();
            let _concerned = end.concerns_this_thread(Patience::Short);
            run(&stopped);
        })?;
        Ok(Self { stop, thread })
    }

    /// Looks no more.
    pub fn stop(self) {
        drop(self.stop);
        // One that has panicked has said so; what it would have seen is missing.
        let _panicked = self.thread.join();
    }
}
