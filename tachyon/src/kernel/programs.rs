//! The BPF programs of the object: which there are, loading them, finding one by its name.
//!
//! The hooks that follow processes are loaded first and attached; the verifier looks at the programs that make samples on a
//! thread of its own ([`Verifying`]), while the processes that there are get their entries.

use super::error::{KernelError, program_error};
use super::waits::{KICK, NATIVE_WAIT_STAGE, SWITCH, WAIT_STAGES};
use aya::Ebpf;
use aya::programs::{PerfEvent, Program, ProgramError, RawTracePoint};
use std::panic::resume_unwind;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// The programs that make a sample, in the order of the tail-call table; the first is the one attached.
pub(super) const ENTRY: &str = "on_sample";
pub(super) const STAGES: [&str; 4] = ["search_threads", "walk_frames", "name_codes", NATIVE_STAGE];
/// The one that is not called, and not loaded, where native stacks are not wanted.
pub(super) const NATIVE_STAGE: &str = "walk_native";
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
pub(super) fn samplers(native: bool, waits: bool) -> Vec<&'static str> {
    let of_waits = WAIT_STAGES.into_iter().chain([KICK, SWITCH]).filter(|_| waits);
    let unwanted = |name: &str| !native && [NATIVE_STAGE, NATIVE_WAIT_STAGE].contains(&name);
    STAGES.into_iter().chain([ENTRY]).chain(of_waits).filter(|name| !unwanted(name)).collect()
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

/// Loads programs.
pub(super) fn load_programs(ebpf: &mut Ebpf, names: &[&'static str]) -> Result<(), KernelError> {
    for name in names {
        let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
        load(program).map_err(program_error(name))?;
    }
    Ok(())
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
