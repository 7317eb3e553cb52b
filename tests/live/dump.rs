//! `tachyon-bpf dump` of live interpreters: stacks, names and the GIL's holder are what the program itself reports; a
//! target that lies costs bounded time; one that may not be read is reported with the fix.

use serde_json::Value;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use tachyon::inspect::{self, ElfCache, Verdict};
use tachyon::remote::RemoteProcess;
use tachyon::types::{Pid, RemoteAddr};
use tachyon_common::layout::Layout;
use tachyon_common::walk::{self, ThreadBuffer};
use tachyon_tests::{Interpreter, Profiler, Target, binary, live, on_each_interpreter, program};

on_each_interpreter!(every_thread_shows_its_known_stack);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_11 pyenv_3_12 sid_3_14 sid_3_15 musl_3_13 built_3_14t]: recordings_have_names);
on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 sid_3_15 built_3_14t]: a_target_that_lies_costs_bounded_time);

/// Uid and gid of an unprivileged user.
const NOBODY: u32 = 65534;

/// The program's line that ends with this comment.
fn line(comment: &str) -> u64 {
    let text = std::fs::read_to_string(program("dump.py")).expect("readable");
    let at = text.lines().position(|line| line.ends_with(&format!("  # {comment}"))).expect("a marked line");
    at as u64 + 1
}

/// The program, its main thread waiting for words.
fn start(interpreter: &Interpreter) -> Target {
    let target = Target::start(interpreter, "dump.py");
    wait_until_idle(target.pid());
    target
}

/// Waits until the main thread is in its read: it may also be asleep waiting for the GIL.
fn wait_until_idle(pid: u32) {
    let reads = format!("{} 0x0 ", libc::SYS_read);
    let reads = || std::fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it runs").starts_with(&reads);
    wait_for("the main thread to read its input", reads);
}

fn wait_for(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !happens() {
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Makes the program write a word into its own memory.
fn poke(target: &mut Target, address: u64, value: u64) {
    target.tell(&format!("poke {address} {value}"));
    assert_eq!(target.line(), "done");
    wait_until_idle(target.pid());
}

fn dump(pid: u32, json: bool) -> Output {
    let mut command = Command::new(binary());
    command.args(["dump", "-p", &pid.to_string()]).args(json.then_some("--json")).output().expect("it runs")
}

fn dumped(pid: u32) -> Value {
    let output = dump(pid, true);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn thread<'a>(dump: &'a Value, tid: &Value) -> &'a Value {
    let threads = dump["threads"].as_array().expect("a list");
    threads.iter().find(|thread| thread["tid"] == *tid).unwrap_or_else(|| panic!("no thread {tid} in {dump:#}"))
}

/// Functions and lines of the frames that lie in the script.
fn stack(thread: &Value) -> Vec<(&str, u64)> {
    // In a chroot the script is elsewhere.
    let in_script = |frame: &&Value| frame["filename"].as_str().is_some_and(|name| name.ends_with("/dump.py"));
    let frames = thread["frames"].as_array().expect("a list").iter();
    frames
        .filter(in_script)
        .map(|frame| (frame["function"].as_str().expect("named"), frame["lineno"].as_u64().expect("a line")))
        .collect()
}

fn every_thread_shows_its_known_stack(python: &Interpreter) {
    let target = start(python);
    let told = &target.facts;
    let minor = python.minor;
    let mut dump = dumped(target.pid());
    if !told["free_threaded"].as_bool().expect("a truth value") {
        // It takes the GIL once the main thread has given it back, which needs a CPU.
        wait_for("the busy thread to hold the GIL", || {
            dump = dumped(target.pid());
            thread(&dump, &told["tids"]["spinner"])["holds_gil"] == true
        });
    }
    assert_eq!((dump["schema"].as_u64(), dump["pid"].as_u64()), (Some(1), Some(target.pid().into())));
    assert_eq!(dump["problems"].as_array().map(Vec::len), Some(0), "{dump:#}");
    let below = std::iter::once(("deep", line("calls"))).chain(std::iter::repeat_n(("deep", line("recurses")), 30));
    let below: Vec<_> = below.collect();
    for (function, name, lines, states) in [
        ("sleeper", "sleepy łóń", &[line("sleeps")][..], "S"),
        ("blocked", "waiting for a lock", &[line("blocks")], "S"),
        // It is on a CPU or waits for one: the kernel calls both running.
        ("spinner", "busy", &[line("spins"), line("spins too")], "R"),
    ] {
        let thread = thread(&dump, &told["tids"][function]);
        let stack = stack(thread);
        assert_eq!(stack[0].0, function, "{thread:#}");
        assert!(lines.contains(&stack[0].1), "{thread:#}");
        assert_eq!(stack[1..], below, "{thread:#}");
        assert_eq!(thread["stop"], "complete");
        assert_eq!(thread["steady"], true);
        assert_eq!(thread["state"], states, "{thread:#}");
        let cause = thread["waiting"]["cause"].as_str();
        assert_eq!(
            cause,
            [("sleeper", "sleep"), ("blocked", "lock")]
                .into_iter()
                .find_map(|(name, cause)| (name == function).then_some(cause)),
            "{thread:#}"
        );
        assert_eq!((&thread["python"], &thread["main"]), (&true.into(), &false.into()));
        assert_eq!(thread["thread_id"], told["ident"][function]);
        // The kernel keeps 15 bytes of a name.
        let shown = thread["name"].as_str().expect("a thread has a name");
        assert!(shown == name || minor >= 14 && name.starts_with(shown) && shown.len() == 15, "{thread:#}");
        let gil = match told["free_threaded"].as_bool() {
            Some(true) => Value::Null,
            _ => (function == "spinner").into(),
        };
        assert_eq!(thread["holds_gil"], gil, "{thread:#}");
        if minor >= 11 {
            let call = &thread["frames"][2];
            assert_eq!((&call["column"], &call["end_column"]), (&8.into(), &25.into()));
        }
    }
    let main = thread(&dump, &told["tid"]);
    assert_eq!(stack(main), [("obey", line("waits")), ("<module>", line("obeys"))]);
    assert_eq!((&main["main"], &main["interpreter"]), (&true.into(), &0.into()));
    if minor < 14 {
        assert_eq!(main["name"], "MainThread");
    }
    let threads = dump["threads"].as_array().expect("a list");
    assert_eq!(threads[0], *main);
    let native: Vec<_> = threads.iter().filter(|thread| thread["python"] == false).collect();
    let started = usize::from(told["native"].as_bool().expect("a truth value"));
    assert_eq!((native.len(), threads.len()), (started, 4 + started), "{dump:#}");
    for thread in &native {
        assert_eq!((&thread["stop"], &thread["state"]), (&Value::Null, &"S".into()));
    }

    let text = String::from_utf8(self::dump(target.pid(), false).stdout).expect("UTF-8");
    let frame = format!("/dump.py:{})\n    deep (", line("sleeps"));
    assert!(text.contains("    sleeper (") && text.contains(&frame), "{text}");
    let without = text.matches("<no Python: this thread never entered CPython ").count();
    assert_eq!(without, started, "{text}");
    // Blocked threads have been so since before the dump.
    assert!(text.contains(" (waiting for a lock for ") && text.contains(" (sleeping for "), "{text}");
    assert!(
        minor >= 14
            || text.contains(" ms): \"waiting for a lock\"\n")
            || text.contains(" s): \"waiting for a lock\"\n"),
        "{text}"
    );
}

fn a_target_that_lies_costs_bounded_time(python: &Interpreter) {
    let mut target = start(python);
    let pid = target.pid();
    let told = target.facts.clone();
    let process = RemoteProcess::at(Pid(pid));
    let word = |base: u64, offset: u32| process.read_u64(RemoteAddr(base + u64::from(offset))).expect("readable");
    let interpreter = match inspect::inspect(&process, &mut ElfCache::default()).expect("readable") {
        Verdict::Python(interpreter) => interpreter,
        other => panic!("{other:?}"),
    };
    let layout = interpreter.layout.complete();
    let head = word(interpreter.runtime, layout.runtime_interpreters_head);
    let first = word(head, layout.interp_threads_head);
    let states: Vec<u64> =
        std::iter::successors(Some(first), |&tstate| Some(word(tstate, layout.tstate_next)).filter(|&next| next != 0))
            .collect();
    let ident = told["ident"]["sleeper"].as_u64().expect("a number");
    let tstate = *states.iter().find(|&&tstate| word(tstate, layout.tstate_thread_id) == ident).expect("listed");
    let last = *states.last().expect("there are threads");
    let mut thread_state = ThreadBuffer::default();
    walk::read_thread(&process, &layout, tstate, &mut thread_state).expect("readable");
    let leaf = walk::innermost_frame(&process, &layout, &thread_state).expect("readable");
    let base = if Layout::present(layout.tstate_base_frame) { word(tstate, layout.tstate_base_frame) } else { 0 };
    let caller = |&frame: &u64| Some(word(frame, layout.frame_previous)).filter(|at| ![0, base].contains(at));
    let root = std::iter::successors(Some(leaf), caller).last().expect("a leaf at least");
    let sleeper = |dump: &Value| thread(dump, &told["tids"]["sleeper"]).clone();
    let timed = |what: &str| {
        let start = Instant::now();
        let dump = dumped(pid);
        assert!(start.elapsed() < Duration::from_secs(15), "{what} took {:?}", start.elapsed());
        dump
    };

    // A chain that leads back to its leaf, and one whose last frame (a shim from 3.12 on) leads to itself.
    poke(&mut target, root + u64::from(layout.frame_previous), leaf);
    let circle = sleeper(&timed("it"));
    assert_eq!((circle["stop"].as_str(), circle["frames"].as_array().map(Vec::len)), (Some("too_deep"), Some(1024)));
    poke(&mut target, root + u64::from(layout.frame_previous), root);
    let circle = sleeper(&timed("it"));
    assert_eq!(circle["stop"], "too_deep");
    assert_eq!(circle["frames"][0]["function"], "sleeper");
    poke(&mut target, root + u64::from(layout.frame_previous), 0x1000);
    assert_eq!(sleeper(&timed("it"))["stop"], "unreadable_frame");

    // A name of 2^62 characters.
    let name = told["name_object"].as_u64().expect("an address");
    poke(&mut target, name + u64::from(layout.unicode_length), 1 << 62);
    let nameless = sleeper(&timed("it"));
    assert_eq!(nameless["name"], nameless["comm"]);

    // A thread list and an interpreter list without an end.
    poke(&mut target, last + u64::from(layout.tstate_next), first);
    let dump = timed("it");
    assert_eq!(dump["problems"][0], "the list of its threads leads in a circle");
    let started = usize::from(told["native"].as_bool().expect("a truth value"));
    assert_eq!(dump["threads"].as_array().map(Vec::len), Some(4 + started));
    assert_eq!(stack(thread(&dump, &told["tids"]["blocked"])).len(), 32);
    poke(&mut target, last + u64::from(layout.tstate_next), 0);
    poke(&mut target, head + u64::from(layout.interp_next), head);
    let dump = timed("it");
    assert_eq!(dump["problems"][0], "the list of its threads leads in a circle");
}

/// Threads of a recording have Python's names.
fn recordings_have_names(interpreter: &Interpreter) {
    let target = start(interpreter);
    let recording = Profiler::of(target.pid()).milliseconds(800).record();
    let output = Command::new(binary()).args(["info", "--json"]).arg(&recording.path).output().expect("it runs");
    let info: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let threads = info["metadata"]["threads"].as_array().expect("a list");
    let busy = threads.iter().find(|thread| thread["tid"] == target.facts["tids"]["spinner"]);
    assert_eq!(busy.map(|thread| &thread["name"]), Some(&"busy".into()), "{info:#}");
}

/// The program at a place where every user can run it.
fn public_program(folder: &Path) -> PathBuf {
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755)).expect("our own folder");
    let program = folder.join("tachyon-bpf");
    std::fs::copy(binary(), &program).expect("it can be copied");
    program
}

fn as_nobody(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(NOBODY).gid(NOBODY).current_dir("/");
    command
}

#[test]
fn what_may_not_be_read_is_told_with_the_mend() {
    let Some(_live) = live() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let program = public_program(folder.path());
    let target = start(&Interpreter::named("pyenv_3_13"));
    let output = as_nobody(&program).args(["dump", "-p", &target.pid().to_string()]).output().expect("it runs");
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    let comm = RemoteProcess::at(Pid(target.pid())).comm().expect("it runs");
    let expected = format!(
        "tachyon-bpf: cannot read pid {} ({comm}): operation not permitted\n\
         hint: it runs as uid 0, you are 65534: needs root or CAP_SYS_PTRACE; in a container --cap-add SYS_PTRACE\n",
        target.pid()
    );
    assert_eq!((said, output.status.code()), (expected, Some(1)));
    assert_eq!(output.stdout, b"");

    let output = dump(std::process::id(), false);
    let said = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(said.contains("is not a Python process\nhint: "), "{said}");
    assert_eq!(output.status.code(), Some(1));
    let mut ended = Command::new("true").spawn().expect("true runs");
    ended.wait().expect("true ends");
    let said = String::from_utf8(dump(ended.id(), false).stderr).expect("UTF-8");
    assert!(said.starts_with(&format!("tachyon-bpf: no process has pid {}\nhint: ", ended.id())), "{said}");
}

#[test]
fn a_users_own_process_needs_no_rights() {
    let Some(_live) = live() else { return };
    // pyenv's are in a home directory that no other user may enter.
    let python = Interpreter::named("debian_3_11").path;
    let folder = tempfile::tempdir().expect("a folder");
    let program = public_program(folder.path());
    let mut child = as_nobody(&python)
        .args(["-c", "import sys; print('ready', flush=True); sys.stdin.read()"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it is ready");
    let output = as_nobody(&program).args(["dump", "-p", &child.id().to_string()]).output().expect("it runs");
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let (text, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let restricted =
        std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").is_ok_and(|scope| scope.trim() != "0");
    if restricted {
        assert!(said.contains("hint: kernel.yama.ptrace_scope is "), "{said}");
    } else {
        assert!(text.contains("    <module> (<string>:1)\n"), "{text}{said}");
    }
}
