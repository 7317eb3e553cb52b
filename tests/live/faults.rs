//! Faults of the machine: a disk that is full, or becomes so, and a directory that goes away.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tachyon::tach::Reader;
use tachyon_tests::{Interpreter, Target, binary, live};

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
        // What is there leaves no room for another page.
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
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "eight_threads.py");
    let tiny = Tiny::mounted("48k");
    let file = tiny.path().join("out.tach");
    let mut command = Command::new(binary());
    // Without an end: it ends by itself.
    command.args(["-p", &target.pid().to_string(), "-F", "1999", "--compression", "none", "-o"]);
    let output = command.arg(&file).output().expect("the profiler can be run");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("no space left") && stderr.contains("out.tach.part"), "{stderr}");
    assert!(!file.exists(), "a file that is not whole has no final name");

    let elsewhere = tempfile::tempdir().expect("a temporary directory can be made");
    let good = elsewhere.path().join("good.tach");
    let part = tiny.path().join("out.tach.part");
    let output = Command::new(binary()).arg("recover").arg(&part).arg("-o").arg(&good).output();
    let output = output.expect("the profiler can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let reader = Reader::new(std::fs::File::open(&good).expect("it is there")).expect("it can be read");
    assert!(reader.header().sample_count > 100, "{:?}", reader.header());
}

/// An export says so too, and leaves nothing that looks whole.
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

/// Somebody removes the directory while the recording runs.
#[test]
fn a_directory_that_goes_away() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let inner = dir.path().join("inner");
    std::fs::create_dir(&inner).expect("a directory can be made in it");
    let file = inner.join("out.tach");
    let mut command = Command::new(binary());
    command.args(["-p", &target.pid().to_string(), "-F", "499", "-d", "2s", "-o"]).arg(&file);
    let running = command.stderr(Stdio::piped()).spawn().expect("the profiler can be run");
    let part = inner.join("out.tach.part");
    let begin = Instant::now();
    while !part.exists() {
        assert!(begin.elapsed() < Duration::from_secs(60), "the recording does not begin");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::fs::remove_dir_all(&inner).expect("the directory can be removed");
    let output = running.wait_with_output().expect("it ends");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(
        stderr.lines().any(|line| line.starts_with("tachyon-bpf: cannot ") && line.contains("out.tach")),
        "{stderr}"
    );
    assert!(!inner.exists(), "nothing is made again");
}
