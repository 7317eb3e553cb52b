//! What unprivileged users can do to a recording of the whole host, beside honest Pythons: one that runs before it begins, one
//! that starts meanwhile, and short ones. All of these keep their exact samples, and the recording ends.
//!
//! `docs/limits.md` has what each of these may cost. Programs that lie about their memory are in `hostile.rs`.

use crate::hostile::only;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Output};
use std::time::{Duration, Instant};
use tachyon_tests::{
    Interpreter, Profiler, Recording, Sample, Target, binary, expect, let_run, on_each_interpreter, statistics,
    stretches,
};
use tempfile::TempDir;

on_each_interpreter!(on [pyenv_3_8 built_3_14t] long [pyenv_3_12]: a_name_that_never_comes);
on_each_interpreter!(on [debian_3_11]: pages_nobody_serves);
on_each_interpreter!(on [pyenv_3_12]: a_library_that_never_comes);
on_each_interpreter!(on [debian_3_11]: long_names);
on_each_interpreter!(on [debian_3_11]: new_names);
on_each_interpreter!(on [debian_3_11]: debug_links);
on_each_interpreter!(on [debian_3_11]: odd_debug_links);
on_each_interpreter!(on [debian_3_11]: many_mappings);
on_each_interpreter!(on [debian_3_11]: large_symbols);
on_each_interpreter!(on [debian_3_11]: long_command_line);
on_each_interpreter!(on [debian_3_11]: exec_chain);
on_each_interpreter!(on [debian_3_11]: storm);
on_each_interpreter!(on [debian_3_11]: threads);
on_each_interpreter!(on [debian_3_11]: names_unreadable);
on_each_interpreter!(on [debian_3_11]: perf_map);
on_each_interpreter!(on [debian_3_11]: perf_map_always_new);
on_each_interpreter!(on [debian_3_11]: nested);

/// Samples per second.
const RATE: f64 = 499.0;
/// A recording that has not ended by then hangs.
const PATIENCE: Duration = Duration::from_secs(60);
/// How much longer than asked a recording may take on a busy machine: a second on an idle one.
const MOST_DELAY: Duration = Duration::from_secs(5);
/// The least share of their samples that honest programs keep.
const KEPT: f64 = 0.95;
/// `--max-memory`: an unoptimised build is larger.
const MEMORY: u64 = 320 << 20;
/// CPU time of each honest program that is recorded.
const WORK: Duration = Duration::from_millis(500);
/// How many short programs there are, and CPU time of each.
const SHORT: (usize, f64) = (4, 0.15);
const NOBODY: u32 = 65_534;

/// Should the profiler wait for the attacker, the attacker's end releases it: the test then fails instead of hanging.
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

/// Honest programs have priority over most others: beside so many attackers they would hardly get any time to be sampled.
fn is_served_first(pid: u32) {
    // SAFETY: setpriority(2) touches no memory; the process is a child that has not been waited for.
    let result = unsafe { libc::setpriority(libc::PRIO_PROCESS, pid, -5) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

/// A folder of the attacker's own.
fn folder() -> TempDir {
    let folder = tempfile::Builder::new().prefix("attack").tempdir().expect("a folder can be made");
    std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY)).expect("root may give it away");
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o700)).expect("it is there");
    folder
}

/// An attack under way.
struct Attack {
    program: &'static str,
    name: &'static str,
    options: &'static [&'static str],
}

impl Attack {
    /// One of `attacks.py`.
    const fn of(name: &'static str) -> Self {
        Self { program: "attacks.py", name, options: &["--native"] }
    }

    /// One of `never.py`.
    const fn never(name: &'static str) -> Self {
        Self { program: "never.py", name, options: &[] }
    }

    const fn with(self, options: &'static [&'static str]) -> Self {
        Self { options, ..self }
    }

    /// Records the host meanwhile, and checks everything that must hold whatever the attack.
    fn record(&self, interpreter: &Interpreter) -> (Recording, Target) {
        let honest = Interpreter::named("pyenv_3_12");
        let folder = folder();
        let path = folder.path().to_str().expect("temporary paths are text");
        let before = Target::start(&honest, "deep_stack.py");
        let mut attacker = Target::start_with(interpreter, self.program, &[self.name, path]);
        is_served_first(before.pid());
        let mut profiler = Profiler::new().arg("--all-python").rate(RATE as u32);
        for option in self.options.iter().copied().chain(["--max-memory", "320MiB"]) {
            profiler = profiler.arg(option);
        }
        let running = profiler.start();
        let switches = stretches(before.pid());
        let later = Target::start(&honest, "deep_stack.py");
        is_served_first(later.pid());
        let mut short = Vec::new();
        for _ in 0..SHORT.0 {
            let mut child = short_python(&honest, SHORT.1);
            is_served_first(child.id());
            short.push(child.id());
            assert!(child.wait().expect("a child can be waited for").success());
        }
        let_run(later.pid(), WORK);
        // Missing names are looked up once a second.
        std::thread::sleep(Duration::from_millis(1_100));
        let switches = stretches(before.pid()) - switches;
        running.signal(libc::SIGTERM);
        let asked = Instant::now();
        let mut took = Duration::ZERO;
        let recording = running.finish_with(|child| {
            let output = ended(child, &mut attacker);
            // Reading and judging the file is the test's own time.
            took = asked.elapsed();
            output
        });
        self.judge(&recording, took);
        for (target, stretches) in [(&before, switches), (&later, stretches(later.pid()))] {
            self.keeps(&recording, &[target.pid()], stretches, false);
            let mut recorded = only(&recording, target.pid()).without_native();
            // While it starts it does something else.
            let working = |sample: &Sample| recorded.frames_of(sample).any(|frame| frame.function == "Chain.begin");
            let samples: Vec<Sample> = recorded.samples.iter().filter(|sample| working(sample)).copied().collect();
            assert!(samples.len() as f64 > 0.5 * WORK.as_secs_f64() * RATE, "{}: {} at work", self.name, samples.len());
            recorded.samples = samples;
            expect::check_stacks(&recorded, &target.facts, 0.99);
        }
        self.keeps(&recording, &short, switches, true);
        let of_short = recording.report.processes.iter().filter(|process| short.contains(&process.pid));
        let (met, early) = of_short.fold((0, 0), |sum, of| (sum.0 + of.samples, sum.1 + of.uninspected));
        println!("{}: {early} of {} runs of short programs came before they were looked at", self.name, met + early);
        // Beside a storm the first of them may wait most of its life to be looked at; all of them together do not.
        let known: Vec<f64> = short
            .iter()
            .map(|&pid| {
                let recorded = only(&recording, pid);
                let is_it = |sample: &&Sample| {
                    recorded.frames_of(sample).any(|frame| frame.function == "work" && frame.filename == "<string>")
                };
                recorded.samples.iter().filter(is_it).count() as f64 / (SHORT.1 * RATE)
            })
            .collect();
        println!("{}: shares of short programs' time that are known: {known:.2?}", self.name);
        assert!(
            known.iter().sum::<f64>() > 0.6 * known.len() as f64,
            "{}: {known:?} of {short:?} are known",
            self.name
        );
        (recording, attacker)
    }

    fn judge(&self, recording: &Recording, took: Duration) {
        let (report, name) = (&recording.report, self.name);
        let memory = report.cost.peak_rss_bytes + report.cost.map_bytes;
        println!(
            "{name}: the end took {took:?}; {} samples of {} runs, lost {:?}; {} MiB, {:.1} s of CPU time; notes {:#?}, refused {:?}",
            report.stored,
            report.ran,
            report.loss,
            memory >> 20,
            report.cost.user_cpu_s,
            report.notes,
            report.refused.iter().take(5).collect::<Vec<_>>()
        );
        assert!(took < MOST_DELAY, "{name}: {took:?}");
        assert!(memory <= MEMORY, "{name}: {memory} bytes: {report:#?}");
        assert!(!report.notes.iter().any(|note| note.contains("the recording ends")), "{name}: {:?}", report.notes);
        let lost: u64 = report.loss.values().sum();
        // It is unknown whose they are; all of them may be an honest program's.
        let full = recording.lost("ring_full") as f64;
        assert!(full <= (1.0 - KEPT) * (report.stored as f64 + full), "{name}: the ring was full: {:?}", report.loss);
        assert_eq!(recording.stderr.contains("nothing lost"), lost == 0, "{name}: {}", recording.stderr);
    }

    /// Honest programs have the samples that they should have, all of them named. `short`: one may end before it is looked at; it is then
    /// counted.
    fn keeps(&self, recording: &Recording, pids: &[u32], stretches: u64, short: bool) {
        let (mut samples, mut cpu_s) = (0, 0.0);
        for pid in pids {
            let process = recording.report.processes.iter().find(|process| process.pid == *pid);
            let Some(process) = process else {
                let counted = short && recording.lost("never_inspected") > 0;
                assert!(counted, "{}: {pid} is missing: {:?}", self.name, recording.report.loss);
                continue;
            };
            samples += process.samples as usize;
            cpu_s += process.cpu_s.expect("its time is known");
            let cut = expect::cut(&recording.report);
            assert!(expect::all_named(process, cut + process.not_initialized), "{}: {process:?}", self.name);
        }
        println!("{}: {pids:?} have {samples} samples of {cpu_s:.3} s in {stretches} pieces", self.name);
        let right = statistics::within_ticks(samples, RATE, (cpu_s, 2.0 * cpu_s), stretches, 1.0 - KEPT);
        let report = &recording.report;
        assert!(
            right,
            "{}: {pids:?} have {samples} samples of {cpu_s} s in {stretches} pieces; {} runs of {:?}, {} not Python, lost {:?}",
            self.name, report.ran, report.expected, report.not_python, report.loss
        );
    }
}

/// A Python that uses this much CPU time in its function, however long it took to start beside an attacker.
fn short_python(interpreter: &Interpreter, cpu_s: f64) -> Child {
    let script = format!(
        "import time\ndef work():\n end = time.process_time() + {cpu_s}\n while time.process_time() < end: pass\nwork()"
    );
    interpreter.command().args(["-c", &script]).spawn().expect("it runs")
}

/// The report says that this process was not waited for.
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
    let (recording, mut attacker) = Attack::never("name").record(interpreter);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    let process =
        recording.report.processes.iter().find(|process| process.pid == attacker.pid()).expect("it is sampled");
    assert!(process.samples > 20 && process.named < process.samples, "{process:?}");
    let output = dumped(&mut attacker);
    println!("{}", String::from_utf8_lossy(&output.stdout));
}

/// A function's name lies in pages that a handler of page faults does not fill.
fn pages_nobody_serves(interpreter: &Interpreter) {
    let (recording, mut attacker) = Attack::never("handled_name").record(interpreter);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    dumped(&mut attacker);
}

/// Code lies in such a file, and its symbols and unwind tables are needed.
fn a_library_that_never_comes(interpreter: &Interpreter) {
    let (recording, mut attacker) = Attack::never("library").with(&["--native"]).record(interpreter);
    assert!(is_told(&recording, attacker.pid()), "{:#?}", recording.report);
    dumped(&mut attacker);
}

/// 24 programs with 500 functions of 60-kB names.
fn long_names(interpreter: &Interpreter) {
    Attack::of("long_names").with(&[]).record(interpreter);
}

fn new_names(interpreter: &Interpreter) {
    Attack::of("new_names").with(&[]).record(interpreter);
}

fn debug_links(interpreter: &Interpreter) {
    Attack::of("debug_links").record(interpreter);
}

fn odd_debug_links(interpreter: &Interpreter) {
    Attack::of("odd_debug_links").record(interpreter);
}

fn many_mappings(interpreter: &Interpreter) {
    Attack::of("many_mappings").record(interpreter);
}

fn large_symbols(interpreter: &Interpreter) {
    Attack::of("large_symbols").record(interpreter);
}

fn long_command_line(interpreter: &Interpreter) {
    let (_recording, mut attacker) = Attack::of("long_command_line").record(interpreter);
    println!("{:?}", attacker.facts);
    let output = dumped(&mut attacker);
    assert!(output.stdout.len() < 8 << 10, "{} bytes", output.stdout.len());
}

fn exec_chain(interpreter: &Interpreter) {
    Attack::of("exec_chain").with(&[]).record(interpreter);
}

fn storm(interpreter: &Interpreter) {
    Attack::of("storm").record(interpreter);
}

fn threads(interpreter: &Interpreter) {
    let (_recording, attacker) = Attack::of("threads").record(interpreter);
    println!("{:?}", attacker.facts);
}

fn names_unreadable(interpreter: &Interpreter) {
    Attack::of("names_unreadable").with(&[]).record(interpreter);
}

fn perf_map(interpreter: &Interpreter) {
    Attack::of("perf_map").record(interpreter);
    remove_maps();
}

/// Removes what killed attackers leave in `/tmp`.
fn remove_maps() {
    for file in std::fs::read_dir("/tmp").expect("it is there").flatten() {
        let is_map = file.file_name().to_str().is_some_and(|name| name.starts_with("perf-") && name.ends_with(".map"));
        if is_map && file.metadata().is_ok_and(|metadata| metadata.uid() == NOBODY) {
            let _gone = std::fs::remove_file(file.path());
        }
    }
}

fn perf_map_always_new(interpreter: &Interpreter) {
    Attack::of("perf_map_always_new").record(interpreter);
    remove_maps();
}

fn nested(interpreter: &Interpreter) {
    Attack::of("nested").record(interpreter);
}
