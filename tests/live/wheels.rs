//! Packages from PyPI that work in C, C++ and Rust: their functions stand above the Python function that called them,
//! and py-spy, which looks at the same process at the same time, sees the same ones.

use serde::Deserialize;
use std::process::{Command, Stdio};
use tachyon_tests::native_shares::{self, Compared};
use tachyon_tests::{Interpreter, Profiler, Target, live, with_wheels};

const PACKAGES: [&str; 5] =
    ["numpy==2.4.6", "pyarrow==26.0.1", "orjson==3.13.0", "pydantic-core==2.50.4", "py-spy==0.4.2"];

#[derive(Deserialize)]
struct Line {
    frames: Vec<Frame>,
}

#[derive(Deserialize)]
struct Frame {
    function: String,
    file: Option<String>,
}

#[test]
fn native_frames_stand_above_their_caller_and_py_spy_agrees() {
    let Some(_live) = live() else { return };
    let python = with_wheels(&Interpreter::named("pyenv_3_11"), &PACKAGES);
    let target = Target::start_in(&python, "wheels.py", &[], &[("OPENBLAS_NUM_THREADS", "1")]);
    target.make_urgent();
    let dir = tempfile::tempdir().expect("a folder");
    let raw = dir.path().join("raw");
    let mut command = Command::new(python.path.with_file_name("py-spy"));
    command.args(["record", "--native", "-f", "raw", "-r", "99", "-d", "9", "-p", &target.pid().to_string(), "-o"]);
    let py_spy = command.arg(&raw).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let profiler = Profiler::of(target.pid()).native().rate(499).arg("--format").arg("jsonl").milliseconds(8_000);
    let output = profiler.run();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(py_spy.expect("it is installed").wait().expect("a child can be waited for").success());
    let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
    let lines: Vec<Line> = text.lines().map(|line| serde_json::from_str(line).expect("one sample")).collect();

    for (function, object) in target.facts["objects"].as_object().expect("told") {
        let object = object.as_str().expect("a name");
        let of_function: Vec<_> = lines
            .iter()
            .filter_map(|line| line.frames.iter().position(|frame| frame.function == *function).map(|at| (line, at)))
            .collect();
        // pyarrow's own Python code stands between.
        let with_object = of_function.iter().filter(|(line, at)| {
            line.frames[..*at].iter().any(|frame| frame.file.as_deref().is_some_and(|file| file.starts_with(object)))
        });
        let (with_object, all) = (with_object.count(), of_function.len());
        println!("{function}: {with_object} of {all} samples are in {object}");
        assert!(all > 20 && with_object * 10 >= all * 8, "{function}: {with_object} of {all} in {object}");
    }
    let ours = native_shares::ours(&text).expect("one sample a line");
    let theirs = native_shares::py_spys(&std::fs::read_to_string(&raw).expect("py-spy wrote it"));
    println!("{} stacks of ours, {} of py-spy's", ours.stacks, theirs.stacks);
    let top = native_shares::compared(&ours, &theirs, |shares| &shares.running, 12);
    for Compared { pair, ours, theirs, same } in &top {
        println!("| `{}` | `{}` | {:.1} % | {:.1} % | {same}", pair.0, pair.1, ours * 100.0, theirs * 100.0);
    }
    let agree = top.iter().filter(|row| row.same).count();
    assert!(top.len() >= 6 && agree * 3 >= top.len() * 2, "{agree} of {} agree", top.len());
}
