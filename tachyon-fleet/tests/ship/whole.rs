//! Everything arrives, as it was, once where that can be had.

use crate::servers::{Server, python};
use crate::support::{START, succeeds, word};
use crate::{Host, content, expected, not_run::not_run, received, text};
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const NEEDS: &str = "Python with opentelemetry-proto and grpcio, which `cargo xtask test` fetches";

#[test]
fn a_store_gets_what_convert_makes_and_a_second_run_nothing() {
    let host = Host::new();
    host.segments(0..3);
    host.configure(&format!(
        "[[store]]\nurl = \"file://{}\"\nformats = [\"parquet\", \"tach\"]\n",
        host.path("lake").display()
    ));
    let output = host.once();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).ends_with(": 3 segments with 198 samples\n"), "{}", text(&output.stdout));
    succeeds(&["convert", word(&host.path("spool")), "-o", word(&host.path("tables"))]);
    let mut shipped = host.content("lake");
    for (path, bytes) in host.content("spool") {
        let name = path.to_str().unwrap();
        let whole = format!("segments/date=2026-11-22/hour=19/{name}");
        assert_eq!(shipped.remove(std::path::Path::new(&whole)), Some(bytes), "{whole}");
    }
    assert_eq!(shipped, host.content("tables"));
    fs::remove_dir_all(host.path("lake")).unwrap();
    let output = host.once();
    assert!(output.status.success() && text(&output.stdout).ends_with(": 0 segments with 0 samples\n"));
    assert!(host.content("lake").is_empty(), "what has arrived is not sent again");
}

#[test]
fn an_hour_is_one_file_of_each_table_where_that_is_wanted() {
    let host = Host::new();
    host.segments(0..7);
    // Finished a minute after the other; the last one in the next hour, and so the first six are complete.
    for sequence in 0..7 {
        let file = fs::File::open(host.path("spool").join(crate::segment(sequence).name() + ".tach")).unwrap();
        let minute = if sequence == 6 { 70 } else { sequence };
        file.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(1_900_000_800 / 3600 * 3600 + 60 * minute))
            .unwrap();
    }
    host.configure(&format!("[[store]]\nurl = \"{}\"\nbatch = \"1h\"\n", host.path("lake").display()));
    let output = host.once();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains(": 6 segments with 396 samples; 1 segments wait for their batch"),
        "{}",
        text(&output.stdout)
    );
    // Two services, three tables; and losses.
    assert_eq!(host.content("lake").len(), 7);
    succeeds(&["convert", word(&host.path("lake")), "-o", word(&host.path("all.tach"))]);
    let answer: serde_json::Value =
        serde_json::from_str(&succeeds(&["top", word(&host.path("lake")), "--losses", "--json"])).unwrap();
    assert_eq!(answer["rows"], json!([{"host": "h1", "stored": 396, "lost": 18, "lost_ppm": 43_478, "recovered": 0}]));
}

#[test]
fn a_batch_that_was_left_in_the_middle_is_there_once_though_the_spool_lost_its_first_segment() {
    let host = Host::new();
    host.segments(0..6);
    let path = |sequence: u64| host.path("spool").join(crate::segment(sequence).name() + ".tach");
    for sequence in 0..6 {
        let time = std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000 / 3600 * 3600 + 60 * sequence);
        fs::File::open(path(sequence)).unwrap().set_modified(time).unwrap();
    }
    host.configure(&format!("[[store]]\nurl = \"{}\"\nbatch = \"1h\"\n", host.path("lake").display()));
    // Some objects can be written, and others not.
    fs::create_dir(host.path("lake")).unwrap();
    fs::write(host.path("lake/stacks"), "").unwrap();
    let output = host.once();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let before = host.content("lake").len();
    assert!(before > 1, "{:?}", host.content("lake"));
    fs::remove_file(host.path("lake/stacks")).unwrap();
    // The spool has bounds.
    fs::remove_file(path(0)).unwrap();
    let output = host.once();
    assert!(text(&output.stdout).contains(": 5 segments with 330 samples"), "{}", text(&output.stdout));
    let names: std::collections::BTreeSet<_> =
        host.content("lake").keys().map(|path| path.file_name().unwrap().to_owned()).collect();
    assert_eq!(names.into_iter().collect::<Vec<_>>(), ["h1-20261122T190113Z-000000.parquet"]);
    let stored = || {
        let told = succeeds(&["top", word(&host.path("lake")), "--losses", "--json"]);
        serde_json::from_str::<serde_json::Value>(&told).unwrap()["rows"][0]["stored"].clone()
    };
    assert_eq!(stored(), json!(330));
    // What comes late replaces nothing.
    host.segments(6..7);
    let late = std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000 / 3600 * 3600 + 600);
    fs::File::open(path(6)).unwrap().set_modified(late).unwrap();
    assert!(host.once().status.success());
    assert_eq!(stored(), json!(396));
}

#[test]
fn each_stack_and_count_arrives_over_grpc_and_http() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..4);
    let server = Server::start("otlp.py", host.dir.path(), &[]);
    for (protocol, number) in [("grpc", 0), ("http", 4)] {
        host.configure(&format!(
            "[[otlp]]\nendpoint = \"{}\"\nprotocol = \"{protocol}\"\nmax_message = \"64KiB\"\n",
            server.url(protocol)
        ));
        let output = host.once();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let (counts, again) = received(&server.came()[number..]);
        assert_eq!((counts, again), (expected(&host.path("spool")), 0), "{protocol}");
    }
    let sample = server.came()[0]["samples"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["resource"]["service.name"] == "web")
        .cloned();
    let resource = &sample.unwrap()["resource"];
    for (key, value) in [
        ("host.name", json!("h1")),
        ("service.version", json!("1")),
        ("process.pid", json!(100)),
        ("process.runtime.name", json!("cpython")),
        ("team", json!("a")),
    ] {
        assert_eq!(resource[key], value, "{key}");
    }
}

#[test]
fn pyroscope_gets_profiles_that_it_takes_and_others_have_a_name() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..3);
    let server = Server::start("pyroscope.py", host.dir.path(), &[]);
    // Two of three are younger than an hour, by the clock of the test; the shipper's own says that all are too old.
    server.control(json!({ "now": START + 3600.0 + 59.0 }));
    host.configure(&format!("[[pyroscope]]\nurl = \"{}\"\nmax_age = \"1000000h\"\n", server.url("http")));
    let output = host.once();
    // What the server refuses is told, and not tried again.
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(
        text(&output.stdout).contains("65 samples not taken: rejected")
            || text(&output.stdout).contains("not taken: rejected"),
        "{}",
        text(&output.stdout)
    );
    assert!(text(&output.stderr).contains("is outside of ingestion window"), "{}", text(&output.stderr));
    assert!(host.once().status.success(), "it is done");
    let mut seen: BTreeMap<(String, String), i64> = BTreeMap::new();
    for message in server.came() {
        for profile in message["profiles"].as_array().into_iter().flatten() {
            let labels = &profile["labels"];
            assert_eq!(labels["host"], "h1");
            let key =
                (labels["service_name"].as_str().unwrap().to_owned(), labels["__name__"].as_str().unwrap().to_owned());
            for sample in profile["samples"].as_array().unwrap() {
                *seen.entry(key.clone()).or_default() +=
                    sample["values"].as_array().unwrap().last().unwrap().as_i64().unwrap();
            }
        }
    }
    let ns = 10_000_000;
    let expected = [("web", "process_cpu", 2 * 53), ("web", "wall", 2 * 60), ("my shop", "process_cpu", 2 * 6)];
    let expected: BTreeMap<_, _> = expected
        .into_iter()
        .map(|(service, name, samples)| ((service.to_owned(), name.to_owned()), samples * ns))
        .collect();
    assert_eq!(seen, expected);

    // By its own clock all are too old, and nothing is sent.
    let old = Host::new();
    old.segments(0..2);
    old.configure(&format!("[[pyroscope]]\nurl = \"{}\"\n", server.url("http")));
    let before = server.came().len();
    let output = old.once();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("132 samples not taken: too_old"), "{}", text(&output.stdout));
    assert_eq!(server.came().len(), before);
}

#[test]
fn killed_at_any_moment_it_goes_on_where_it_was() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..30);
    let server = Server::start("otlp.py", host.dir.path(), &[]);
    server.control(json!({ "delay": 0.02 }));
    host.configure(&format!(
        "[[otlp]]\nendpoint = \"{}\"\n[[store]]\nurl = \"{}\"\n",
        server.url("grpc"),
        host.path("lake").display()
    ));
    let mut random = fastrand::Rng::with_seed(7);
    let mut doubts = 0;
    for _ in 0..6 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
        command.args(["ship", "--config"]).arg(host.path("fleet.toml")).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let before = server.came().len();
        let began = Instant::now();
        while server.came().len() < before + 2 && began.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(random.u64(..40)));
        child.kill().unwrap();
        child.wait().unwrap();
        // What it was sending.
        let state = content(&host.path("state"), std::path::Path::new(""));
        doubts += state.values().filter(|bytes| text(bytes).contains("\"doubtful\":true")).count();
    }
    let output = host.once();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let (counts, again) = received(&server.came());
    assert_eq!(counts, expected(&host.path("spool")));
    // A segment is one message here: web's samples, cpu, off_cpu; the shop's samples and cpu.
    assert!(again <= 5 * doubts as u64, "{again} profiles came twice, {doubts} pushes were in doubt");
    succeeds(&["convert", word(&host.path("spool")), "-o", word(&host.path("tables"))]);
    let (lake, tables) = (host.content("lake"), host.content("tables"));
    assert!(
        lake.keys().eq(tables.keys()),
        "{:?}",
        lake.keys().filter(|path| !tables.contains_key(*path)).collect::<Vec<_>>()
    );
    assert!(lake == tables, "each object once, whole");
}
