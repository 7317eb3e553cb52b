//! Exports, read by their own readers: both `pprof`s, Chromium, speedscope and the Firefox profiler's importer.
//!
//! `cargo xtask tools` installs them. If they are missing the tests say so and pass, except in CI and with
//! `TACHYON_LIVE_TESTS=required` (`cargo xtask test` sets it).

mod native;
mod page;
mod page_large;
mod profile;
mod report;

use profile::{INTERVAL_US, ONE_STACK, Stacks, USUAL, WITHOUT_SYMBOLS, costs, export, parts, write};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::sinks::Format;
use tachyon_tests::viewers::{Firefox, go_pprof, perl_pprof, run, tools};
use tempfile::TempDir;

fn tach(dir: &TempDir, stacks: Stacks<'_>) -> PathBuf {
    let path = dir.path().join("app.tach");
    write(stacks, &path);
    path
}

/// A function under the name that survives the reader.
fn go_name(frame: &str) -> String {
    match parts(frame).0 {
        "<module>" => "app.<module>".to_owned(),
        "<unknown>" => "[unknown]".to_owned(),
        function => function.to_owned(),
    }
}

fn perl_name(frame: &str) -> String {
    go_name(frame).replace('<', "{").replace('>', "}")
}

fn with_line(frame: &str, name: impl Fn(&str) -> String, nowhere: &str) -> String {
    match parts(frame).1 {
        Some(line) => format!("{} /srv/app.py:{line}", name(frame)),
        None => format!("{}{nowhere}", name(frame)),
    }
}

#[test]
fn gperftools_profiles_are_read_by_both_pprofs() {
    if tools().is_none() {
        return;
    }
    for stacks in [USUAL, ONE_STACK, WITHOUT_SYMBOLS] {
        let dir = tempfile::tempdir().unwrap();
        let file = export(&tach(&dir, stacks), dir.path().join("app.prof"), false);
        let total: u64 = stacks.iter().map(|(_, _, count)| count).sum();

        let (found, head) = go_pprof(&file, &[]);
        assert_eq!(found, costs(stacks, go_name));
        assert!(head.contains(&format!("of {total} total")), "{head}");
        let (found, _) = go_pprof(&file, &["-lines"]);
        let object = |frame: &str| frame.split_once('!').map_or("", |(object, _)| object).to_owned();
        assert_eq!(found, costs(stacks, |frame| with_line(frame, go_name, &format!(" {}", object(frame)))));

        let (found, head) = perl_pprof(&file, &[]);
        assert_eq!(found, costs(stacks, perl_name));
        assert_eq!(head, format!("Total: {total} samples"));
        let (found, _) = perl_pprof(&file, &["--lines"]);
        assert_eq!(found, costs(stacks, |frame| with_line(frame, perl_name, &format!(" {}:0", object(frame)))));
    }
}

#[test]
fn callers_and_callees_are_told() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let input = tach(&dir, USUAL);
    for name in ["app.prof", "app.pb.gz"] {
        let file = export(&input, dir.path().join(name), false);
        let text = run(Command::new("go")
            .args(["tool", "pprof", "-sample_index=samples", "-nodefraction=0", "-peek", "^leaf$"])
            .arg(&file)
            .env("PPROF_TMPDIR", dir.path()));
        let edges: Vec<(u64, String)> = text
            .lines()
            .filter_map(|line| line.split_once("|   "))
            .map(|(counts, name)| (counts.split_whitespace().next().unwrap().parse().unwrap(), name.trim().to_owned()))
            .collect();
        let expected = [(82, "middle"), (25, "Worker.run.<locals>.inner"), (7, "deflate")];
        assert_eq!(edges, expected.map(|(count, name)| (count, name.to_owned())), "{name}: {text}");
    }
}

#[test]
fn threads_are_kept_apart_where_wanted() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let input = tach(&dir, USUAL);
    for name in ["app.prof", "app.pb.gz"] {
        let file = export(&input, dir.path().join(name), true);
        let (found, _) = go_pprof(&file, &[]);
        assert_eq!((found["app (tid 77)"], found["worker (tid 78)"]), ((0, 90), (0, 34)));
        assert_eq!(found["leaf"], (100, 107));
    }
}

#[test]
fn protobuf_profiles_are_read_by_go() {
    if tools().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = export(&tach(&dir, USUAL), dir.path().join("app.pb.gz"), false);
    let name = |frame: &str| parts(frame).0.to_owned();
    let (found, head) = go_pprof(&file, &[]);
    assert_eq!(found, costs(USUAL, name));
    assert!(head.contains("of 124 total") && head.contains("Duration: 1.50s"), "{head}");
    let (found, _) = go_pprof(&file, &["-lines"]);
    assert_eq!(found, costs(USUAL, |frame| with_line(frame, name, "")));
    let (found, _) = go_pprof(&file, &["-tagfocus=thread=worker"]);
    assert_eq!(found["leaf"], (25, 25));
    let (held, _) = go_pprof(&file, &["-tagfocus=gil=^held"]);
    assert_eq!(held["leaf"].1, 40 + 10 + 4 + 16);
    let text = run(Command::new("go").args(["tool", "pprof", "-raw"]).arg(&file).env("PPROF_TMPDIR", dir.path()));
    assert!(text.contains("Period: 10000000") && text.contains("pid:[77]"), "{text}");
}

#[test]
fn firefox_profiler_loads_ours() {
    let Some(tools) = tools() else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = export(&tach(&dir, USUAL), dir.path().join("app.firefox.json"), false);
    let loaded = Firefox::load(&tools, &file);
    let query = |words: &[&str]| loaded.query(words);
    let (functions, threads, markers) =
        (query(&["thread", "functions"]), query(&["thread", "list"]), query(&["thread", "markers"]));
    assert!(functions.contains("leaf (app.py) - self: 75 ("), "{functions}");
    assert!(functions.contains("middle (app.py) - self: 5 (5.6%), total: 87 ("), "{functions}");
    assert!(threads.contains("2 threads across 1 process") && threads.contains("worker"), "{threads}");
    assert!(markers.contains("GIL held") && markers.contains("GIL not held"), "{markers}");
}

#[test]
fn browser_shows_flame_graph_and_speedscope() {
    let Some(tools) = tools() else { return };
    let dir = tempfile::tempdir().unwrap();
    let input = tach(&dir, USUAL);
    let page = profile::export_as(Format::Flamegraph, &input, dir.path().join("app.html"), false);
    let speedscope = export(&input, dir.path().join("app.speedscope.json"), false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/browser.mjs");
    let shots = std::env::var_os("TACHYON_SCREENSHOTS").map_or_else(|| dir.path().to_owned(), PathBuf::from);
    let text = run(Command::new("node").arg(script).arg(tools).args([page, speedscope, shots]));
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["errors"], serde_json::json!([]));
    assert_eq!(found["requests"], serde_json::json!([]), "the page works offline");
    assert_eq!(found["caption"], "124 samples in 1.5 s at 100 Hz, 0 lost (0.0 %)");
    let root_top = found["root_top"].as_f64().unwrap();
    assert!((0.0..150.0).contains(&root_top), "the page begins at the roots: {root_top}");
    assert_eq!(found["share"], "Matched: 86.3%");
    assert_eq!(found["share_reversed"], "Matched: 86.3%");
    let width = |key: &str| found[key][0].as_u64().unwrap_or_else(|| panic!("{key}: {found}"));
    assert!(width("before") < width("whole") && width("zoomed") > width("whole") - 5, "{found}");
    assert_eq!(width("unzoomed"), width("before"));
    // Reversed, all leaves are one: 100 of 124 samples. In 7 others it called `deflate`.
    let reversed: Vec<u64> = serde_json::from_value(found["leaf_reversed"].clone()).expect("widths");
    let share = |width: u64| (width as f64 * 124.0 / f64::from(1_280)).round();
    assert_eq!(reversed.iter().map(|&width| share(width)).collect::<Vec<_>>(), [7.0, 100.0], "{found}");
    let blue = |name: &str| {
        let colour = found["colours"][name].as_str().unwrap_or_else(|| panic!("{name}: {found}"));
        let numbers: Vec<u32> =
            colour.trim_matches(|c: char| !c.is_ascii_digit()).split(',').map(|n| n.trim().parse().unwrap()).collect();
        numbers[2] > numbers[0]
    };
    assert!(blue("deflate") && !blue("leaf"));
    let shown = found["speedscope"].as_str().unwrap();
    assert!(shown.contains("app (tid 77)") && shown.contains("(1/2)"), "{shown}");
}

/// Every format holds the same samples, whatever its unit.
#[test]
fn totals_agree() {
    let dir = tempfile::tempdir().unwrap();
    let input = tach(&dir, USUAL);
    let text = |name: &str| std::fs::read_to_string(export(&input, dir.path().join(name), false)).unwrap();
    let total: u64 = USUAL.iter().map(|(_, _, count)| count).sum();
    assert_eq!(text("app.jsonl").lines().count() as u64, total);
    let counts =
        text("app.collapsed").lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum::<u64>();
    assert_eq!(counts, total);

    let speedscope: Value = serde_json::from_str(&text("app.speedscope.json")).unwrap();
    let mut samples = 0;
    for profile in speedscope["profiles"].as_array().unwrap() {
        let (stacks, weights) = (profile["samples"].as_array().unwrap(), profile["weights"].as_array().unwrap());
        assert_eq!(stacks.len(), weights.len());
        samples += stacks.iter().filter(|stack| !stack.as_array().unwrap().is_empty()).count() as u64;
        // All time lines are equally long: they start and end with the recording.
        let length: u64 = weights.iter().map(|weight| weight.as_u64().unwrap()).sum();
        assert_eq!(length, profile["endValue"].as_u64().unwrap());
        assert_eq!(length, 5_000 + total * INTERVAL_US);
    }
    assert_eq!(samples, total);

    let firefox: Value = serde_json::from_str(&text("app.firefox.json")).unwrap();
    let threads = firefox["threads"].as_array().unwrap().iter();
    let weights = threads.flat_map(|thread| thread["samples"]["weight"].as_array().unwrap());
    assert_eq!(weights.map(|weight| weight.as_u64().unwrap()).sum::<u64>(), total);
    assert!(text("app.svg").contains("124 samples in 1.5 s"));
    assert!(text("app.html").contains("124 samples in 1.5 s"));

    let bytes = std::fs::read(export(&input, dir.path().join("app.prof"), false)).unwrap();
    let words: Vec<u64> = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    assert_eq!(words[..5], [0, 3, 0, INTERVAL_US, 0]);
    let (mut rest, mut counted, mut stacks) = (&words[5..], 0, std::collections::HashSet::new());
    while rest[..3] != [0, 1, 0] {
        let (count, depth) = (rest[0], usize::try_from(rest[1]).unwrap());
        let stack = &rest[2..2 + depth];
        assert!(count > 0 && !stack.is_empty() && stack.iter().all(|&address| address != 0));
        assert!(stacks.insert(stack.to_vec()), "equal stacks are one record");
        counted += count;
        rest = &rest[2 + depth..];
    }
    assert_eq!(counted, total);
}
