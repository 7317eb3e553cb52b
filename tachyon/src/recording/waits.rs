//! What a thread waited for, and the account of waits.

use crate::kernel::WaitTotals;
use crate::profile::{FrameId, Profile, SPECIAL_FILENAME, Wait};
use crate::remote::RemoteProcess;
use crate::report::{CauseReport, WallReport};
use crate::snapshot::ThreadStack;
use crate::types::RemoteAddr;
use std::collections::{BTreeMap, HashMap};
use std::fs::read_link;
use tachyon_common::event::WaitFacts;
use tachyon_common::stop::LossCause;
use tachyon_common::wait::NOT_SEEN;

/// What waits came to, in ticks.
#[derive(Clone, Debug, Default)]
pub(super) struct Waited {
    /// Of records that arrived.
    pub received: u64,
    /// Those of them that are in the file.
    pub stored: u64,
    /// In waits that lasted when the segment ended, and those of them whose stack could not be told.
    pub due_at_end: u64,
    pub unread: u64,
    /// Those that could not be written.
    pub write_errors: u64,
    /// By cause and by the frame that they are charged to.
    pub by_place: HashMap<(&'static str, FrameId), u64>,
    /// By process, an index into the profile's, and by cause.
    pub by_process: HashMap<u32, BTreeMap<&'static str, u64>>,
}

/// The cause of waits for a CPU.
pub(super) const FOR_A_CPU: &str = "cpu";

/// Bytes of `struct _gil_runtime_state` at most: two condition variables, two mutexes and four words or five
/// (`Include/internal/pycore_gil.h`, 3.8 to 3.15).
const GIL_BYTES: u64 = 224;

/// `TASK_UNINTERRUPTIBLE` (`include/linux/sched.h`): what is waited for comes soon, from a disk as a rule.
const UNINTERRUPTIBLE: u32 = 2;

/// What a thread waited for: a word of `docs/waiting.md`.
pub(crate) fn cause(pid: u32, facts: &WaitFacts) -> &'static str {
    // One that is in no system call can hardly have been asleep.
    let was_ready = facts.state & NOT_SEEN != 0 && facts.syscall < 0;
    if facts.state == 0 || was_ready {
        return FOR_A_CPU;
    }
    let first = facts.args[0];
    match facts.syscall {
        libc::SYS_futex | libc::SYS_futex_waitv => {
            if facts.gil != 0 && first.wrapping_sub(facts.gil) < GIL_BYTES {
                "gil"
            } else {
                "lock"
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

/// What `/proc` tells of the wait of a thread that does not run: nothing of its length. `gil`: address of its interpreter's.
pub(crate) fn of_sleeping(process: &RemoteProcess, thread: &ThreadStack, gil: Option<u64>) -> Option<WaitFacts> {
    let state = match thread.state? {
        'R' => return None,
        'D' => UNINTERRUPTIBLE,
        _ => 1,
    };
    let (syscall, args) = process.system_call(thread.tid?)?;
    let polled = process.read_u64(RemoteAddr(args[0])).unwrap_or(0);
    Some(WaitFacts { syscall, args, polled, state, gil: gil.unwrap_or(0), ..WaitFacts::default() })
}

/// What is told of a wait beside its cause and stack.
pub(crate) fn told(facts: &WaitFacts) -> Wait {
    // One that was preempted was in no system call, whatever its registers say.
    let syscall = u32::try_from(facts.syscall).ok().filter(|_| facts.state != 0);
    let is_futex = syscall.is_some_and(|call| libc::c_long::from(call) == libc::SYS_futex);
    Wait {
        weight: u64::from(facts.weight),
        since_us: facts.began_ns / 1000,
        wait_us: facts.ended_ns.saturating_sub(facts.began_ns) / 1000,
        syscall,
        futex: is_futex.then_some(facts.args[0]),
    }
}

/// Of a `select`: on no descriptor it is a sleep, as Python's was up to 3.10.
fn poll(descriptors: u64) -> &'static str {
    if descriptors == 0 { "sleep" } else { "poll" }
}

/// Of a `poll`: on one descriptor it is what that is, for Python's sockets with a timeout wait there.
fn polled(pid: u32, facts: &WaitFacts) -> &'static str {
    match facts.args[1] {
        0 => "sleep",
        1 => descriptor(pid, facts.polled & 0xffff_ffff).unwrap_or("poll"),
        _ => "poll",
    }
}

/// What a descriptor is, as far as it is open still.
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

/// The account of waits: `ticks_due = stored + Σ loss`. And by how much counts of the same differ.
pub(super) fn account(totals: &WaitTotals, waited: &Waited, profile: &Profile) -> (WallReport, u64) {
    let WaitTotals { before, walked } = totals;
    let mut loss: BTreeMap<String, u64> =
        LossCause::ALL.into_iter().map(|cause| (cause.name().to_owned(), walked.loss[cause as usize])).collect();
    let mut add = |cause: &str, ticks: u64| *loss.entry(cause.to_owned()).or_default() += ticks;
    add("too_many", before.too_many);
    add("not_kicked", before.not_kicked);
    add("unread", waited.unread);
    add("not_met", before.not_met);
    add(LossCause::WriteError.name(), waited.write_errors);
    add(LossCause::BadRecord.name(), walked.sent.saturating_sub(waited.received));
    add(LossCause::Internal.name(), walked.ran.saturating_sub(walked.ended()));
    let inconsistent = totals.met().abs_diff(before.due)
        + walked.ran.abs_diff(walked.ended())
        + walked.sent.abs_diff(waited.received)
        + (waited.received + waited.due_at_end).abs_diff(waited.stored + waited.write_errors + waited.unread);
    let report = WallReport {
        method: "kick".to_owned(),
        ticks_due: before.due + waited.due_at_end,
        stored: waited.stored,
        loss,
        causes: causes(waited, profile),
    };
    (report, inconsistent)
}

fn causes(waited: &Waited, profile: &Profile) -> BTreeMap<String, CauseReport> {
    let mut causes: BTreeMap<String, CauseReport> = BTreeMap::new();
    for (&(cause, frame), &ticks) in &waited.by_place {
        let known = causes.entry(cause.to_owned()).or_default();
        known.stored += ticks;
        if ticks > known.at_place {
            (known.place, known.at_place) = (place(profile, frame), ticks);
        }
    }
    causes
}

/// A frame as people name it: `file:line function`.
fn place(profile: &Profile, frame: FrameId) -> String {
    let frame = profile.frames.get(frame);
    let (file, function) = (profile.strings.get(frame.filename), profile.strings.get(frame.function));
    if file == SPECIAL_FILENAME {
        return function.to_owned();
    }
    let name = file.rsplit('/').next().unwrap_or(file);
    format!("{name}:{} {function}", frame.lineno)
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
    fn causes() {
        assert_eq!(of(libc::SYS_futex, [0x1000 + 40, 0, 0]), "gil");
        assert_eq!(of(libc::SYS_futex, [0x1000 + GIL_BYTES, 0, 0]), "lock");
        assert_eq!(of(libc::SYS_futex, [0xfff, 0, 0]), "lock");
        assert_eq!(of(libc::SYS_clock_nanosleep, [0; 3]), "sleep");
        assert_eq!(of(libc::SYS_pselect6, [0; 3]), "sleep");
        assert_eq!(of(libc::SYS_pselect6, [4, 0, 0]), "poll");
        assert_eq!(of(libc::SYS_wait4, [0; 3]), "child");
        assert_eq!(of(-1, [0; 3]), "other");
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
