//! Tests over live interpreters (they need ptrace rights on their own children) and hostile files.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use iced_x86::{Decoder, DecoderOptions, Mnemonic, OpKind, Register};
use tachyon_common::layout::{Layout, flags};

use super::locate::{Facts, examine};
use super::*;
use crate::types::{Pid, RemoteAddr};

/// A program that prints what it knows about itself, then waits inside three functions.
const PROGRAM: &str = "
import sys, threading, os
def outer():
    middle()
def middle():
    inner()
def inner():
    print(id(type(inner.__code__)), threading.get_ident(), os.getpid(), sys.hexversion,
          *(id(f.__code__) for f in (inner, middle, outer)), flush=True)
    sys.stdin.read()
outer()
";

/// Where `cargo xtask zoo` puts what it makes.
fn zoo() -> PathBuf {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::home_dir().map(|home| home.join(".cache/tachyon-bpf")));
    cache.unwrap_or_default().join("zoo")
}

/// The interpreters at hand: pyenv's, Debian's own, and the free-threaded ones of `cargo xtask zoo`.
fn interpreters() -> Vec<PathBuf> {
    let home = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv")));
    let versions = home.into_iter().flat_map(|home| std::fs::read_dir(home.join("versions"))).flatten().flatten();
    let mut found: Vec<PathBuf> = versions
        .filter_map(|version| {
            let name = version.file_name().into_string().ok()?;
            let minor = name.splitn(3, '.').take(2).collect::<Vec<_>>().join(".");
            Some(version.path().join("bin").join(format!("python{minor}")))
        })
        .collect();
    found.push("/usr/bin/python3.11".into());
    found.extend(["3.13t", "3.14t", "3.15t"].map(|version| {
        let name = format!("python{version}");
        let dir = if version == "3.13t" { name.clone() } else { format!("{name}-wheel") };
        zoo().join(dir).join("bin").join(name)
    }));
    found.retain(|path| path.exists());
    found.sort();
    assert!(!found.is_empty(), "no Python at hand");
    found
}

/// Whether it comes from a wheel: static, and of a patch release whose headers are in no package.
fn of_a_wheel(exe: &Path) -> bool {
    exe.starts_with(zoo()) && exe.components().any(|part| part.as_os_str().to_string_lossy().ends_with("-wheel"))
}

/// The file of the interpreter that holds `_PyRuntime`.
fn python_files() -> Vec<(PathBuf, Facts)> {
    let mut files = Vec::new();
    for exe in interpreters() {
        let lib = exe.parent().and_then(Path::parent).expect("bin lies in a folder").join("lib");
        let libraries = std::fs::read_dir(lib).into_iter().flatten().flatten().map(|entry| entry.path());
        for path in libraries.filter(|path| path.to_string_lossy().contains("libpython3.")).chain([exe]) {
            let Ok(file) = std::fs::File::open(&path) else { continue };
            match examine(file, true) {
                Ok(Facts::Other) | Err(_) => {}
                Ok(facts) => files.push((path, facts)),
            }
        }
    }
    // In another root directory, so they cannot be run from here.
    for path in ["python3.14", "python3.15"].map(|name| zoo().join("sid/usr/bin").join(name)) {
        if let Ok(facts) = std::fs::File::open(&path).map(|file| examine(file, true).expect("a good file")) {
            files.push((path, facts));
        }
    }
    files
}

struct Target {
    child: Child,
    process: RemoteProcess,
    told: Vec<u64>,
}

impl Target {
    /// Starts the program and waits until it has printed what it knows.
    fn start(command: &mut Command) -> Self {
        let command = command.args(["-c", PROGRAM]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the interpreter starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("it says something");
        let told = line.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        let process = RemoteProcess::open(Pid(child.id())).expect("it runs");
        Self { child, process, told }
    }

    fn word(&self, base: u64, offset: u32) -> u64 {
        self.process.read_u64(RemoteAddr(base + u64::from(offset))).expect("the layout leads somewhere")
    }

    /// Code objects of the main thread's stack, leaf first, and the main thread's state.
    fn stack(&self, interpreter: &Interpreter) -> (Vec<u64>, u64) {
        let layout = &interpreter.layout;
        let mut interp = self.word(interpreter.runtime, layout.runtime_interpreters_head);
        while self.word(interp, layout.interp_id) != 0 {
            interp = self.word(interp, layout.interp_next);
        }
        let tstate = self.word(interp, layout.interp_threads_head);
        let mut frame = self.word(tstate, layout.tstate_frame);
        if layout.has(flags::CFRAME) {
            frame = self.word(frame, layout.cframe_current_frame);
        }
        let mut codes = Vec::new();
        while frame != 0 {
            let owner = if Layout::present(layout.frame_owner) {
                self.process.read_array::<1>(RemoteAddr(frame + u64::from(layout.frame_owner))).expect("readable")[0]
            } else {
                0
            };
            if u32::from(owner) < layout.owner_shim_min {
                codes.push(self.word(frame, layout.frame_code) & !u64::from(layout.stackref_tag_mask));
            }
            frame = self.word(frame, layout.frame_previous);
        }
        (codes, tstate)
    }

    /// A compact ASCII string.
    fn text(&self, layout: &Layout, string: u64) -> String {
        let state = self.process.read_u32(RemoteAddr(string + u64::from(layout.unicode_state))).expect("readable");
        assert_eq!(state >> layout.unicode_kind_shift & 7, 1, "one byte a character");
        assert!(state & layout.unicode_compact_bit != 0 && state & layout.unicode_ascii_bit != 0);
        let len = usize::try_from(self.word(string, layout.unicode_length)).expect("short");
        let mut bytes = vec![0; len];
        let start = RemoteAddr(string + u64::from(layout.unicode_ascii_size));
        self.process.read_memory(start, &mut bytes).expect("readable");
        String::from_utf8(bytes).expect("ASCII")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It also ends by itself when its standard input is closed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Inspects a target and compares everything with what it said about itself.
fn check(target: &Target, cache: &mut ElfCache) -> Option<Interpreter> {
    let verdict = inspect(&target.process, cache).expect("it can be read");
    let [code_type, ident, pid, hex, codes @ ..] = &target.told[..] else { panic!("told {:?}", target.told) };
    let [major, minor, ..] = u32::try_from(*hex).expect("32 bits").to_be_bytes();
    if !SUPPORTED.iter().any(|supported| (supported.0, supported.1) == (major, minor)) {
        let Verdict::Unsupported { implementation, reason } = verdict else { panic!("{verdict:?}") };
        assert_eq!(implementation, format!("CPython {}", version::display(u32::try_from(*hex).expect("32 bits"))));
        assert_eq!(reason, Refusal::NotSupported { free_threaded: false });
        return None;
    }
    let Verdict::Python(interpreter) = verdict else { panic!("{verdict:?}") };
    let layout = &interpreter.layout;
    assert_eq!(u64::from(interpreter.version_hex()), *hex);
    assert_eq!(interpreter.code_type, *code_type);
    assert_eq!(interpreter.known_build, !of_a_wheel(&interpreter.path), "{}", interpreter.path.display());
    assert_eq!(interpreter.entering.is_some(), matches!(minor, 11 | 12), "{:?}", interpreter.entering_error);
    self_test(&target.process, &interpreter).expect("a live runtime looks as it should");
    let (stack, tstate) = target.stack(&interpreter);
    assert_eq!(stack[..3], *codes);
    assert_eq!(stack.len(), 4, "the module is the fourth frame");
    assert_eq!(target.word(tstate, layout.tstate_thread_id), *ident);
    if Layout::present(layout.tstate_native_thread_id) {
        assert_eq!(target.word(tstate, layout.tstate_native_thread_id), *pid);
    }
    for (code, name) in stack.iter().zip(["inner", "middle", "outer", "<module>"]) {
        assert_eq!(target.word(*code, layout.ob_type), *code_type);
        assert_eq!(target.text(layout, target.word(*code, layout.code_qualname)), name);
        assert_eq!(target.text(layout, target.word(*code, layout.code_filename)), "<string>");
        let table = target.word(*code, layout.code_linetable);
        assert!((1..500).contains(&target.word(table, layout.ob_size)));
    }
    let line = target.process.read_u32(RemoteAddr(stack[0] + u64::from(layout.code_firstlineno)));
    assert_eq!(line.expect("readable"), 7);
    Some(*interpreter)
}

#[test]
fn every_interpreter_at_hand_is_told_right() {
    let mut cache = ElfCache::new();
    let mut supported = 0;
    for exe in interpreters() {
        if exe.ends_with("python2.7") {
            continue;
        }
        println!("{}", exe.display());
        let mut command = Command::new(&exe);
        let target = Target::start(command.arg("-S"));
        if let Some(interpreter) = check(&target, &mut cache) {
            println!(
                "  {} at {:#x}, entering {:x?}",
                interpreter.version_text(),
                interpreter.runtime,
                interpreter.entering
            );
            assert_eq!(interpreter.static_address, exe.starts_with("/usr/bin") || of_a_wheel(&exe));
            supported += 1;
            // A second process of the same file costs no parse.
            let parsed = cache.files_parsed();
            check(&Target::start(Command::new(&exe).arg("-S")), &mut cache);
            assert_eq!(cache.files_parsed(), parsed);
        }
    }
    assert!(supported > 0, "no supported Python at hand");
}

#[test]
fn old_pythons_and_other_programs_are_told_apart() {
    let mut cache = ElfCache::new();
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cat runs");
    let process = RemoteProcess::open(Pid(child.id())).expect("it runs");
    child.stdin.as_mut().expect("piped").write_all(b"loaded\n").expect("it reads");
    BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut String::new()).expect("it answers");
    assert_eq!(inspect(&process, &mut cache).expect("it can be read"), Verdict::NotPython);
    // Also remembered: nothing is read twice.
    let parsed = cache.files_parsed();
    assert_eq!(inspect(&process, &mut cache).expect("it can be read"), Verdict::NotPython);
    assert_eq!(cache.files_parsed(), parsed);
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    assert!(inspect(&process, &mut cache).expect_err("it is gone").is_gone());
    if let Some(old) = interpreters().into_iter().find(|exe| exe.ends_with("python2.7")) {
        let target = Target::start(Command::new(old).args(["-S", "-c", "import sys; print(1); sys.stdin.read()"]));
        let verdict = inspect(&target.process, &mut cache).expect("it can be read");
        let Verdict::Unsupported { implementation, reason } = verdict else { panic!("{verdict:?}") };
        assert!(implementation.starts_with("CPython 2.7"), "{implementation}");
        assert_eq!(
            reason.to_string(),
            "supported are 3.8, 3.9, 3.10, 3.11, 3.12, 3.13, 3.13t, 3.14, 3.14t, 3.15, 3.15t"
        );
    }
    for (_, facts) in python_files() {
        if let Facts::Refused { implementation, reason } = facts {
            assert!(matches!(reason, Refusal::NotSupported { .. }), "{implementation}: {reason}");
        }
    }
}

#[test]
fn only_what_is_no_python_is_not_looked_up_again_for_a_while() {
    let mut cache = ElfCache::new();
    let mut sleep = Command::new("sleep").arg("60").spawn().expect("sleep runs");
    let process = RemoteProcess::at(Pid(sleep.id()));
    let maps = loop {
        let maps = process.maps().expect("its own child can be read");
        if maps.iter().any(|mapping| mapping.name() == "sleep") {
            break maps;
        }
    };
    let own = maps.iter().find(|mapping| mapping.name() == "sleep").expect("just seen");
    let elsewhere = Mapping { path: MappedPath::File { path: b"/elsewhere".to_vec(), deleted: false }, ..own.clone() };
    let now = Instant::now();
    assert!(!cache.is_known(own, true, now), "nobody has looked");
    assert_eq!(inspect(&process, &mut cache).expect("readable"), Verdict::NotPython);
    assert!(
        cache.is_known(own, true, now) && !cache.is_known(own, false, now) && !cache.is_known(&elsewhere, true, now)
    );
    let libc = maps.iter().find(|mapping| mapping.name().starts_with("libc") && mapping.executable);
    if let Some((libc, path)) = libc.and_then(|libc| libc.file_path().map(|path| (libc, path.as_os_str()))) {
        assert!(cache.is_no_python(libc.dev, libc.inode, path, now), "as the kernel tells that it is mapped");
        assert!(!cache.is_no_python(libc.dev, libc.inode + 1, path, now));
    }
    let python3 = interpreters().into_iter().find(|exe| !exe.ends_with("python2.7")).expect("a Python 3 is at hand");
    let python = Target::start(Command::new(python3).arg("-S"));
    let twice = [(); 2].map(|()| inspect(&python.process, &mut cache).expect("readable"));
    assert!(twice[0] != Verdict::NotPython && twice[0] == twice[1], "{twice:?}");
    assert!(!cache.is_known(own, true, now + Duration::from_secs(11)), "the inode may be another file's by then");
    sleep.kill().and_then(|()| sleep.wait()).expect("it ends");
}

#[test]
fn deleted_renamed_and_chrooted_interpreters_are_found() {
    let Some(exe) = interpreters().into_iter().find(|exe| exe.starts_with("/usr/bin")) else {
        crate::not_run::not_run("a static /usr/bin/python3.11");
        return;
    };
    let dir = tempfile::tempdir().expect("a folder");
    let copy = dir.path().join("renamed program");
    std::fs::copy(&exe, &copy).expect("copied");
    let target = Target::start(Command::new(&copy).args(["-S", "-E"]));
    let mut cache = ElfCache::new();
    let found = check(&target, &mut cache).expect("3.11 is supported");
    assert_eq!(found.path, copy);
    std::fs::remove_file(&copy).expect("removed");
    let found = check(&target, &mut ElfCache::new()).expect("a deleted file is found through map_files");
    assert_eq!(found.path, copy);
}

/// A separate root folder holds the interpreter and its libraries; the kernel shows other paths than those inside.
#[test]
fn an_interpreter_in_a_chroot_is_found() {
    use std::os::unix::process::CommandExt as _;

    let Some(exe) = interpreters().into_iter().find(|exe| exe.starts_with("/usr/bin")) else {
        crate::not_run::not_run("a static /usr/bin/python3.11");
        return;
    };
    if !nix::unistd::geteuid().is_root() {
        crate::not_run::not_run("root, for chroot");
        return;
    }
    let listed = Command::new("ldd").arg(&exe).output().expect("ldd runs").stdout;
    let listed = String::from_utf8(listed).expect("text");
    let libraries = listed.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    let root = tempfile::tempdir().expect("a folder");
    for file in libraries.chain([exe.clone()]) {
        let copy = root.path().join(file.strip_prefix("/").expect("absolute"));
        std::fs::create_dir_all(copy.parent().expect("in a folder")).expect("made");
        std::fs::copy(&file, &copy).expect("copied");
    }
    let lib = PathBuf::from("usr/lib/python3.11");
    std::fs::create_dir_all(root.path().join("usr/lib")).expect("made");
    let copied = Command::new("cp").arg("-rL").arg(Path::new("/").join(&lib)).arg(root.path().join("usr/lib")).status();
    assert!(root.path().join(&lib).join("os.py").exists(), "{copied:?}");
    let inside = root.path().to_path_buf();
    let mut command = Command::new(&exe);
    command.args(["-S", "-E"]);
    // SAFETY: between fork and exec only chroot(2) and chdir(2) are called, with a path allocated before.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::chroot(&inside)?;
            Ok(nix::unistd::chdir("/")?)
        });
    }
    let target = Target::start(&mut command);
    check(&target, &mut ElfCache::new()).expect("3.11 is supported");
    // Without the right to use map_files: through the path, in both ways in which it may have to be read.
    let maps = target.process.maps().expect("readable");
    let mut mapping = maps.into_iter().find(|map| map.executable && map.file_path().is_some()).expect("it runs");
    let found = target.process.mapped_file(&mapping).expect("through map_files").identity();
    (mapping.start, mapping.end) = (0, 1);
    assert_eq!(target.process.mapped_file(&mapping).expect("through its path").identity(), found);
    let relative = mapping.file_path().and_then(|path| path.strip_prefix(root.path()).ok()).map(Path::to_path_buf);
    let relative = relative.expect("the kernel shows the path from outside");
    let path = Path::new("/").join(relative).into_os_string().into_encoded_bytes();
    mapping.path = MappedPath::File { path, deleted: false };
    assert_eq!(target.process.mapped_file(&mapping).expect("below its root").identity(), found);
}

#[test]
fn published_and_built_in_layouts_agree() {
    // `take_published` refuses any difference: it is enough that a layout was built.
    for (path, facts) in python_files() {
        if let Facts::Python(python) = facts {
            // A built-in JIT (Debian's 3.15) makes the structures longer than the headers say: `_Py_TIER2` is a compiler flag, not
            // one of `pyconfig.h`.
            let known = python.known_build || python.layout.minor_version() >= (3, 15) || of_a_wheel(&path);
            assert!(known, "{}: renew the table with its headers", path.display());
        }
    }
}

/// The window holds no store into `tstate->cframe` (it starts after it), ends after a store, and reads as straight-line
/// code.
#[test]
fn the_entering_window_is_where_the_stores_are() {
    for (path, facts) in python_files() {
        let Facts::Python(python) = facts else { continue };
        let Some(window) = &python.entering else { continue };
        let window = window.clone().unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (cframe, evaluator) = (window.cframe_offset.expect("on its stack"), window.evaluator.clone());
        assert!(
            cframe < 4096 && evaluator.end - evaluator.start > 30_000,
            "{}: {cframe} {evaluator:x?}",
            path.display()
        );
        let window = window.addresses;
        let bytes = std::fs::read(&path).expect("readable");
        let elf = crate::remote::elf::Elf::parse(&bytes[..]).expect("a good file");
        let entry = elf.dynamic_symbol("_PyEval_EvalFrameDefault").expect("a good table").expect("exported").vaddr;
        assert!(entry < window.start && window.end - entry < 512, "{}", path.display());
        let mut code = vec![0; usize::try_from(window.end - entry).expect("small")];
        elf.read_vaddr(entry, &mut code).expect("in the file");
        let instructions: Vec<_> = Decoder::with_ip(64, &code, entry, DecoderOptions::NONE).iter().collect();
        let publishing =
            instructions.iter().find(|of| of.next_ip() == window.start).expect("an instruction ends there");
        assert_eq!((publishing.mnemonic(), publishing.op0_kind()), (Mnemonic::Mov, OpKind::Memory));
        assert_eq!(publishing.memory_displacement64(), u64::from(python.layout.tstate_frame));
        let filling = instructions.last().expect("not empty");
        assert_eq!((filling.next_ip(), filling.op0_kind()), (window.end, OpKind::Memory));
        println!("{}: {:#x}..{:#x}, filled by `{:?}`", path.display(), window.start, window.end, filling.mnemonic());
    }
}

/// Each build of 3.11 and 3.12 links a frame that C calls before it fills its `cframe`, and stores into that at a dozen other
/// places. Each place of an unlinked frame begins after such a store.
#[test]
fn frames_are_linked_late_at_known_places() {
    for (path, facts) in python_files() {
        let Facts::Python(python) = facts else { continue };
        let Some(Ok(window)) = &python.entering else { continue };
        let places = window.unlinked.as_ref().unwrap_or_else(|| panic!("{}: none", path.display()));
        assert!(python.layout.has(flags::LINKS_FIRST), "{}", path.display());
        assert!((3..=20).contains(&places.len()), "{}: {places:x?}", path.display());
        let bytes = std::fs::read(&path).expect("readable");
        let elf = crate::remote::elf::Elf::parse(&bytes[..]).expect("a good file");
        let current_frame = window.cframe_offset.expect("on its stack") + python.layout.cframe_current_frame;
        for place in places {
            let mut code = vec![0; usize::try_from(place.end - window.evaluator.start).expect("small")];
            elf.read_vaddr(window.evaluator.start, &mut code).expect("in the file");
            let decoder = Decoder::with_ip(64, &code, window.evaluator.start, DecoderOptions::NONE);
            let before = decoder.into_iter().find(|of| of.next_ip() == place.start).expect("an instruction ends there");
            let store = (before.op0_kind(), before.memory_base(), before.memory_displacement64());
            assert_eq!(
                store,
                (OpKind::Memory, Register::RSP, u64::from(current_frame)),
                "{}: {place:x?}",
                path.display()
            );
            let distance = place.start - window.evaluator.start;
            let may = [distance.wrapping_sub(1), distance, distance + place.end - place.start];
            assert!(python.layout.may_be_unlinked(may[1]), "{}: {place:x?}", path.display());
            assert!(!python.layout.may_be_unlinked(may[0]) && !python.layout.may_be_unlinked(may[2]));
        }
        println!(
            "{}: {} places, {} bytes",
            path.display(),
            places.len(),
            places.iter().map(|it| it.end - it.start).sum::<u64>()
        );
    }
}

#[test]
fn mutated_files_end_quickly_and_are_never_believed() {
    let mut mutated = 0;
    for (path, facts) in python_files() {
        if let Facts::Python(good) = facts
            && good.layout.minor_version() >= (3, 13)
        {
            mutate(&path, &good);
            mutated += 1;
        }
    }
    if mutated == 0 {
        crate::not_run::not_run("a CPython of 3.13 or newer");
    }
}

fn mutate(path: &Path, good: &super::locate::PythonFile) {
    let whole = std::fs::read(path).expect("readable");
    let elf = crate::remote::elf::Elf::parse(&whole[..]).expect("a good file");
    let load = elf.loads().iter().find(|load| (load.vaddr..load.vaddr + load.file_size).contains(&good.runtime));
    let load = load.expect("_PyRuntime has initial data");
    let start = usize::try_from(good.runtime - load.vaddr + load.offset).expect("small");
    // Every byte of the debug offsets: either it is refused or the number is not one that is used.
    for at in start..start + debug_offsets::published_bytes(good.layout.version_hex) {
        let mut bytes = Mutated { whole: &whole, at: at as u64, value: whole[at] ^ 0x41 };
        for value in [whole[at] ^ 0x41, whole[at].wrapping_add(8), 0xff] {
            bytes.value = value;
            match examine(&bytes, false).expect("its headers are good") {
                Facts::Python(python) => assert_eq!(python.layout, good.layout, "byte {}", at - start),
                Facts::Refused { .. } => {}
                Facts::Other => panic!("_PyRuntime is still there"),
            }
        }
    }
    for len in (0..whole.len()).step_by(whole.len() / 199) {
        let _ = examine(&whole[..len], true);
    }
}

/// A file with one byte changed, without copying all others.
struct Mutated<'a> {
    whole: &'a [u8],
    at: u64,
    value: u8,
}

impl crate::remote::elf::ReadAt for &Mutated<'_> {
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> std::io::Result<()> {
        self.whole.read_exact_at(offset, into)?;
        let index = self.at.checked_sub(offset).and_then(|index| usize::try_from(index).ok());
        if let Some(byte) = index.and_then(|index| into.get_mut(index)) {
            *byte = self.value;
        }
        Ok(())
    }

    fn len_bytes(&self) -> std::io::Result<u64> {
        self.whole.len_bytes()
    }
}
