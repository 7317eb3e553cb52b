//! Follows processes while a recording runs: starts, execs, late mappings, ends.
//!
//! A thread of its own, because a process that lives 50 ms must be inspected within a few: it sleeps until the
//! kernel side's lifecycle ring or the mapping events wake it.

mod thread;
mod verdict;

pub(super) use thread::Follow;

use self::verdict::{is_library, other, refusal};
use super::native::News;
use super::registry::{ProcessInfo, Registry, Verdict, cpu_time_ns};
use super::samples::SETTLED;
use crate::cli::preflight::target_hint;
use crate::discover::Filter;
use crate::discover::watch::WatchEvent;
use crate::inspect::{self, ElfCache, Interpreter};
use crate::kernel::{FileKey, Kernel, KernelError};
use crate::merge::comm_text;
use crate::remote::{FileIdentity, RemoteError, RemoteProcess};
use crate::types::{KtimeNs, Pid};
use std::collections::HashMap;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tachyon_common::event::{ProcessRecord, kind};
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::walk::mix;

/// A program that has mapped no CPython this long after its `exec` is taken for something else, until it does.
const UNDECIDED: Duration = Duration::from_secs(2);
/// How often the undecided are looked through.
const TURN: Duration = Duration::from_millis(500);
/// The same where no mapping events tell when to look, while anything is undecided.
const QUICK_TURN: Duration = Duration::from_millis(10);

/// Locks without minding a thread that panicked while it held the lock: its panic is reported when it is joined.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Which processes belong to the recording.
pub(super) struct Wanted {
    /// Those that are met by chance too.
    pub all_python: bool,
    /// Children of those that do.
    pub follow_children: bool,
    /// Only these of them.
    pub filter: Filter,
}

/// What following needs and leaves behind.
pub(super) struct Follower {
    kernel: Arc<Mutex<Kernel>>,
    registry: Arc<Mutex<Registry>>,
    cache: ElfCache,
    /// Entries get these flags: selected, and perhaps their children too.
    flags: u32,
    all_python: bool,
    filter: Filter,
    /// Selected processes without a verdict: when their image was new.
    undecided: HashMap<u32, Instant>,
    fresh: u64,
    /// Who looks at mappings, where native stacks are wanted.
    mapper: Option<Sender<News>>,
}

impl Follower {
    pub fn new(kernel: Arc<Mutex<Kernel>>, registry: Arc<Mutex<Registry>>, wanted: Wanted) -> Self {
        let Wanted { all_python, follow_children, filter } = wanted;
        let flags = flags::SELECTED | if follow_children { flags::FOLLOW } else { 0 };
        let fresh = lock(&kernel).seed();
        let (cache, undecided) = (ElfCache::default(), HashMap::new());
        Self { kernel, registry, cache, flags, all_python, filter, undecided, fresh, mapper: None }
    }

    /// From now on tells of processes and their mappings.
    pub fn tell(&mut self, mapper: Sender<News>) {
        self.mapper = Some(mapper);
    }

    fn news(&self, news: impl FnOnce() -> News) {
        if let Some(mapper) = &self.mapper {
            // One that has panicked is told of at the end.
            let _ended = mapper.send(news());
        }
    }

    fn is_python(&self, pid: u32, image: u64, instance: u64, interpreter: Option<FileIdentity>) {
        self.news(|| News::Python { pid, image, instance, interpreter });
    }

    /// Whether a process is one of those asked for.
    ///
    /// # Errors
    /// When it is gone.
    pub fn admits(&self, pid: Pid) -> Result<bool, RemoteError> {
        if self.filter.is_empty() { Ok(true) } else { self.filter.admits(&RemoteProcess::at(pid)) }
    }

    /// Looks at many processes, one after another: a library of all of them is looked up once.
    pub fn sweep(&mut self, look: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.cache.begin_sweep();
        let looked = look(self);
        self.cache.end_sweep();
        looked
    }

    /// Looks at a process and gives it an entry. `Ok(None)`: not CPython.
    ///
    /// # Errors
    /// When it cannot be inspected, or the kernel's tables are full.
    pub fn adopt(&mut self, pid: u32) -> anyhow::Result<Option<Box<Interpreter>>> {
        if !self.admits(Pid(pid))? {
            self.set_aside(pid, self.flags & !flags::SELECTED)?;
            return Ok(None);
        }
        let process = RemoteProcess::at(Pid(pid));
        let verdict = inspect::inspect(&process, &mut self.cache);
        let fresh = self.fresh();
        let (entry, known, interpreter) = match verdict {
            Ok(inspect::Verdict::Python(interpreter)) => match self.is_sane(&process, &interpreter) {
                Ok(()) => {
                    let entry = self.entry_of(&interpreter)?;
                    let known = Verdict::Python(interpreter.layout.version_hex, interpreter.version_text());
                    (entry, known, Ok(Some(interpreter)))
                }
                Err(error) => (other(), Verdict::Other, Err(error.into())),
            },
            Ok(inspect::Verdict::NotPython) => (other(), Verdict::Other, Ok(None)),
            Ok(refused @ inspect::Verdict::Unsupported { .. }) => (other(), Verdict::Other, Err(refusal(&refused))),
            Err(error) if error.is_gone() => return Err(error.into()),
            Err(error) => (other(), Verdict::Other, Err(error.into())),
        };
        let entry = ProcessEntry { flags: entry.flags | self.flags, image: fresh, instance: fresh, ..entry };
        let added = lock(&self.kernel).add_process(pid, &entry)?;
        if added && known != Verdict::Other {
            lock(&self.registry).insert(fresh, ProcessInfo::new(pid, fresh, known, cpu_time_ns(pid).unwrap_or(0)));
        }
        if added && let Ok(Some(interpreter)) = &interpreter {
            self.is_python(pid, fresh, fresh, Some(interpreter.file));
        }
        interpreter
    }

    /// Gives a process that has not begun to run anything an entry; it is inspected at its `exec`.
    ///
    /// # Errors
    /// When the kernel's table is full.
    pub fn expect(&mut self, pid: u32) -> Result<(), KernelError> {
        let fresh = self.fresh();
        let entry = ProcessEntry { flags: self.flags, image: fresh, instance: fresh, ..ProcessEntry::default() };
        lock(&self.kernel).set_process(pid, &entry)?;
        lock(&self.registry).insert(fresh, ProcessInfo::new(pid, fresh, Verdict::Unknown, 0));
        Ok(())
    }

    /// Marks a process as none of ours (a kernel thread, the profiler itself).
    ///
    /// # Errors
    /// When the kernel's table is full.
    pub fn ignore(&mut self, pid: u32) -> Result<(), KernelError> {
        self.set_aside(pid, self.flags)
    }

    fn set_aside(&mut self, pid: u32, flags: u32) -> Result<(), KernelError> {
        let fresh = self.fresh();
        let entry =
            ProcessEntry { flags: flags | flags::NOT_PYTHON, image: fresh, instance: fresh, ..ProcessEntry::default() };
        lock(&self.kernel).add_process(pid, &entry).map(drop)
    }

    /// A number no image and no process has had: the kernel side hashes clock and tgid, this a counter.
    fn fresh(&mut self) -> u64 {
        self.fresh = self.fresh.wrapping_add(1);
        mix(self.fresh, 0x7461_6368_796f_6e00)
    }

    /// Tests a layout that was not taken from this very build's headers on the live runtime.
    fn is_sane(&self, process: &RemoteProcess, interpreter: &Interpreter) -> Result<(), inspect::SelfTestError> {
        if let Some(error) = &interpreter.entering_error {
            let note = format!(
                "{}: {error}: samples taken while the evaluator is entered may be wrong",
                interpreter.path.display()
            );
            lock(&self.registry).note(note);
        }
        if interpreter.known_build {
            return Ok(());
        }
        match inspect::self_test(process, interpreter) {
            Err(inspect::SelfTestError::NotInitialized) => Ok(()),
            tested => tested,
        }
    }

    fn entry_of(&mut self, interpreter: &Interpreter) -> Result<ProcessEntry, KernelError> {
        let mut kernel = lock(&self.kernel);
        let layout = interpreter.layout.complete();
        let number = kernel.layout_number(&layout)?;
        lock(&self.registry).set_layout(number, &layout);
        let (window, cframe_offset, evaluator) = match &interpreter.entering {
            Some(window) => (window.addresses.clone(), window.cframe_offset, window.evaluator.clone()),
            None => (0..0, None, 0..0),
        };
        let entry = ProcessEntry {
            runtime: interpreter.runtime,
            code_type: interpreter.code_type,
            none: interpreter.none,
            entering_start: window.start,
            entering_end: window.end,
            cframe_offset: cframe_offset.unwrap_or(0),
            evaluator_start: evaluator.start,
            evaluator_end: evaluator.end,
            layout: number,
            flags: flags::PYTHON,
            ..ProcessEntry::default()
        };
        // Which processes of it are wanted is known to user space alone.
        if interpreter.static_address && self.filter.is_empty() {
            let key = FileKey::of_stat(interpreter.file.dev, interpreter.file.inode);
            kernel.set_executable(key, &entry)?;
        }
        Ok(entry)
    }

    /// Inspects a process whose image is new or has got a new mapping. The entry changes only if its image is still
    /// the same one.
    fn look(&mut self, pid: u32, last_try: bool) {
        let Some(before) = lock(&self.kernel).process(pid) else { return };
        // Of one that has exited, undecided, the exit record tells the rest.
        if before.flags & (flags::PYTHON | flags::EXITED) == flags::EXITED {
            self.undecided.remove(&pid);
            return;
        }
        if before.flags & (flags::PYTHON | flags::SELECTED) != flags::SELECTED {
            self.undecided.remove(&pid);
            // An executable served in the kernel at its exec still has to be known here.
            if before.flags & flags::PYTHON != 0 {
                self.confirm(pid, &before);
            }
            return;
        }
        match self.admits(Pid(pid)) {
            Ok(true) => {}
            Ok(false) => return self.turn_away(pid, &before),
            // It is gone.
            Err(_) => return,
        }
        let Ok(process) = RemoteProcess::open(Pid(pid)) else { return };
        let mut file = None;
        let entry = match inspect::inspect(&process, &mut self.cache) {
            Ok(inspect::Verdict::Python(interpreter)) => match self.entry_of(&interpreter) {
                Ok(_) if self.is_sane(&process, &interpreter).is_err() => {
                    let what = format!(
                        "CPython {}: its layout fails the test on the live process",
                        interpreter.version_text()
                    );
                    self.refuse(pid, &what);
                    self.decide(pid, &before, Verdict::Other);
                    other()
                }
                Ok(entry) => {
                    let verdict = Verdict::Python(interpreter.layout.version_hex, interpreter.version_text());
                    self.decide(pid, &before, verdict);
                    file = Some(interpreter.file);
                    entry
                }
                Err(error) => return self.refuse(pid, &error.to_string()),
            },
            // The dynamic linker maps a library in parts, each over a part of the first: read between two of them, the mappings
            // do not show where it was loaded. They will when the next library is mapped.
            Ok(inspect::Verdict::Unsupported { reason: inspect::Refusal::NoLoadBias, .. }) if !last_try => return,
            Ok(refused @ inspect::Verdict::Unsupported { .. }) => {
                self.refuse(pid, &refusal(&refused).to_string());
                self.decide(pid, &before, Verdict::Other);
                other()
            }
            Err(error) if last_try => {
                if let Some(hint) = target_hint(&anyhow::Error::new(error)) {
                    self.refuse(pid, &format!("it cannot be looked at; {hint}"));
                }
                self.decide(pid, &before, Verdict::Other);
                other()
            }
            Ok(inspect::Verdict::NotPython) if last_try => {
                self.decide(pid, &before, Verdict::Other);
                other()
            }
            // Its libraries are still being mapped, or it is gone.
            Ok(inspect::Verdict::NotPython) | Err(_) => return,
        };
        self.undecided.remove(&pid);
        let kernel = &mut *lock(&self.kernel);
        let Some(now) = kernel.process(pid) else { return };
        if now.image != before.image {
            return;
        }
        let entry = ProcessEntry {
            image: now.image,
            instance: now.instance,
            leader: now.leader,
            thread_starts: now.thread_starts,
            flags: (now.flags & !(flags::PYTHON | flags::NOT_PYTHON)) | entry.flags,
            ..entry
        };
        let python = entry.flags & flags::PYTHON != 0;
        lock(&self.registry).add_uninspected(now.instance, now.uninspected, python);
        if let Err(error) = kernel.set_process(pid, &entry) {
            lock(&self.registry).refuse(format!("pid {pid}: {error}"));
        }
        if file.is_some() {
            self.is_python(pid, now.image, now.instance, file);
        }
    }

    /// A program that is not asked for: from now on it is met and left alone.
    fn turn_away(&mut self, pid: u32, before: &ProcessEntry) {
        self.undecided.remove(&pid);
        let kernel = &mut *lock(&self.kernel);
        let Some(now) = kernel.process(pid) else { return };
        if now.image != before.image {
            return;
        }
        let entry = ProcessEntry { flags: (now.flags & !flags::SELECTED) | flags::NOT_PYTHON, ..now };
        let mut registry = lock(&self.registry);
        registry.turn_away(now.instance, now.uninspected);
        if let Err(error) = kernel.set_process(pid, &entry) {
            registry.refuse(format!("pid {pid}: {error}"));
        }
    }

    /// Completes what is known of a process whose entry the kernel side made by itself.
    fn confirm(&mut self, pid: u32, entry: &ProcessEntry) {
        // An exec whose fork was not told of has put it there, without a verdict.
        let decided = |info: &ProcessInfo| info.image == entry.image && info.verdict != Verdict::Unknown;
        let known = lock(&self.registry).get(entry.instance).is_some_and(decided);
        if known {
            return;
        }
        self.is_python(pid, entry.image, entry.instance, None);
        let hex = lock(&self.registry).layout(entry.layout).map_or(0, |layout| layout.version_hex);
        self.decide(pid, entry, Verdict::Python(hex, inspect::version_text(hex)));
    }

    fn decide(&mut self, pid: u32, entry: &ProcessEntry, verdict: Verdict) {
        let mut registry = lock(&self.registry);
        match registry.by_pid(pid) {
            _ if verdict == Verdict::Other => registry.leave(entry.instance),
            Some(info) => {
                info.image = entry.image;
                info.decide(verdict);
                info.refresh();
            }
            None => registry.insert(entry.instance, ProcessInfo::new(pid, entry.image, verdict, 0)),
        }
    }

    fn refuse(&self, pid: u32, reason: &str) {
        lock(&self.registry).refuse(format!("pid {pid}: {reason}"));
    }

    fn on_process(&mut self, record: &ProcessRecord) {
        let pid = record.tgid;
        match record.header.kind {
            kind::FORK => {
                lock(&self.registry).fork(record, comm_text(&record.comm));
                if record.flags & flags::PYTHON != 0 {
                    self.news(|| News::Forked { pid, image: record.image, instance: record.instance });
                }
                if record.flags & (flags::PYTHON | flags::NOT_PYTHON) == 0 {
                    self.undecided.insert(pid, Instant::now());
                }
            }
            kind::EXEC => {
                self.news(|| News::Gone { pid });
                self.on_exec(record);
                self.look(pid, false);
            }
            kind::EXIT => {
                self.undecided.remove(&pid);
                self.news(|| News::Gone { pid });
                lock(&self.registry).exit(record);
            }
            kind::FREE => lock(&self.registry).free(record),
            // A process that is gone, or that was found meanwhile, needs no entry.
            kind::UNKNOWN if self.all_python => {
                let _gone = self.adopt(pid);
            }
            _ => {}
        }
    }

    /// The image that ended keeps its verdict; the process starts anew.
    fn on_exec(&mut self, record: &ProcessRecord) {
        // The new program has used no more since than time has passed.
        let since_ns = KtimeNs::now().0.saturating_sub(record.ktime_ns);
        let cpu_ns = cpu_time_ns(record.tgid).map(|now| now.saturating_sub(since_ns));
        lock(&self.registry).exec(record, comm_text(&record.comm), cpu_ns);
        self.undecided.insert(record.tgid, Instant::now());
    }

    fn on_watch(&mut self, event: &WatchEvent<'_>) {
        match event {
            WatchEvent::Mapped { pid, .. } => self.news(|| News::Mapped { pid: pid.0 }),
            WatchEvent::Lost { .. } => self.news(|| News::Lost),
            _ => {}
        }
        match event {
            WatchEvent::Mapped { pid, .. } if self.undecided.contains_key(&pid.0) => self.look(pid.0, false),
            // A library loaded late may be CPython itself (an embedding program).
            WatchEvent::Mapped { pid, path, .. } if is_library(path) && self.is_other(pid.0) => {
                self.look_again(pid.0);
            }
            WatchEvent::Lost { .. } => self.look_at_undecided(),
            _ => {}
        }
    }

    /// Whether a process was taken for something else than CPython. The kernel's table knows; the registry has such a
    /// process only if it was CPython once.
    fn is_other(&self, pid: u32) -> bool {
        const DECIDED: u32 = flags::SELECTED | flags::NOT_PYTHON;
        let other = lock(&self.registry).by_pid(pid).is_none_or(|info| info.verdict == Verdict::Other);
        let among = |entry: ProcessEntry| entry.flags & (DECIDED | flags::PYTHON | flags::EXITED) == DECIDED;
        other && lock(&self.kernel).process(pid).is_some_and(among)
    }

    fn look_at_undecided(&mut self) {
        for pid in self.undecided.keys().copied().collect::<Vec<_>>() {
            self.look(pid, false);
        }
    }

    /// A process that was none of ours has mapped something: if it is CPython now, it becomes one of ours.
    fn look_again(&mut self, pid: u32) {
        let Some(before) = lock(&self.kernel).process(pid) else { return };
        if !self.admits(Pid(pid)).unwrap_or(false) {
            return;
        }
        let Ok(process) = RemoteProcess::open(Pid(pid)) else { return };
        let Ok(inspect::Verdict::Python(interpreter)) = inspect::inspect(&process, &mut self.cache) else { return };
        let Ok(entry) = self.entry_of(&interpreter) else { return };
        let Some(now) = lock(&self.kernel).process(pid) else { return };
        // What was looked at is not what runs there.
        if now.image != before.image {
            return;
        }
        self.decide(pid, &now, Verdict::Python(interpreter.layout.version_hex, interpreter.version_text()));
        if let Some(info) = lock(&self.registry).by_pid(pid) {
            info.cpu_starts_now();
        }
        let flags = (now.flags & !flags::NOT_PYTHON) | entry.flags;
        let entry = ProcessEntry { image: now.image, instance: now.instance, leader: now.leader, flags, ..entry };
        let result = lock(&self.kernel).set_process(pid, &entry);
        match result {
            Ok(()) => self.is_python(pid, now.image, now.instance, Some(interpreter.file)),
            Err(error) => self.refuse(pid, &error.to_string()),
        }
    }

    /// Decides on everything that is still open: the recording ends.
    fn settle(&mut self) {
        for pid in std::mem::take(&mut self.undecided).into_keys() {
            self.look(pid, true);
        }
    }

    /// Stops sampling processes whose code objects make no sense, and decides on those that have had their time.
    fn turn(&mut self) {
        let nonsense = std::mem::take(&mut lock(&self.registry).nonsense);
        for pid in nonsense.into_iter().flat_map(|image| lock(&self.registry).pids_of_image(image)) {
            self.refuse(pid, "its code objects make no sense: it is not the CPython it looks like");
            let Some(now) = lock(&self.kernel).process(pid) else { continue };
            let flags = (now.flags & !flags::PYTHON) | flags::NOT_PYTHON;
            let result = lock(&self.kernel).set_process(pid, &ProcessEntry { flags, ..now });
            if let Err(error) = result {
                self.refuse(pid, &error.to_string());
            }
        }
        let due: Vec<u32> =
            self.undecided.iter().filter(|(_, since)| since.elapsed() > UNDECIDED).map(|(&pid, _)| pid).collect();
        for pid in due {
            self.look(pid, true);
            self.undecided.remove(&pid);
        }
        let mut registry = lock(&self.registry);
        registry.forget_left(SETTLED);
        if std::mem::take(&mut registry.shrink) {
            self.cache = ElfCache::default();
        }
    }
}
