//! How a recording is doing.

use super::{Parts, Running};
use crate::recording::follow::lock;
use crate::recording::request::Targets;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How a recording is doing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Since sampling began.
    pub elapsed: Duration,
    /// Samples so far.
    pub samples: u64,
    /// Selected processes that run CPython now.
    pub processes: u64,
    /// Runs lost so far, by whatever cause.
    pub lost: u64,
    /// Why there is no point in going on.
    pub over: Option<Over>,
    /// What has begun to work less well than it should since the last call, each once.
    pub told: Vec<String>,
}

/// Why a recording has nothing more to record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Over {
    /// All targets that were given by pid have ended.
    TargetsGone,
    /// The sink failed.
    SinkFailed,
    /// The limit of memory is reached.
    NoMemory,
}

impl Running {
    /// A descriptor that is readable when [`Running::status`] has something new to report, numbers aside.
    pub fn news(&self) -> BorrowedFd<'_> {
        self.parts.bells.news.as_fd()
    }

    /// How it is doing.
    ///
    /// # Errors
    /// When the counters cannot be read from the kernel.
    pub fn status(&mut self) -> anyhow::Result<Status> {
        // Before anything is read: later news rings again.
        self.parts.bells.news.heard();
        let Parts { request, live, limiter, started, .. } = &self.parts;
        let counters = lock(&self.parts.kernel).counters()?;
        let mut told = limiter.told();
        let mut registry = lock(&self.parts.registry);
        told.append(&mut registry.told);
        self.said.extend(told.iter().cloned());
        let over = if live.failed.load(Ordering::Relaxed) {
            Some(Over::SinkFailed)
        } else if live.no_memory.load(Ordering::Relaxed) {
            Some(Over::NoMemory)
        } else {
            let gone = matches!(request.targets, Targets::Pids(_)) && !registry.any_alive();
            gone.then_some(Over::TargetsGone)
        };
        Ok(Status {
            elapsed: started.elapsed(),
            samples: live.stored.load(Ordering::Relaxed),
            processes: registry.live_python(),
            lost: counters.loss.iter().sum::<u64>().saturating_sub(self.not_lost + registry.not_lost()),
            over,
            told,
        })
    }
}
