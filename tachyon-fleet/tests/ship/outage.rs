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
use tachyon_fleet::ship::shipper::Worker;
use tachyon_fleet::ship::{Shared, backend, shared, take};
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
    let outage_s = runtime.block_on(async {
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
        let errors = || value(&shared, "tachyon_ship_errors_total{backend=\"o\",reason=\"unreachable\"}");
        let mut noticed_unix = None;
        // Six hours pass, and segments come.
        for half in 2..=13 {
            let hours = f64::from(half) / 2.0;
            while clock.unix() < START + hours * 3600.0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            write_until(hours);
            if noticed_unix.is_none() {
                until("a failure", || errors() > 0.0).await;
                noticed_unix = Some(clock.unix());
            }
        }
        let all = write_until(6.5);
        assert_eq!(all, 79);
        until("all in the store", || {
            value(&shared, "tachyon_ship_shipped_segments_total{backend=\"s\"}") == all as f64
        })
        .await;
        assert_eq!(value(&shared, "tachyon_ship_shipped_segments_total{backend=\"o\"}"), first as f64, "it is down");
        until("more tries", || errors() > 3.0).await;
        assert_eq!(value(&shared, "tachyon_ship_up{backend=\"o\"}"), 0.0);
        // The servers come back.
        let outage_s = clock.unix() - noticed_unix.unwrap();
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
        outage_s
    });
    let (counts, again) = received(&otlp.came());
    assert_eq!(counts, expected(&host.path("spool")));
    let doubts = value(&shared, "tachyon_ship_doubts_total{backend=\"o\"}");
    assert!(again == 0 || doubts > 0.0, "{again} came twice, {doubts} doubts");
    // Each sample of Pyroscope is there or has a name, however fast this machine is: here an hour is two seconds, and what is young enough when it is
    // sent may be too old when it is there.
    let of_p = |line: &str| value(&shared, &format!("tachyon_ship_{line}"));
    let shipped = of_p("shipped_samples_total{backend=\"p\"}");
    let refused = of_p("refused_samples_total{backend=\"p\",reason=\"too_old\"}");
    let by_server = of_p("refused_samples_total{backend=\"p\",reason=\"rejected\"}");
    let mut seen = std::collections::BTreeSet::new();
    let cpu: i64 = pyroscope
        .came()
        .iter()
        .flat_map(|message| message["profiles"].as_array().cloned().unwrap_or_default())
        .filter(|profile| profile["labels"]["__name__"] == "process_cpu" && seen.insert(profile["id"].to_string()))
        .flat_map(|profile| profile["samples"].as_array().cloned().unwrap())
        .map(|sample| sample["values"][0].as_i64().unwrap())
        .sum();
    assert_eq!(shipped + refused + by_server, 79.0 * 66.0, "{shipped} there, {refused} too old, {by_server} refused");
    // Of a segment's 66 samples 59 were on a CPU. A push of which nobody knows whether it arrived may be there and be refused the next time.
    let doubts_p = of_p("doubts_total{backend=\"p\"}");
    let missing = shipped / 66.0 * 59.0 - cpu as f64;
    assert!(missing == 0.0 || missing < 0.0 && doubts_p > 0.0, "{cpu} of {shipped} samples");
    assert!(refused + by_server >= 60.0 * 66.0, "five of six hours are too old: {refused}, {by_server}");
    assert!(by_server < refused, "most of it does not even leave the host: {by_server} of {refused}");
    let told = told.lock().unwrap().join("\n");
    println!(
        "{refused} samples too old, {by_server} refused by the server, {cpu} on a CPU there, {doubts} doubts, {again} twice\n{told}"
    );
    assert!(
        told.contains("o: unreachable: http://127.0.0.1:") && told.contains("; segments stay in the spool"),
        "{told}"
    );
    let time = told.lines().find_map(|line| line.strip_prefix("o: works again after ")?.split_once(", "));
    let time = humantime::parse_duration(time.expect("it tells that it works again").0).unwrap();
    assert!(time.as_secs_f64() > outage_s - 1.0, "{time:?}, and not {outage_s} s: {told}");
}
