//! The BPF programs of the object: which there are, loading them, finding one by its name.
//!
//! The verifier takes nearly all of a start. The hooks that follow processes it has looked at within milliseconds, so
//! they are loaded first and attached; it looks at those that make samples on threads of their own ([`Verifying`]), while
//! the processes that there are get their entries.

use super::error::{KernelError, program_error};
use aya::Ebpf;
use aya::programs::{PerfEvent, Program, ProgramError, RawTracePoint};
use std::cmp::Reverse;
use std::num::NonZero;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// The programs that make a sample, in the order of the tail-call table; the first is the one attached.
pub(super) const ENTRY: &str = "on_sample";
pub(super) const STAGES: [&str; 4] = ["search_threads", "walk_frames", "name_codes", NATIVE_STAGE];
/// The one that is not called, and not loaded, where native stacks are not wanted.
pub(super) const NATIVE_STAGE: &str = "walk_native";
/// Those that the verifier takes long for, the longest first. Each of the first two takes nearly half of it all.
const LONGEST: [&str; 4] = [NATIVE_STAGE, "walk_frames", "search_threads", "name_codes"];
/// Raw tracepoints and their programs.
pub(super) const TRACEPOINTS: [(&str, &str); 4] = [
    ("on_fork", "sched_process_fork"),
    ("on_exec", "sched_process_exec"),
    ("on_exit", "sched_process_exit"),
    ("on_free", "sched_process_free"),
];

/// The hooks that follow processes.
pub(super) fn hooks() -> Vec<&'static str> {
    TRACEPOINTS.map(|(name, _)| name).to_vec()
}

/// The programs that make samples.
pub(super) fn samplers(native: bool) -> Vec<&'static str> {
    STAGES.into_iter().chain([ENTRY]).filter(|name| native || *name != NATIVE_STAGE).collect()
}

/// The programs that make samples, while the verifier looks at them.
#[must_use]
pub struct Verifying(JoinHandle<Result<Verified, KernelError>>);

/// The same, loaded.
pub struct Verified {
    pub(super) ebpf: Ebpf,
    pub(super) took: Duration,
}

impl Verifying {
    /// Lets the verifier begin.
    pub(super) fn begin(mut ebpf: Ebpf, programs: Vec<&'static str>) -> std::io::Result<Self> {
        let start = Instant::now();
        let verify = move || {
            load_programs(&mut ebpf, &programs)?;
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

/// Loads programs. The verifier looks at as many at once as it is asked to: a thread for each CPU takes one after another,
/// those first that take longest.
pub(super) fn load_programs(ebpf: &mut Ebpf, names: &[&'static str]) -> Result<(), KernelError> {
    if let Some(missing) = names.iter().find(|name| ebpf.program(name).is_none()) {
        return Err(KernelError::Missing(missing));
    }
    let wanted = ebpf.programs_mut().filter_map(|(name, program)| {
        let name = names.iter().find(|known| **known == name)?;
        Some((*name, program))
    });
    let mut wanted: Vec<(&str, &mut Program)> = wanted.collect();
    // They are taken from the end.
    wanted.sort_by_key(|(name, _)| Reverse(LONGEST.iter().position(|long| long == name).unwrap_or(LONGEST.len())));
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(LONGEST.len());
    let wanted = Mutex::new(wanted);
    let load_some = || {
        loop {
            let next = wanted.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let Some((name, program)) = next else { return Ok(()) };
            load(program).map_err(program_error(name))?;
        }
    };
    std::thread::scope(|scope| {
        // Capabilities are a thread's own, and a new one has its parent's.
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(load_some)).collect();
        let own = load_some();
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        others.into_iter().map(join).fold(own, Result::and)
    })
}

fn load(program: &mut Program) -> Result<(), ProgramError> {
    match program {
        Program::PerfEvent(program) => program.load(),
        Program::RawTracePoint(program) => program.load(),
        _ => Ok(()),
    }
}

pub(super) fn perf_program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut PerfEvent, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}

pub(super) fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut RawTracePoint, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}
