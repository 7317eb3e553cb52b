//! What CPython's viewers say about lines: a line's own time includes what it called in C, in recordings with and without
//! native frames.

use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use tachyon_tests::viewers::run;
use tachyon_tests::{Interpreter, Profiler, ShownFrame, Target, binary, judge, on_each_interpreter};

on_each_interpreter!(on [pyenv_3_8 pyenv_3_12 sid_3_15]: lines_have_what_they_called);

/// Samples of a line: as the innermost one, and anywhere in the stack.
type Heat = BTreeMap<(String, i64), (u64, u64)>;

#[derive(Deserialize)]
struct Sample {
    #[serde(default = "one")]
    weight: u64,
    frames: Vec<Frame>,
}

fn one() -> u64 {
    1
}

#[derive(Deserialize)]
struct Frame {
    function: String,
    kind: String,
    file: Option<String>,
    line: Option<i64>,
}

/// By CPython 3.15's heat map.
fn theirs(file: &Path) -> Heat {
    let (lines, _) = judge::python(file, Some("line_heat.py"), &["FILE"]);
    let lines: Vec<(String, i64, u64, u64)> = serde_json::from_str(&lines).expect("the script prints JSON");
    lines.into_iter().map(|(file, line, own, total)| ((file, line), (own, total))).collect()
}

/// By the innermost Python frame of each sample. As CPython's, without files such as `<frozen importlib._bootstrap>`.
fn ours(lines: &str) -> Heat {
    let mut heat = Heat::new();
    for line in lines.lines() {
        let Sample { weight, frames } = serde_json::from_str(line).expect("one sample a line");
        // CPython counts markers such as `<GC>` under no line, and so does the profiler.
        let marked = |leaf: &Frame| leaf.kind == "special" && !leaf.function.starts_with("<waiting: ");
        let marked = frames.first().is_some_and(marked);
        let python: Vec<_> = frames.iter().filter(|frame| frame.kind == "python").collect();
        let place = |frame: &&Frame| Some((frame.file.clone().filter(|file| !file.starts_with('<'))?, frame.line?));
        if let Some(innermost) = python.first().and_then(place).filter(|_| !marked) {
            heat.entry(innermost).or_default().0 += weight;
        }
        let mut all: Vec<_> = python.iter().filter_map(place).collect();
        all.sort();
        all.dedup();
        all.into_iter().for_each(|place| heat.entry(place).or_default().1 += weight);
    }
    heat
}

/// Of 5,152 samples 226 were some line's own: the leaves in C had the file `~`.
fn lines_have_what_they_called(interpreter: &Interpreter) {
    let target = Target::start(interpreter, "calls_c.py");
    let recording = Profiler::of(target.pid()).native().rate(499).cpu_milliseconds(target.pid(), 1_500).record();
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let export = |name: &str, words: &[&str]| {
        let out = dir.path().join(name);
        run(Command::new(binary()).arg("export").arg(&recording.path).arg("-o").arg(&out).args(words));
        out
    };
    let lines = std::fs::read_to_string(export("lines.jsonl", &[])).expect("the export was written");
    let expected = ours(&lines);
    let own: u64 = expected.values().map(|&(own, _)| own).sum();
    let in_c = recording.recorded.samples.iter();
    let in_c = in_c.filter(|sample| recording.recorded.leaf(sample).is_some_and(ShownFrame::is_native)).count();
    let total = recording.report.stored;
    println!("{}: {own} of {total} samples are a line's own; {in_c} in C", interpreter.name);
    assert!(total > 300 && in_c as u64 * 10 > total && own * 100 >= total * 97, "{own} of {total}, {in_c} in C");
    assert_eq!(theirs(&recording.path), expected, "as it was recorded");
    assert_eq!(theirs(&export("python.tach", &["--no-native"])), expected, "without native frames");
    // And what was read from such a file is what was recorded.
    assert!(lines.contains("\"kind\":\"native\""), "native frames are told as such");
    let again = export("again.tach", &["--from", "0s"]);
    assert_eq!(theirs(&again), expected, "written again");
}
