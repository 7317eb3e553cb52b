//! Which processes at the start, and what the rest of the host does beside them.

use super::follow::{Follower, lock};
use super::registry::{Registry, cpu_time_ns};
use super::samples::Made;
use crate::cli::access;
use crate::cli::account::BusyChildren;
use crate::cli::command::PreparedCommand;
use crate::cli::doctor::RunningInterpreter;
use crate::cli::failure::Failure;
use crate::cli::plan::{Plan, Targets};
use crate::cli::preflight::target_hint;
use crate::discover;
use crate::inspect::{self, ElfCache, InspectError};
use crate::remote::{RemoteError, RemoteProcess};
use crate::types::{Pid, RemoteAddr};
use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

/// Gives every process that is wanted from the start its entry.
///
/// # Errors
/// When a process asked for by pid is not a CPython that can be profiled.
pub(super) fn select(
    targets: &Targets,
    command: Option<&PreparedCommand>,
    follower: &mut Follower,
    registry: &Mutex<Registry>,
) -> anyhow::Result<()> {
    match targets {
        Targets::Pids(pids) => {
            for &pid in pids {
                if !follower.admits(pid).unwrap_or(true) {
                    let what = format!("pid {pid} ({}) is not among the processes asked for", comm(pid));
                    return Err(Failure::new(what)
                        .with_hint("--cgroup, --container, --comm and --uid hold for -p too: all of them must match")
                        .into());
                }
                match follower.adopt(pid.0) {
                    Ok(Some(_)) => {}
                    Ok(None) => {
                        return Err(Failure::new(format!("pid {pid} ({}) is not a Python process", comm(pid)))
                            .with_hint("it has no CPython mapped; `tachyon-bpf doctor -v` lists the Python processes")
                            .into());
                    }
                    Err(error) => {
                        let what = format!("cannot profile pid {pid} ({})", comm(pid));
                        let hint = target_hint(&error).unwrap_or_else(|| {
                            "`tachyon-bpf doctor -v` lists the Python processes and says of each whether it can be profiled"
                                .to_owned()
                        });
                        return Err(Failure::new(what).with_source(error).with_hint(hint).into());
                    }
                }
            }
        }
        Targets::Command { .. } => {
            if let Some(command) = command {
                follower.expect(command.pid().0)?;
            }
        }
        Targets::AllPython => follower.sweep(|follower| adopt_all(follower, registry))?,
    }
    Ok(())
}

/// Gives every process of the host its entry. Of most nothing is read but their mappings.
fn adopt_all(follower: &mut Follower, registry: &Mutex<Registry>) -> anyhow::Result<()> {
    let own = std::process::id();
    for pid in discover::pids()? {
        if pid.0 == own {
            follower.ignore(pid.0)?;
            continue;
        }
        let Err(error) = follower.adopt(pid.0) else { continue };
        match discover::look_at(pid) {
            // One process that cannot be profiled does not stop the others.
            Ok(process) if process.has_memory() => {
                lock(registry).refuse(format!("pid {pid}: {}", reason(pid, &error)));
            }
            Ok(_) => follower.ignore(pid.0)?,
            // One that is gone is no news.
            Err(_) => {}
        }
    }
    Ok(())
}

/// Why a process could not be looked at, with the mend where one is known.
fn reason(pid: Pid, error: &anyhow::Error) -> String {
    if let Some(InspectError::Process(denied)) = error.downcast_ref()
        && denied.is_denied()
    {
        let hint = target_hint(error).unwrap_or_else(|| access::hint(pid));
        return format!("it cannot be read; {hint}");
    }
    target_hint(error).map_or_else(|| error.to_string(), |hint| format!("{error}; {hint}"))
}

fn comm(pid: Pid) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    crate::cli::escape::escape(text.trim_end()).to_string()
}

/// Version of the header, as far as it is known: major, minor, micro; of several the newest.
pub(super) fn newest_version(registry: &Registry) -> Option<(u8, u8, u8)> {
    let newest = registry.python().filter_map(|(_, info)| info.last_python()).map(|(hex, _)| hex).max()?;
    let [major, minor, micro, _] = newest.to_be_bytes();
    Some((major, minor, micro))
}

/// Fills in what was not known yet when a process was first sampled.
pub(super) fn complete(made: &mut Made, registry: &Registry) {
    for (counts, process) in made.processes.iter().zip(&mut made.profile.processes) {
        let Some(info) = registry.get(counts.instance) else { continue };
        if process.python_version.is_empty() {
            // Of one that runs something else by now, or has never been more than a copy of its parent: what was sampled.
            info.last_python().map_or("", |(_, version)| version).clone_into(&mut process.python_version);
        }
        if process.cmdline.is_empty() {
            process.cmdline.clone_from(&info.cmdline);
        }
    }
    made.profile.meta.python_version = newest_version(registry).unwrap_or(made.profile.meta.python_version);
}

/// With `--all-python`: what was asked for, when no CPython was met that fits.
pub(super) fn nobody(plan: &Plan, registry: &Registry) -> Option<String> {
    let met = registry.python().next().is_some() || registry.forgotten > 0;
    (plan.targets == Targets::AllPython && !met).then(|| plan.filter.options())
}

/// CPU time of the targets' children when the recording starts, for "add --subprocesses".
pub(super) struct Children {
    at_start: HashMap<Pid, HashMap<Pid, u64>>,
}

/// Share of a core from which on a child counts as busy.
const BUSY: f64 = 0.05;

impl Children {
    /// Measures the children of processes whose children are not recorded.
    pub fn of(plan: &Plan) -> Self {
        let mut at_start = HashMap::new();
        if let Targets::Pids(pids) = &plan.targets
            && !plan.follow_children
        {
            for &pid in pids {
                let times = children(pid).map(|child| (child, cpu_time_ns(child.0).unwrap_or(0))).collect();
                at_start.insert(pid, times);
            }
        }
        Self { at_start }
    }

    /// How many Python children of each target were busy.
    pub fn busy(&self, duration: Duration) -> Vec<BusyChildren> {
        let threshold = duration.mul_f64(BUSY).as_nanos();
        let mut cache = ElfCache::default();
        let mut busy = Vec::new();
        for (&pid, before) in &self.at_start {
            let count = children(pid)
                .filter(|child| {
                    let used =
                        cpu_time_ns(child.0).unwrap_or(0).saturating_sub(before.get(child).copied().unwrap_or(0));
                    u128::from(used) > threshold && !self.at_start.contains_key(child) && is_python(*child, &mut cache)
                })
                .count();
            if count > 0 {
                busy.push(BusyChildren { pid, count: count as u64 });
            }
        }
        busy.sort_by_key(|children| children.pid);
        busy
    }
}

fn children(pid: Pid) -> impl Iterator<Item = Pid> {
    discover::descendants(&discover::scan().unwrap_or_default(), pid).into_iter()
}

fn is_python(pid: Pid, cache: &mut ElfCache) -> bool {
    RemoteProcess::open(pid)
        .is_ok_and(|process| matches!(inspect::inspect(&process, cache), Ok(inspect::Verdict::Python(_))))
}

/// Python processes that run now, for `doctor`: all of them, or those among `pids`, of which each gets an answer.
#[must_use]
pub fn running_interpreters(pids: &[Pid]) -> Vec<RunningInterpreter> {
    let mut cache = ElfCache::default();
    if pids.is_empty() {
        let scanned = discover::scan().unwrap_or_default();
        return scanned.iter().filter_map(|process| running_interpreter(process, &mut cache, false)).collect();
    }
    let mut answer = |&pid| match discover::look_at(pid) {
        Err(_) => RunningInterpreter::new(pid, "").with_problem("no process has this pid"),
        Ok(process) => running_interpreter(&process, &mut cache, true).unwrap_or_else(|| {
            RunningInterpreter::new(pid, process.stat.comm).with_problem("it is not a Python process")
        }),
    };
    pids.iter().map(&mut answer).collect()
}

/// What `doctor` says of a process; `None` when it is no Python. Where it cannot be known, as little as there is of one that
/// was `asked_for` or is called so.
fn running_interpreter(
    process: &discover::ScannedProcess,
    cache: &mut ElfCache,
    asked_for: bool,
) -> Option<RunningInterpreter> {
    if !process.has_memory() {
        return None;
    }
    let remote = RemoteProcess::open(process.pid).ok()?;
    let unreadable =
        |error: &RemoteError| error.is_denied().then(|| format!("it cannot be read; {}", access::hint(process.pid)));
    let found = RunningInterpreter::new(process.pid, &*process.stat.comm);
    match inspect::inspect(&remote, cache) {
        // Its mappings may be open to us where its memory is not (CAP_PERFMON is enough for them on newer kernels).
        Ok(inspect::Verdict::Python(interpreter)) => {
            let read = remote.read_array::<1>(RemoteAddr(interpreter.runtime));
            Some(RunningInterpreter {
                implementation: "CPython".to_owned(),
                python_version: interpreter.version_text(),
                free_threaded: interpreter.free_threaded(),
                problem: read.err().as_ref().and_then(unreadable),
                file: interpreter.path,
                ..found
            })
        }
        Ok(inspect::Verdict::Unsupported { implementation, reason }) => {
            let (implementation, version) = implementation.split_once(' ').unwrap_or((&implementation, ""));
            let (implementation, python_version) = (implementation.to_owned(), version.to_owned());
            Some(RunningInterpreter { implementation, python_version, ..found.with_problem(reason.to_string()) })
        }
        Err(InspectError::Process(error)) if asked_for || process.stat.comm.starts_with("python") => {
            Some(found.with_problem(unreadable(&error)?))
        }
        Err(InspectError::File(error)) if asked_for || process.stat.comm.starts_with("python") => {
            Some(found.with_problem(access::file_problem(process.pid, error)?))
        }
        Ok(inspect::Verdict::NotPython) | Err(_) => None,
    }
}
