//! The thread that keeps unwind tables and address spaces as processes map files.
//!
//! Apart from the one that follows processes, because a large file's table takes longer to make than a short process
//! lives. It is told of processes, of mappings and of ends; what a process maps is read from `/proc`, a little after it
//! was told of, for libraries come in bursts.

use super::spaces::{AddressSpace, Code, InterpreterCode, Spaces};
use crate::inspect::Evaluator;
use crate::kernel::{Kernel, NativeMaps, drop_privileges};
use crate::recording::follow::lock;
use crate::remote::elf::Elf;
use crate::remote::{FileIdentity, Mapping, RemoteProcess};
use crate::symbolize::native::NativeSymbols;
use crate::types::Pid;
use crate::unwind::UnwindTables;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A process is looked at this long after it mapped something: most libraries come with others.
const BURST: Duration = Duration::from_millis(20);

/// A process whose samples meet code that is not known is looked at this often at most.
const AGAIN: Duration = Duration::from_secs(1);

/// What the thread is told.
#[derive(Clone, Debug)]
pub(in crate::recording) enum News {
    /// A process is CPython; `interpreter` is the file that holds it, where it was just found.
    Python { pid: u32, image: u64, instance: u64, interpreter: Option<FileIdentity> },
    /// A process was forked from one that is.
    Forked { pid: u32, image: u64, instance: u64 },
    /// A process mapped a file.
    Mapped { pid: u32 },
    /// Mappings were missed.
    Lost,
    /// A process's samples meet code that is not known.
    Unknown { pid: u32 },
    /// A process has ended, or executes another program.
    Gone { pid: u32 },
    /// Everything that is due is to be done now, and told.
    Finish(Sender<()>),
}

/// What the thread leaves behind.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct Mapped {
    /// Files without usable tables, by path, each with its reason.
    pub refused: BTreeMap<String, String>,
    /// What is weaker than it should be.
    pub notes: BTreeSet<String>,
    /// Bytes of tables in use.
    pub table_bytes: u64,
}

/// The thread, perhaps not yet started: what it is told waits for it.
pub(in crate::recording) struct Mapper {
    news: Sender<News>,
    waiting: Option<(Worker, Receiver<News>)>,
    thread: Option<JoinHandle<Mapped>>,
}

impl Mapper {
    /// Makes what the thread will work with.
    pub fn new(maps: NativeMaps, kernel: Arc<Mutex<Kernel>>, spaces: Arc<Spaces>, symbols: Arc<NativeSymbols>) -> Self {
        let (news, told) = channel();
        let tables = maps.tables();
        let worker = Worker {
            kernel,
            maps,
            tables,
            spaces,
            symbols,
            interpreters: HashMap::new(),
            processes: HashMap::new(),
            left: Mapped::default(),
        };
        Self { news, waiting: Some((worker, told)), thread: None }
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

    /// Where to tell it things.
    pub fn news(&self) -> Sender<News> {
        self.news.clone()
    }

    /// Waits until it has dealt with all it was told so far.
    pub fn wait(&self) {
        let (done, wait) = channel();
        // Neither fails but when the thread has panicked, which its end tells.
        let _ended = self.news.send(News::Finish(done));
        let _ended = wait.recv();
    }

    /// Ends it, when nobody else can tell it anything any more.
    pub fn stop(self) -> Mapped {
        drop(self.news);
        self.thread.and_then(|thread| thread.join().ok()).unwrap_or_else(|| {
            let note = "the thread that looks at mappings ended early: later native stacks are missing".to_owned();
            Mapped { notes: BTreeSet::from([note]), ..Mapped::default() }
        })
    }
}

/// A process that is looked after.
#[derive(Clone, Copy, Debug)]
struct Process {
    image: u64,
    instance: u64,
    /// When it is to be looked at.
    due: Option<Instant>,
    /// When it was looked at last.
    looked: Option<Instant>,
    /// Digest of its executable mappings at that time.
    mapped: u64,
}

impl Process {
    const fn new(image: u64, instance: u64) -> Self {
        Self { image, instance, due: None, looked: None, mapped: 0 }
    }
}

/// An interpreter's code.
enum Evaluated {
    /// Nobody has looked for it yet.
    Wanted,
    Found(Arc<InterpreterCode>),
    /// Its file does not tell.
    Missing,
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
    left: Mapped,
}

impl Worker {
    fn run(mut self, told: &Receiver<News>) -> Mapped {
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
            // Ends and beginnings first: they make looking superfluous.
            while let Ok(news) = told.try_recv() {
                self.hear(news);
            }
            self.look_at_due(Instant::now());
        }
        let refused = self.tables.refusals().map(|(path, reason)| (path.to_owned(), reason.to_owned()));
        self.left.refused.extend(refused);
        let without_room = self.tables.without_room();
        if without_room > 0 {
            let note = "native stacks are cut in files whose unwind tables have no room";
            self.left.notes.insert(format!("{note} ({without_room}): give more --unwind-memory"));
        }
        self.left.table_bytes = self.tables.bytes_used();
        self.left
    }

    fn hear(&mut self, news: News) {
        let now = Instant::now();
        match news {
            News::Python { pid, image, instance, interpreter } => {
                if let Some(file) = interpreter {
                    self.interpreters.entry(file).or_insert(Evaluated::Wanted);
                }
                self.processes.insert(pid, Process { due: Some(now), ..Process::new(image, instance) });
            }
            News::Forked { pid, image, instance } => {
                self.processes.insert(pid, Process::new(image, instance));
            }
            News::Mapped { pid } => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.due = process.due.or(Some(now + BURST));
                }
            }
            News::Lost => {
                for process in self.processes.values_mut() {
                    process.due = process.due.or(Some(now + BURST));
                }
            }
            News::Unknown { pid } => {
                if let Some(process) = self.processes.get_mut(&pid) {
                    let at = process.looked.map_or(now, |looked| (looked + AGAIN).max(now));
                    process.due = process.due.or(Some(at));
                }
            }
            News::Gone { pid } => {
                if let Some(process) = self.processes.remove(&pid) {
                    self.spaces.forget(process.image, process.instance);
                }
            }
            News::Finish(done) => {
                self.look_at_due(now + BURST);
                // Who asked may have given up waiting.
                let _gone = done.send(());
            }
        }
    }
}

impl Worker {
    fn look_at_due(&mut self, until: Instant) {
        let due = |process: &Process| process.due.is_some_and(|due| due <= until);
        let pids: Vec<u32> = self.processes.iter().filter(|(_, process)| due(process)).map(|(&pid, _)| pid).collect();
        for pid in pids {
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            (process.due, process.looked) = (None, Some(Instant::now()));
            let process = *process;
            self.look(pid, process);
        }
    }

    fn look(&mut self, pid: u32, known: Process) {
        // One that is gone is told of soon.
        let Ok(process) = RemoteProcess::open(Pid(pid)) else { return };
        let Ok(mut maps) = process.maps() else { return };
        maps.retain(|mapping| mapping.executable);
        let mapped = digest(&maps);
        if mapped == known.mapped {
            return;
        }
        let code = maps.iter().map(|mapping| self.code(&process, mapping)).collect();
        let before = self.spaces.get(known.image, known.instance);
        // It may have executed another program meanwhile: then these mappings are that one's, and nobody asks for them.
        self.spaces.set(known.image, known.instance, AddressSpace::new(code, before.as_deref()));
        let space = match self.tables.map(&process, &maps, known.image, &mut self.maps) {
            Ok(space) => space,
            Err(no_room) => {
                self.left.notes.insert(format!("native stacks of some processes are missing: {no_room}"));
                return;
            }
        };
        if let Err(error) = self.maps.set_space(pid, &space) {
            self.left.notes.insert(format!("native stacks of some processes are missing: {error}"));
            return;
        }
        let is_it = lock(&self.kernel).process(pid).is_some_and(|entry| entry.image == known.image);
        if !is_it {
            // It ended, or executed another program, before its space was written: nobody else would remove that.
            self.maps.remove_space(pid);
        } else if let Some(process) = self.processes.get_mut(&pid) {
            process.mapped = mapped;
        }
    }

    /// What stands behind an executable mapping.
    fn code(&mut self, process: &RemoteProcess, mapping: &Mapping) -> Code {
        let found = mapping.file_path().and_then(|_| process.mapped_file(mapping).ok());
        let file = match &found {
            Some(found) => self.symbols.pin_file(process, mapping, found),
            None => self.symbols.pin(process, mapping),
        };
        let interpreter = found.and_then(|found| {
            let evaluated = self.interpreters.get_mut(&found.identity())?;
            if matches!(evaluated, Evaluated::Wanted) {
                *evaluated = match found.open().map_err(|error| error.to_string()).and_then(|file| interpreter(&file)) {
                    Ok(code) => Evaluated::Found(Arc::new(code)),
                    Err(reason) => {
                        let note = "its native and Python frames cannot be put together";
                        self.left.notes.insert(format!("{}: {reason}: {note}", mapping.name()));
                        Evaluated::Missing
                    }
                };
            }
            match evaluated {
                Evaluated::Found(code) => Some(Arc::clone(code)),
                Evaluated::Wanted | Evaluated::Missing => None,
            }
        });
        let object: Arc<str> = mapping.name().into();
        let path = mapping.file_path().map_or_else(|| Arc::clone(&object), |path| path.to_string_lossy().into());
        Code { start: mapping.start, end: mapping.end, offset: mapping.offset, object, path, file, interpreter }
    }
}

/// Finds the evaluator in an interpreter's file.
fn interpreter(file: &std::fs::File) -> Result<InterpreterCode, String> {
    let evaluator = Evaluator::of_file(file).map_err(|error| error.to_string())?;
    let loads = Elf::parse(file).map_err(|error| error.to_string())?.loads().to_vec();
    Ok(InterpreterCode { evaluator, loads })
}

/// Tells one set of mappings from others.
fn digest(maps: &[Mapping]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for mapping in maps {
        (mapping.start, mapping.end, mapping.offset, mapping.dev, mapping.inode).hash(&mut hasher);
    }
    // 0 stands for "never looked at".
    hasher.finish() | 1
}
