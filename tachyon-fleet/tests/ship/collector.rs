//! The OpenTelemetry Collector, which decodes everything and passes it on to a receiver that compares it with the segments.

use crate::servers::Server;
use crate::{Host, decoded, expected, text};
use std::fs;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

struct Collector(Child);

impl Drop for Collector {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("it did not come to {what}");
}

fn free() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn start(host: &Host, port: u16) -> Collector {
    let program = std::env::var("TACHYON_COLLECTOR").expect("TACHYON_COLLECTOR names the program");
    let mut command = Command::new(program);
    command.arg("--config").arg(host.path("collector.yaml")).arg("--feature-gates=service.profilesSupport");
    command
        .stdout(Stdio::null())
        .stderr(fs::OpenOptions::new().create(true).append(true).open(host.path("collector.log")).unwrap());
    let mut child = Collector(command.spawn().unwrap());
    until("a Collector that listens", || {
        assert!(child.0.try_wait().unwrap().is_none(), "{}", fs::read_to_string(host.path("collector.log")).unwrap());
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    });
    child
}

#[test]
#[ignore = "it takes an OpenTelemetry Collector, whose program TACHYON_COLLECTOR names (CONTRIBUTING.md)"]
fn the_collector_passes_on_what_the_segments_say_though_it_is_killed() {
    let host = Host::new();
    host.segments(0..40);
    let receiver = Server::start("otlp.py", host.dir.path(), &[]);
    let (grpc, http) = (free(), free());
    // Without a queue: it answers when the receiver has answered.
    let config = format!(
        "receivers:\n  otlp:\n    protocols:\n      grpc: {{endpoint: '127.0.0.1:{grpc}'}}\n      http: {{endpoint: '127.0.0.1:{http}'}}\nexporters:\n  otlp:\n    endpoint: '127.0.0.1:{}'\n    tls: {{insecure: true}}\n    sending_queue: {{enabled: false}}\n    retry_on_failure: {{enabled: false}}\nservice:\n  telemetry: {{metrics: {{level: none}}}}\n  pipelines:\n    profiles: {{receivers: [otlp], exporters: [otlp]}}\n",
        receiver.port("grpc")
    );
    fs::write(host.path("collector.yaml"), config).unwrap();
    for (protocol, port) in [("grpc", grpc), ("http", http)] {
        let before = receiver.came().len();
        let mut collector = Some(start(&host, port));
        host.configure(&format!("[[otlp]]\nendpoint = \"http://127.0.0.1:{port}\"\nprotocol = \"{protocol}\"\n"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
        command.args(["ship", "--config"]).arg(host.path("fleet.toml")).stderr(Stdio::null());
        let shipper = Collector(command.spawn().unwrap());
        for some in [5, 20] {
            until("some messages", || receiver.came().len() >= before + some);
            drop(collector.take());
            std::thread::sleep(Duration::from_millis(300));
            collector = Some(start(&host, port));
        }
        let all = expected(&host.path("spool"));
        until("all messages", || decoded(&receiver.came()[before..]).0 == all);
        drop(shipper);
        for message in &receiver.came()[before..] {
            // What it writes for an attribute without a value (0.152); what we write is held against the rules elsewhere.
            let own = serde_json::json!(["attribute_table[0] is not the zero value"]);
            assert!(
                message["problems"] == own || message["problems"] == serde_json::json!([]),
                "{}",
                message["problems"]
            );
        }
        let (counts, again) = decoded(&receiver.came()[before..]);
        assert_eq!(counts, all, "{protocol}");
        println!(
            "{protocol}: {} messages, {again} profiles twice, the Collector killed twice",
            receiver.came().len() - before
        );
        assert!(!text(&fs::read(host.path("collector.log")).unwrap()).contains("panic"));
        fs::remove_dir_all(host.path("state")).unwrap();
    }
}
