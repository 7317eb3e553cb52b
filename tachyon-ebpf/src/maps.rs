//! Every map: key, value, writer, reader, size.

use aya_ebpf::{
    bindings::BPF_F_MMAPABLE,
    macros::map,
    maps::{Array, HashMap, LruHashMap, PerCpuArray, ProgramArray, RingBuf},
};
use tachyon_common::{
    budget::{PROCESS_SLOTS, Share, USER_SLOTS},
    codes::{Codes, KnownCode, SentSlot},
    config::Config,
    event::{Counters, RawFrame, SampleRecord, WaitCounters, WaitFacts},
    layout::Layout,
    limits::{
        FIRST_VERDICT, KNOWN_SLOTS, MAX_ASYNCIO, MAX_DULL, MAX_EVENTS, MAX_GREENLET_PLACES, MAX_LAYOUTS, MAX_PROCESSES,
        MAX_SPANS, RULE_SLOTS, SEARCH_SLOTS, SENT_SLOTS, SENT_WAYS, THREAD_CACHE_SLOTS, VARIABLE_SLOTS, VERDICT_SLOTS,
    },
    process::{Life, ProcessEntry},
    segment::BANKS,
    unwind::{NativeWalk, Range, Space, StackBuffer},
    wait::{SeenThread, ThreadSlot},
    walk::{
        Awaiting, CodeBuffer, CurrentTasks, FrameBuffer, FrameWalk, GreenletWalk, InterpBuffer, OwnStack, SlotBuffer,
        TaskReader, ThreadBuffer, ThreadPointer, ThreadSearch,
    },
    whose::{Asyncio, Greenlets, ThreadLocal, Whose},
};

/// Read-only once loaded: sampling choices and kernel offsets, written by the loader.
#[unsafe(no_mangle)]
pub static CONFIG: Config = Config {
    seed: 0,
    code_mask: 0,
    flags: 0,
    task_thread_pointer: 0,
    task_tgid: 0,
    task_pid: 0,
    task_group_leader: 0,
    task_signal: 0,
    task_thread_pid: 0,
    task_stack: 0,
    task_mm: 0,
    task_sum_exec_runtime: 0,
    task_comm: 0,
    signal_live: 0,
    signal_sum_sched_runtime: 0,
    pid_level: 0,
    pid_numbers: 0,
    upid_size: 0,
    upid_ns: 0,
    pid_ns_inum: 0,
    mm_exe_file: 0,
    file_inode: 0,
    inode_ino: 0,
    inode_sb: 0,
    super_block_dev: 0,
    thread_size: 0,
    pt_regs_size: 0,
    wake_bytes: 0,
    own_pid_ns: 0,
    machine: 0,
    thread_pointer_reach: 0,
    task_state: 0,
    task_start_time: 0,
    task_run_delay: 0,
    task_last_queued: 0,
    task_last_arrival: 0,
    rq_clock: 0,
    task_cfs_rq: 0,
    cfs_rq_rq: 0,
    preempt_count: 0,
    trace_periods: [0; MAX_EVENTS],
};

/// One field of [`CONFIG`], read so that the compiler cannot take it for the zero of its initialiser.
macro_rules! config {
    ($field:ident) => {
        // SAFETY: a reference to a live static of this type, always valid to read.
        unsafe { core::ptr::read_volatile(&raw const $crate::maps::CONFIG.$field) }
    };
}
pub(crate) use config;

/// Bank -> counters of the timer's program. Writer: that program; reader: user space, at each cut and at the end.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(BANKS, 0);

/// [`LOST_RECORDS`], [`LOST_PROCESSES`] -> how many. Writer: the raw tracepoints (the timer can interrupt them, so their
/// counters are their own); reader: user space.
#[map]
pub static EVENTS_LOST: PerCpuArray<u64> = PerCpuArray::with_max_entries(2, 0);

/// tgid, as the profiler's pid namespace numbers it -> life of a process. Writers: the lifecycle hooks, and the timer's program of
/// some fields; user space adds processes that have none, and changes none. Reader: all.
/// Preallocated: 5.10 lets perf programs use no other hash map.
#[map]
pub static PROCESSES: HashMap<u32, Life> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// `Life::entry` -> what was found out of a program in a process. Writers: user space; the lifecycle hooks before they have told
/// anybody the key, and when they take it away. Readers: all. Preallocated, as `PROCESSES` is.
#[map]
pub static ENTRIES: HashMap<u64, ProcessEntry> = HashMap::with_max_entries(MAX_PROCESSES, 0);

/// What every run reads first: counts of changes of `PROCESSES` and `ENTRIES`, and in which bank of [`COUNTERS`] it counts
/// ([`SELECTED`](tachyon_common::segment::SELECTED), [`CUT_AT`](tachyon_common::segment::CUT_AT)); then what the hooks of waits
/// read ([`tachyon_common::wait`]). Then slot -> what was decided of a process that is not recorded, with the sum of the counts at
/// which that was. Writers: user space and the lifecycle hooks of their counts, user space of the bank and of waits, the hook of
/// switches of how far periods are widened, the timer's program of the slots.
#[map]
pub static VERDICTS: Array<u64> = Array::with_max_entries(FIRST_VERDICT + VERDICT_SLOTS, 0);

/// `task_struct` of a group leader that has exited -> its tgid, which the kernel takes from it before the last moments
/// that are of interest here. Writer: `on_exit`, and `on_free`, which removes it; reader: all. One entry and not used
/// where the profiler is in the initial pid namespace.
#[map]
pub static LEADERS: HashMap<u64, u32> = HashMap::with_max_entries(1, 0);

/// Number -> layout of one interpreter build. Writer: user space, before one of `ENTRIES` names it.
#[map]
pub static LAYOUTS: Array<Layout> = Array::with_max_entries(MAX_LAYOUTS, 0);

/// `ProcessEntry::asyncio` -> where asyncio keeps the running task. Writer: user space, before one of `ENTRIES` names it.
#[map]
pub static ASYNCIO: Array<Asyncio> = Array::with_max_entries(MAX_ASYNCIO, 0);

/// `ProcessEntry::spans` -> where a thread keeps the span that it is in. Writer: user space, likewise.
#[map]
pub static SPANS: Array<ThreadLocal> = Array::with_max_entries(MAX_SPANS, 0);

/// `ProcessEntry::greenlets` -> where a thread keeps its greenlets. Writer: user space, likewise.
#[map]
pub static GREENLETS: Array<Greenlets> = Array::with_max_entries(MAX_GREENLET_PLACES, 0);

/// (device, inode) of an executable that is a CPython at a fixed address -> the entry its processes get at `exec`.
/// Writer: user space; reader: `on_exec`.
#[map]
pub static EXECUTABLES: HashMap<FileKey, ProcessEntry> = HashMap::with_max_entries(256, 0);

/// (device, inode) of an executable that is expected to be no CPython -> until when, in nanoseconds of `bpf_ktime_get_ns`. What is
/// torn or out of date lets a start be heard of with the next one that is not.
/// Writer: user space; reader: `on_exec`.
#[map]
pub static DULL: LruHashMap<FileKey, u64> = LruHashMap::with_max_entries(MAX_DULL, 0);

/// Slot -> thread state found for a thread. Direct-mapped and verified at each hit, so writers need no lock and a
/// torn entry is a miss. Writer and reader: the timer's program.
#[map]
pub static THREADS: Array<CachedThread> = Array::with_max_entries(THREAD_CACHE_SLOTS, 0);

/// Slot -> where a thread has the variable that leads to its span, or to its greenlets, which takes three reads to find out and stays
/// there while the thread lives. Direct-mapped, as `THREADS` is. Writers: the timer's program; `on_exit`, which empties it. Reader: the
/// timer's program.
#[map]
pub static VARIABLES: Array<Variable> = Array::with_max_entries(VARIABLE_SLOTS, 0);

/// Slot -> search for a thread's state that was broken off: the thread's next sample goes on with it. Direct-mapped, as
/// `THREADS` is. Writer and reader: the timer's program.
#[map]
pub static SEARCHES: Array<BrokenSearch> = Array::with_max_entries(SEARCH_SLOTS, 0);

/// Bucket -> code objects already sent. Lock-free as `THREADS` is; an entry that is overwritten costs sending a code
/// object again. Writer and reader: the timer's program.
#[map]
pub static SENT: Array<SentBucket> = Array::with_max_entries(SENT_SLOTS / SENT_WAYS, 0);

/// Slot -> what identifies a code object that has been sent. Direct-mapped, verified at each hit, so lock-free as
/// `THREADS` is. Writer and reader: the timer's program.
#[map]
pub static KNOWN: Array<KnownCode> = Array::with_max_entries(KNOWN_SLOTS, 0);

/// Slot -> bytes of code records that a process, or a user, has sent in this second. Writer and reader: the timer's program.
#[map]
pub static SHARES: Array<Share> = Array::with_max_entries(PROCESS_SLOTS + USER_SLOTS, 0);

/// Slot -> unknown process told of lately. Writer and reader: the timer's program.
#[map]
pub static TOLD: PerCpuArray<Told> = PerCpuArray::with_max_entries(TOLD_SLOTS, 0);

/// Samples and code objects, one ring for both so that a code object is read before the first sample after it. The
/// loader sets the size from rate and CPUs.
#[map]
pub static SAMPLES: RingBuf = RingBuf::with_byte_size(1 << 22, 0);

/// Process starts, execs, ends.
#[map]
pub static EVENTS: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// Index 0 -> the sample being made. Scratch of the timer's programs, and of those that make records of waits.
#[map]
pub static SAMPLE: PerCpuArray<SampleScratch> = PerCpuArray::with_max_entries(1, 0);

/// Index 0 -> state between tail calls. Scratch of the timer's programs, and of those that make records of waits.
#[map]
pub static STATE: PerCpuArray<State> = PerCpuArray::with_max_entries(1, 0);

/// Index 0 -> the code record being made. Scratch of the timer's programs, and of those that make records of waits.
#[map]
pub static CODE: PerCpuArray<CodeScratch> = PerCpuArray::with_max_entries(1, 0);

/// Rows of all unwind tables, in chunks: the loader puts an array of array maps in the place of this one (the library has
/// no way to declare one), and each of those is made when it is first written. Writer: user space, through mappings of
/// the chunks: writing is no system call, so it holds no sample back; reader: the timer's program.
#[map]
pub static ROWS: Array<u64> = Array::with_max_entries(1, 0);

/// Ranges of all address spaces. Writer and reader as for `ROWS`.
#[map]
pub static RANGES: Array<Range> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Slot -> rule that was found for an address. Direct-mapped, verified at each hit, so lock-free as `THREADS` is. Writer and
/// reader: the timer's program.
#[map]
pub static RULES: Array<FoundRule> = Array::with_max_entries(RULE_SLOTS, 0);

/// tgid -> where its ranges are. Writers: user space, and the lifecycle hooks, which copy it at `fork` and remove it at
/// `exec` and at the end; reader: the timer's program.
#[map]
pub static SPACES: HashMap<u32, Space> = HashMap::with_max_entries(1, 0);

/// Program of each stage, for tail calls. Writer: the loader.
#[map]
pub static STAGES: ProgramArray = ProgramArray::with_max_entries(6, 0);

/// As `STAGES`, for tracepoints. Writer: the loader.
#[map]
pub static TRACE_STAGES: ProgramArray = ProgramArray::with_max_entries(6, 0);

/// Event -> hits of its tracepoint. Writers: the tracepoints' first programs; reader: user space, at the end.
#[map]
pub static TRACE_HITS: PerCpuArray<u64> = PerCpuArray::with_max_entries(MAX_EVENTS as u32, 0);

/// Where a wait's stack goes on from the kick: as `STAGES`, for raw tracepoints. Writer: the loader.
#[map]
pub static WAIT_STAGES: ProgramArray = ProgramArray::with_max_entries(7, 0);

/// Slot -> a thread that is recorded, and since when it waits ([`tachyon_common::wait::thread_slot`]). One entry and not used where waits
/// are not wanted. Writers: `on_switch`, which frees it at the thread's last switch, and `on_wake`; readers: those, `on_exit` and, in
/// memory, user space.
#[map]
pub static THREAD_SLOTS: Array<ThreadSlot> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// Slot of `THREAD_SLOTS` that is taken -> its `task_struct`, as long as it is: of several CPUs that find it free one can make the entry.
/// Writer: `on_switch`; nobody reads it.
#[map]
pub static SLOTS_TAKEN: HashMap<u32, u64> = HashMap::with_max_entries(1, 0);

/// `task_struct` -> a thread as in `THREAD_SLOTS`, whose slot was another one's. One entry and not used where waits are not wanted.
/// Writers and readers: as there.
#[map]
pub static THREADS_SEEN: HashMap<u64, SeenThread> = HashMap::with_max_entries(1, 0);

/// Slot -> a task that is known not to be recorded, so that its switches cost next to nothing ([`tachyon_common::wait::unwatched`]).
/// Writers: `on_switch`, and `on_fork`, which makes room for a task that is new; reader: `on_switch` and `on_wake`.
#[map]
pub static UNWATCHED: Array<u64> = Array::with_max_entries(1, 0);

/// [`WAIT_ENDS`], [`WAIT_BEGINS`], [`WAIT_WAKES`] -> the wait whose end, whose beginning or whose waker this CPU is to look at. Writers:
/// `on_switch`, `on_wake`; readers: the programs that make its record.
#[map]
pub static WAITING: PerCpuArray<Waiting> = PerCpuArray::with_max_entries(3, 0);

/// Bank -> what became of waits before a walk. Writers: `on_switch` and `on_kick`, which do not interrupt each other;
/// reader: user space.
#[map]
pub static WAIT_COUNTS: PerCpuArray<WaitCounters> = PerCpuArray::with_max_entries(BANKS, 0);

/// Slot -> up to when user space has told of a thread's wait ([`tachyon_common::wait::told`]): what is left of the wait begins there.
/// One entry and not used where waits are not wanted. Writer: user space, in memory; reader: `on_switch`.
#[map]
pub static WAITS_TOLD: Array<u64> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// CPU -> ring whose wake-up is the kick: the loader puts an array of rings in the place of this one. Each CPU has its own, for one
/// ring's wake-up can be in flight only once.
#[map]
pub static KICKS: Array<u64> = Array::with_max_entries(1, 0);

/// Index in `WAITING` of a wait that is over: the thread is kicked.
pub const WAIT_ENDS: u32 = 0;
/// Index of one that begins, where stacks are taken then.
pub const WAIT_BEGINS: u32 = 1;
/// Index of one that the running thread ends.
pub const WAIT_WAKES: u32 = 2;

/// Index of records that found their ring full in `EVENTS_LOST`.
pub const LOST_RECORDS: u32 = 0;
/// Index of processes that found their tables full in `EVENTS_LOST`.
pub const LOST_PROCESSES: u32 = 1;

/// Index of [`crate::search_threads`] in `STAGES`.
pub const STAGE_SEARCH: u32 = 0;
/// Index of [`crate::walk_frames`] in `STAGES`.
pub const STAGE_WALK: u32 = 1;
/// Index of [`crate::name_codes`] in `STAGES`.
pub const STAGE_NAME: u32 = 2;

/// Index of [`crate::walk_native`] in `STAGES`.
pub const STAGE_NATIVE: u32 = 3;
/// Index of [`crate::on_sample`] in `STAGES`, of `wait_begin` in `WAIT_STAGES`. (Where that is made for one layout, of the one that is made
/// for all, once there is one.)
pub const STAGE_BEGIN: u32 = 4;
/// Index of [`crate::walk_awaiting`] in `STAGES`.
pub const STAGE_AWAITING: u32 = 5;
/// Index of `wait_holder` in `WAIT_STAGES`.
pub const STAGE_HOLDER: u32 = 6;

/// Slots of `TOLD` (a power of two).
pub const TOLD_SLOTS: u32 = 256;

/// Bytes of a per-CPU scratch value: the kernel's limit (`PCPU_MIN_UNIT_SIZE`).
pub const SCRATCH_BYTES: usize = 32 * 1024;

/// Key of `EXECUTABLES`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct FileKey {
    pub dev: u64,
    pub inode: u64,
}

/// Value of `THREADS`.
#[repr(C)]
pub struct CachedThread {
    pub instance: u64,
    pub tstate: u64,
    /// Threads started and the next interpreter id when the state was found unique (up to 3.11).
    pub token: u64,
    pub tid: u32,
    pub _pad: u32,
}

/// Value of `VARIABLES`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Variable {
    /// The program's image, since `exec` begins with other threads; the thread and its pointer; and the place of `SPANS` or of
    /// `GREENLETS`: all mixed.
    pub key: u64,
    /// The address, combined with the key: of two writers' halves nothing comes that could be read.
    pub sealed: u64,
}

/// Value of `SEARCHES`.
#[repr(C)]
pub struct BrokenSearch {
    pub instance: u64,
    pub token: u64,
    pub search: ThreadSearch,
    pub tid: u32,
    pub _pad: u32,
}

/// Value of `WAITING`.
#[repr(C)]
pub struct Waiting {
    /// The thread that was kicked; 0: none is awaited.
    pub task: u64,
    /// The tenth of a second in which stacks are counted, and how many there were.
    pub tenth: u64,
    pub stacks: u64,
    /// How many there would have been with the periods of waits that begin now ([`tachyon_common::wait::foreseen`]).
    pub foreseen: u64,
    /// The bank that the wait counts in.
    pub bank: u32,
    /// Of waits that begin: one in `1 << sparse` has its stack taken. Of one that is over: whether the kick is only a try.
    pub sparse: u32,
    pub facts: WaitFacts,
}

/// Value of `SENT`.
#[repr(C)]
pub struct SentBucket {
    pub slots: [SentSlot; SENT_WAYS as usize],
}

/// Value of `RULES`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct FoundRule {
    /// The address, under a hash of the other word: an entry that two writers have torn is a miss.
    pub address: u64,
    /// [`Space::version`] above, the rule below.
    pub rule: u64,
}

/// Value of `TOLD`.
#[repr(C)]
pub struct Told {
    pub ktime_ns: u64,
    pub tgid: u32,
    pub _pad: u32,
}

/// Value of `SAMPLE`: record, Python frames, then addresses; padded to the limit so that a masked length is in bounds.
#[repr(C)]
pub struct SampleScratch {
    pub record: SampleRecord,
    pub frames: [RawFrame; FRAME_SLOTS],
    pub _pad: [u8; SCRATCH_BYTES - size_of::<SampleRecord>() - FRAME_SLOTS * size_of::<RawFrame>()],
}

/// Slots for Python frames (a power of two, so that a masked index is in bounds).
pub const FRAME_SLOTS: usize = tachyon_common::limits::MAX_PY_FRAMES;

/// Values of [`State::repair`].
pub mod repair {
    /// Nothing to repair, or nothing to be done.
    pub const NONE: u32 = 0;
    /// The native stack is walked to find the caller's evaluator.
    pub const WANTED: u32 = 1;
    /// The callers' frames are walked.
    pub const WALKING: u32 = 2;
}

/// In the place of a reason while a walk goes on: no reason has this number.
pub const GOES_ON: u32 = 256;

/// In [`State::begins`], beside the number of a reason: nothing is known of the thread, nor of whose work it does.
pub const STOPS: u32 = 512;

/// Value of `STATE`.
#[repr(C)]
pub struct State {
    pub process: ProcessEntry,
    /// [`Life::thread_starts`].
    pub thread_starts: u64,
    pub search: ThreadSearch,
    /// The thread state that the search has found.
    pub found: u64,
    pub walk: FrameWalk,
    pub thread_buffer: ThreadBuffer,
    pub interp_buffer: InterpBuffer,
    pub codes: Codes,
    pub frame_buffer: FrameBuffer,
    pub code_buffer: CodeBuffer,
    pub thread_pointer: ThreadPointer,
    /// The thread's C stack.
    pub own_stack: OwnStack,
    /// What its C library keeps for it, where it tells its thread state (3.13+).
    pub slots: SlotBuffer,
    pub native: NativeWalk,
    pub stack_buffer: StackBuffer,
    pub space: Space,
    /// Where in the sample native addresses go; 0: not known yet.
    pub native_at: u32,
    /// Evaluators met on the native stack, as far as they matter: 2 at most.
    pub evaluators: u32,
    /// The stack pointer in the second of them.
    pub caller_sp: u64,
    /// Where on the C stack the evaluator was entered for the innermost Python frames; 0: not known.
    pub entered_at: u64,
    /// [`SampleRecord::entered`].
    pub entered: u32,
    /// What the stage that walks frames is to begin with: [`GOES_ON`] to find out whose work it is, and to walk; the number of a reason, to
    /// find that out and stop; with [`STOPS`], only to stop; 0: it has begun.
    pub begins: u32,
    /// How far the repair has got of a sample that was taken while the evaluator was entered: one of [`repair`].
    pub repair: u32,
    pub thread_steps: u32,
    pub tail_calls: u32,
    /// Stacks copied since [`State::copies_since`].
    pub copies: u32,
    pub copies_since: u64,
    /// Which of the chosen events the sample is of.
    pub event: u32,
    /// Which of `WAITING` the record is of.
    pub wait: u32,
    /// Frames of the thread itself, while those of the GIL's holder are walked.
    pub own_frames: u32,
    /// What becomes the last part of the record; of nobody where its flags are 0.
    pub whose: Whose,
    pub greenlets: GreenletWalk,
    pub awaiting: Awaiting,
    pub current: CurrentTasks,
    pub task_reader: TaskReader,
}

/// Value of `CODE`: a code record and its payload; before that, of a sample whose stack is copied, parts of that.
#[repr(C)]
pub struct CodeScratch {
    pub record: tachyon_common::event::CodeRecord,
    pub payload: [u8; SCRATCH_BYTES - size_of::<tachyon_common::event::CodeRecord>()],
}

const _: () = assert!(size_of::<SampleScratch>() == SCRATCH_BYTES);
const _: () = assert!(size_of::<CodeScratch>() == SCRATCH_BYTES);
