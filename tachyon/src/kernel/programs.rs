//! The BPF programs of the object: their names, loading them, finding one by its name.
//!
//! The hooks that follow processes are loaded first and attached; the verifier checks the programs that make samples on threads
//! of its own ([`Verifying`]), two at a time, while existing processes get their entries.

use super::chosen::{ChosenEvent, Source};
use super::error::{KernelError, program_error};
use super::waits::{KICK, NATIVE_WAIT_STAGE, SWITCH, TRY, WAIT_STAGES, WAKE};
use aya::Ebpf;
use aya::programs::{PerfEvent, Program, ProgramError, RawTracePoint, TracePoint};
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};
use tachyon_common::limits::MAX_EVENTS;

/// The program that begins a sample: the one that is attached, and the one that programs of chosen events continue with.
pub(super) const ENTRY: &str = "on_sample";
/// The programs that make a sample, in the order of the tail-call table.
pub(super) const STAGES: [&str; 6] =
    ["search_threads", "walk_frames", "name_codes", NATIVE_STAGE, ENTRY, "walk_awaiting"];
/// The one that is neither called nor loaded if native stacks are not wanted.
pub(super) const NATIVE_STAGE: &str = "walk_native";
/// Those that the verifier takes longest for.
const LONGEST: [&str; 2] = ["walk_frames", "search_threads"];
/// Raw tracepoints and their programs.
pub(super) const TRACEPOINTS: [(&str, &str); 4] = [
    ("on_fork", "sched_process_fork"),
    ("on_exec", "sched_process_exec"),
    ("on_exit", "sched_process_exit"),
    ("on_free", "sched_process_free"),
];

/// The first programs of chosen events, by position: of perf's events, and of tracepoints.
pub(super) const EVENT_PROGRAMS: [&str; MAX_EVENTS] = ["on_event_0", "on_event_1", "on_event_2", "on_event_3"];
pub(super) const TRACE_PROGRAMS: [&str; MAX_EVENTS] = ["on_trace_0", "on_trace_1", "on_trace_2", "on_trace_3"];
/// As [`STAGES`], for tracepoints.
pub(super) const TRACE_STAGES: [&str; 6] =
    ["trace_search", "trace_frames", "trace_codes", NATIVE_TRACE_STAGE, "trace_begin", "trace_awaiting"];
const NATIVE_TRACE_STAGE: &str = "trace_native";

/// The hooks that follow processes.
pub(super) fn hooks() -> Vec<&'static str> {
    TRACEPOINTS.map(|(name, _)| name).to_vec()
}

/// Whether one of them is a tracepoint.
pub(super) fn has_tracepoints(events: &[ChosenEvent]) -> bool {
    events.iter().any(is_tracepoint)
}

fn is_tracepoint(event: &ChosenEvent) -> bool {
    matches!(event.source(), Source::Tracepoint { .. })
}

/// Those that are neither called nor loaded if the tasks that await the running one are not wanted.
const AWAITING_STAGES: [&str; 3] = ["walk_awaiting", "wait_awaiting", "trace_awaiting"];

/// The programs that make samples.
pub(super) fn samplers(native: bool, awaiting: bool, waits: bool, events: &[ChosenEvent]) -> Vec<&'static str> {
    let mut programs = Vec::new();
    if events.iter().any(|event| !is_tracepoint(event)) || events.is_empty() {
        programs.extend(STAGES);
    }
    if waits {
        programs.extend(WAIT_STAGES.into_iter().chain([TRY, KICK, WAKE, SWITCH]));
    }
    if has_tracepoints(events) {
        programs.extend(TRACE_STAGES);
    }
    let first = |(event, (perf, trace))| if is_tracepoint(event) { trace } else { perf };
    programs.extend(events.iter().zip(EVENT_PROGRAMS.into_iter().zip(TRACE_PROGRAMS)).map(first));
    programs.retain(|name| native || ![NATIVE_STAGE, NATIVE_WAIT_STAGE, NATIVE_TRACE_STAGE].contains(name));
    programs.retain(|name| awaiting || !AWAITING_STAGES.contains(name));
    programs
}

/// The programs that make samples, while the verifier checks them.
#[must_use]
pub struct Verifying(JoinHandle<Result<Verified, KernelError>>);

/// The same, loaded.
pub struct Verified {
    pub(super) ebpf: Ebpf,
    pub(super) took: Duration,
}

impl Verifying {
    /// Starts the verifier.
    pub(super) fn begin(mut ebpf: Ebpf, programs: Vec<&'static str>) -> std::io::Result<Self> {
        let start = Instant::now();
        let verify = move || {
            load_side_by_side(&mut ebpf, &programs)?;
            Ok(Verified { ebpf, took: start.elapsed() })
        };
        Builder::new().name("tachyon-verify".to_owned()).spawn(verify).map(Self)
    }

    /// Waits for it.
    ///
    /// # Errors
    /// When the kernel refuses a program.
    pub fn wait(self) -> Result<Verified, KernelError> {
        self.0.join().unwrap_or_else(|panic| resume_unwind(panic))
    }
}

/// Loads programs.
pub(super) fn load_programs(ebpf: &mut Ebpf, names: &[&'static str]) -> Result<(), KernelError> {
    for name in names {
        let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
        load(program).map_err(program_error(name))?;
    }
    Ok(())
}

/// The same on two threads: the kernel's verifier takes a thread's time for each program, and knows no other's.
pub(super) fn load_side_by_side(ebpf: &mut Ebpf, names: &[&'static str]) -> Result<(), KernelError> {
    let mut found: HashMap<&str, &mut Program> = ebpf.programs_mut().collect();
    let mut all = Vec::new();
    // Those that take long come first, so that the others fill up what is left.
    for &name in LONGEST.iter().filter(|name| names.contains(name)).chain(names) {
        if let Some(program) = found.remove(name) {
            all.push((name, program));
        }
    }
    if let Some(&missing) = names.iter().find(|name| all.iter().all(|(found, _)| found != *name)) {
        return Err(KernelError::Missing(missing));
    }
    let left = Mutex::new(all.into_iter());
    let take = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((name, program)) = take() {
            load(program).map_err(program_error(name))?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // Without a second thread it takes longer.
        let second = Builder::new().name("tachyon-verify".to_owned()).spawn_scoped(scope, work).ok();
        let first = work();
        let second = second.map_or(Ok(()), |thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        first.and(second)
    })
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::PerfEvent(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        Program::TracePoint(program) => program.load(),
        _ => Ok(()),
    }
}

pub(super) fn perf_program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut PerfEvent, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}

pub(super) fn trace_program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut TracePoint, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}

pub(super) fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut RawTracePoint, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}
