//! Six hours without a server, in a clock that runs faster: nothing is lost that the server still takes, and nobody else waits.

use crate::servers::{Server, python};
use crate::support::START;
use crate::{Host, expected, not_run::not_run, received, segment};
use serde_json::json;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tachyon_fleet::net::secret::Secrets;
use tachyon_fleet::ship::clock::Clock;
use tachyon_fleet::ship::config::Config;
use tachyon_fleet::ship::shipper::{Shared, Worker};
use tachyon_fleet::ship::{backend, shared, take};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// An hour is two seconds.
const SPEED: f64 = 1800.0;
/// A segment of five minutes: its number times that, in the support's terms of 60 s.
const EVERY: u64 = 5;

/// Waits until something holds, for a minute of real time at most.
async fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come to {what}");
}

fn value(shared: &Shared, line: &str) -> f64 {
    let text = shared.metrics_text();
    let found = text.lines().find_map(|it| it.strip_prefix(line)?.trim().parse().ok());
    found.unwrap_or(0.0)
}

#[test]
fn six_hours_without_a_server_lose_nothing_that_it_still_takes() {
    if python().is_none() {
        return not_run("Python with opentelemetry-proto and grpcio, which `cargo xtask test` fetches");
    }
    let host = Host::new();
    let mut otlp = Server::start("otlp.py", host.dir.path(), &[]);
    let mut pyroscope = Server::start("pyroscope.py", host.dir.path(), &[]);
    otlp.control(json!({}));
    let path = host.configure(&format!(
        "[[otlp]]\nname = \"o\"\nendpoint = \"{}\"\n[[pyroscope]]\nname = \"p\"\nurl = \"{}\"\n[[store]]\nname = \"s\"\nurl = \"{}\"\n",
        otlp.url("grpc"),
        pyroscope.url("http"),
        host.path("lake").display()
    ));
    let config = Config::read(&path).unwrap();
    let state = config.state();
    let _lock = take(&state).unwrap();
    let told = Arc::new(Mutex::new(Vec::new()));
    let clock = Clock::starting(START, SPEED);
    let of = Arc::clone(&told);
    let shared =
        shared(&config, &state, clock, Box::new(move |line| of.lock().unwrap().push(line.to_owned()))).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (stop, stopped) = watch::channel(false);
        let mut workers = JoinSet::new();
        for backend in backend::of_config(&config, &Secrets::default()).unwrap() {
            let worker = Worker::new(&shared, backend, false, stopped.clone()).unwrap();
            workers.spawn(worker.run(Duration::from_secs(20)));
        }
        // Half an hour of work.
        let mut written = 0;
        let spool = host.path("spool");
        let mut write_until = |hours: f64| {
            while START + (60 * EVERY * written) as f64 <= START + hours * 3600.0 {
                drop(segment(EVERY * written).write(&spool));
                written += 1;
            }
            written
        };
        let unix = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
        pyroscope.control(json!({ "now": clock.unix(), "at": unix, "speed": SPEED }));
        let first = write_until(0.5);
        until("the first half hour everywhere", || {
            ["o", "p", "s"].iter().all(|name| {
                value(&shared, &format!("tachyon_ship_shipped_segments_total{{backend=\"{name}\"}}")) == first as f64
            })
        })
        .await;
        otlp.kill();
        pyroscope.kill();
        // Six hours pass, and segments come.
        for half in 2..=13 {
            let hours = f64::from(half) / 2.0;
            while clock.unix() < START + hours * 3600.0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            write_until(hours);
        }
        let all = write_until(6.5);
        assert_eq!(all, 79);
        until("all in the store", || {
            value(&shared, "tachyon_ship_shipped_segments_total{backend=\"s\"}") == all as f64
        })
        .await;
        assert_eq!(value(&shared, "tachyon_ship_shipped_segments_total{backend=\"o\"}"), first as f64, "it is down");
        assert!(value(&shared, "tachyon_ship_errors_total{backend=\"o\",reason=\"unreachable\"}") > 3.0);
        assert_eq!(value(&shared, "tachyon_ship_up{backend=\"o\"}"), 0.0);
        // The servers come back.
        otlp.restart();
        pyroscope.restart();
        until("all at the receiver", || {
            value(&shared, "tachyon_ship_shipped_segments_total{backend=\"o\"}") == all as f64
        })
        .await;
        until("all that is not too old at Pyroscope", || {
            value(&shared, "tachyon_ship_pending_segments{backend=\"p\"}") == 0.0
                && value(&shared, "tachyon_ship_shipped_segments_total{backend=\"p\"}") == all as f64
        })
        .await;
        stop.send(true).unwrap();
        workers.join_all().await;
    });
    let (counts, again) = received(&otlp.came());
    assert_eq!(counts, expected(&host.path("spool")));
    let doubts = value(&shared, "tachyon_ship_doubts_total{backend=\"o\"}");
    assert!(again == 0 || doubts > 0.0, "{again} came twice, {doubts} doubts");
    // Each sample of Pyroscope is there or has a name.
    let refused = value(&shared, "tachyon_ship_refused_samples_total{backend=\"p\",reason=\"too_old\"}");
    let by_server = value(&shared, "tachyon_ship_refused_samples_total{backend=\"p\",reason=\"rejected\"}");
    let cpu: i64 = pyroscope
        .came()
        .iter()
        .flat_map(|message| message["profiles"].as_array().cloned().unwrap_or_default())
        .filter(|profile| profile["labels"]["__name__"] == "process_cpu")
        .flat_map(|profile| profile["samples"].as_array().cloned().unwrap())
        .map(|sample| sample["values"][0].as_i64().unwrap())
        .sum();
    let segments = 79.0 - (refused + by_server) / 66.0;
    assert!(refused >= 60.0 * 66.0, "five of six hours are too old: {refused}");
    assert!(by_server < 4.0 * 66.0, "{by_server}");
    assert!((cpu as f64 - segments * 59.0).abs() <= by_server, "{cpu} of {segments} segments");
    let told = told.lock().unwrap().join("\n");
    println!(
        "{refused} samples too old, {by_server} refused by the server, {cpu} on a CPU there, {doubts} doubts, {again} twice\n{told}"
    );
    assert!(
        told.contains("o: unreachable: http://127.0.0.1:") && told.contains("; segments stay in the spool"),
        "{told}"
    );
    assert!(told.contains("o: works again after 6h") || told.contains("o: works again after 5h"), "{told}");
}
