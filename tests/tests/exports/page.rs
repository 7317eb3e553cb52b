//! The HTML report in headless Chromium: `page.mjs` drives it, and what it must have shown is checked here.

use crate::profile::{Stacks, USUAL, WAITING, export, write};
use crate::report::json;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon::cli::args::{self, Verb};
use tachyon::cli::export::Output;
use tachyon::cli::source::Files;
use tachyon::profile::{Frame, Merge, Process, Profile, Sample, Thread, ThreadId};
use tachyon::report::Report;
use tachyon::sinks::export::ExportOptions;
use tachyon::sinks::tach::TachOptions;
use tachyon::sinks::{Format, Sink, TachSink};
use tachyon_tests::viewers::{run, tools};

/// Names that try to be markup or code.
const HOSTILE: Stacks<'static> = &[
    (0, &["</script><script>hacked=1</script>:1", "<img src=x onerror=hacked=1>:2", "\"'&amp;<!--:3"], 5),
    (0, &["a\u{1b}[31m\u{202e}\n\u{0}b:4", "javascript\u{2028}x:5", "lib</script>.so!<b>@@data@@"], 3),
    (0, &["${hacked=1}`:6", "__proto__:7", "constructor:8"], 2),
];

/// Self and total by function and kind, of the text report or the page.
pub type Rows = BTreeMap<(String, bool), (u64, u64)>;

pub fn of_report(words: &[&str]) -> Rows {
    let (report, _) = json(words);
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| {
        let key = (row["function"].as_str().unwrap().to_owned(), row["kind"] == "native");
        (key, (row["self"].as_u64().unwrap(), row["total"].as_u64().unwrap()))
    })
    .collect()
}

pub fn of_page(rows: &Value) -> Rows {
    let name = |row: &Value| {
        let label = row["name"].as_str().unwrap();
        // Its place follows.
        label.rsplit_once(" (").map_or(label, |(name, _)| name).to_owned()
    };
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| {
        let number = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("{key}: {row}"));
        ((name(row), row["kind"] == "1"), (number("own"), number("total")))
    })
    .collect()
}

fn edges(rows: &Value) -> Vec<(String, u64)> {
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| (row["name"].as_str().unwrap().to_owned(), row["samples"].as_u64().unwrap())).collect()
}

#[test]
fn the_page_shows_what_the_report_says_and_obeys_no_name() {
    let Some(tools) = tools() else { return };
    let dir = tempfile::tempdir().unwrap();
    let [usual, hostile, waiting] =
        ["usual", "hostile", "waiting"].map(|name| dir.path().join(name).with_extension("tach"));
    write(USUAL, &usual);
    write(HOSTILE, &hostile);
    write(WAITING, &waiting);
    let pages = [&usual, &hostile, &waiting].map(|file| export(file, file.with_extension("html"), false));
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/page.mjs");
    let shots = std::env::var_os("TACHYON_SCREENSHOTS").map_or_else(|| dir.path().to_owned(), PathBuf::from);
    let text = run(Command::new("node").arg(script).arg(tools).args(pages).arg(shots));
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["errors"], json!([]), "{found}");
    assert_eq!(found["requests"], json!([]), "nothing leaves the page");

    // The same numbers as the text report's.
    let file = usual.to_str().unwrap();
    assert_eq!(of_page(&found["native"]), of_report(&["report", file, "--native"]));
    assert_eq!(of_page(&found["folded"]), of_report(&["report", file]));
    assert_eq!(found["without"], found["folded"], "native code in the graph or not, Python's rows are the same");
    let sums = |rows: Rows| rows.into_values().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
    let odd = of_report(&["report", hostile.to_str().unwrap(), "--native"]);
    assert_eq!(sums(of_page(&found["hostile"])), sums(odd));
    assert_eq!(found["caption"], "124 samples in 1.5 s at 100 Hz, 0 lost (0.0 %)");
    assert_eq!(
        found["answer"],
        "86 % of the CPU time is in leaf app.py:10then fact 7.3 %, middle 4.0 %, <module> 2.4 %\
         124 samples, 1.2 s of CPU time in 1.5 sGIL held 65 % of the time on a CPU"
    );
    let plain = found["plain"].as_str().unwrap();
    assert!(
        plain.contains("86 % of the CPU time is in leaf app.py:10") && plain.contains("7.3 %fact app.py:52"),
        "{plain}"
    );
    let markdown = found["markdown"].as_str().unwrap();
    for line in ["**86 %** of the CPU time is in `leaf`.", "| 86.3 % | 86.3 % | `leaf` | `app.py:10` |"] {
        assert!(markdown.lines().any(|found| found == line), "{markdown}");
    }

    // A function's neighbours and lines.
    assert_eq!(
        edges(&found["callers"]),
        [("middle (app.py)".into(), 82), ("Worker.run.<locals>.inner (app.py)".into(), 25)]
    );
    assert_eq!(edges(&found["callees"]), [("deflate (libz.so.1)".into(), 7)]);
    assert_eq!(found["lines"], json!([[92, 92, "10"], [15, 15, "11"]]));

    // Search, and filters that all views follow.
    assert_eq!(found["matched"], "matched 86.3 %");
    assert_eq!(of_page(&found["searched"]).into_keys().collect::<Vec<_>>(), [("leaf".to_owned(), false)]);
    let worker = of_page(&found["worker"]);
    assert_eq!((worker[&("leaf".to_owned(), false)], worker[&("fact".to_owned(), false)]), ((25, 25), (9, 9)));
    assert_eq!(found["worker_status"], "all: 34 samples, 100.0 %");
    assert_eq!(of_page(&found["module"])[&("leaf".to_owned(), false)], (7, 7), "only samples with libz in them");
    assert_eq!(
        (&found["quarter"], &found["quarter_status"]),
        (&json!("25 samples"), &json!("all: 25 samples, 100.0 %"))
    );
    let [from, to] = ["from", "to"].map(|key| found["dragged"][key].as_str().unwrap().parse::<f64>().unwrap());
    let inside =
        (0..124).map(|number| 0.005 + 0.01 * f64::from(number)).filter(|time| (from..to).contains(time)).count();
    assert!(0 < inside && inside < 124, "{from} to {to}");
    assert_eq!(found["dragged"]["answer"], format!("{inside} samples"));

    the_page_tells_waits_and_tasks(&found["waits"], waiting.to_str().unwrap());
    let stops: Vec<&str> = found["stops"].as_array().unwrap().iter().map(|stop| stop.as_str().unwrap()).collect();
    assert!(
        stops.contains(&"share") && stops.contains(&"boxes") && stops.last() == Some(&"leaf (app.py)"),
        "{stops:?}"
    );
    assert_eq!((&found["opened"], &found["closed"]), (&json!("leaf"), &json!(0)));

    // By keyboard: into the stack, zoomed, and a link to there.
    assert_eq!(found["walked"], "middle (app.py): 87 samples, 70.2 %; self 5, 4.0 % · /srv/app.py");
    let link = found["link"].as_str().unwrap();
    assert!(link.contains("zoom=") && link.contains("function=") && link.contains("view=flame"), "{link}");
    assert_eq!(found["linked"], found["zoomed"], "the link leads to the same drawing");
    assert_ne!(found["zoomed"], found["unzoomed"]);
    assert_eq!(found["themes"], json!(["dark", "light"]));
    assert_eq!(found["inverted"], "leaf (app.py): 100 samples, 80.6 % · /srv/app.py");

    // Names are text, whatever they contain; and the page may not do what a name could try.
    assert_eq!(found["hacked"], json!(null));
    assert_eq!(found["elements"], json!(["SCRIPT"]), "no element but the page's own script");
    let names: Vec<&str> =
        found["hostile"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect();
    for name in [
        "<img src=x onerror=hacked=1> (app.py)",
        "a\\x1b[31m\\u{202e}\\n\\x00b (app.py)",
        "<b>@@data@@ (lib</script>.so)",
    ] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    assert_eq!(
        found["forbidden"],
        json!(["img-src", "require-trusted-types-for", "connect-src", "require-trusted-types-for"])
    );
}

/// Waits are charged to the line that waits, and listed by cause; a task's samples are those with its frame.
fn the_page_tells_waits_and_tasks(found: &Value, file: &str) {
    let rows = of_page(&found["rows"]);
    assert_eq!(rows, of_report(&["report", file]));
    assert_eq!(rows[&("Worker.run".to_owned(), false)], (11, 11));
    assert!(!rows.keys().any(|(name, _)| name.starts_with('<') && name != "<module>"), "{rows:?}");
    let answer = found["answer"].as_str().unwrap();
    assert!(answer.contains("47 % waiting: 22 % for a socket, 13 % for a lock and 11 % for the GIL"), "{answer}");
    let legend: Vec<&String> = found["legend"].as_object().unwrap().keys().collect();
    assert_eq!(legend, ["GIL 11.1 %", "lock 13.3 %", "socket 22.2 %", "with the GIL 33.3 %", "without it 20.0 %"]);
    assert_eq!(of_page(&found["lock"]), BTreeMap::from([(("Worker.run".to_owned(), false), (6, 6))]));
    assert_eq!(found["tasks"], json!([["fetch-a", 20, 20], ["fetch-b", 10, 10], ["server", 4, 34]]));
    assert_eq!(found["lanes"], json!(["app (77)", "app (tid 77)", "worker (tid 78)"]));
    assert_eq!(found["drawn"], json!([true, true, true]));
    let fetch = of_page(&found["fetch"]);
    assert_eq!(fetch[&("crunch".to_owned(), false)], (20, 20));
    assert_eq!(fetch[&("fetch".to_owned(), false)], (0, 20), "fetch-b is another task");
    assert_eq!(found["linked"], found["fetch"], "the link leads to the task");
}

/// What a source file may contain.
const SOURCE: &str = "import os\n\n@cached\ndef hot(x):\n    return é(x) + \"</script><script>hacked=1</script><img src=x onerror=hacked=1>\" + \"\u{1b}[31m\u{202e}\"\n\ndef other():\n    pass\n";
const HOT: &str =
    "    return é(x) + \"</script><script>hacked=1</script><img src=x onerror=hacked=1>\" + \"\\u{1b}[31m\\u{202e}\"";

/// A function, its line, and its columns (none: not known).
type Place<'a> = (&'a str, i32, Option<(i32, i32)>);

/// Writes a TACH file whose `samples` are innermost functions of one file, each called by `<module>`.
fn write_places<'a>(path: &Path, file: &str, samples: impl Iterator<Item = Place<'a>>) {
    let mut profile = Profile::default();
    profile.meta.start_us = 1_000_000;
    profile.meta.interval_us = 10_000;
    profile.processes.push(Process { pid: 77, comm: "app".into(), ..Process::default() });
    profile.threads.push(Thread { tid: 77, ns_tid: 77, unique_tid: 77, name: "app".into(), ..Thread::default() });
    let out = fs::File::create(path).unwrap();
    let mut sink = TachSink::new(out, &profile.meta, TachOptions::default()).unwrap();
    let (mut time_us, mut stored) = (1_005_000, 0);
    let filename = profile.strings.intern(file);
    for (name, lineno, columns) in samples {
        let mut frame = |name: &str, lineno, (column, end_column)| {
            let function = profile.strings.intern(name);
            let frame = Frame::without_location(filename, function);
            profile.frames.intern(Frame { lineno, end_lineno: lineno, column, end_column, ..frame })
        };
        let frames = [frame(name, lineno, columns.unwrap_or((-1, -1))), frame("<module>", 1, (-1, -1))];
        let sample =
            Sample { thread: ThreadId(0), time_us, status: 3, frames: &frames, merge: Merge::None, work: None };
        sink.sample(&profile, &sample).unwrap();
        time_us += 10_000;
        stored += 1;
    }
    let seconds = f64::from(stored) / 100.0;
    let stored = u64::from(stored as u32);
    sink.finish(&profile, &Report { stored, duration_s: seconds, rate_hz: 100.0, ..Report::default() }).unwrap();
}

/// Before, after and change of a function, as the page writes them.
fn changes_of(said: &Value, name: &str) -> [String; 3] {
    let change = said["changes"].as_array().unwrap().iter().find(|change| change["function"] == name).unwrap();
    let [before, after] = ["before", "after"].map(|key| change[key].as_f64().unwrap() * 100.0);
    let sign = if after < before { "−" } else { "+" };
    [format!("{before:.2} %"), format!("{after:.2} %"), format!("{sign}{:.2}", (after - before).abs())]
}

#[test]
fn the_page_shows_source_text_and_differences_and_obeys_neither() {
    let Some(tools) = tools() else { return };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::write(at("app.py"), SOURCE).unwrap();
    let samples = (0..44).map(|number| match number % 11 {
        0..3 => ("hot", 5, None),
        3..5 => ("hot", 5, Some((11, 81))),
        _ => ("hot", 5, Some((11, 16))),
    });
    write_places(&at("usual.tach"), at("app.py").to_str().unwrap(), samples);
    let page = |name: &str, source| {
        let (mut out, options) = (Vec::new(), ExportOptions { source, ..ExportOptions::default() });
        tachyon::cli::export::run(&at("usual.tach"), Output::Stream(&mut out), Format::Report, options).unwrap();
        fs::write(at(name), out).unwrap();
    };
    page("with.html", Some(Files::of_this_machine()));
    page("without.html", None);

    // One function grows from a tenth to three of them, one does not change.
    let hostile = "</script><img src=x onerror=hacked=1>\u{1b}";
    for (name, tenths) in [("before", 1), ("after", 3)] {
        let place = |number: u32| match number % 10 {
            digit if digit < tenths => (hostile, 7, None),
            9 => ("same", 8, None),
            _ => ("rest", 9, None),
        };
        // In another order in each second, as no program is alike in all of them. Of 3990 no part ends in half a hundredth of
        // a percent, which is rounded up or down.
        let samples = (0..3990).map(|number| place(number * 7 + number / 100 * 3 + u32::from(number % 97 == 0)));
        write_places(&at(name).with_extension("tach"), "/srv/app.py", samples);
    }
    let (before, after, difference) = (at("before.tach"), at("after.tach"), at("diff.html"));
    let files = [&before, &after].map(|path| path.to_str().unwrap().to_owned());
    let words = ["tachyon-bpf", "diff", &files[0], &files[1], "-o", difference.to_str().unwrap()];
    let Ok(Verb::Diff(parsed)) = args::parse(words.map(std::ffi::OsString::from)) else { panic!("it is a diff") };
    assert_eq!(tachyon::cli::diff::run(&parsed, &mut Vec::new()).unwrap(), 0);

    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/page_source.mjs");
    let shots = std::env::var_os("TACHYON_SCREENSHOTS").map_or_else(|| dir.path().to_owned(), PathBuf::from);
    let pages = ["with.html", "without.html", "diff.html"].map(at);
    let text = run(Command::new("node").arg(script).arg(tools).args(pages).arg(shots));
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["errors"], json!([]), "{found}");
    assert_eq!(found["hacked"], json!([null, null]));
    assert_eq!(found["elements"], json!([["SCRIPT"], ["SCRIPT"]]), "no element but the page's own script");

    // The function with its decorator and without its neighbours, hot where it was.
    let lines = json!([[3, 0, 0, "@cached"], [4, 0, 0, "def hot(x):"], [5, 44, 44, HOT]]);
    assert_eq!(found["source"], lines);
    let (inner, rest) = ("é(x)", " + \"</script><script>hacked=1</script><img src=x onerror=hacked=1");
    assert_eq!(found["marks"], json!([[inner, 24, 24], [rest, 8, 8]]));
    assert_eq!(found["filtered"][2][1], 10, "heat follows the time line");
    assert_eq!((&found["files"], &found["whole"]), (&json!(["app.py"]), &json!([1, 5])));
    assert!(found["no_source"].as_str().unwrap().contains("--source"), "{}", found["no_source"]);
    assert!(!fs::read_to_string(at("without.html")).unwrap().contains("cached"));

    // The table says what the JSON says.
    let (said, _) = json(&["diff", &files[0], &files[1]]);
    let rows: Vec<Value> = said["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| {
            let percent = |key: &str| format!("{:.2} %", change[key].as_f64().unwrap() * 100.0);
            let name = change["function"].as_str().unwrap().replace('\u{1b}', "\\u{1b}");
            json!([name, percent("before"), percent("after"), change["significant"].to_string()])
        })
        .collect();
    assert_eq!(found["changes"], Value::from(rows));
    assert_eq!(found["searched"], json!(["same"]));
    let same = changes_of(&said, "same");
    assert_eq!(found["callers"], json!([[same[2], same[0], same[1], "<module> (app.py)"]]));
    let callees: Vec<_> = ["rest", &hostile.replace('\u{1b}', "\\x1b"), "same"]
        .map(|name| format!("{name} (app.py)"))
        .into_iter()
        .collect();
    let named: Vec<_> =
        found["callees"].as_array().unwrap().iter().map(|row| row[3].as_str().unwrap().to_owned()).collect();
    assert_eq!(named.iter().collect::<std::collections::BTreeSet<_>>(), callees.iter().collect());
    assert!(found["verdict"].as_str().unwrap().contains("significant change"), "{}", found["verdict"]);
    let status = found["status"].as_str().unwrap();
    assert!(status.contains("before 1") && status.contains("points"), "{status}");
    assert_eq!(found["colours"], json!([true, true]), "something is red and something is blue");
}
