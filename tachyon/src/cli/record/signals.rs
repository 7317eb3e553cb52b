//! Signals that end a recording.
//!
//! Every signal that would end the program finishes the file instead, whoever sends it and however early: the handlers
//! are installed before the first file is created.

use nix::sys::signal::Signal as Number;
use std::io;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a signal says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli) enum End {
    /// The recording is to end; a signal that a supervisor sends only to the profiler is passed on to the command.
    Asked(Option<Number>),
    /// A child has ended, stopped or continued.
    ChildChanged,
}

/// The handlers.
pub(in crate::cli) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Absent if it was ignored when the program was started, as under `nohup`.
    hangup: Option<Signal>,
    child: Signal,
    /// Those that mean nothing here, but would otherwise end the program with its files half done.
    others: [Signal; 4],
}

impl Signals {
    /// Installs the handlers, inside a runtime.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn take() -> io::Result<Self> {
        let hangup = (!is_ignored(libc::SIGHUP)).then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup,
            child: signal(SignalKind::child())?,
            others: [
                signal(SignalKind::quit())?,
                signal(SignalKind::user_defined1())?,
                signal(SignalKind::user_defined2())?,
                signal(SignalKind::alarm())?,
            ],
        })
    }

    /// The next one.
    pub async fn next(&mut self) -> End {
        let [quit, user1, user2, alarm] = &mut self.others;
        tokio::select! {
            _ = self.interrupt.recv() => End::Asked(None),
            _ = quit.recv() => End::Asked(None),
            _ = user1.recv() => End::Asked(None),
            _ = user2.recv() => End::Asked(None),
            _ = alarm.recv() => End::Asked(None),
            _ = self.terminate.recv() => End::Asked(Some(Number::SIGTERM)),
            _ = received(&mut self.hangup) => End::Asked(Some(Number::SIGHUP)),
            _ = self.child.recv() => End::ChildChanged,
        }
    }
}

/// The next of these signals; never one that is not listened to.
async fn received(signal: &mut Option<Signal>) -> Option<()> {
    match signal {
        Some(signal) => signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Whether a signal was ignored when the program was started.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: SIG_DFL, no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: writes the current action into `action`, and changes nothing.
    let known = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) } == 0;
    known && action.sa_sigaction == libc::SIG_IGN
}

/// From now on an interrupt ends this process at once.
pub(in crate::cli) fn abort_on_interrupt() {
    // SAFETY: restores the default action, which runs no code of this program.
    unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
}
