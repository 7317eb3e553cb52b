//! A large HTML report in headless Chromium: it shows what the text report says, and what it looks at for a filter does not grow with
//! what the filter leaves out. How long that takes is for `cargo xtask page bench`.

#[path = "../../../tachyon/benches/page/service.rs"]
mod service;

use crate::page::{of_page, of_report};
use crate::profile::export;
use crate::report::json;
use serde_json::{Value, json};
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;
use std::process::Command;
use tachyon_tests::viewers::{run, tools};

const SAMPLES: u64 = 60_000;
const STACKS: usize = 6_000;
const THREADS: u64 = 24;
/// The made-up service has eight samples in each interval of 10 ms.
const SAMPLES_A_SECOND: u64 = 800;

fn marks(look: &Value, name: &str) -> Vec<u64> {
    look[name].as_array().unwrap().iter().map(|mark| mark.as_u64().unwrap()).collect()
}

fn samples(look: &Value) -> u64 {
    let status = look["status"].as_str().unwrap();
    let (_, rest) = status.split_once(": ").unwrap_or_else(|| panic!("{status}"));
    rest.split_once(' ').and_then(|(count, _)| count.parse().ok()).unwrap_or_else(|| panic!("{status}"))
}

#[test]
fn a_large_page_is_right_and_looks_at_no_more_than_it_shows() {
    let Some(tools) = tools() else { return };
    let dir = tempfile::tempdir().unwrap();
    let tach = dir.path().join("large.tach");
    service::write(BufWriter::new(File::create(&tach).unwrap()), SAMPLES as usize, STACKS).unwrap();
    let page = export(&tach, dir.path().join("large.html"), false);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/exports/page_large.mjs");
    let found: Value = serde_json::from_str(&run(Command::new("node").arg(script).arg(tools).arg(page))).unwrap();
    assert_eq!(found["errors"], json!([]));

    // When opened, everything is summed up once, and laid out once the graph's width is known.
    let file = tach.to_str().unwrap();
    let (opened, expected) = (&found["opened"], of_report(&["report", file]));
    assert_eq!(samples(opened), SAMPLES);
    let rows = of_page(&opened["rows"]);
    assert_eq!(rows.len(), 60, "the table begins with so many");
    for (name, costs) in &rows {
        assert_eq!(expected.get(name), Some(costs), "{name:?}");
    }
    let [all] = marks(opened, "sums")[..] else { panic!("{opened}") };
    assert!((SAMPLES / 2..=SAMPLES).contains(&all), "{all} entries");
    let boxes = marks(opened, "boxes");
    assert!(boxes.len() <= 2, "{boxes:?}");
    // Boxes narrower than half a pixel are not made, in any of at most 61 rows.
    assert!(boxes.iter().all(|boxes| (1..2 * 1400 * 61).contains(boxes)), "{boxes:?}");

    // A search looks at no sample, and lays nothing out.
    let searched = &found["searched"];
    assert_eq!((marks(searched, "sums").len(), marks(searched, "boxes").len()), (0, 0));
    let (matching, _) = json(&["report", file, "--focus", "method_12"]);
    let share = matching["samples"].as_f64().unwrap() * 100.0 / SAMPLES as f64;
    assert_eq!(searched["matched"], format!("matched {share:.1} %"));
    assert!(of_page(&searched["rows"]).keys().all(|(name, _)| name.contains("method_12")), "{searched}");

    // A thread, a range: what is left out is not looked at.
    let thread = &found["thread"];
    assert!(SAMPLES / THREADS * 9 / 10 < samples(thread) && samples(thread) < SAMPLES / THREADS * 11 / 10, "{thread}");
    let [entries] = marks(thread, "sums")[..] else { panic!("{thread}") };
    assert!(entries <= samples(thread), "{entries} entries");
    let range = &found["range"];
    assert_eq!(samples(range), 30 * SAMPLES_A_SECOND);
    let [entries] = marks(range, "sums")[..] else { panic!("{range}") };
    assert!(entries <= samples(range), "{entries} entries");

    // Nor does the pointer cost anything, and a click only another layout.
    let (pointed, zoomed) = (&found["pointed"], &found["zoomed"]);
    assert_eq!((marks(pointed, "sums").len(), marks(pointed, "boxes").len()), (0, 0));
    assert_eq!((marks(zoomed, "sums").len(), marks(zoomed, "boxes").len() <= 2), (0, true), "{zoomed}");
    assert!(found["painted"].as_f64().unwrap() > 0.02, "the graph has boxes");
}
