//! CPython where its name does not lead: inside another program, under another name, with its file gone.

use std::process::Command;
use tachyon_tests::{Interpreter, Profiler, Target, expect, live, program};

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
