//! A process that the mapper looks after, and when it is due.

use crate::remote::ledger::user_of;
use crate::types::KtimeNs;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A process that the mapper looks after.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub image: u64,
    pub instance: u64,
    /// When it is due to be looked at.
    pub due: Option<Instant>,
    /// When it was last looked at.
    pub looked: Option<Instant>,
    /// The same by the clock of mapping events: everything mapped before is known.
    pub seen_at: KtimeNs,
    /// It is not looked at before then, unless samples meet code without rules.
    pub rests_until: Option<Instant>,
    /// Even for those it is not looked at before this: as long as the previous look took.
    pub meets_from: Option<Instant>,
    /// Digest of the executable mappings that were last published.
    pub published: u64,
    /// Digest of those that the kernel side last received.
    pub mapped: u64,
    /// Where its stacks end for want of rules.
    pub met: BTreeSet<u64>,
    /// Where stacks that end for want of rules began.
    pub stacks: BTreeSet<u64>,
    /// Where code of its files called code that it generated and that has no name.
    pub callers: BTreeSet<u64>,
    /// Some of its code is to get rules but has none yet: small files, and those that samples met.
    pub more: bool,
    /// It has been looked at, and has its first rules.
    pub looked_at: bool,
    /// Its main thread's stack has been looked through for code that it runs.
    pub hinted: bool,
    /// How long looks at it have taken.
    pub spent: Duration,
    /// Version of the space that was last written.
    pub version: u32,
    /// The user it is charged to.
    pub user: u32,
    /// How many ranges the space that was last written has.
    pub ranges: u32,
}

impl Process {
    pub fn new(pid: u32, image: u64, instance: u64) -> Self {
        let (met, stacks, callers) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        Self {
            image,
            instance,
            due: None,
            looked: None,
            seen_at: KtimeNs(0),
            rests_until: None,
            meets_from: None,
            published: 0,
            mapped: 0,
            met,
            stacks,
            callers,
            more: false,
            looked_at: false,
            hinted: false,
            spent: Duration::ZERO,
            version: 0,
            user: user_of(pid),
            ranges: 0,
        }
    }

    /// It as it is, with what samples have met so far, which a look is about to deal with.
    pub fn take(&mut self) -> Self {
        let (met, stacks) = (std::mem::take(&mut self.met), std::mem::take(&mut self.stacks));
        let callers = std::mem::take(&mut self.callers);
        Self { met, stacks, callers, ..self.clone() }
    }

    /// Asks for a look because samples meet code without rules: they are reported until it has been looked at.
    pub fn meet(&mut self, at: Instant) {
        let at = self.meets_from.map_or(at, |from| from.max(at));
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    /// Asks for a look at a given time, or earlier if one was already asked for; not while it rests.
    pub fn ask(&mut self, at: Instant) {
        let at = self.rests_until.map_or(at, |until| until.max(at));
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }
}
