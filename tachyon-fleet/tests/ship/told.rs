//! What the shipper tells: metrics, health, `--dry-run`, signals, systemd.

use crate::{Host, text};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

fn get(port: u16, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let status = answer.split(' ').nth(1)?.parse().ok()?;
    Some((status, answer.split_once("\r\n\r\n")?.1.to_owned()))
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("it did not come to {what}");
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn configure(host: &Host, port: u16, lake: &str) {
    host.configure(&format!("[[store]]\nname = \"lake\"\nurl = \"{}\"\n", host.path(lake).display()));
    let text = fs::read_to_string(host.path("fleet.toml")).unwrap();
    fs::write(host.path("fleet.toml"), text.replace("\"off\"", &format!("\"127.0.0.1:{port}\""))).unwrap();
}

#[test]
fn a_service_tells_how_it_is() {
    let host = Host::new();
    host.segments(0..2);
    let spool = host.path("spool");
    let state = |end: f64| {
        let pid = std::process::id();
        fs::write(
            spool.join("state.json"),
            format!(r#"{{"pid":{pid},"segments":3,"segment_end_unix":{end},"stored":7}}"#),
        )
        .unwrap();
    };
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
    state(now);
    fs::write(spool.join("metrics.prom"), "# TYPE tachyon_samples counter\ntachyon_samples_total 7\n# EOF\n").unwrap();
    let port = free_port();
    configure(&host, port, "lake");
    let socket = UnixDatagram::bind(host.path("notify")).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
    command.args(["ship", "--config"]).arg(host.path("fleet.toml")).stderr(Stdio::piped());
    command.env("NOTIFY_SOCKET", host.path("notify")).env("WATCHDOG_USEC", "400000").env_remove("WATCHDOG_PID");
    let mut child = Ended(command.spawn().unwrap());
    let mut notified = String::new();
    let mut hears = |wanted: &str| {
        let mut buffer = [0; 4096];
        while !notified.contains(wanted) {
            let size = socket.recv(&mut buffer).expect("systemd hears something");
            notified += &text(&buffer[..size]);
            notified += "\n";
        }
        notified.clear();
    };
    hears("READY=1");
    hears("WATCHDOG=1");
    until("shipped segments", || {
        let (status, text) = get(port, "/metrics")?;
        assert_eq!(status, 200);
        text.lines().find(|line| *line == "tachyon_ship_shipped_segments_total{backend=\"lake\"} 2")?;
        assert!(text.contains("tachyon_samples_total 7\n") && text.ends_with("# EOF\n"), "{text}");
        Some(())
    });
    let (status, text) = get(port, "/healthz").unwrap();
    assert_eq!((status, text.as_str()), (200, "{\"healthy\":true,\"trouble\":[]}\n"));
    assert_eq!(get(port, "/").unwrap().0, 404);

    // Configurations that make no sense or cannot be had change nothing.
    let good = fs::read_to_string(host.path("fleet.toml")).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let of_other = |text: String| text.replace("/lake", "/other").replace("name = \"lake\"", "name = \"other\"");
    let hang_up = || {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.0.id().cast_signed()), nix::sys::signal::SIGHUP)
            .unwrap();
    };
    for wrong in [
        "[spool]\npth = 1\n".to_owned(),
        of_other(good.replace(&format!("127.0.0.1:{port}"), &taken.local_addr().unwrap().to_string())),
        of_other(good.replace("/spool", "/another")),
    ] {
        fs::write(host.path("fleet.toml"), wrong).unwrap();
        hang_up();
        hears("RELOADING=1");
        hears("READY=1");
    }
    assert!(get(port, "/metrics").unwrap().1.contains("tachyon_ship_up{backend=\"lake\"} 1\n"));
    assert!(!host.path("other").exists());
    // Another place.
    fs::write(host.path("fleet.toml"), of_other(good)).unwrap();
    hang_up();
    hears("RELOADING=1");
    until("the other place", || {
        let (_, text) = get(port, "/metrics")?;
        text.lines().find(|line| *line == "tachyon_ship_shipped_segments_total{backend=\"other\"} 2")?;
        text.lines().find(|line| *line == "tachyon_ship_reloads_total 1").map(drop)
    });
    assert_eq!(host.content("lake"), host.content("other"));

    // The agent has stopped.
    state(now - 4000.0);
    until("trouble", || {
        let (status, text) = get(port, "/healthz")?;
        (status == 503 && text.contains("has ended no segment for ")).then_some(())
    });
    assert!(get(port, "/metrics").unwrap().1.contains("tachyon_healthy 0\n"));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.0.id().cast_signed()), nix::sys::signal::SIGTERM).unwrap();
    hears("STOPPING=1");
    let status = child.0.wait().unwrap();
    assert!(status.success());
    let mut told = String::new();
    child.0.stderr.take().unwrap().read_to_string(&mut told).unwrap();
    assert!(told.contains("nothing is changed: ") && told.contains("unknown field `pth`"), "{told}");
    assert!(told.contains("nothing is changed: cannot listen on 127.0.0.1:"), "{told}");
    assert!(told.contains("nothing is changed: another spool.path or state.path needs a restart"), "{told}");
    assert!(told.contains("not healthy: the agent (pid "), "{told}");
}

fn dry(host: &Host) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tachyon-fleet"));
    command.args(["ship", "--dry-run", "--config"]).arg(host.path("fleet.toml"));
    command.output().unwrap()
}

#[test]
fn a_dry_run_shows_what_would_leave_the_host_and_changes_nothing() {
    let host = Host::new();
    host.segments(0..2);
    fs::write(host.path("spool/x.tach"), "no profile").unwrap();
    host.configure("[[otlp]]\nendpoint = \"http://127.0.0.1:1\"\n[[pyroscope]]\nurl = \"http://127.0.0.1:1\"\n[[store]]\nurl = \"/nonexistent-lake\"\n");
    let before = host.content("");
    let output = dry(&host);
    // A store in a directory is made when it is opened: this one cannot be for others than root.
    let told = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for line in [
        "otlp http://127.0.0.1:1\n  would get 2 segments with 132 samples: 2 requests, ",
        "pyroscope http://127.0.0.1:1\n",
        "  it would not get 132 samples: too_old\n",
        "samples/date=2026-11-22/hour=19/service=my%20shop/h1-20261122T190113Z-000000.parquet\n",
        "would be set aside: x.tach: ",
        "  service.name          2  my shop, web\n",
        "  and names of 7 functions in 4 files, such as /srv/app.py\n",
    ] {
        assert!(told.contains(line), "{line}: {told}");
    }
    assert_eq!(host.content(""), before);
    assert!(!std::path::Path::new("/nonexistent-lake").exists());
}

#[test]
fn what_makes_no_sense_is_a_usage_error() {
    let host = Host::new();
    fs::write(host.path("fleet.toml"), "[[otlp]]\nendpoint = \"https://u:secret@x\"\n").unwrap();
    let output = host.once();
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr).contains("https://[secret]@x has a user or a password in it"),
        "{}",
        text(&output.stderr)
    );
    let host = Host::new();
    host.configure("[[store]]\nurl = \"/tmp\"\n");
    fs::create_dir(host.path("state")).unwrap();
    let lock = fs::File::create(host.path("state/.lock")).unwrap();
    lock.try_lock().unwrap();
    let told = text(&host.once().stderr);
    assert!(told.contains("another shipper keeps its progress in ") && told.contains("hint: end it first"), "{told}");
}
