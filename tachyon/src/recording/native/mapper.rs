//! The thread that keeps unwind tables and address spaces up to date as processes map files.
//!
//! Separate from the one that follows processes, because a large file's table takes longer to make than a short process
//! lives. It receives news of processes, mappings and ends; what a process maps is read from `/proc` a little later,
//! because libraries come in bursts.

mod found;
mod hints;
mod look;
mod process;
mod told;

pub(in crate::recording) use told::{Mapped, News};

use super::made::Made;
use super::spaces::{AddressSpace, Spaces};
use crate::kernel::{Kernel, NativeMaps, drop_privileges};
use crate::remote::ledger::{Debts, Work};
use crate::remote::{End, FileIdentity, Patience};
use crate::symbolize::native::NativeSymbols;
use crate::unwind::UnwindTables;
use found::{Evaluated, Place, Seen};
use process::Process;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A process is looked at this long after it mapped something: libraries tend to come in groups.
const BURST: Duration = Duration::from_millis(20);

/// After a look, a process rests this many times as long as the look took: the process decides how long reading mappings takes,
/// since it may have any number of them and change one each millisecond.
const REST: u32 = 19;
/// But no longer than this: a look that made the tables of large files is no storm.
const LONGEST_REST: Duration = Duration::from_secs(1);

/// A process that had to give up its address space rests this long.
const LONG_REST: Duration = Duration::from_secs(30);

/// How long processes are looked at before checking for news of others.
const SLICE: Duration = Duration::from_millis(100);
/// The same where sampling waits for first looks.
const FIRST: Duration = Duration::from_secs(1);

/// A process does not rest until looks at it have taken this long in total: a program that imports libraries runs each as soon as
/// it is mapped, and spends most of its time up to then in them.
const FRESH: Duration = Duration::from_millis(300);
/// Until they have taken this long it rests less: a program that has just started, or was just found, maps many files.
const EAGER: Duration = Duration::from_secs(3);
const EAGER_REST: u32 = 3;
const EAGER_BURST: Duration = Duration::from_millis(5);

/// A process whose samples meet unknown code is looked at this often at most.
const AGAIN: Duration = Duration::from_secs(1);

/// Most processes whose mappings are remembered; beyond that, all are forgotten and looked up anew.
const MAX_SEEN: usize = 64;

/// Longest wait for the thread's answer about what it has.
const PATIENCE: Duration = Duration::from_millis(100);
/// Code that samples met gets its rules no sooner than this after it was reported: samples come in bursts.
const MEETING: Duration = Duration::from_millis(2);

/// Most bytes of `.eh_frame` that are turned into rows at the first look at a process, apart from those of interpreters: some 25
/// ms, which its first sample waits for.
const AT_FIRST: u64 = 1 << 20;
/// The same at each later look: code that samples meet is done in between, and the results are published after each.
const AT_A_TIME: u64 = 256 << 10;

/// Most addresses of one process, and most stacks and callers, that are dealt with at a time.
const MAX_MET: usize = 256;
const MAX_STACKS: usize = 8;

/// Most executable mappings of a process that are looked at: the kernel side searches no more ranges per process. PyTorch
/// with everything has some 700.
const MAX_MAPPINGS: usize = tachyon_common::limits::MAX_SPACE_RANGES as usize;

/// The thread, perhaps not yet started: news waits for it until then.
pub(in crate::recording) struct Mapper {
    news: Sender<News>,
    waiting: Option<(Worker, Receiver<News>)>,
    thread: Option<JoinHandle<Mapped>>,
    /// Set when the rest of its work is no longer needed.
    stop: Arc<AtomicBool>,
}

impl Mapper {
    /// Makes what the thread will work with.
    pub fn new(
        maps: NativeMaps,
        kernel: Arc<Mutex<Kernel>>,
        spaces: Arc<Spaces>,
        symbols: Arc<NativeSymbols>,
        end: End,
    ) -> Self {
        let (news, told) = channel();
        let stop = Arc::new(AtomicBool::new(false));
        let tables = maps.tables().keeping(symbols.folder());
        let worker = Worker {
            kernel,
            maps,
            tables,
            spaces,
            symbols,
            interpreters: HashMap::new(),
            processes: HashMap::new(),
            seen: HashMap::new(),
            made: Made::default(),
            left: Mapped::default(),
            debts: Debts::new(Work::Tables),
            end,
            stop: Arc::clone(&stop),
        };
        Self { news, waiting: Some((worker, told)), thread: None, stop }
    }

    /// Starts the thread, once.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn start(&mut self) -> std::io::Result<()> {
        let Some((worker, told)) = self.waiting.take() else { return Ok(()) };
        let thread = std::thread::Builder::new().name("tachyon-mapper".to_owned()).spawn(move || {
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges();
            worker.run(&told)
        })?;
        self.thread = Some(thread);
        Ok(())
    }

    /// Where to send it news.
    pub fn news(&self) -> Sender<News> {
        self.news.clone()
    }

    /// Waits until it has looked at each process once, or at as many as there is time for: without, samples have no native frames.
    pub fn wait(&self) {
        let (done, wait) = channel();
        // Either fails only if the thread has panicked, which is reported when it ends.
        let _ended = self.news.send(News::Finish(done));
        let _ended = wait.recv();
    }

    /// What it would leave behind if it ended now; `None` if it does not answer soon, as while it makes a large file's table.
    pub fn left(&self) -> Option<Mapped> {
        let (tell, told) = channel();
        self.news.send(News::Tell(tell)).ok()?;
        told.recv_timeout(PATIENCE).ok()
    }

    /// Ends it, once nobody else can send it news.
    pub fn stop(self) -> Mapped {
        self.stop.store(true, Ordering::Release);
        drop(self.news);
        self.thread.and_then(|thread| thread.join().ok()).unwrap_or_else(|| {
            let note = "the thread that looks at mappings ended early: later native stacks are missing".to_owned();
            Mapped { notes: BTreeSet::from([note]), ..Mapped::default() }
        })
    }
}

struct Worker {
    kernel: Arc<Mutex<Kernel>>,
    maps: NativeMaps,
    tables: UnwindTables,
    spaces: Arc<Spaces>,
    symbols: Arc<NativeSymbols>,
    /// Files that hold an interpreter.
    interpreters: HashMap<FileIdentity, Evaluated>,
    processes: HashMap<u32, Process>,
    /// By process: what was found behind its mappings. A program that starts makes hundreds, one after the other.
    seen: HashMap<u32, HashMap<Place, Seen>>,
    /// Code that processes generated.
    made: Made,
    left: Mapped,
    /// What looks at processes have cost.
    debts: Debts,
    end: End,
    stop: Arc<AtomicBool>,
}

impl Worker {
    fn run(mut self, told: &Receiver<News>) -> Mapped {
        let _concerned = self.end.concerns_this_thread(Patience::Usual);
        loop {
            let next = self.processes.values().filter_map(|process| process.due).min();
            let news = match next.map(|due| due.saturating_duration_since(Instant::now())) {
                None => told.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(wait) => told.recv_timeout(wait),
            };
            match news {
                Ok(news) => self.hear(news),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            // News of starts and ends first: it can make looks superfluous.
            while let Ok(news) = told.try_recv() {
                self.hear(news);
            }
            let now = Instant::now();
            self.look_at(|process| process.due.is_some_and(|due| due <= now), SLICE);
        }
        self.tables.keep(&self.maps);
        self.left_now()
    }

    /// What it has to report.
    fn left_now(&self) -> Mapped {
        let mut left = self.left.clone();
        left.refused.extend(self.tables.refusals().map(|(path, reason)| (path.to_owned(), reason.to_owned())));
        let without_room = self.tables.without_room();
        if without_room > 0 {
            let note = "native stacks are cut in code whose unwind tables have no room";
            let wanted = self.tables.bytes_wanted();
            left.table_bytes_wanted = Some(wanted);
            let enough = wanted.div_ceil(1 << 20);
            left.notes.insert(format!("{note}: {without_room} pieces, {enough} MiB would do for all"));
        }
        left.table_bytes = self.tables.bytes_used();
        left
    }

    fn hear(&mut self, news: News) {
        let now = Instant::now();
        match news {
            News::Python { pid, image, instance, interpreter } => {
                if let Some(file) = interpreter {
                    self.interpreters.entry(file).or_insert(Evaluated::Wanted);
                }
                self.seen.remove(&pid);
                self.made.forget(pid);
                self.processes.insert(pid, Process { due: Some(now), ..Process::new(pid, image, instance) });
            }
            News::Expected { file, interpreter } => {
                if interpreter {
                    self.interpreters.entry(file.identity()).or_insert(Evaluated::Wanted);
                    self.evaluated(&file, &file.found_at().to_string_lossy());
                }
                self.tables.expect(&file, interpreter, &mut self.maps);
            }
            News::Forked { pid, image, instance } => {
                self.processes.insert(pid, Process::new(pid, image, instance));
            }
            News::Mapped { pid, time, dev, inode } => {
                let Some(process) = self.processes.get_mut(&pid) else { return };
                // It may be another file in the place of a known one.
                let mut is_new = process.seen_at < time;
                if let Some(seen) = self.seen.get_mut(&pid) {
                    let before = seen.len();
                    seen.retain(|place, seen| (place.dev, place.inode) != (dev, inode) || seen.at >= time);
                    is_new |= seen.len() < before;
                }
                if is_new {
                    process.ask(now + if process.spent < EAGER { EAGER_BURST } else { BURST });
                }
            }
            News::Lost => {
                self.seen.clear();
                for process in self.processes.values_mut() {
                    process.ask(now + BURST);
                }
            }
            News::Unknown { pid } => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    let at = process.looked.map_or(now, |looked| (looked + AGAIN).max(now));
                    process.ask(at);
                }
            }
            News::Overtaken { pid, time, done } => {
                self.catch_up(pid, time);
                // The asking thread may have given up waiting.
                let _gone = done.send(());
            }
            News::Met { pid, address, sp } => {
                if let Some(process) = self.meets(pid, address, now)
                    && process.stacks.len() < MAX_STACKS
                {
                    process.stacks.insert(sp);
                }
            }
            News::Unnamed { pid, address, caller } => {
                if let Some(process) = self.meets(pid, address, now)
                    && process.callers.len() < MAX_STACKS
                {
                    process.callers.extend(caller);
                }
            }
            News::Gone { pid } => {
                self.debts.forget(pid);
                self.seen.remove(&pid);
                self.made.forget(pid);
                if let Some(process) = self.processes.remove(&pid) {
                    self.spaces.forget(process.image, process.instance);
                }
            }
            News::Tell(tell) => {
                // The asking thread may have given up waiting.
                let _gone = tell.send(self.left_now());
                self.tables.keep(&self.maps);
            }
            News::Finish(done) => {
                self.look_at(|process| process.due.is_some() && process.looked.is_none(), FIRST);
                // The asking thread may have given up waiting.
                let _gone = done.send(());
            }
        }
    }

    /// A process's samples have met this address: it is looked at soon. `None`: not because of this one.
    fn meets(&mut self, pid: u32, address: u64, now: Instant) -> Option<&mut Process> {
        let process = self.processes.get_mut(&pid).filter(|process| process.met.len() < MAX_MET)?;
        if !process.met.insert(address) {
            return None;
        }
        process.meet(now + MEETING);
        Some(process)
    }
}
