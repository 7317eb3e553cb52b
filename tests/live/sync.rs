//! `--sync` forces the file to the disk every second, and nothing else does.

use std::process::Command;
use tachyon_tests::{Interpreter, Target, binary, live};

/// Counts calls of `fdatasync` by appending a byte to a file for each.
const COUNTER: &str = r#"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int file) {
    int out = open(getenv("SYNCS"), O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (out >= 0) { if (write(out, "s", 1) < 0) abort(); close(out); }
    return syscall(SYS_fdatasync, file);
}
"#;

#[test]
fn files_are_synchronised_each_second() {
    let Some(_live) = live() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (source, counter, syncs) = (dir.path().join("c.c"), dir.path().join("c.so"), dir.path().join("syncs"));
    std::fs::write(&source, COUNTER).expect("it can be written to");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&counter).arg(&source).status();
    assert!(built.expect("a C compiler can be run").success());
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    for (word, expected) in [("--no-native", 0), ("--sync", 3)] {
        let mut command = Command::new(binary());
        command.args(["-p", &target.pid().to_string(), "-F", "499", "-d", "3500ms", word, "--force", "-o"]);
        command.arg(dir.path().join("out.tach")).env("LD_PRELOAD", &counter).env("SYNCS", &syncs);
        let output = command.output().expect("the profiler can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let count = std::fs::metadata(&syncs).map_or(0, |file| file.len());
        // The file, and its journal where names are new: at least one for each second and one at the end.
        assert!(count >= expected && (expected > 0 || count == 0), "{word}: {count} calls");
    }
}
