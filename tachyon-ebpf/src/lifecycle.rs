//! Fork, exec, exit, and processes met unknown: keeps the process table and tells user space.

use crate::kernel::KernelPtr;
use crate::maps::{
    COUNTERS, DULL, ENTRIES, EVENTS, EVENTS_LOST, EXECUTABLES, FileKey, LEADERS, LOST_PROCESSES, LOST_RECORDS,
    PROCESSES, SPACES, TOLD, TOLD_SLOTS, config,
};
use crate::thread;
use crate::verdicts::{self, add};
use crate::wall;
use crate::whose;
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_ringbuf_output, bpf_ringbuf_query};
use aya_ebpf::programs::RawTracePointContext;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::{ProcessRecord, RecordHeader, kind};
use tachyon_common::process::{Life, ProcessEntry, flags};
use tachyon_common::walk::mix;

/// Replace or create (`BPF_ANY`).
const ANY: u64 = 0;

#[inline(always)]
fn now() -> u64 {
    // SAFETY: the helper takes nothing and cannot fail.
    unsafe { bpf_ktime_get_ns() }
}

/// A number that no process and no image of this recording has had.
#[inline(always)]
fn fresh(ktime_ns: u64, tgid: u32) -> u64 {
    mix(mix(config!(seed), ktime_ns), u64::from(tgid))
}

#[inline(always)]
fn all_python() -> bool {
    config!(flags) & config_flags::ALL_PYTHON != 0
}

#[inline(always)]
fn native() -> bool {
    config!(flags) & config_flags::NATIVE != 0
}

/// A new process gets a copy of its parent's entry at once: its memory is the same. A vfork child borrows its parent's
/// memory until it execs, which the same copy describes.
#[inline(always)]
pub fn on_fork(ctx: &RawTracePointContext) {
    let parent = KernelPtr(ctx.arg::<u64>(0));
    let child = KernelPtr(ctx.arg::<u64>(1));
    let parent_tgid = thread::tgid(parent);
    let child_tgid = thread::tgid(child);
    if parent_tgid != child_tgid {
        inherit(child, parent_tgid, child_tgid);
        // Its number may have been another process's, whatever became of its entry.
        return verdicts::changed();
    }
    // Another task had this address; of new processes it is the change above that counts.
    wall::new_task(child.0);
    if let Some(life) = PROCESSES.get_ptr_mut(&parent_tgid) {
        // A thread: fires here too.
        // SAFETY: a live map value; a lost increment under a race of two starting threads is made up for by the other.
        let starts = unsafe { &mut (*life).thread_starts };
        *starts = starts.wrapping_add(1);
    }
}

/// What was found out of the program of a process, copied; without flags but those that were inherited where nobody has
/// decided yet.
#[inline(always)]
fn entry_of(life: &Life) -> ProcessEntry {
    match ENTRIES.get_ptr(&life.entry) {
        // SAFETY: a live map value, copied.
        Some(entry) => unsafe { *entry },
        None => ProcessEntry { flags: life.flags & INHERITED, ..EMPTY },
    }
}

#[inline(always)]
fn inherit(child: KernelPtr, parent_tgid: u32, child_tgid: u32) {
    let Some(parent) = PROCESSES.get_ptr_mut(&parent_tgid) else { return };
    // SAFETY: a live map value. Its flags are else written when its last thread exits, and this one is alive.
    let parent = unsafe { &mut *parent };
    parent.flags |= flags::FORKED;
    let parent = *parent;
    let mut entry = entry_of(&parent);
    if !all_python() && entry.flags & flags::FOLLOW == 0 {
        return;
    }
    let ktime_ns = now();
    // The rest is not handed down; the child may be in a pid namespace of its own.
    let mut life = Life::new(entry.flags & INHERITED, parent.image, fresh(ktime_ns, child_tgid));
    life.thread_starts = parent.thread_starts;
    life.flags |= flags::FORKED;
    forget_former(child_tgid);
    if entry.flags & DECIDED != 0 {
        (entry.image, entry.instance) = (life.image, life.instance);
        if ENTRIES.insert(&life.entry, &entry, ANY).is_err() {
            return no_room();
        }
    }
    if PROCESSES.insert(&child_tgid, &life, ANY).is_err() {
        let _none = ENTRIES.remove(&life.entry);
        // Without a place in the table the child's samples count as those of a process that nobody wants.
        return no_room();
    }
    if native()
        // SAFETY: a live map value, copied.
        && let Some(space) = unsafe { SPACES.get(&parent_tgid) }.copied()
    {
        // A full table leaves the child's native stacks without tables, which each of its samples says.
        let _full = SPACES.insert(&child_tgid, &space, ANY);
    }
    if entry.flags & flags::NOT_PYTHON == 0 {
        tell(&ProcessRecord {
            ktime_ns,
            image: life.image,
            instance: life.instance,
            tgid: child_tgid,
            parent: parent_tgid,
            flags: entry.flags,
            comm: child.read(config!(task_comm)),
            ..ProcessRecord::of(kind::FORK)
        });
    }
}

/// Removes what was found out of the process that had this number before, if its end went by.
#[inline(always)]
fn forget_former(tgid: u32) {
    if let Some(former) = PROCESSES.get_ptr(&tgid) {
        // SAFETY: a live map value.
        let key = unsafe { (*former).entry };
        let _none = ENTRIES.remove(&key);
    }
}

/// Builds records with their header.
trait OfKind {
    fn of(kind: u16) -> Self;
}

impl OfKind for ProcessRecord {
    #[inline(always)]
    fn of(kind: u16) -> Self {
        Self {
            header: RecordHeader { kind, bank: 0, event: 0, len: size_of::<Self>() as u32 },
            ktime_ns: 0,
            image: 0,
            instance: 0,
            cpu_ns: 0,
            lives_ns: 0,
            queued_ns: 0,
            waited_ns: 0,
            uninspected: 0,
            exe_dev: 0,
            exe_inode: 0,
            tgid: 0,
            parent: 0,
            flags: 0,
            layout: 0,
            comm: [0; 16],
        }
    }
}

/// The image is new: what was known of the process no longer holds, whichever of its threads called `exec`.
#[inline(always)]
pub fn on_exec(_ctx: &RawTracePointContext) {
    let task = KernelPtr::current_task();
    let tgid = thread::tgid(task);
    let old = match PROCESSES.get_ptr(&tgid) {
        // SAFETY: a live map value, copied.
        Some(life) => unsafe { *life },
        None if all_python() && tgid != 0 => Life { flags: flags::SELECTED, ..NOBODY },
        None => return,
    };
    let old_flags = entry_of(&old).flags;
    if native() {
        let _none = SPACES.remove(&tgid);
    }
    let ktime_ns = now();
    let image = fresh(ktime_ns, tgid);
    let instance = if old.instance == 0 { image } else { old.instance };
    let mut life = Life::new(old_flags & INHERITED, image, instance);
    // The other threads end with the old program; what they used is the process's all the same.
    life.exited_ns = old.exited_ns;
    life.released_ns = old.released_ns;
    life.thread_starts = old.thread_starts;
    if config!(flags) & config_flags::FILTERED != 0 {
        // The new program may be wanted where the old one was not: until that is decided its runs are counted apart.
        life.flags |= flags::SELECTED;
    }
    let exe = executable(task);
    // SAFETY: entries are written whole by user space and never removed while the programs run.
    if let Some(mut known) = unsafe { EXECUTABLES.get(&exe).copied() } {
        (known.image, known.instance, known.known_ns) = (image, instance, ktime_ns);
        known.flags |= life.flags;
        // Without room it is inspected as any other.
        let _full = ENTRIES.insert(&life.entry, &known, ANY);
    }
    // The end of what was CPython is waited for.
    // SAFETY: copied; another's value does no harm.
    let dull =
        old_flags & flags::PYTHON == 0 && unsafe { DULL.get(&exe).copied() }.is_some_and(|until| ktime_ns < until);
    if dull {
        life.flags |= flags::DULL;
    }
    let inserted = PROCESSES.insert(&tgid, &life, ANY);
    // Last: whoever writes to it from now on finds that it is nobody's any more.
    let _none = ENTRIES.remove(&old.entry);
    verdicts::changed();
    if inserted.is_err() {
        let _none = ENTRIES.remove(&life.entry);
        return no_room();
    }
    let record = ProcessRecord {
        ktime_ns,
        image,
        instance,
        uninspected: old.uninspected,
        exe_dev: exe.dev,
        exe_inode: exe.inode,
        tgid,
        flags: old_flags,
        comm: task.read(config!(task_comm)),
        ..ProcessRecord::of(kind::EXEC)
    };
    tell_when(&record, dull);
}

/// The executable just started.
#[inline(always)]
fn executable(task: KernelPtr) -> FileKey {
    let file = task.follow(config!(task_mm)).follow(config!(mm_exe_file));
    let inode = file.follow(config!(file_inode));
    let dev: u32 = inode.follow(config!(inode_sb)).read(config!(super_block_dev));
    FileKey { dev: u64::from(dev), inode: inode.read(config!(inode_ino)) }
}

/// With its last thread the process ends; its entry stays, marked, until nothing can run as this process any more.
#[inline(always)]
pub fn on_exit(_ctx: &RawTracePointContext) {
    let task = KernelPtr::current_task();
    let tgid = thread::tgid(task);
    let Some(life) = PROCESSES.get_ptr_mut(&tgid) else { return };
    let signal = task.follow(config!(task_signal));
    // A thread's time goes into `sum_sched_runtime` when it is released: of a leader that is when it is waited for, of others a
    // moment after this. So each thread that exits is counted here, and what had been released before the first of them.
    // SAFETY: a live map value.
    if unsafe { (*life).exited_ns } == 0 {
        let released_ns = signal.read::<u64>(config!(signal_sum_sched_runtime));
        // SAFETY: likewise; two threads that are the first write the same, but for what is released between.
        unsafe { (*life).released_ns = released_ns };
    }
    let now = now();
    let (ran, lived) =
        (task.read::<u64>(config!(task_sum_exec_runtime)), now.wrapping_sub(task.read(config!(task_start_time))));
    let queued: u64 = if config!(task_run_delay) == 0 { 0 } else { task.read(config!(task_run_delay)) };
    // SAFETY: likewise.
    let exited_ns = unsafe { &raw mut (*life).exited_ns };
    add(exited_ns, ran);
    // SAFETY: likewise.
    let lives_ns = unsafe { &raw mut (*life).lives_ns };
    add(lives_ns, lived);
    // SAFETY: likewise.
    let queued_ns = unsafe { &raw mut (*life).queued_ns };
    add(queued_ns, queued);
    // SAFETY: likewise.
    whose::forget_variables(unsafe { (*life).image }, thread::tid(task));
    let waited = wall::waited_ns(task.0);
    // SAFETY: likewise.
    let waited_ns = unsafe { &raw mut (*life).waited_ns };
    add(waited_ns, waited);
    if config!(flags) & config_flags::THREAD_TIMES != 0 {
        // SAFETY: likewise.
        tell_thread(task, tgid, unsafe { &*life }, now, [ran, lived, queued, waited]);
    }
    // Fires for each thread; `live` has been lowered before.
    if signal.read::<u32>(config!(signal_live)) != 0 {
        return;
    }
    // SAFETY: a live map value.
    let life = unsafe { &mut *life };
    life.leader = task.follow(config!(task_group_leader)).0;
    if config!(own_pid_ns) != 0 {
        // A full table leaves the entry until its pid is used again.
        let _full = LEADERS.insert(&life.leader, &tgid, ANY);
    }
    life.flags |= flags::EXITED;
    let entry = entry_of(life);
    if entry.flags & flags::NOT_PYTHON != 0 {
        return;
    }
    let record = ProcessRecord {
        ktime_ns: now,
        image: life.image,
        instance: life.instance,
        cpu_ns: life.released_ns.wrapping_add(life.exited_ns),
        lives_ns: life.lives_ns,
        queued_ns: life.queued_ns,
        waited_ns: life.waited_ns,
        uninspected: life.uninspected,
        tgid,
        flags: entry.flags,
        layout: entry.layout,
        comm: task.read(config!(task_comm)),
        ..ProcessRecord::of(kind::EXIT)
    };
    tell_when(&record, life.flags & flags::DULL != 0 && entry.flags & flags::PYTHON == 0);
}

/// Tells what a thread of a CPython came to, without waking anybody: who reads of processes reads of it soon.
#[inline(always)]
fn tell_thread(task: KernelPtr, tgid: u32, life: &Life, ktime_ns: u64, [ran, lived, queued, waited]: [u64; 4]) {
    let Some(entry) = ENTRIES.get_ptr(&life.entry) else { return };
    // SAFETY: a live map value.
    if unsafe { (*entry).flags } & flags::PYTHON == 0 {
        return;
    }
    let record = ProcessRecord {
        ktime_ns,
        image: life.image,
        instance: life.instance,
        cpu_ns: ran,
        lives_ns: lived,
        queued_ns: queued,
        waited_ns: waited,
        tgid,
        parent: thread::tid(task),
        ..ProcessRecord::of(kind::THREAD)
    };
    if !output(&record, NO_WAKEUP) {
        lose(LOST_RECORDS);
    }
}

/// Removes what is known of a process whose leader's `task_struct` goes, unless its pid has been given out again.
#[inline(always)]
pub fn on_free(ctx: &RawTracePointContext) {
    let task = KernelPtr(ctx.arg::<u64>(0));
    if task.read::<u32>(config!(task_pid)) != task.read::<u32>(config!(task_tgid)) {
        return;
    }
    let tgid = thread::tgid(task);
    if config!(own_pid_ns) != 0 {
        let _none = LEADERS.remove(&task.0);
    }
    let Some(life) = PROCESSES.get_ptr(&tgid) else { return };
    // SAFETY: a live map value, copied.
    let life = unsafe { *life };
    if life.leader != task.0 {
        return;
    }
    let flags = entry_of(&life).flags;
    let _gone = PROCESSES.remove(&tgid);
    // Last: whoever writes to it from now on finds that it is nobody's any more.
    let _none = ENTRIES.remove(&life.entry);
    if native() {
        let _none = SPACES.remove(&tgid);
    }
    if life.after_exit > 0 {
        tell(&ProcessRecord {
            ktime_ns: now(),
            image: life.image,
            instance: life.instance,
            uninspected: life.after_exit,
            tgid,
            flags,
            ..ProcessRecord::of(kind::FREE)
        });
    }
}

/// Tells user space of a process that was sampled but is in no table, at most once in 100 ms for each CPU.
#[inline(always)]
pub fn tell_unknown(tgid: u32) {
    let Some(told) = TOLD.get_ptr_mut(tgid & (TOLD_SLOTS - 1)) else { return };
    // SAFETY: this CPU's value of the timer's program.
    let told = unsafe { &mut *told };
    let ktime_ns = now();
    if told.tgid == tgid && ktime_ns.wrapping_sub(told.ktime_ns) < 100_000_000 {
        return;
    }
    told.tgid = tgid;
    told.ktime_ns = ktime_ns;
    let record = ProcessRecord { ktime_ns, tgid, ..ProcessRecord::of(kind::UNKNOWN) };
    if !output(&record, FORCE_WAKEUP)
        && let Some(counters) = COUNTERS.get_ptr_mut(0)
    {
        // SAFETY: this CPU's value of the timer's program.
        unsafe { (*counters).events_lost += 1 };
    }
}

#[inline(always)]
fn tell(record: &ProcessRecord) {
    tell_when(record, false);
}

/// Tells it, with what is told next where that is soon enough and there is room.
#[inline(always)]
fn tell_when(record: &ProcessRecord, later: bool) {
    let wake = if later && has_room() { NO_WAKEUP } else { FORCE_WAKEUP };
    if !output(record, wake) {
        lose(LOST_RECORDS);
    }
}

/// Whether less than a quarter of the ring waits to be read.
#[inline(always)]
fn has_room() -> bool {
    // SAFETY: a ring, and what the helper may be asked of one.
    let ask = |what| unsafe { bpf_ringbuf_query((&raw const EVENTS).cast_mut().cast(), what) };
    ask(AVAIL_DATA) < ask(RING_SIZE) / 4
}

/// Counts a process that found the tables full.
#[inline(always)]
fn no_room() {
    lose(LOST_PROCESSES);
}

/// Counts a process start or end that went by.
#[inline(always)]
fn lose(what: u32) {
    if let Some(lost) = EVENTS_LOST.get_ptr_mut(what) {
        // SAFETY: this CPU's value of the raw tracepoints.
        unsafe { *lost += 1 };
    }
}

#[inline(always)]
fn output(record: &ProcessRecord, wake: u64) -> bool {
    let ring = (&raw const EVENTS).cast_mut().cast();
    // SAFETY: the record is initialised and of the length given.
    unsafe {
        bpf_ringbuf_output(ring, (&raw const *record).cast_mut().cast(), size_of::<ProcessRecord>() as u64, wake) == 0
    }
}

/// `BPF_RB_AVAIL_DATA`.
const AVAIL_DATA: u64 = 0;
/// `BPF_RB_RING_SIZE`.
const RING_SIZE: u64 = 1;
/// `BPF_RB_FORCE_WAKEUP`.
const FORCE_WAKEUP: u64 = 2;
/// `BPF_RB_NO_WAKEUP`.
const NO_WAKEUP: u64 = 1;

/// What children and later programs have of a process.
const INHERITED: u32 = flags::SELECTED | flags::FOLLOW;
/// Set when user space has decided.
const DECIDED: u32 = flags::PYTHON | flags::NOT_PYTHON;

/// A process that has never been met.
const NOBODY: Life = Life {
    flags: 0,
    same_numbers: 0,
    entry: 0,
    image: 0,
    instance: 0,
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
};

/// An entry of which nothing is known.
const EMPTY: ProcessEntry = ProcessEntry {
    flags: 0,
    layout: 0,
    image: 0,
    instance: 0,
    runtime: 0,
    code_type: 0,
    none: 0,
    entering_start: 0,
    entering_end: 0,
    evaluator_start: 0,
    evaluator_end: 0,
    cframe_offset: 0,
    asyncio: 0,
    spans: 0,
    current_tasks: 0,
    known_ns: 0,
    greenlets: 0,
    _pad: 0,
};
