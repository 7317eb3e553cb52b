//! What ordinary users without rights do to a recording of the whole host, beside Pythons that do nothing wrong: one that runs
//! before it begins, one that starts meanwhile, and a short one. All of these keep their samples, and the recording ends.

use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recording, Target, binary, expect, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_12 built_3_14t]: a_name_that_never_comes);
on_each_interpreter!(at_home: pages_nobody_serves, a_library_that_never_comes);

/// Samples per second.
const RATE: f64 = 499.0;
/// When a recording has not ended by then it hangs.
const PATIENCE: Duration = Duration::from_secs(40);
/// How much longer than asked a recording may take on a machine that does other things: a second on a calm one.
const MOST_DELAY: Duration = Duration::from_secs(5);

/// A Python that uses so much CPU time, and tells how much it was.
fn honest(interpreter: &Interpreter, cpu_s: f64) -> Child {
    let script = format!("import time\ndef work():\n while time.process_time() < {cpu_s}: pass\nwork()");
    interpreter.command().args(["-c", &script]).spawn().expect("it runs")
}

/// What the attacker's end releases, should the profiler wait for it: then the test fails, and hangs nobody.
fn ended(mut child: Child, attacker: &mut Target) -> Output {
    let deadline = Instant::now() + PATIENCE;
    let mut hung = false;
    while child.try_wait().expect("a child can be waited for").is_none() {
        if Instant::now() > deadline {
            hung = true;
            attacker.kill();
            let _ended = child.kill();
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().expect("a child can be waited for");
    assert!(!hung, "it waits for the attacker:\n{}", String::from_utf8_lossy(&output.stderr));
    output
}

/// Records the host while `never.py` attacks in this way.
fn attacked(interpreter: &Interpreter, attack: &str, options: &[&str]) -> (Recording, Target) {
    let before = Target::start(interpreter, "deep_stack.py");
    let mut attacker = Target::start_with(interpreter, "never.py", &[attack]);
    let mut profiler = Profiler::new().arg("--all-python").rate(RATE as u32);
    for &option in options {
        profiler = profiler.arg(option);
    }
    let running = profiler.start();
    let mut later = honest(interpreter, 0.6);
    let mut short = honest(interpreter, 0.1);
    let pids = [later.id(), short.id()];
    short.wait().expect("a child can be waited for");
    later.wait().expect("a child can be waited for");
    // Missing names are asked for once a second.
    std::thread::sleep(Duration::from_millis(1_200));
    running.signal(libc::SIGTERM);
    let asked = Instant::now();
    let recording = running.finish_with(|child| ended(child, &mut attacker));
    let took = asked.elapsed();
    println!(
        "{attack}: the end took {took:?}; {} samples, notes {:?}",
        recording.report.stored, recording.report.notes
    );
    assert!(took < MOST_DELAY, "{attack}: {took:?}");
    for (pid, least) in [(before.pid(), 200.0), (pids[0], 0.6 * RATE), (pids[1], 0.1 * RATE)] {
        let process = recording.report.processes.iter().find(|process| process.pid == pid);
        let process = process.unwrap_or_else(|| panic!("{attack}: {pid} is missing: {:#?}", recording.report));
        assert!(process.samples as f64 > 0.7 * least, "{attack}: {least} expected: {process:?}");
        assert!(expect::all_named(process, expect::cut(&recording.report)), "{attack}: {process:?}");
    }
    (recording, attacker)
}

/// Somebody is told that this process was not waited for.
fn is_told(recording: &Recording, pid: u32) -> bool {
    let told = |note: &String| note.contains(&format!("pid {pid}")) && note.contains("not waited for");
    recording.report.notes.iter().any(told)
}

fn dumped(attacker: &mut Target) -> Output {
    let mut command = Command::new(binary());
    command.args(["dump", "-p", &attacker.pid().to_string()]);
    let child = command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn();
    ended(child.expect("it runs"), attacker)
}

/// A function's name lies in a file of a FUSE mount whose server does not answer.
fn a_name_that_never_comes(interpreter: &Interpreter) {
    let (recording, mut attacker) = attacked(interpreter, "name", &[]);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    let process =
        recording.report.processes.iter().find(|process| process.pid == attacker.pid()).expect("it is sampled");
    assert!(process.samples > 20 && process.named < process.samples, "{process:?}");
    let output = dumped(&mut attacker);
    println!("{}", String::from_utf8_lossy(&output.stdout));
}

/// A function's name lies in pages that a handler of page faults does not fill.
fn pages_nobody_serves(interpreter: &Interpreter) {
    let (recording, mut attacker) = attacked(interpreter, "handled_name", &[]);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    dumped(&mut attacker);
}

/// Code lies in such a file, whose symbols and unwind tables are wanted.
fn a_library_that_never_comes(interpreter: &Interpreter) {
    let (recording, mut attacker) = attacked(interpreter, "library", &["--native"]);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    dumped(&mut attacker);
}
