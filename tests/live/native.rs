//! Native stacks unwound in the kernel, from interpreters without frame pointers that are in a known C function.
//!
//! These tests load the kernel side themselves and read its ring: addresses, before any merge.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};
use tachyon::events::{Event, Events};
use tachyon::inspect::{self, ElfCache, Verdict};
use tachyon::kernel::{Kernel, Options};
use tachyon::remote::{Mapping, RemoteProcess};
use tachyon::types::Pid;
use tachyon::unwind::UnwindTables;
use tachyon_common::event::status;
use tachyon_common::process::{ProcessEntry, flags};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{NativeWalk, StackBuffer};
use tachyon_tests::unwind::{Addresses, PlainTables};
use tachyon_tests::{Interpreter, Target, live};

/// Names of functions by address, of all files that a process has mapped.
struct Names {
    files: Vec<(Mapping, Vec<Function>)>,
}

/// First address, first one past it, name.
type Function = (u64, u64, String);

impl Names {
    fn of(process: &RemoteProcess) -> Self {
        use object::{Object as _, ObjectSegment as _, ObjectSymbol as _};
        let maps = process.maps().expect("the target runs");
        let mut files = Vec::new();
        for mapping in maps.into_iter().filter(|mapping| mapping.executable) {
            let mut symbols = Vec::new();
            let bytes = mapping.file_path().map(|path| std::fs::read(path).expect("a mapped file can be read"));
            if let Some(bytes) = bytes {
                let file = object::File::parse(&*bytes).expect("code lies in ELF files");
                let holds = |segment: &object::Segment<'_, '_>| {
                    let (offset, size) = segment.file_range();
                    (offset & !0xfff..offset + size).contains(&mapping.offset)
                };
                let segment = file.segments().filter(holds).last().expect("a mapping is of a segment");
                let bias = mapping.start.wrapping_sub(mapping.offset) + segment.file_range().0;
                let bias = bias.wrapping_sub(segment.address());
                for symbol in file.symbols().chain(file.dynamic_symbols()).filter(|symbol| symbol.size() > 0) {
                    let start = bias.wrapping_add(symbol.address());
                    symbols.push((start, start + symbol.size(), symbol.name().unwrap_or_default().to_owned()));
                }
            }
            files.push((mapping, symbols));
        }
        Self { files }
    }

    /// The names at each of the addresses that occur.
    fn of_all<'a>(&'a self, stacks: &[Stack]) -> HashMap<u64, Vec<&'a str>> {
        let addresses: BTreeSet<u64> = stacks.iter().flat_map(|stack| stack.addresses.iter().copied()).collect();
        addresses.into_iter().map(|address| (address, self.at(address))).collect()
    }

    /// All names of the function at an address, and the file's name.
    fn at(&self, address: u64) -> Vec<&str> {
        let Some((mapping, symbols)) = self.files.iter().find(|(mapping, _)| mapping.contains(address)) else {
            return vec!["?"];
        };
        let here = symbols.iter().filter(|(start, end, _)| (*start..*end).contains(&address));
        let mut names: Vec<&str> = here.map(|(.., name)| name.as_str()).collect();
        let file = mapping.file_path().and_then(|path| path.file_name()?.to_str());
        names.push(file.unwrap_or("[vdso]"));
        names
    }
}

/// One sample's native stack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stack {
    pub(super) stop: StopReason,
    status: u32,
    pub(super) addresses: Vec<u64>,
}

/// Samples a program, by the library's own parts.
pub(super) struct Sampling {
    kernel: Kernel,
    take: Box<dyn FnMut() -> Vec<Stack>>,
}

impl Sampling {
    /// Begins, with what the program has mapped now.
    pub(super) fn start(pid: u32) -> Self {
        const IMAGE: u64 = 7;
        let options = Options {
            interval: Duration::from_micros(1001),
            unwind_memory: Some(8 << 20),
            ring_bytes: 1 << 22,
            ..Options::default()
        };
        let process = RemoteProcess::open(Pid(pid)).expect("the target runs");
        let verdict = inspect::inspect(&process, &mut ElfCache::default()).expect("it can be inspected");
        let Verdict::Python(interpreter) = verdict else { panic!("pid {pid} is a CPython") };
        let mut kernel = Kernel::load(&options).expect("the object is accepted");
        let layout = kernel.layout_number(&interpreter.layout.complete()).expect("the first layout");
        let entry = ProcessEntry {
            image: IMAGE,
            instance: IMAGE,
            runtime: interpreter.runtime,
            code_type: interpreter.code_type,
            none: interpreter.none,
            layout,
            flags: flags::SELECTED | flags::PYTHON,
            ..ProcessEntry::default()
        };
        let mut native = kernel.take_native().expect("nobody has taken them");
        let mut tables = native.tables();
        let maps = process.maps().expect("it is alive");
        let space = tables.map(&process, &maps, IMAGE, &mut native).expect("its files have tables");
        assert!(tables.refusals().next().is_none(), "{:?}", tables.refusals().collect::<Vec<_>>());
        native.set_space(pid, &space).expect("there is room");
        kernel.set_process(pid, &entry).expect("there is room");
        let mut ring = kernel.take_samples().expect("nobody has taken it");
        let event = kernel.attach_sampling(options.interval).expect("the event attaches");
        println!("{event:?}, {} unwind rows", tables.rows_used());
        let take = move || {
            // The tables are in use as long as there are samples.
            let _tables = &native;
            let mut stacks = Vec::new();
            while let Some(item) = ring.next() {
                for event in Events::new(&item) {
                    let Event::Sample(record, frames) = event.expect("records are whole") else { continue };
                    stacks.push(Stack {
                        stop: StopReason::from_number(record.native_stop).expect("a known reason"),
                        status: record.status,
                        addresses: frames.native().collect(),
                    });
                }
            }
            stacks
        };
        Self { kernel, take: Box::new(take) }
    }

    /// What has arrived since the last call.
    pub(super) fn take(&mut self) -> Vec<Stack> {
        (self.take)()
    }
}

/// Samples of a program for some seconds.
fn sample(pid: u32, seconds: u64) -> Vec<Stack> {
    let mut sampling = Sampling::start(pid);
    let mut stacks = Vec::new();
    let end = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(50));
        stacks.extend(sampling.take());
    }
    sampling.kernel.detach_sampling();
    stacks.extend(sampling.take());
    stacks
}

/// Whether these names are in the stack in this order, leaf first.
fn in_order(names: &HashMap<u64, Vec<&str>>, stack: &Stack, wanted: &[&str]) -> bool {
    let mut wanted = wanted.iter().peekable();
    for &address in &stack.addresses {
        if wanted.peek().is_some_and(|next| names[&address].contains(next)) {
            wanted.next();
        }
    }
    wanted.peek().is_none()
}

/// Every stack ends where the thread began and has the functions that the program is certainly in.
fn known_state(interpreter: &str, state: &str, wanted: &[&str]) {
    let Some(_live) = live() else { return };
    // Without instructions made for SHA: the loop that is left keeps its frame in a register of its own.
    let plain = [("OPENSSL_ia32cap", ":~0x20000000")];
    let target = Target::start_in(&Interpreter::named(interpreter), "native_states.py", &[state], &plain);
    let names = Names::of(&RemoteProcess::open(Pid(target.pid())).expect("the target runs"));
    let stacks = sample(target.pid(), 3);
    assert!(stacks.len() > 500, "{} samples", stacks.len());
    let names = names.of_all(&stacks);
    let mut reasons: BTreeMap<&str, usize> = BTreeMap::new();
    let (mut whole, mut right) = (0, 0);
    let bottom = ["Py_BytesMain", "__libc_start_main"];
    for stack in &stacks {
        *reasons.entry(stack.stop.name()).or_default() += 1;
        if stack.stop != StopReason::Complete {
            continue;
        }
        whole += 1;
        let shown = || {
            let lines = stack.addresses.iter().map(|&at| format!("{at:x} {:?}", names[&at]));
            lines.collect::<Vec<_>>().join("\n")
        };
        assert!(in_order(&names, stack, &bottom), "a whole stack begins in main:\n{}", shown());
        assert_eq!(stack.status & status::BY_FRAME_POINTER, 0, "there are tables for everything:\n{}", shown());
        right += usize::from(in_order(&names, stack, &[wanted, &bottom].concat()));
    }
    println!("{interpreter} {state}: {reasons:?}, {right} of {} with {wanted:?}", stacks.len());
    assert!(whole * 1000 >= stacks.len() * 995, "{reasons:?}");
    // The rest is the loop around the call.
    assert!(right * 2 > stacks.len(), "{right} of {} have {wanted:?}", stacks.len());
}

/// Registers of a thread that is stopped.
fn registers(pid: u32) -> (u64, u64, u64) {
    let pid = i32::try_from(pid).expect("pids are positive");
    let none = std::ptr::null_mut::<libc::c_void>();
    // SAFETY: attaches to a child of this process, and touches no memory of ours.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, none, none) }, 0, "a child can be attached to");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, none, none) }, 0);
    let mut status = 0;
    // SAFETY: `status` is valid for writes.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) }, pid);
    // SAFETY: integers only, for which zeros are a value.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    // SAFETY: `regs` is valid for writes, and the thread is stopped.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_GETREGS, pid, none, &raw mut regs) }, 0);
    // SAFETY: as for attaching.
    assert_eq!(unsafe { libc::ptrace(libc::PTRACE_DETACH, pid, none, none) }, 0);
    (regs.rip, regs.rsp, regs.rbp)
}

/// A signal does not act at once, and a process that has not stopped yet runs on when it is detached from.
fn wait_until_stopped(pid: u32) {
    let stat = format!("/proc/{pid}/stat");
    while !std::fs::read_to_string(&stat).expect("the target is there").contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A process's stack as gdb sees it: the instruction pointer of each frame, leaf first. `then` is what gdb does before
/// it detaches.
pub(super) fn by_gdb(pid: u32, then: &str) -> Vec<u64> {
    const SCRIPT: &str = "python\nframe = gdb.newest_frame()\nwhile frame:\n    if frame.type() not in (gdb.INLINE_FRAME, gdb.TAILCALL_FRAME): \
        print('pc %x' % frame.pc())\n    frame = frame.older()\nend\n";
    let script = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(script.path(), SCRIPT).expect("it can be written");
    let mut gdb = std::process::Command::new("gdb");
    gdb.args(["-nx", "-batch", "-iex", "set debuginfod enabled off", "-iex", "set auto-load off"]);
    gdb.args(["-ex", "set backtrace past-main on", "-p", &pid.to_string(), "-x"]).arg(script.path());
    if !then.is_empty() {
        gdb.args(["-ex", then]);
    }
    let output = gdb.output().expect("gdb is there (apt-get install gdb)");
    let text = String::from_utf8_lossy(&output.stdout);
    let frames: Vec<u64> =
        text.lines().filter_map(|line| u64::from_str_radix(line.strip_prefix("pc ")?, 16).ok()).collect();
    assert!(!frames.is_empty(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    frames
}

/// At random moments the kernel's walk, run over the stopped process's memory, finds the frames that gdb finds.
fn same_as_gdb(interpreter: &str, state: &str) {
    let Some(_live) = live() else { return };
    let target = Target::start_with(&Interpreter::named(interpreter), "native_states.py", &[state]);
    let process = RemoteProcess::open(Pid(target.pid())).expect("the target runs");
    std::thread::sleep(Duration::from_millis(300));
    let mut memory = PlainTables::default();
    let mut tables = UnwindTables::new(1 << 20, 1 << 12);
    let maps = process.maps().expect("it is alive");
    let space = tables.map(&process, &maps, 0, &mut memory).expect("its files have tables");
    let signal = |number| {
        let pid = i32::try_from(target.pid()).expect("pids are positive");
        // SAFETY: kill(2) touches no memory; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, number) }, 0);
    };
    // libffi makes the code that C calls back, in memory without a name: it has no rules, and gdb guesses.
    let is_made = |ip: u64| maps.iter().any(|mapping| mapping.contains(ip) && mapping.name().is_empty());
    let (mut moment, mut compared) = (0, 0);
    while compared < MOMENTS {
        assert!(moment < 10 * MOMENTS, "{interpreter} {state}: hardly ever out of code that was made");
        std::thread::sleep(Duration::from_micros(10_000 + 137 * moment));
        moment += 1;
        signal(libc::SIGSTOP);
        wait_until_stopped(target.pid());
        let (ip, sp, fp) = registers(target.pid());
        if is_made(ip) {
            signal(libc::SIGCONT);
            continue;
        }
        compared += 1;
        let mut walk = NativeWalk::start(ip, sp, fp);
        let (mut addresses, mut stack) = (Addresses::default(), StackBuffer::default());
        let stop = (0..20).find_map(|_| walk.step(&process, &memory, space, &mut stack, &mut addresses));
        let gdb = by_gdb(target.pid(), "");
        signal(libc::SIGCONT);
        // gdb shows return addresses.
        let found: Vec<u64> = (0..).zip(&addresses.0).map(|(at, address)| address + u64::from(at > 0)).collect();
        assert_eq!(
            (&found, stop),
            (&gdb, Some(StopReason::Complete)),
            "{interpreter} {state}: {found:x?}, gdb: {gdb:x?}"
        );
    }
}

/// Moments at which a program is compared with gdb.
const MOMENTS: u64 = 5;

macro_rules! known_states {
    ($($interpreter:ident)+) => {$(
        mod $interpreter {
            const NAME: &str = stringify!($interpreter);

            #[test]
            fn gdb_finds_the_same_frames() {
                for state in ["qsort", "deflate", "syscall"] {
                    super::same_as_gdb(NAME, state);
                }
            }

            #[test]
            fn a_callback_from_qsort() {
                super::known_state(NAME, "qsort", &["qsort_r", "ffi_call"]);
            }

            #[test]
            fn zlib_without_the_gil() {
                super::known_state(NAME, "deflate", &["deflate"]);
            }

            #[test]
            fn the_clock_in_the_vdso() {
                super::known_state(NAME, "clock", &["PyObject_Vectorcall"]);
            }

            #[test]
            fn a_loop_written_by_hand() {
                super::known_state(NAME, "sha1", &["SHA1_Update", "_PyEval_EvalFrameDefault"]);
            }

            #[test]
            fn inside_of_a_system_call() {
                super::known_state(NAME, "syscall", &["getppid"]);
            }
        }
    )+};
}

known_states!(debian_3_11);
