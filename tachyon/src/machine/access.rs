//! Why a process's memory may not be read, and the remedy.
//!
//! The kernel only says "operation not permitted". The rules behind it (`ptrace_may_access` in kernel/ptrace.c, and
//! Yama, Documentation/admin-guide/LSM/Yama.rst) are few, so the one that applied can mostly be worked out from outside.

use super::preflight::{has, target_hint};
use crate::remote::RemoteError;
use crate::types::Pid;
use caps::Capability;
use std::fs;
use std::os::unix::fs::MetadataExt as _;

/// What the rules depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Access {
    /// The profiler has `CAP_SYS_PTRACE`.
    capable: bool,
    /// Owner of the process, as `/proc/PID` shows it: root for an undumpable one.
    owner: u32,
    /// Real user of the process.
    user: Option<u32>,
    /// The profiler's own user.
    own: u32,
    /// `kernel.yama.ptrace_scope`; `None` without Yama.
    yama: Option<u32>,
}

/// The remedy for a process that may not be read.
#[must_use]
pub fn hint(pid: Pid) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let user = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_ascii_whitespace().next()?.parse().ok());
    let yama = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok();
    Access {
        capable: has(Capability::CAP_SYS_PTRACE),
        owner: fs::metadata(format!("/proc/{pid}")).map_or(0, |metadata| metadata.uid()),
        user,
        own: nix::unistd::getuid().as_raw(),
        yama: yama.and_then(|scope| scope.trim().parse().ok()),
    }
    .hint()
}

/// Why a process that has mapped an unreadable file cannot be identified, with the remedy; `None` if none is known.
#[must_use]
pub fn file_problem(pid: Pid, error: RemoteError) -> Option<String> {
    if error.is_denied() && !has(Capability::CAP_SYS_PTRACE) {
        return Some(format!("it cannot be read; {}", hint(pid)));
    }
    // The process itself can be read: the obstacle is on the way to the file.
    let error = anyhow::Error::new(error);
    target_hint(&error).map(|mend| format!("{error}; {mend}"))
}

impl Access {
    fn hint(self) -> String {
        const NEEDS: &str = "needs root or CAP_SYS_PTRACE; in a container --cap-add SYS_PTRACE";
        match (self.yama, self.user) {
            (Some(3), _) => {
                "kernel.yama.ptrace_scope is 3, which lets nobody read another process until the next boot \
                             with a smaller one"
                    .to_owned()
            }
            _ if self.capable => "CAP_SYS_PTRACE is there: the process is in a parent user namespace, or a security \
                                  module or a seccomp filter (of a container?) forbids it"
                .to_owned(),
            (_, Some(user)) if user != self.own => format!("it runs as uid {user}, you are {}: {NEEDS}", self.own),
            (Some(scope @ 1..), _) => {
                let who = if scope == 1 {
                    "lets a user read only processes started by the reader"
                } else {
                    "lets only CAP_SYS_PTRACE read"
                };
                format!(
                    "kernel.yama.ptrace_scope is {scope}, which {who}: {NEEDS}, or `sysctl kernel.yama.ptrace_scope=0`"
                )
            }
            _ if self.owner != self.own => {
                format!("it changed its user or has capabilities, so that its memory is protected: {NEEDS}")
            }
            _ => NEEDS.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_that_hit_is_named() {
        let same = Access { capable: false, owner: 1000, user: Some(1000), own: 1000, yama: None };
        for (access, named) in [
            (
                Access { user: Some(0), owner: 0, ..same },
                "it runs as uid 0, you are 1000: needs root or CAP_SYS_PTRACE; ",
            ),
            (Access { yama: Some(1), ..same }, "ptrace_scope is 1, which lets a user read only processes started"),
            (Access { yama: Some(2), ..same }, "ptrace_scope is 2, which lets only CAP_SYS_PTRACE read"),
            (Access { yama: Some(3), capable: true, ..same }, "ptrace_scope is 3"),
            (Access { owner: 0, ..same }, "it changed its user or has capabilities"),
            (Access { capable: true, ..same }, "CAP_SYS_PTRACE is there"),
            (same, "needs root or CAP_SYS_PTRACE"),
        ] {
            assert!(access.hint().contains(named), "{access:?}: {}", access.hint());
        }
    }
}
