//! One process: what it runs, what it is called, how much CPU time it has used.

use crate::profile::Details;
use crate::recording::times::Lives;
use crate::remote::RemoteProcess;
use crate::types::Pid;
use nix::time::{ClockId, clock_getcpuclockid, clock_gettime};
use std::sync::OnceLock;

/// What a process runs, as far as the recording is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::recording) enum Program {
    /// Not known yet.
    Unknown,
    /// CPython of this version, `PY_VERSION_HEX` and as text.
    Python(u32, String),
    /// Something else, or a CPython that was refused.
    Other,
}

impl Program {
    pub(super) fn python(&self) -> Option<(u32, String)> {
        match self {
            Self::Python(hex, text) => Some((*hex, text.clone())),
            Self::Unknown | Self::Other => None,
        }
    }
}

/// One process.
#[derive(Clone, Debug)]
pub(in crate::recording) struct ProcessInfo {
    pub pid: u32,
    pub image: u64,
    pub program: Program,
    /// The program was inspected while it ran, and had no CPython mapped then.
    pub looked_at: bool,
    pub comm: String,
    pub cmdline: Vec<String>,
    /// Container and pod, empty when there are none.
    pub container: String,
    pub pod: String,
    /// The service that it says it belongs to; empty if it does not say, or has not said yet.
    pub service: String,
    /// Details, if the recording was asked for them.
    pub details: Option<Box<Details>>,
    /// CPU time that it had used when it was selected or when its present program began, nanoseconds.
    pub(super) cpu_start_ns: u64,
    /// CPU time of its present program as CPython, before it became something else.
    pub(super) cpu_before_ns: u64,
    /// CPU time at its exit, as reported by the kernel side.
    pub(super) cpu_end_ns: Option<u64>,
    /// What its threads had done with their time at its exit, likewise.
    pub lives_end: Option<Lives>,
    /// Runs that met the program before it was inspected.
    pub uninspected: u64,
    /// How many of those that met the present program have been dealt with.
    pub(super) uninspected_told: u64,
    pub alive: bool,
    /// Version of its latest CPython, as in [`Program::Python`]: a process found to run something else may still have
    /// samples.
    pub(super) last_python: Option<(u32, String)>,
    /// Whether the profile has samples of it: at the end it refers to what is known here.
    pub sampled: bool,
    /// Distinguishes it from every other process of its host, in this recording and others; determined at its first sample.
    pub(super) identity: Option<String>,
    /// It has ended and is in an earlier segment's account.
    pub(super) accounted: bool,
    /// Programs that the process has executed since it was first followed.
    pub(super) execs: u32,
    /// The process has executed another program since.
    pub(super) is_past: bool,
}

impl ProcessInfo {
    pub fn new(pid: u32, image: u64, program: Program, cpu_start_ns: u64) -> Self {
        let (container, pod) = read_container(pid).unwrap_or_default();
        Self {
            container,
            pod,
            last_python: program.python(),
            program,
            cmdline: read_cmdline(pid),
            cpu_start_ns,
            ..Self::unread(pid, image, read_comm(pid))
        }
    }

    /// A process about which nothing is known beyond its record.
    pub(super) fn unread(pid: u32, image: u64, comm: String) -> Self {
        Self {
            pid,
            image,
            comm,
            cmdline: Vec::new(),
            container: String::new(),
            pod: String::new(),
            service: String::new(),
            details: None,
            last_python: None,
            program: Program::Unknown,
            looked_at: false,
            cpu_start_ns: 0,
            cpu_before_ns: 0,
            cpu_end_ns: None,
            lives_end: None,
            uninspected: 0,
            uninspected_told: 0,
            alive: true,
            sampled: false,
            identity: None,
            accounted: false,
            execs: 0,
            is_past: false,
        }
    }

    /// CPython's version as text; empty when it is not CPython (any more).
    pub fn version(&self) -> &str {
        match &self.program {
            Program::Python(_, version) => version,
            Program::Unknown | Program::Other => "",
        }
    }

    /// Distinguishes it from every other process of its host: boot, pid and start time, which another recording finds as
    /// well, and for a later program its ordinal number. For a process that is gone before it can be read, its `instance`,
    /// since no other recording can read it either.
    pub fn identity(&mut self, instance: u64) -> &str {
        let (pid, execs) = (self.pid, self.execs);
        self.identity.get_or_insert_with(|| {
            let program = if execs > 0 { format!("-{execs}") } else { String::new() };
            match RemoteProcess::at(Pid(pid)).stat() {
                Ok(stat) => format!("{}-{pid:x}-{:x}{program}", boot(), stat.start_ticks),
                Err(_) => format!("{}-{pid:x}-{instance:016x}{program}", boot()),
            }
        })
    }

    /// Whether its present program is or was CPython.
    pub fn ever_python(&self) -> bool {
        self.last_python.is_some()
    }

    /// Version of its latest CPython, `PY_VERSION_HEX` and as text, whatever it runs now.
    pub fn last_python(&self) -> Option<(u32, &str)> {
        self.last_python.as_ref().map(|(hex, text)| (*hex, text.as_str()))
    }

    /// CPU time of all its threads while it was selected and ran CPython, nanoseconds; `None` when it could not be
    /// measured.
    pub fn cpu_ns(&self) -> Option<u64> {
        if !self.is_python() {
            return Some(self.cpu_before_ns);
        }
        let now = || if self.alive { cpu_time_ns(self.pid) } else { None };
        self.cpu_end_ns.or_else(now).map(|end| self.cpu_before_ns + end.saturating_sub(self.cpu_start_ns))
    }

    /// Whether its process has executed another program since.
    pub fn execs_later(&self) -> bool {
        self.is_past
    }

    pub(super) fn is_python(&self) -> bool {
        matches!(self.program, Program::Python(..))
    }

    /// Its samples will not stand for the CPU time used so far.
    pub fn cpu_starts_now(&mut self) {
        let now = if self.alive { cpu_time_ns(self.pid) } else { None };
        // A process that has ended, reported or not, uses no more.
        self.cpu_start_ns = now.unwrap_or(u64::MAX);
    }

    /// It began after sampling had ended.
    pub(super) fn never_counts(&mut self) {
        (self.cpu_start_ns, self.cpu_end_ns) = (u64::MAX, Some(0));
    }

    /// A new program begins, at this CPU time. Returns the previous one if it was CPython.
    pub(super) fn exec(&mut self, image: u64, comm: String, cpu_ns: Option<u64>) -> Option<Self> {
        // After the end of sampling its CPU time no longer counts.
        let cpu_ns = cpu_ns.map(|cpu_ns| self.cpu_end_ns.take().map_or(cpu_ns, |end| end.min(cpu_ns)));
        let before = Self { cpu_end_ns: cpu_ns, alive: false, is_past: true, ..self.clone() };
        *self = Self {
            container: std::mem::take(&mut self.container),
            pod: std::mem::take(&mut self.pod),
            cpu_start_ns: cpu_ns.unwrap_or(self.cpu_start_ns),
            cpu_end_ns: self.cpu_end_ns,
            execs: self.execs + 1,
            // Its command line is read later: better none than its parent's.
            ..Self::unread(self.pid, image, comm)
        };
        before.ever_python().then_some(before)
    }

    /// How many of the runs that met the present program uninspected are new.
    pub(super) fn new_of(&mut self, uninspected: u64) -> u64 {
        let new = uninspected.saturating_sub(self.uninspected_told);
        self.uninspected_told = uninspected.max(self.uninspected_told);
        new
    }

    /// Sets what the present image is.
    pub fn decide(&mut self, program: Program) {
        self.last_python = program.python().or(self.last_python.take());
        self.program = program;
    }

    /// A child of it, which is a copy until it executes another program.
    pub(super) fn child(&self, pid: u32, image: u64, comm: String) -> Self {
        Self {
            pid,
            image,
            comm,
            last_python: self.program.python(),
            cpu_start_ns: 0,
            cpu_before_ns: 0,
            cpu_end_ns: None,
            lives_end: None,
            uninspected: 0,
            uninspected_told: 0,
            alive: true,
            sampled: false,
            identity: None,
            accounted: false,
            execs: 0,
            is_past: false,
            ..self.clone()
        }
    }

    /// Whether a segment that ends now has anything to say about it.
    pub(super) fn has_news(&self) -> bool {
        let new = !self.accounted || self.sampled || self.uninspected > 0;
        self.ever_python() && (new || self.cpu_ns().is_some_and(|ns| ns > 0))
    }

    /// Its part in a segment that ends now. What it uses from now on belongs to the next segment.
    pub(super) fn cut(&mut self) -> Self {
        let now = if self.alive { cpu_time_ns(self.pid) } else { None };
        let ended = Self { cpu_end_ns: self.cpu_end_ns.or(now), alive: false, ..self.clone() };
        if let Some(counted) = ended.cpu_end_ns {
            self.cpu_start_ns = self.cpu_start_ns.max(counted);
            self.cpu_before_ns = 0;
        } else if !self.is_python() {
            self.cpu_before_ns = 0;
        }
        self.uninspected = 0;
        self.sampled = false;
        self.accounted = !self.alive;
        ended
    }

    /// Reads where a program runs and its command line, unless that was read when it was found to be CPython.
    pub fn read_names(&mut self) {
        if self.program == Program::Unknown {
            self.cmdline = read_cmdline(self.pid);
            self.find_container();
        }
    }

    /// A runtime moves a process into its container before it execs the program. A process that has ended meanwhile has
    /// nothing to read.
    fn find_container(&mut self) {
        if let Some(found) = read_container(self.pid) {
            (self.container, self.pod) = found;
        }
    }

    /// Reads the command line again, if it could not be read.
    pub(super) fn complete_names(&mut self) {
        if self.cmdline.is_empty() {
            self.cmdline = read_cmdline(self.pid);
        }
    }

    /// Brings name and command line up to date (they change at `exec`).
    pub fn refresh(&mut self) {
        let (comm, cmdline) = (read_comm(self.pid), read_cmdline(self.pid));
        if !comm.is_empty() {
            self.comm = comm;
        }
        if !cmdline.is_empty() {
            self.cmdline = cmdline;
        }
        self.find_container();
    }
}

/// What there is to know about a process, with these variables of its environment, of which at most 64 KiB are read.
pub(in crate::recording) fn read_details(pid: u32, variables: &[String]) -> Details {
    let process = RemoteProcess::at(Pid(pid));
    let environment = process.environment(variables, 64 << 10);
    Details {
        is_whole: environment.is_ok(),
        uid: process.real_uid().ok(),
        cgroup: process.cgroups().map(|cgroups| cgroups.path().to_owned()).unwrap_or_default(),
        // A process that vanishes meanwhile, or may not be read, yields nothing.
        environment: environment.unwrap_or_default(),
    }
}

/// CPU time of a live process, dead threads included (`CLOCK_PROCESS_CPUTIME_ID` of another process).
pub(in crate::recording) fn cpu_time_ns(pid: u32) -> Option<u64> {
    let clock: ClockId = clock_getcpuclockid(nix::unistd::Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    let time = clock_gettime(clock).ok()?;
    Some(time.tv_sec().unsigned_abs() * 1_000_000_000 + time.tv_nsec().unsigned_abs())
}

/// The beginning of this boot's id, which is random; zeros where it cannot be read.
fn boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        id.get(..8).unwrap_or("00000000").to_owned()
    })
}

fn read_comm(pid: u32) -> String {
    let text = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    String::from_utf8_lossy(text.strip_suffix(b"\n").unwrap_or(&text)).into_owned()
}

/// Container and pod of a process, empty if it is in none; `None` for one that has ended.
fn read_container(pid: u32) -> Option<(String, String)> {
    let cgroups = RemoteProcess::at(Pid(pid)).cgroups().ok()?;
    Some((cgroups.container().unwrap_or_default().to_owned(), cgroups.pod().unwrap_or_default()))
}

/// At most 4 KiB of the command line: a target can make it as long as it likes.
fn read_cmdline(pid: u32) -> Vec<String> {
    // A process that vanishes meanwhile has no command line.
    RemoteProcess::at(Pid(pid)).cmdline(4096).unwrap_or_default()
}
