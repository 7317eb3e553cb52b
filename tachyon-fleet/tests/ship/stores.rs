//! Object stores that others run: each segment is there exactly once, whole, though servers die and connections break.

use crate::servers::{Server, cached, python};
use crate::support::{succeeds, word};
use crate::{Host, not_run::not_run, text};
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What a store has, by its own client.
fn objects(words: &[&str]) -> BTreeMap<String, String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/servers/objects.py");
    let output = Command::new(python().unwrap()).arg(script).args(words).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// What `convert` makes of the spool, below a prefix.
fn tables(host: &Host, prefix: &str) -> BTreeMap<String, String> {
    succeeds(&["convert", word(&host.path("spool")), "-o", word(&host.path("tables"))]);
    let digest = |bytes: &[u8]| Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let content = host.content("tables").into_iter();
    content.map(|(path, bytes)| (format!("{prefix}{}", path.display()), digest(&bytes))).collect()
}

/// A program that runs on, and ends with its handle.
struct Running(Child);

impl Running {
    fn start(host: &Host, variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
        command.args(["ship", "--config"]).arg(host.path("fleet.toml"));
        command.envs(variables.iter().copied()).stdout(Stdio::null());
        command.stderr(fs::File::create(host.path("told")).unwrap());
        Self(command.spawn().unwrap())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(90) {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("it did not come to {what}");
}

#[test]
fn connections_to_s3_that_break_leave_each_object_once() {
    if python().is_none() {
        return not_run("Python with moto, which `cargo xtask test` fetches");
    }
    let host = Host::new();
    host.segments(0..8);
    let moto = Server::start("s3.py", host.dir.path(), &[]);
    let mut way = Server::start("cut.py", host.dir.path(), &[&moto.port("http").to_string()]);
    fs::write(host.path("id"), "id").unwrap();
    fs::write(host.path("key"), "a-very-secret-key").unwrap();
    host.configure(&format!(
        "[[store]]\nurl = \"s3://lake/some/prefix\"\nendpoint = \"{}\"\nregion = \"us-east-1\"\naccess_key_id_file = \"{}\"\nsecret_access_key_file = \"{}\"\ntimeout = \"5s\"\n",
        way.url("http"),
        host.path("id").display(),
        host.path("key").display(),
    ));
    // An object or none gets through.
    way.control(json!({ "after": 1800 }));
    let shipper = Running::start(&host, &[]);
    until("three broken connections", || way.came().len() >= 3);
    way.kill();
    std::thread::sleep(Duration::from_millis(300));
    way.control(json!({}));
    way.restart();
    let stored = || objects(&["s3", &moto.url("http"), "id", "key", "lake"]);
    let expected = tables(&host, "some/prefix/");
    until("all objects", || stored().len() == expected.len());
    drop(shipper);
    assert_eq!(stored(), expected);
    let told = fs::read_to_string(host.path("told")).unwrap();
    assert!(told.contains("; segments stay in the spool") && !told.contains("a-very-secret-key"), "{told}");
    // Into a bucket that is not there nothing goes, and nothing is given up.
    let text_of = fs::read_to_string(host.path("fleet.toml")).unwrap();
    fs::write(host.path("fleet.toml"), text_of.replace("s3://lake", "s3://ocean")).unwrap();
    let output = host.once();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("8 segments left: not_found: "), "{}", text(&output.stdout));
}

fn azurite(host: &Host, port: u16) -> Running {
    let program = cached("azurite/node_modules/azurite/dist/src/blob/main.js").unwrap();
    let mut command = Command::new("node");
    command.arg(program).args([
        "--silent",
        "--skipApiVersionCheck",
        "--disableTelemetry",
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
    ]);
    command.arg(port.to_string()).arg("--location").arg(host.path("azure")).stdout(Stdio::null());
    let child = Running(command.spawn().unwrap());
    until("azurite", || TcpStream::connect(("127.0.0.1", port)).is_ok());
    child
}

#[test]
fn azure_that_ends_and_comes_back_has_each_object_once() {
    if python().is_none() || cached("azurite/node_modules/azurite").is_none() {
        return not_run("azurite and Python with azure-storage-blob, which `cargo xtask test` fetches");
    }
    // The account that azurite documents.
    let (account, key) = (
        "devstoreaccount1",
        "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==",
    );
    let host = Host::new();
    host.segments(0..12);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{port}/{account}");
    let mut server = azurite(&host, port);
    let stored = || objects(&["azure", &endpoint, account, key, "lake"]);
    objects(&["azure", &endpoint, account, key, "lake", "make"]);
    fs::write(host.path("key"), key).unwrap();
    host.configure(&format!(
        "[[store]]\nurl = \"az://lake/prefix\"\nendpoint = \"{endpoint}\"\naccount = \"{account}\"\naccount_key_file = \"{}\"\nformats = [\"parquet\"]\ntimeout = \"5s\"\n",
        host.path("key").display(),
    ));
    let shipper = Running::start(&host, &[]);
    until("some objects", || stored().len() > 10);
    // It keeps its index in memory and writes it when it is asked to end: killed, it forgets what it acknowledged.
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server.0.id().cast_signed()), nix::sys::signal::SIGTERM).unwrap();
    server.0.wait().unwrap();
    std::thread::sleep(Duration::from_millis(500));
    let _server = azurite(&host, port);
    let expected = tables(&host, "prefix/");
    until("all objects", || stored().len() == expected.len());
    drop(shipper);
    assert_eq!(stored(), expected);
}

#[test]
#[ignore = "it takes garage, whose program TACHYON_GARAGE names (CONTRIBUTING.md)"]
fn garage_that_is_killed_and_comes_back_has_each_object_once() {
    let garage = std::env::var("TACHYON_GARAGE").expect("TACHYON_GARAGE names the program");
    let host = Host::new();
    host.segments(0..40);
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (s3, rpc) = (free(), free());
    let config = host.path("garage.toml");
    let (metadata, data) = (host.path("garage-meta"), host.path("garage-data"));
    let text_of = format!(
        "metadata_dir = \"{}\"\ndata_dir = \"{}\"\ndb_engine = \"sqlite\"\nreplication_factor = 1\nrpc_bind_addr = \"127.0.0.1:{rpc}\"\nrpc_public_addr = \"127.0.0.1:{rpc}\"\nrpc_secret = \"{}\"\n[s3_api]\ns3_region = \"garage\"\napi_bind_addr = \"127.0.0.1:{s3}\"\n",
        metadata.display(),
        data.display(),
        "a1".repeat(32)
    );
    fs::write(&config, text_of).unwrap();
    let run = |words: &[&str]| {
        let output = Command::new(&garage).arg("-c").arg(&config).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    };
    let serve = || {
        let mut command = Command::new(&garage);
        command.arg("-c").arg(&config).args(["server", "--single-node"]).stdout(Stdio::null()).stderr(Stdio::null());
        let server = Running(command.spawn().unwrap());
        until("garage", || TcpStream::connect(("127.0.0.1", s3)).is_ok());
        server
    };
    let server = serve();
    let (id, key) = ("GK31c2f218a2e44f485b94239e", "b892c0665f0ada8a4755dae98baa3b133590e11dae3bcc1f9d769d67f16c3835");
    run(&["key", "import", "--yes", id, key]);
    run(&["bucket", "create", "lake"]);
    run(&["bucket", "allow", "--read", "--write", "--owner", "lake", "--key", id]);
    let endpoint = format!("http://127.0.0.1:{s3}");
    fs::write(host.path("id"), id).unwrap();
    fs::write(host.path("key"), key).unwrap();
    host.configure(&format!(
        "[[store]]\nurl = \"s3://lake/prefix\"\nendpoint = \"{endpoint}\"\nregion = \"garage\"\naccess_key_id_file = \"{}\"\nsecret_access_key_file = \"{}\"\ntimeout = \"5s\"\n",
        host.path("id").display(),
        host.path("key").display(),
    ));
    let shipper = Running::start(&host, &[]);
    let stored = || objects(&["s3", &endpoint, id, key, "lake"]);
    let mut server = Some(server);
    for some in [20, 100, 180] {
        until("some objects", || stored().len() > some);
        drop(server.take());
        std::thread::sleep(Duration::from_millis(500));
        server = Some(serve());
    }
    let expected = tables(&host, "prefix/");
    until("all objects", || stored().len() == expected.len());
    drop(shipper);
    assert_eq!(stored(), expected);
    println!("{} objects of 40 segments, garage killed three times", expected.len());
}
