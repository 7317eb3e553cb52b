//! What is kept says the same as the files themselves, for every address; and nothing else is believed.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::names::{Frame, Function, Piece, Texts};
use super::*;
use crate::kept::{State, SymbolCache, TICK};
use crate::remote::elf::Elf;

/// A file as a recording holds it, without a process that has mapped it.
fn file(path: &Path, folder: Option<&Arc<Folder>>) -> NativeFile {
    let file: TargetFile = std::fs::File::open(path).expect("it is there").into();
    let elf = Elf::parse(&file).expect("it is an ELF file");
    let (loads, build_id) = (elf.loads().to_vec(), elf.build_id().unwrap_or_default());
    let kept = Kept::of(folder, &build_id, &file, None);
    let build_id = super::super::debug::hex(&build_id);
    NativeFile {
        object: "file".to_owned(),
        build_id,
        file: Some(Arc::new(file)),
        debug: None,
        loads,
        tables: None,
        lines: None,
        kept,
        used: 0,
        payer: None,
    }
}

fn folder() -> (tempfile::TempDir, Arc<Folder>) {
    let folder = tempfile::tempdir().expect("a folder");
    let open = SymbolCache::at(folder.path().join("symbols")).open().expect("it is ours");
    (folder, Arc::new(open))
}

const SOURCE: &str = r#"#include <stdlib.h>
#include <string.h>
static inline __attribute__((always_inline)) int twice(int x) { return x * 2 + (int)strlen("abc"); }
static inline __attribute__((always_inline)) int often(int x) {
    for (int i = 0; i < x; i++) x ^= twice(i) + rand();
    return x;
}
__attribute__((noinline)) int outer(int x) { return often(x) + twice(x) * often(x + 1); }
__attribute__((noinline)) static int hidden(int x) { if (x > 7) abort(); return outer(x) * 3; }
int main(int argc, char **argv) { (void)argv; return hidden(argc) + outer(argc); }
"#;

fn compile(flags: &[&str]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, path) = (folder.path().join("kept.c"), folder.path().join("kept"));
    std::fs::write(&source, SOURCE).expect("written");
    let mut cc = Command::new("cc");
    cc.args(["-g", "-O2", "-Wl,--build-id=sha1"]).args(flags).arg("-o").arg(&path).arg(&source);
    assert!(cc.status().expect("a C compiler").success());
    settle(&path);
    (folder, path)
}

/// Waits until a file's state shows that it has not changed since.
fn settle(path: &Path) {
    let file: TargetFile = std::fs::File::open(path).expect("it is there").into();
    while Key::of(b"ab", &file, None).is_none() {
        assert!(file.state().is_some(), "{} is not on a file system of this machine", path.display());
        std::thread::sleep(TICK);
    }
}

/// Addresses of functions' first and last instructions, with the name.
fn functions(path: &Path) -> Vec<(String, std::ops::Range<u64>)> {
    use object::{Object as _, ObjectSymbol as _};
    let bytes = std::fs::read(path).expect("readable");
    let object = object::File::parse(&*bytes).expect("an ELF file");
    let functions = object.symbols().chain(object.dynamic_symbols());
    let functions = functions.filter(|it| it.kind() == object::SymbolKind::Text && it.is_definition());
    let mut found: Vec<_> = functions
        .map(|it| (it.name().unwrap_or_default().to_owned(), it.address()..it.address() + it.size().max(1)))
        .collect();
    found.sort_by_key(|(_, range)| (range.start, range.end));
    found.dedup_by_key(|(_, range)| range.start);
    found
}

fn offset(file: &NativeFile, vaddr: u64) -> Option<u64> {
    let load =
        file.loads.iter().find(|load| load.executable && (load.vaddr..load.vaddr + load.mem_size).contains(&vaddr))?;
    Some(vaddr - load.vaddr + load.offset)
}

/// Meets one address in the middle of each of these functions, keeps them, and compares all of their addresses. Returns how many
/// there were, and how many had inlined functions.
fn compare(path: &Path, wanted: impl Fn(&str) -> bool) -> (usize, usize) {
    let (_folder, folder) = folder();
    let functions: Vec<_> = functions(path).into_iter().filter(|(name, _)| wanted(name)).collect();
    let (mut plain, mut first) = (file(path, None), file(path, Some(&folder)));
    for (_, range) in &functions {
        let Some(at) = offset(&first, range.start + (range.end - range.start) / 2) else { continue };
        for detail in [Detail::Function, Detail::Lines] {
            assert_eq!(first.name_for(at, detail, None), plain.name(at, detail));
        }
    }
    first.keep(Duration::MAX).expect("it is kept");
    let mut second = file(path, Some(&folder));
    let (mut compared, mut inlined) = (0, 0);
    for (name, range) in &functions {
        for vaddr in range.clone() {
            let Some(at) = offset(&second, vaddr) else { continue };
            for detail in [Detail::Function, Detail::Lines] {
                let kept = second.name_for(at, detail, None);
                assert!(second.tables.is_none(), "{name} {vaddr:#x} {detail:?} is not kept");
                assert_eq!(kept, plain.name(at, detail), "{name} {vaddr:#x} {detail:?}");
                inlined += usize::from(kept.lines.len() > 1);
            }
            compared += 1;
        }
    }
    (compared, inlined)
}

#[test]
fn what_is_kept_is_what_the_file_says() {
    for flags in [&[][..], &["-gdwarf-4"], &["-gz=zlib", "-fcf-protection=none"], &["-flto", "-flto-partition=none"]] {
        let (_folder, path) = compile(flags);
        let (compared, inlined) = compare(&path, |name| ["main", "outer", "hidden"].contains(&name));
        assert!(compared > 100 && inlined > 20, "{flags:?}: {compared} addresses, {inlined} with inlined functions");
    }
}

#[test]
fn an_interpreter_s_functions_are_kept_exactly() {
    let root = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let root = root.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv"))).unwrap_or_default();
    let versions = std::fs::read_dir(root.join("versions")).into_iter().flatten().flatten();
    let files =
        versions.flat_map(|version| ["lib/libpython3.13.so.1.0", "bin/python3.13"].map(|it| version.path().join(it)));
    let mut files = files.filter(|path| path.exists());
    let python = files.find(|path| functions(path).iter().any(|(name, _)| name == "_PyEval_EvalFrameDefault"));
    let Some(python) = python else { return crate::not_run::not_run("a python3.13 of pyenv") };
    let wanted = [
        "_PyEval_EvalFrameDefault",
        "PyObject_GetAttr",
        "_PyObject_Malloc",
        "long_add",
        "_Py_dict_lookup",
        "gc_collect_main",
    ];
    let (compared, inlined) = compare(&python, |name| wanted.contains(&name));
    assert!(compared > 10_000, "{compared} addresses, {inlined} with inlined functions");
}

#[test]
fn functions_of_the_c_library_are_kept_exactly() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("own mappings");
    let libc = maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
    let Some(libc) = libc else { return crate::not_run::not_run("a C library that is linked dynamically") };
    let (compared, _) =
        compare(Path::new(libc), |name| ["qsort_r", "malloc", "free", "printf", "memcpy"].contains(&name));
    assert!(compared > 100, "{compared}");
}

#[test]
fn what_no_symbol_names_is_kept_address_by_address() {
    let (_program, path) = compile(&[]);
    let (_folder, folder) = folder();
    let (mut plain, mut first) = (file(&path, None), file(&path, Some(&folder)));
    let mut some = Vec::new();
    for load in first.loads.clone().iter().filter(|load| load.executable) {
        some.extend((load.offset..load.offset + load.file_size).step_by(3));
    }
    for &at in &some {
        first.name_for(at, Detail::Lines, None);
    }
    first.keep(Duration::MAX).expect("it is kept");
    let mut second = file(&path, Some(&folder));
    for &at in &some {
        let name = second.name_for(at, Detail::Lines, None);
        assert_eq!(name, plain.name(at, Detail::Lines));
    }
    assert!(second.tables.is_none() && second.lines.is_none());
    assert!(some.iter().any(|&at| plain.name(at, Detail::Lines).plt.is_some()), "a table of linkage is there");
}

#[test]
fn without_time_only_what_was_met_is_kept() {
    let (_program, path) = compile(&[]);
    let (_folder, folder) = folder();
    let (_, range) = functions(&path).into_iter().find(|(name, _)| name == "outer").expect("it is there");
    let (mut plain, mut first) = (file(&path, None), file(&path, Some(&folder)));
    let at = offset(&first, range.start + 5).expect("it is code");
    let wanted = first.name_for(at, Detail::Lines, None);
    first.keep(Duration::ZERO).expect("it is kept");
    let mut second = file(&path, Some(&folder));
    assert_eq!(second.name_for(at, Detail::Lines, None), wanted);
    assert!(second.tables.is_none());
    // The next one goes on from there.
    let next = second.name_for(at + 1, Detail::Lines, None);
    assert_eq!(next, plain.name(at + 1, Detail::Lines));
    assert!(second.tables.is_some());
    second.keep(Duration::MAX).expect("it is kept");
    let mut third = file(&path, Some(&folder));
    for vaddr in range {
        let at = offset(&third, vaddr).expect("it is code");
        assert_eq!(third.name_for(at, Detail::Lines, None), plain.name(at, Detail::Lines));
    }
    assert!(third.tables.is_none());
}

#[test]
fn a_file_that_changes_has_no_kept_names() {
    let (_program, path) = compile(&[]);
    let (_folder, folder) = folder();
    let mut first = file(&path, Some(&folder));
    let (_, range) = functions(&path).into_iter().find(|(name, _)| name == "outer").expect("it is there");
    let at = offset(&first, range.start).expect("it is code");
    first.name_for(at, Detail::Function, None);
    let metadata = std::fs::metadata(&path).expect("there");
    // The same content, size and time of modification: only the kernel's own time tells.
    let bytes = std::fs::read(&path).expect("readable");
    std::fs::write(&path, &bytes).expect("written");
    let opened = std::fs::File::options().write(true).open(&path).expect("there");
    opened.set_modified(metadata.modified().expect("known")).expect("it is ours");
    assert_eq!(first.keep(Duration::MAX), None, "it changed meanwhile");
    assert!(!file(&path, Some(&folder)).kept.is_to_be_read(), "it has only just changed");
    settle(&path);
    let mut second = file(&path, Some(&folder));
    second.name_for(at, Detail::Function, None);
    second.keep(Duration::MAX).expect("it is kept");
    let mut third = file(&path, Some(&folder));
    third.name_for(at, Detail::Function, None);
    assert!(third.tables.is_none());
    opened.set_modified(metadata.modified().expect("known")).expect("it is ours");
    settle(&path);
    let mut fourth = file(&path, Some(&folder));
    fourth.name_for(at, Detail::Function, None);
    assert!(fourth.tables.is_some(), "it is in another state");
}

fn key_of(build_id: &str) -> Key {
    let file = State { dev: 1, inode: 2, size: 3, times: vec![4, 5, 6, 7] };
    Key { version: "1".to_owned(), build_id: build_id.into(), file: Some(file), debug: None }
}

fn some_names() -> Names {
    let texts = Texts { text: "outerinnerspot.cf@plt".to_owned(), ends: vec![5, 10, 16, 21] };
    let functions = vec![Function { name: 1, plt: 0, vaddr: Some(0x1000) }, Function { name: 0, plt: 4, vaddr: None }];
    let frames = vec![
        Frame { function: 1, file: 3, line: 7, outer: 0 },
        Frame { function: 2, file: 3, line: 2, outer: 1 },
        Frame { function: 0, file: 0, line: 0, outer: 0 },
    ];
    let piece = |begin, len, function, frame| Piece { begin, len, function, frame };
    let pieces = [
        vec![piece(0x1000, 64, 0, 0), piece(0x2000, 16, 1, 0)],
        vec![piece(0x1000, 4, 0, 1), piece(0x1004, 60, 0, 2), piece(u64::MAX - 9, 9, 1, 3)],
    ];
    Names { texts, functions, frames, pieces }
}

#[test]
fn names_come_back_and_damage_is_seen() {
    let (key, names) = (key_of("ab"), some_names());
    let content = stored::encode(&key, &names).expect("small enough");
    assert_eq!(stored::decode(&content, &key), Some(names.clone()));
    assert_eq!(stored::decode(&content, &key_of("ac")), None);
    let debug = Key { debug: key.file.clone(), ..key.clone() };
    assert_eq!(stored::decode(&content, &debug), None);
    let mut damaged = content;
    *damaged.last_mut().expect("bytes") ^= 1;
    assert_eq!(stored::decode(&damaged, &key), None);
    let lines = names.find(0x1010, Detail::Lines).expect("known");
    let functions: Vec<_> = lines.lines.iter().map(|frame| frame.function.as_deref()).collect();
    assert_eq!(functions, [Some("inner"), Some("outer")]);
    assert_eq!(names.find(0x2003, Detail::Function).expect("known").plt.as_deref(), Some("f@plt"));
    assert_eq!(names.find(0x1040, Detail::Lines), None);
    assert_eq!(names.find(0xfff, Detail::Function), None);
}

/// Even with the right checksum.
#[test]
fn what_makes_no_sense_is_refused() {
    let key = key_of("ab");
    type Change = fn(&mut Names);
    let changes: [Change; 13] = [
        |names| names.frames[0].outer = 1,
        |names| names.frames[1].outer = 3,
        |names| names.frames[1].function = 5,
        |names| names.frames[1].file = 5,
        |names| names.functions[0].name = 5,
        |names| names.functions[1].plt = u32::MAX,
        |names| names.pieces[0][0].function = 2,
        |names| names.pieces[1][0].frame = 4,
        |names| names.pieces[1][1].len = 0,
        |names| names.texts.ends[1] = 4,
        |names| names.texts.ends[3] = 20,
        |names| names.texts.text.push('a'),
        |names| names.texts = Texts { text: "\u{e4}".repeat(5), ends: vec![1, 2, 4, 10] },
    ];
    for (number, change) in changes.iter().enumerate() {
        let mut names = some_names();
        change(&mut names);
        let content = stored::encode(&key, &names).expect("small enough");
        assert_eq!(stored::decode(&content, &key), None, "change {number}");
    }
    let mut names = some_names();
    names.pieces[0][1].begin = u64::MAX - 8;
    names.pieces[0][1].len = 8;
    assert!(stored::decode(&stored::encode(&key, &names).expect("small enough"), &key).is_some());
}
