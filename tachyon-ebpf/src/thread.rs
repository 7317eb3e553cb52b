//! Current task -> thread ids and the cache of thread states.

use crate::kernel::KernelPtr;
use crate::maps::{BrokenSearch, CachedThread, LEADERS, SEARCHES, THREADS, config};
use crate::memory::CurrentProcess;
use tachyon_common::layout::Layout;
use tachyon_common::limits::{SEARCH_SLOTS, THREAD_CACHE_SLOTS};
use tachyon_common::process::{Life, ProcessEntry};
use tachyon_common::walk::{self, OwnStack, ThreadBuffer, ThreadPointer, ThreadSearch};

/// The id of a task's process as the profiler's pid namespace numbers it; 0: not visible from there.
#[inline(always)]
pub fn tgid(task: KernelPtr) -> u32 {
    if config!(own_pid_ns) == 0 {
        return task.read(config!(task_tgid));
    }
    let leader = task.follow(config!(task_group_leader));
    match visible_number(leader) {
        // SAFETY: an integer, copied; a value that is replaced meanwhile is one of a process that is gone.
        0 => unsafe { LEADERS.get(&leader.0).copied().unwrap_or(0) },
        number => number,
    }
}

/// The id of the running process, of which the kernel has told its own numbers: the other thing that [`tgid`] reads.
#[inline(always)]
pub fn own_tgid(pid_tgid: u64) -> u32 {
    if config!(own_pid_ns) == 0 { (pid_tgid >> 32) as u32 } else { tgid(KernelPtr::current_task()) }
}

/// The id of the running thread as the profiler's pid namespace numbers it; 0: not visible from there, or not any more.
#[inline(always)]
pub fn own_tid(task: KernelPtr, pid_tgid: u64) -> u32 {
    if config!(own_pid_ns) == 0 { pid_tgid as u32 } else { visible_number(task) }
}

/// The id of any thread as the profiler's pid namespace numbers it; 0: not visible from there.
#[inline(always)]
pub fn tid(task: KernelPtr) -> u32 {
    if config!(own_pid_ns) == 0 { task.read(config!(task_pid)) } else { visible_number(task) }
}

/// The number that the profiler's namespace gives the pid of a task (`pid_nr_ns()`). Its own level is not known, so
/// the namespaces are searched from the innermost outwards: a process beside the profiler is found at once, one of
/// the host is refused at once.
#[inline(always)]
fn visible_number(task: KernelPtr) -> u32 {
    let pid = task.follow(config!(task_thread_pid));
    if pid.0 == 0 {
        return 0;
    }
    let mut level = pid.read::<u32>(config!(pid_level)) & 63;
    // A namespace is nested at most 32 deep (`MAX_PID_NS_LEVEL`).
    let mut steps = 0;
    while steps <= 32 {
        steps += 1;
        let upid = KernelPtr(pid.0.wrapping_add(u64::from(config!(pid_numbers) + level * config!(upid_size))));
        if upid.follow(config!(upid_ns)).read::<u32>(config!(pid_ns_inum)) == config!(own_pid_ns) {
            // `upid.nr` is the first field of its structure.
            return upid.read(0);
        }
        if level == 0 {
            break;
        }
        level -= 1;
    }
    0
}

/// The thread's id in its innermost pid namespace, of a thread that has the id `tid` in the profiler's.
#[inline(always)]
pub fn innermost_tid(task: KernelPtr, process: &mut Life, tid: u32) -> u32 {
    if process.same_numbers != 0 {
        return tid;
    }
    let pid = task.follow(config!(task_thread_pid));
    // A namespace is nested at most 32 deep (`MAX_PID_NS_LEVEL`). `upid.nr` is the first field of its structure.
    let level = pid.read::<u32>(config!(pid_level)) & 63;
    // The threads of a process are all in one namespace, which it never leaves.
    if level == 0 && pid.0 != 0 && config!(own_pid_ns) == 0 {
        process.same_numbers = 1;
    }
    pid.read(config!(pid_numbers).wrapping_add(level.wrapping_mul(config!(upid_size))))
}

/// What must not have changed since a thread state was found to be the only match (up to 3.11): threads and
/// interpreters started so far. 0 for versions that mark the right state themselves.
#[inline(always)]
pub fn token(layout: &Layout, process: &ProcessEntry, thread_starts: u64) -> u64 {
    if layout.status_bound_gilstate != 0 {
        return 0;
    }
    let next_id = walk::read_u64(&CurrentProcess, process.runtime, layout.runtime_next_interp_id).unwrap_or(0);
    (thread_starts << 32) | (next_id & 0xffff_ffff)
}

#[inline(always)]
fn slot(process: &ProcessEntry, tid: u32) -> Option<*mut CachedThread> {
    let hash = walk::mix(process.instance, u64::from(tid));
    THREADS.get_ptr_mut((hash as u32) & (THREAD_CACHE_SLOTS - 1))
}

/// The remembered thread state of a thread, if it still holds; then it has been copied, too.
#[inline(always)]
pub fn remembered(
    layout: &Layout,
    process: &ProcessEntry,
    tid: u32,
    (wanted, stack): (ThreadPointer, OwnStack),
    token: u64,
    thread: &mut ThreadBuffer,
) -> Option<u64> {
    let slot = slot(process, tid)?;
    // SAFETY: a pointer into a map value, checked by the lookup; racing writers can only tear it, which the checks
    // below find.
    let cached = unsafe { core::ptr::read_volatile(slot) };
    if cached.instance != process.instance || cached.tid != tid || cached.token != token || cached.tstate == 0 {
        return None;
    }
    walk::read_thread(&CurrentProcess, layout, cached.tstate, thread).ok()?;
    let holds = walk::verify_thread(layout, wanted, thread) && walk::runs_here(layout, cached.tstate, stack, thread);
    holds.then_some(cached.tstate)
}

/// Forgets a thread's state: another thread runs it.
#[inline(always)]
pub fn forget(process: &ProcessEntry, tid: u32) {
    if let Some(slot) = slot(process, tid) {
        // SAFETY: as in `remembered`.
        let tstate = unsafe { &raw mut (*slot).tstate };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(tstate, 0) };
    }
}

/// Remembers the only thread state of a thread.
#[inline(always)]
pub fn remember(process: &ProcessEntry, tid: u32, token: u64, tstate: u64) {
    if let Some(slot) = slot(process, tid) {
        let cached = CachedThread { instance: process.instance, tstate, token, tid, _pad: 0 };
        // SAFETY: as in `remembered`.
        unsafe { core::ptr::write_volatile(slot, cached) };
    }
}

#[inline(always)]
fn search_slot(process: &ProcessEntry, tid: u32) -> Option<*mut BrokenSearch> {
    let hash = walk::mix(process.instance, u64::from(tid));
    SEARCHES.get_ptr_mut((hash as u32) & (SEARCH_SLOTS - 1))
}

/// Puts a new search where this thread's last one was broken off, if it was. The place is kept: what is found may be
/// certain at this moment only (the holder of the GIL, up to 3.11), and is found there again at once.
#[inline(always)]
pub fn resume(search: &mut ThreadSearch, layout: &Layout, process: &ProcessEntry, tid: u32, token: u64) {
    let Some(slot) = search_slot(process, tid) else { return };
    // SAFETY: a pointer into a map value, checked by the lookup; what racing writers tear is put right by the checks of
    // `go_on_from`, or searched in vain.
    let broken = unsafe { core::ptr::read_volatile(slot) };
    if broken.instance != process.instance || broken.tid != tid || broken.token != token {
        return;
    }
    search.go_on_from(&CurrentProcess, layout, &broken.search);
}

/// Forgets where a search was broken off: going on came to nothing, and the next one starts over.
#[inline(always)]
pub fn start_over(process: &ProcessEntry, tid: u32) {
    if let Some(slot) = search_slot(process, tid) {
        // SAFETY: as in `resume`.
        let word = unsafe { &raw mut (*slot).tid };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(word, 0) };
    }
}

/// Remembers where a search was broken off.
#[inline(always)]
pub fn break_off(search: &ThreadSearch, process: &ProcessEntry, tid: u32, token: u64) {
    if let Some(slot) = search_slot(process, tid) {
        let broken = BrokenSearch { instance: process.instance, token, search: *search, tid, _pad: 0 };
        // SAFETY: as in `resume`.
        unsafe { core::ptr::write_volatile(slot, broken) };
    }
}
