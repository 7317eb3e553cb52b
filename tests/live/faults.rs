//! Faults of the machine: a disk that is full.

use std::path::Path;
use std::process::Command;
use tachyon_tests::{Interpreter, Target, binary, live};

/// A file system of one page, unmounted at the end.
struct Tiny(tempfile::TempDir);

impl Tiny {
    fn mounted() -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory can be made");
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=4k", "tachyon-test"]).arg(dir.path()).status();
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
        let tiny = Tiny::mounted();
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
