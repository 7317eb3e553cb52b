//! Values fixed when the object is loaded: sampling choices and offsets of kernel structures.

use crate::limits::MAX_EVENTS;

/// Read-only configuration of the BPF object. The object itself knows no kernel structure; the loader takes
/// the offsets from the running kernel's BTF.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Config {
    /// Mixed into every fingerprint, so that no target can aim for a collision.
    pub seed: u64,
    /// The bits that an address of user code may have: on arm64 a return address may be signed in those above.
    pub code_mask: u64,
    /// Bits of [`flags`].
    pub flags: u32,
    /// `task_struct.thread` + `thread_struct.fsbase` (x86-64) or `thread.uw.tp_value` (arm64).
    pub task_thread_pointer: u32,
    /// `task_struct.tgid`.
    pub task_tgid: u32,
    /// `task_struct.pid`.
    pub task_pid: u32,
    /// `task_struct.group_leader`.
    pub task_group_leader: u32,
    /// `task_struct.signal`.
    pub task_signal: u32,
    /// `task_struct.thread_pid`.
    pub task_thread_pid: u32,
    /// `task_struct.stack`.
    pub task_stack: u32,
    /// `task_struct.mm`.
    pub task_mm: u32,
    /// `task_struct.se` + `sched_entity.sum_exec_runtime`.
    pub task_sum_exec_runtime: u32,
    /// `task_struct.comm`.
    pub task_comm: u32,
    /// `signal_struct.live`.
    pub signal_live: u32,
    /// `signal_struct.sum_sched_runtime`.
    pub signal_sum_sched_runtime: u32,
    /// `pid.level`.
    pub pid_level: u32,
    /// `pid.numbers`.
    pub pid_numbers: u32,
    /// `sizeof(struct upid)`.
    pub upid_size: u32,
    /// `upid.ns`.
    pub upid_ns: u32,
    /// `pid_namespace.ns` + `ns_common.inum`.
    pub pid_ns_inum: u32,
    /// `mm_struct.exe_file`.
    pub mm_exe_file: u32,
    /// `file.f_inode`.
    pub file_inode: u32,
    /// `inode.i_ino`.
    pub inode_ino: u32,
    /// `inode.i_sb`.
    pub inode_sb: u32,
    /// `super_block.s_dev`.
    pub super_block_dev: u32,
    /// Bytes of a kernel stack (`THREAD_SIZE`), where the user registers lie at the end.
    pub thread_size: u32,
    /// `sizeof(struct pt_regs)`.
    pub pt_regs_size: u32,
    /// Bytes of data in the sample ring above which the reader is woken at once.
    pub wake_bytes: u32,
    /// Inode number of the profiler's pid namespace; 0: the initial one, which numbers every process.
    pub own_pid_ns: u32,
    /// The processor, one of [`machine`]: the object is the same for all.
    pub machine: u32,
    /// How far a thread's pointer may lie above its `thread_id`, in bytes ([`crate::walk::ThreadPointer`]).
    pub thread_pointer_reach: u32,
    /// `task_struct.__state`, or `state` before 5.14.
    pub task_state: u32,
    /// `task_struct.start_time`.
    pub task_start_time: u32,
    /// `task_struct.sched_info` + `sched_info.run_delay`; 0: the kernel does not count it.
    pub task_run_delay: u32,
    /// `task_struct.sched_info` + `sched_info.last_queued`, where the kernel's own clocks tell how long a thread was ready to run; 0: a
    /// hook on wake-ups does.
    pub task_last_queued: u32,
    /// `task_struct.sched_info` + `sched_info.last_arrival`, likewise.
    pub task_last_arrival: u32,
    /// `rq.clock`, likewise.
    pub rq_clock: u32,
    /// `task_struct.se` + `sched_entity.cfs_rq`, where that or [`Config::preempt_count`] needs it.
    pub task_cfs_rq: u32,
    /// `cfs_rq.rq`, likewise.
    pub cfs_rq_rq: u32,
    /// Where `preempt_count()` lies: on arm64 in `task_struct`; on x86-64 from the CPU's `struct rq` on, a signed number. 0: not known.
    pub preempt_count: u32,
    /// Of each event that is a tracepoint: every how manieth hit is a sample.
    pub trace_periods: [u32; MAX_EVENTS],
}

/// Bits of [`Config::flags`].
pub mod flags {
    /// Processes not in the table are wanted when they turn out to be CPython (`--all-python`).
    pub const ALL_PYTHON: u32 = 1;
    /// Only samples whose thread holds the GIL are wanted (`--gil`).
    pub const GIL_ONLY: u32 = 1 << 1;
    /// Each frame's opcode is wanted (`--opcodes`).
    pub const OPCODES: u32 = 1 << 2;
    /// Not all processes are wanted (`--cgroup`, `--comm`, ...): whether one is, user space decides anew at each `exec`.
    pub const FILTERED: u32 = 1 << 3;
    /// Native stacks are wanted (`--native`).
    pub const NATIVE: u32 = 1 << 4;
    /// Kernel stacks are wanted (`--kernel`).
    pub const KERNEL: u32 = 1 << 5;
    /// Samples are of chosen events, which their records name, and not of the clock (`--event`).
    pub const EVENTS: u32 = 1 << 6;
    /// Of waits the stack of the thread that ends one is wanted too (`--wakers`).
    pub const WAKERS: u32 = 1 << 7;
    /// What each thread of a recorded process came to is told when it exits.
    pub const THREAD_TIMES: u32 = 1 << 8;
    /// Who awaits the running task is wanted too (`--async`).
    pub const AWAITING: u32 = 1 << 9;
    /// The kernel's `sched_switch` tells the state in which a thread leaves, as its fourth argument (5.18).
    pub const SWITCH_TELLS_STATE: u32 = 1 << 10;
    /// The programs are made for processes whose layout has the number 0, which is beside this ([`Layout`](crate::layout::Layout)). They
    /// go on to those that are made for all, once there are such.
    pub const ONE_LAYOUT: u32 = 1 << 11;
    /// They are made for processes without greenlets.
    pub const NO_GREENLETS: u32 = 1 << 12;
    /// They are made for processes without running tasks of asyncio.
    pub const NO_TASKS: u32 = 1 << 13;
    /// Both.
    pub const NEITHER: u32 = NO_GREENLETS | NO_TASKS;
    /// They are made for all processes, and those of [`ONE_LAYOUT`] lead to them.
    pub const AFTER_ONE_LAYOUT: u32 = 1 << 14;
}

/// Processors: values of [`Config::machine`].
pub mod machine {
    /// x86-64.
    pub const X86_64: u32 = 0;
    /// arm64.
    pub const ARM64: u32 = 1;
}

const _: () = assert!(core::mem::size_of::<Config>() == 16 + 42 * 4);
