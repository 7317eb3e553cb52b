//! The thread that keeps unwind tables and address spaces up to date as processes map files.
//!
//! Separate from the one that follows processes, because a large file's table takes longer to make than a short process
//! lives. It receives news of processes, mappings and ends; what a process maps is read from `/proc` a little later,
//! because libraries come in bursts.

mod found;
mod hints;
mod process;
mod told;

pub(in crate::recording) use told::{Mapped, News};

use super::made::Made;
use super::spaces::{AddressSpace, Spaces};
use crate::kernel::{Kernel, NativeMaps, drop_privileges};
use crate::recording::follow::lock;
use crate::remote::ledger::{self, Debts, Work};
use crate::remote::{End, FileIdentity, MappedPath, Mapping, Patience, RemoteProcess};
use crate::symbolize::native::NativeSymbols;
use crate::types::{KtimeNs, Pid};
use crate::unwind::{ARENA, Generated, UnwindTables, Wanted};
use found::{Evaluated, Place, Seen, digest};
use hints::{hints, main_stack, trampolines_of};
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
/// The same where all that are due are wanted.
const ALL: Duration = Duration::from_secs(10);

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

/// Most addresses of one process, and most stacks, that are dealt with at a time.
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
        let tables = maps.tables();
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

    /// Waits until it has dealt with all news so far.
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
            self.look_at_due(Instant::now(), SLICE);
        }
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
            News::Met { pid, address, sp } => {
                if let Some(process) = self.processes.get_mut(&pid).filter(|process| process.met.len() < MAX_MET)
                    && process.met.insert(address)
                {
                    if process.stacks.len() < MAX_STACKS {
                        process.stacks.insert(sp);
                    }
                    process.meet(now + MEETING);
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
            }
            News::Finish(done) => {
                self.look_at_due(now + BURST, ALL);
                // The asking thread may have given up waiting.
                let _gone = done.send(());
            }
        }
    }
}

impl Worker {
    fn look_at_due(&mut self, until: Instant, slice: Duration) {
        let due = |process: &Process| process.due.is_some_and(|due| due <= until);
        let now = Instant::now();
        let due = self.processes.iter().filter(|(_, process)| due(process));
        // The user who has cost least comes first, and of that user's processes the one last looked at longest ago.
        let mut due: Vec<_> =
            due.map(|(&pid, process)| (self.debts.of_user(process.user, now), process.looked, pid)).collect();
        due.sort_unstable();
        let begun = Instant::now();
        for (_, _, pid) in due {
            // Others that come first may have arrived meanwhile.
            if self.stop.load(Ordering::Acquire) || begun.elapsed() > slice {
                return;
            }
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            let (begun, worked, user) = (Instant::now(), ledger::thread_time(), process.user);
            if !self.debts.may(pid, user, Duration::ZERO, begun) {
                ledger::put_off(Work::Tables, pid, user);
                process.due = Some(self.debts.until(pid, user, begun).max(begun + AGAIN));
                continue;
            }
            (process.due, process.looked) = (None, Some(begun));
            let met = (std::mem::take(&mut process.met), std::mem::take(&mut process.stacks));
            let process = process.clone();
            self.look(pid, process, met);
            if let Some(process) = self.processes.get_mut(&pid) {
                let (now, took) = (Instant::now(), begun.elapsed());
                process.spent += took;
                let rest = if process.spent < EAGER { EAGER_REST } else { REST };
                let fresh = process.spent < FRESH;
                process.rests_until = (!fresh).then(|| now + (took * rest).min(LONGEST_REST));
                process.meets_from = (!fresh).then(|| now + took.min(LONGEST_REST));
                self.debts.spent(pid, user, ledger::thread_time().saturating_sub(worked), now);
                if process.more {
                    process.ask(now + MEETING);
                }
            }
        }
    }

    fn look(&mut self, pid: u32, mut known: Process, (mut met, stacks): (BTreeSet<u64>, BTreeSet<u64>)) {
        // If it is gone, that will be reported soon.
        let Ok(process) = RemoteProcess::open(Pid(pid)) else { return };
        let seen_at = KtimeNs::now();
        let Ok(mut maps) = process.maps() else { return };
        if let Some(process) = self.processes.get_mut(&pid) {
            process.seen_at = seen_at;
        }
        // Prepares the code that the main thread is in, or was a moment ago, before the first sample meets it. Not at the first
        // look, which the first sample waits for.
        let main_stack = if known.looked_at && !known.hinted { main_stack(&maps) } else { None };
        maps.retain(|mapping| mapping.executable);
        if maps.len() > MAX_MAPPINGS {
            let (count, user) = (maps.len(), known.user);
            self.left.notes.insert(format!(
                "pid {pid} (user {user}): it has {count} executable mappings: of those behind the first {MAX_MAPPINGS} \
                 native stacks are missing"
            ));
            maps.truncate(MAX_MAPPINGS);
        }
        let mapped = digest(&maps);
        let trampolines = trampolines_of(&process, &maps);
        let mut seen = self.seen.remove(&pid).unwrap_or_default();
        if mapped != known.mapped {
            let mut now = HashMap::new();
            let mut code = Vec::new();
            for mapping in &maps {
                // Files may take long, and the recording may be over.
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                let place = Place::of(mapping);
                let known = place.and_then(|place| seen.remove(&place));
                let found = known.unwrap_or_else(|| self.code((&process, seen_at), mapping, &trampolines));
                code.push(found.code.clone());
                // What was not found now may be found later.
                now.extend(place.filter(|_| found.file.is_some()).map(|place| (place, found)));
            }
            seen = now;
            let before = self.spaces.get(known.image, known.instance);
            // It may have executed another program meanwhile: then these mappings are that program's, and nobody asks for
            // them.
            self.spaces.set(known.image, known.instance, AddressSpace::new(code, before.as_deref()));
        }
        let identities = seen.iter().filter_map(|(place, seen)| Some((place.start, seen.file?))).collect();
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        self.seen.insert(pid, seen);
        let mut stale = mapped != known.mapped || known.more;
        let made =
            |mapping: &Mapping| mapping.path == MappedPath::Anonymous && !trampolines.contains_key(&mapping.start);
        // This, too, before the first sample meets it, but not at the first look, which that sample waits for.
        let news = known.looked_at && (!known.hinted || mapped != known.mapped);
        let meets_made =
            maps.iter().any(|mapping| made(mapping) && (news || met.iter().any(|&address| mapping.contains(address))));
        if meets_made && self.made.renew(&process, &maps, &identities, Instant::now()) {
            stale = true;
            if let Some(space) = self.spaces.get(known.image, known.instance) {
                self.spaces.set(known.image, known.instance, space.with(self.made.functions(pid)));
            }
        }
        // What samples wait for comes first, what nobody has asked for comes later.
        let waited_for = !met.is_empty();
        let allowance = match known.looked_at {
            _ if waited_for => 0,
            false => AT_FIRST,
            true => AT_A_TIME,
        };
        if waited_for {
            met.extend(hints(&process, &maps, &stacks));
        }
        if let Some(stack) = main_stack {
            met.extend(hints(&process, &maps, &BTreeSet::from([stack])));
        }
        for address in met {
            if let Some(mapping) = maps.iter().find(|mapping| mapping.contains(address)) {
                stale |= self.tables.meet(&process, mapping, address, known.version, &identities, &mut self.maps);
            }
        }
        if !stale {
            return;
        }
        // Each piece of a file that is left out costs a sample, which then asks for it.
        let left = waited_for || self.tables.make_more(&process, &maps, &identities, &mut self.maps).1;
        let first = self.interpreters.keys().copied().collect();
        let mut generated = self.made.tables(pid, &maps);
        generated.extend(trampolines.into_iter().map(|(start, table)| (start, Generated { table, len: ARENA })));
        let wanted = Wanted {
            identities: Some(&identities),
            image: known.image,
            first: Some(&first),
            generated: Some(&generated),
            allowance: Some(allowance),
        };
        let space = match self.tables.map_some(&process, &maps, &wanted, &mut self.maps) {
            Ok((space, more)) => {
                (known.version, known.more) = (space.version, more || left || !known.looked_at);
                // Before a stack can lead through it.
                self.spaces.assembly.add(self.tables.take_assembly());
                space
            }
            Err(no_room) => {
                self.left.notes.insert(format!("native stacks of some processes are missing: {no_room}"));
                self.make_room(known.user);
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.ask(Instant::now() + AGAIN);
                }
                return;
            }
        };
        if let Err(error) = self.maps.set_space(pid, &space) {
            self.left.notes.insert(format!("native stacks of some processes are missing: {error}"));
            return;
        }
        let is_it = lock(&self.kernel).process(pid).is_some_and(|entry| entry.image == known.image);
        if !is_it {
            // It ended or executed another program before its space was written: nobody else would remove the space.
            self.maps.remove_space(pid);
        } else if let Some(process) = self.processes.get_mut(&pid) {
            (process.mapped, process.version, process.more) = (mapped, known.version, known.more);
            process.ranges = space.count;
            process.hinted |= process.looked_at;
            process.looked_at = true;
        }
    }

    /// All ranges are in use: a user with more of them than this one gives up those of its largest process. They can be
    /// written again after a rest.
    fn make_room(&mut self, user: u32) {
        let mut users: HashMap<u32, u64> = HashMap::new();
        for process in self.processes.values() {
            *users.entry(process.user).or_default() += u64::from(process.ranges);
        }
        let own = users.get(&user).copied().unwrap_or(0);
        let Some((&most, _)) = users.iter().filter(|(_, ranges)| **ranges > own).max_by_key(|(_, ranges)| **ranges)
        else {
            return;
        };
        let of_most = self.processes.iter_mut().filter(|(_, process)| process.user == most);
        if let Some((&pid, process)) = of_most.max_by_key(|(_, process)| process.ranges) {
            (process.ranges, process.mapped) = (0, 0);
            process.rests_until = Some(Instant::now() + LONG_REST);
            self.maps.remove_space(pid);
            self.left.notes.insert(format!(
                "pid {pid} (user {most}): native stacks of it are missing: others need the room of its address space"
            ));
        }
    }
}
