//! Depth, map and buffer sizes, each with its arithmetic.

/// Executables that are expected to be no CPython; those that have started longest ago make room.
pub const MAX_DULL: u32 = 1024;

/// Stacks of waits that one CPU takes in a tenth of a second; when there are more, threads that begin to wait have longer periods.
pub const WAITS_A_TENTH: u64 = 100;
/// Stacks beyond which none are taken in a tenth of a second, while that takes effect; these are counted.
pub const MAX_WAITS_A_TENTH: u64 = 400;
/// Slots for what user space has told of waits that last (a power of two): 2^15 * 8 bytes = 256 KiB.
pub const TOLD_WAITS: u32 = 32 * 1024;
/// Slots for tasks that are known not to be recorded (a power of two): 2^13 * 8 bytes = 64 KiB.
pub const UNWATCHED_SLOTS: u32 = 8_192;
/// Slots for threads whose waits are followed (a power of two): 2^12 * 128 bytes = 512 KiB.
pub const THREAD_SLOTS: u32 = 4_096;
/// Threads whose waits are followed at the same time, beside those that have a slot.
pub const MAX_SEEN_THREADS: u32 = 32 * 1024;

/// Python frames kept for one sample. The kernel allows 33 tail calls; see [`PY_FRAMES_PER_STEP`].
pub const MAX_PY_FRAMES: usize = 1024;

/// Python frames walked by one BPF program before it tail-calls itself: 1,024 / 104 = 10 calls, which with
/// those of [`NATIVE_FRAMES_PER_STEP`] stay below the kernel's 33 (`MAX_TAIL_CALL_CNT`).
pub const PY_FRAMES_PER_STEP: usize = 104;

/// Python frames that one call of the BPF function looks at. Where the kernel makes each return expensive (its mitigations
/// of AMD's speculative return stack overflow do), a call for each frame costs a tenth of it; the verifier looks at the
/// function's body that often.
pub const PY_FRAMES_PER_CALL: usize = 2;

/// Python frames of one parent of a greenlet that are walked. All of it is one BPF program: a web server has a hundred.
pub const PY_FRAMES_PER_PARENT: usize = 256;

/// Native frames that one call of the BPF function walks, likewise.
pub const NATIVE_FRAMES_PER_CALL: usize = 2;

/// Native user frames for which a record has room.
pub const MAX_NATIVE_FRAMES: usize = 512;

/// Native frames walked by one BPF program before it tail-calls itself: 512 / 32 = 16 calls. With the 10 of the deepest
/// Python stack that leaves 6 of the 32 for the search of the thread and for names.
pub const NATIVE_FRAMES_PER_STEP: usize = 32;

/// Halvings that find a row of a page of an unwind table: 2^9 - 1 rows, more than the 256 of a page.
pub const PAGE_SEARCH_STEPS: u32 = 9;

/// Ranges of the largest address space.
pub const MAX_SPACE_RANGES: u32 = (1 << RANGE_SEARCH_STEPS) - 1;

/// Halvings that find a range: 2^12 - 1 ranges. PyTorch with everything has some 700 executable mappings.
pub const RANGE_SEARCH_STEPS: u32 = 12;

/// Ranges of all processes together: 2^16 * 32 bytes = 2 MiB, 50 processes of 1,300 ranges.
pub const MAX_RANGES: u32 = 1 << 16;

/// Kernel frames for which a record has room (`PERF_MAX_STACK_DEPTH`).
pub const MAX_KERNEL_FRAMES: usize = 127;

/// Thread states looked at by one BPF program while it searches a thread list.
pub const THREADS_PER_STEP: usize = 64;

/// Most tail calls one sample may spend on searching the thread list: 20 * 64 = 1,280 thread states. The next sample of
/// the thread goes on from there.
pub const MAX_THREAD_STEPS: u32 = 20;

/// Bytes of a thread's values of `pthread_setspecific` that are read: glibc's first 32 (`PTHREAD_KEY_2NDLEVEL_SIZE`), 16
/// bytes each.
pub const SLOTS_READ: usize = 512;

/// Slots for searches that were broken off (a power of two): 2^11 * 160 bytes = 320 KiB.
pub const SEARCH_SLOTS: u32 = 2_048;

/// Most events that one recording can sample.
pub const MAX_EVENTS: usize = 4;

/// Most tail calls of one sample altogether (the kernel's limit is 33).
pub const MAX_TAIL_CALLS: u32 = 32;

/// Bytes of a string that are copied and shown: a longer one is cut there, and says so. No path is longer (`PATH_MAX`), and no
/// name that a person has written.
pub const MAX_TEXT_BYTES: usize = 4088;

/// Bytes of a line table that enter a code object's identity and are shown: some 60,000 instructions. What a longer table
/// says of later ones is not known. (256 pieces, some 40 us, once for each process from 3.12 on.)
pub const MAX_LINETABLE_BYTES: u32 = 1 << 18;

/// Bytes of a string that enter a code object's identity: all that are shown.
pub const MAX_TEXT_HASHED: u32 = MAX_TEXT_BYTES as u32;

/// Bytes of a string or line table that are read and hashed in one go. (The verifier looks at each block of 32.)
pub const HASH_PIECE: usize = 512;

/// Pieces that one sample reads, besides the first bytes of each string and table: two of the longest line tables, and 256
/// of others. (Some 120 us, where a target wants it so; measured with pieces
/// twice as long and three fifths as many.)
pub const HASH_PIECES_PER_SAMPLE: u32 = 2 * MAX_LINETABLE_BYTES / HASH_PIECE as u32 + 256;

/// Bytes of an ASCII string that are read with its head; a multiple of 32.
pub const FIRST_OF_TEXT: u32 = 96;

/// Bytes of a line table that are read with its head; a multiple of 32.
pub const FIRST_OF_TABLE: u32 = 224;

/// Bytes of a line table copied into one record; a longer table travels in several records.
pub const LINETABLE_CHUNK: usize = 8192;

/// Code objects one BPF program names before it tail-calls itself.
pub const CODES_PER_STEP: usize = 16;

/// Most unknown code objects remembered while one stack is walked.
pub const MAX_PENDING_CODES: usize = 128;

/// Bytes read of a thread state in one go (3.15's `exc_state` ends at 336).
pub const THREAD_READ: usize = 512;

/// Bytes read of an interpreter state in one go (3.14's `id` and `_code_object_generation` lie 744 bytes apart).
pub const INTERP_READ: usize = 1024;

/// Bytes read of an interpreter frame in one go (3.15t's largest field of interest ends below 112).
pub const FRAME_READ: usize = 128;

/// Bytes of the stack read in one go: some eight native frames.
pub const STACK_READ: usize = 1024;

/// Bytes of a stack that one record of a copy has ([`crate::event::StackRecord`]): four pages.
pub const STACK_PART: usize = 4 * STACK_PAGE;

/// Bytes of a stack that are copied in one go.
pub const STACK_PAGE: usize = 4096;

/// Pages that are looked at for one record: its own, of which the first and the last may be copied in part, and before them up to eight
/// that cannot be read. More of these in a row end a copy: nothing else tells where the stack of a process's first thread ends.
pub const STACK_LOOKS: usize = 2 * (STACK_PART / STACK_PAGE) + 1;

/// Most bytes from the beginning of a copy to that of its last record: 64 KiB.
pub const STACK_COPY: u64 = 4 * STACK_PART as u64;

/// Most records of one copy: behind pages that cannot be read, another begins.
pub const STACK_PARTS: u32 = 8;

/// Stacks that one CPU copies in a tenth of a second: all that samples at 500 Hz may want. (Where 250 are asked for, intervals may become
/// half as long for a while, to make up for late ones.)
pub const STACKS_A_TENTH: u32 = 50;

/// Slots for rules that were found for an address (a power of two): 2^14 * 16 bytes = 256 KiB.
pub const RULE_SLOTS: u32 = 16_384;

/// Bytes read in one go where the frames of a stack lie close together: six to ten frames (3.11+, whose frames lie one
/// behind the other in chunks of 16 KiB).
pub const FRAMES_READ: usize = 1024;

/// Bytes read of a code object in one go (free-threaded 3.14's `co_code_adaptive` starts at 232).
pub const CODE_READ: usize = 256;

/// Processes that are known at once: entries of `PROCESSES`, and of `ENTRIES`.
pub const MAX_PROCESSES: u32 = 16_384;

/// Slots for what was decided of processes that are not recorded (a power of two): 2^12 * 8 bytes = 32 KiB.
pub const VERDICT_SLOTS: u32 = 4_096;

/// Where in that map the lifecycle hooks count their changes of the process table.
pub const CHANGES_BY_HOOKS: u32 = 0;

/// Where user space does.
pub const CHANGES_BY_USER_SPACE: u32 = 1;

/// Where the slots begin.
pub const FIRST_VERDICT: u32 = 16;

/// Entries of the layout table: one for each distinct interpreter build seen.
pub const MAX_LAYOUTS: u32 = 64;

/// Entries of the table of where asyncio keeps its tasks, the first of which is not used: one for each distinct build seen.
pub const MAX_ASYNCIO: u32 = 64;

/// Entries of the table of where spans are kept, the first of which is not used: one for each distinct place in a process.
pub const MAX_SPANS: u32 = 256;

/// Entries of the table of where greenlets are kept, the first of which is not used: one for each distinct place in a process.
pub const MAX_GREENLET_PLACES: u32 = 256;

/// Slots of the table of threads' own variables, for their spans and their greenlets (a power of two): 2^12 * 16 bytes = 64 KiB.
pub const VARIABLE_SLOTS: u32 = 4_096;

/// Slots of the thread cache (a power of two).
pub const THREAD_CACHE_SLOTS: u32 = 16_384;

/// Slots of the table of code objects already sent (a power of two): 2^16 * 16 bytes = 1 MiB.
pub const SENT_SLOTS: u32 = 65_536;

/// Slots of the table of code objects that need not be read again (a power of two): 2^13 * 64 bytes = 512 KiB.
pub const KNOWN_SLOTS: u32 = 8_192;

/// Slots of one bucket of the table of code objects already sent.
pub const SENT_WAYS: u32 = 4;

/// Rows of unwind tables in one map: 512 KiB, a power of two.
pub const ROWS_PER_CHUNK: u32 = 65_536;

const _: () = assert!(PY_FRAMES_PER_STEP.is_multiple_of(PY_FRAMES_PER_CALL));
const _: () = assert!(NATIVE_FRAMES_PER_STEP.is_multiple_of(NATIVE_FRAMES_PER_CALL));
