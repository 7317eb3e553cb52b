//! What is known of one process, in two halves: [`Life`], which the kernel side writes, and [`ProcessEntry`], which is
//! user space's. Neither reads the other's half to write it back, so no change of either can undo one of the other.

use crate::walk::mix;

/// What the lifecycle hooks and the timer's program keep of one process (a thread group). Value of the `PROCESSES` map; key: its
/// tgid in the profiler's pid namespace.
///
/// Made at `fork`, made anew at `exec`, marked at exit and removed with the leader's `task_struct`. User space makes one only for a
/// process that has none, and changes none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Life {
    /// [`flags::EXITED`]; [`flags::SELECTED`] and [`flags::FOLLOW`] as they were inherited, which hold until user space has
    /// decided; [`flags::FORKED`].
    pub flags: u32,
    /// 1 when the process's own pid namespace numbers its threads as the profiler's does; 0: not known.
    pub same_numbers: u32,
    /// Key of its [`ProcessEntry`]: [`Life::key`].
    pub entry: u64,
    /// Identity of the memory image: new at `exec`, inherited by `fork`. Code objects are known under it.
    pub image: u64,
    /// Identity of this process: never used twice in one recording, also when its pid is.
    pub instance: u64,
    /// Address of `task_struct` of the group leader once the last thread exits; 0 before.
    pub leader: u64,
    /// Program runs that met this program before it was inspected.
    pub uninspected: u64,
    /// Program runs that met this process after its exit hook.
    pub after_exit: u64,
    /// CPU time of the threads that have exited since this was made, nanoseconds.
    pub exited_ns: u64,
    /// CPU time of those that were gone before, nanoseconds.
    pub released_ns: u64,
    /// How long the threads that have exited since this was made lived, nanoseconds.
    pub lives_ns: u64,
    /// How long of that they were ready to run and had no CPU, nanoseconds.
    pub queued_ns: u64,
    /// How long of it they waited, for a CPU or anything else, where waits are sampled: as their switches tell.
    pub waited_ns: u64,
    /// Threads started so far: drops the thread cache of 3.11 and before, where a new thread's state is ambiguous.
    pub thread_starts: u32,
    /// Explicit padding.
    pub _pad: u32,
}

impl Life {
    /// A process that runs this image.
    #[inline(always)]
    #[must_use]
    pub const fn new(flags: u32, image: u64, instance: u64) -> Self {
        Self {
            flags,
            same_numbers: 0,
            entry: Self::key(image, instance),
            image,
            instance,
            leader: 0,
            uninspected: 0,
            after_exit: 0,
            exited_ns: 0,
            released_ns: 0,
            lives_ns: 0,
            queued_ns: 0,
            waited_ns: 0,
            thread_starts: 0,
            _pad: 0,
        }
    }

    /// The key of the entry of one program in one process: no other program and no other process has it, ever. What is
    /// written under it late, when the program is over, is found by nobody.
    #[inline(always)]
    #[must_use]
    pub const fn key(image: u64, instance: u64) -> u64 {
        // Both may be the same number, and must not cancel each other out.
        mix(mix(0, image), instance)
    }
}

/// What user space found out about one program in one process. Value of the `ENTRIES` map; key: [`Life::entry`].
///
/// Written by user space. The hooks make one before anybody else can know its key (a copy of the parent's at `fork`, a known
/// executable's at `exec`), and remove it when the program is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessEntry {
    /// Bits of [`flags`], without [`flags::EXITED`]. First: most runs ask for nothing else.
    pub flags: u32,
    /// Index into the `LAYOUTS` map.
    pub layout: u32,
    /// [`Life::image`].
    pub image: u64,
    /// [`Life::instance`].
    pub instance: u64,
    /// Address of `_PyRuntime`.
    pub runtime: u64,
    /// Address of `PyCode_Type`; 0 when not known, then the type of code objects is not checked.
    pub code_type: u64,
    /// Address of `None` (`_Py_NoneStruct`); 0 when not known.
    pub none: u64,
    /// First address of the window in which the evaluator publishes an unfilled `cframe` (3.11, 3.12); 0: none.
    pub entering_start: u64,
    /// First address past that window.
    pub entering_end: u64,
    /// First address of the evaluator's code, as far as it is in one piece; only with [`ProcessEntry::cframe_offset`].
    pub evaluator_start: u64,
    /// First address past it.
    pub evaluator_end: u64,
    /// Where the evaluator keeps its `cframe`, from its stack pointer on, in bytes (3.11, 3.12); 0: not known.
    pub cframe_offset: u32,
    /// Index into the `ASYNCIO` map; 0: where asyncio keeps its running task is not known.
    pub asyncio: u16,
    /// Index into the `SPANS` map; 0: the process publishes no spans, as far as is known.
    pub spans: u16,
    /// Address of the dictionary of the tasks that event loops run, `asyncio.tasks._current_tasks` (up to 3.13); 0: not known.
    pub current_tasks: u64,
    /// When it became known that it is CPython, `bpf_ktime_get_ns()`: a thread that was there then, and that nobody has seen leave its CPU
    /// since, has waited all the time. A child has its parent's.
    pub known_ns: u64,
    /// Index into the `GREENLETS` map; 0: it has not loaded greenlet, as far as is known.
    pub greenlets: u32,
    /// Explicit padding.
    pub _pad: u32,
}

/// Bits of [`ProcessEntry::flags`] and [`Life::flags`].
pub mod flags {
    /// Samples of this process are wanted.
    pub const SELECTED: u32 = 1;
    /// Children of this process are wanted too.
    pub const FOLLOW: u32 = 1 << 1;
    /// Inspected: CPython, and the addresses are valid.
    pub const PYTHON: u32 = 1 << 2;
    /// Inspected: not CPython, or one that is refused.
    pub const NOT_PYTHON: u32 = 1 << 3;
    /// The process has exited; what is known of it goes when its leader's `task_struct` does.
    pub const EXITED: u32 = 1 << 4;
    /// Its interpreter may hold `asyncio`'s C module, which then comes without a file. For user space alone.
    pub const ASYNCIO_BUILT_IN: u32 = 1 << 5;
    /// Of a [`Life`](super::Life) alone: its memory is shared with another process since a `fork`. What is written to for the
    /// first time cannot be read for the moment in which the kernel makes a page of its own of it.
    pub const FORKED: u32 = 1 << 6;
    /// Of a [`Life`](super::Life) alone: it executes what is expected to be no CPython. Its start and its end wake nobody.
    pub const DULL: u32 = 1 << 7;
}

const _: () = assert!(core::mem::size_of::<Life>() == 104);
const _: () = assert!(core::mem::size_of::<ProcessEntry>() == 112);
