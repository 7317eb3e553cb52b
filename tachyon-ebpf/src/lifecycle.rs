//! Fork, exec, exit, and processes met unknown: keeps the process table and tells user space.

use crate::kernel::KernelPtr;
use crate::maps::{
    COUNTERS, EVENTS, EVENTS_LOST, EXECUTABLES, FileKey, LEADERS, PROCESSES, SPACES, TOLD, TOLD_SLOTS, config,
};
use crate::thread;
use crate::verdicts;
use aya_ebpf::helpers::generated::{bpf_ktime_get_ns, bpf_ringbuf_output};
use aya_ebpf::programs::RawTracePointContext;
use tachyon_common::config::flags as config_flags;
use tachyon_common::event::{ProcessRecord, RecordHeader, kind};
use tachyon_common::process::{ProcessEntry, flags};
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
    if let Some(entry) = PROCESSES.get_ptr_mut(&parent_tgid) {
        // A thread: fires here too.
        // SAFETY: a live map value; a lost increment under a race of two starting threads is made up for by the other.
        unsafe { (*entry).thread_starts = (*entry).thread_starts.wrapping_add(1) };
    }
}

#[inline(always)]
fn inherit(child: KernelPtr, parent_tgid: u32, child_tgid: u32) {
    let Some(entry) = PROCESSES.get_ptr_mut(&parent_tgid) else { return };
    // SAFETY: a live map value, copied.
    let parent_entry = unsafe { *entry };
    if !all_python() && parent_entry.flags & flags::FOLLOW == 0 {
        return;
    }
    let ktime_ns = now();
    let mut copy = parent_entry;
    copy.instance = fresh(ktime_ns, child_tgid);
    copy.leader = 0;
    copy.uninspected = 0;
    copy.after_exit = 0;
    // The child may be in a pid namespace of its own.
    copy.same_numbers = 0;
    copy.flags &= !flags::EXITED;
    if PROCESSES.insert(&child_tgid, &copy, ANY).is_err() {
        // The table is full: without an entry the child's samples count as those of a process that nobody wants.
        return lose();
    }
    // SAFETY: a live map value, copied.
    if native()
        && let Some(space) = unsafe { SPACES.get(&parent_tgid).copied() }
    {
        // A full table leaves the child's native stacks without tables, which each of its samples says.
        let _full = SPACES.insert(&child_tgid, &space, ANY);
    }
    if copy.flags & flags::NOT_PYTHON == 0 {
        tell(&ProcessRecord {
            ktime_ns,
            image: copy.image,
            instance: copy.instance,
            tgid: child_tgid,
            parent: parent_tgid,
            flags: copy.flags,
            comm: child.read(config!(task_comm)),
            ..ProcessRecord::of(kind::FORK)
        });
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
            header: RecordHeader { kind, flags: 0, len: size_of::<Self>() as u32 },
            ktime_ns: 0,
            image: 0,
            instance: 0,
            cpu_ns: 0,
            uninspected: 0,
            tgid: 0,
            parent: 0,
            flags: 0,
            _pad: 0,
            comm: [0; 16],
        }
    }
}

/// The image is new: what was known of the process no longer holds, whichever of its threads called `exec`.
#[inline(always)]
pub fn on_exec(_ctx: &RawTracePointContext) {
    let task = KernelPtr::current_task();
    let tgid = thread::tgid(task);
    let old = match PROCESSES.get_ptr_mut(&tgid) {
        // SAFETY: a live map value, copied.
        Some(entry) => unsafe { *entry },
        None if all_python() && tgid != 0 => ProcessEntry { flags: flags::SELECTED, ..EMPTY },
        None => return,
    };
    if native() {
        let _none = SPACES.remove(&tgid);
    }
    let ktime_ns = now();
    let image = fresh(ktime_ns, tgid);
    let mut entry = EMPTY;
    if let Some(known) = executable(task) {
        entry = known;
    }
    entry.image = image;
    entry.instance = if old.instance == 0 { image } else { old.instance };
    entry.flags |= old.flags & (flags::SELECTED | flags::FOLLOW);
    if config!(flags) & config_flags::FILTERED != 0 {
        // The new program may be wanted where the old one was not: until that is decided its runs are counted apart.
        entry.flags |= flags::SELECTED;
    }
    let inserted = PROCESSES.insert(&tgid, &entry, ANY);
    verdicts::changed();
    if inserted.is_err() {
        return lose();
    }
    tell(&ProcessRecord {
        ktime_ns,
        image,
        instance: entry.instance,
        uninspected: old.uninspected,
        tgid,
        flags: old.flags,
        comm: task.read(config!(task_comm)),
        ..ProcessRecord::of(kind::EXEC)
    });
}

/// The entry for processes of the executable just started, when it is a known CPython at a fixed address.
#[inline(always)]
fn executable(task: KernelPtr) -> Option<ProcessEntry> {
    let file = task.follow(config!(task_mm)).follow(config!(mm_exe_file));
    let inode = file.follow(config!(file_inode));
    let dev: u32 = inode.follow(config!(inode_sb)).read(config!(super_block_dev));
    let key = FileKey { dev: u64::from(dev), inode: inode.read(config!(inode_ino)) };
    // SAFETY: entries are written whole by user space and never removed while the programs run.
    unsafe { EXECUTABLES.get(&key).copied() }
}

/// With its last thread the process ends; the entry stays, marked, until nothing can run as this process any more.
#[inline(always)]
pub fn on_exit(_ctx: &RawTracePointContext) {
    let task = KernelPtr::current_task();
    let tgid = thread::tgid(task);
    let Some(entry) = PROCESSES.get_ptr_mut(&tgid) else { return };
    let signal = task.follow(config!(task_signal));
    // Fires for each thread; `live` has been lowered before.
    if signal.read::<u32>(config!(signal_live)) != 0 {
        return;
    }
    // SAFETY: a live map value.
    let entry = unsafe { &mut *entry };
    entry.leader = task.follow(config!(task_group_leader)).0;
    if config!(own_pid_ns) != 0 {
        // A full table leaves the entry until its pid is used again.
        let _full = LEADERS.insert(&entry.leader, &tgid, ANY);
    }
    let before = entry.flags;
    entry.flags = before | flags::EXITED;
    if before & flags::NOT_PYTHON != 0 {
        return;
    }
    tell(&ProcessRecord {
        ktime_ns: now(),
        image: entry.image,
        instance: entry.instance,
        cpu_ns: signal
            .read::<u64>(config!(signal_sum_sched_runtime))
            .wrapping_add(task.read::<u64>(config!(task_sum_exec_runtime))),
        uninspected: entry.uninspected,
        tgid,
        flags: before,
        comm: task.read(config!(task_comm)),
        ..ProcessRecord::of(kind::EXIT)
    });
}

/// Removes the entry of a process whose leader's `task_struct` goes, unless its pid has been given out again.
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
    let Some(entry) = PROCESSES.get_ptr_mut(&tgid) else { return };
    // SAFETY: a live map value, copied.
    let entry = unsafe { *entry };
    if entry.leader != task.0 {
        return;
    }
    let _gone = PROCESSES.remove(&tgid);
    if native() {
        let _none = SPACES.remove(&tgid);
    }
    if entry.after_exit > 0 {
        tell(&ProcessRecord {
            ktime_ns: now(),
            image: entry.image,
            instance: entry.instance,
            uninspected: entry.after_exit,
            tgid,
            flags: entry.flags,
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
    if !output(&record)
        && let Some(counters) = COUNTERS.get_ptr_mut(0)
    {
        // SAFETY: this CPU's value of the timer's program.
        unsafe { (*counters).events_lost += 1 };
    }
}

#[inline(always)]
fn tell(record: &ProcessRecord) {
    if !output(record) {
        lose();
    }
}

/// Counts a process start or end that went by.
#[inline(always)]
fn lose() {
    if let Some(lost) = EVENTS_LOST.get_ptr_mut(0) {
        // SAFETY: this CPU's value of the raw tracepoints; user space takes any loss as "scan again".
        unsafe { *lost += 1 };
    }
}

#[inline(always)]
fn output(record: &ProcessRecord) -> bool {
    let ring = (&raw const EVENTS).cast_mut().cast();
    // SAFETY: the record is initialised and of the length given.
    unsafe {
        bpf_ringbuf_output(
            ring,
            (&raw const *record).cast_mut().cast(),
            size_of::<ProcessRecord>() as u64,
            FORCE_WAKEUP,
        ) == 0
    }
}

/// `BPF_RB_FORCE_WAKEUP`.
const FORCE_WAKEUP: u64 = 2;

/// An entry of which nothing is known.
const EMPTY: ProcessEntry = ProcessEntry {
    flags: 0,
    same_numbers: 0,
    image: 0,
    instance: 0,
    runtime: 0,
    code_type: 0,
    none: 0,
    leader: 0,
    entering_start: 0,
    entering_end: 0,
    uninspected: 0,
    after_exit: 0,
    layout: 0,
    thread_starts: 0,
    _pad: 0,
    cframe_offset: 0,
    evaluator_start: 0,
    evaluator_end: 0,
};
