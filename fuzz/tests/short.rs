//! The short form of the fuzzers, as a part of the test suite: it shows at once what a change may have broken. `docs/dev/fuzzing.md`
//! has the long ones.

use std::process::Command;

#[test]
fn each_for_a_second() {
    let mut fuzzers = Command::new(env!("CARGO_BIN_EXE_tachyon-fuzz"));
    let output = fuzzers.args(["--seconds", "1"]).output().expect("it was built with this test");
    let told = String::from_utf8_lossy(&output.stdout);
    println!("{told}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "a fuzzer has found something: what it says is above");
    assert!(told.lines().filter(|line| line.contains(" executions in ")).count() > 10, "each tells what it did");
}
