//! Filters: what is asked for is recorded, and the rest costs nothing.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tachyon::sinks::metadata::Metadata;
use tachyon_tests::{Interpreter, Profiler, Recording, live, not_run};

const BUSY: &str = "while True: pass";
/// The same with a stack of thirty frames, for which the project's budgets are set.
const BUSY_BELOW: &str = "def f(n):\n    while not n: pass\n    f(n - 1)\nf(28)";

/// Busy programs, killed when dropped.
struct Crowd(Vec<Child>);

impl Crowd {
    fn pids(&self) -> BTreeSet<u32> {
        self.0.iter().map(Child::id).collect()
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that has already ended does not matter.
            let _ended = child.kill();
            let _ended = child.wait();
        }
    }
}

/// Run at low priority, so that a hundred of them leave the profiler time to start.
fn busy(python: &Path) -> Command {
    running(python, BUSY)
}

fn running(python: &Path, program: &str) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(python).args(["-S", "-c", program]).stdin(Stdio::null());
    command
}

fn crowd(count: usize, command: impl Fn() -> Command) -> Crowd {
    Crowd((0..count).map(|_| command().spawn().expect("the interpreter can be run")).collect())
}

fn python() -> PathBuf {
    PathBuf::from(Interpreter::named("debian_3_11").command().get_program())
}

fn pids(recording: &Recording) -> BTreeSet<u32> {
    recording.report.processes.iter().map(|process| process.pid).collect()
}

fn record(words: &[&str]) -> Recording {
    let profiler = words.iter().fold(Profiler::new().arg("--all-python"), |profiler, word| profiler.arg(*word));
    profiler.rate(499).milliseconds(1_000).record()
}

/// One of 100 busy processes is wanted: the others are seen and left alone.
#[test]
fn one_of_a_hundred_by_comm() {
    let Some(_live) = live() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let link = dir.path().join("needle-in-hay");
    std::os::unix::fs::symlink(python(), &link).expect("a link can be made");
    let needle = crowd(1, || running(&link, BUSY_BELOW));
    let hay = crowd(99, || running(&python(), BUSY_BELOW));
    std::thread::sleep(std::time::Duration::from_secs(2));
    let all = record(&["--native"]);
    let one = record(&["--native", "--comm", "needle*"]);
    assert!(pids(&all).intersection(&hay.pids()).count() > 90, "{:#?}", all.report);
    assert!(pids(&one).is_subset(&needle.pids()), "{:?}", pids(&one));
    // Other programs of this machine may end before the profiler can look at them: what they were stays unknown.
    let lost = one.report.loss.iter().filter(|(cause, _)| *cause != "never_inspected").map(|(_, count)| count);
    assert_eq!(lost.sum::<u64>(), 0, "{:#?}", one.report);
    // Per run, without runs that hit an idle CPU.
    let of_a_run = |recording: &Recording| {
        let report = &recording.report;
        let ns = report.cost.bpf_run_ns.expect("the tests run as root, so the kernel measures");
        println!("BPF time: {ns} ns in {} runs, {} of them idle", report.ran, report.idle);
        ns as f64 / (report.ran - report.idle) as f64
    };
    let ratio = of_a_run(&one) / of_a_run(&all);
    // What cannot be measured exactly on a busy machine is only shown (the benchmark has it, too); what can be counted is
    // asserted.
    println!("one of 100 takes {:.1} % of all", ratio * 100.0);
    assert!(one.report.stored * 10 < all.report.stored, "{} of {}", one.report.stored, all.report.stored);
    assert!(one.report.filtered * 10 > all.report.stored * 5, "{:#?}", one.report);
}

/// A process that execs is judged anew, in both directions; its time before it was judged is not a loss.
#[test]
fn exec_is_judged_anew() {
    let Some(_live) = live() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let link = dir.path().join("wanted");
    std::os::unix::fs::symlink(python(), &link).expect("a link can be made");
    let spin = |seconds: &str| format!("import time; end = time.time() + {seconds}\nwhile time.time() < end: pass\n");
    // Begins unwanted, becomes wanted, becomes unwanted.
    let script = format!(
        "import os\n{}os.execv('{}', ['wanted', '-S', '-c', {:?}])\n",
        spin("0.5"),
        link.display(),
        format!(
            "import os\n{}os.execv('{}', ['python3.11', '-S', '-c', 'while True: pass'])\n",
            spin("0.7"),
            python().display()
        ),
    );
    let running = Profiler::new().arg("--all-python").arg("--comm").arg("wanted").rate(499).start();
    let changing = crowd(1, || {
        let mut command = Command::new(python());
        command.args(["-S", "-c", &script]);
        command
    });
    std::thread::sleep(std::time::Duration::from_millis(2_500));
    running.signal(libc::SIGINT);
    let recording = running.finish();
    assert_eq!(pids(&recording), changing.pids(), "{:#?}", recording.report);
    let process = &recording.report.processes[0];
    // 0.7 s at 499 Hz and its start, on a CPU that it may have to share, while intervals vary by a fifth. The programs before
    // and after it ran more than twice as long.
    assert!((30..=450).contains(&process.samples), "{process:?}");
    assert!(recording.report.filtered > process.samples, "{:#?}", recording.report);
}

/// User and name together.
#[test]
fn by_user() {
    let Some(_live) = live() else { return };
    let theirs = crowd(2, || {
        let mut command = busy(&python());
        command.uid(65_534);
        command
    });
    let ours = crowd(2, || busy(&python()));
    std::thread::sleep(std::time::Duration::from_secs(1));
    let recording = record(&["--uid", "65534", "--comm", "python3*"]);
    assert_eq!(pids(&recording), theirs.pids(), "{:#?}", recording.report);
    let nobody = Profiler::of(ours.0[0].id()).arg("--uid").arg("65534").milliseconds(100).run();
    let told = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert_eq!(nobody.status.code(), Some(1), "{told}");
    assert!(told.contains("is not among the processes asked for"), "{told}");
}

/// A control group as a container runtime makes it, removed when dropped.
struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        // A leftover is empty and harmless.
        let _left = fs::remove_dir(&self.0);
    }
}

const CONTAINER: &str = "4b1f9b1c2a3d4e5f60718293a4b5c6d7e8f900112233445566778899aabbccdd";
const POD: &str = "0a1b2c3d-1111-2222-3333-444455556666";

/// A control group below this process's own; `None` if none may be made.
fn group() -> Option<(Group, Group, String)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    // Version 2, else the first hierarchy of version 1 whose folder exists.
    let base = own.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?.trim_start_matches("name="), fields.next()?);
        let dir = Path::new("/sys/fs/cgroup").join(controllers).join(path.trim_start_matches('/'));
        dir.join("cgroup.procs").exists().then_some(dir)
    })?;
    let pod = base.join(format!("kubepods-pod{}.slice", POD.replace('-', "_")));
    let container = pod.join(format!("cri-containerd-{CONTAINER}.scope"));
    if let Err(error) = fs::create_dir_all(&container) {
        println!("no control group can be made in {}: {error}", base.display());
        return None;
    }
    let path = pod.to_str().expect("ASCII").to_owned();
    Some((Group(container), Group(pod), path))
}

/// By control group and by container; both are labels of the profile.
#[test]
fn by_cgroup_and_container() {
    let Some(_live) = live() else { return };
    let Some((container, _pod, path)) = group() else {
        not_run("control groups that can be made");
        return;
    };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let link = dir.path().join("needle-in-hay");
    std::os::unix::fs::symlink(python(), &link).expect("a link can be made");
    let needles = crowd(2, || busy(&link));
    let inside = crowd(1, || busy(&python()));
    let outside = crowd(1, || busy(&python()));
    fs::write(container.0.join("cgroup.procs"), inside.0[0].id().to_string()).expect("a process can be moved");
    fs::write(container.0.join("cgroup.procs"), needles.0[0].id().to_string()).expect("a process can be moved");
    std::thread::sleep(std::time::Duration::from_secs(1));
    // Of two with the name one is in the group; of two in the group one has the name.
    let both = record(&["--cgroup", &path, "--comm", "needle*", "--uid", "0"]);
    assert_eq!(pids(&both), BTreeSet::from([needles.0[0].id()]), "{:#?}", both.report);
    let none = Profiler::new().arg("--cgroup").arg(&path).arg("--comm").arg("needle*").arg("--uid").arg("65534");
    let none = none.milliseconds(300).run();
    let told = String::from_utf8_lossy(&none.stderr).into_owned();
    assert_eq!(none.status.code(), Some(1), "{told}");
    assert!(told.contains("tachyon-bpf: nothing was recorded: no CPython fits --cgroup"), "{told}");
    drop(needles);
    for words in [["--cgroup", &path], ["--container", &CONTAINER[..12]]] {
        let recording = record(&words);
        assert_eq!(pids(&recording), inside.pids(), "{words:?}: {:#?}", recording.report);
        let file = fs::File::open(&recording.path).expect("the profile is there");
        let reader = tachyon::tach::Reader::new(std::io::BufReader::new(file)).expect("it is whole");
        let metadata = Metadata::find(reader.tables()).expect("it describes itself");
        let process = &metadata.processes[0];
        let labels = (process.container.as_str(), process.pod.as_str(), process.script.as_str());
        assert_eq!(labels, (CONTAINER, POD, "-c"));
        let told = &recording.report.processes[0];
        assert_eq!((told.container.as_str(), told.pod.as_str(), told.script.as_str()), labels);
    }
    drop((inside, outside));
    // The group can be removed once its processes have gone from it.
    std::thread::sleep(std::time::Duration::from_millis(200));
}

/// A filter that matches nothing (a mistyped path) is a failure: at once if that can be known, else at the end.
#[test]
fn nothing_fits() {
    let Some(_live) = live() else { return };
    let _crowd = crowd(1, || busy(&python()));
    for (words, seconds, what) in [
        // A recording of ten minutes would be noticed.
        (["--cgroup", "/no/such/group"], "600s", "there is no control group /no/such/group"),
        (["--container", "0123456789ab"], "300ms", "nothing was recorded: no CPython fits --container 0123456789ab"),
        (["--comm", "no-such-name"], "300ms", "nothing was recorded: no CPython fits --comm no-such-name"),
    ] {
        let profiler = words.iter().fold(Profiler::new(), |profiler, word| profiler.arg(*word));
        let output = profiler.arg("-d").arg(seconds).run();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(told.contains(what), "{told}");
    }
}
