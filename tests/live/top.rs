//! The live view in a real terminal (a pseudo-terminal whose screen is read by `vt100`), and `--once` for scripts.

use serde_json::Value;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Recorded, Target, binary, cpu_time, judge, live, program, statistics};
use tempfile::TempDir;
use vt100::Parser;

const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (200, 50);

/// The longest that the screen may take to show what is waited for; a loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(40);

/// Rows of the screen: where the numbers, the tabs, the headings and the table are.
const COUNTS: u16 = 2;
const TABS: u16 = 3;
const HEADINGS: u16 = 4;
const TABLE: u16 = 5;

/// `tachyon-bpf top` in a terminal.
struct Top {
    child: Child,
    keys: File,
    /// The terminal's other end, which keeps its settings readable after the program has ended.
    terminal: OwnedFd,
    settings: Vec<u8>,
    parser: Arc<Mutex<Parser>>,
    size: (u16, u16),
    dir: TempDir,
}

/// A new terminal: its two ends.
fn terminal((columns, rows): (u16, u16)) -> (OwnedFd, OwnedFd) {
    let size = libc::winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    let (mut ours, mut theirs) = (-1, -1);
    let none = std::ptr::null_mut();
    // SAFETY: both numbers and the size outlive the call; name and settings are not asked for.
    let made = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, none, std::ptr::null(), &raw const size) };
    assert_eq!(made, 0, "no pseudo-terminal: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new and has no other owner.
    let ours = unsafe { OwnedFd::from_raw_fd(ours) };
    // SAFETY: as above.
    (ours, unsafe { OwnedFd::from_raw_fd(theirs) })
}

/// A terminal's settings, to be compared.
fn settings(terminal: &OwnedFd) -> Vec<u8> {
    // SAFETY: all-zero is a valid `termios`.
    let mut termios: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: the structure outlives the call.
    let got = unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut termios) };
    assert_eq!(got, 0, "it is no terminal: {}", std::io::Error::last_os_error());
    let flags = [termios.c_iflag, termios.c_oflag, termios.c_cflag, termios.c_lflag];
    flags.iter().flat_map(|flags| flags.to_ne_bytes()).chain(termios.c_cc).collect()
}

impl Top {
    fn start(size: (u16, u16), args: &[&str]) -> Self {
        let (ours, theirs) = terminal(size);
        let dir = tempfile::Builder::new().prefix("tachyon-top").tempdir().expect("a temporary directory can be made");
        let end = || Stdio::from(theirs.try_clone().expect("a descriptor is free"));
        let mut command = Command::new(binary());
        command.arg("top").args(args).current_dir(dir.path()).env("TERM", "xterm-256color").env_remove("NO_COLOR");
        command.stdin(end()).stdout(end()).stderr(end());
        let become_leader = || {
            // SAFETY: takes nothing; the child does not lead a group, so it succeeds.
            unsafe { libc::setsid() };
            // SAFETY: standard input is the terminal, which controls no session yet.
            unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0) };
            Ok(())
        };
        // SAFETY: both calls are async-signal-safe.
        unsafe { command.pre_exec(become_leader) };
        let settings = settings(&theirs);
        let child = command.spawn().expect("the profiler can be run");
        let parser = Arc::new(Mutex::new(Parser::new(size.1, size.0, 0)));
        let (mut output, screen) = (File::from(ours.try_clone().expect("a descriptor is free")), Arc::clone(&parser));
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                screen.lock().expect("no test panics with it").process(&bytes[..count]);
            }
        });
        Self { child, keys: File::from(ours), terminal: theirs, settings, parser, size, dir }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).expect("the terminal takes keys");
    }

    /// The screen's lines.
    fn lines(&self) -> Vec<String> {
        let parser = self.parser.lock().expect("no test panics with it");
        parser.screen().rows(0, self.size.0).map(|line| line.trim_end().to_owned()).collect()
    }

    fn line(&self, number: u16) -> String {
        self.lines().swap_remove(usize::from(number))
    }

    /// Waits until the screen is as it should be.
    fn until(&mut self, what: &str, is_so: impl Fn(&[String]) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let lines = self.lines();
            if is_so(&lines) {
                return;
            }
            let ended = self.child.try_wait().expect("a child can be waited for");
            let late = Instant::now() > end;
            assert!(ended.is_none() && !late, "never {what} ({ended:?}):\n{}", lines.join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn until_line(&mut self, number: u16, text: &str) {
        self.until(&format!("'{text}' in line {number}"), |lines| lines[usize::from(number)].contains(text));
    }

    fn last(&self) -> u16 {
        self.size.1 - 1
    }

    /// Waits for its end, after which the terminal must be as it was.
    fn end(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child can be waited for") {
                break status;
            }
            assert!(Instant::now() < end, "it does not end:\n{}", self.lines().join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        };
        assert_eq!(settings(&self.terminal), self.settings, "the terminal's settings are not what they were");
        // Its last output may still be on its way.
        let restored = |parser: &Parser| !parser.screen().alternate_screen() && !parser.screen().hide_cursor();
        while !restored(&self.parser.lock().expect("no test panics with it")) {
            assert!(Instant::now() < end, "the screen is not given back:\n{}", self.lines().join("\n"));
            std::thread::sleep(Duration::from_millis(20));
        }
        status
    }

    fn signal(&self, signal: i32) {
        let pid = i32::try_from(self.child.id()).expect("pids are positive");
        // SAFETY: kill(2) takes numbers only.
        let sent = unsafe { libc::kill(pid, signal) };
        assert_eq!(sent, 0);
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        // It has ended, unless a test has failed.
        let _ended = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The number that a text begins with, `1,234`.
fn number(text: &str) -> u64 {
    let digits = text.split(' ').next().unwrap_or_default().replace(',', "");
    digits.parse().unwrap_or_else(|_| panic!("'{text}' begins with no number"))
}

/// The number before ` samples`.
fn samples(line: &str) -> u64 {
    let before = line.split(" samples").next().unwrap_or_default();
    number(before.rsplit(' ').next().unwrap_or_default())
}

fn shares() -> Target {
    Target::start(&Interpreter::named("pyenv_3_12"), "shares.py")
}

#[test]
fn keys_work_at_any_size() {
    let Some(_live) = live() else { return };
    let target = shares();
    let pid = target.pid().to_string();
    for size in [SMALL, LARGE] {
        let mut top = Top::start(size, &["-p", &pid, "-F", "499", "-d", "300ms"]);
        let enough = |lines: &[String]| lines[2].contains(" samples") && samples(&lines[2]) >= 300;
        top.until("300 samples", enough);
        // 60, 30 and 10 %.
        let names: Vec<String> = top.lines()[usize::from(TABLE)..].iter().take(3).cloned().collect();
        for (line, name) in names.iter().zip(["sixty", "thirty", "ten"]) {
            assert!(line.contains(&format!(" {name} ")), "{size:?}: {names:?}");
        }
        assert!(top.line(0).contains(&format!("({pid})")), "{}", top.line(0));
        assert!(top.line(HEADINGS).contains("▼1 SELF"), "{}", top.line(HEADINGS));
        assert_eq!(top.line(HEADINGS).contains("LAST MINUTE"), size == LARGE);

        // The module calls all of them: it has the highest total.
        for (key, heading) in [("2", "▼2 TOTAL"), ("4", "▼4 TOTAL s"), ("3", "▼3 SELF s"), ("1", "▼1 SELF")] {
            top.press(key);
            top.until_line(HEADINGS, heading);
            let leader = if heading.contains("TOTAL") { "<module>" } else { "sixty" };
            assert!(top.line(TABLE).contains(leader), "{key}: {}", top.line(TABLE));
        }

        top.press("/^thir");
        top.until_line(top.last(), "/^thir");
        top.until("only rows that match", |lines| lines[5].contains(" thirty ") && lines[6].is_empty());
        top.press("\r");
        top.until_line(TABS, "/^thir/");
        top.press("\x1b");
        top.until("all rows again", |lines| lines[5].contains(" sixty ") && lines[6].contains(" thirty "));

        top.press("p");
        top.until_line(0, "PAUSED");
        let (shown, used) = (top.line(COUNTS), cpu_time(target.pid()));
        while cpu_time(target.pid()) < used + Duration::from_millis(700) {
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(top.line(COUNTS), shown, "a paused view stands still");
        top.press("p");
        let all = |line: &str| number(line.split("all: ").nth(1).unwrap_or_default());
        let before = all(&shown);
        top.until("what came meanwhile", |lines| all(&lines[2]) >= before + 300);

        top.press("n");
        top.until_line(TABS, "with native code");
        top.press("n");
        top.press("t");
        top.until_line(TABLE, &format!("(tid {pid})"));
        top.press("\x1b[C");
        top.until("its only thread", |lines| {
            lines[3].contains(&format!("(tid {pid})")) && lines[5].contains(" sixty ")
        });
        top.press("\x1b[C");
        top.until_line(TABS, "all threads");
        top.press("l");
        top.until("lines", |lines| lines[5].contains("shares.py:"));
        top.press("f");
        top.press("?");
        top.until_line(0, "Keys");
        top.press("x");
        top.until_line(0, "tachyon-bpf top");

        top.press("w");
        top.until_line(top.last(), "wrote tachyon-");
        let told = top.line(top.last());
        written(top.dir.path(), &told);

        top.press("q");
        assert_eq!(top.end().code(), Some(0));
    }
}

/// What `w` wrote is a file like any other.
fn written(dir: &Path, told: &str) {
    let name = told.strip_prefix("wrote ").and_then(|told| told.split(':').next()).expect("it tells its name");
    let path = dir.join(name);
    let recorded = Recorded::read(&path);
    judge::agrees(&path, &recorded);
    assert_eq!(recorded.samples.len() as u64, samples(told));
    let hits = |wanted: &str| {
        let leaf = |sample| recorded.frames_of(sample).any(|frame| frame.function == wanted);
        recorded.samples.iter().filter(|sample| leaf(sample)).count()
    };
    assert!(hits("sixty") > hits("thirty") && hits("thirty") > hits("ten"));
    let info = Command::new(binary()).args(["info", "--json"]).arg(&path).output().expect("the profiler can be run");
    assert!(info.status.success(), "{}", String::from_utf8_lossy(&info.stderr));
    let info: Value = serde_json::from_slice(&info.stdout).expect("it is JSON");
    let report = &info["metadata"]["report"];
    assert_eq!(report["stored"].as_u64(), Some(recorded.samples.len() as u64), "{report:#}");
    let number = |key: &str| report[key].as_u64().expect("the account counts it");
    let loss: u64 = report["loss"].as_object().expect("causes").values().filter_map(Value::as_u64).sum();
    assert_eq!(number("ran"), ["stored", "idle", "filtered", "not_python"].map(number).iter().sum::<u64>() + loss);
    assert_eq!(number("inconsistent"), 0);
}

/// What a table of tasks shows: self for the one that ran, total also for those that await it; and one task's functions
/// alone.
#[test]
fn tasks_have_a_table() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("sid_3_14"), "two_tasks.py");
    let pid = target.pid().to_string();
    let mut top = Top::start(SMALL, &["--async", "-p", &pid, "-F", "499", "-d", "300ms", "--no-native"]);
    top.until("300 samples", |lines| lines[2].contains(" samples") && samples(&lines[2]) >= 300);
    top.press("T");
    top.until("the tasks", |lines| {
        let row = |at: usize, name: &str| lines[at].split_whitespace().nth(6) == Some(name);
        lines[4].contains("▼1 SELF") && lines[4].contains("TASK") && row(5, "fetch") && row(6, "render")
    });
    top.press("2");
    // It hardly ever runs, and awaits both others.
    top.until("what it awaits is in the total", |lines| lines[4].contains("▼2 TOTAL") && lines[5].contains(" serve "));
    top.press("1");
    top.until("by self again", |lines| lines[4].contains("▼1 SELF") && lines[5].contains(" fetch "));
    top.press("\r");
    top.until_line(TABS, "task fetch");
    top.until("its functions", |lines| {
        lines[5].contains(" burn ") && !lines.iter().any(|line| line.contains("render"))
    });
    top.press("q");
    assert_eq!(top.end().code(), Some(0));

    let once = Command::new(binary()).args(["top", "--once", "--async", "-d", "1s", "-F", "499", "-p", &pid]).output();
    let once = String::from_utf8(once.expect("the profiler can be run").stdout).expect("it is text");
    let tasks = once.lines().find_map(|line| line.strip_prefix("by task: ")).unwrap_or_default();
    assert!(tasks.starts_with("fetch ") && tasks.contains(", render "), "{once}");
}

#[test]
fn every_signal_gives_the_terminal_back() {
    let Some(_live) = live() else { return };
    let target = shares();
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
        let mut top = Top::start(SMALL, &["-p", &target.pid().to_string(), "-d", "300ms", "--no-native"]);
        top.until("a sample", |lines| lines[5].contains("shares.py"));
        assert!(top.parser.lock().expect("no test panics with it").screen().alternate_screen());
        assert_ne!(settings(&top.terminal), top.settings, "keys come as they are pressed");
        top.signal(signal);
        assert_eq!(top.end().code(), Some(0), "signal {signal}");
    }
    // Ctrl-C is a key here.
    let mut top = Top::start(SMALL, &["-p", &target.pid().to_string(), "--no-native"]);
    top.until_line(top.last(), "q quit");
    top.press("\x03");
    assert_eq!(top.end().code(), Some(0));
}

#[test]
fn a_command_is_ended_with_the_view_and_its_status_is_ours() {
    let Some(_live) = live() else { return };
    let python = Interpreter::named("pyenv_3_12");
    let python = python.command().get_program().to_str().expect("a path of the list").to_owned();
    let spin = program("spin.py").to_str().expect("a path of the tests").to_owned();
    let mut top = Top::start(SMALL, &["-d", "300ms", "--no-native", "--", &python, &spin]);
    top.until("its samples", |lines| lines[5].contains("spin.py"));
    let children = format!("/proc/{0}/task/{0}/children", top.child.id());
    let child = std::fs::read_to_string(&children).expect("it has a list of children").trim().to_owned();
    assert!(Path::new(&format!("/proc/{child}")).exists(), "{child}");
    assert!(top.lines().iter().all(|line| !line.contains("\"pid\"")), "the command writes over the view");
    top.press("q");
    assert_eq!(top.end().code(), Some(0));
    assert!(!Path::new(&format!("/proc/{child}")).exists(), "the command outlives the view");

    let ends = "import sys, time\nend = time.thread_time() + 0.5\nwhile time.thread_time() < end: pass\nsys.exit(3)";
    let mut top = Top::start(SMALL, &["-d", "300ms", "--no-native", "--", &python, "-c", ends]);
    top.until_line(top.last(), "the command has ended with status 3");
    assert!(top.line(0).contains("ENDED"), "{}", top.line(0));
    top.press("q");
    assert_eq!(top.end().code(), Some(3));
}

#[test]
fn the_end_of_all_targets_is_told_and_what_was_seen_stays() {
    let Some(_live) = live() else { return };
    let mut target = shares();
    let mut top = Top::start(SMALL, &["-p", &target.pid().to_string(), "-d", "300ms", "--no-native"]);
    top.until("its samples", |lines| lines[5].contains("shares.py"));
    target.kill();
    top.until_line(top.last(), "all processes have ended");
    assert!(top.line(TABLE).contains("shares.py"), "{}", top.line(TABLE));
    top.press("w");
    top.until_line(top.last(), "wrote tachyon-");
    top.press("q");
    assert_eq!(top.end().code(), Some(0));
}

#[test]
fn one_look_as_json_adds_up() {
    let Some(_live) = live() else { return };
    let target = shares();
    target.make_urgent();
    let args = ["top", "-p", &target.pid().to_string(), "--once", "--json", "-F", "999", "-d", "3s"];
    let output = Command::new(binary()).args(args).output().expect("the profiler can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let told: Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let samples = told["samples"].as_u64().expect("a count");
    let rows = told["rows"].as_array().expect("rows");
    let own = |row: &Value| row["self"].as_u64().expect("a count");
    assert_eq!(rows.iter().map(own).sum::<u64>(), samples, "{told:#}");
    assert_eq!(rows[0]["function"], "sixty", "{told:#}");
    for row in rows {
        let share = row["self_share"].as_f64().expect("a share");
        assert!((share - own(row) as f64 / samples as f64).abs() < 1e-12, "{row:#}");
        assert!(row["total"].as_u64() >= row["self"].as_u64(), "{row:#}");
    }
    for (name, share) in target.facts["shares"].as_object().expect("the program tells its shares") {
        let hits = rows.iter().find(|row| row["function"] == name.as_str()).map_or(0, own);
        let share = share.as_f64().expect("a number");
        assert!(statistics::within_binomial(hits as usize, samples as usize, share), "{name}: {hits} of {samples}");
    }
    let number = |key: &str| told[key].as_f64().unwrap_or_else(|| panic!("no number {key}: {told:#}"));
    assert_eq!((&told["by"], &told["waiting_share"]), (&Value::from("function"), &Value::Null));
    assert_eq!(told["threads"].as_u64(), Some(1));
    assert_eq!((number("cpu_share"), number("gc_share")), (1.0, 0.0));
    assert!(number("gil_share") > 0.9 && number("profiler_cpu_share") > 0.0, "{told:#}");
    // It samples for as long as it was told to, and each sample stands for its part of that time.
    assert!(number("window_s") >= 3.0 && (number("sampled_seconds") - samples as f64 / 999.0).abs() < 0.01, "{told:#}");
}

/// With waits a function's time is what its thread spends there, running or not; the cause of the wait is shown beside it.
#[test]
fn one_look_with_waits() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "wall_shares.py");
    let pid = target.pid().to_string();
    let look = |more: &[&str]| {
        let args = ["top", "-p", &pid, "--wall", "--once", "-F", "100", "-d", "3s"];
        let output = Command::new(binary()).args(args).args(more).output().expect("the profiler can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let told: Value = serde_json::from_slice(&look(&["--json"])).expect("it is JSON");
    let samples = told["samples"].as_u64().expect("a count");
    let rows = told["rows"].as_array().expect("rows");
    let own = |name: &str| {
        let row = rows.iter().find(|row| row["function"] == name).unwrap_or_else(|| panic!("no {name}: {told:#}"));
        row["self"].as_u64().expect("a count")
    };
    assert_eq!(rows.iter().map(|row| row["self"].as_u64().expect("a count")).sum::<u64>(), samples, "{told:#}");
    assert!(rows.iter().all(|row| !row["name"].as_str().expect("a name").starts_with("<waiting")), "{told:#}");
    // Half of the threads' time is that of the one that waits for ever; of the other's, 0.7 is sleep.
    let share = |count: u64| count as f64 / samples as f64;
    assert!((share(own("forever")) - 0.5).abs() < 0.05 && (share(own("sleeps")) - 0.35).abs() < 0.08, "{told:#}");
    let waits = told["waiting"].as_object().expect("what was waited for");
    let waiting: u64 = waits.values().map(|count| count.as_u64().expect("a count")).sum();
    assert!((told["waiting_share"].as_f64().expect("a share") - share(waiting)).abs() < 1e-9, "{told:#}");
    assert!(share(waiting) > 0.9 && told["cpu_share"].as_f64().expect("a share") < 0.1, "{told:#}");

    let text = String::from_utf8(look(&[])).expect("it is text");
    let line = text.lines().find(|line| line.starts_with("waiting ")).unwrap_or_else(|| panic!("{text}"));
    assert!(line.contains("lock ") && line.contains("sleep ") && text.contains("s of threads' time"), "{text}");
}

#[test]
fn what_is_no_terminal_gets_no_view() {
    let output = Command::new(binary()).args(["top", "--all-python"]).stdin(Stdio::null()).output();
    let output = output.expect("the profiler can be run");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.contains("this is no terminal") && told.contains("--once"), "{told}");
}
