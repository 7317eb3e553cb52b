//! Records on the ring buffers, and the counters.
//!
//! Every record starts with a [`RecordHeader`] and is sent at its real length, a multiple of 8 bytes. Host byte
//! order. One [`SampleRecord`] serves Python, native and kernel frames: it is followed by
//! `python_frames` x [`RawFrame`], then `native_frames` x `u64`, then `kernel_frames` x `u64`, all leaf first, then by a
//! [`Whose`], its greenlets and its tasks where [`SampleRecord::whose`] is 1. A native frame is the address to look its name up with:
//! [`crate::unwind::NativeWalk::step`] has the rule.
//! Its worst case, 1,024 * 24 + 512 * 8 + 127 * 8 + 136 + 120 + 16 * 88, fits the 32 KiB a per-CPU value may have.

use crate::limits::{MAX_KERNEL_FRAMES, MAX_NATIVE_FRAMES, MAX_PY_FRAMES, STACK_PART};
use crate::unwind::NativeWalk;
use crate::whose::{MAX_AWAITING, MAX_GREENLETS, Task, Whose};

/// What a record is. The number is [`RecordHeader::kind`].
pub mod kind {
    /// A [`super::SampleRecord`].
    pub const SAMPLE: u16 = 1;
    /// A [`super::CodeRecord`].
    pub const CODE: u16 = 2;
    /// A [`super::ProcessRecord`] for a successful `exec`.
    pub const EXEC: u16 = 3;
    /// A [`super::ProcessRecord`] for a new process.
    pub const FORK: u16 = 4;
    /// A [`super::ProcessRecord`] for a process whose last thread exits.
    pub const EXIT: u16 = 5;
    /// A [`super::ProcessRecord`] for a process that was sampled but is in no table.
    pub const UNKNOWN: u16 = 6;
    /// A [`super::ProcessRecord`] for a process that met the timer's program after its exit hook, sent when nothing can
    /// run as that process any more.
    pub const FREE: u16 = 7;
    /// A [`super::SampleRecord`] of a thread whose wait is over, with a [`super::WaitFacts`] at its end.
    pub const WAIT: u16 = 8;
    /// The same of a thread whose wait begins, where stacks are taken then: what became of it comes as [`WAIT_END`]. Of the facts
    /// the end, the waker and the weights are not there.
    pub const WAIT_BEGIN: u16 = 9;
    /// A [`super::SampleRecord`] of such a wait that is over, without frames, and its [`super::WaitFacts`].
    pub const WAIT_END: u16 = 10;
    /// A [`super::SampleRecord`] of a thread that wakes another, with a [`super::WaitFacts`] at its end:
    /// [`super::WaitFacts::left_ns`] and [`super::WaitFacts::waker`] tell the thread that it wakes.
    pub const WAKER: u16 = 11;
    /// A [`super::ProcessRecord`] for a thread that exits, where the times of each are wanted: the CPU time, life and queueing are that
    /// thread's, and [`super::ProcessRecord::parent`] is its id.
    pub const THREAD: u16 = 12;
    /// A [`super::StackRecord`].
    pub const STACK: u16 = 13;
}

/// First bytes of every record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RecordHeader {
    /// One of [`kind`].
    pub kind: u16,
    /// The bank of counters that the run counted in which sent it ([`crate::segment`]).
    pub bank: u8,
    /// Of samples of chosen events: which of them it was; else 0.
    pub event: u8,
    /// Bytes of the whole record, header included.
    pub len: u32,
}

/// One sample: one run of the timer's program that met a selected Python process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SampleRecord {
    /// Kind [`kind::SAMPLE`].
    pub header: RecordHeader,
    /// `bpf_ktime_get_ns()`: `CLOCK_MONOTONIC`.
    pub ktime_ns: u64,
    /// [`crate::process::ProcessEntry::image`] at that moment.
    pub image: u64,
    /// [`crate::process::ProcessEntry::instance`] at that moment.
    pub instance: u64,
    /// `PyThreadState` the stack was taken from; 0 when none was found.
    pub tstate: u64,
    /// `PyInterpreterState.id`; -1 when no thread state was found.
    pub interp_id: i64,
    /// `_code_object_generation` (3.14+); 0 before.
    pub code_generation: u64,
    /// Instruction pointer in user mode; 0 when not known.
    pub user_ip: u64,
    /// Stack pointer in user mode; 0 when not known.
    pub user_sp: u64,
    /// Frame pointer register in user mode; 0 when not known.
    pub user_fp: u64,
    /// Process id as the profiler's pid namespace numbers it.
    pub tgid: u32,
    /// Thread id, likewise.
    pub tid: u32,
    /// Thread id in the thread's innermost pid namespace.
    pub ns_tid: u32,
    /// CPU the sample was taken on.
    pub cpu: u32,
    /// Bits of [`status`].
    pub status: u32,
    /// Number of a [`crate::stop::StopReason`] for the Python stack.
    pub stop: u8,
    /// The same for the native stack.
    pub native_stop: u8,
    /// Shim frames passed below the outermost Python frame.
    pub root_shims: u8,
    /// 1: a [`Whose`] follows the frames; else 0.
    pub whose: u8,
    /// Python frames that follow.
    pub python_frames: u16,
    /// Native user frames that follow.
    pub native_frames: u16,
    /// Kernel frames that follow.
    pub kernel_frames: u16,
    /// Tail calls this sample took.
    pub tail_calls: u16,
    /// Kernel's `comm` of the thread, NUL-padded.
    pub comm: [u8; 16],
    /// Number of the layout of this image's interpreter.
    pub layout: u32,
    /// How many native frames begin below where the evaluator keeps what it has entered the innermost Python frames with (its
    /// `cframe` or entry frame): the last of these is that evaluator's. 0: not known.
    pub entered: u32,
}

/// What is known of a wait: the last part of a [`kind::WAIT`] record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WaitFacts {
    /// `bpf_ktime_get_ns()` when the thread left its CPU.
    pub left_ns: u64,
    /// From when on it counts here: what was before has been told of.
    pub began_ns: u64,
    /// From when on it was ready to run; [`WaitFacts::ended_ns`] where it never was, or where that is not known.
    pub queued_ns: u64,
    /// `bpf_ktime_get_ns()` when it came back to a CPU.
    pub ended_ns: u64,
    /// Number of the system call in which it waited; negative: in none.
    pub syscall: i64,
    /// The first arguments of that.
    pub args: [u64; 3],
    /// The word at the first argument, if that is an address: the first `struct pollfd`.
    pub polled: u64,
    /// Address of the interpreter's GIL (`struct _gil_runtime_state`); 0: not known.
    pub gil: u64,
    /// Ticks before it was ready to run: how many samples this one stands for.
    pub weight: u32,
    /// Ticks from then on: how many samples of a wait for a CPU.
    pub queued: u32,
    /// The kernel's `__state` of the thread while it waited; 0: it was ready to run.
    pub state: u32,
    /// [`crate::wait::SeenThread::waker`].
    pub waker: u32,
    /// `PyThreadState` that held the GIL, where it waited for that; 0: not known.
    pub holder: u64,
    /// How many of the Python frames that the record has are the holder's: the last ones, leaf first.
    pub holder_frames: u32,
    /// How many words behind the futex, where that lies on the thread's own stack, refer to the GIL ([`crate::wait::GIL_REFERENCES`]).
    pub gil_is_near: u32,
}

/// A part of a thread's stack, for a native walk that ended for want of unwind tables: user space, which makes those, goes on with it
/// there. Sent before the record of the sample, the innermost part first, without pages that cannot be read. Followed by `bytes` bytes,
/// as they lay from `start` on.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct StackRecord {
    /// Kind [`kind::STACK`].
    pub header: RecordHeader,
    /// [`SampleRecord::ktime_ns`] of the sample.
    pub ktime_ns: u64,
    /// Address of the first byte.
    pub start: u64,
    /// Where the evaluator keeps what [`SampleRecord::entered`] tells of; 0: not known.
    pub entered_at: u64,
    /// [`SampleRecord::tid`].
    pub tid: u32,
    /// Bytes that follow, a multiple of 8.
    pub bytes: u32,
    /// Where the walk stands.
    pub walk: NativeWalk,
}

/// Per-CPU counters of waits, in ticks: each tick that is due is in `too_many`, `not_kicked`, `not_met`, `unreported`, or in `ran` of the
/// [`Counters`] of waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct WaitCounters {
    /// Ticks in waits of recorded threads.
    pub due: u64,
    /// Those of them in waits whose threads had longer periods, for there were too many.
    pub widened: u64,
    /// Of waits beyond what one CPU looks at in a tenth of a second ([`crate::limits::MAX_WAITS_A_TENTH`]).
    pub too_many: u64,
    /// Of waits whose thread could not be kicked.
    pub not_kicked: u64,
    /// Of waits whose kick did not meet the thread.
    pub not_met: u64,
    /// Of waits whose end no hook saw.
    pub unreported: u64,
    /// Threads, not ticks: switches of a thread for which there was no room.
    pub threads_without_room: u64,
    /// Records, not ticks: those that were sent.
    pub records: u64,
    /// Kicks, not ticks, that only tried out whether they meet their thread, and did.
    pub tries_met: u64,
}

/// Bits of [`SampleRecord::status`]; the first six are TACH's own.
pub mod status {
    /// The thread held its interpreter's GIL.
    pub const HAS_GIL: u32 = 1;
    /// The thread was running on a CPU.
    pub const ON_CPU: u32 = 2;
    /// The state could not be told.
    pub const UNKNOWN: u32 = 4;
    /// Another thread asked for the GIL (3.15+).
    pub const GIL_REQUESTED: u32 = 8;
    /// An exception was being raised or handled.
    pub const HAS_EXCEPTION: u32 = 16;
    /// The thread is its interpreter's main thread.
    pub const MAIN_THREAD: u32 = 32;
    /// The garbage collector was running.
    pub const GC: u32 = 1 << 8;
    /// The event interrupted the kernel, not user code.
    pub const IN_KERNEL: u32 = 1 << 9;
    /// Part of the native stack was walked by frame pointers, for want of a table: a frame may be missing there.
    pub const BY_FRAME_POINTER: u32 = 1 << 10;
    /// The thread was entering the evaluator, and the Python frames are those of its callers, which the native stack
    /// led to.
    pub const CALLERS: u32 = 1 << 11;
    /// The innermost frame has run nothing, and is proven to be linked to its caller (3.11, 3.12).
    pub const LINKED: u32 = 1 << 12;
    /// The thread was going from one greenlet to another. From 3.12 on, greenlet then takes out of the chain of frames those by which C
    /// entered the evaluator (`Greenlet::expose_frames`), so that it ends with a frame that is not known to have been entered. Set for
    /// such chains only.
    pub const SWITCHING: u32 = 1 << 13;
    /// What is told by the thread state, and of nobody when that turns out to be another thread's.
    pub const BY_THREAD_STATE: u32 = HAS_GIL | UNKNOWN | GIL_REQUESTED | HAS_EXCEPTION | MAIN_THREAD | GC;
}

/// One Python frame of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RawFrame {
    /// Address of the `PyCodeObject`.
    pub code: u64,
    /// Fingerprint of the code object; with image and address its identity.
    pub fingerprint: u64,
    /// Byte offset of the instruction from the start of the code, as `co_positions` counts; negative: not started, or
    /// [`frame::UNKNOWN_LASTI`].
    pub lasti: i32,
    /// Bits of [`frame`].
    pub flags: u8,
    /// Opcode at the instruction, when asked for; 255: not recorded.
    pub opcode: u8,
    /// Shim frames between this frame and its callee.
    pub shims: u16,
}

/// Bits of [`RawFrame::flags`].
pub mod frame {
    /// The evaluator was entered anew for this frame (a segment of the native stack starts below it).
    pub const ENTRY: u8 = 1;
    /// The frame belongs to a generator or coroutine.
    pub const GENERATOR: u8 = 2;
    /// The garbage collector runs above this frame.
    pub const GC: u8 = 4;

    /// [`super::RawFrame::lasti`] of a frame in a trace of the JIT, which does not store each instruction that it comes to.
    pub const UNKNOWN_LASTI: i32 = -2;
}

/// A code object seen for the first time. Followed by `qualname_bytes`, `filename_bytes` and `linetable_bytes`
/// bytes, then padding to a multiple of 8.
///
/// A line table that is longer than one record is continued in records with `linetable_start > 0` and no names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct CodeRecord {
    /// Kind [`kind::CODE`].
    pub header: RecordHeader,
    /// Image it was seen in.
    pub image: u64,
    /// Address of the `PyCodeObject`.
    pub code: u64,
    /// Its fingerprint.
    pub fingerprint: u64,
    /// Address of the `co_qualname` (`co_name` before 3.11) string.
    pub qualname: u64,
    /// Address of the `co_filename` string.
    pub filename: u64,
    /// Address of the line table's bytes object.
    pub linetable: u64,
    /// Process it was read from (profiler's namespace), for reading again what did not fit.
    pub tgid: u32,
    /// `co_firstlineno`.
    pub firstlineno: i32,
    /// Index into the `LAYOUTS` map.
    pub layout: u32,
    /// Bits of [`code`].
    pub flags: u32,
    /// Length of the line table in bytes, up to [`crate::limits::MAX_LINETABLE_BYTES`].
    pub linetable_len: u32,
    /// Where in the line table this record's part starts.
    pub linetable_start: u32,
    /// Bytes of the qualified name that follow, in the string's own kind.
    pub qualname_bytes: u32,
    /// Bytes of the file name that follow, in the string's own kind.
    pub filename_bytes: u32,
    /// Bytes of the line table that follow.
    pub linetable_bytes: u32,
    /// Bytes a code point of the qualified name has: 1, 2 or 4.
    pub qualname_kind: u8,
    /// Bytes a code point of the file name has: 1, 2 or 4.
    pub filename_kind: u8,
    /// Explicit padding.
    pub _pad: [u8; 2],
}

/// Bits of [`CodeRecord::flags`].
pub mod code {
    /// The qualified name could not be read in the kernel.
    pub const QUALNAME_UNREADABLE: u32 = 1;
    /// The file name could not be read in the kernel.
    pub const FILENAME_UNREADABLE: u32 = 1 << 1;
    /// This part of the line table could not be read in the kernel.
    pub const LINETABLE_UNREADABLE: u32 = 1 << 2;
    /// The qualified name is longer than what follows.
    pub const QUALNAME_CUT: u32 = 1 << 3;
    /// The file name is longer than what follows.
    pub const FILENAME_CUT: u32 = 1 << 4;
    /// The line table is longer than [`super::CodeRecord::linetable_len`].
    pub const LINETABLE_CUT: u32 = 1 << 5;
}

/// A process started, replaced its image, ended, or was met unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProcessRecord {
    /// Kind [`kind::EXEC`], [`kind::FORK`], [`kind::EXIT`], [`kind::UNKNOWN`], [`kind::FREE`] or [`kind::THREAD`].
    pub header: RecordHeader,
    /// `bpf_ktime_get_ns()`.
    pub ktime_ns: u64,
    /// Image after the event (for exit: the last one).
    pub image: u64,
    /// Instance (for fork: the child's).
    pub instance: u64,
    /// CPU time of all its threads so far, nanoseconds (exit; of the one thread in [`kind::THREAD`]; else 0).
    pub cpu_ns: u64,
    /// [`crate::process::Life::lives_ns`] (exit; of the one thread in [`kind::THREAD`]; else 0).
    pub lives_ns: u64,
    /// [`crate::process::Life::queued_ns`], likewise.
    pub queued_ns: u64,
    /// [`crate::process::Life::waited_ns`], likewise.
    pub waited_ns: u64,
    /// [`crate::process::Life::uninspected`] of the program that ends (exec and exit),
    /// [`crate::process::Life::after_exit`] (free), else 0.
    pub uninspected: u64,
    /// `super_block.s_dev` of the executable's file system (exec; else 0).
    pub exe_dev: u64,
    /// `inode.i_ino` of the executable, likewise.
    pub exe_inode: u64,
    /// Process id in the profiler's namespace (for fork: the child's).
    pub tgid: u32,
    /// Parent's process id (fork), the thread's id ([`kind::THREAD`]); else 0.
    pub parent: u32,
    /// [`crate::process::ProcessEntry::flags`] of the entry before the event.
    pub flags: u32,
    /// Index into the `LAYOUTS` map (exit of a CPython; else 0).
    pub layout: u32,
    /// Kernel's `comm`, NUL-padded.
    pub comm: [u8; 16],
}

/// Per-CPU counters of the timer's program. Each run adds 1 to `ran` and 1 to exactly one of `idle`, `filtered`, `not_python`,
/// `sent` and the entries of `loss`; the last four count records and not runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counters {
    /// Runs of the program.
    pub ran: u64,
    /// Runs that met the idle task.
    pub idle: u64,
    /// Runs that met a process that is not selected.
    pub filtered: u64,
    /// Runs that met a process known not to be CPython.
    pub not_python: u64,
    /// Records handed to the ring buffer.
    pub sent: u64,
    /// Runs lost, by [`crate::stop::LossCause`].
    pub loss: [u64; crate::stop::LossCause::COUNT],
    /// Code records that found the ring full.
    pub code_ring_full: u64,
    /// Code records sent.
    pub codes_sent: u64,
    /// Lifecycle records that found their ring full.
    pub events_lost: u64,
    /// Code records put off because their process or user had had its share of the second ([`crate::budget`]).
    pub codes_put_off: u64,
}

/// Bytes of the largest sample record.
pub const MAX_SAMPLE_BYTES: usize = core::mem::size_of::<SampleRecord>()
    + MAX_PY_FRAMES * core::mem::size_of::<RawFrame>()
    + (MAX_NATIVE_FRAMES + MAX_KERNEL_FRAMES) * 8
    + core::mem::size_of::<Whose>()
    + (MAX_GREENLETS + MAX_AWAITING) * core::mem::size_of::<Task>();

const _: () = assert!(core::mem::size_of::<RecordHeader>() == 8);
const _: () = assert!(core::mem::size_of::<SampleRecord>() == 136);
const _: () = assert!(core::mem::size_of::<RawFrame>() == 24);
const _: () = assert!(core::mem::size_of::<CodeRecord>() == 96);
const _: () = assert!(core::mem::size_of::<ProcessRecord>() == 120);
const _: () = assert!(core::mem::size_of::<WaitFacts>() == 112);
const _: () = assert!(MAX_SAMPLE_BYTES + core::mem::size_of::<WaitFacts>() <= 32 * 1024);
const _: () = assert!(core::mem::size_of::<WaitCounters>() == 72);
const _: () = assert!(core::mem::size_of::<StackRecord>() == 280);
const _: () = assert!(core::mem::size_of::<StackRecord>() + STACK_PART <= 32 * 1024);
const _: () = assert!(core::mem::size_of::<Counters>() == 8 * (9 + crate::stop::LossCause::COUNT));
const _: () = assert!(MAX_SAMPLE_BYTES <= 32 * 1024);
