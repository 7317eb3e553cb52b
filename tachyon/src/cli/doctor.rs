//! `tachyon-bpf doctor`: can this machine profile? One line for each thing that profiling needs, with the remedy.

mod interpreters;
mod running;

pub use self::interpreters::RunningInterpreter;
pub use self::running::running_interpreters;

use super::escape::escape;
use crate::advice::Advice as _;
use crate::advice::cause_text;
use crate::kernel::{self, KernelError, WaitMethod};
use crate::machine::preflight::{self, PreflightError};
use crate::machine::raise_open_files;
use crate::sinks::text::write_json;
use caps::Capability;
use serde::Serialize;
use std::fs;
use std::io::{self, Write};

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Worth knowing, but no drawback.
    Note,
    /// Profiling works, but not all of it.
    Warn,
    /// Profiling cannot work.
    Fail,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// How it came out.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// The remedy.
    pub hint: Option<String>,
}

impl Check {
    fn new(name: &'static str, status: Status, found: impl Into<String>) -> Self {
        Self { name, status, found: found.into(), hint: None }
    }

    fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// `Ok` with `found`, or `Fail` with the error and its remedy.
    fn of<T>(name: &'static str, result: Result<T, PreflightError>, found: impl FnOnce(T) -> String) -> Self {
        match result {
            Ok(value) => Self::new(name, Status::Ok, found(value)),
            Err(error) => {
                let hint = error.hint();
                let cause = std::error::Error::source(&error).map(|source| format!(": {}", cause_text(source)));
                Self::new(name, Status::Fail, format!("{error}{}", cause.unwrap_or_default()))
                    .with_hint(hint.unwrap_or_default())
            }
        }
    }
}

/// Everything the doctor found.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// No check failed.
    pub possible: bool,
    /// The checks, in order of importance.
    pub checks: Vec<Check>,
    /// Python processes that are running, or those that were asked for.
    pub interpreters: Vec<RunningInterpreter>,
}

impl Diagnosis {
    /// Whether the machine can profile and, if these processes were asked for, each of them can be profiled.
    #[must_use]
    pub fn is_well(&self, asked_for: bool) -> bool {
        self.possible && !(asked_for && self.interpreters.iter().any(|interpreter| interpreter.problem.is_some()))
    }
}

/// Examines this machine.
#[must_use]
pub fn diagnose(interpreters: Vec<RunningInterpreter>) -> Diagnosis {
    raise_open_files();
    let checks = vec![
        kernel(),
        lockdown(),
        Check::of("BTF", preflight::btf(), |bytes| format!("{} bytes at {}", bytes, preflight::BTF_PATH)),
        Check::of("BPF ring buffer", preflight::ring_buffer(), |()| "can be made".to_owned()),
        Check::of("BPF program", preflight::perf_event_program(), |()| "can be loaded".to_owned()),
        Check::of("cpu-clock event", preflight::cpu_clock(), |()| "opens on whole CPUs".to_owned()),
        waiting_threads(kernel::wait_method()),
        capabilities(),
        ptrace_scope(),
        paranoid(preflight::paranoid(), preflight::has(Capability::CAP_SYS_ADMIN)),
        kptr_restrict(
            fs::read_to_string("/proc/sys/kernel/kptr_restrict").unwrap_or_default().trim(),
            preflight::paranoid(),
            preflight::has(Capability::CAP_SYSLOG),
        ),
        memlock(),
        Check::of("open files", preflight::open_files(), |limit| format!("up to {limit}")),
        pmu(),
    ];
    let possible = checks.iter().all(|check| check.status != Status::Fail);
    Diagnosis { possible, checks, interpreters }
}

/// Shows a diagnosis as JSON.
///
/// # Errors
/// When `out` cannot be written.
pub fn write(diagnosis: &Diagnosis, out: &mut dyn Write) -> io::Result<()> {
    write_json(&mut *out, diagnosis)?;
    writeln!(out)
}

/// Shows a diagnosis to people; with `each` every Python process has a line, otherwise every build.
///
/// # Errors
/// When `out` cannot be written.
pub fn show(diagnosis: &Diagnosis, each: bool, out: &mut dyn Write) -> io::Result<()> {
    for check in &diagnosis.checks {
        write!(out, "{:<4}  {}: {}", check.status.word(), check.name, escape(&check.found))?;
        match &check.hint {
            Some(hint) => writeln!(out, "; {hint}")?,
            None => writeln!(out)?,
        }
    }
    interpreters::show(&diagnosis.interpreters, each, out)?;
    match diagnosis.possible {
        true => writeln!(out, "this machine can profile"),
        false => writeln!(out, "this machine cannot profile: fix what says FAIL"),
    }
}

/// How `--wall` would read the stacks of waiting threads.
fn waiting_threads(method: Result<WaitMethod, KernelError>) -> Check {
    const NAME: &str = "waiting threads";
    match method {
        Ok(WaitMethod::Kick) => Check::new(NAME, Status::Ok, "read when their waits are over (kick)"),
        Ok(WaitMethod::SwitchOut) => Check::new(NAME, Status::Note, "no interrupt comes when a wait is over")
            .with_hint(
                "some are read when they begin and stand for all (switch_out): shares are right, and need more samples",
            ),
        Err(error) => {
            let found = format!("not tried: {error}{}", cause_of(&error));
            let check = Check::new(NAME, Status::Warn, found);
            match error.hint() {
                Some(hint) => check.with_hint(hint),
                None => check,
            }
        }
    }
}

fn cause_of(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(String::new, |source| format!(": {}", cause_text(source)))
}

fn kernel() -> Check {
    let found = || format!("{} on {}", preflight::release(), std::env::consts::ARCH);
    Check::of("kernel", preflight::architecture().and_then(|()| preflight::kernel_version()), |()| found())
}

fn lockdown() -> Check {
    Check::of("lockdown", preflight::lockdown(), |()| preflight::lockdown_mode().unwrap_or_else(|| "none".to_owned()))
}

/// Capabilities by name, with what each is for. Whether BPF and perf work has already been tried, so nothing fails here.
fn capabilities() -> Check {
    if preflight::in_user_namespace() {
        return Check::new("capabilities", Status::Warn, "those of a user namespace, which count for nothing here")
            .with_hint("run it outside the user namespace (a rootless container?)");
    }
    const WANTED: [(Capability, &str, bool); 6] = [
        (Capability::CAP_BPF, "loading", true),
        (Capability::CAP_PERFMON, "sampling", true),
        (Capability::CAP_SYS_PTRACE, "other users' processes", false),
        (Capability::CAP_DAC_READ_SEARCH, "other users' files", false),
        (Capability::CAP_CHECKPOINT_RESTORE, "deleted libraries", true),
        (Capability::CAP_SYSLOG, "kernel names", false),
    ];
    let admin = preflight::has(Capability::CAP_SYS_ADMIN);
    let lacking: Vec<_> = WANTED
        .iter()
        .filter(|(capability, _, admin_will_do)| !(preflight::has(*capability) || *admin_will_do && admin))
        .collect();
    if lacking.is_empty() {
        return Check::new("capabilities", Status::Ok, "all that are needed");
    }
    let found: Vec<_> = lacking.iter().map(|(capability, purpose, _)| format!("{capability} ({purpose})")).collect();
    // `setcap` replaces the whole set, so all are named.
    let names: Vec<_> = WANTED.iter().map(|(capability, ..)| capability.to_string()).collect();
    Check::new("capabilities", Status::Warn, format!("missing {}", found.join(", ")))
        .with_hint(format!("be root, or `setcap {}=ep` on the executable", names.join(",").to_lowercase()))
}

/// Yama: with 1 and 2 reading another process needs CAP_SYS_PTRACE, with 3 nobody may
/// (Documentation/admin-guide/LSM/Yama.rst).
fn ptrace_scope() -> Check {
    let path = "/proc/sys/kernel/yama/ptrace_scope";
    let scope: u32 = fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let check = |status| Check::new("ptrace_scope", status, scope.to_string());
    match scope {
        0 => check(Status::Ok),
        1 | 2 if preflight::has(Capability::CAP_SYS_PTRACE) => check(Status::Ok),
        1 => check(Status::Warn).with_hint("only `-- CMD` can be profiled without CAP_SYS_PTRACE"),
        2 => check(Status::Fail).with_hint("needs CAP_SYS_PTRACE, or `sysctl kernel.yama.ptrace_scope=1`"),
        _ => check(Status::Fail).with_hint("nobody may read another process until a boot with a lower one"),
    }
}

/// Debian's and Ubuntu's kernels have a level 3 (4 on Ubuntu), at which `perf_event_open` requires CAP_SYS_ADMIN.
fn paranoid(level: Option<i32>, admin: bool) -> Check {
    let Some(level) = level else {
        return Check::new("perf_event_paranoid", Status::Fail, "not there")
            .with_hint("boot a kernel with CONFIG_PERF_EVENTS=y");
    };
    let check = |status| Check::new("perf_event_paranoid", status, level.to_string());
    match level {
        3.. if !admin => check(Status::Warn).with_hint(
            "Debian's and Ubuntu's kernels want CAP_SYS_ADMIN here: be root, or `sysctl kernel.perf_event_paranoid=2`",
        ),
        _ => check(Status::Ok),
    }
}

/// Who is shown the addresses of kernel functions (`kallsyms_show_value`, kernel/ksyms_common.c): with 0, everyone whom
/// `perf_event_paranoid` lets profile the kernel.
fn kptr_restrict(level: &str, paranoid: Option<i32>, syslog: bool) -> Check {
    let check = |status| Check::new("kptr_restrict", status, level);
    match level {
        "0" if paranoid.is_some_and(|paranoid| paranoid <= 1) => check(Status::Ok),
        "0" | "1" if !syslog => check(Status::Note).with_hint("kernel names need CAP_SYSLOG; Python names do not"),
        "2" => check(Status::Note)
            .with_hint("no kernel names; `sysctl kernel.kptr_restrict=1` enables them; Python names need nothing"),
        _ => check(Status::Ok),
    }
}

/// Before Linux 5.11 maps count against RLIMIT_MEMLOCK; raising the limit needs CAP_SYS_RESOURCE.
fn memlock() -> Check {
    use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
    let counted = preflight::parse_release(&preflight::release()).is_some_and(|version| version < (5, 11));
    if !counted {
        return Check::new("RLIMIT_MEMLOCK", Status::Ok, "not counted by this kernel");
    }
    let (soft, _) = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap_or((0, 0));
    if soft == RLIM_INFINITY || preflight::has(Capability::CAP_SYS_RESOURCE) {
        return Check::new("RLIMIT_MEMLOCK", Status::Ok, "can be raised");
    }
    Check::new("RLIMIT_MEMLOCK", Status::Warn, format!("{soft} bytes, counted by kernels before 5.11"))
        .with_hint("`ulimit -l unlimited` first, or add CAP_SYS_RESOURCE")
}

fn pmu() -> Check {
    match preflight::hardware_cycles() {
        Ok(()) => Check::new("PMU", Status::Ok, "hardware cycles can be sampled"),
        Err(error) => Check::new("PMU", Status::Note, format!("no hardware cycles: {}", cause_text(&error)))
            .with_hint("the cpu-clock event is used instead"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Pid;

    fn diagnosis(status: Status) -> Diagnosis {
        let check = Check::new("BTF", status, "cannot read").with_hint("boot another kernel");
        let interpreters = vec![RunningInterpreter {
            implementation: "CPython".to_owned(),
            python_version: "3.12.1".to_owned(),
            file: "/usr/bin/python3.12".into(),
            ..RunningInterpreter::new(Pid(7), "py\x1b[2J")
        }];
        Diagnosis { possible: status != Status::Fail, checks: vec![check], interpreters }
    }

    #[test]
    fn one_line_each_with_the_mend() {
        for (each, interpreter) in
            [(false, "CPython 3.12.1: 1 process, /usr"), (true, "pid 7 (py\\x1b[2J): CPython 3.12.1: /usr")]
        {
            let mut out = Vec::new();
            show(&diagnosis(Status::Fail), each, &mut out).unwrap();
            assert_eq!(
                String::from_utf8(out).unwrap(),
                format!(
                    "FAIL  BTF: cannot read; boot another kernel\nok    {interpreter}/bin/python3.12\n\
                     this machine cannot profile: fix what says FAIL\n"
                )
            );
        }
    }

    #[test]
    fn json_has_the_same() {
        let mut out = Vec::new();
        write(&diagnosis(Status::Warn), &mut out).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(value["possible"], true);
        assert_eq!(value["checks"][0]["status"], "warn");
        assert_eq!(value["interpreters"][0]["pid"], 7);
        assert_eq!(value["interpreters"][0]["file"], "/usr/bin/python3.12");
    }

    #[test]
    fn debians_level_is_told_by_name() {
        assert_eq!(paranoid(Some(2), false).status, Status::Ok);
        assert_eq!(paranoid(Some(3), true).status, Status::Ok);
        let check = paranoid(Some(3), false);
        assert_eq!(check.status, Status::Warn);
        assert!(check.hint.unwrap().contains("CAP_SYS_ADMIN"));
    }

    #[test]
    fn kernel_names_are_shown_to_some() {
        let named = |check: Check| check.hint.is_some_and(|hint| hint.contains("CAP_SYSLOG"));
        for (level, paranoid, syslog, lacks) in [
            ("0", Some(1), false, false),
            ("0", Some(2), false, true),
            ("1", Some(1), false, true),
            ("1", Some(4), true, false),
            ("0", Some(4), true, false),
        ] {
            assert_eq!(named(kptr_restrict(level, paranoid, syslog)), lacks, "{level} {paranoid:?} {syslog}");
        }
        assert_eq!(kptr_restrict("2", Some(0), true).status, Status::Note);
    }

    #[test]
    fn this_machine_is_judged_as_preflight_does() {
        let diagnosis = diagnose(Vec::new());
        if diagnosis.possible {
            preflight::preflight().unwrap();
        }
    }
}
