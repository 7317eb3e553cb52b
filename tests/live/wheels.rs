//! Packages from PyPI that work in C, C++ and Rust: their functions stand above the Python function that called them,
//! and py-spy, which looks at the same process at the same time, sees the same ones.

use serde::Deserialize;
use std::collections::{BTreeMap, HashSet};
use std::process::{Command, Stdio};
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
    kind: String,
}

/// A function of C++ without what is in brackets, which demanglers write in different ways.
fn plain(name: &str) -> &str {
    let name = name.split(['<', '(']).next().unwrap_or_default();
    name.trim_end().rsplit(' ').next().unwrap_or_default()
}

/// Of each stack: the innermost Python function and the names of the native functions above it.
struct Shares {
    stacks: usize,
    functions: BTreeMap<(String, String), usize>,
}

impl Shares {
    fn of<'a>(stacks: impl Iterator<Item = (&'a str, Vec<&'a str>, usize)>) -> Self {
        let mut shares = Self { stacks: 0, functions: BTreeMap::new() };
        for (python, native, count) in stacks {
            shares.stacks += count;
            let once: HashSet<_> = native.iter().map(|name| plain(name)).filter(|name| !name.is_empty()).collect();
            for name in once {
                *shares.functions.entry((python.to_owned(), name.to_owned())).or_default() += count;
            }
        }
        shares
    }

    fn share(&self, function: &(String, String)) -> f64 {
        self.functions.get(function).copied().unwrap_or(0) as f64 / self.stacks as f64
    }
}

/// py-spy's lines are `name (place);name (place) count`, the leaf last. What has no name is an address.
fn theirs(text: &str) -> Shares {
    Shares::of(text.lines().filter_map(|line| {
        let (stack, count) = line.rsplit_once(' ')?;
        let frames: Vec<_> = stack.split(';').collect();
        let at = frames.iter().rposition(|frame| frame.contains(".py:"))?;
        let name = |frame: &&'_ str| !frame.starts_with("0x");
        let native = frames[at + 1..].iter().copied().filter(name).collect();
        Some((frames[at].split(" (").next()?, native, count.parse().ok()?))
    }))
}

fn ours(lines: &[Line]) -> Shares {
    Shares::of(lines.iter().filter_map(|line| {
        let at = line.frames.iter().position(|frame| frame.kind == "python")?;
        let native = line.frames[..at].iter().map(|frame| &*frame.function).collect();
        // py-spy has names without their class or the function around.
        Some((line.frames[at].function.rsplit('.').next()?, native, 1))
    }))
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
    let (ours, theirs) = (ours(&lines), theirs(&std::fs::read_to_string(&raw).expect("py-spy wrote it")));
    println!("{} stacks of ours, {} of py-spy's", ours.stacks, theirs.stacks);
    let mut top: Vec<_> = theirs.functions.iter().map(|(function, count)| (count, function)).collect();
    top.sort_unstable_by(|one, other| other.cmp(one));
    let top: Vec<_> = top.into_iter().map(|(_, function)| function).take(12).collect();
    let mut agree = 0;
    for function in &top {
        let (our, their) = (ours.share(function), theirs.share(function));
        let mean = f64::midpoint(our, their);
        let error = 3.29 * (mean * (1.0 - mean) * (1.0 / ours.stacks as f64 + 1.0 / theirs.stacks as f64)).sqrt();
        let same = (our - their).abs() <= error + 0.03;
        println!("| `{}` | `{}` | {:.1} % | {:.1} % | {same}", function.0, function.1, our * 100.0, their * 100.0);
        agree += usize::from(same);
    }
    assert!(top.len() >= 6 && agree * 3 >= top.len() * 2, "{agree} of {} agree", top.len());
}
