//! Names of the threads of a profile, asked for once when a thread is new.
//!
//! A sample brings the kernel's short name. Python's own name has to be read from the live process. That is tried as
//! soon as a thread is met, since it may not live long, and again on the next ticks, since it may not be named yet. The
//! total cost is bounded; a thread that is gone, or that Python does not name, keeps the kernel's name.

use super::follow::lock;
use super::registry::Registry;
use crate::inspect::ObjectLayout;
use crate::profile::{Profile, ThreadId};
use crate::remote::RemoteProcess;
use crate::remote::ledger::{self, Work};
use crate::snapshot::{self, SampledThread};
use crate::types::Pid;
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use tachyon_common::event::SampleRecord;
use tachyon_common::layout::Layout;

/// How many times a thread's name is asked for.
const MAX_TRIES: u8 = 4;

/// Longest time spent on one process: a thousand threads need 10 ms.
const LIMIT: Duration = Duration::from_millis(20);

/// What names may cost altogether: this much, plus 1/64 of the elapsed time.
const FREE: Duration = Duration::from_millis(50);

/// Threads that wait for their names.
#[derive(Debug)]
pub(super) struct Names {
    pending: Vec<Pending>,
    /// Number of each image's layout, from its code records.
    layouts: HashMap<u64, u32>,
    start: Instant,
    spent: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    thread: ThreadId,
    image: u64,
    tgid: u32,
    tid: u32,
    sampled: SampledThread,
    tries: u8,
}

impl Names {
    /// No thread is known.
    pub fn new() -> Self {
        Self { pending: Vec::new(), layouts: HashMap::new(), start: Instant::now(), spent: Duration::ZERO }
    }

    /// Learns the layout of an image.
    pub fn learn_layout(&mut self, image: u64, number: u32) {
        self.layouts.entry(image).or_insert(number);
    }

    /// A new profile begins, with no threads yet.
    pub fn begin_profile(&mut self) {
        self.pending.clear();
    }

    /// Forgets an image whose last process is gone.
    pub fn forget(&mut self, image: u64) {
        self.layouts.remove(&image);
        self.pending.retain(|pending| pending.image != image);
    }

    /// Whether any thread waits for its name.
    pub fn are_missing(&self) -> bool {
        !self.pending.is_empty()
    }

    /// A thread was met for the first time.
    pub fn expect(&mut self, thread: ThreadId, record: &SampleRecord) {
        let &SampleRecord { image, tgid, tid, tstate, ns_tid, .. } = record;
        if tstate != 0 {
            let sampled = SampledThread { tstate, ns_tid };
            self.pending.push(Pending { thread, image, tgid, tid, sampled, tries: 0 });
        }
    }

    /// Asks the live processes for the names that are missing, once for each process; with `again`, also those that
    /// were asked for before.
    pub fn read(&mut self, profile: &mut Profile, registry: &Mutex<Registry>, again: bool) {
        let wanted = |pending: &Pending| again || pending.tries == 0;
        if !self.pending.iter().any(wanted) || self.spent > FREE + self.start.elapsed() / 64 {
            return;
        }
        let start = Instant::now();
        let mut processes: HashMap<u32, Process> = HashMap::new();
        let layouts = &self.layouts;
        self.pending.retain_mut(|pending| {
            if !wanted(pending) || start.elapsed() > LIMIT {
                return true;
            }
            // Its code records come with the first samples; until then the name cannot be read.
            let layout = layouts.get(&pending.image).and_then(|&number| lock(registry).layout(number).copied());
            let process = processes.entry(pending.tgid).or_insert_with(|| Process::new(pending.tgid));
            if !process.may {
                return true;
            }
            let charged = ledger::charge(Work::Names, Pid(pending.tgid));
            let name = layout.and_then(|layout| process.name(&layout, pending));
            drop(charged);
            pending.tries += 1;
            if let Some(name) = &name {
                profile.threads[pending.thread.0 as usize].name.clone_from(name);
            }
            name.is_none() && pending.tries < MAX_TRIES
        });
        self.spent += start.elapsed();
    }
}

/// A process while it is asked.
struct Process {
    process: RemoteProcess,
    /// Names by ident, of each interpreter.
    names: HashMap<u64, Option<HashMap<u64, String>>>,
    /// It may still be read: it has not cost too much so far.
    may: bool,
}

impl Process {
    fn new(tgid: u32) -> Self {
        let may = ledger::may(Work::Names, Pid(tgid), Duration::ZERO);
        Self { process: RemoteProcess::at(Pid(tgid)), names: HashMap::new(), may }
    }

    fn name(&mut self, layout: &Layout, pending: &Pending) -> Option<String> {
        if ObjectLayout::of(layout).is_none() {
            // CPython sets the kernel's name, but perhaps only after the thread's first sample.
            return self.process.task(pending.tid).map(|task| task.comm);
        }
        let (interp, ident) = snapshot::identify(&self.process, layout, pending.sampled)?;
        let process = &self.process;
        let names =
            self.names.entry(interp).or_insert_with(|| snapshot::thread_names_of(process, layout, interp, LIMIT));
        names.as_ref()?.get(&ident).cloned()
    }
}
