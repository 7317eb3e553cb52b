//! Programs that say where their functions are, with their symbols in each of the places that are searched.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::*;
use crate::types::Pid;

#[path = "tests/crafted.rs"]
mod crafted;

const SOURCE: &str = r#"#include <stdio.h>
#include <unistd.h>
static void *spot;
static inline __attribute__((always_inline)) int inlined(int x) {
#ifdef __x86_64__
    __asm__ volatile("lea 0(%%rip), %0" : "=r"(spot)); /* line 6 */
#else
    __asm__ volatile("adr %0, ." : "=r"(spot));
#endif
    return x * getpid();
}
__attribute__((noinline)) int outer(int x) {
    return inlined(x) + 1; /* line 13 */
}
__attribute__((noinline)) static int hidden(int x) { return outer(x) * 3; }
int main(void) {
    hidden(2);
    printf("%p %p\n", spot, (void *)hidden);
    fflush(stdout);
    getchar();
    return 0;
}
"#;

/// Line of the instruction in `inlined`.
const SPOT: u32 = if cfg!(target_arch = "x86_64") { 6 } else { 8 };

struct Program {
    folder: tempfile::TempDir,
    path: PathBuf,
}

impl Program {
    /// Compiles it with DWARF and these additional flags.
    fn compile(flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, path) = (folder.path().join("spot.c"), folder.path().join("spot"));
        std::fs::write(&source, SOURCE).expect("written");
        tool("cc", &[&["-g", "-O1", "-rdynamic", "-o"], flags].concat(), &[&path, &source]);
        Self { folder, path }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self) -> Running {
        let mut child =
            Command::new(&self.path).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("it tells");
        let mut numbers = line
            .split_whitespace()
            .map(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("an address"));
        let (spot, hidden) = (numbers.next().expect("two"), numbers.next().expect("two"));
        Running { process: RemoteProcess::at(Pid(child.id())), child, spot, hidden }
    }
}

/// Runs a tool of the C compiler's kit. The first flag may need the first path directly after it.
fn tool(program: &str, flags: &[&str], paths: &[&Path]) {
    let mut command = Command::new(program);
    match flags.iter().position(|flag| *flag == "-o") {
        Some(at) => {
            command.args(&flags[..=at]).arg(paths[0]).args(&flags[at + 1..]).args(&paths[1..]);
        }
        None => {
            command.args(flags).args(paths);
        }
    }
    let done = command.output().unwrap_or_else(|error| panic!("{program} is part of the C compiler's kit: {error}"));
    assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
}

struct Running {
    child: Child,
    process: RemoteProcess,
    spot: u64,
    hidden: u64,
}

impl Running {
    fn pin(&self, symbols: &NativeSymbols, address: u64) -> (Pinned, u64) {
        let maps = self.process.maps().expect("it lives");
        let mapping = maps.iter().find(|mapping| mapping.contains(address)).expect("mapped");
        let file = symbols.pin(&self.process, mapping).expect("it is a file");
        (file, address - mapping.start + mapping.offset)
    }

    fn name(&self, symbols: &NativeSymbols, address: u64, detail: Detail) -> NativeName {
        let (file, offset) = self.pin(symbols, address);
        symbols.name(&file, offset, detail, None)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended cannot be killed, which is just as well.
        let _ended = self.child.kill();
        let _status = self.child.wait();
    }
}

fn frames(name: &NativeName) -> Vec<(&str, &str, u32)> {
    let frame = |frame: &'_ SourceFrame| {
        let file = frame.file.as_deref().map_or("", |file| file.rsplit('/').next().unwrap_or_default());
        (frame.function.as_deref().unwrap_or_default().to_owned(), file.to_owned(), frame.line.unwrap_or(0))
    };
    let owned: Vec<_> = name.lines.iter().map(frame).collect();
    owned.into_iter().map(|(function, file, line)| (&*function.leak(), &*file.leak(), line)).collect()
}

#[test]
fn lines_and_inlined_functions_come_from_dwarf() {
    for flags in [&[][..], &["-no-pie"], &["-gz=zlib"], &["-gdwarf-4"]] {
        let running = Program::compile(flags).start();
        let symbols = NativeSymbols::default();
        let name = running.name(&symbols, running.spot, Detail::Lines);
        assert_eq!((name.object.as_str(), name.function.as_deref()), ("spot", Some("outer")), "{flags:?}");
        assert_eq!(frames(&name), [("inlined", "spot.c", SPOT), ("outer", "spot.c", 13)], "{flags:?}");
        let name = running.name(&symbols, running.hidden, Detail::Function);
        assert_eq!((name.function.as_deref(), name.function_vaddr), (Some("hidden"), Some(name.vaddr)));
        assert!(name.lines.is_empty());
        assert_eq!(symbols.files_held(), 1);
    }
}

#[test]
fn a_stripped_file_has_the_names_it_exports() {
    let program = Program::compile(&[]);
    tool("strip", &[], &[&program.path]);
    let running = program.start();
    let symbols = NativeSymbols::default();
    let name = running.name(&symbols, running.spot, Detail::Lines);
    assert_eq!((name.function.as_deref(), name.lines.len()), (Some("outer"), 0));
    // The preceding function is not the answer.
    assert_eq!(running.name(&symbols, running.hidden, Detail::Function).function, None);
}

#[test]
fn a_debug_file_is_found_by_its_link_and_only_the_right_one() {
    for build_id in ["-Wl,--build-id=sha1", "-Wl,--build-id=none"] {
        let program = Program::compile(&[build_id]);
        let debug = program.file("spot.debug");
        tool("objcopy", &["--only-keep-debug"], &[&program.path, &debug]);
        tool("strip", &[], &[&program.path]);
        tool("objcopy", &[&format!("--add-gnu-debuglink={}", debug.display())], &[&program.path]);
        let running = program.start();
        let name = running.name(&NativeSymbols::default(), running.hidden, Detail::Lines);
        assert_eq!(frames(&name), [("hidden", "spot.c", 15)], "{build_id}");
        let other = Program::compile(&[build_id, "-O0"]);
        tool("objcopy", &["--only-keep-debug"], &[&other.path, &debug]);
        let name = running.name(&NativeSymbols::default(), running.hidden, Detail::Lines);
        assert_eq!(name.function, None, "{build_id}: another build's debug file");
    }
}

/// With its code sections, and as Fedora's `find-debuginfo` makes it: without them, so that its headers point past its end.
#[test]
fn a_table_packed_into_the_file_is_read() {
    for without_code in [false, true] {
        let program = Program::compile(&[]);
        let mini = program.file("mini");
        let whole = program.file("whole");
        let flags: &[&str] = if without_code { &["--only-keep-debug"] } else { &[] };
        tool("objcopy", flags, &[&program.path, &whole]);
        tool("objcopy", &["--strip-debug"], &[&whole, &mini]);
        packed_table_is_read(&program, &mini);
    }
}

fn packed_table_is_read(program: &Program, mini: &Path) {
    let packed = program.file("mini.xz");
    let mut writer =
        lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(6)).expect("a preset that exists");
    writer.write_all(&std::fs::read(mini).expect("there")).expect("memory can be written");
    std::fs::write(&packed, writer.finish().expect("memory can be written")).expect("written");
    tool("strip", &[], &[&program.path]);
    tool("objcopy", &[&format!("--add-section=.gnu_debugdata={}", packed.display())], &[&program.path]);
    let running = program.start();
    let name = running.name(&NativeSymbols::default(), running.hidden, Detail::Function);
    assert_eq!(name.function.as_deref(), Some("hidden"));
}

#[test]
fn names_outlive_the_process_and_the_file() {
    let program = Program::compile(&[]);
    let running = program.start();
    std::fs::remove_file(&program.path).expect("deleted");
    let symbols = NativeSymbols::default();
    let (file, offset) = running.pin(&symbols, running.spot);
    drop(running);
    drop(program);
    let name = symbols.name(&file, offset, Detail::Lines, None);
    assert_eq!(frames(&name), [("inlined", "spot.c", SPOT), ("outer", "spot.c", 13)]);
}

#[test]
fn tables_are_let_go_and_read_again() {
    let (one, other) = (Program::compile(&[]).start(), Program::compile(&["-no-pie"]).start());
    let symbols = NativeSymbols::with_budget(1);
    for _ in 0..3 {
        for running in [&one, &other] {
            let name = running.name(&symbols, running.spot, Detail::Lines);
            assert_eq!(frames(&name).len(), 2);
            let kept = lock(&symbols.held).files.values().filter(|pinned| lock(&pinned.file).bytes() > 0).count();
            assert_eq!(kept, 1, "only the table in use is kept");
        }
    }
    assert_eq!(symbols.files_held(), 2);
}

#[test]
fn the_vdso_has_names() {
    let own = RemoteProcess::at(Pid(std::process::id()));
    let maps = own.maps().expect("own maps");
    let vdso = maps.iter().find(|mapping| mapping.path == MappedPath::Special(b"[vdso]".to_vec())).expect("a vdso");
    let symbols = NativeSymbols::default();
    let file = symbols.pin(&own, vdso).expect("it has symbols");
    let mut names: Vec<_> = (0..vdso.end - vdso.start)
        .step_by(16)
        .filter_map(|offset| symbols.name(&file, offset, Detail::Lines, None).function)
        .collect();
    names.dedup();
    let wanted = if cfg!(target_arch = "x86_64") { "clock_gettime" } else { "__kernel_clock_gettime" };
    assert!(names.iter().any(|name| name == wanted), "{names:?}");
}

/// One unit on its own says the same as all of them together; units that need each other are parsed together.
#[test]
fn a_unit_by_itself_tells_all() {
    let second = "__attribute__((noinline)) int second(int x) { for (int i = 0; i < x; i++) x ^= i; return x; }\n";
    let compare = |flags: &[&str]| {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name| folder.path().join(name);
        let [first, other, path] = [file("spot.c"), file("second.c"), file("both")];
        std::fs::write(&first, SOURCE.replace("hidden(2);", "int second(int); hidden(second(2));")).expect("written");
        std::fs::write(&other, second).expect("written");
        tool("cc", &[&["-g", "-O1", "-o"], flags].concat(), &[&path, &first, &other]);
        let file = Arc::new(std::fs::File::open(&path).expect("there").into());
        let elf = Elf::parse(&*file).expect("good");
        let mut lines = Lines::of_file(&file).expect("it has DWARF");
        let mut whole = Lines::whole(&elf).expect("it has DWARF");
        let (mut named, mut inlined) = (std::collections::BTreeSet::new(), 0);
        for load in elf.loads().iter().filter(|load| load.executable) {
            for vaddr in load.vaddr..load.vaddr + load.mem_size {
                let frames = lines.frames(vaddr);
                assert_eq!(frames, whole.frames(vaddr), "{flags:?} {vaddr:#x}");
                inlined += usize::from(frames.len() > 1);
                named.extend(frames.into_iter().filter_map(|frame| frame.function));
            }
        }
        assert!(
            inlined > 0 && ["inlined", "outer", "hidden", "second"].iter().all(|it| named.contains(*it)),
            "{named:?}"
        );
        lines.is_whole()
    };
    for flags in [&[][..], &["-gdwarf-4"], &["-ffunction-sections", "-gz=zlib"], &["-gno-pubnames", "-O2"]] {
        assert!(!compare(flags), "{flags:?}");
    }
    assert!(compare(&["-flto", "-flto-partition=none"]));
}

/// A file that was changed at random may have wrong names, or none; it causes no panic, and takes no more memory than
/// its size explains.
#[test]
fn changed_files_are_refused_or_read() {
    let program = Program::compile(&["-gz=zlib"]);
    let good = std::fs::read(&program.path).expect("there");
    let loads = Elf::parse(&good[..]).expect("good").loads().to_vec();
    let mut dice = 0x9e37_79b9_7f4a_7c15_u64;
    let mut roll = move |sides: usize| {
        dice ^= dice << 13;
        dice ^= dice >> 7;
        dice ^= dice << 17;
        usize::try_from(dice % sides as u64).expect("sides fit")
    };
    let (mut tables, mut lines) = (0, 0);
    for _ in 0..200 {
        let mut bytes = good.clone();
        for _ in 0..=roll(8) {
            // Half of the changes hit the section headers, which are at the end, or the file header.
            let at = if roll(2) == 0 { roll(bytes.len()) } else { (bytes.len() - 1 - roll(2500)) % bytes.len() };
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff][roll(5)];
        }
        bytes.truncate(if roll(8) == 0 { roll(bytes.len()) } else { bytes.len() });
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(&bytes).expect("written");
        let file = Arc::new(file.into());
        let found = tables_of(&file, None, &loads);
        tables += usize::from(!found.is_empty());
        let mut dwarf = Lines::of_file(&file);
        lines += usize::from(dwarf.is_some());
        for load in loads.iter().filter(|load| load.executable) {
            for vaddr in (load.vaddr..load.vaddr + load.mem_size).step_by(8) {
                let _names = found.iter().find_map(|table| table.find(vaddr));
                let _frames = dwarf.as_mut().map(|lines| lines.frames(vaddr));
            }
        }
    }
    assert!(tables > 50 && lines > 20, "nearly all were refused: {tables} tables, {lines} with lines");
}
