//! Packages from PyPI that work in C, C++ and Rust: their functions are above the Python function that called them, and
//! py-spy, which looks at the same process at the same time, sees the same ones.

use std::process::{Command, Stdio};
use tachyon_tests::native_shares::{self, Compared};
use tachyon_tests::{Interpreter, Line, Profiler, Target, live, with_wheels};

const PACKAGES: [&str; 5] =
    ["numpy==2.4.6", "pyarrow==26.0.1", "orjson==3.13.0", "pydantic-core==2.50.4", "py-spy==0.4.2"];

/// CPUs on which OpenBLAS multiplies matrices in functions without unwind rules; AMD's use Haswell's.
const CORES: [&str; 4] = ["Haswell", "Sandybridge", "Nehalem", "Prescott"];

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
    let lines: Vec<_> = Line::all(&text).collect();

    for (function, object) in target.facts["objects"].as_object().expect("told") {
        let object = object.as_str().expect("a name");
        let of_function: Vec<_> = lines
            .iter()
            .filter_map(|line| line.frames.iter().position(|frame| frame.function == *function).map(|at| (line, at)))
            .collect();
        // pyarrow's own Python code is in between.
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

/// The caller of the assembly function is known on every processor: `cblas_dgemm`, which numpy's `DOUBLE_matmul` calls.
#[test]
fn assembly_without_unwind_rules_has_its_callers() {
    let Some(_live) = live() else { return };
    let python = with_wheels(&Interpreter::named("pyenv_3_11"), &PACKAGES);
    for core in CORES {
        let environment = [("OPENBLAS_NUM_THREADS", "1"), ("OPENBLAS_CORETYPE", core)];
        let target = Target::start_in(&python, "matmul.py", &[], &environment);
        let profiler = Profiler::of(target.pid()).native().rate(199).arg("--format").arg("jsonl").milliseconds(4_000);
        let output = profiler.run();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(profiler.output()).expect("the recording was written");
        let kernel = format!("dgemm_kernel_{}", core.to_uppercase());
        let is_known = |line: &Line| {
            let at = |name: &str| line.frames.iter().position(|frame| frame.function.contains(name));
            let chain = ["cblas_dgemm", "DOUBLE_matmul", "multiply"].map(at);
            chain.iter().all(Option::is_some) && chain.is_sorted()
        };
        // From the first sample on: until there are tables, stacks are walked in copies. Haswell's function has a buffer on the stack
        // with pages that it never writes.
        let in_kernel: Vec<_> = Line::all(&text).filter(|line| line.frames[0].function == kernel).collect();
        let known = in_kernel.iter().filter(|line| is_known(line)).count();
        let exact = in_kernel.iter().filter(|line| line.merge == "exact").count();
        println!("{core}: {known} of {} in {kernel} have its callers", in_kernel.len());
        assert!(in_kernel.len() > 50 && known * 100 >= in_kernel.len() * 99, "{core}: {known} of {}", in_kernel.len());
        assert_eq!(exact, 0, "{core}: what no rule of the file says is told");
        let report = std::fs::read(profiler.report()).expect("the report was written");
        let report: serde_json::Value = serde_json::from_slice(&report).expect("it is JSON");
        let repairs = &report["native"]["repairs"];
        assert!(repairs["repaired: through assembly without unwind rules"].as_u64() >= Some(known as u64), "{repairs}");
    }
}
