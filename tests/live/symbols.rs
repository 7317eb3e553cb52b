//! Names of native code, compared with those that other readers of the same file find.

use object::{Object as _, ObjectSegment as _, ObjectSymbol as _, SymbolKind};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};
use tachyon::remote::RemoteProcess;
use tachyon::symbolize::native::{Detail, NativeSymbols, demangle};
use tachyon::types::Pid;
use tachyon_tests::{Interpreter, Target, live};

/// What `addr2line` of binutils says of an address: the innermost function, and its line.
struct Told {
    functions: usize,
    file: String,
    line: String,
}

/// Asks it of all addresses at once.
fn binutils(path: &str, addresses: &BTreeSet<u64>) -> BTreeMap<u64, Told> {
    let mut command = Command::new("addr2line");
    command.args(["-a", "-f", "-i", "-e", path]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("binutils belong to the C compiler");
    let mut stdin = child.stdin.take().expect("piped");
    let text: String = addresses.iter().map(|address| format!("{address:#x}\n")).collect();
    let writer = std::thread::spawn(move || stdin.write_all(text.as_bytes()));
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("no panic").expect("it reads");
    let text = String::from_utf8(output.stdout).expect("text");
    let mut told: BTreeMap<u64, Vec<&str>> = BTreeMap::new();
    let mut at = 0;
    for line in text.lines() {
        if let Some(address) = line.strip_prefix("0x") {
            at = u64::from_str_radix(address, 16).expect("a number");
        }
        told.entry(at).or_default().push(line);
    }
    let of = |(address, lines): (u64, Vec<&str>)| {
        let place = lines.get(2).expect("a function and a place");
        let (file, line) = place.rsplit_once(':').expect("file:line");
        let line = line.split(' ').next().unwrap_or(line).to_owned();
        (address, Told { functions: lines.len() / 2, file: file.to_owned(), line })
    };
    told.into_iter().map(of).collect()
}

/// Of every function of a real interpreter: its name, by its symbol table, and the line and the inlined functions at its first
/// instruction, by its DWARF.
#[test]
fn every_function_of_an_interpreter() {
    let Some(_live) = live() else { return };
    let target = Target::start(&Interpreter::named("pyenv_3_12"), "spin.py");
    let process = RemoteProcess::at(Pid(target.pid()));
    let maps = process.maps().expect("it runs");
    let code = maps.iter().filter(|mapping| mapping.executable && mapping.name().contains("python"));
    let mapping = code.max_by_key(|mapping| mapping.end - mapping.start).expect("it has code");
    let path = mapping.file_path().expect("a file").to_str().expect("text").to_owned();
    let bytes = fs::read(&path).expect("it can be read");
    let elf = object::File::parse(&*bytes).expect("it is an ELF file");
    let offset = |vaddr: u64| {
        let holds = |segment: &object::Segment<'_, '_>| {
            (segment.address()..segment.address() + segment.size()).contains(&vaddr)
        };
        let segment = elf.segments().find(holds)?;
        Some(vaddr - segment.address() + segment.file_range().0)
    };
    let mut named: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
    for symbol in elf.symbols().filter(|symbol| symbol.kind() == SymbolKind::Text && symbol.size() > 0) {
        named.entry(symbol.address()).or_default().insert(demangle(symbol.name_bytes().expect("a name")));
    }
    assert!(named.len() > 5_000, "{path}: {} functions", named.len());
    let told = binutils(&path, &named.keys().copied().collect());
    let symbols = NativeSymbols::default();
    let file = symbols.pin(&process, mapping).expect("it can be opened");
    let (mut with_lines, mut others) = (0_u32, Vec::new());
    for (&vaddr, names) in &named {
        let Some(offset) = offset(vaddr) else { continue };
        let name = symbols.name(&file, offset, Detail::Lines, None);
        assert_eq!(name.function_vaddr, Some(vaddr), "{names:?}");
        assert!(name.function.as_ref().is_some_and(|function| names.contains(function)), "{name:?} for {names:?}");
        let (Some(innermost), Some(told)) = (name.lines.first(), told.get(&vaddr)) else { continue };
        with_lines += 1;
        let base = |path: &str| path.rsplit('/').next().unwrap_or(path).to_owned();
        let ours = (name.lines.len(), innermost.file.as_deref().map(base), innermost.line.map(|line| line.to_string()));
        let theirs = (told.functions, Some(base(&told.file)), Some(told.line.clone()));
        if ours != theirs {
            others.push((vaddr, ours, theirs));
        }
    }
    println!("{path}: {} functions, {with_lines} with lines, {} told otherwise: {others:?}", named.len(), others.len());
    assert!(with_lines > 5_000, "{path}: {with_lines} functions have lines");
    // Where an instruction has several rows, readers differ in which they take.
    assert!(others.len() * 100 < with_lines as usize, "{} of {with_lines}: {others:?}", others.len());
}
