//! Faults of the machine: a disk that is full or fills up, and a directory that disappears.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Recorded, Target, binary, is_sampling, judge, let_run, live};

/// A small file system, unmounted at the end.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn mounted(size: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let options = format!("size={size}");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tachyon-test"]).arg(dir.path()).status();
        assert!(mount.expect("mount can be run").success(), "a tmpfs cannot be mounted");
        Self(dir)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tiny {
    fn drop(&mut self) {
        let _result = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// One clear error, exit status 1, no file under the final name, and the profiler ends by itself.
#[test]
fn a_full_disk() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "deep_stack.py");
    for format in ["tach", "collapsed"] {
        let tiny = Tiny::mounted("4k");
        // This leaves no room for another page.
        std::fs::write(tiny.path().join("full"), [7; 4096]).expect("there is one page");
        let file = tiny.path().join("out");
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "-F", "499", "-d", "500ms", "--format", format, "-o"]);
        let output = command.arg(&file).output().expect("the profiler can be run");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{format}: {stderr}");
        let told =
            stderr.lines().any(|line| line.starts_with("tachyon-bpf: cannot ") && line.contains("no space left"));
        assert!(told, "{format}: {stderr}");
        assert!(!file.exists(), "{format}: a file that is not whole has no final name");
    }
}

/// The profile up to then is kept, and can be recovered.
#[test]
fn a_disk_that_becomes_full() {
    let Some(_live) = live() else { return };
    // TACH is written meanwhile, and the recording ends by itself; JSON lines at its end.
    let cases = [("tach", &["--compression", "none"][..], 0), ("tach", &[], 24 * 1024), ("jsonl", &["-d", "2s"], 0)];
    for (ending, words, taken) in cases {
        // The program runs for two minutes at most, so each recording has one of its own.
        let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
        let tiny = Tiny::mounted("48k");
        std::fs::write(tiny.path().join("taken"), vec![7; taken]).expect("there is room");
        let file = tiny.path().join("out").with_extension(ending);
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "-F", "1999"]).args(words).arg("-o");
        let output = command.arg(&file).output().expect("the profiler can be run");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        let part = file.with_added_extension("part");
        assert!(stderr.contains("no space left") && stderr.contains(part.to_str().unwrap()), "{stderr}");
        assert!(!file.exists(), "a file that is not whole has no final name");
        if ending == "jsonl" {
            // Its lines are complete, except that the last one may be cut.
            let text = std::fs::read_to_string(&part).expect("it is kept");
            let whole = text.rsplit_once('\n').expect("there are lines").0.lines();
            let samples = whole.map(|line| serde_json::from_str::<serde_json::Value>(line).expect("each line is JSON"));
            // With native frames they take 2.5 kB each.
            let samples = samples.count();
            println!("{ending}: {samples} samples");
            assert!(samples >= 10, "{} bytes", text.len());
            continue;
        }
        assert!(stderr.contains("`tachyon-bpf recover` makes it readable"), "{stderr}");
        let elsewhere = tempfile::tempdir().expect("a temporary directory can be made");
        let good = elsewhere.path().join("good.tach");
        let output = Command::new(binary()).arg("recover").arg(&part).arg("-o").arg(&good).output();
        let output = output.expect("the profiler can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let recorded = Recorded::read(&good);
        judge::agrees(&good, &recorded);
        println!("{words:?}: {} samples", recorded.samples.len());
        assert!(recorded.samples.len() > 100, "{words:?}: {:?}", recorded.header);
    }
}

/// A limit on the size of files (`ulimit -f`) comes with a signal that ends programs: it becomes an error like a full
/// disk's.
#[test]
fn a_file_that_may_not_grow() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let file = dir.path().join("out.tach");
    let mut command = Command::new("prlimit");
    command.arg("--fsize=20000").arg(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "1999", "--no-native", "--compression", "none", "-o"]);
    let output = command.arg(&file).output().expect("the profiler can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let part = file.with_added_extension("part");
    assert!(stderr.contains("file too large") && stderr.contains(part.to_str().unwrap()), "{stderr}");
    let good = dir.path().join("good.tach");
    let recovered = Command::new(binary()).arg("recover").arg(&part).arg("-o").arg(&good).status();
    assert!(recovered.expect("the profiler can be run").success());
    let recorded = Recorded::read(&good);
    judge::agrees(&good, &recorded);
    assert!(recorded.samples.len() > 1_000, "{:?}", recorded.header);

    // A program that the profiler starts has its signals unchanged.
    let told = ["grep", "Sig[IC]", "/proc/self/status"];
    let mut command = Command::new(binary());
    command.args(["--no-native", "-o"]).arg(dir.path().join("of_command.tach")).arg("--").args(told);
    let output = command.output().expect("the profiler can be run");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    let plain = Command::new("grep").args(["Sig[IC]", "/proc/self/status"]).output().expect("grep can be run");
    assert_eq!(told, String::from_utf8_lossy(&plain.stdout), "{}", String::from_utf8_lossy(&output.stderr));
}

/// An export says so too, and leaves nothing that looks complete.
#[test]
fn an_export_to_a_full_disk() {
    let Some(_live) = live() else { return };
    let input = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/tach/v09_rle_split.tach");
    let tiny = Tiny::mounted("8k");
    std::fs::write(tiny.path().join("full"), [7; 8192]).expect("there are two pages");
    for ending in ["tach", "collapsed", "prof", "pb.gz", "html", "svg", "speedscope.json", "firefox.json", "jsonl"] {
        let file = tiny.path().join(format!("out.{ending}"));
        let output = Command::new(binary()).arg("export").arg(&input).arg("-o").arg(&file).output();
        let output = output.expect("the profiler can be run");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{ending}: {stderr}");
        assert!(stderr.starts_with("tachyon-bpf: cannot ") && stderr.contains("no space left"), "{ending}: {stderr}");
        assert!(!file.exists(), "{ending}: a file that is not whole has no final name");
    }
}

/// The directory is removed while the recording runs: the profile is kept among the temporary files.
#[test]
fn a_directory_that_goes_away() {
    let Some(_live) = live() else { return };
    for (words, name, part) in [(&[][..], "out.tach", "out.tach.part"), (&["--split", "process"], "out", "out.part")] {
        let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let inner = dir.path().join("inner");
        std::fs::create_dir(&inner).expect("a directory can be made in it");
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "-F", "499"]).args(words);
        let temporary = dir.path().join("temporary");
        std::fs::create_dir(&temporary).expect("a directory can be made");
        command.arg("-o").arg(inner.join(name)).env("TMPDIR", &temporary);
        let running = command.stderr(Stdio::piped()).spawn().expect("the profiler can be run");
        // Files are made in it, one after the other, until then.
        until(|| is_sampling(running.id()));
        assert!(inner.join(part).exists(), "it is what the file is written as");
        std::fs::remove_dir_all(&inner).expect("the directory can be removed");
        let_run(target.pid(), Duration::from_millis(800));
        // SAFETY: kill(2) touches no memory; the child has not been waited for, so the pid is its.
        unsafe { libc::kill(running.id().cast_signed(), libc::SIGINT) };
        let output = running.wait_with_output().expect("it ends");
        assert!(!inner.exists(), "nothing is made again");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.lines().any(|line| line.starts_with("tachyon-bpf: cannot ") && line.contains(name)), "{stderr}");
        let kept = kept(&output, &temporary);
        let recorded = Recorded::read(&kept);
        judge::agrees(&kept, &recorded);
        assert!(recorded.samples.len() > 100, "{}", recorded.samples.len());
    }
}

/// Standard output accepts no more: the profile, which exists only once, is kept.
#[test]
fn a_full_standard_output() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let tiny = Tiny::mounted("4k");
    std::fs::write(tiny.path().join("full"), [7; 4096]).expect("there is one page");
    let temporary = tempfile::tempdir().expect("a temporary directory can be made");
    let mut command = Command::new(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "499", "-d", "1s", "-o", "-"]);
    command.env("TMPDIR", temporary.path());
    command.stdout(std::fs::File::create(tiny.path().join("out")).expect("it can be made"));
    let output = command.stderr(Stdio::piped()).output().expect("the profiler can be run");
    let kept = kept(&output, temporary.path());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("tachyon-bpf: cannot write to standard output: no space left"), "{stderr}");
    assert!(kept.to_str().is_some_and(|kept| kept.ends_with("-stdout.tach")), "{}", kept.display());
    let recorded = Recorded::read(&kept);
    judge::agrees(&kept, &recorded);
    assert!(recorded.samples.len() > 100, "{}", recorded.samples.len());
}

/// A reader that goes away ends the recording, which would not end otherwise.
#[test]
fn a_closed_standard_output() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let temporary = tempfile::tempdir().expect("a temporary directory can be made");
    let mut command = Command::new(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "499", "-o", "-", "--format", "jsonl"]);
    command.env("TMPDIR", temporary.path());
    let mut running = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the profiler can be run");
    // The file that will be copied has no name.
    let descriptors = format!("/proc/{}/fd", running.id());
    until(|| {
        let descriptors = std::fs::read_dir(&descriptors).expect("it runs").filter_map(Result::ok);
        descriptors.map(|entry| entry.path()).any(|path| {
            let unnamed = path.read_link().is_ok_and(|to| to.starts_with(temporary.path()));
            unnamed && path.metadata().is_ok_and(|about| about.len() > 0)
        })
    });
    drop(running.stdout.take());
    let output = running.wait_with_output().expect("it ends");
    let kept = kept(&output, temporary.path());
    let stderr = String::from_utf8_lossy(&output.stderr);
    for told in [
        "tachyon-bpf: nobody reads standard output any more: the recording ends\n",
        "tachyon-bpf: cannot write to standard output: nobody reads it any more\n",
    ] {
        assert!(stderr.contains(told), "{stderr}");
    }
    let text = std::fs::read_to_string(&kept).expect("it is text");
    assert!(kept.to_str().is_some_and(|kept| kept.ends_with("-stdout.jsonl")), "{}", kept.display());
    let samples = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("each line is JSON"));
    assert!(samples.filter(|sample| sample.to_string().contains("spin.py")).count() > 10, "{text}");
}

/// The only file that the profiler left among its temporary files; its hint names it.
fn kept(output: &std::process::Output, temporary: &Path) -> std::path::PathBuf {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    let left: Vec<_> = std::fs::read_dir(temporary).expect("it is there").map(|entry| entry.unwrap().path()).collect();
    let [kept] = &left[..] else { panic!("{left:?}: {stderr}") };
    assert!(stderr.contains(&format!("hint: the whole file is kept as {}\n", kept.display())), "{stderr}");
    let mode = std::fs::metadata(kept).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else may read it");
    kept.clone()
}

fn until(mut reached: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not come to this");
        std::thread::sleep(Duration::from_millis(10));
    }
}
