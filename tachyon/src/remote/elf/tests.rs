//! Tests over this machine's own libraries, whole, cut and mutated.

use super::*;

/// A program with a symbol table. (The test program's own table has outgrown what is scanned.)
fn program() -> Vec<u8> {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let (source, path) = (dir.path().join("p.c"), dir.path().join("p"));
    std::fs::write(&source, "#include <stdlib.h>\nint main(void) { free(malloc(1)); return 0; }").expect("writable");
    let built = std::process::Command::new("cc").arg("-o").arg(&path).arg(&source).status();
    assert!(built.expect("a C compiler can be run").success());
    std::fs::read(path).expect("it was just made")
}

/// The C library: has `.gnu.hash`, and is small enough to mutate.
fn library() -> Vec<u8> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("own maps");
    let path = maps.split_whitespace().find(|word| word.contains("/libc.so"));
    std::fs::read(path.expect("the test is linked with the C library")).expect("readable")
}

#[test]
fn finds_symbols_that_are_defined_and_no_others() {
    let bytes = library();
    let elf = Elf::parse(&bytes[..]).expect("a good file");
    let symbol = elf.dynamic_symbol("malloc").expect("a good table").expect("the C library has it");
    assert!(symbol.size > 0 && elf.loads().iter().any(|load| load.executable && load.vaddr <= symbol.vaddr));
    assert_eq!(elf.dynamic_symbol("_PyRuntime").expect("a good table"), None);
    assert!(elf.soname().expect("it has one").starts_with("lib"));
    let own = program();
    let own = Elf::parse(&own[..]).expect("a good file");
    let [main, none] = own.symtab_symbols(["main", "no_such_symbol"]).expect("it is not stripped");
    assert_eq!(own.symtab_symbol("main").expect("the same, in pieces"), main);
    assert_eq!(own.symtab_symbol("no_such_symbol").expect("no such"), None);
    assert!(main.is_some_and(|main| main.vaddr > 0) && none.is_none());
    // Needed by it, defined elsewhere.
    assert_eq!(own.dynamic_symbol("malloc").expect("a good table"), None);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn entries_of_the_linkage_table_have_the_names_of_what_they_call() {
    for options in
        [&["-fcf-protection=none"][..], &["-fcf-protection=full"], &["-Wl,-z,now"], &["-Wl,-z,noseparate-code"]]
    {
        let folder = tempfile::tempdir().expect("a folder");
        let (source, built) = (folder.path().join("calls.c"), folder.path().join("calls.so"));
        let text = "#include <stdlib.h>\n#include <string.h>\n\
                    void *calls(char *a, char *b) { strcat(a, b); free(b); return malloc(strlen(a) * strtol(b, 0, 8)); }\n";
        std::fs::write(&source, text).expect("written");
        let mut build = std::process::Command::new("cc");
        build.args(["-shared", "-fPIC", "-fno-builtin", "-O1"]).args(options).arg("-o").args([&built, &source]);
        assert!(build.status().expect("a compiler can be run").success());
        let bytes = std::fs::read(&built).expect("it was built");
        let elf = Elf::parse(&bytes[..]).expect("a good file");
        let section = elf.section(".plt.sec").or_else(|| elf.section(".plt")).expect("it calls others");
        let names: Vec<_> = (0..section.size / 16).filter_map(|at| elf.plt_entry(section.vaddr + at * 16)).collect();
        // As binutils have them.
        let listing = std::process::Command::new("objdump").args(["-d", "--no-show-raw-insn"]).arg(&built).output();
        let listing = String::from_utf8(listing.expect("objdump can be run").stdout).expect("text");
        let named = |line: &str| {
            let (address, name) = line.strip_suffix("@plt>:")?.split_once(" <")?;
            Some((name.as_bytes().to_owned(), u64::from_str_radix(address, 16).ok()?))
        };
        let expected: Vec<_> = listing.lines().filter_map(named).filter(|(_, at)| *at >= section.vaddr).collect();
        let expected: Vec<_> = expected.into_iter().filter(|(_, at)| *at < section.vaddr + section.size).collect();
        assert_eq!(names, expected, "{options:?}");
        assert!(
            ["strcat", "free", "malloc", "strlen"]
                .iter()
                .all(|one| names.iter().any(|(name, _)| name == one.as_bytes()))
        );
        let last = names.last().expect("some");
        assert_eq!(elf.plt_entry(last.1 + 15).as_ref(), Some(last));
        assert_eq!(
            [section.vaddr + section.size, section.vaddr - 1, 0].map(|at| elf.plt_entry(at)),
            [None, None, None]
        );
    }
}

#[test]
fn what_is_no_elf_file_is_refused() {
    for bytes in
        [&b""[..], b"\x7fELF", &[0; 64], &b"#!/usr/bin/python3 -c 'print(1)                              ".repeat(2)]
    {
        assert!(matches!(Elf::parse(bytes), Err(ElfError::NotElf)));
    }
}

#[test]
fn every_cut_and_mutated_header_ends_quickly() {
    let whole = library();
    for len in (0..4096).step_by(7).chain((4096..whole.len()).step_by(40_009)) {
        let _ = Elf::parse(&whole[..len]).map(|elf| elf.dynamic_symbol("_PyRuntime"));
    }
    // Every byte of the headers and of the hash table's start, turned into the values that hurt most.
    let elf = Elf::parse(&whole[..]).expect("a good file");
    let hash = usize::try_from(elf.dynamic.expect("dynamic").gnu_hash).expect("small");
    for at in (0..1024).chain(hash..hash + 64) {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = value;
            let Ok(elf) = Elf::parse(&bytes[..]) else { continue };
            let _ = elf.dynamic_symbol("_PyRuntime");
            let _ = elf.symtab_symbols(["_PyRuntime"]);
            let _ = elf.soname();
        }
    }
}

#[test]
fn huge_sizes_allocate_nothing() {
    let mut bytes = library();
    // e_shnum and e_phoff: tables far past the end.
    bytes[0x20..0x28].copy_from_slice(&(u64::MAX - 8).to_le_bytes());
    assert!(matches!(Elf::parse(&bytes[..]), Err(ElfError::Read { .. } | ElfError::Malformed(_))));
    assert!(read_bytes(&&bytes[..], 0, u64::MAX).is_err());
    assert!(read_bytes(&&bytes[..], 0, MAX_SYMTAB).is_err());
}
