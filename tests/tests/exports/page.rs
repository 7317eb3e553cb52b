//! The HTML report in headless Chromium: `page.mjs` drives it, here is what it must have shown.

use crate::profile::{Stacks, USUAL, export, write};
use crate::report::json;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tachyon_tests::viewers::{run, tools};

/// Names that try to be more than names.
const HOSTILE: Stacks<'static> = &[
    (0, &["</script><script>hacked=1</script>:1", "<img src=x onerror=hacked=1>:2", "\"'&amp;<!--:3"], 5),
    (0, &["a\u{1b}[31m\u{202e}\n\u{0}b:4", "javascript\u{2028}x:5", "lib</script>.so!<b>@@data@@"], 3),
    (0, &["${hacked=1}`:6", "__proto__:7", "constructor:8"], 2),
];

/// Self and total by function and kind, of the text report or the page.
type Rows = BTreeMap<(String, bool), (u64, u64)>;

fn of_report(words: &[&str]) -> Rows {
    let (report, _) = json(words);
    let rows = report["rows"].as_array().unwrap().iter();
    rows.map(|row| {
        let key = (row["function"].as_str().unwrap().to_owned(), row["kind"] == "native");
        (key, (row["self"].as_u64().unwrap(), row["total"].as_u64().unwrap()))
    })
    .collect()
}

fn of_page(rows: &Value) -> Rows {
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
    let (usual, hostile) = (dir.path().join("usual.tach"), dir.path().join("hostile.tach"));
    write(USUAL, &usual);
    write(HOSTILE, &hostile);
    let pages = [&usual, &hostile].map(|file| export(file, file.with_extension("html"), false));
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
    let sums = |rows: Rows| rows.into_values().fold((0, 0), |sum, row| (sum.0 + row.0, sum.1 + row.1));
    let odd = of_report(&["report", hostile.to_str().unwrap(), "--native"]);
    assert_eq!(sums(of_page(&found["hostile"])), sums(odd));
    assert_eq!(found["caption"], "124 samples in 1.5 s at 100 Hz, 0 lost (0.0 %)");
    assert_eq!(
        found["answer"],
        "124 samples, 1.2 s of threads' time. Most in leaf (app.py) 86.3 %, fact (app.py) 7.3 %, middle (app.py) 4.0 %, <module> (app.py) 2.4 %."
    );

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
        (&json!("25 samples chosen"), &json!("all: 25 samples, 100.0 %"))
    );
    let [from, to] = ["from", "to"].map(|key| found["dragged"][key].as_str().unwrap().parse::<f64>().unwrap());
    let inside =
        (0..124).map(|number| 0.005 + 0.01 * f64::from(number)).filter(|time| (from..to).contains(time)).count();
    assert!(0 < inside && inside < 124, "{from} to {to}");
    assert_eq!(found["dragged"]["answer"], format!("{inside} samples chosen"));

    // By keyboard: into the stack, zoomed, and a link to there.
    assert_eq!(found["walked"], "middle (app.py): 87 samples, 70.2 %; self 5, 4.0 % · /srv/app.py");
    let link = found["link"].as_str().unwrap();
    assert!(link.contains("zoom=") && link.contains("function=") && link.contains("view=flame"), "{link}");
    assert_eq!(found["linked"], found["zoomed"], "the link leads to the same drawing");
    assert_ne!(found["zoomed"], found["unzoomed"]);
    assert_eq!(found["themes"], json!(["dark", "light"]));
    assert_eq!(found["inverted"], "leaf (app.py): 100 samples, 80.6 % · /srv/app.py");

    // Names are text, whatever is in them; and what a name could do is forbidden to the page.
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
