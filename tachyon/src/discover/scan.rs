//! All processes of the host, once, from `/proc`: the first step of a recording.
//!
//! At most one small read for each process (its `stat`), nothing that walks memory: mappings and command lines are read
//! later, and only for processes that are wanted.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use crate::remote::{RemoteError, RemoteProcess, Stat};
use crate::types::Pid;

/// A process as `/proc` showed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScannedProcess {
    /// Its pid in the profiler's own namespace.
    pub pid: Pid,
    /// Name, parent, start, and whether it is a kernel thread.
    pub stat: Stat,
}

impl ScannedProcess {
    /// Whether it has memory that could hold an interpreter: it is not a kernel thread and has not ended.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        !self.stat.kernel_thread && !matches!(self.stat.state, 'Z' | 'X' | 'x')
    }
}

/// Lists all processes, in order of pid. Those that end meanwhile are left out, as are those that `/proc` hides
/// (`hidepid`).
///
/// # Errors
/// When `/proc` cannot be listed.
pub fn scan() -> io::Result<Vec<ScannedProcess>> {
    Ok(pids()?.into_iter().filter_map(|pid| look_at(pid).ok()).collect())
}

/// Lists the pids of all processes, in order.
///
/// # Errors
/// When `/proc` cannot be listed.
pub fn pids() -> io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        found.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()).map(Pid));
    }
    found.sort_unstable();
    Ok(found)
}

/// Those of `processes` that descend from `root`, in order of pid, without `root` itself.
#[must_use]
pub fn descendants(processes: &[ScannedProcess], root: Pid) -> Vec<Pid> {
    let mut found = BTreeSet::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        for child in processes.iter().filter(|process| process.stat.parent == parent && process.pid != root) {
            if found.insert(child.pid) {
                open.push(child.pid);
            }
        }
    }
    found.into_iter().collect()
}

/// The processes that descend from `root` now, in order of pid, without `root` itself: from the lists of their children that the kernel
/// has for each of their threads (`/proc/PID/task/TID/children`), or from all processes of the host where it has none
/// (`CONFIG_PROC_CHILDREN`). While siblings end, one may be left out (proc_tid_children(5)).
#[must_use]
pub fn family(root: Pid) -> Vec<Pid> {
    if !Path::new("/proc/thread-self/children").exists() {
        return descendants(&scan().unwrap_or_default(), root);
    }
    let mut found = BTreeSet::new();
    let mut open = vec![root];
    while let Some(parent) = open.pop() {
        let process = RemoteProcess::at(parent);
        // A process or thread that has ended has none.
        let children = process.thread_ids().unwrap_or_default().into_iter();
        let children = children.flat_map(|tid| process.child_ids(tid).unwrap_or_default()).map(Pid);
        open.extend(children.filter(|&child| child != root && found.insert(child)));
    }
    found.into_iter().collect()
}

/// Reads one process's `stat`.
///
/// # Errors
/// When the process is gone.
pub fn look_at(pid: Pid) -> Result<ScannedProcess, RemoteError> {
    Ok(ScannedProcess { pid, stat: RemoteProcess::at(pid).stat()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_and_its_children_are_found() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
        let found = scan().expect("/proc can be listed");
        let own = Pid(std::process::id());
        let me = found.iter().find(|process| process.pid == own).expect("this process runs");
        assert!(me.has_memory());
        assert_eq!(*me, look_at(own).map(|now| ScannedProcess { stat: me.stat.clone(), ..now }).expect("it runs"));
        assert!(descendants(&found, own).contains(&Pid(child.id())));
        assert!(!descendants(&found, Pid(child.id())).contains(&own));
        // Grandchildren, too.
        let mut shell = std::process::Command::new("sh").args(["-c", "sleep 60; true"]).spawn().expect("a shell runs");
        let shell_pid = Pid(shell.id());
        let grandchild = std::iter::repeat_with(|| family(shell_pid)).find_map(|all| all.first().copied());
        let grandchild = grandchild.expect("it has a child sooner or later");
        let all = family(own);
        assert!(all.is_sorted() && [child.id(), shell.id(), grandchild.0].iter().all(|&pid| all.contains(&Pid(pid))));
        assert!(!all.contains(&own) && family(grandchild).is_empty());
        shell.kill().expect("it runs");
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(grandchild.0.cast_signed()), nix::sys::signal::SIGKILL)
            .expect("it runs");
        shell.wait().expect("it ends");
        child.kill().expect("it runs");
        // Not waited for: a zombie.
        while look_at(Pid(child.id())).expect("not waited for").has_memory() {
            std::thread::yield_now();
        }
        child.wait().expect("it ends");
        assert!(look_at(Pid(child.id())).is_err());
    }

    #[test]
    fn cycles_of_parents_end() {
        let process = |pid, parent| ScannedProcess {
            pid: Pid(pid),
            stat: Stat { comm: "a".into(), state: 'S', parent: Pid(parent), kernel_thread: false, start_ticks: 0 },
        };
        // A list that is not taken at one instant can contain a pid that was reused.
        let found = [process(1, 3), process(2, 1), process(3, 2), process(4, 9)];
        assert_eq!(descendants(&found, Pid(1)), [Pid(2), Pid(3)]);
    }
}
