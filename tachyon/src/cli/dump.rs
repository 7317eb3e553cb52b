//! `dump`: every thread's stack once, now, as text and as JSON.

mod tasks;

use super::args::DumpArgs;
use super::escape::escape;
use super::failure::Failure;
use super::table;
use crate::inspect::{self, ElfCache, GreenletLayout, InspectError, Interpreter, Verdict};
use crate::machine::access;
use crate::merge::Quality;
use crate::profile::FrameId;
use crate::recording::waits;
use crate::remote::{CpuClocks, RemoteError, RemoteProcess, ledger};
use crate::sinks::text;
use crate::snapshot::{self, MixedFrame, MixedStack, NativeChoice, Snapshot, TaskLayout, ThreadStack, Wanted};
use crate::symbolize::native::NativeName;
use crate::types::{KtimeNs, Pid};
use serde::Serialize;
use std::io::{self, Write};
use std::time::Instant;
use tachyon_common::stop::StopReason;
use tasks::{Asyncio, Greenlets};

/// Number of the JSON's schema: it changes when a key goes or changes its meaning, not when one is added.
const SCHEMA: u32 = 1;

/// Most bytes of a command line that are read.
const MAX_CMDLINE: u64 = 64 << 10;
/// Most columns of it that are shown as text: what users asked for comes below it.
const SHOWN_CMDLINE: usize = 1000;

/// What is known about a process. The JSON's schema; `docs/dump.md` describes the keys.
#[derive(Debug, Serialize)]
struct Dump {
    schema: u32,
    tool: &'static str,
    pid: u32,
    comm: String,
    cmdline: Vec<String>,
    python_version: String,
    free_threaded: bool,
    python_file: String,
    problems: Vec<String>,
    threads: Vec<Thread>,
    asyncio: Option<Asyncio>,
    greenlets: Option<Greenlets>,
}

#[derive(Debug, Serialize)]
struct Thread {
    tid: Option<u32>,
    ns_tid: Option<u32>,
    thread_id: Option<u64>,
    name: String,
    comm: String,
    state: Option<char>,
    waiting: Option<Waiting>,
    main: bool,
    python: bool,
    interpreter: Option<u64>,
    holds_gil: Option<bool>,
    steady: Option<bool>,
    stop: Option<&'static str>,
    frames: Vec<Frame>,
    mixed: Option<Vec<Mixed>>,
    merge: Option<&'static str>,
    no_native: Option<String>,
}

/// What a thread waits for.
#[derive(Debug, Serialize)]
struct Waiting {
    cause: &'static str,
    syscall: Option<&'static str>,
    futex: Option<String>,
    since_us: Option<u64>,
    wait_us: Option<u64>,
}

impl Waiting {
    fn of(asked: &mut Asked<'_>, thread: &ThreadStack) -> Option<Self> {
        let Asked { process, snapshot, clocks, now, free_threaded } = asked;
        // A stopped thread waits for nothing but its continuation.
        thread.state.filter(|state| ['S', 'D'].contains(state))?;
        let facts = waits::of_sleeping(process, thread, snapshot.gil_of(thread))?;
        let wait = waits::told(&facts);
        let since = process.asleep_since(thread.tid?, clocks);
        Some(Self {
            cause: waits::cause_with_stack(process.pid().0, &facts, thread, *free_threaded),
            syscall: wait.syscall_name(),
            futex: wait.futex.map(|address| format!("{address:#x}")),
            since_us: since.map(KtimeNs::as_micros),
            wait_us: since.map(|since| now.0.saturating_sub(since.0) / 1000),
        })
    }

    /// As text; `None` where the thread's state says as much.
    fn text(&self) -> Option<&'static str> {
        Some(match self.cause {
            "gil" => "waiting for the GIL",
            "lock" => "waiting for a lock",
            "poll" => "waiting for any of several descriptors",
            "socket" => "waiting for a socket",
            "pipe" => "waiting for a pipe",
            "child" => "waiting for a child process",
            "stop_the_world" => "waiting while the world is stopped",
            _ => return None,
        })
    }
}

/// What is needed to find out about the threads' waits.
struct Asked<'a> {
    process: &'a RemoteProcess,
    snapshot: &'a Snapshot,
    clocks: CpuClocks,
    now: KtimeNs,
    free_threaded: bool,
}

/// A frame of a mixed stack.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Mixed {
    Python(Frame),
    Native(Native),
}

/// A native frame, or a function that was compiled into one.
#[derive(Debug, Serialize)]
struct Native {
    function: Option<String>,
    object: String,
    address: u64,
    filename: Option<String>,
    lineno: Option<u32>,
    inlined: bool,
}

/// A frame; unknown values are `null`.
#[derive(Debug, Serialize)]
struct Frame {
    function: String,
    filename: String,
    lineno: Option<u32>,
    end_lineno: Option<u32>,
    column: Option<u32>,
    end_column: Option<u32>,
}

/// Writes the stacks of all threads of a process.
///
/// # Errors
/// When there is no such process, it is not a supported CPython, it may not be read, or `out` fails.
pub fn run(args: &DumpArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let (pid, start) = (args.pid, Instant::now());
    let process = RemoteProcess::open(pid).map_err(|_| no_process(pid))?;
    let mut cache = ElfCache::default();
    let interpreter = interpreter(&process, &mut cache)?;
    let tasks = if args.tasks { task_layout(&process, &interpreter, &mut cache)? } else { None };
    // A dump does not join stacks into one tower: each is shown down to its root.
    let native = args.native.then_some(NativeChoice { interpreter_frames: args.interpreter_frames, roots: true });
    let (greenlets, unlisted) = if args.tasks { greenlet_layout(&process, &interpreter)? } else { (None, false) };
    let wanted = Wanted { native, tasks, greenlets, ..Wanted::default() };
    let mut snapshot = snapshot::take(&process, &interpreter, &wanted)
        .map_err(|error| unreadable(&process, error.is_gone(), error.is_denied(), error))?;
    if args.tasks {
        snapshot.tasks.get_or_insert_default();
    }
    if unlisted {
        let without = "greenlets are left out: a build without a GIL keeps no list of objects that leads to them";
        snapshot.problems.push(without.to_owned());
    }
    let dump = Dump::new(&process, &interpreter, &snapshot, start);
    if args.json {
        text::write_json(&mut *out, &dump)?;
        writeln!(out)?;
    } else {
        dump.print(out)?;
    }
    Ok(out.flush()?)
}

/// Where the tasks of a process are; `None` if it has not imported asyncio.
fn task_layout(
    process: &RemoteProcess,
    interpreter: &Interpreter,
    cache: &mut ElfCache,
) -> Result<Option<TaskLayout>, Failure> {
    if interpreter.awaits.is_none() {
        let version = interpreter.version_text();
        return Err(Failure::new(format!("{} runs CPython {version}, whose tasks cannot be listed", named(process)))
            .with_hint("`tachyon-bpf dump` without --async shows what its threads run"));
    }
    Ok(TaskLayout::of(process, interpreter, cache))
}

/// Where the greenlets of a process are, `None` if this cannot be found; and whether it has loaded greenlet all the same.
fn greenlet_layout(
    process: &RemoteProcess,
    interpreter: &Interpreter,
) -> Result<(Option<GreenletLayout>, bool), Failure> {
    let maps = process.maps().map_err(|error| unreadable(process, error.is_gone(), error.is_denied(), error))?;
    let layout = GreenletLayout::of(interpreter, &maps);
    Ok((layout, layout.is_none() && GreenletLayout::is_loaded(&maps)))
}

fn interpreter(process: &RemoteProcess, cache: &mut ElfCache) -> Result<Interpreter, Failure> {
    let denied = |error: &InspectError| {
        let (InspectError::Process(error) | InspectError::File(error)) = error;
        error.is_denied()
    };
    match inspect::inspect(process, cache) {
        Ok(Verdict::Python(interpreter)) => Ok(*interpreter),
        Ok(Verdict::NotPython) => Err(Failure::new(format!("{} is not a Python process", named(process)))
            .with_hint("it has no CPython mapped; `tachyon-bpf doctor -v` lists the Python processes")),
        Ok(Verdict::Unsupported { implementation, reason }) => {
            Err(Failure::new(format!("{} runs {implementation}: {reason}", named(process))))
        }
        Err(error) => Err(unreadable(process, error.is_gone(), denied(&error), error)),
    }
}

fn no_process(pid: Pid) -> Failure {
    Failure::new(format!("no process has pid {pid}")).with_hint("`tachyon-bpf doctor -v` lists the Python processes")
}

/// The failure of a process that cannot be read, with the remedy if rights are missing.
fn unreadable(
    process: &RemoteProcess,
    gone: bool,
    denied: bool,
    error: impl std::error::Error + Send + Sync + 'static,
) -> Failure {
    let pid = process.pid();
    if gone {
        return no_process(pid);
    }
    let failure = Failure::new(format!("cannot read {}", named(process)));
    if denied {
        return failure.with_source(io::Error::from_raw_os_error(libc::EPERM)).with_hint(access::hint(pid));
    }
    failure.with_source(error)
}

/// `pid 4242 (python3.12)`.
fn named(process: &RemoteProcess) -> String {
    let comm = process.comm().unwrap_or_default();
    format!("pid {} ({})", process.pid(), escape(&comm))
}

impl Dump {
    fn new(process: &RemoteProcess, interpreter: &Interpreter, snapshot: &Snapshot, start: Instant) -> Self {
        // A process that has ended meanwhile has no names any more; the missing names show that.
        let gone = |_: RemoteError| ();
        let (now, free_threaded) = (KtimeNs::now(), interpreter.free_threaded());
        let mut asked = Asked { process, snapshot, clocks: CpuClocks::default(), now, free_threaded };
        Self {
            schema: SCHEMA,
            tool: concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")),
            pid: process.pid().0,
            comm: process.comm().map_err(gone).unwrap_or_default(),
            cmdline: process.cmdline(MAX_CMDLINE).map_err(gone).unwrap_or_default(),
            python_version: interpreter.version_text(),
            free_threaded: interpreter.free_threaded(),
            python_file: interpreter.path.to_string_lossy().into_owned(),
            problems: snapshot.problems.iter().cloned().chain(ledger::refused(start)).collect(),
            threads: snapshot.threads.iter().map(|thread| Thread::new(&mut asked, thread)).collect(),
            asyncio: snapshot.tasks.as_ref().map(|tasks| Asyncio::new(tasks, snapshot)),
            greenlets: snapshot.greenlets.as_ref().map(|greenlets| Greenlets::new(greenlets, snapshot)),
        }
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let command = if self.cmdline.is_empty() { self.comm.clone() } else { self.cmdline.join(" ") };
        writeln!(out, "Process {}: {}", self.pid, table::cut_end(&escape(&command), SHOWN_CMDLINE))?;
        let free = if self.free_threaded { ", free-threaded" } else { "" };
        writeln!(out, "CPython {}{free} ({})", self.python_version, escape(&self.python_file))?;
        for problem in &self.problems {
            writeln!(out, "Incomplete: {problem}")?;
        }
        if let Some(asyncio) = &self.asyncio {
            let name_of =
                |tid| self.threads.iter().find(|thread| thread.tid == Some(tid)).map(|thread| thread.name.clone());
            return match &self.greenlets {
                Some(greenlets) if asyncio.is_empty() => greenlets.print(name_of, out),
                Some(greenlets) => asyncio.print(name_of, out).and_then(|()| greenlets.print(name_of, out)),
                None => asyncio.print(name_of, out),
            };
        }
        for thread in &self.threads {
            writeln!(out)?;
            thread.print(self, out)?;
        }
        Ok(())
    }
}

impl Thread {
    fn new(asked: &mut Asked<'_>, thread: &ThreadStack) -> Self {
        let waiting = Waiting::of(asked, thread);
        let snapshot = asked.snapshot;
        let python = thread.python.as_ref();
        let mixed = thread.mixed.as_ref().and_then(|mixed| mixed.as_ref().ok());
        Self {
            tid: thread.tid,
            ns_tid: thread.ns_tid,
            thread_id: Some(thread.thread_id).filter(|&id| id != 0),
            name: thread.name.clone(),
            comm: thread.comm.clone(),
            state: thread.state,
            waiting,
            main: thread.main,
            python: python.is_some(),
            interpreter: python.and_then(|python| python.interpreter),
            holds_gil: python.and_then(|python| python.holds_gil),
            steady: python.map(|python| python.steady),
            stop: python.map(|python| python.stop.name()),
            frames: python.iter().flat_map(|python| &python.frames).map(|&id| Frame::new(id, snapshot)).collect(),
            mixed: mixed.map(|mixed| mixed_frames(mixed, snapshot)),
            merge: mixed.map(|mixed| mixed.quality.name()),
            no_native: thread.mixed.as_ref().and_then(|mixed| mixed.as_ref().err()).map(ToString::to_string),
        }
    }

    fn print(&self, dump: &Dump, out: &mut dyn Write) -> io::Result<()> {
        match (self.tid, self.thread_id) {
            (Some(tid), _) => write!(out, "Thread {tid}")?,
            (None, Some(id)) => write!(out, "Thread of unknown tid, pthread {id:#x}")?,
            (None, None) => write!(out, "Thread of unknown tid")?,
        }
        let waiting = self.waiting.as_ref().and_then(Waiting::text);
        let mut notes = vec![waiting.unwrap_or(self.state.map_or("state unknown", state_name)).to_owned()];
        if let Some(wait_us) = self.waiting.as_ref().and_then(|waiting| waiting.wait_us) {
            notes[0] += &format!(" for {}", length(wait_us));
        }
        if self.holds_gil == Some(true) {
            notes.push("holds the GIL".to_owned());
        }
        if let Some(id) = self.interpreter.filter(|&id| id != 0) {
            notes.push(format!("interpreter {id}"));
        }
        if let Some(tid) = self.ns_tid.filter(|_| self.ns_tid != self.tid) {
            notes.push(format!("tid {tid} in its own namespace"));
        }
        writeln!(out, " ({}): \"{}\"", notes.join(", "), escape(&self.name))?;
        if self.steady == Some(false) {
            writeln!(out, "    <the stack changed while it was read: frames may not belong together>")?;
        }
        if let Some(reason) = &self.no_native {
            writeln!(out, "    <no native frames: {reason}>")?;
        }
        if let Some(merge) = self.merge.filter(|&merge| merge != Quality::Exact.name()) {
            writeln!(out, "    <order of native and Python frames: {merge}>")?;
        }
        match &self.mixed {
            Some(mixed) => mixed.iter().try_for_each(|frame| frame.print(out))?,
            None => self.frames.iter().try_for_each(|frame| frame.print(out))?,
        }
        match self.stop {
            None => writeln!(out, "    <no Python: this thread never entered CPython {}>", dump.python_version),
            Some(stop) if stop == StopReason::NoFrame.name() => writeln!(out, "    <no Python frame>"),
            Some(stop) if stop == StopReason::Complete.name() => Ok(()),
            Some(stop) => writeln!(out, "    <stack cut: {stop}>"),
        }
    }
}

impl Frame {
    fn new(id: FrameId, snapshot: &Snapshot) -> Self {
        let strings = &snapshot.profile.strings;
        let frame = snapshot.profile.frames.get(id);
        let known = |number: i32| u32::try_from(number).ok();
        Self {
            function: strings.get(frame.function).to_owned(),
            filename: strings.get(frame.filename).to_owned(),
            lineno: known(frame.lineno),
            end_lineno: known(frame.end_lineno),
            column: known(frame.column),
            end_column: known(frame.end_column),
        }
    }

    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "    {} ({}{})", escape(&self.function), escape(&self.filename), colon(self.lineno))
    }
}

impl Mixed {
    fn print(&self, out: &mut dyn Write) -> io::Result<()> {
        let native = match self {
            Self::Python(frame) => return frame.print(out),
            Self::Native(native) => native,
        };
        let object = match native.object.as_str() {
            "" => "no file".to_owned(),
            object => escape(object).into_owned(),
        };
        match &native.function {
            Some(function) => write!(out, "    {} [{object}]", escape(function))?,
            None => write!(out, "    {:#x} [{object}]", native.address)?,
        }
        match &native.filename {
            Some(file) => writeln!(out, " ({}{})", escape(file), colon(native.lineno)),
            None => writeln!(out),
        }
    }
}

/// `:12`, or nothing.
fn colon(line: Option<u32>) -> String {
    line.map_or_else(String::new, |line| format!(":{line}"))
}

fn mixed_frames(mixed: &MixedStack, snapshot: &Snapshot) -> Vec<Mixed> {
    let frames = |frame: &MixedFrame| match frame {
        MixedFrame::Python(id) => vec![Mixed::Python(Frame::new(*id, snapshot))],
        MixedFrame::Native(name) => native_frames(name).into_iter().map(Mixed::Native).collect(),
    };
    mixed.frames.iter().flat_map(frames).collect()
}

/// The functions at one address: those inlined into another first.
fn native_frames(name: &NativeName) -> Vec<Native> {
    let (object, address) = (&name.object, name.vaddr);
    let native = |function: Option<&str>, filename: Option<&String>, lineno, inlined| Native {
        function: function.map(str::to_owned),
        object: object.clone(),
        address,
        filename: filename.cloned(),
        lineno,
        inlined,
    };
    if name.lines.is_empty() {
        return vec![native(name.shown(), None, None, false)];
    }
    let last = name.lines.len() - 1;
    let lines = name.lines.iter().enumerate();
    lines.map(|(at, line)| native(line.function.as_deref(), line.file.as_ref(), line.line, at < last)).collect()
}

/// A length of time as text.
fn length(us: u64) -> String {
    let seconds = us as f64 / 1e6;
    match seconds {
        0.0..1.0 => format!("{} ms", us / 1000),
        1.0..100.0 => format!("{seconds:.1} s"),
        100.0..6_000.0 => format!("{:.0} min", seconds / 60.0),
        6_000.0..172_800.0 => format!("{:.1} h", seconds / 3_600.0),
        _ => format!("{:.1} days", seconds / 86_400.0),
    }
}

/// The kernel's words (`task_state_array` in fs/proc/array.c), as text.
fn state_name(state: char) -> &'static str {
    match state {
        'R' => "running",
        'S' => "sleeping",
        'D' => "waiting for the disk or a device",
        'T' => "stopped",
        't' => "stopped by a debugger",
        'Z' | 'X' => "ended",
        'I' => "idle",
        _ => "state unknown",
    }
}
