//! Names of native addresses: symbol tables and DWARF of files with arbitrary contents, and mangled names.

use std::fs::File;
use std::io::Write as _;

use nix::sys::memfd::{MFdFlags, memfd_create};
use tachyon::remote::elf::{Elf, Load};
use tachyon::symbolize::native::jitdump::first_record;
use tachyon::symbolize::native::{Detail, Image, MadeFunctions, demangle, made_name, name_in_file};
use tachyon::unwind::GeneratedRules;

use crate::input::Rng;
use crate::targets::{here, seed_files};

/// Longest name that may come out: longer ones are cut.
const MAX_NAME: usize = 4 << 10;

/// ELF files with DWARF 4 and 5, inlined functions among them (`fuzz/seeds/inlined.cc`), and those without any.
pub(crate) fn files() -> Vec<Vec<u8>> {
    let seeds = seed_files("so");
    let described = |seed: &&Vec<u8>| {
        let elf = Elf::parse(&seed[..]).expect("an ELF file");
        let Ok(Some(outer)) = elf.dynamic_symbol("outer") else { return false };
        let inside = |load: &&Load| outer.vaddr.checked_sub(load.vaddr).is_some_and(|at| at < load.mem_size);
        let load = elf.loads().iter().find(inside).expect("it is loaded");
        let first = load.offset + outer.vaddr - load.vaddr;
        (first..first + outer.size).any(|offset| {
            let name = name_in_file(in_memory(seed).into(), offset, Detail::Lines).expect("an ELF file");
            name.function.as_deref() == Some("outer") && name.lines.len() > 2
        })
    };
    assert_eq!(seeds.iter().filter(described).count(), 2, "DWARF 4 and 5, each with an inlined function");
    seeds
}

fn in_memory(bytes: &[u8]) -> File {
    let mut file = File::from(memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC).expect("every Linux has these"));
    file.write_all(bytes).expect("memory can be written");
    file
}

/// Asks for the names of some addresses: the answers are bounded, whatever the file says.
pub(crate) fn name_addresses(bytes: &[u8], rng: &mut Rng) -> bool {
    let file = in_memory(bytes);
    let text = Elf::parse(bytes).ok().and_then(|elf| Some(elf.section(".text")?.offset)).unwrap_or_default();
    let mut named = false;
    for _ in 0..3 {
        let offset = if rng.below(8) == 0 { rng.odd() } else { text.saturating_add(rng.below(0x100) as u64) };
        let file = file.try_clone().expect("a descriptor is free");
        let Some(name) = name_in_file(file.into(), offset, Detail::Lines) else { return false };
        assert!(name.function.as_ref().is_none_or(|function| function.len() <= MAX_NAME), "a name is bounded");
        named |= name.function.is_some() || !name.lines.is_empty();
    }
    named
}

/// Names of C++, Rust and C, one per line.
pub(crate) fn mangled() -> Vec<Vec<u8>> {
    let text = std::fs::read(here().join("seeds/mangled.txt")).expect("a file of the project is readable");
    text.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(Into::into).collect()
}

/// What comes out is bounded; the input is accepted if the output differs from it. Parts that are repeated many times nest: there
/// the number of ways to read a name may double at each.
pub(crate) fn demangle_name(bytes: &[u8], rng: &mut Rng) -> bool {
    let mut bytes = bytes.to_vec();
    for _ in 0..rng.below(3) {
        let from = rng.below(bytes.len());
        let to = (from + 1 + rng.below(8)).min(bytes.len());
        let part = bytes[from..to].repeat(rng.below(64));
        bytes.splice(from..from, part);
    }
    let name = demangle(&bytes);
    assert!(name.len() <= MAX_NAME, "{} bytes", name.len());
    name.as_bytes() != bytes
}

/// A `jitdump` of functions with these names, each of which is moved once.
fn jitdump(names: &[Vec<u8>]) -> Vec<u8> {
    let record = |kind: u32, words: [u64; 5], rest: &[u8]| {
        let size = u32::try_from(16 + 8 * words.len() + rest.len()).expect("a few bytes");
        let words = words.map(u64::to_le_bytes).concat();
        [&kind.to_le_bytes()[..], &size.to_le_bytes(), &1_u64.to_le_bytes(), &words, rest].concat()
    };
    let of_one = |(index, name): (u64, &Vec<u8>)| {
        let (start, moved) = (0x7000_0000 + index * 16, 0x7100_0000 + index * 16);
        let loaded = record(0, [1 << 32 | 1, start, start, 4, index], &[name, &b"\0\xc3\xc3\xc3\xc3"[..]].concat());
        [loaded, record(1, [1 << 32 | 1, moved, start, moved, 4], &index.to_le_bytes())].concat()
    };
    let header = [&b"DTiJ"[..], &1_u32.to_le_bytes(), &40_u32.to_le_bytes(), &62_u32.to_le_bytes(), &[0; 24]].concat();
    (0..).zip(names).map(of_one).fold(header, |bytes, record| [bytes, record].concat())
}

/// ELF images, maps for `perf` and its `jitdump`.
pub(crate) fn made() -> Vec<Vec<u8>> {
    let mangled = mangled();
    let lines = mangled.iter().enumerate().map(|(at, name)| {
        let line = format!("{:x} {:x} {}\n", 0x7000_0000 + at * 12, 8 + at % 9, String::from_utf8_lossy(name));
        line.into_bytes()
    });
    let map = lines.collect::<Vec<_>>().concat();
    files().into_iter().chain([map, jitdump(&mangled)]).collect()
}

/// What a process says about the code that it generated: functions are where they are said to be, and what is kept of them is
/// bounded. It is accepted if there is any function.
pub(crate) fn take_made_code(bytes: &[u8], rng: &mut Rng) -> bool {
    const MOST: usize = 16 << 20;
    let (mut made, mut rules) = (MadeFunctions::default(), GeneratedRules::default());
    made.add_perf_map(bytes);
    let records = bytes.get(first_record(bytes).unwrap_or(0)..).unwrap_or_default();
    assert!(made.add_jitdump(records) <= records.len());
    if let Some(image) = Image::parse(bytes) {
        for (function, name) in image.functions {
            made.add(function, &name);
        }
    }
    let at = rng.next() >> rng.below(64);
    rules.add(at, bytes);
    let mapping = at.saturating_sub(0x1_0000)..at.saturating_add(0x1_0000);
    if let Some(generated) = rules.table(mapping.clone()) {
        assert!(generated.table.rows.is_sorted_by(|one, next| one.pc() < next.pc()), "{generated:?}");
        assert_eq!(generated.len, mapping.end - mapping.start);
    }
    assert!(made.name(at).is_none_or(|name| made_name(name).len() <= 512));
    assert!(made.bytes() <= MOST, "{} bytes", made.bytes());
    !made.is_empty()
}
