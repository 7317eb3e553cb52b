//! What the first line of an account says about real servers and pools that wait.

use super::children::Server;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tachyon_tests::{Interpreter, Profiler, Recording, Target, live};

/// The share of threads' lives, in percent, that an account's first line says was spent in the first of its waits; which has this
/// cause and this place.
fn first_wait(recording: &Recording, cause: &str, place: &str) -> f64 {
    let line = recording.stderr.lines().find(|line| line.contains(" % waiting: ")).unwrap_or_default();
    println!("{line}");
    let (_, waits) = line.split_once(" % waiting: ").unwrap_or_else(|| panic!("{}", recording.stderr));
    // A place may have a comma, in brackets.
    let (share, what) = waits.split_once(" % ").unwrap_or_else(|| panic!("{line}"));
    assert!(what.starts_with(cause) && what.contains(place), "{cause} in {place}: {line}");
    let others = what.find(" % ").unwrap_or(what.len());
    assert!(what.find(place) < Some(others), "{place} comes first: {line}");
    share.parse().unwrap_or_else(|_| panic!("{line}"))
}

/// Answers each request after 20 ms, on each connection independently.
fn database() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
    let port = listener.local_addr().expect("it has one").port();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut question = [0; 1];
                while stream.read_exact(&mut question).is_ok() {
                    std::thread::sleep(Duration::from_millis(20));
                    if stream.write_all(b"!").is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// gunicorn with threads, whose answers wait for a database.
#[test]
fn a_server_waits_for_its_database() {
    let Some(_live) = live() else { return };
    let environment = format!("TACHYON_TEST_DATABASE={}", database());
    let server = Server::start(&[
        "--worker-class",
        "gthread",
        "--threads",
        "4",
        "--env",
        &environment,
        "waits_served:application",
    ]);
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.ask().is_none() {
        assert!(Instant::now() < deadline, "it does not answer");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Users go on until the recording has ended, and should that fail, for a while.
    let (is_over, end) = (AtomicBool::new(false), Instant::now() + Duration::from_secs(30));
    let ask = || {
        let mut answered = 0;
        while !is_over.load(Ordering::Relaxed) && Instant::now() < end {
            answered += u32::from(server.ask().is_some());
        }
        answered
    };
    let (answered, recording) = std::thread::scope(|scope| {
        // More users than it has threads, so that no thread is idle.
        let users: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        std::thread::sleep(Duration::from_millis(500));
        let profiler = Profiler::of(server.pid()).arg("--subprocesses").arg("--wall").rate(199).milliseconds(3_000);
        let recording = profiler.record();
        is_over.store(true, Ordering::Relaxed);
        (users.into_iter().map(|user| user.join().expect("it asks")).sum::<u32>(), recording)
    });
    println!("{answered} answers");
    let share = first_wait(&recording, "socket", "waits_served.py:");
    // Four of six threads, and each of those most of the time; the others are the master and the worker's own first one.
    assert!((40.0..68.0).contains(&share), "{share} %");
}

/// An event loop that has little to do waits for events.
#[test]
fn an_event_loop_waits_for_its_users() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "waits_echo.py");
    let port = target.facts["port"].as_u64().and_then(|port| u16::try_from(port).ok()).expect("it listens");
    let recording = std::thread::scope(|scope| {
        let end = Instant::now() + Duration::from_millis(3_000);
        for _ in 0..2 {
            scope.spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
                let mut answer = [0; 4];
                while Instant::now() < end {
                    stream.write_all(b"ping").and_then(|()| stream.read_exact(&mut answer)).expect("it answers");
                    std::thread::sleep(Duration::from_millis(10));
                }
            });
        }
        Profiler::of(target.pid()).arg("--wall").rate(199).milliseconds(2_500).record()
    });
    let share = first_wait(&recording, "poll", "selectors.py:");
    assert!(share > 80.0, "{share} %");
}

/// The share of threads' lives that a pool's first wait takes.
fn pool(interpreter: &str, wants: &str, cause: &str, place: &str) -> f64 {
    let target = Target::start_with(&Interpreter::named(interpreter), "waits_pool.py", &[wants]);
    let recording = Profiler::of(target.pid()).arg("--wall").rate(199).milliseconds(2_500).record();
    first_wait(&recording, cause, place)
}

/// Threads that always want to run wait for the GIL, and so for the thread that holds it.
#[test]
fn a_pool_waits_for_the_gil() {
    let Some(_live) = live() else { return };
    let share = pool("pyenv_3_12", "gil", "GIL", "held by encode, waits_pool.py:");
    // Three of five threads; the fifth waits for their ends.
    assert!((40.0..66.0).contains(&share), "{share} %");
}

/// Without a GIL they wait for their own lock.
#[test]
fn a_free_threaded_pool_waits_for_its_lock() {
    let Some(_live) = live() else { return };
    let share = pool("built_3_14t", "lock", "lock", "waits_pool.py:");
    // Three of five threads, and the fifth, which waits for their ends: for a lock, too.
    assert!((60.0..86.0).contains(&share), "{share} %");
}
