//! The running Python processes, as `doctor` shows them: by build, because a host may have hundreds of them; one by one
//! if something is wrong, or if that is asked for.

use super::Status;
use crate::cli::escape::escape;
use crate::types::Pid;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;

/// Most processes named for one problem; the others are counted.
const NAMED: usize = 3;

/// A running Python process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunningInterpreter {
    /// Its pid, in the profiler's namespace.
    #[serde(serialize_with = "pid_number")]
    pub pid: Pid,
    /// The kernel's short name for it.
    pub comm: String,
    /// `CPython`, or whatever else it is; empty if it could not be determined.
    pub implementation: String,
    /// CPython's version; empty if it could not be determined.
    pub python_version: String,
    /// It is a build without the GIL.
    pub free_threaded: bool,
    /// The file that holds the interpreter, as the process sees it; empty if it could not be determined.
    pub file: PathBuf,
    /// Why it could not be profiled; `None` if it could be.
    pub problem: Option<String>,
}

fn pid_number<S: serde::Serializer>(pid: &Pid, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(pid.0)
}

impl RunningInterpreter {
    /// A process about which nothing more is known.
    #[must_use]
    pub fn new(pid: Pid, comm: impl Into<String>) -> Self {
        Self {
            pid,
            comm: comm.into(),
            implementation: String::new(),
            python_version: String::new(),
            free_threaded: false,
            file: PathBuf::new(),
            problem: None,
        }
    }

    /// The same with a reason why it cannot be profiled.
    #[must_use]
    pub fn with_problem(mut self, problem: impl Into<String>) -> Self {
        self.problem = Some(problem.into());
        self
    }

    /// `CPython 3.14.2, free-threaded`; empty if nothing is known about it.
    fn build(&self) -> String {
        let Self { implementation, python_version, free_threaded, .. } = self;
        let free_threaded = if *free_threaded { ", free-threaded" } else { "" };
        format!("{implementation} {python_version}{free_threaded}").trim().to_owned()
    }

    fn status(&self) -> Status {
        if self.problem.is_some() { Status::Warn } else { Status::Ok }
    }
}

/// Shows them; with `each` one line for each process.
pub(super) fn show(interpreters: &[RunningInterpreter], each: bool, out: &mut dyn Write) -> io::Result<()> {
    if interpreters.is_empty() {
        return writeln!(out, "{:<4}  interpreters: no Python process runs that we can see", Status::Note.word());
    }
    if each {
        return interpreters.iter().try_for_each(|interpreter| line(&[interpreter], out));
    }
    let mut builds: BTreeMap<_, usize> = BTreeMap::new();
    let mut problems: BTreeMap<_, Vec<&RunningInterpreter>> = BTreeMap::new();
    for interpreter in interpreters {
        let build = interpreter.build();
        match &interpreter.problem {
            None => *builds.entry((build, &interpreter.file)).or_default() += 1,
            Some(problem) => problems.entry((build, problem)).or_default().push(interpreter),
        }
    }
    for ((build, file), count) in builds {
        let processes = if count == 1 { "process" } else { "processes" };
        let file = file.to_string_lossy();
        writeln!(out, "{:<4}  {}: {count} {processes}, {}", Status::Ok.word(), escape(&build), escape(&file))?;
    }
    problems.into_values().try_for_each(|same| line(&same, out))
}

/// One line for processes that differ only in their pids and names.
fn line(same: &[&RunningInterpreter], out: &mut dyn Write) -> io::Result<()> {
    let first = same[0];
    let name = |one: &&RunningInterpreter| match one.comm.as_str() {
        "" => format!("pid {}", one.pid),
        comm => format!("pid {} ({})", one.pid, escape(comm)),
    };
    let names = same.iter().take(NAMED).map(name);
    write!(out, "{:<4}  {}", first.status().word(), names.collect::<Vec<_>>().join(", "))?;
    if same.len() > NAMED {
        write!(out, " and {} more (`--verbose` lists them)", same.len() - NAMED)?;
    }
    let file = first.file.to_string_lossy();
    let known = [first.build(), first.problem.clone().unwrap_or_else(|| file.into_owned())];
    for part in known.iter().filter(|part| !part.is_empty()) {
        write!(out, ": {}", escape(part))?;
    }
    writeln!(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interpreter(pid: u32, version: &str, file: &str) -> RunningInterpreter {
        let implementation = if version.is_empty() { "" } else { "CPython" }.to_owned();
        let (python_version, file) = (version.to_owned(), file.into());
        RunningInterpreter { implementation, python_version, file, ..RunningInterpreter::new(Pid(pid), "py") }
    }

    fn shown(interpreters: &[RunningInterpreter], each: bool) -> String {
        let mut out = Vec::new();
        show(interpreters, each, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn hundreds_are_a_line_for_each_build() {
        let mut host: Vec<_> = (1..=300).map(|pid| interpreter(pid, "3.12.1", "/usr/bin/python3.12")).collect();
        host.push(interpreter(301, "3.12.1", "/opt/\x1b[2Jpython"));
        host.push(RunningInterpreter {
            free_threaded: true,
            ..interpreter(302, "3.14.2", "/usr/lib/libpython3.14t.so")
        });
        let by_build = "ok    CPython 3.12.1: 1 process, /opt/\\x1b[2Jpython\n\
             ok    CPython 3.12.1: 300 processes, /usr/bin/python3.12\n\
             ok    CPython 3.14.2, free-threaded: 1 process, /usr/lib/libpython3.14t.so\n";
        assert_eq!(shown(&host, false), by_build);
        assert_eq!(shown(&host, true).lines().count(), 302);
        assert_eq!(shown(&host[299..300], true), "ok    pid 300 (py): CPython 3.12.1: /usr/bin/python3.12\n");
    }

    #[test]
    fn what_is_wrong_is_told_of_single_processes() {
        let closed = |pid| interpreter(pid, "", "").with_problem("it cannot be read; be root");
        let old = interpreter(9, "3.6.15", "/python3.6").with_problem("too old");
        let host = [vec![interpreter(1, "3.12.1", "/p"), old], (20..30).map(closed).collect()].concat();
        assert_eq!(
            shown(&host, false),
            "ok    CPython 3.12.1: 1 process, /p\n\
             warn  pid 20 (py), pid 21 (py), pid 22 (py) and 7 more (`--verbose` lists them): it cannot be read; be root\n\
             warn  pid 9 (py): CPython 3.6.15: too old\n"
        );
        assert!(shown(&host, true).contains("\nwarn  pid 29 (py): it cannot be read; be root\n"));
        let gone = RunningInterpreter::new(Pid(8), "").with_problem("no process has this pid");
        assert_eq!(shown(&[gone], true), "warn  pid 8: no process has this pid\n");
        assert_eq!(shown(&[], false), "note  interpreters: no Python process runs that we can see\n");
    }
}
