//! Value of the `PROCESSES` map: what the kernel side knows of one process.

/// What is known of one process (a thread group). Key: its tgid in the profiler's pid namespace.
///
/// Written by user space when a process has been inspected; copied from parent to child, replaced at `exec`
/// and marked at exit by the lifecycle hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessEntry {
    /// Bits of [`flags`]. First, beside the key: most runs ask for nothing else.
    pub flags: u32,
    /// 1 when the process's own pid namespace numbers its threads as the profiler's does; 0: not known.
    pub same_numbers: u32,
    /// Identity of the memory image: new at `exec`, inherited by `fork`. Code objects are known under it.
    pub image: u64,
    /// Identity of this process: never used twice in one recording, also when its pid is.
    pub instance: u64,
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// Address of `PyCode_Type`; 0 when not known, then the type of code objects is not checked.
    pub code_type: u64,
    /// Address of `None` (`_Py_NoneStruct`); 0 when not known.
    pub none: u64,
    /// Address of `task_struct` of the group leader once it exits; 0 before.
    pub leader: u64,
    /// First address of the window in which the evaluator publishes an unfilled `cframe` (3.11, 3.12); 0: none.
    pub entering_start: u64,
    /// First address past that window.
    pub entering_end: u64,
    /// Program runs that met this process before it was inspected.
    pub uninspected: u64,
    /// Program runs that met this process after its exit hook.
    pub after_exit: u64,
    /// Index into the `LAYOUTS` map.
    pub layout: u32,
    /// Threads started so far: drops the thread cache of 3.11 and before, where a new thread's state is ambiguous.
    pub thread_starts: u32,
    /// Explicit padding.
    pub _pad: u32,
    /// Where the evaluator keeps its `cframe`, from its stack pointer on, in bytes (3.11, 3.12); 0: not known.
    pub cframe_offset: u32,
    /// First address of the evaluator's code, as far as it is in one piece; only with [`ProcessEntry::cframe_offset`].
    pub evaluator_start: u64,
    /// First address past it.
    pub evaluator_end: u64,
}

/// Bits of [`ProcessEntry::flags`].
pub mod flags {
    /// Samples of this process are wanted.
    pub const SELECTED: u32 = 1;
    /// Children of this process are wanted too.
    pub const FOLLOW: u32 = 1 << 1;
    /// Inspected: CPython, and the addresses are valid.
    pub const PYTHON: u32 = 1 << 2;
    /// Inspected: not CPython, or one that is refused.
    pub const NOT_PYTHON: u32 = 1 << 3;
    /// The process has exited; the entry goes when its leader's `task_struct` does.
    pub const EXITED: u32 = 1 << 4;
}

const _: () = assert!(core::mem::size_of::<ProcessEntry>() == 120);
