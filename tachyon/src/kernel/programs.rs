//! The BPF programs of the object: which there are, loading them, finding one by its name.

use super::error::{KernelError, program_error};
use aya::Ebpf;
use aya::programs::{PerfEvent, Program, RawTracePoint};

/// The programs that make a sample, in the order of the tail-call table; the first is the one attached.
pub(super) const ENTRY: &str = "on_sample";
pub(super) const STAGES: [&str; 4] = ["search_threads", "walk_frames", "name_codes", NATIVE_STAGE];
/// The one that is not called, and not loaded, where native stacks are not wanted.
pub(super) const NATIVE_STAGE: &str = "walk_native";
/// The one that the verifier takes longest for: about as long as for all others together.
const LONGEST: &str = "walk_frames";
/// Raw tracepoints and their programs.
pub(super) const TRACEPOINTS: [(&str, &str); 4] = [
    ("on_fork", "sched_process_fork"),
    ("on_exec", "sched_process_exec"),
    ("on_exit", "sched_process_exit"),
    ("on_free", "sched_process_free"),
];

/// Loads all programs but `unused`. The verifier takes nearly all of a start: meanwhile the longest has a thread of its own.
pub(super) fn load_programs(ebpf: &mut Ebpf, unused: &[&str]) -> Result<(), KernelError> {
    let known = STAGES.into_iter().chain([ENTRY]).chain(TRACEPOINTS.map(|(name, _)| name));
    if let Some(missing) = known.clone().find(|name| ebpf.program(name).is_none()) {
        return Err(KernelError::Missing(missing));
    }
    let wanted = ebpf.programs_mut().filter_map(|(name, program)| {
        let name = known.clone().find(|known| *known == name)?;
        (!unused.contains(&name)).then_some((name, program))
    });
    let (longest, others): (Vec<_>, Vec<_>) = wanted.partition(|(name, _)| *name == LONGEST);
    let load_all = |programs: Vec<(&'static str, &mut Program)>| {
        programs.into_iter().try_for_each(|(name, program)| match program {
            Program::PerfEvent(program) => program.load().map_err(program_error(name)),
            Program::RawTracePoint(program) => program.load().map_err(program_error(name)),
            _ => Ok(()),
        })
    };
    std::thread::scope(|scope| {
        // Capabilities are a thread's own, and a new one has its parent's.
        let longest = scope.spawn(|| load_all(longest));
        let others = load_all(others);
        longest.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).and(others)
    })
}

pub(super) fn perf_program<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut PerfEvent, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}

pub(super) fn tracepoint<'a>(ebpf: &'a mut Ebpf, name: &'static str) -> Result<&'a mut RawTracePoint, KernelError> {
    let program = ebpf.program_mut(name).ok_or(KernelError::Missing(name))?;
    program.try_into().map_err(program_error(name))
}
