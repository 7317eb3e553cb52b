//! Reads the stacks of threads that sleep, from outside.

use super::super::waits;
use crate::inspect::{self, ElfCache};
use crate::merge::ProgramKey;
use crate::profile::Profile;
use crate::remote::{CpuClocks, RemoteProcess};
use crate::snapshot::{self, NativeChoice, RunningTask, TaskLayout, ThreadStack, Wanted};
use crate::symbolize::native::NativeSymbols;
use crate::types::Pid;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tachyon_common::event::WaitFacts;

/// What a look should read.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct Choice {
    /// Native frames, with what is known about native symbols.
    pub native: Option<(NativeChoice, Arc<NativeSymbols>)>,
    /// Kernel frames.
    pub kernel: bool,
}

/// A process that was looked at.
#[derive(Debug)]
pub(in crate::recording) struct LookedAt {
    pub key: ProgramKey,
    pub pid: u32,
    /// A build without a GIL.
    pub free_threaded: bool,
    /// The profile that the threads' frames belong to.
    pub profile: Profile,
}

/// A thread of it.
#[derive(Debug)]
pub(in crate::recording) struct Sleeper {
    pub of: Arc<LookedAt>,
    pub stack: ThreadStack,
    /// The asyncio task that it runs.
    pub task: Option<RunningTask>,
    /// Functions of the kernel in which it waits, leaf first.
    pub kernel: Vec<String>,
    /// What it waits for, without the wait's length.
    pub facts: WaitFacts,
    /// Since when it has been asleep, according to the kernel; if unknown, when it started; nanoseconds after boot.
    pub since_ns: u64,
}

/// Reads threads of a process that sleep; those that turn out to run are left out.
pub(super) fn look_at(
    (key, pid): (ProgramKey, u32),
    tids: &HashSet<u32>,
    limit: Duration,
    choice: &Choice,
    files: &mut ElfCache,
) -> HashMap<u32, Sleeper> {
    read(key, pid, tids, limit, choice, files).unwrap_or_default()
}

fn read(
    key: ProgramKey,
    pid: u32,
    tids: &HashSet<u32>,
    limit: Duration,
    choice: &Choice,
    files: &mut ElfCache,
) -> Option<HashMap<u32, Sleeper>> {
    let process = RemoteProcess::open(Pid(pid)).ok()?;
    let inspect::Verdict::Python(interpreter) = inspect::inspect(&process, files).ok()? else {
        return None;
    };
    let wanted = Wanted {
        limit,
        native: choice.native.as_ref().map(|(choice, _)| *choice),
        symbols: choice.native.as_ref().map(|(_, symbols)| Arc::clone(symbols)),
        asleep: Some(tids),
        running_tasks: TaskLayout::of(&process, &interpreter, files),
        ..Wanted::default()
    };
    let mut snapshot = snapshot::take(&process, &interpreter, &wanted).ok()?;
    let threads = std::mem::take(&mut snapshot.threads);
    let mut running_tasks = std::mem::take(&mut snapshot.running_tasks);
    let gil = threads.iter().find_map(|thread| thread.python.as_ref()?.gil);
    let of = Arc::new(LookedAt { key, pid, free_threaded: interpreter.free_threaded(), profile: snapshot.profile });
    let mut clocks = CpuClocks::default();
    let mut sleeper = |stack: ThreadStack| {
        let tid = stack.tid.filter(|tid| tids.contains(tid))?;
        // Without names, or changed while it was read.
        if stack.python.as_ref().is_some_and(|python| !python.steady) {
            return None;
        }
        let own_gil = stack.python.as_ref().and_then(|python| python.gil).or(gil);
        let facts = waits::of_sleeping(&process, &stack, own_gil)?;
        let since = process.asleep_since(tid, &mut clocks).map(|since| since.0);
        let since_ns = since.or_else(|| process.task_start_ns(tid))?;
        let kernel = if choice.kernel { kernel_functions(&process, tid) } else { Vec::new() };
        let task = running_tasks.remove(&tid);
        Some((tid, Sleeper { of: Arc::clone(&of), stack, task, kernel, facts, since_ns }))
    };
    Some(threads.into_iter().filter_map(&mut sleeper).collect())
}

/// Functions of the kernel that a thread waits in, leaf first, without those of the scheduler; none where they may not be
/// read (`/proc/PID/stack` requires CAP_SYS_ADMIN).
fn kernel_functions(process: &RemoteProcess, tid: u32) -> Vec<String> {
    let text = process.task_file(tid, "stack").unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    // `[<0>] futex_wait_queue+0x60/0x90`.
    let name = |line: &str| Some(line.split_once("] ")?.1.split('+').next()?.to_owned());
    let names: Vec<String> = text.lines().filter_map(name).collect();
    let above = super::super::native::above_the_wait(names.iter().map(|name| Some(name.as_str())));
    names.into_iter().skip(above).collect()
}
