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
