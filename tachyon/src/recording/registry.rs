//! What is known about every process of a recording, for the code that names, accounts and reports.
//!
//! Shared by the thread that follows processes (writer) and the one that makes samples (reader). Keyed by the kernel side's
//! *instance*, never by pid alone: pids are reused. A process that execs has several entries, one for each of its programs,
//! which are told apart by their *image*. What turns out not to be CPython is removed at once, because the kernel side does
//! not report its end; an always-on recording would collect every program of the host.

mod counts;
mod process;

pub(super) use counts::{Reclaimed, SegmentCounts};
pub(super) use process::{ProcessInfo, Program, cpu_time_ns, read_details};

use super::made::Told;
use super::times::Lives;
use crate::merge::ProgramKey;
use crate::profile::Details;
use crate::types::KtimeNs;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};
use tachyon_common::event::ProcessRecord;
use tachyon_common::layout::Layout;
use tachyon_common::process::{Life, flags};

/// All processes of a recording.
#[derive(Debug, Default)]
pub(super) struct Registry {
    by_instance: HashMap<u64, ProcessInfo>,
    /// CPython programs whose processes have since executed another program.
    past: HashMap<ProgramKey, ProcessInfo>,
    /// Programs that had samples before anything was known about them; the first [`MAX_EARLY`].
    early: HashSet<ProgramKey>,
    current: HashMap<u32, u64>,
    layouts: Vec<Layout>,
    /// Runs that the kernel side counts as lost, and what has become known about them.
    reclaimed: Reclaimed,
    /// Processes that ended undecided after a look that found no CPython. The latest [`MAX_OTHERS`].
    others: VecDeque<u64>,
    /// When sampling ended: CPU time used later does not count, as no samples stand for it.
    ended_ns: Option<u64>,
    /// Processes that were met and refused, by reason, with the pids; the first [`MAX_REFUSED`].
    pub refused: Vec<String>,
    /// How many more there were.
    pub refused_more: u64,
    /// What works less well than it should, each once.
    pub notes: BTreeSet<String>,
    /// Notes to be shown on the terminal while the recording runs.
    pub told: Vec<String>,
    /// What the profile may say about processes.
    pub told_of_processes: Told,
    /// Memory is short: whatever can be rebuilt is to be dropped.
    pub shrink: bool,
    /// Images whose last process has ended, each with the time.
    pub dead_images: Vec<(u64, Instant)>,
    /// Images whose code objects make no sense: their layout was misjudged.
    pub nonsense: Vec<u64>,
    /// CPython programs that have ended or were replaced by `exec`, each with the time.
    left: VecDeque<(ProgramKey, Instant)>,
    /// CPU time, as CPython, of those programs that have been forgotten.
    forgotten_cpu_ns: u64,
    /// CPU time of segments that have been accounted for.
    cpu_of_segments_ns: u64,
    /// How many forgotten programs had run CPython to their end.
    pub forgotten: u64,
    /// Threads that have ended, by the instance of their process, where each thread's times are wanted.
    ended_threads: HashMap<u64, Vec<EndedThread>>,
    /// Ended processes that are known only because runs met them before they were inspected.
    uninspected_only: usize,
}

/// What a thread did over its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EndedThread {
    pub tid: u32,
    pub ended_ns: u64,
    pub ran_ns: u64,
    pub lives: Lives,
}

/// Most ended threads of one process that a segment lists one by one, and most processes with such threads.
const MAX_ENDED_THREADS: usize = 1000;
const MAX_WITH_ENDED_THREADS: usize = 256;
/// Most processes that could not be profiled and are listed one by one.
const MAX_REFUSED: usize = 1000;
/// Notes are about interpreters, of which a host may see a new one each minute.
const MAX_NOTES: usize = 256;
/// In a healthy recording there are only a few at a time: an `exec` is reported within milliseconds.
const MAX_EARLY: usize = 4096;
/// Most ended programs that are remembered until their `task_struct` is freed, which is mostly at once.
const MAX_OTHERS: usize = 4096;
/// Most ended processes that were met but never sampled and are listed one by one.
const MAX_UNINSPECTED_ONLY: usize = 1000;

impl Registry {
    /// Sampling starts now: samples do not stand for CPU time used before.
    pub fn sampling_starts(&mut self) {
        for info in self.by_instance.values_mut() {
            info.cpu_before_ns = 0;
            info.cpu_starts_now();
        }
        self.past.values_mut().for_each(ProcessInfo::never_counts);
        self.forgotten_cpu_ns = 0;
    }

    /// Sampling has ended: CPU time used from now on is not counted (on a busy machine the rest takes seconds).
    pub fn sampling_ended(&mut self) {
        self.ended_ns = Some(KtimeNs::now().0);
        for info in self.by_instance.values_mut().filter(|info| info.alive) {
            info.cpu_end_ns = cpu_time_ns(info.pid);
        }
    }

    /// CPU time of all processes as CPython since the start, all segments included.
    pub fn python_cpu_ns_in_all(&self) -> u64 {
        self.cpu_of_segments_ns + self.python_cpu_ns().unwrap_or(0)
    }

    /// CPU time reported or measured at this moment, less what may have been used since sampling ended.
    fn until_the_end(&self, cpu_ns: u64, ktime_ns: u64) -> u64 {
        self.ended_ns.map_or(cpu_ns, |ended_ns| cpu_ns.saturating_sub(ktime_ns.saturating_sub(ended_ns)))
    }

    pub fn insert(&mut self, instance: u64, mut info: ProcessInfo) {
        info.sampled |= self.early.remove(&ProgramKey { instance, image: info.image });
        if self.ended_ns.is_some() && info.alive && info.cpu_end_ns.is_none() {
            // If it is gone, its exit record has the time.
            info.cpu_end_ns = cpu_time_ns(info.pid).map(|cpu_ns| self.until_the_end(cpu_ns, KtimeNs::now().0));
        }
        let before = self.current.insert(info.pid, instance).filter(|&before| before != instance);
        // Its end was never reported (a full ring): it has ended all the same, since its pid has been reused.
        if let Some((before, ended)) = before.and_then(|before| Some((before, self.by_instance.get_mut(&before)?))) {
            ended.alive = false;
            let program = ProgramKey { instance: before, image: ended.image };
            self.left.push_back((program, Instant::now()));
            self.by_instance.insert(instance, info);
            return self.image_left(program.image);
        }
        self.by_instance.insert(instance, info);
    }

    pub fn get(&self, instance: u64) -> Option<&ProcessInfo> {
        self.by_instance.get(&instance)
    }

    /// What is known about a program, which its process may have left by `exec`.
    fn program(&self, key: ProgramKey) -> Option<&ProcessInfo> {
        let present = self.by_instance.get(&key.instance).filter(|info| info.image == key.image);
        present.or_else(|| self.past.get(&key))
    }

    /// The profile has a first sample of a program. Returns what is known about it.
    pub fn sampled(&mut self, key: ProgramKey) -> Option<&mut ProcessInfo> {
        let present = self.by_instance.get_mut(&key.instance).filter(|info| info.image == key.image);
        let Some(info) = present.or_else(|| self.past.get_mut(&key)) else {
            // The kernel side recognised it by its executable, and its `exec` record has not been read yet.
            if self.early.len() < MAX_EARLY {
                self.early.insert(key);
            }
            return None;
        };
        info.sampled = true;
        Some(info)
    }

    /// Programs that run now and are CPython, with their pids.
    pub fn live_programs(&self) -> Vec<(ProgramKey, u32)> {
        let live = self.by_instance.iter().filter(|(_, info)| info.alive && !info.version().is_empty());
        live.map(|(&instance, info)| (ProgramKey { instance, image: info.image }, info.pid)).collect()
    }

    /// Whether a program is the present one of a process that has not ended.
    pub fn is_alive(&self, key: ProgramKey) -> bool {
        self.by_instance.get(&key.instance).is_some_and(|info| info.alive && info.image == key.image)
    }

    /// The process that has this pid now.
    pub fn by_pid(&mut self, pid: u32) -> Option<&mut ProcessInfo> {
        self.by_instance.get_mut(self.current.get(&pid)?)
    }

    pub fn set_layout(&mut self, number: u32, layout: &Layout) {
        let at = number as usize;
        if self.layouts.len() <= at {
            self.layouts.resize(at + 1, Layout::default());
        }
        self.layouts[at] = *layout;
    }

    pub fn layout(&self, number: u32) -> Option<&Layout> {
        self.layouts.get(number as usize)
    }

    /// Selected processes that run CPython now.
    pub fn live_python(&self) -> u64 {
        self.live().filter(|info| info.is_python()).count() as u64
    }

    /// Processes that have not ended, found without scanning those that have.
    fn live(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.current.values().filter_map(|instance| self.by_instance.get(instance)).filter(|info| info.alive)
    }

    /// Whether any process is still alive that is or may become CPython.
    pub fn any_alive(&self) -> bool {
        self.live().any(|info| info.program != Program::Other)
    }

    /// Adds runs that met a process before it was inspected: lost if it is CPython, otherwise not counted as loss.
    pub fn add_uninspected(&mut self, instance: u64, count: u64, python: bool) {
        match self.by_instance.get_mut(&instance) {
            Some(info) if python => info.uninspected += count,
            _ if python => {}
            _ => self.reclaimed.not_python += count,
        }
    }

    /// A process turned out, at a look, to run CPython.
    pub fn is_python(&mut self, pid: u32, life: &Life, program: Program) {
        match self.by_instance.get_mut(&life.instance) {
            Some(info) => {
                // Its `exec` was never reported (a full ring).
                if info.image != life.image && info.is_python() {
                    let (comm, cpu_ns) = (info.comm.clone(), cpu_time_ns(pid));
                    self.begin_program(life.instance, life.image, comm, cpu_ns);
                }
                let Some(info) = self.by_instance.get_mut(&life.instance) else { return };
                info.image = life.image;
                info.sampled |= self.early.remove(&ProgramKey { instance: life.instance, image: life.image });
                info.decide(program);
                info.refresh();
            }
            None => self.insert(life.instance, ProcessInfo::new(pid, life.image, program, 0)),
        }
    }

    /// Adds what else was asked for about a process that runs CPython.
    pub fn add_details(&mut self, instance: u64, image: u64, details: Details) {
        if let Some(info) = self.by_instance.get_mut(&instance).filter(|info| info.image == image) {
            info.details = Some(Box::new(details));
            info.complete_names();
        }
    }

    /// A program says which service it belongs to.
    pub fn is_of_service(&mut self, instance: u64, image: u64, service: &str) {
        if let Some(info) = self.by_instance.get_mut(&instance).filter(|info| info.image == image) {
            service.clone_into(&mut info.service);
        }
    }

    /// Live CPython programs that could not be read completely when they were met: the recorder does not wait for pages
    /// that are not in memory.
    pub fn lacking_details(&self, most: usize) -> Vec<(u64, u64, u32)> {
        let lacks = |info: &ProcessInfo| info.details.as_ref().is_some_and(|details| !details.is_whole);
        let lacking = self.by_instance.iter().filter(|(_, info)| info.alive && info.is_python() && lacks(info));
        lacking.map(|(&instance, info)| (instance, info.image, info.pid)).take(most).collect()
    }

    /// A program was decided on; this many runs had met it by then.
    pub fn inspected(&mut self, instance: u64, uninspected: u64, python: bool) {
        let told = self.by_instance.get_mut(&instance).map(|info| info.new_of(uninspected));
        self.add_uninspected(instance, told.unwrap_or(uninspected), python);
    }

    /// A program that was not CPython has become it: what it did before was accounted for at the earlier decision.
    pub fn late(&mut self, instance: u64, uninspected: u64) {
        if let Some(info) = self.by_instance.get_mut(&instance) {
            info.new_of(uninspected);
            info.cpu_starts_now();
        }
    }

    /// The same for a program that has ended: one that was never looked at may have been CPython.
    fn add_uninspected_of_ended(&mut self, instance: u64, count: u64) {
        let Some(info) = self.by_instance.get_mut(&instance) else {
            self.reclaimed.never_inspected += count;
            return;
        };
        let count = info.new_of(count);
        if info.program == Program::Unknown && !info.looked_at {
            self.reclaimed.never_inspected += count;
        } else {
            let python = info.is_python();
            self.add_uninspected(instance, count, python);
        }
    }

    /// A program was inspected while it ran and had not been CPython so far.
    pub fn looked_at(&mut self, instance: u64, image: u64) {
        if let Some(info) = self.by_instance.get_mut(&instance).filter(|info| info.image == image) {
            info.looked_at = true;
        }
    }

    /// Runs that the kernel side counts as lost but that are not.
    pub fn not_lost(&self) -> u64 {
        self.reclaimed.not_lost()
    }

    /// A process's new program was not asked for. Its previous program stays known if it was CPython.
    pub fn turn_away(&mut self, instance: u64, uninspected: u64) {
        self.reclaimed.filtered += uninspected;
        self.leave(instance);
    }

    /// A process turned out to run something other than CPython. The kernel side does not report the end of such a process,
    /// so it is removed now and comes back with its next `exec`. If it was CPython, samples may still be on their way.
    pub fn leave(&mut self, instance: u64) {
        let Some(info) = self.by_instance.get_mut(&instance) else { return };
        info.decide(Program::Other);
        if info.ever_python() {
            self.left.push_back((ProgramKey { instance, image: info.image }, Instant::now()));
        } else {
            self.remove(instance);
        }
    }

    /// Another program begins. From now on the previous one has an entry of its own, if it was CPython.
    fn begin_program(&mut self, instance: u64, image: u64, comm: String, cpu_ns: Option<u64>) {
        let Some(info) = self.by_instance.get_mut(&instance) else { return };
        let key = ProgramKey { instance, image: info.image };
        let before = info.exec(image, comm, cpu_ns);
        info.sampled |= self.early.remove(&ProgramKey { instance, image });
        if let Some(before) = before {
            self.past.insert(key, before);
            self.left.push_back((key, Instant::now()));
            self.image_left(key.image);
        }
    }

    /// Forgets a program.
    fn remove_program(&mut self, key: ProgramKey) {
        if self.past.remove(&key).is_none() {
            self.remove(key.instance);
        }
    }

    fn remove(&mut self, instance: u64) {
        let Some(info) = self.by_instance.remove(&instance) else { return };
        if self.current.get(&info.pid) == Some(&instance) {
            self.current.remove(&info.pid);
        }
    }

    /// Nothing can run as this process any more. One that never was CPython left the registry at its exit or earlier.
    pub fn free(&mut self, record: &ProcessRecord) {
        let undecided = record.flags & (flags::PYTHON | flags::NOT_PYTHON) == 0;
        let other = record.flags & flags::NOT_PYTHON != 0 || (undecided && self.others.contains(&record.instance));
        if other {
            self.reclaimed.not_python_gone += record.uninspected;
        }
    }

    /// Notes a process that cannot be profiled.
    pub fn refuse(&mut self, line: String) {
        if self.refused.contains(&line) {
            return;
        }
        if self.refused.len() < MAX_REFUSED {
            self.refused.push(line);
        } else {
            self.refused_more += 1;
        }
    }

    /// Notes that something works less well than it should.
    pub fn note(&mut self, note: String) {
        if self.notes.len() < MAX_NOTES {
            self.notes.insert(note);
        }
    }

    /// A child: it is what its parent is until it execs.
    pub fn fork(&mut self, record: &ProcessRecord, comm: String) {
        let parent = self.current.get(&record.parent).and_then(|instance| self.by_instance.get(instance));
        let (pid, image) = (record.tgid, record.image);
        let mut info = match parent {
            Some(parent) => parent.child(pid, image, comm),
            None => ProcessInfo::unread(pid, image, comm),
        };
        if self.ended_ns.is_some_and(|ended_ns| record.ktime_ns >= ended_ns) {
            info.never_counts();
        }
        self.insert(record.instance, info);
    }

    /// A new program begins: runs that met the old one uninspected are classified by what that was. `cpu_ns` is the
    /// process's CPU time at this moment, when it could be measured.
    pub fn exec(&mut self, record: &ProcessRecord, comm: String, cpu_ns: Option<u64>) {
        // Runs that met a program that is not CPython were dealt with when that was decided.
        if record.flags & flags::NOT_PYTHON == 0 {
            self.add_uninspected_of_ended(record.instance, record.uninspected);
        }
        if self.get(record.instance).is_none() {
            self.insert(record.instance, ProcessInfo::unread(record.tgid, record.image, String::new()));
        }
        let late = self.ended_ns.is_some_and(|ended_ns| record.ktime_ns >= ended_ns);
        self.begin_program(record.instance, record.image, comm, cpu_ns);
        if let Some(info) = self.by_instance.get_mut(&record.instance).filter(|_| late) {
            info.never_counts();
        }
    }

    /// A thread of a CPython ended.
    pub fn thread_ended(&mut self, record: &ProcessRecord) {
        if self.ended_threads.len() >= MAX_WITH_ENDED_THREADS && !self.ended_threads.contains_key(&record.instance) {
            return;
        }
        let threads = self.ended_threads.entry(record.instance).or_default();
        // Its figures are in its process's account in any case.
        if threads.len() < MAX_ENDED_THREADS {
            threads.push(EndedThread {
                tid: record.parent,
                ended_ns: record.ktime_ns,
                ran_ns: record.cpu_ns,
                lives: Lives::of_ended(record),
            });
        }
    }

    /// A process ended. One that never was CPython leaves no trace.
    pub fn exit(&mut self, record: &ProcessRecord) {
        let decided = record.flags & (flags::PYTHON | flags::NOT_PYTHON) != 0;
        if record.flags & flags::PYTHON != 0 {
            self.decide_by_kernel(record);
        }
        if self.current.get(&record.tgid) == Some(&record.instance) {
            self.current.remove(&record.tgid);
        }
        let cpu_ns = self.until_the_end(record.cpu_ns, record.ktime_ns);
        let Some(info) = self.by_instance.get_mut(&record.instance) else {
            self.reclaimed.never_inspected += if decided { 0 } else { record.uninspected };
            return;
        };
        info.cpu_end_ns.get_or_insert(cpu_ns);
        info.lives_end = Some(Lives::of_ended(record));
        let looked_at = info.looked_at;
        self.add_uninspected_of_ended(record.instance, record.uninspected);
        if looked_at && !decided {
            self.others.push_back(record.instance);
            self.others.drain(..self.others.len().saturating_sub(MAX_OTHERS));
        }
        self.end(record.instance);
    }

    /// The kernel side recognised a CPython by itself, and it ended before user space could look.
    fn decide_by_kernel(&mut self, record: &ProcessRecord) {
        let hex = self.layout(record.layout).map(|layout| layout.version_hex);
        let unknown = |info: &&mut ProcessInfo| info.program == Program::Unknown && info.image == record.image;
        if let Some(hex) = hex
            && let Some(info) = self.by_instance.get_mut(&record.instance).filter(unknown)
        {
            info.decide(Program::Python(hex, crate::inspect::version_text(hex)));
        }
    }

    /// Marks a process as ended; one that never was CPython is forgotten.
    fn end(&mut self, instance: u64) {
        let Some(info) = self.by_instance.get_mut(&instance) else { return };
        info.alive = false;
        let (image, was_python) = (info.image, info.ever_python());
        if !was_python {
            self.remove(instance);
            return;
        }
        if self.current.get(&info.pid) == Some(&instance) {
            self.current.remove(&info.pid);
        }
        self.left.push_back((ProgramKey { instance, image }, Instant::now()));
        self.image_left(image);
    }

    /// A process has left an image: if it was the last one, the image is dead.
    fn image_left(&mut self, image: u64) {
        if self.pids_of_image(image).is_empty() {
            self.dead_images.push((image, Instant::now()));
        }
    }

    /// Takes the images that have been dead for so long that no record of theirs can still be on its way.
    pub fn take_dead_images(&mut self, age: Duration) -> Vec<u64> {
        let old = self.dead_images.iter().take_while(|(_, since)| since.elapsed() >= age).count();
        self.dead_images.drain(..old).map(|(image, _)| image).collect()
    }

    /// Pids whose present image is this one.
    pub fn pids_of_image(&self, image: u64) -> Vec<u32> {
        self.live().filter(|info| info.image == image).map(|info| info.pid).collect()
    }

    /// All programs that are or were CPython.
    pub fn python(&self) -> impl Iterator<Item = &ProcessInfo> {
        self.by_instance.values().filter(|info| info.ever_python()).chain(self.past.values())
    }
}

#[cfg(test)]
mod tests;
