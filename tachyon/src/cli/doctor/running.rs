//! Finds the running Python processes.

use super::RunningInterpreter;
use crate::discover;
use crate::inspect::{self, ElfCache, InspectError};
use crate::machine::access;
use crate::remote::{RemoteError, RemoteProcess};
use crate::types::{Pid, RemoteAddr};

/// Running Python processes, for `doctor`: all of them, or those in `pids`, each of which gets an answer.
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

/// What `doctor` says about a process; `None` if it is not a Python. If that cannot be known, the little there is, provided
/// it was `asked_for` or has a Python's name.
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
        // Its mappings may be readable even if its memory is not (CAP_PERFMON is enough for them on newer kernels).
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
