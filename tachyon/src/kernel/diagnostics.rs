//! The diagnostic build of the object (`cargo xtask bpf build --log`) reports why walks stop; this module reads and
//! prints that.
//!
//! Only a debug build of the profiler loads an object other than its own: the one that `TACHYON_BPF_LOG` names. The
//! object's output goes to standard error, at most ten lines a second from each CPU (`tachyon-ebpf/src/diagnostics.rs`).

use aya::Ebpf;
use aya_log::EbpfLogger;
use log::{Log, Metadata, Record};
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use tachyon_common::stop::StopReason;

/// Names the diagnostic object.
const OBJECT: &str = "TACHYON_BPF_LOG";
/// The map that aya-log's kernel side makes.
const RING: &str = "AYA_LOGS";

/// What `--bpf-log` named.
static NAMED: OnceLock<PathBuf> = OnceLock::new();

/// From now on, recordings of this process load the diagnostic object at this path; in debug builds only.
#[cfg(debug_assertions)]
pub fn log_with(object: PathBuf) {
    // The first call wins.
    let _named = NAMED.set(object);
}

/// The object to load: the diagnostic one if a debug build is told to, otherwise the profiler's own.
pub(super) fn object_or(own: &'static [u8]) -> Cow<'static, [u8]> {
    let variable = || std::env::var_os(OBJECT).filter(|path| !path.is_empty()).map(PathBuf::from);
    let Some(path) = NAMED.get().cloned().or_else(variable).filter(|_| cfg!(debug_assertions)) else {
        return Cow::Borrowed(own);
    };
    match std::fs::read(&path) {
        Ok(bytes) => Cow::Owned(bytes),
        Err(error) => {
            eprintln!("tachyon: {OBJECT}: cannot read {}: {error}; the shipped object is loaded", path.display());
            Cow::Borrowed(own)
        }
    }
}

/// Prints the diagnostic object's output until it is dropped.
pub(super) struct Diagnostics {
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Diagnostics {
    /// `None` for the shipped object, which has no output.
    pub(super) fn start(ebpf: &mut Ebpf) -> Option<Self> {
        ebpf.map(RING)?;
        let mut logger = EbpfLogger::init_with_logger(ebpf, Printer).ok()?;
        let ended = Arc::new(AtomicBool::new(false));
        let end = Arc::clone(&ended);
        let read = move || {
            while !end.load(Ordering::Acquire) {
                logger.flush();
                std::thread::sleep(Duration::from_millis(100));
            }
            logger.flush();
        };
        let thread = Builder::new().name("tachyon-bpf-log".to_owned()).spawn(read).ok()?;
        Some(Self { ended, thread: Some(thread) })
    }
}

impl Drop for Diagnostics {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

/// One line for each record.
struct Printer;

impl Log for Printer {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        eprintln!("tachyon: bpf: {}", named(&record.args().to_string()));
    }

    fn flush(&self) {}
}

/// The line with each `stop NUMBER` as `stop NAME`.
fn named(line: &str) -> String {
    let mut words = Vec::new();
    for word in line.split(' ') {
        let number = words.last().filter(|before| **before == "stop").and_then(|_| word.parse().ok());
        let name: Option<&str> = number.and_then(StopReason::from_number).map(StopReason::name);
        words.push(name.unwrap_or(word));
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_are_named() {
        let line = "pid 7 thread 8: python stop 8 at ffff, native stop 15 at 0; 99 not told";
        let wanted =
            "pid 7 thread 8: python stop unreadable_code at ffff, native stop unreadable_stack at 0; 99 not told";
        assert_eq!(named(line), wanted);
        assert_eq!(named("stop 250"), "stop 250");
    }
}
