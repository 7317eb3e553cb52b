//! Which capability is needed for what: tested one by one, and compared with the table in `docs/privileges.md`.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use tachyon_tests::{Interpreter, Profiler, Target, binary, live, not_run};

/// All that is ever needed, in the words of setpriv(1).
const ALL: [&str; 6] = ["bpf", "perfmon", "sys_ptrace", "dac_read_search", "checkpoint_restore", "syslog"];
/// An unprivileged user.
const NOBODY: u32 = 65_534;

/// A busy process that is killed when dropped.
struct Busy(Child);

impl Busy {
    fn start(command: &mut Command) -> Self {
        // The profiler's start comes first: there are several of these at once.
        let program = "import os; os.nice(10)\nwhile True: pass";
        let child = command.args(["-S", "-c", program]).stdin(Stdio::null()).spawn();
        Self(child.expect("the interpreter can be run"))
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // One that has already ended does not matter.
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// Runs the profiler as nobody with certain capabilities and no others.
struct Nobody {
    dir: tempfile::TempDir,
    binary: PathBuf,
    runs: AtomicU32,
}

impl Nobody {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("it is ours");
        chown(dir.path(), Some(NOBODY), Some(NOBODY)).expect("root may");
        // The folder of the build may be closed to others.
        let copy = dir.path().join("tachyon-bpf");
        fs::copy(binary(), &copy).expect("there is room for a copy");
        Self { dir, binary: copy, runs: AtomicU32::new(0) }
    }

    /// A command run by nobody with these capabilities.
    fn command(capabilities: &[&str]) -> Command {
        let list = capabilities.iter().fold("-all".to_owned(), |list, capability| format!("{list},+{capability}"));
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        for set in ["--inh-caps", "--ambient-caps", "--bounding-set"] {
            command.args([set, &list]);
        }
        command
    }

    /// What `doctor` says.
    fn doctor(&self, capabilities: &[&str], words: &[&str]) -> String {
        let mut command = Self::command(capabilities);
        let output = command.arg(&self.binary).arg("doctor").args(words).output().expect("setpriv can be run");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Whether the process was recorded (`None`: any); else the message.
    fn records(&self, capabilities: &[&str], words: &[OsString], pid: Option<&str>) -> Result<(), String> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.path().join(format!("{run}.json"));
        let mut command = Self::command(capabilities);
        // For a whole host unwind tables arrive along with samples, which takes a while on a busy machine.
        let whole_host = capabilities.len() == ALL.len() && words.iter().any(|word| word == "--all-python");
        let length = if whole_host { "4s" } else { "500ms" };
        // A command ends the recording itself.
        if pid.is_some() {
            command.args([self.binary.as_os_str(), "-d".as_ref(), length.as_ref()]);
        } else {
            command.arg(&self.binary);
        }
        command.args(["-F", "499", "-o"]);
        command
            .arg(self.dir.path().join(format!("{run}.tach")))
            .arg("--report")
            .arg(&path)
            .args(words)
            .stdin(Stdio::null());
        let output = command.output().expect("setpriv can be run");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let report = fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok());
        let report: tachyon::report::Report = report.ok_or_else(|| said.clone())?;
        let found = report.processes.iter().any(|it| it.samples > 0 && pid.is_none_or(|pid| it.pid.to_string() == pid));
        // With all of them native stacks are complete and fit; and kernel names are missing only if the report says so.
        let native = report.native.as_ref().is_some_and(|native| native.exact + native.repaired > 0);
        assert!(capabilities.len() < ALL.len() || native, "{words:?}: {said}{:#?}", report.native);
        let nameless = report.notes.iter().any(|note| note.contains("have no names"));
        if found && !nameless { Ok(()) } else { Err(format!("{said}{:?}", report.refused)) }
    }
}

fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(OsString::from).collect()
}

/// A Python whose library is deleted once it has been mapped.
fn deleted(dir: &Path) -> Busy {
    let interpreter = Interpreter::named("pyenv_3_12");
    let python = PathBuf::from(interpreter.command().get_program());
    let library = "libpython3.12.so.1.0";
    let home = python.parent().and_then(Path::parent).expect("bin lies in the installation");
    let copy = dir.join(library);
    fs::copy(home.join("lib").join(library), &copy).expect("there is room for a copy");
    let busy = Busy::start(Command::new(python).env("LD_LIBRARY_PATH", dir));
    let maps = format!("/proc/{}/maps", busy.pid());
    while !fs::read_to_string(&maps).is_ok_and(|maps| maps.contains(library)) {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::remove_file(copy).expect("it was there");
    busy
}

/// A Python in a folder that only root may enter.
fn closed(dir: &Path) -> Busy {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700)).expect("it is ours");
    let program = dir.join("python");
    fs::copy(Interpreter::named("debian_3_11").path, &program).expect("there is room for a copy");
    Busy::start(&mut Command::new(&program))
}

/// All that is ever needed except this.
fn all_but(missing: &str) -> Vec<&'static str> {
    ALL.into_iter().filter(|capability| *capability != missing).collect()
}

/// With all of [`ALL`] each feature works; without one of them it works or the message names it. The table tells which.
#[test]
fn table() {
    let Some(_live) = live() else { return };
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    if paranoid.trim().parse::<i32>().is_ok_and(|level| level > 2) {
        not_run("kernel.perf_event_paranoid of 2 or less: above it the kernel wants CAP_SYS_ADMIN");
        return;
    }
    let nobody = Nobody::new();
    let debian = || Command::new(Interpreter::named("debian_3_11").command().get_program());
    let own = Busy::start(debian().uid(NOBODY).gid(NOBODY));
    let other = Busy::start(&mut debian());
    let closed_dir = tempfile::tempdir().expect("a temporary directory can be made");
    let closed = closed(closed_dir.path());
    let deleted = deleted(nobody.dir.path());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let program = debian().get_program().to_str().expect("ASCII").to_owned();
    let busy = "import time\nwhile time.process_time() < 0.4: pass";
    let limited = ["--all-python", "--uid", "0", "--max-cpu", "50", "--max-memory", "512M"];
    let features: [(&str, Vec<OsString>, Option<String>); 7] = [
        ("`-p` of a process of the same user", words(&["-p", &own.pid()]), Some(own.pid())),
        ("`-- CMD`", words(&["--", &program, "-S", "-c", busy]), None),
        ("`-p`, `--all-python`: another user's process", words(&["-p", &other.pid()]), Some(other.pid())),
        ("the same, its program in a folder closed to us", words(&["-p", &closed.pid()]), Some(closed.pid())),
        ("the same, its library deleted or replaced", words(&["-p", &deleted.pid()]), Some(deleted.pid())),
        ("`--all-python` with a filter and limits", words(&limited), Some(other.pid())),
        ("`--kernel`: kernel frames with their names", words(&["-p", &own.pid(), "--kernel"]), Some(own.pid())),
    ];
    for missing in ALL {
        let said = nobody.doctor(&all_but(missing), &[]);
        assert!(said.contains(&format!("CAP_{}", missing.to_uppercase())), "without {missing} doctor says:\n{said}");
    }
    let mut table = String::from("| feature | needs |\n| --- | --- |\n");
    for (feature, words, pid) in &features {
        let all = nobody.records(&ALL, words, pid.as_deref());
        assert_eq!(all, Ok(()), "{feature} with all capabilities");
        let mut needed = Vec::new();
        // Two at a time: a run mostly waits.
        for pair in ALL.chunks(2) {
            let records = |missing| nobody.records(&all_but(missing), words, pid.as_deref());
            let said = std::thread::scope(|scope| {
                let runs: Vec<_> = pair.iter().map(|missing| (missing, scope.spawn(|| records(missing)))).collect();
                runs.into_iter().map(|(missing, run)| (missing, run.join().expect("it runs"))).collect::<Vec<_>>()
            });
            for (missing, said) in said {
                let Err(said) = said else { continue };
                let name = format!("CAP_{}", missing.to_uppercase());
                assert!(said.contains(&name), "{feature} without {name} says:\n{said}");
                needed.push(format!("`{name}`"));
            }
        }
        table += &format!("| {feature} | {} |\n", needed.join(", "));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/privileges.md");
    let page = fs::read_to_string(&path).expect("the page is there");
    let (before, rest) = page.split_once("<!-- table -->\n").expect("the page has a place for the table");
    let (old, after) = rest.split_once("<!-- end -->").expect("the table has an end");
    if old != table && std::env::var_os("TACHYON_RENEW").is_some() {
        fs::write(&path, format!("{before}<!-- table -->\n{table}<!-- end -->{after}")).expect("it can be written");
        return;
    }
    assert_eq!(old, table, "docs/privileges.md is not what was found: renew it with TACHYON_RENEW=1");
}

/// Once it samples, no thread of the profiler has capabilities that it no longer needs.
#[test]
fn dropped_after_the_start() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "spin.py");
    let running = Profiler::of(target.pid()).milliseconds(1_500).start();
    // It samples before it drops.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let tasks = fs::read_dir(format!("/proc/{}/task", running.pid())).expect("it runs");
    let mut threads = 0;
    for task in tasks {
        let status = fs::read_to_string(task.expect("it runs").path().join("status")).expect("it runs");
        for set in ["CapPrm:", "CapEff:"] {
            let line = status.lines().find_map(|line| line.strip_prefix(set)).expect("every kernel tells");
            let set = u64::from_str_radix(line.trim(), 16).expect("a mask");
            // CAP_SETUID, CAP_NET_ADMIN, CAP_SYS_MODULE, CAP_SYS_ADMIN, CAP_PERFMON.
            for number in [7, 12, 16, 21, 38] {
                // One thread attaches the event anew to a CPU that comes back online, another one waits to load programs for what may
                // be met later: both read only what is the kernel's.
                let names = ["Name:\ttachyon-timer\n", "Name:\ttachyon-rest\n"];
                let attaches = number == 38 && names.iter().any(|name| status.starts_with(name));
                assert!((set >> number) & 1 == 0 || attaches, "capability {number} of:\n{status}");
            }
        }
        threads += 1;
    }
    assert!(threads >= 3, "{threads} threads");
    let recording = running.finish();
    assert!(recording.report.stored > 0);
}

/// Another user's process, without the right to read it: `-p` and `doctor` say whose it is and what would be enough.
#[test]
fn another_users_process() {
    let Some(_live) = live() else { return };
    let nobody = Nobody::new();
    let other = Busy::start(&mut Command::new(Interpreter::named("debian_3_11").command().get_program()));
    std::thread::sleep(std::time::Duration::from_millis(500));
    let wanted = ["it runs as uid 0, you are 65534", "CAP_SYS_PTRACE"];
    let has_all = |said: &str| wanted.iter().all(|wanted| said.contains(wanted));
    let said = nobody.records(&["bpf", "perfmon"], &words(&["-p", &other.pid()]), Some(&other.pid()));
    assert!(said.as_ref().is_err_and(|said| has_all(said)), "{said:?}");
    let line_of = |said: &str| {
        let line = said.lines().find(|line| line.contains(&format!("pid {} ", other.pid())));
        line.unwrap_or_default().to_owned()
    };
    for words in [&["--verbose"][..], &["-p", &other.pid()]] {
        let said = nobody.doctor(&["bpf", "perfmon"], words);
        let line = line_of(&said);
        assert!(line.starts_with("warn") && has_all(&line), "{words:?}: {said}");
        let said = nobody.doctor(&["bpf", "perfmon", "sys_ptrace"], words);
        assert!(line_of(&said).starts_with("ok"), "{words:?}: {said}");
    }
}

/// A program that no other user may reach: `-p` and `doctor` name the capability that is missing, not one that is there.
#[test]
fn a_closed_folder() {
    let Some(_live) = live() else { return };
    let nobody = Nobody::new();
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let closed = closed(dir.path());
    std::thread::sleep(std::time::Duration::from_millis(500));
    let rights = ["bpf", "perfmon", "sys_ptrace"];
    let said = nobody.records(&rights, &words(&["-p", &closed.pid()]), Some(&closed.pid()));
    let names_it = |said: &str| said.contains("CAP_DAC_READ_SEARCH") && !said.contains("CAP_SYS_PTRACE");
    assert!(said.as_ref().is_err_and(|said| names_it(said)), "{said:?}");
    let line_of = |rights: &[&str]| {
        let said = nobody.doctor(rights, &["-p", &closed.pid()]);
        let line = said.lines().find(|line| line.contains(&format!("pid {} ", closed.pid())));
        line.unwrap_or_default().to_owned()
    };
    let line = line_of(&rights);
    assert!(line.starts_with("warn") && names_it(&line), "{line}");
    let line = line_of(&[&rights[..], &["dac_read_search"]].concat());
    assert!(line.starts_with("ok"), "{line}");
}

/// A kernel that tells nothing of its types, as far as the profiler can see.
#[test]
fn without_btf() {
    const HIDDEN: [&str; 5] =
        ["unshare", "--mount", "sh", "-c", r#"mount -t tmpfs none /sys/kernel/btf && exec "$0" "$@""#];
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("debian_3_11"), "spin.py");
    let output = Profiler::of(target.pid()).milliseconds(100).within(&HIDDEN).run();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    let names_it =
        |said: &str| ["/sys/kernel/btf/vmlinux", "CONFIG_DEBUG_INFO_BTF=y"].iter().all(|it| said.contains(it));
    assert!(names_it(&said) && said.contains("hint: "), "{said}");
    let output = Command::new(HIDDEN[0]).args(&HIDDEN[1..]).arg(binary()).arg("doctor").output();
    let said = String::from_utf8_lossy(&output.expect("unshare can be run").stdout).into_owned();
    let line = said.lines().find(|line| line.contains("BTF: "));
    assert!(line.is_some_and(|line| line.starts_with("FAIL") && names_it(line)), "{said}");
}
