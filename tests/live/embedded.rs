//! CPython where its name does not give it away: inside another program, under another name, with its file gone.

use std::path::Path;
use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Recording, Target, expect, live, program};

/// Records `generators.py`, all of whose stacks are known.
fn check(target: &Target) {
    let recording = Profiler::of(target.pid()).rate(499).cpu_milliseconds(target.pid(), 1_500).record();
    let seen = expect::check_stacks(&recording.recorded, &target.facts, 0.99);
    println!("{} {seen:?}", recording.report.processes[0].python_version);
    assert!(recording.report.stored > 300, "{:#?}", recording.report);
}

#[test]
fn a_busy_loop_in_gdb() {
    let Some(_live) = live() else { return };
    let path = program("generators.py").display().to_string();
    let folder = program("").display().to_string();
    let mut command = Command::new("gdb");
    command.args(["-nx", "-batch", "-ex"]).arg(format!("python import sys; sys.path.insert(0, {folder:?})"));
    command.arg("-ex").arg(format!("python import runpy; runpy.run_path({path:?}, run_name='__main__')"));
    command.env("PYTHONDONTWRITEBYTECODE", "1").env_remove("PYTHONPATH").env_remove("PYTHONHOME");
    let target = Target::embedded(&mut command, "generators.py");
    check(&target);
}

/// Debian's executable under a name that says nothing, and removed while it runs.
#[test]
fn renamed_and_deleted() {
    let Some(_live) = live() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("payroll service");
    std::fs::copy(Interpreter::named("debian_3_11").path, &copy).expect("it can be copied");
    let mut command = Command::new(&copy);
    command.arg("-B").arg(program("generators.py")).env_remove("PYTHONPATH").env_remove("PYTHONHOME");
    let target = Target::embedded(&mut command, "generators.py");
    check(&target);
    std::fs::remove_file(&copy).expect("it can be removed");
    check(&target);
}

/// The program of `late_python.c`, the installation whose library it loads, and that library.
fn late_python(folder: &Path, interpreter: &Interpreter) -> (String, String, String) {
    let late = folder.join("late");
    let built = Command::new("cc").arg("-o").arg(&late).arg(program("late_python.c")).arg("-ldl").status();
    assert!(built.is_ok_and(|status| status.success()), "a C compiler is needed, as for building the profiler");
    let home = interpreter.path.parent().and_then(Path::parent).expect("bin lies in the installation");
    let library = home.join("lib").join(format!("libpython3.{}.so.1.0", interpreter.minor));
    let text = |path: &Path| path.to_str().expect("ASCII").to_owned();
    (text(&late), text(home), text(&library))
}

/// A program that loads libpython long after it was taken for something else: noticed all the same, whether found by
/// chance or started by the profiler.
fn loaded_late(interpreter: &Interpreter) {
    let folder = tempfile::tempdir().expect("a folder");
    let (late, home, library) = late_python(folder.path(), interpreter);
    let (late, library) = (&late[..], &library[..]);
    let script = "import time\ndef late():\n    end = time.thread_time() + 1.0\n    while time.thread_time() < end: pass\nlate()\n";
    let check = |recording: &Recording, pid: Option<u32>| {
        assert_eq!(recording.status, 0, "{}", recording.stderr);
        let found = recording.report.processes.iter().find(|process| pid.is_none_or(|pid| pid == process.pid));
        let found = found.unwrap_or_else(|| panic!("not noticed: {:#?}", recording.report));
        let in_late = recording.recorded.samples.iter().filter(|sample| {
            u64::from(found.pid) == sample.thread_id
                && recording.recorded.frames_of(sample).any(|frame| frame.function == "late")
        });
        let in_late = in_late.count() as u64;
        println!("{}: {in_late} samples in `late` of {found:?}", interpreter.name);
        assert!(in_late > 300 && found.named >= in_late, "{found:?}");
        assert!(recording.report.not_python > 300, "before it was none: {:#?}", recording.report);
    };
    // `UNDECIDED` in `recording/follow.rs` is two seconds.
    let running = Profiler::new().arg("--all-python").rate(499).start();
    let child = Command::new(late).args(["3500", library, script]).env("PYTHONHOME", &home).spawn();
    let mut child = child.expect("it was built");
    assert!(child.wait().expect("it can be waited for").success());
    running.signal(libc::SIGINT);
    check(&running.finish(), Some(child.id()));
    let profiler = Profiler::new().rate(499).env("PYTHONHOME", &home).command(&[late, "3500", library, script]);
    check(&profiler.record(), None);
}

/// Starts of an executable that has not been CPython so far wake nothing: it is still noticed once it is.
fn often_none_before(interpreter: &Interpreter) {
    let folder = tempfile::tempdir().expect("a folder");
    let (late, home, library) = late_python(folder.path(), interpreter);
    let script = "import time\ndef late():\n    end = time.thread_time() + 0.5\n    while time.thread_time() < end: pass\nlate()\n";
    // Events are batched up to 100 Hz.
    let running = Profiler::new().arg("--all-python").rate(97).start();
    let mut pids = Vec::new();
    for arguments in [&[][..], &["1", &library, script]] {
        for _ in 0..8 {
            let mut child = Command::new(&late).args(arguments).env("PYTHONHOME", &home).spawn().expect("it was built");
            assert_eq!(child.wait().expect("it can be waited for").success(), !arguments.is_empty());
            if !arguments.is_empty() {
                pids.push(u64::from(child.id()));
            }
        }
    }
    running.signal(libc::SIGINT);
    let recording = running.finish();
    let recorded = &recording.recorded;
    let in_late = |pid: &u64| {
        let of_it = recorded.samples.iter().filter(|sample| sample.thread_id == *pid);
        of_it.filter(|sample| recorded.frames_of(sample).any(|frame| frame.function == "late")).count()
    };
    // About 48 of each; the first may be looked at 100 ms late, and a timer's interval is drawn within a fifth.
    let met: Vec<_> = pids.iter().map(in_late).collect();
    println!("{}: {met:?} samples in `late`, lost {:?}", interpreter.name, recording.report.loss);
    assert!(met.iter().all(|met| *met > 12), "{met:?}: {:#?}", recording.report);
}

tachyon_tests::on_each_interpreter!(on [pyenv_3_12] long [pyenv_3_9]: loaded_late);
tachyon_tests::on_each_interpreter!(on [pyenv_3_12]: often_none_before);
