//! Which processes are recorded from the start, and what the rest of the host does beside them.

use super::follow::{Follower, lock};
use super::made::{Made, Told};
use super::registry::{ProcessInfo, Registry, SegmentCounts, cpu_time_ns};
use super::request::{Request, Targets};
use super::segment::BusyChildren;
use crate::advice::Refusal;
use crate::discover;
use crate::inspect::{self, ElfCache, InspectError};
use crate::kernel::MadeFor;
use crate::machine::{access, target_hint};
use crate::remote::RemoteProcess;
use crate::types::Pid;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Mutex;
use std::time::Duration;

/// What processes asked for by pid have in common; `None`: nothing, or it is not known, or others may join them, which must not have to wait
/// for programs of their own.
pub(super) fn made_for(request: &Request, files: &mut ElfCache) -> Option<MadeFor> {
    let Targets::Pids(pids) = &request.targets else { return None };
    if request.follow_children {
        return None;
    }
    let mut common: Option<MadeFor> = None;
    for &pid in pids {
        let process = RemoteProcess::open(pid).ok()?;
        let inspect::Verdict::Python(python) = inspect::inspect(&process, files).ok()? else { return None };
        let maps = process.maps().ok()?;
        let first = common.get_or_insert(MadeFor { layout: python.layout.complete(), greenlets: false, tasks: false });
        if first.layout != python.layout.complete() {
            return None;
        }
        first.greenlets |= inspect::GreenletLayout::is_loaded(&maps);
        first.tasks |= python.asyncio_built_in || inspect::has_asyncio(&maps);
    }
    common
}

/// Gives every process that is wanted from the start its entry.
///
/// # Errors
/// When a process asked for by pid is not a CPython that can be profiled.
pub(super) fn select(request: &Request, follower: &mut Follower, registry: &Mutex<Registry>) -> anyhow::Result<()> {
    if let Some(path) = follower.missing_cgroup() {
        return Err(Refusal::new(format!("there is no control group {path}"))
            .with_hint("`cat /proc/PID/cgroup` tells in which ones a process is")
            .into());
    }
    match &request.targets {
        Targets::Pids(pids) => {
            for &pid in pids {
                if !follower.admits(pid).unwrap_or(true) {
                    let what = format!("pid {pid} ({}) is not among the processes asked for", comm(pid));
                    return Err(Refusal::new(what)
                        .with_hint(
                            "filters hold for a process that is asked for by its pid too: all of them must match",
                        )
                        .into());
                }
                match follower.adopt(pid.0) {
                    Ok(Some(_)) => {}
                    Ok(None) => {
                        return Err(Refusal::new(format!("pid {pid} ({}) is not a Python process", comm(pid)))
                            .with_hint("it has no CPython mapped; `tachyon-bpf doctor -v` lists the Python processes")
                            .into());
                    }
                    Err(error) => {
                        let what = format!("cannot profile pid {pid} ({})", comm(pid));
                        let hint = target_hint(&error).unwrap_or_else(|| {
                            "`tachyon-bpf doctor -v` lists the Python processes and says of each whether it can be profiled"
                                .to_owned()
                        });
                        return Err(Refusal::new(what).with_source(error).with_hint(hint).into());
                    }
                }
            }
            if follower.follows_children() {
                adopt_descendants(pids, follower, registry)?;
            }
        }
        Targets::Child(pid) => {
            follower.expect(pid.0)?;
            if let Some(program) = &request.program {
                follower.look_ahead(*pid, program);
            }
        }
        Targets::AllPython => adopt_all(follower, registry)?,
    }
    Ok(())
}

/// Gives entries to the existing descendants of these processes, whatever they run: a shell's children may be the targets.
fn adopt_descendants(targets: &[Pid], follower: &mut Follower, registry: &Mutex<Registry>) -> anyhow::Result<()> {
    let own = Pid(std::process::id());
    let known = targets.iter().copied().chain([own]).collect();
    adopt_each(known, follower, registry, || {
        let processes = discover::scan()?;
        Ok(targets.iter().flat_map(|&target| discover::descendants(&processes, target)).collect())
    })
}

/// Gives every process of the host its entry. For most, only the mappings are read.
fn adopt_all(follower: &mut Follower, registry: &Mutex<Registry>) -> anyhow::Result<()> {
    let own = Pid(std::process::id());
    // First, for its helper processes, which start while the others are looked at.
    follower.ignore(own.0)?;
    adopt_each(HashSet::from([own]), follower, registry, discover::pids)
}

/// Gives entries to the processes of a list that are not yet known, again and again until the list has no new one: the fork of a
/// process without an entry is not reported.
fn adopt_each(
    mut known: HashSet<Pid>,
    follower: &mut Follower,
    registry: &Mutex<Registry>,
    list: impl Fn() -> io::Result<Vec<Pid>>,
) -> anyhow::Result<()> {
    // If processes fork faster than that, their children are reported, since everything else has its entry by then.
    const ROUNDS: usize = 16;
    for _ in 0..ROUNDS {
        let new: Vec<Pid> = list()?.into_iter().filter(|&pid| known.insert(pid)).collect();
        if new.is_empty() {
            break;
        }
        for pid in new {
            // A copy of one that has been looked at needs no look of its own.
            if !follower.has_decided(pid.0) {
                adopt_one(pid, follower, registry)?;
            }
        }
    }
    Ok(())
}

/// Gives one of many processes its entry. One that cannot be profiled does not stop the others.
fn adopt_one(pid: Pid, follower: &mut Follower, registry: &Mutex<Registry>) -> anyhow::Result<()> {
    let Err(error) = follower.adopt(pid.0) else { return Ok(()) };
    match discover::look_at(pid) {
        Ok(process) if process.has_memory() => {
            lock(registry).refuse(format!("pid {pid}: {}", reason(pid, &error)));
        }
        Ok(_) => follower.ignore(pid.0)?,
        // A process that is gone needs no note.
        Err(_) => {}
    }
    Ok(())
}

/// Why a process could not be looked at, with the remedy if one is known.
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
    text.trim_end().to_owned()
}

/// Version for the header, as far as known: major, minor, micro; the newest if there are several.
pub(super) fn newest_version(registry: &Registry) -> Option<(u8, u8, u8)> {
    newest(registry.python())
}

fn newest<'a>(processes: impl Iterator<Item = &'a ProcessInfo>) -> Option<(u8, u8, u8)> {
    let newest = processes.filter_map(ProcessInfo::last_python).map(|(hex, _)| hex).max()?;
    let [major, minor, micro, _] = newest.to_be_bytes();
    Some((major, minor, micro))
}

/// Fills in what was not known yet when a process was first sampled.
pub(super) fn complete(made: &mut Made, segment: &SegmentCounts, told: Told) {
    for (counts, process) in made.processes.iter().zip(&mut made.profile.processes) {
        let Some(info) = segment.get(counts.program) else { continue };
        if process.python_version.is_empty() {
            // For a process that runs something else by now, or was never more than a copy of its parent: the version
            // that was sampled.
            info.last_python().map_or("", |(_, version)| version).clone_into(&mut process.python_version);
        }
        if process.cmdline.is_empty() {
            process.cmdline = told.cmdline(&info.cmdline);
        }
        if process.environment.is_empty() {
            process.environment = told.environment(info);
        }
        // It was sampled before it was looked at, and had entered its container after its fork.
        if process.container.is_empty() {
            process.container.clone_from(&info.container);
            process.pod.clone_from(&info.pod);
        }
        if process.service.is_empty() {
            process.service.clone_from(&info.service);
        }
        if process.details.as_ref().is_none_or(|details| !details.is_whole) {
            process.details.clone_from(&info.details);
        }
    }
    let newest = newest(segment.processes.values());
    made.profile.meta.python_version = newest.unwrap_or(made.profile.meta.python_version);
}

/// What to say about variables that were to be labels but that no process was started with: their names may be misspelt.
pub(super) fn unknown_variables(made: &Made, request: &Request) -> Vec<String> {
    let processes = &made.profile.processes;
    let wanted = request.variables.iter().flatten().filter(|_| request.label_env && !processes.is_empty());
    let unknown = wanted.filter(|name| !processes.iter().any(|process| process.environment.contains_key(*name)));
    unknown.map(|name| format!("no sampled process has the variable {name} in its environment")).collect()
}

/// Whether a CPython that fits was met in a segment.
pub(super) fn met(segment: &SegmentCounts) -> bool {
    !segment.processes.is_empty() || segment.forgotten > 0
}

/// CPU time of the targets' children when the recording starts, for "add --subprocesses".
pub(super) struct Children {
    at_start: HashMap<Pid, HashMap<Pid, u64>>,
}

/// Share of a core from which on a child counts as busy.
const BUSY: f64 = 0.05;

impl Children {
    /// Measures the children of processes whose children are not recorded.
    pub fn of(request: &Request) -> Self {
        let mut at_start = HashMap::new();
        if let Targets::Pids(pids) = &request.targets
            && !request.follow_children
        {
            for &pid in pids {
                let children = discover::family(pid).into_iter();
                let times = children.map(|child| (child, cpu_time_ns(child.0).unwrap_or(0))).collect();
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
            let children = discover::family(pid).into_iter();
            let count = children
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

fn is_python(pid: Pid, cache: &mut ElfCache) -> bool {
    RemoteProcess::open(pid)
        .is_ok_and(|process| matches!(inspect::inspect(&process, cache), Ok(inspect::Verdict::Python(_))))
}
