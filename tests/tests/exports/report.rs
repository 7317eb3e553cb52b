//! `report` and `diff` compared with what Go's pprof says about the same samples.

use crate::profile::{ONE_STACK, Stacks, USUAL, WITHOUT_SYMBOLS, export, write};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::cli::args::{self, Verb};
use tachyon::cli::{diff, report};
use tachyon_tests::viewers::{Costs, go_pprof, run, tools};

/// Runs the program's `report` or `diff`; returns its JSON and its exit status.
pub fn json(words: &[&str]) -> (Value, u8) {
    let line = ["tachyon-bpf"].iter().chain(words).chain(&["--json"]).map(std::ffi::OsString::from);
    let mut out = Vec::new();
    let status = match args::parse(line) {
        Ok(Verb::Report(args)) => report::run(&args, &mut out).map(|()| 0).unwrap(),
        Ok(Verb::Diff(args)) => diff::run(&args, &mut out).unwrap(),
        other => panic!("{words:?}: {other:?}"),
    };
    (serde_json::from_slice(&out).unwrap(), status)
}

fn costs(report: &Value, name: impl Fn(&Value) -> String) -> Costs {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| (name(row), (row["self"].as_u64().unwrap(), row["total"].as_u64().unwrap()))).collect()
}

fn function(row: &Value) -> String {
    row["function"].as_str().unwrap().to_owned()
}

fn recorded(dir: &Path, name: &str, stacks: Stacks<'_>) -> (String, PathBuf) {
    let path = dir.join(name);
    write(stacks, &path);
    let exported = export(&path, path.with_extension("pb.gz"), false);
    (path.to_str().unwrap().to_owned(), exported)
}

/// pprof has no rows where the mapping is not shown, and charges to the next one that is.
const PYTHON: &str = r"-show=^\[python\]$";

#[test]
fn totals_are_those_of_pprof() {
    if tools().is_none() {
        return;
    }
    for stacks in [USUAL, ONE_STACK, WITHOUT_SYMBOLS] {
        let dir = tempfile::tempdir().unwrap();
        let (file, exported) = recorded(dir.path(), "app.tach", stacks);
        let (ours, _) = json(&["report", &file]);
        let (theirs, head) = go_pprof(&exported, &[PYTHON]);
        assert_eq!(costs(&ours, function), theirs);
        assert!(head.contains(&format!("of {} total", ours["samples"])), "{head}");

        let (ours, _) = json(&["report", &file, "--native"]);
        let rows = ours["rows"].as_array().unwrap().iter();
        let native: Vec<_> = rows.filter(|row| row["kind"] == "native").cloned().collect();
        let (mut theirs, _) = go_pprof(&exported, &[]);
        theirs.retain(|name, _| native.iter().any(|row| row["function"] == **name));
        assert_eq!(costs(&serde_json::json!({ "rows": native }), function), theirs);
        // The native code that its self includes, and the rest, which pprof says ran in the function.
        let (leaves, _) = go_pprof(&exported, &[]);
        for row in ours["rows"].as_array().unwrap().iter().filter(|row| row["kind"] == "python") {
            let detail = row["native"].as_array().into_iter().flatten().map(|row| row["self"].as_u64().unwrap());
            let leaf = leaves[row["function"].as_str().unwrap()].0;
            assert_eq!(row["self"].as_u64().unwrap() - detail.sum::<u64>(), leaf, "{row}");
        }

        let (ours, _) = json(&["report", &file, "--by", "line"]);
        let (theirs, _) = go_pprof(&exported, &[PYTHON, "-lines"]);
        let line = |row: &Value| {
            format!("{} {}:{}", row["function"].as_str().unwrap(), row["file"].as_str().unwrap(), row["line"])
        };
        assert_eq!(costs(&ours, line), theirs);
    }
}

#[test]
fn focus_and_ignore_are_those_of_pprof() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, exported) = recorded(dir.path(), "app.tach", USUAL);
    for (option, pattern) in [("focus", "^inner|fact$"), ("focus", "deflate"), ("ignore", "libz"), ("ignore", "leaf")] {
        let (ours, _) = json(&["report", &file, "--native", &format!("--{option}"), pattern]);
        let (theirs, head) = go_pprof(&exported, &[&format!("-{option}={pattern}")]);
        // Self of Python code includes native code; totals are the same.
        let totals =
            |costs: Costs| costs.into_iter().map(|(name, (_, total))| (name, total)).collect::<BTreeMap<_, _>>();
        assert_eq!(totals(costs(&ours, function)), totals(theirs), "{option} {pattern}: {head}");
        assert_eq!(ours["all_samples"], 124);
    }
}

#[test]
fn callers_and_callees_are_those_of_pprof() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (file, exported) = recorded(dir.path(), "app.tach", USUAL);
    for name in ["leaf", "fact", "middle"] {
        let text = run(Command::new("go")
            .args(["tool", "pprof", "-sample_index=samples", "-nodefraction=0", "-peek", &format!("^{name}$")])
            .arg(&exported)
            .env("PPROF_TMPDIR", dir.path()));
        let mut theirs: Vec<(u64, String)> = text
            .lines()
            .filter_map(|line| line.split_once("|   "))
            .map(|(counts, name)| (counts.split_whitespace().next().unwrap().parse().unwrap(), name.trim().to_owned()))
            .collect();
        let pattern = format!("^{name}$");
        let (ours, _) = json(&["report", &file, "--native", "--callers", &pattern, "--callees", &pattern]);
        let mut ours: Vec<(u64, String)> = ours["rows"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| (row["total"].as_u64().unwrap(), function(row)))
            .collect();
        theirs.sort();
        ours.sort();
        assert_eq!(ours, theirs, "{text}");
    }
}

/// The same program after a change: `middle` calls less of `leaf`, and there is something new.
const LATER: Stacks<'static> = &[
    (0, &["<module>:30", "middle:20", "leaf:10"], 31),
    (0, &["<module>:30", "middle:21"], 5),
    (0, &["<module>:31"], 9),
    (0, &["<module>:30", "middle:20", "leaf:10", "libz.so.1!deflate"], 7),
    (0, &["<module>:30", "extra:70"], 11),
    (1, &["Worker.run:40", "Worker.run.<locals>.inner:41", "leaf:10"], 25),
];

#[test]
fn the_subtraction_is_that_of_pprof() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (before, base) = recorded(dir.path(), "before.tach", USUAL);
    let (after, exported) = recorded(dir.path(), "after.tach", LATER);
    let (ours, status) = json(&["diff", &before, "--", &after]);
    assert_eq!(status, 0);
    let text = run(Command::new("go")
        .args(["tool", "pprof", "-sample_index=samples", "-top", "-nodecount=10000", "-nodefraction=0", PYTHON])
        .arg(format!("-diff_base={}", base.display()))
        .arg(&exported)
        .env("PPROF_TMPDIR", dir.path()));
    let (_, rows) = text.split_once("cum%\n").unwrap();
    // Those whose self did not change have no row of their own in one of the two.
    let theirs: BTreeMap<String, i64> = rows
        .lines()
        .map(|row| {
            let words: Vec<&str> = row.split_whitespace().collect();
            (words[5..].join(" "), words[0].parse().unwrap())
        })
        .filter(|(_, change)| *change != 0)
        .collect();
    let changes = ours["changes"].as_array().unwrap().iter();
    let ours: BTreeMap<String, i64> = changes
        .map(|row| (function(row), row["after_samples"].as_i64().unwrap() - row["before_samples"].as_i64().unwrap()))
        .filter(|(_, change)| *change != 0)
        .collect();
    assert_eq!(ours, theirs, "{text}");
    assert_eq!(ours["leaf"], 63 - 107);
}

/// A program that got slower fails the gate; one that did not passes it.
#[test]
fn the_gate() {
    let dir = tempfile::tempdir().unwrap();
    // The stacks of a file follow each other, so a block is one stack: only many short turns are like a program.
    let turns = |slow: u64| -> Vec<(u32, &[&str], u64)> {
        let turn: [(u32, &[&str], u64); 3] =
            [(0, &["main:1", "parse:2"], 5 + slow), (0, &["main:1", "render:3"], 10), (0, &["main:1", "idle:4"], 10)];
        (0..60).flat_map(|number| turn.map(|(thread, stack, count)| (thread, stack, count + number % 2))).collect()
    };
    let file = |name: &str, stacks: &[(u32, &[&str], u64)]| {
        let path = dir.path().join(name);
        write(stacks, &path);
        path.to_str().unwrap().to_owned()
    };
    let (before, same, slower) = (file("a.tach", &turns(0)), file("b.tach", &turns(0)), file("c.tach", &turns(4)));
    let gate = |after: &str, limit: &str| json(&["diff", &before, "--", after, "--fail-over", limit]);
    assert_eq!(gate(&same, "5%").1, 0);
    let (changed, status) = gate(&slower, "5%");
    assert_eq!(status, 3, "{changed:#}");
    let parse = &changed["changes"].as_array().unwrap().iter().find(|change| change["function"] == "parse").unwrap();
    let [change, low, high] = ["change", "low", "high"].map(|key| parse[key].as_f64().unwrap());
    assert!(parse["significant"] == true && low > 0.0 && low < change && change < high && parse["moved_to"].is_null());
    assert_eq!(gate(&slower, "200%").1, 0, "it changed by less");
    assert_eq!(gate(&before, "0%").1, 0, "the other way round");
}
