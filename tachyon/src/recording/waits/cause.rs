//! What a thread waited for, as a word from `docs/waiting.md`: found from its state, its system call, and the call's
//! arguments.

use crate::remote::{Blocked, RemoteProcess};
use crate::snapshot::{MixedFrame, ThreadStack};
use crate::types::RemoteAddr;
use std::fs::read_link;
use tachyon_common::event::WaitFacts;
use tachyon_common::unwind::StackBuffer;
use tachyon_common::wait::{GIL_BYTES, GIL_REFERENCES, NEAR_STACK, NOT_SEEN};
use tachyon_common::walk;

/// The cause of waits for a CPU.
pub(in crate::recording) const FOR_A_CPU: &str = "cpu";
/// Of waits for the GIL.
pub(in crate::recording) const GIL: &str = "gil";
/// Of waits for any other futex.
pub(in crate::recording) const LOCK: &str = "lock";
/// Of threads that another one has stopped all at once, and of that one while they still run (free-threaded builds).
const STOP_THE_WORLD: &str = "stop_the_world";

/// `TASK_UNINTERRUPTIBLE` (`include/linux/sched.h`): what is waited for comes soon, from a disk as a rule.
const UNINTERRUPTIBLE: u32 = 2;
/// `__TASK_STOPPED` and `__TASK_TRACED` (`include/linux/sched.h`): a signal or a debugger has stopped it.
const STOPPED: u32 = 4 | 8;

/// What a thread waited for, as a word from `docs/waiting.md`.
pub(crate) fn cause(pid: u32, facts: &WaitFacts) -> &'static str {
    // A thread that is in no system call can hardly have been asleep.
    let was_ready = facts.state & NOT_SEEN != 0 && facts.syscall < 0;
    if facts.state == 0 || was_ready {
        return FOR_A_CPU;
    }
    let first = facts.args[0];
    match facts.syscall {
        _ if facts.state & STOPPED != 0 => "stopped",
        libc::SYS_futex | libc::SYS_futex_waitv => {
            if is_for_gil(facts) {
                GIL
            } else {
                LOCK
            }
        }
        libc::SYS_clone | libc::SYS_clone3 | libc::SYS_wait4 | libc::SYS_waitid => "child",
        #[cfg(target_arch = "x86_64")]
        libc::SYS_vfork => "child",
        _ if facts.state & UNINTERRUPTIBLE != 0 => "disk",
        libc::SYS_nanosleep | libc::SYS_clock_nanosleep => "sleep",
        #[cfg(target_arch = "x86_64")]
        libc::SYS_select => poll(first),
        libc::SYS_pselect6 => poll(first),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_poll => polled(pid, facts),
        libc::SYS_ppoll => polled(pid, facts),
        #[cfg(target_arch = "x86_64")]
        libc::SYS_epoll_wait => "poll",
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 => "poll",
        libc::SYS_read | libc::SYS_readv | libc::SYS_write | libc::SYS_writev => {
            descriptor(pid, first).unwrap_or("other")
        }
        libc::SYS_accept | libc::SYS_accept4 | libc::SYS_connect | libc::SYS_recvfrom | libc::SYS_recvmsg => "socket",
        libc::SYS_recvmmsg | libc::SYS_sendto | libc::SYS_sendmsg | libc::SYS_sendmmsg => "socket",
        libc::SYS_fsync | libc::SYS_fdatasync | libc::SYS_pread64 | libc::SYS_pwrite64 => "disk",
        _ => "other",
    }
}

/// Whether the futex is the GIL's.
fn is_for_gil(facts: &WaitFacts) -> bool {
    facts.gil_is_near >= GIL_REFERENCES || (facts.gil != 0 && facts.args[0].wrapping_sub(facts.gil) < GIL_BYTES)
}

/// What a futex is, as far as the waiting functions show, leaf first, each as `object!function`. For a futex that belongs to
/// nothing known (free-threaded builds and musl have them on the waiter's own stack).
pub(in crate::recording) fn told_by_native<'a>(
    names: impl Iterator<Item = &'a str>,
    free_threaded: bool,
) -> Option<&'static str> {
    // The C library's functions, the lock's own, then the one that asked for it.
    const LOOKED_AT: usize = 12;
    names.take(LOOKED_AT).find_map(|name| {
        let function = name.rsplit_once('!').map_or(name, |(_, function)| function);
        let function = function.split('.').next().unwrap_or(function);
        match function {
            // `Python/ceval_gil.c`; the free-threaded build's, where its GIL is switched on.
            "take_gil" | "drop_gil" | "drop_gil_impl" | "_PyEval_AcquireLock" => Some(GIL),
            // `Python/pystate.c`: a thread that attaches to the interpreter waits until that is allowed, or stops the others and waits
            // for them.
            "_PyThreadState_Attach" | "PyEval_RestoreThread" | "PyEval_AcquireThread" if !free_threaded => Some(GIL),
            "tstate_wait_attach" | "_PyThreadState_Attach" | "_PyThreadState_Suspend" | "stop_the_world" => {
                free_threaded.then_some(STOP_THE_WORLD)
            }
            _ => None,
        }
    })
}

/// What a thread that was read from outside waits for. If a futex belongs to nothing known, the waiting functions show what it is.
pub(crate) fn cause_with_stack(pid: u32, facts: &WaitFacts, thread: &ThreadStack, free_threaded: bool) -> &'static str {
    let cause = cause(pid, facts);
    let Some(Ok(mixed)) = thread.mixed.as_ref().filter(|_| cause == LOCK) else { return cause };
    let native = mixed.frames.iter().filter_map(|frame| match frame {
        MixedFrame::Native(name) => name.function.as_deref(),
        MixedFrame::Python(_) => None,
    });
    told_by_native(native, free_threaded).unwrap_or(cause)
}

/// What `/proc` says about the wait of a thread that does not run, which excludes its length. `gil`: address of its
/// interpreter's.
pub(crate) fn of_sleeping(process: &RemoteProcess, thread: &ThreadStack, gil: Option<u64>) -> Option<WaitFacts> {
    let state = match thread.state? {
        'R' => return None,
        'D' => UNINTERRUPTIBLE,
        'T' | 't' => STOPPED,
        _ => 1,
    };
    let (syscall, args) = process.system_call(thread.tid?)?;
    let polled = process.read_u64(RemoteAddr(args[0])).unwrap_or(0);
    let facts = WaitFacts { syscall, args, polled, state, gil: gil.unwrap_or(0), ..WaitFacts::default() };
    let gil_is_near = references_to_gil(process, thread.tid?, &facts);
    Some(WaitFacts { gil_is_near, ..facts })
}

/// If the futex lies on the thread's own stack, how often the memory after it refers to the GIL, as the kernel side
/// counts it.
fn references_to_gil(process: &RemoteProcess, tid: u32, facts: &WaitFacts) -> u32 {
    if facts.gil == 0 || facts.syscall != libc::SYS_futex {
        return 0;
    }
    let Some(Blocked::At { sp, .. }) = process.blocked(tid) else { return 0 };
    if facts.args[0].wrapping_sub(sp) >= NEAR_STACK {
        return 0;
    }
    let references = walk::references(process, &mut StackBuffer::default(), facts.args[0] & !7, facts.gil);
    u32::try_from(references).unwrap_or(u32::MAX)
}

/// The cause of a `select`: without descriptors it is a sleep, as Python's was up to 3.10.
fn poll(descriptors: u64) -> &'static str {
    if descriptors == 0 { "sleep" } else { "poll" }
}

/// The cause of a `poll`: with one descriptor, whatever that is, because Python's sockets with a timeout wait there.
fn polled(pid: u32, facts: &WaitFacts) -> &'static str {
    match facts.args[1] {
        0 => "sleep",
        1 => descriptor(pid, facts.polled & 0xffff_ffff).unwrap_or("poll"),
        _ => "poll",
    }
}

/// What a descriptor is, if it is still open.
fn descriptor(pid: u32, number: u64) -> Option<&'static str> {
    let link = read_link(format!("/proc/{pid}/fd/{number}")).ok()?;
    let name = link.to_str()?;
    if name.starts_with("socket:") {
        Some("socket")
    } else if name.starts_with("pipe:") {
        Some("pipe")
    } else if name.starts_with('/') && !name.starts_with("/dev/") {
        // A named pipe has a name like any file.
        let kind = std::fs::metadata(format!("/proc/{pid}/fd/{number}")).ok()?;
        Some(if std::os::unix::fs::FileTypeExt::is_fifo(&kind.file_type()) { "pipe" } else { "disk" })
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_left_before_anybody_looked_slept_in_a_call_or_was_ready() {
        let of = |state, syscall| {
            cause(std::process::id(), &WaitFacts { state, syscall, gil: 0x1000, ..WaitFacts::default() })
        };
        assert_eq!(of(1 | NOT_SEEN, -1), FOR_A_CPU);
        assert_eq!(of(1 | NOT_SEEN, libc::SYS_nanosleep), "sleep");
        assert_eq!(of(1, -1), "other");
    }

    fn of(syscall: libc::c_long, args: [u64; 3]) -> &'static str {
        cause(std::process::id(), &WaitFacts { state: 1, syscall, args, gil: 0x1000, ..WaitFacts::default() })
    }

    #[test]
    fn functions_tell_whose_a_futex_is() {
        let told = |names: &[&str], free_threaded| told_by_native(names.iter().copied(), free_threaded);
        let musl = ["ld-musl-x86_64.so.1!__syscall_cp_asm", "libpython3.13.so.1.0!take_gil", "libpython3.13.so.1.0!f"];
        assert_eq!(told(&musl, false), Some(GIL));
        let attaching = [
            "libc.so.6!__futex_abstimed_wait_common64",
            "python3.14t!_PySemaphore_Wait",
            "python3.14t!_PyThreadState_Attach",
        ];
        assert_eq!(told(&attaching, true), Some(STOP_THE_WORLD));
        assert_eq!(told(&attaching, false), Some(GIL));
        assert_eq!(told(&["python3.14t!stop_the_world.isra.0"], true), Some(STOP_THE_WORLD));
        assert_eq!(told(&["libc.so.6!futex", "python3.14t!_PyMutex_LockTimed"], true), None);
        let far = ["a!b"; 12].iter().copied().chain(["python!take_gil"]);
        assert_eq!(told_by_native(far, false), None, "that one waits for something else");
    }

    #[test]
    fn a_thread_that_is_stopped_waits_for_nothing_else() {
        let stopped = WaitFacts { state: 4, syscall: libc::SYS_futex, ..WaitFacts::default() };
        assert_eq!(cause(1, &stopped), "stopped");
    }

    #[test]
    fn causes() {
        assert_eq!(of(libc::SYS_futex, [0x1000 + 40, 0, 0]), "gil");
        assert_eq!(of(libc::SYS_futex, [0x1000 + GIL_BYTES, 0, 0]), "lock");
        assert_eq!(of(libc::SYS_futex, [0xfff, 0, 0]), "lock");
        assert_eq!(of(libc::SYS_clock_nanosleep, [0; 3]), "sleep");
        assert_eq!(of(libc::SYS_pselect6, [0; 3]), "sleep");
        assert_eq!(of(libc::SYS_pselect6, [4, 0, 0]), "poll");
        assert_eq!(of(libc::SYS_wait4, [0; 3]), "child");
        assert_eq!(of(-1, [0; 3]), "other");
        let near =
            WaitFacts { state: 1, syscall: libc::SYS_futex, gil: 0x1000, gil_is_near: 2, ..WaitFacts::default() };
        assert_eq!(cause(1, &near), "gil");
        let queued = WaitFacts { syscall: libc::SYS_futex, ..WaitFacts::default() };
        assert_eq!(cause(1, &queued), "cpu");
    }

    #[test]
    fn a_descriptor_is_what_it_leads_to() {
        use std::os::fd::AsRawFd as _;
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let (pipe, _writer) = std::io::pipe().unwrap();
        let number = |fd: i32| u64::try_from(fd).unwrap();
        assert_eq!(of(libc::SYS_read, [number(socket.as_raw_fd()), 0, 0]), "socket");
        assert_eq!(of(libc::SYS_read, [number(pipe.as_raw_fd()), 0, 0]), "pipe");
        assert_eq!(of(libc::SYS_read, [u64::from(u32::MAX), 0, 0]), "other");
    }
}
