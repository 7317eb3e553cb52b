//! OpenTelemetry's thread and process context, found from outside: each thread's variable is where the program itself says,
//! whatever defines it and however it is loaded, and ddtrace's spans are those that it reports itself.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tachyon::inspect::spans::{NoProcessContext, NoThreadLocal, Published, Spans};
use tachyon::remote::RemoteProcess;
use tachyon::types::Pid;
use tachyon_common::walk::{ThreadPointer, running_span, thread_variable};
use tachyon_common::whose::{ThreadLocal, Whose, flags};
use tachyon_tests::{Interpreter, Profiler, Target, let_run, live, on_each_interpreter, package, program};

// On x86-64 a thread's identity is its thread pointer.
#[cfg(target_arch = "x86_64")]
on_each_interpreter!(on [pyenv_3_13 sid_3_14]: spans_of_ddtrace);
on_each_interpreter!(on [pyenv_3_13 sid_3_14]: each_sample_is_of_its_span);
on_each_interpreter!(on [sid_3_14]: each_sample_is_of_its_tasks_span);

/// Both ways in which compilers have libraries find their variables.
const DESCRIPTORS: &str = if cfg!(target_arch = "x86_64") { "-mtls-dialect=gnu2" } else { "-mtls-dialect=desc" };
const PAIRS: &str = if cfg!(target_arch = "x86_64") { "-mtls-dialect=gnu" } else { "-mtls-dialect=trad" };

/// What is built from `thread_context.c`, in a directory of its own.
struct Built {
    dir: tempfile::TempDir,
    compiler: &'static str,
}

impl Built {
    fn with(compiler: &'static str) -> Self {
        Self { dir: tempfile::tempdir().expect("a folder"), compiler }
    }

    fn build(&self, name: &str, arguments: &[&str]) -> PathBuf {
        let output = self.dir.path().join(name);
        let mut command = Command::new(self.compiler);
        command.arg("-o").arg(&output).arg(program("thread_context.c")).args(arguments).arg("-pthread");
        let built = command.output().unwrap_or_else(|error| panic!("{}: {error}", self.compiler));
        assert!(built.status.success(), "{command:?}: {}", String::from_utf8_lossy(&built.stderr));
        output
    }

    fn library(&self, name: &str, arguments: &[&str]) -> PathBuf {
        self.build(name, &[&["-DLIBRARY", "-shared", "-fPIC"], arguments].concat())
    }

    /// A program that is linked with a library.
    fn linked(&self, name: &str, library: &Path) -> PathBuf {
        let library = library.to_str().expect("ASCII");
        self.build(name, &["-DMAIN", library, &format!("-Wl,-rpath,{}", self.dir.path().display())])
    }
}

fn published(spans: &mut Spans, pid: u32) -> (RemoteProcess, Published) {
    let process = RemoteProcess::open(Pid(pid)).expect("it runs");
    let maps = process.maps().expect("its mappings can be read");
    let published = spans.look(&process, &maps, Instant::now());
    (process, published)
}

/// Trace id and span id of the span that a thread is in, read as the kernel side reads them.
fn span_of(process: &RemoteProcess, tp: u64, place: &ThreadLocal) -> Option<([u8; 16], [u8; 8])> {
    let mut whose = Whose::NOBODY;
    running_span(process, place, ThreadPointer { address: tp, reach: 0 }, &mut whose);
    (whose.flags & flags::SPAN != 0).then_some((whose.trace_id, whose.span_id))
}

/// Each thread has the variable where it says, and is in the span that it says.
fn is_where_threads_say(target: &Target, process: &RemoteProcess, place: &ThreadLocal) {
    let threads = target.facts["threads"].as_array().expect("told");
    assert!(threads.len() >= 4);
    for thread in threads {
        let word = |key: &str| thread[key].as_u64().expect("a number");
        let (tp, at, number) = (word("tp"), word("at"), u8::try_from(word("number")).expect("small"));
        let pointer = ThreadPointer { address: tp, reach: 0 };
        let (variable, span) = (thread_variable(process, place, pointer), span_of(process, tp, place));
        if number == 0 {
            assert_eq!(span, None, "thread 0 is in none: {place:?}");
        } else {
            assert_eq!(variable, at, "thread {number}: {place:?}");
            assert_eq!(span, Some(([number; 16], [number; 8])));
        }
    }
}

/// Whether the variable is found at a fixed distance from the thread pointer.
fn check(target: &Target, fixed: bool) {
    let (process, published) = published(&mut Spans::new(), target.pid());
    let place = published.thread.as_ref().unwrap_or_else(|error| panic!("{error}: {:?}", target.facts));
    println!("{place:?}");
    assert_eq!(published.process, Err(NoProcessContext::NotPublished));
    is_where_threads_say(target, &process, place);
    assert_eq!(place.module == 0, fixed, "{place:?}");
}

fn run(path: &Path) -> Target {
    Target::embedded(&mut Command::new(path), "thread_context.c")
}

fn load(interpreter: &Interpreter, library: &Path) -> Target {
    Target::start_with(interpreter, "thread_context.py", &[library.to_str().expect("ASCII")])
}

fn executables(built: &Built) {
    for arguments in [&["-pie", "-fPIE"][..], &["-no-pie", "-fno-pie"], &["-DPAD=5000"], &["-DPAD=3", "-O2"]] {
        let arguments = [&["-DLIBRARY", "-DMAIN", "-rdynamic"], arguments].concat();
        check(&run(&built.build("executable", &arguments)), true);
    }
}

#[test]
fn an_executable_defines_it() {
    let Some(_live) = live() else { return };
    executables(&Built::with("gcc"));
    executables(&Built::with("musl-gcc"));
}

/// Loaded with the program: descriptors and `initial-exec` tell a fixed distance, pairs the module's number.
#[test]
fn a_library_that_is_linked_defines_it() {
    let Some(_live) = live() else { return };
    let built = Built::with("gcc");
    for (dialect, fixed) in [
        (&[DESCRIPTORS][..], true),
        (&[PAIRS], false),
        (&[DESCRIPTORS, "-Wl,-Bsymbolic"], true),
        (&[PAIRS, "-Wl,-Bsymbolic", "-DPAD=10000"], false),
        (&["-ftls-model=initial-exec"], true),
    ] {
        let library = built.library("libcontext.so", dialect);
        check(&run(&built.linked("linked", &library)), fixed);
    }
}

#[test]
fn a_library_that_is_linked_with_musl_defines_it() {
    let Some(_live) = live() else { return };
    let built = Built::with("musl-gcc");
    for (dialect, fixed) in [(&[DESCRIPTORS][..], true), (&[PAIRS], false)] {
        let library = built.library("libcontext.so", dialect);
        check(&run(&built.linked("linked", &library)), fixed);
    }
}

/// glibc gives a small block of a library that comes later a fixed distance, if it has descriptors, and there is room.
#[test]
fn a_library_that_python_loads_defines_it() {
    let Some(_live) = live() else { return };
    let built = Built::with("gcc");
    for (arguments, fixed) in [
        (&[DESCRIPTORS][..], true),
        (&[DESCRIPTORS, "-DPAD=5000"], false),
        (&[DESCRIPTORS, "-DPAD=5000", "-Wl,-Bsymbolic"], false),
        (&[PAIRS], false),
    ] {
        let library = built.library("context.so", arguments);
        for name in ["pyenv_3_8", "debian_3_11", "pyenv_3_13"] {
            check(&load(&Interpreter::named(name), &library), fixed);
        }
    }
}

/// The other way to make vectors, and the other size of their entries. (The musl interpreter of the list has no ctypes.)
#[test]
fn a_library_that_a_program_with_musl_loads_defines_it() {
    let Some(_live) = live() else { return };
    let built = Built::with("musl-gcc");
    let program = built.build("loads", &["-DMAIN", "-DLOADS"]);
    for arguments in [&[DESCRIPTORS][..], &[PAIRS], &[DESCRIPTORS, "-Wl,-Bsymbolic", "-DPAD=9000"]] {
        let library = built.library("context.so", arguments);
        check(&Target::embedded(Command::new(&program).arg(&library), "thread_context.c"), false);
    }
}

#[test]
fn a_library_that_is_preloaded_defines_it() {
    let Some(_live) = live() else { return };
    let built = Built::with("gcc");
    for (dialect, fixed) in [(DESCRIPTORS, true), (PAIRS, false)] {
        let library = built.library("context.so", &[dialect]);
        let preload = [("LD_PRELOAD", library.to_str().expect("ASCII"))];
        let target = Target::start_in(&Interpreter::named("pyenv_3_12"), "thread_context.py", &["-"], &preload);
        check(&target, fixed);
    }
}

/// Nothing is guessed: if there are several variables, one is wrong.
#[test]
fn where_it_cannot_be_told_there_is_none() {
    let Some(_live) = live() else { return };
    let built = Built::with("gcc");
    let python = Interpreter::named("pyenv_3_12");
    let (one, two) = (built.library("one.so", &[]), built.library("two.so", &[]));
    let preload = [("LD_PRELOAD", two.to_str().expect("ASCII"))];
    let target = Target::start_in(&python, "thread_context.py", &[one.to_str().expect("ASCII")], &preload);
    assert_eq!(published(&mut Spans::new(), target.pid()).1.thread, Err(NoThreadLocal::Several));
    let target = Target::start_with(&python, "numbered.py", &["1000"]);
    assert_eq!(published(&mut Spans::new(), target.pid()).1.thread, Err(NoThreadLocal::NotDefined));
}

/// A context is followed through an update.
#[test]
fn a_process_context_is_read_anew_when_it_changes() {
    let Some(_live) = live() else { return };
    let mut target = Target::start(&Interpreter::named("pyenv_3_12"), "process_context.py");
    let mut spans = Spans::new();
    let version = |published: &Published| published.process.clone().expect("published").version;
    let (process, first) = published(&mut spans, target.pid());
    assert_eq!(version(&first).as_deref(), Some("1"));
    assert_eq!(first.process.as_ref().expect("published").service.as_deref(), Some("till"));
    assert!(first.is_current(&process));
    target.tell("begin");
    assert_eq!(target.line(), "");
    assert!(!first.is_current(&process));
    assert_eq!(published(&mut spans, target.pid()).1.process, Err(NoProcessContext::BeingWritten));
    target.tell("end 2");
    assert_eq!(target.line(), "");
    let (_, second) = published(&mut spans, target.pid());
    assert_eq!(version(&second).as_deref(), Some("2"));
    assert!(second.is_current(&process) && !first.is_current(&process));
}

/// A child that publishes a context is soon known by it, however long its parent has had none.
#[test]
fn a_childs_context_is_noticed() {
    let Some(_live) = live() else { return };
    let mut target = Target::start_with(&Interpreter::named("pyenv_3_12"), "process_context.py", &["in-a-child"]);
    // Nobody looks at the parent again before it is twice as old as when it was found.
    std::thread::sleep(Duration::from_secs(3));
    let running = Profiler::of(target.pid()).arg("--subprocesses").rate(99).start();
    target.go();
    let child: u32 = target.line().parse().expect("a pid");
    let_run(child, Duration::from_millis(2_500));
    running.signal(libc::SIGINT);
    let report = running.finish().report;
    let service = |pid| &report.processes.iter().find(|process| process.pid == pid).expect("it was recorded").service;
    assert_eq!(service(child), "till", "{report:#?}");
}

/// The cost of a look once the files are known.
fn cost(spans: &mut Spans, pid: u32) -> Duration {
    let process = RemoteProcess::open(Pid(pid)).expect("it runs");
    let maps = process.maps().expect("its mappings can be read");
    let look = |_| {
        let start = Instant::now();
        let _published = spans.look(&process, &maps, start);
        start.elapsed()
    };
    (0..20).map(look).min().expect("twenty")
}

fn text(value: &Value) -> &str {
    value.as_str().expect("a text")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// ddtrace's spans: each thread's record is of its own trace, of the spans that it makes; one that is in none has none.
fn spans_of_ddtrace(python: &Interpreter) {
    let mut target = Target::start_in(python, "spans.py", &["threads"], &[("PYTHONPATH", &package("ddtrace", python))]);
    let mut spans = Spans::new();
    let (process, published) = published(&mut spans, target.pid());
    println!("{published:?}, {:?} a look", cost(&mut spans, target.pid()));
    assert!(published.is_current(&process));
    let place = published.thread.expect("ddtrace publishes it");
    let context = published.process.expect("and the process context");
    assert_eq!((context.service.as_deref(), context.version.as_deref()), (Some("shop"), Some("1.2.3")));
    assert_eq!((context.environment.as_deref(), context.namespace), (Some("tests"), None));
    assert_eq!(context.thread_schema.as_deref(), Some("tlsdesc_v1_dev"));
    assert!(context.instance.is_some_and(|instance| !instance.is_empty()) && !context.attribute_keys.is_empty());

    let threads = target.facts["threads"].as_array().expect("told").clone();
    let mut seen = vec![std::collections::BTreeSet::new(); threads.len()];
    for _ in 0..500 {
        for (thread, seen) in threads.iter().zip(&mut seen) {
            let tp = thread["ident"].as_u64().expect("a number");
            // The thread runs on: a look may meet a record that is given back and used again. A second one does not find it.
            let look = || span_of(&process, tp, &place);
            let Some(span) = look().filter(|span| look().as_ref() == Some(span)) else { continue };
            assert_eq!(Some(hex(&span.0).as_str()), thread["trace_id"].as_str(), "{thread}");
            seen.insert(hex(&span.1));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    target.go();
    let logs: Value = serde_json::from_str(&target.line()).expect("the log of spans");
    for ((thread, seen), log) in threads.iter().zip(&seen).zip(logs.as_array().expect("one a thread")) {
        let own: std::collections::BTreeSet<_> =
            log.as_array().expect("spans").iter().map(|span| text(&span[2])).collect();
        println!("{}: {} spans seen, of {}", text(&thread["function"]), seen.len(), own.len());
        assert!(seen.len() >= 2 && seen.contains(text(&thread["span_id"])), "{seen:?}");
        assert!(seen.iter().all(|span| own.contains(span.as_str())), "{seen:?}");
    }
    assert!(seen.last().expect("the thread without").is_empty());
}

/// Samples of `spans.py`, what it told first and what it logged.
fn recorded(python: &Interpreter, mode: &str) -> (Vec<Value>, Value, Value) {
    let mut target = Target::start_in(python, "spans.py", &[mode], &[("PYTHONPATH", &package("ddtrace", python))]);
    let profiler = Profiler::of(target.pid()).native().rate(499).arg("--format").arg("jsonl");
    let running = profiler.start();
    let_run(target.pid(), Duration::from_secs(4));
    running.signal(libc::SIGINT);
    let text = std::fs::read_to_string(running.ended().output()).expect("a recording");
    target.go();
    let logs = serde_json::from_str(&target.line()).expect("the log of spans");
    (text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect(), target.facts.clone(), logs)
}

/// Where samples of work in a span must have these ids: by thread (or task), from and to, and the span.
struct Span<'a> {
    from_us: u64,
    to_us: u64,
    trace: &'a str,
    span: &'a str,
}

fn spans_of<'a>(facts: &'a Value, logs: &'a Value, number: usize) -> Vec<Span<'a>> {
    let trace = text(&facts["threads"][number]["trace_id"]);
    let word = |value: &Value| value.as_u64().expect("a number") / 1000;
    let span = |log: &'a Value| Span { from_us: word(&log[0]), to_us: word(&log[1]), trace, span: text(&log[2]) };
    logs[number].as_array().expect("a log").iter().map(span).collect()
}

fn functions(sample: &Value) -> impl Iterator<Item = &str> {
    sample["frames"].as_array().expect("frames").iter().map(|frame| text(&frame["function"]))
}

/// Compares samples within a span with it: none has other ids, and hardly one has none.
fn judge<'a>(samples: impl Iterator<Item = &'a Value>, spans: &[Span<'_>]) -> (usize, usize) {
    let (mut right, mut without) = (0, 0);
    for sample in samples {
        let at = sample["time_us"].as_u64().expect("a time");
        // The edges of a span are those of its work, which is logged to the nanosecond.
        let Some(span) = spans.iter().find(|span| (span.from_us + 1..span.to_us).contains(&at)) else { continue };
        if sample["trace_id"].is_null() {
            without += 1;
            continue;
        }
        assert_eq!((text(&sample["trace_id"]), text(&sample["span_id"])), (span.trace, span.span), "{sample:#}");
        assert_eq!(text(&sample["service"]), "shop", "{sample:#}");
        right += 1;
    }
    (right, without)
}

fn each_sample_is_of_its_span(python: &Interpreter) {
    let (samples, facts, logs) = recorded(python, "threads");
    let threads = facts["threads"].as_array().expect("told");
    let (mut right, mut without) = (0, 0);
    for (number, thread) in threads[..threads.len() - 1].iter().enumerate() {
        let function = text(&thread["function"]);
        let own = samples.iter().filter(|sample| functions(sample).any(|name| name == function));
        let judged = judge(own, &spans_of(&facts, &logs, number));
        (right, without) = (right + judged.0, without + judged.1);
    }
    println!("{right} samples have the ids of their spans, {without} none");
    assert!(right > 500 && without * 100 <= right, "{right} right, {without} without");
    let outside = text(&threads[threads.len() - 1]["function"]);
    let outside = samples.iter().filter(|sample| functions(sample).any(|name| name == outside));
    assert!(outside.inspect(|sample| assert!(sample["trace_id"].is_null(), "{sample:#}")).count() > 50);
}

/// From 3.14 on ddtrace changes the span with the task.
fn each_sample_is_of_its_tasks_span(python: &Interpreter) {
    let (samples, facts, logs) = recorded(python, "tasks");
    let tasks = facts["threads"].as_array().expect("told").len() - 1;
    let mut spans: Vec<_> = (0..tasks).flat_map(|number| spans_of(&facts, &logs, number)).collect();
    spans.sort_by_key(|span| span.from_us);
    let in_task =
        samples.iter().filter(|sample| functions(sample).any(|name| name == "in_outer" || name == "in_inner"));
    let (right, without) = judge(in_task.filter(|sample| functions(sample).any(|name| name == "thread_0")), &spans);
    println!("{right} samples have the ids of their spans, {without} none");
    assert!(right > 500 && without * 100 <= right, "{right} right, {without} without");
}
