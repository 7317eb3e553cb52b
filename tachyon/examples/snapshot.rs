//! Records a snapshot of an interpreter for `tachyon-common/tests/snapshots.rs`: `snapshot FILE [--root DIR] PYTHON`.
//!
//! Runs `program.py`, stops its threads with ptrace, each where it is, and keeps the memory that the kernel side's walk
//! reads of them. Started by `cargo xtask snapshots`.

#[path = "../../tachyon-common/tests/snapshot/mod.rs"]
mod snapshot;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Deserialize;
use snapshot::{Captured, Recording, Thread, Told};
use tachyon::inspect::{ElfCache, Verdict, inspect};
use tachyon::remote::RemoteProcess;
use tachyon::types::Pid;
use tachyon_common::process::ProcessEntry;
use tachyon_common::walk::ThreadPointer;

/// Where the program is put, in the interpreter's own root directory: its path is part of what is recorded, and should
/// say nothing of the machine.
const DIR: &str = "/tmp/snapshots";

/// What the program says.
#[derive(Deserialize)]
struct Said {
    threads: Vec<SaidThread>,
}

#[derive(Deserialize)]
struct SaidThread {
    tid: i32,
    main: bool,
    frames: Vec<SaidFrame>,
}

#[derive(Deserialize)]
struct SaidFrame {
    name: String,
    file: String,
    line: u32,
    firstlineno: i32,
    lasti: i32,
    spans: Vec<(i32, i32)>,
}

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1);
    let file = PathBuf::from(args.next().context("no file is named")?);
    let mut python = args.next().context("no interpreter is named")?;
    let mut root = None;
    if python == "--root" {
        root = Some(PathBuf::from(args.next().context("--root needs a directory")?));
        python = args.next().context("no interpreter is named")?;
    }
    let dir = root.as_deref().unwrap_or(Path::new("/")).join(&DIR[1..]);
    fs::create_dir(&dir).with_context(|| format!("{}: cannot be made, or is there already", dir.display()))?;
    let recorded = start(&dir, root.as_deref(), Path::new(&python)).and_then(|mut child| {
        let recorded = record(&mut child);
        child.kill()?;
        // The child and its threads, which do not go before their tracer has looked at each.
        // SAFETY: waitpid(2) takes a null pointer for a status that nobody wants.
        while unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) } != -1 {}
        recorded
    });
    fs::remove_dir_all(&dir)?;
    let recorded = recorded?;
    let bytes = recorded.to_bytes();
    ensure!(Captured::parse(&bytes) == recorded, "what is written is not what was recorded");
    println!("{}: {} bytes", file.display(), bytes.len());
    fs::write(&file, bytes).with_context(|| file.display().to_string())
}

fn start(dir: &Path, root: Option<&Path>, python: &Path) -> Result<Child> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tachyon-common/tests/snapshots/program.py");
    fs::copy(program, dir.join("program.py"))?;
    let mut command = match root {
        Some(root) => {
            let mut command = Command::new("chroot");
            command.arg(root).arg(python);
            command
        }
        None => Command::new(python),
    };
    command
        .args(["-B", "-I", "-X", "utf8", &format!("{DIR}/program.py")])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin")
        .current_dir("/");
    Ok(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?)
}

fn record(child: &mut Child) -> Result<Captured> {
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no output")?).read_line(&mut line)?;
    let said: Said = serde_json::from_str(&line).context("the program is not ready")?;
    // Until all sleep but the one that runs.
    std::thread::sleep(Duration::from_millis(200));
    let process = RemoteProcess::open(Pid(child.id()))?;
    let Verdict::Python(python) = inspect(&process, &mut ElfCache::default())? else { bail!("it is no CPython") };
    let mut threads = Vec::new();
    for thread in said.threads {
        threads.push(stop(thread)?);
    }
    let layout = python.layout.complete();
    let (runtime, code_type, none) = (python.runtime, python.code_type, python.none);
    let entry = ProcessEntry { runtime, code_type, none, ..ProcessEntry::default() };
    let recording = Recording::new(&process);
    for thread in &threads {
        let pointer = ThreadPointer { address: thread.pointer, reach: 0 };
        let walked = snapshot::walk(&recording, (&layout, &entry), pointer, thread.sp, &thread.registers);
        // A process that is walked wrongly is worth a snapshot, too: it is written, and the test fails.
        if let Err(differs) = snapshot::compare(&process, &layout, thread, &walked) {
            eprintln!("warning: the walk is wrong: {differs}");
        }
    }
    let mut memory = recording.finish();
    if let Some(home) = std::env::home_dir() {
        memory.0.values_mut().for_each(|range| blank_home(range, home.as_os_str().as_bytes()));
    }
    Ok(Captured { version: python.version_text(), layout, entry, threads, memory })
}

/// Blanks paths below this machine's user's home, which lie on stacks and beside the strings that are read. The program's own do
/// not begin so.
fn blank_home(range: &mut [u8], home: &[u8]) {
    for at in 0..range.len() {
        if range[at..].strip_prefix(home).is_some_and(|rest| rest.starts_with(b"/")) {
            range[at..].iter_mut().take_while(|byte| **byte != 0).for_each(|byte| *byte = b'x');
        }
    }
}

/// Stops a thread wherever it is, and takes its registers down in the order of `tachyon-ebpf/src/kernel.rs`.
#[cfg(target_arch = "x86_64")]
fn stop(said: SaidThread) -> Result<Thread> {
    let no = std::ptr::null_mut::<libc::c_void>;
    let done = |result: libc::c_long| match result {
        -1 => Err(std::io::Error::last_os_error()),
        _ => Ok(()),
    };
    // SAFETY: ptrace(2) with these requests touches no memory of ours.
    done(unsafe { libc::ptrace(libc::PTRACE_SEIZE, said.tid, no(), no()) })?;
    // SAFETY: as above.
    done(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, said.tid, no(), no()) })?;
    // SAFETY: waitpid(2) takes a null pointer for a status that nobody wants.
    done(unsafe { libc::waitpid(said.tid, std::ptr::null_mut(), libc::__WALL) }.into())?;
    // SAFETY: the structure consists of integers.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, which is the one of this processor.
    done(unsafe { libc::ptrace(libc::PTRACE_GETREGS, said.tid, no(), &raw mut regs) })?;
    let r = &regs;
    let frames = said.frames.into_iter().map(|SaidFrame { name, file, line, firstlineno, lasti, spans }| Told {
        name,
        file,
        line,
        firstlineno,
        lasti,
        spans,
    });
    Ok(Thread {
        pointer: r.fs_base,
        sp: r.rsp,
        registers: [
            r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, 0, 0, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15,
        ],
        main: said.main,
        frames: frames.collect(),
    })
}

#[cfg(not(target_arch = "x86_64"))]
fn stop(_said: SaidThread) -> Result<Thread> {
    bail!("snapshots are recorded on x86-64")
}
