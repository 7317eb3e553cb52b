//! The watch over live processes.

use super::*;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// One mapping, kept.
#[derive(Debug)]
struct Seen {
    path: PathBuf,
    dev: (u32, u32),
    inode: u64,
    addr: u64,
    len: u64,
    pgoff: u64,
    time: KtimeNs,
}

/// What one process did, kept.
#[derive(Debug, Default)]
struct History {
    execs: Vec<(KtimeNs, String)>,
    mappings: Vec<Seen>,
}

/// One test at a time, also of those that run as processes of their own (nextest): the flood of one would lose what
/// another waits for. Released when the file is closed.
fn turn() -> File {
    let file = File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("it was built from there");
    file.lock().expect("the file can be locked");
    file
}

/// The watch, or `None` if it is not allowed; in CI it must be.
fn open() -> Option<(Watch, File)> {
    let turn = turn();
    match Watch::open() {
        Ok(watch) => Some((watch, turn)),
        Err(error) => {
            crate::not_run::not_run(&format!("root: {error}"));
            None
        }
    }
}

/// A file that must be there in CI.
fn wanted(path: Option<PathBuf>, what: &str) -> Option<PathBuf> {
    let path = path.filter(|path| path.exists());
    if path.is_none() {
        crate::not_run::not_run(what);
    }
    path
}

fn pyenv_python(version: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let root = root.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")))?;
    let directories = std::fs::read_dir(root.join("versions")).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    directories.map(|path| path.join("bin").join(format!("python{version}"))).find(|path| path.exists())
}

/// A process that lives until its standard input ends.
fn spawn(python: &Path, program: &str) -> Child {
    Command::new(python).args(["-c", program]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()
}

/// Waits on the descriptor and drains until `done`.
fn watch_until(watch: &mut Watch, pid: u32, mut done: impl FnMut(&History) -> bool) -> History {
    let mut history = History::default();
    let deadline = Instant::now() + Duration::from_secs(30);
    while !done(&history) {
        assert!(Instant::now() < deadline, "nothing came for pid {pid}: {history:?}");
        poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], PollTimeout::from(1000_u16)).unwrap();
        while watch.drain(&mut |event| record(&mut history, pid, event)) == Drained::More {}
    }
    history
}

fn record(history: &mut History, wanted: u32, event: WatchEvent<'_>) {
    match event {
        WatchEvent::Mapped { pid, addr, len, pgoff, dev, inode, path, time, .. } if pid == Pid(wanted) => {
            history.mappings.push(Seen { path: path.into(), dev, inode, addr, len, pgoff, time });
        }
        WatchEvent::Exec { pid, time, comm } if pid == Pid(wanted) => {
            history.execs.push((time, comm.to_string_lossy().into_owned()));
        }
        _ => {}
    }
}

#[test]
fn a_shared_libpython_is_reported_while_the_process_lives() {
    let Some(python) = wanted(pyenv_python("3.12"), "a pyenv python3.12") else { return };
    let Some((mut watch, _turn)) = open() else { return };
    let before = KtimeNs::now();
    let mut child = spawn(&python, "import sys; sys.stdin.read()");
    let is_library = |seen: &Seen| seen.path.to_string_lossy().contains("libpython3.12.so");
    let history = watch_until(&mut watch, child.id(), |history| history.mappings.iter().any(is_library));
    assert!(child.try_wait().unwrap().is_none(), "it must be told within the process's life");

    let library = history.mappings.iter().find(|seen| is_library(seen)).unwrap();
    let file = std::fs::metadata(&library.path).unwrap();
    assert_eq!(library.inode, file.ino());
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
    let line = format!(
        "{:x}-{:x} r-xp {:08x} {:02x}:{:02x} {} ",
        library.addr,
        library.addr + library.len,
        library.pgoff,
        library.dev.0,
        library.dev.1,
        library.inode
    );
    assert!(maps.lines().any(|have| have.starts_with(&line)), "{line} is not in\n{maps}");
    // The spawned process is one exec, and everything is in order of time, between the start of the test and now.
    assert_eq!(history.execs.iter().map(|(_, comm)| comm.as_str()).collect::<Vec<_>>(), ["python3.12"]);
    assert!(before < history.execs[0].0 && history.execs[0].0 < library.time && library.time < KtimeNs::now());
    drop(child.stdin.take());
    child.wait().unwrap();
}

#[test]
fn a_static_interpreter_is_reported_at_exec() {
    let Some(python) = wanted(Some("/usr/bin/python3.11".into()), "Debian's python3.11") else { return };
    let Some((mut watch, _turn)) = open() else { return };
    let mut child = spawn(&python, "import sys; sys.stdin.read()");
    let history = watch_until(&mut watch, child.id(), |history| {
        !history.execs.is_empty() && history.mappings.iter().any(|seen| seen.path == python)
    });
    assert!(child.try_wait().unwrap().is_none());
    assert_eq!(history.execs[0].1, "python3.11");
    let inode = std::fs::metadata(&python).unwrap().ino();
    assert!(history.mappings.iter().any(|seen| seen.inode == inode));
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// What an embedding program does: map a library long after its exec. Data mappings are not reported.
#[test]
fn a_late_mapping_is_reported() {
    let Some(python) = wanted(pyenv_python("3.12"), "a pyenv python3.12") else { return };
    let Some((mut watch, _turn)) = open() else { return };
    let program = "import mmap, sys; sys.stdin.readline(); file = open('/proc/self/exe', 'rb')
data = mmap.mmap(file.fileno(), 8192, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
code = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
sys.stdin.read()";
    let mut child = spawn(&python, program);
    watch_until(&mut watch, child.id(), |history| !history.execs.is_empty());
    std::thread::sleep(Duration::from_millis(300));
    std::io::Write::write_all(child.stdin.as_mut().unwrap(), b"go\n").unwrap();
    let executable = std::fs::canonicalize(&python).unwrap();
    let is_late = |seen: &Seen| seen.path == executable && seen.len == 4096 && seen.pgoff == 0;
    let history = watch_until(&mut watch, child.id(), |history| history.mappings.iter().any(is_late));
    assert!(!history.mappings.iter().any(|seen| seen.len == 8192));
    drop(child.stdin.take());
    child.wait().unwrap();
}

/// Maps faster than anything reads: each call ends, the loss is reported, and what others do is still seen.
#[test]
fn a_process_that_maps_in_a_loop_stalls_nothing() {
    let Some(python) = wanted(pyenv_python("3.12"), "a pyenv python3.12") else { return };
    let Some((mut watch, _turn)) = open() else { return };
    let program = "import mmap; file = open('/proc/self/exe', 'rb')
for _ in range(20000): mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)";
    let mut flood = spawn(&python, program);
    assert!(flood.wait().unwrap().success());
    let (mut told, mut lost) = (0, 0);
    loop {
        let mut calls = 0;
        let drained = watch.drain(&mut |event| {
            calls += 1;
            match event {
                WatchEvent::Mapped { pid, .. } => told += u64::from(pid == Pid(flood.id())),
                WatchEvent::Lost { n } => lost += n,
                WatchEvent::Exec { .. } => {}
            }
        });
        assert!(calls <= MAX_DRAINED);
        if drained == Drained::All {
            break;
        }
    }
    // The rest of the loss is reported with the ring's next record: let each CPU have one.
    let mut others = Vec::new();
    let all = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    for cpu in (0..nix::sched::CpuSet::count()).filter(|&cpu| all.is_set(cpu).unwrap()) {
        let mut one = nix::sched::CpuSet::new();
        one.set(cpu).unwrap();
        nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &one).unwrap();
        let mut other = Command::new("true").spawn().unwrap();
        other.wait().unwrap();
        others.push(Pid(other.id()));
    }
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &all).unwrap();
    let mut seen = std::collections::HashSet::new();
    while watch.drain(&mut |event| match event {
        WatchEvent::Exec { pid, .. } if others.contains(&pid) => drop(seen.insert(pid)),
        WatchEvent::Lost { n } => lost += n,
        _ => {}
    }) == Drained::More
    {}
    eprintln!("flood: {told} told, {lost} lost");
    assert_eq!(seen.len(), others.len());
    assert!(told > 1000 && lost > 10_000, "{told} told, {lost} lost");
}

#[test]
fn tokio_can_wait_for_it() {
    let Some((watch, _turn)) = open() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // SAFETY: the descriptor is the watch's own, the same on each call, and open until the watch is dropped.
        let mut watch = unsafe { tokio::io::unix::AsyncFd::register(watch) }.unwrap();
        // Twice: readiness must come again after it was cleared.
        for _ in 0..2 {
            while watch.get_mut().drain(&mut |_| {}) == Drained::More {}
            let mut child = Command::new("true").spawn().unwrap();
            let mut seen = false;
            while !seen {
                let ready = tokio::time::timeout(Duration::from_secs(30), watch.readable_mut());
                let mut guard = ready.await.expect("it wakes").unwrap();
                guard.clear_ready();
                let mut on = |event: WatchEvent<'_>| {
                    seen |= matches!(event, WatchEvent::Exec { pid, .. } if pid == Pid(child.id()));
                };
                while guard.get_inner_mut().drain(&mut on) == Drained::More {}
            }
            child.wait().unwrap();
        }
    });
}

/// Threads that are given names wake whoever waits, and were once not taken for anything: between builds, whose threads have names, a
/// recording of one process was woken for each of them.
#[test]
fn what_is_no_event_is_counted_all_the_same() {
    const NAMES: u64 = 100;
    let Some((mut watch, _turn)) = open() else { return };
    let own = Pid(std::process::id());
    while watch.drain(&mut |_| ()) == Drained::More {}
    let before = watch.taken();
    for number in 0..NAMES {
        let name = std::ffi::CString::new(format!("named {number}")).expect("no zero");
        nix::sys::prctl::set_name(&name).expect("a thread may be named");
    }
    let mut own_execs = 0;
    let mut count = |event: WatchEvent<'_>| {
        own_execs += usize::from(matches!(event, WatchEvent::Exec { pid, .. } if pid == own));
    };
    while watch.drain(&mut count) == Drained::More {}
    assert_eq!(own_execs, 0, "a name is no exec");
    assert!(watch.taken() - before >= NAMES, "{} of {NAMES}", watch.taken() - before);
}
