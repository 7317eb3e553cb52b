//! Hostile spools, certificates, tokens, proxies: a clear error, bounded cost, and nothing secret in any message.

use crate::servers::{Server, python};
use crate::{Host, content, not_run::not_run, text};
use serde_json::json;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

const NEEDS: &str = "Python with opentelemetry-proto and grpcio, which `cargo xtask test` fetches";
/// What must be in no message.
const TOKEN: &str = "correct-horse-battery-staple";

fn store(host: &Host) -> String {
    format!("[[store]]\nurl = \"{}\"\n", host.path("lake").display())
}

/// Puts everything that is no segment into a spool.
fn poison(host: &Host) {
    let path = |name: &str| host.path("spool").join(name);
    fs::write(path("h1-20261122T190113Z-000100.tach"), "no profile").unwrap();
    let good = fs::read(path("h1-20261122T190113Z-000000.tach")).unwrap();
    fs::write(path("h1-20261122T190113Z-000101.tach"), &good[..good.len() / 2]).unwrap();
    File::create(path("h1-20261122T190113Z-000102.tach")).unwrap().set_len(10 << 30).unwrap();
    nix::unistd::mkfifo(&path("h1-20261122T190113Z-000103.tach"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    symlink("/dev/zero", path("h1-20261122T190113Z-000104.tach")).unwrap();
    fs::create_dir(path("h1-20261122T190113Z-000105.tach")).unwrap();
    fs::write(path("h1-\u{1b}]0;owned\u{7}-20261122T190113Z-000106.tach"), &good).unwrap();
    // An account that is another's, one that is endless, and one that leads elsewhere.
    for number in 107..110 {
        fs::write(path(&format!("h1-20261122T190113Z-000{number}.tach")), &good).unwrap();
    }
    fs::write(path("h1-20261122T190113Z-000107.json"), r#"{"schema":1,"stored":5}"#).unwrap();
    File::create(path("h1-20261122T190113Z-000108.json")).unwrap().set_len(10 << 30).unwrap();
    symlink("/etc/passwd", path("h1-20261122T190113Z-000109.json")).unwrap();
}

#[test]
fn a_hostile_spool_costs_little_and_holds_nothing_back() {
    let host = Host::new();
    host.segments(0..2);
    poison(&host);
    if nix::unistd::geteuid().is_root() {
        let other = host.path("spool").join("h1-20261122T190113Z-000110.tach");
        fs::copy(host.path("spool").join("h1-20261122T190113Z-000000.tach"), &other).unwrap();
        std::os::unix::fs::chown(&other, Some(12_345), None).unwrap();
    }
    let second = format!("[[store]]\nurl = \"{}\"\n", host.path("second").display());
    host.configure(&format!("{}{second}", store(&host)));
    let began = Instant::now();
    let output = host.once();
    let seconds = began.elapsed().as_secs_f64();
    // All good ones were shipped.
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let out = text(&output.stdout);
    assert_eq!(out.matches(": 2 segments with 132 samples\n").count(), 2, "{out}");
    let told = text(&output.stderr);
    assert!(!told.contains("left the spool"), "{told}");
    let bad = if nix::unistd::geteuid().is_root() { 11 } else { 10 };
    assert_eq!(told.matches("tachyon-fleet: set aside ").count(), bad, "{told}");
    assert!(!told.contains('\u{1b}') && told.contains("h1-\\x1b]0;owned\\x07-2026"), "{told}");
    for why in [
        "it is a FIFO",
        "it is a symbolic link",
        "it is a directory",
        "and a segment at most 134217728 (spool.largest)",
    ] {
        assert!(told.contains(why), "{why}: {told}");
    }
    println!("{seconds:.1} s");
    let left: Vec<_> = fs::read_dir(host.path("spool")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2 * 2 + 1, "{left:?}");
    assert_eq!(host.once().status.code(), Some(0));
}

#[test]
fn the_environment_of_a_service_is_enough() {
    if !nix::unistd::geteuid().is_root() {
        return not_run("root, to give everything up");
    }
    let host = Host::new();
    host.segments(0..2);
    poison(&host);
    // The agent's user has the spool, and the shipper its group alone.
    let (agent, shipper) = (23_456, 34_567);
    for entry in fs::read_dir(host.path("spool")).unwrap() {
        let path = entry.unwrap().path();
        std::os::unix::fs::lchown(&path, Some(agent), Some(agent)).unwrap();
        if fs::symlink_metadata(&path).unwrap().is_file() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        }
    }
    std::os::unix::fs::chown(host.path("spool"), Some(agent), Some(agent)).unwrap();
    fs::set_permissions(host.path("spool"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(host.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["state", "lake"] {
        fs::create_dir(host.path(name)).unwrap();
        std::os::unix::fs::chown(host.path(name), Some(shipper), Some(shipper)).unwrap();
    }
    host.configure(&store(&host));
    // What `ProtectSystem=strict`, `ReadWritePaths=` and an empty set of capabilities do.
    let script = r#"set -e
mount --bind "$1" "$1"; mount --bind "$2" "$2"
mount -o remount,bind,ro /
shift 2
exec setpriv --reuid 34567 --regid 34567 --groups 23456 --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs -- "$@""#;
    let run = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).args([host.path("state"), host.path("lake")]);
        command
            .arg(env!("CARGO_BIN_EXE_tachyon-fleet"))
            .args(["ship", "--once", "--config"])
            .arg(host.path("fleet.toml"));
        command.output().unwrap()
    };
    let output = run();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).ends_with(": 2 segments with 132 samples\n"), "{}", text(&output.stdout));
    assert!(!host.path("spool/bad").exists(), "nothing can be moved there");
    let first = text(&output.stderr).matches("set aside").count();
    assert_eq!(first, 10, "{}", text(&output.stderr));
    let output = run();
    assert_eq!(
        (output.status.code(), text(&output.stderr).matches("set aside").count()),
        (Some(0), 0),
        "and so it is remembered"
    );
}

/// A certificate for this address, by an authority of its own.
fn certificates(dir: &Path) {
    let script = r#"set -e
cd "$1"
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=test authority" -keyout ca.key -out ca.pem
openssl req -newkey rsa:2048 -nodes -subj "/CN=127.0.0.1" -keyout server.key -out server.csr
printf 'subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth\n' > ext
openssl x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out server.pem
openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj "/CN=another" -keyout other.key -out other.pem"#;
    let output = Command::new("sh").args(["-c", script, "sh"]).arg(dir).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
}

fn assert_secret(host: &Host, output: &Output) {
    for (what, bytes) in [("output", &output.stdout), ("errors", &output.stderr)] {
        assert!(!text(bytes).contains(TOKEN), "{what}");
    }
    for (path, bytes) in content(&host.path("state"), Path::new("")) {
        assert!(!text(&bytes).contains(TOKEN), "{}", path.display());
    }
}

#[test]
fn certificates_and_tokens_that_are_refused_are_told_and_secrets_are_not() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..1);
    certificates(host.dir.path());
    let word = |name: &str| host.path(name).display().to_string();
    let server = Server::start("otlp.py", host.dir.path(), &[&word("server.pem"), &word("server.key"), TOKEN]);
    fs::write(host.path("token"), format!("{TOKEN}\n")).unwrap();
    fs::write(host.path("wrong"), format!("{TOKEN}-of-yesterday")).unwrap();
    for protocol in ["grpc", "http"] {
        let url = format!("https://127.0.0.1:{}", server.port(protocol));
        let otlp = |more: &str| format!("[[otlp]]\nendpoint = \"{url}\"\nprotocol = \"{protocol}\"\n{more}\n");
        let (ca, token, wrong) = (
            format!("ca_file = \"{}\"", word("ca.pem")),
            format!("token_file = \"{}\"", word("token")),
            format!("token_file = \"{}\"", word("wrong")),
        );
        for (more, expected, hint) in [
            (token.clone(), "tls: ", "give ca_file if an authority of your own signs its certificate"),
            (
                format!("{token}\nca_file = \"{}\"", word("other.pem")),
                "tls: ",
                "its certificate is not signed by what ca_file has",
            ),
            (format!("{wrong}\n{ca}"), "unauthorized: ", "the token or password is refused: renew its file"),
            (ca.clone(), "unauthorized: ", "it wants a token: give token_file"),
            (format!("token_file = \"{}\"\n{ca}", word("none")), "configuration: cannot read ", ""),
        ] {
            host.configure(&otlp(&more));
            let output = host.once();
            let told = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{told}");
            assert!(told.contains(expected) && told.contains(hint), "{protocol}, {more}: {told}");
            assert_secret(&host, &output);
        }
        host.configure(&otlp(&format!("{token}\n{ca}")));
        let output = host.once();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_secret(&host, &output);
        fs::remove_dir_all(host.path("state")).unwrap();
    }
    assert_eq!(server.came().len(), 2);
}

#[test]
fn a_proxy_that_refuses_is_told_and_one_that_passes_on_is_used() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..1);
    certificates(host.dir.path());
    let word = |name: &str| host.path(name).display().to_string();
    let server = Server::start("otlp.py", host.dir.path(), &[&word("server.pem"), &word("server.key")]);
    host.configure(&format!(
        "[[otlp]]\nendpoint = \"https://127.0.0.1:{}\"\nca_file = \"{}\"\n",
        server.port("grpc"),
        word("ca.pem")
    ));
    for (status, code) in [("403", 1), ("200", 0)] {
        let proxy = Server::start("proxy.py", host.dir.path(), &[status]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
        command.args(["ship", "--once", "--config"]).arg(host.path("fleet.toml"));
        command
            .env("HTTPS_PROXY", format!("http://user:{TOKEN}@127.0.0.1:{}", proxy.port("http")))
            .env_remove("NO_PROXY");
        let output = command.output().unwrap();
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(code == 0 || told.contains("proxy: ") && told.contains("HTTPS_PROXY"), "{told}");
        assert_secret(&host, &output);
        assert!(
            proxy.came().iter().any(|it| it["line"].as_str().unwrap().starts_with("CONNECT 127.0.0.1:")),
            "{:?}",
            proxy.came()
        );
    }
    assert_eq!(server.came().len(), 1);
}

#[test]
fn what_a_server_will_never_take_is_told_and_not_tried_again() {
    if python().is_none() {
        return not_run(NEEDS);
    }
    let host = Host::new();
    host.segments(0..2);
    let server = Server::start("otlp.py", host.dir.path(), &[]);
    for (protocol, wanted, reason) in [
        ("grpc", json!({ "status": "INVALID_ARGUMENT" }), "rejected"),
        ("http", json!({ "status": "INVALID_ARGUMENT" }), "rejected"),
        ("grpc", json!({ "partial": 2 }), "rejected"),
        ("grpc", json!({ "status": "UNAVAILABLE", "forget": true }), "busy"),
        ("http", json!({ "status": "INTERNAL", "forget": true }), "server_error"),
        ("grpc", json!({ "status": "UNIMPLEMENTED" }), "not_found"),
    ] {
        host.configure(&format!("[[otlp]]\nendpoint = \"{}\"\nprotocol = \"{protocol}\"\n", server.url(protocol)));
        server.control(wanted.clone());
        let output = host.once();
        let (out, told) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(1), "{wanted}: {told}");
        if reason == "rejected" {
            assert!(out.contains("132 samples not taken: rejected"), "{wanted}: {out}");
            assert!(told.contains("hint: what a server refuses is not tried again"), "{wanted}: {told}");
            assert_eq!(host.once().status.code(), Some(0), "{wanted}: it is not tried again");
        } else {
            assert!(out.contains(&format!("2 segments left: {reason}: ")), "{wanted}: {out}");
            let doubts = out.contains("3 pushes may have arrived twice");
            assert_eq!(doubts, reason == "server_error", "{wanted}: {out}");
        }
        fs::remove_dir_all(host.path("state")).unwrap();
    }
}
