//! Follows processes while a recording runs: starts, execs, late mappings, ends.
//!
//! A thread of its own, because a process that lives 50 ms must be inspected within a few: it sleeps until the kernel side's
//! lifecycle ring or the mapping events wake it. This file receives events; `look` acts on them, in `queue`'s order, and `decision`
//! concludes.

mod decision;
mod look;
mod queue;
mod starts;
mod thread;
mod watching;
mod work;

pub(super) use thread::Follow;

use self::decision::is_library;
use self::queue::Queue;
use self::starts::Starts;
use super::expected::{Expected, files_of};
use super::native::News;
use super::registry::{ProcessInfo, Program, Registry, cpu_time_ns};
use super::samples::SETTLED;
use crate::discover::Filter;
use crate::discover::watch::WatchEvent;
use crate::inspect::ElfCache;
use crate::kernel::{FileKey, Kernel, KernelError};
use crate::merge::comm_text;
use crate::remote::ledger::{self, user_of};
use crate::remote::{FileIdentity, RemoteError, RemoteProcess, let_go_of_files};
use crate::types::{KtimeNs, Pid};
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::path::Path;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use tachyon_common::event::{ProcessRecord, kind};
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::walk::mix;
use work::WorkLooks;

/// A program that has mapped no CPython this long after its `exec` is taken for something else until it maps one.
const UNDECIDED: Duration = Duration::from_secs(2);
/// How often undecided processes are checked.
const TURN: Duration = Duration::from_millis(500);
/// How often to check for work while nothing is undecided and no events come.
const IDLE_TURN: Duration = Duration::from_secs(5);
/// How often undecided processes are checked where no mapping events say when to look.
const QUICK_TURN: Duration = Duration::from_millis(10);

/// Locks even if a thread panicked while it held the lock: that panic is reported when the thread is joined.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Which processes belong to the recording.
pub(super) struct Wanted {
    /// All CPython processes that are met, not only chosen ones.
    pub all_python: bool,
    /// Children of processes that belong to it.
    pub follow_children: bool,
    /// Only these of them.
    pub filter: Filter,
    /// Environment variables to read, where more than the processes' names is wanted.
    pub variables: Option<Vec<String>>,
}

/// A process that has not been decided on.
struct Undecided {
    /// When its image began.
    since: Instant,
    /// It was looked at and had mapped no part of CPython.
    has_told_all: bool,
    /// The user it is charged to, once looked up.
    user: Option<u32>,
    /// Its executable, once reported.
    executable: Option<FileKey>,
    /// Its executable may still turn out to be CPython, or become it.
    is_promising: bool,
}

impl Undecided {
    fn new() -> Self {
        Self { since: Instant::now(), has_told_all: false, user: None, executable: None, is_promising: false }
    }
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
    variables: Option<Vec<String>>,
    /// Selected processes that have not been decided on.
    undecided: HashMap<u32, Undecided>,
    /// Processes that were not CPython at the last look, but whose mappings did not settle the matter.
    unclear: HashSet<u32>,
    /// Pending looks.
    queue: Queue,
    /// Executables that need no look when they start.
    starts: Starts,
    /// Processes that have mapped something unknown after a fork or `exec` whose record is still to come: rings are not in order.
    ahead: HashSet<u32>,
    /// Processes reported so far as having found the kernel side's tables full.
    without_room: u64,
    fresh: u64,
    /// The thread that looks at mappings, where native stacks are wanted.
    mapper: Option<Sender<News>>,
    /// The processes that it knows of: it is woken for no others.
    mapped: HashSet<u32>,
    /// Where processes record whose work their threads do.
    work: WorkLooks,
    /// Whether, at the last check, any process was left that is recorded or may come to be.
    any_alive: bool,
}

impl Follower {
    pub fn new(kernel: Arc<Mutex<Kernel>>, registry: Arc<Mutex<Registry>>, wanted: Wanted, files: ElfCache) -> Self {
        let Wanted { all_python, follow_children, filter, variables } = wanted;
        let flags = flags::SELECTED | if follow_children { flags::FOLLOW } else { 0 };
        let fresh = lock(&kernel).seed();
        Self {
            kernel,
            registry,
            cache: files,
            flags,
            all_python,
            filter,
            variables,
            undecided: HashMap::new(),
            unclear: HashSet::new(),
            queue: Queue::default(),
            starts: Starts::default(),
            ahead: HashSet::new(),
            without_room: 0,
            fresh,
            mapper: None,
            mapped: HashSet::new(),
            work: WorkLooks::default(),
            any_alive: true,
        }
    }

    /// From now on, reports processes and their mappings to `mapper`.
    pub fn tell(&mut self, mapper: Sender<News>) {
        self.mapper = Some(mapper);
    }

    /// The program of a process is over.
    fn is_gone(&mut self, pid: u32) {
        if self.mapped.remove(&pid) {
            self.work.forget(pid);
            self.news(|| News::Gone { pid });
        }
    }

    fn news(&self, news: impl FnOnce() -> News) {
        if let Some(mapper) = &self.mapper {
            // If it has panicked, that is reported at the end.
            let _ended = mapper.send(news());
        }
    }

    fn is_python(&mut self, pid: u32, image: u64, instance: u64, interpreter: Option<FileIdentity>) {
        self.mapped.insert(pid);
        self.news(|| News::Python { pid, image, instance, interpreter });
    }

    /// Whether a process is one of those asked for.
    ///
    /// # Errors
    /// When it is gone.
    pub fn admits(&self, pid: Pid) -> Result<bool, RemoteError> {
        if self.filter.is_empty() { Ok(true) } else { self.filter.admits(&RemoteProcess::at(pid)) }
    }

    /// A control group that was asked for but does not exist.
    pub fn missing_cgroup(&self) -> Option<&str> {
        self.filter.missing_cgroup()
    }

    /// Whether children of the targets belong to them.
    pub const fn follows_children(&self) -> bool {
        self.flags & flags::FOLLOW != 0
    }

    /// Gives a process that has not begun to run anything an entry; it is inspected at its `exec`.
    ///
    /// # Errors
    /// When the kernel's table is full.
    pub fn expect(&mut self, pid: u32) -> Result<(), KernelError> {
        let fresh = self.fresh();
        let entry = ProcessEntry { flags: self.flags, image: fresh, instance: fresh, ..ProcessEntry::default() };
        lock(&self.kernel).set_process(pid, &entry)?;
        lock(&self.registry).insert(fresh, ProcessInfo::new(pid, fresh, Program::Unknown, 0));
        Ok(())
    }

    /// Examines the files of the program that such a process will execute.
    pub fn look_ahead(&mut self, pid: Pid, program: &Path) {
        for Expected { file, is_exe } in files_of(&RemoteProcess::at(pid), program) {
            let interpreter = self.cache.expect(&file, is_exe);
            self.news(|| News::Expected { file: Arc::new(file), interpreter });
        }
    }

    /// Whether a process has an entry that says what it is, of its own or from its parent.
    pub fn has_decided(&self, pid: u32) -> bool {
        self.flags_of(pid) & DECIDED != 0
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

    /// A number that no image and no process has had: the kernel side hashes clock and tgid, this hashes a counter.
    fn fresh(&mut self) -> u64 {
        self.fresh = self.fresh.wrapping_add(1);
        mix(self.fresh, 0x7461_6368_796f_6e00)
    }

    fn on_process(&mut self, record: &ProcessRecord) {
        let pid = record.tgid;
        match record.header.kind {
            kind::FORK => {
                lock(&self.registry).fork(record, comm_text(&record.comm));
                if record.flags & flags::PYTHON != 0 {
                    self.mapped.insert(pid);
                    self.work.fork(record.parent, pid);
                    self.news(|| News::Forked { pid, image: record.image, instance: record.instance });
                }
                if record.flags & (flags::PYTHON | flags::NOT_PYTHON) == 0 {
                    self.undecided.insert(pid, Undecided::new());
                    if self.ahead.remove(&pid) {
                        self.ask(pid);
                    }
                }
            }
            kind::EXEC => {
                self.is_gone(pid);
                self.queue.forget(pid);
                self.on_exec(record);
                self.look_at_start(record);
            }
            kind::EXIT => {
                self.decided(pid);
                self.queue.forget(pid);
                self.ahead.remove(&pid);
                self.is_gone(pid);
                lock(&self.registry).exit(record);
            }
            kind::FREE => lock(&self.registry).free(record),
            kind::THREAD => lock(&self.registry).thread_ended(record),
            // A process that is gone, or that was found meanwhile, needs no entry.
            kind::UNKNOWN if self.all_python => {
                let _gone = self.adopt(pid);
            }
            _ => {}
        }
    }

    /// What is known of the previous program stays; the process starts afresh.
    fn on_exec(&mut self, record: &ProcessRecord) {
        // Since its `exec`, the new program cannot have used more CPU time than time has passed.
        let since_ns = KtimeNs::now().0.saturating_sub(record.ktime_ns);
        let cpu_ns = cpu_time_ns(record.tgid).map(|now| now.saturating_sub(since_ns));
        lock(&self.registry).exec(record, comm_text(&record.comm), cpu_ns);
        self.decided(record.tgid);
        self.undecided.insert(record.tgid, Undecided::new());
    }

    /// What the kernel side knows of a process: its entry's flags, and whether it has exited.
    fn flags_of(&self, pid: u32) -> u32 {
        let kernel = lock(&self.kernel);
        let Some(life) = kernel.process(pid) else { return 0 };
        kernel.entry(&life).map_or(life.flags, |entry| entry.flags | (life.flags & flags::EXITED))
    }

    /// Nothing is left to decide about a process or the program that it ran.
    fn decided(&mut self, pid: u32) {
        self.undecided.remove(&pid);
        self.unclear.remove(&pid);
    }

    /// Whether events may be left to gather for a moment: no program that may be CPython has just started.
    fn is_calm(&self, now: Instant) -> bool {
        let is_hot = |open: &Undecided| {
            open.is_promising && now.saturating_duration_since(open.since) < thread::LIBRARIES_WITHIN
        };
        !self.undecided.values().any(is_hot)
    }

    /// By how much mapping events may be delayed at most; those of all processes if they may `gather`. `None`: not at all.
    fn may_rest(&self, gather: bool, now: Instant) -> Option<Duration> {
        if self.all_python {
            return (gather && self.is_calm(now)).then_some(watching::LONGEST_OF_ALL);
        }
        // Only events of known processes would matter.
        self.undecided.is_empty().then_some(watching::LONGEST)
    }

    /// Handles a mapping event. Returns whether it concerned a recorded process.
    fn on_watch(&mut self, event: &WatchEvent<'_>) -> bool {
        let ours = match event {
            WatchEvent::Mapped { pid, .. } | WatchEvent::Exec { pid, .. } => self.mapped.contains(&pid.0),
            WatchEvent::Lost { .. } => true,
        };
        match event {
            WatchEvent::Mapped { pid, time, dev, inode, path, .. } if self.mapped.contains(&pid.0) => {
                self.work.mapped(pid.0, *dev, *inode, path);
                self.news(|| News::Mapped { pid: pid.0, time: *time, dev: *dev, inode: *inode });
            }
            WatchEvent::Lost { .. } => {
                self.work.lost();
                self.news(|| News::Lost);
            }
            _ => {}
        }
        match event {
            WatchEvent::Mapped { pid, .. } if self.queue.has(pid.0) => {}
            // A program that starts maps what others have mapped: most of it was examined a moment ago.
            WatchEvent::Mapped { pid, dev, inode, path, .. }
                if self.has_told_all(pid.0) && self.cache.is_no_python(*dev, *inode, path, Instant::now()) => {}
            WatchEvent::Mapped { pid, .. } if self.undecided.contains_key(&pid.0) => self.ask(pid.0),
            WatchEvent::Mapped { pid, path, .. } => self.on_unexpected(pid.0, path),
            WatchEvent::Lost { .. } => self.ask_for_undecided(),
            _ => {}
        }
        ours
    }

    /// Whether a process was not CPython at the last look and can only become it by mapping something.
    fn has_told_all(&self, pid: u32) -> bool {
        self.undecided.get(&pid).map_or_else(|| !self.unclear.contains(&pid), |open| open.has_told_all)
    }

    /// A process that was already decided on has mapped an unknown file.
    fn on_unexpected(&mut self, pid: u32, path: &OsStr) {
        let flags = self.flags_of(pid);
        if is_open(flags) {
            self.ahead.insert(pid);
        } else if is_library(path) && is_other(flags) && flags & flags::EXITED == 0 && !self.is_ours(pid) {
            // A library loaded late may be CPython itself (an embedding program).
            self.ask(pid);
        }
    }

    /// Whether the registry has a process that may be CPython. It keeps others only if they once were CPython.
    fn is_ours(&self, pid: u32) -> bool {
        lock(&self.registry).by_pid(pid).is_some_and(|info| info.program != Program::Other)
    }

    fn ask(&mut self, pid: u32) {
        let user = self.charged_for(pid);
        self.queue.ask(pid, user);
    }

    /// The user that looks at a process are charged to. Asked only once for a process that has just started.
    fn charged_for(&mut self, pid: u32) -> u32 {
        match self.undecided.get_mut(&pid) {
            Some(open) => *open.user.get_or_insert_with(|| user_of(pid)),
            None => user_of(pid),
        }
    }

    fn ask_for_undecided(&mut self) {
        for pid in self.undecided.keys().copied().collect::<Vec<_>>() {
            self.ask(pid);
        }
    }

    /// How long until a look is due; `None` when none is pending.
    fn until_next_look(&self) -> Option<Duration> {
        self.queue.wait(Instant::now()).into_iter().chain(self.work.wait()).min()
    }

    /// Looks at the processes whose turn it is, until the given time; true if more are left.
    fn look_at_due(&mut self, until: Instant) -> bool {
        while let Some((pid, user)) = self.queue.next(Instant::now()) {
            self.look_for(pid, user, false);
            if Instant::now() >= until {
                return true;
            }
        }
        false
    }

    /// Looks at a process and charges its user.
    fn look_for(&mut self, pid: u32, user: u32, last_look: bool) {
        let begun = ledger::thread_time();
        self.look(pid, last_look);
        // A helper process has worked for it as long as this thread. Time spent waiting for a CPU is not charged to anyone.
        let took = 2 * ledger::thread_time().saturating_sub(begun);
        self.queue.spent(pid, user, took, Instant::now());
    }

    /// Decides on everything that is still open, as the recording ends. False if there was not enough time until `until`.
    fn decide_all(&mut self, until: Instant) -> bool {
        for pid in std::mem::take(&mut self.undecided).into_keys() {
            if Instant::now() >= until {
                return false;
            }
            self.look(pid, true);
        }
        true
    }

    /// Stops sampling processes whose code objects make no sense, and decides on those whose time to become CPython is up.
    fn turn(&mut self) {
        let nonsense = std::mem::take(&mut lock(&self.registry).nonsense);
        for pid in nonsense.into_iter().flat_map(|image| lock(&self.registry).pids_of_image(image)) {
            self.refuse(pid, "its code objects make no sense: it is not the CPython it looks like");
            self.take_back(pid);
        }
        let due: Vec<u32> =
            self.undecided.iter().filter(|(_, open)| open.since.elapsed() > UNDECIDED).map(|(&pid, _)| pid).collect();
        let until = Instant::now() + TURN;
        for pid in due {
            let user = self.charged_for(pid);
            if !self.queue.may(pid, user, Instant::now()) {
                self.queue.ask(pid, user);
                continue;
            }
            self.look_for(pid, user, true);
            self.undecided.remove(&pid);
            if Instant::now() >= until {
                break;
            }
        }
        self.tell_of_full_tables();
        let_go_of_files();
        let mut registry = lock(&self.registry);
        registry.forget_left(SETTLED);
        if std::mem::take(&mut registry.shrink) {
            self.cache = ElfCache::default();
        }
    }

    /// Reports once that processes found no room, and counts them in the account's note.
    fn tell_of_full_tables(&mut self) {
        let Ok(without_room) = lock(&self.kernel).without_room() else { return };
        if without_room == self.without_room {
            return;
        }
        let mut registry = lock(&self.registry);
        let note =
            |count: u64| format!("{count} times a process found the table of processes full: it was not recorded");
        if self.without_room == 0 {
            registry.told.push("the table of processes is full: some are not recorded".to_owned());
        }
        registry.notes.remove(&note(self.without_room));
        registry.note(note(without_room));
        self.without_room = without_room;
    }

    /// Whether there is anything new to report about the recording.
    fn has_news(&mut self) -> bool {
        let registry = lock(&self.registry);
        let (told, any_alive) = (!registry.told.is_empty(), registry.any_alive());
        drop(registry);
        told || std::mem::replace(&mut self.any_alive, any_alive) != any_alive
    }

    fn note(&self, note: String) {
        lock(&self.registry).note(note);
    }

    fn refuse(&self, pid: u32, reason: &str) {
        lock(&self.registry).refuse(format!("pid {pid}: {reason}"));
    }
}

/// Flags that a decision sets or clears.
const DECIDED: u32 = flags::PYTHON | flags::NOT_PYTHON;

/// Whether an entry says that a wanted process is not CPython.
fn is_other(entry_flags: u32) -> bool {
    entry_flags & (flags::SELECTED | DECIDED) == flags::SELECTED | flags::NOT_PYTHON
}

/// Whether a wanted process is still undecided.
fn is_open(entry_flags: u32) -> bool {
    entry_flags & (flags::SELECTED | DECIDED) == flags::SELECTED
}
