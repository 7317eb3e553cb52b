//! What the profiler may still do once it samples: capabilities that are no longer needed are dropped.

use caps::errors::CapsError;
use caps::{CapSet, Capability, CapsHashSet};

/// What a running recording uses.
const KEPT: [Capability; 9] = [
    // Map operations, which before Linux 5.19 are refused without it if unprivileged BPF is switched off.
    Capability::CAP_BPF,
    // Processes that start later, of other users: their memory, mappings and files.
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
    // The same for deleted libraries (`/proc/PID/map_files`).
    Capability::CAP_CHECKPOINT_RESTORE,
    // Further output files in a folder of the user who called sudo, with their ownership given to that user.
    Capability::CAP_DAC_OVERRIDE,
    Capability::CAP_FOWNER,
    Capability::CAP_CHOWN,
    // Names of kernel functions.
    Capability::CAP_SYSLOG,
    // SIGTERM is handed on to a command that runs as another user.
    Capability::CAP_KILL,
];

/// Drops, for the calling thread and the threads it will start, every capability that a running recording does not
/// need; above all `CAP_SYS_ADMIN`, and `CAP_PERFMON`, whose events are open by then.
///
/// # Errors
/// When the kernel refuses (a seccomp filter can).
pub fn drop_privileges() -> Result<(), CapsError> {
    keep(&[])
}

/// Lets the calling thread run before other programs' threads, where that is allowed (`CAP_SYS_NICE`, which is dropped
/// afterwards). For the thread that follows processes: on a host whose CPUs are all busy, a process of 50 ms would
/// otherwise be over before it is looked at. Among other sessions it counts for little where the kernel groups threads by
/// session (`kernel.sched_autogroup_enabled`).
pub fn make_urgent() {
    const NICE: i32 = -10;
    // SAFETY: setpriority(2) takes numbers only; on Linux 0 means the calling thread.
    let _refused = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Lets the calling thread run as soon as it can, before every ordinary thread of the host: the lowest of the real-time
/// priorities, or [`make_urgent`] where that is refused. Only for a thread that does little and never waits for another.
pub fn make_immediate() {
    // The kernel's `struct sched_param`, which is this number alone. (musl's is longer, and its function never asks the kernel.)
    let lowest: libc::c_int = 1;
    // Threads started by such a thread are ordinary ones.
    let policy = libc::SCHED_RR | libc::SCHED_RESET_ON_FORK;
    // SAFETY: the parameter outlives the call; 0 means the calling thread.
    if unsafe { libc::syscall(libc::SYS_sched_setscheduler, 0, policy, &raw const lowest) } != 0 {
        make_urgent();
    }
}

/// As [`drop_privileges`], for a thread that attaches the sampling event anew: it keeps `CAP_PERFMON`, and if
/// `perf_event_paranoid` is above 2, as on Debian, `CAP_SYS_ADMIN`, which Debian's kernel requires instead.
///
/// # Errors
/// When the kernel refuses (a seccomp filter can).
pub fn drop_privileges_but_sampling() -> Result<(), CapsError> {
    let paranoid = std::fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    if paranoid.trim().parse().is_ok_and(|level: i32| level > 2) {
        keep(&[Capability::CAP_PERFMON, Capability::CAP_SYS_ADMIN])
    } else {
        keep(&[Capability::CAP_PERFMON])
    }
}

fn keep(also: &[Capability]) -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let wanted = |capability: &Capability| KEPT.contains(capability) || also.contains(capability);
    let kept: CapsHashSet = permitted.into_iter().filter(wanted).collect();
    let effective = caps::read(None, CapSet::Effective)?;
    caps::set(None, CapSet::Inheritable, &CapsHashSet::default())?;
    caps::set(None, CapSet::Effective, &effective.intersection(&kept).copied().collect())?;
    caps::set(None, CapSet::Permitted, &kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_attaches_anew_keeps_its_right() {
        let before = caps::read(None, CapSet::Permitted).expect("readable");
        let after = std::thread::spawn(|| {
            drop_privileges_but_sampling().expect("dropping is always allowed");
            caps::read(None, CapSet::Permitted).expect("readable")
        });
        let after = after.join().expect("the thread ends well");
        assert_eq!(after.contains(&Capability::CAP_PERFMON), before.contains(&Capability::CAP_PERFMON));
        assert!(!after.contains(&Capability::CAP_NET_ADMIN), "{after:?}");
    }

    #[test]
    fn a_thread_drops_for_itself() {
        let before = caps::read(None, CapSet::Permitted).expect("readable");
        let after = std::thread::spawn(|| {
            drop_privileges().expect("dropping is always allowed");
            caps::read(None, CapSet::Permitted).expect("readable")
        });
        let after = after.join().expect("the thread ends well");
        assert!(after.is_subset(&before) && after.iter().all(|capability| KEPT.contains(capability)), "{after:?}");
        assert_eq!(caps::read(None, CapSet::Permitted).expect("readable"), before);
    }
}
