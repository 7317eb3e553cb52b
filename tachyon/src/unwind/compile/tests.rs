use super::*;
use crate::unwind::{TablePart, parts};
use gimli::{CfaRule, RegisterRule, UnwindContext, UnwindExpression, UnwindTableRow, X86_64};
use std::fs::File;
use tachyon_common::config::machine;
use tachyon_common::limits::MAX_NATIVE_FRAMES;
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Slices, Space, StackBuffer, kind, saved};
use tachyon_common::walk::{Unreadable, UserMemory, mix};

#[path = "tests/arm64.rs"]
mod arm64;
#[path = "tests/assembly.rs"]
mod assembly;

/// Memory in which every word is a different address, in a stack above every other: no two rules can agree by accident.
struct MadeUp;

impl MadeUp {
    fn word(addr: u64) -> u64 {
        0x7fff_0000_0000 | (mix(7, addr) & 0xffff_fff8)
    }
}

impl UserMemory for MadeUp {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Unreadable> {
        // Nothing around a word is provided, because making it up is expensive.
        if into.len() != 8 {
            return Err(Unreadable);
        }
        into.copy_from_slice(&Self::word(addr).to_ne_bytes());
        Ok(())
    }
}

/// One file's table in its parts, at its own addresses.
struct Placed {
    base: u64,
    words: Vec<Row>,
    /// Each with where it starts.
    parts: Vec<(u32, TablePart)>,
}

impl Placed {
    fn of(table: &Table) -> Self {
        let mut placed = Self { base: table.base, words: Vec::new(), parts: Vec::new() };
        for part in parts(&table.rows) {
            let first = placed.words.len() as u32;
            placed.words.extend(&part.words);
            placed.parts.push((first, part));
        }
        placed
    }

    /// One step from an address, the only one known to be code.
    fn step(&self, machine: u32, mut walk: NativeWalk) -> (Option<StopReason>, NativeWalk, Vec<u64>) {
        let start = |part: &TablePart| u64::from(part.pc) + self.base;
        let behind = self.parts.partition_point(|(_, part)| start(part) <= walk.ip);
        let (first_row, part) = &self.parts[behind.saturating_sub(1)];
        let range = Range {
            start: walk.ip,
            end: walk.ip + 1,
            bias: start(part),
            first_row: *first_row,
            rows: part.rows,
            pages: part.pages,
        };
        let tables = Slices { ranges: &[range], rows: &self.words, machine };
        let space = Space { count: 1, ..Space::default() };
        let mut addresses = Addresses::default();
        let stop = walk.step(&MadeUp, &tables, space, &mut StackBuffer::default(), &mut addresses);
        (stop, walk, addresses.0)
    }
}

#[derive(Default)]
struct Addresses(Vec<u64>);

impl AddressSink for Addresses {
    fn store(&mut self, index: usize, address: u64) {
        assert!(index < MAX_NATIVE_FRAMES && index == self.0.len());
        self.0.push(address);
    }
}

const SP: u64 = 0x7ffe_0000_1000;
const FP: u64 = 0x7ffe_0000_2000;

/// What another register holds at the interrupted instruction: no two hold the same.
fn other(register: u16) -> u64 {
    0x7ffe_1000_0000 + u64::from(register) * 0x10_0000
}

/// The value of an expression according to gimli.
fn evaluate(section: &EhFrame<Slice<'_>>, at: &UnwindExpression<usize>, ip: u64, cfa: Option<u64>) -> Option<u64> {
    let encoding = gimli::Encoding { address_size: 8, format: gimli::Format::Dwarf32, version: 5 };
    let mut evaluation = at.get(section).ok()?.evaluation(encoding);
    if let Some(cfa) = cfa {
        evaluation.set_initial_value(cfa);
    }
    let mut result = evaluation.evaluate().ok()?;
    loop {
        result = match result {
            gimli::EvaluationResult::Complete => {
                let gimli::Location::Address { address } = evaluation.as_result().last()?.location else { return None };
                return Some(address);
            }
            gimli::EvaluationResult::RequiresRegister { register, .. } => {
                let value = match register {
                    X86_64::RSP => SP,
                    X86_64::RBP => FP,
                    X86_64::RA => ip,
                    _ => return None,
                };
                evaluation.resume_with_register(gimli::Value::Generic(value)).ok()?
            }
            gimli::EvaluationResult::RequiresMemory { address, .. } => {
                evaluation.resume_with_memory(gimli::Value::Generic(MadeUp::word(address))).ok()?
            }
            _ => return None,
        };
    }
}

/// The caller's ip, sp and fp by gimli's own evaluation; `Ok(None)`: the outermost frame, `Err`: registers are needed
/// that the walk does not have.
fn oracle(section: &EhFrame<Slice<'_>>, row: &UnwindTableRow<usize>, ip: u64) -> Result<Option<[u64; 3]>, ()> {
    let cfa = match row.cfa() {
        CfaRule::RegisterAndOffset { register: X86_64::RSP, offset } => SP.wrapping_add_signed(*offset),
        CfaRule::RegisterAndOffset { register: X86_64::RBP, offset } => FP.wrapping_add_signed(*offset),
        CfaRule::RegisterAndOffset { register, offset } => other(register.0).wrapping_add_signed(*offset),
        CfaRule::Expression(at) => evaluate(section, at, ip, None).ok_or(())?,
    };
    let value = |register, unchanged: Result<u64, ()>| match row.register(register) {
        RegisterRule::Undefined | RegisterRule::SameValue => unchanged,
        RegisterRule::Offset(offset) => Ok(MadeUp::word(cfa.wrapping_add_signed(offset))),
        RegisterRule::Expression(at) => evaluate(section, &at, ip, Some(cfa)).map(MadeUp::word).ok_or(()),
        _ => Err(()),
    };
    if row.register(X86_64::RA) == RegisterRule::Undefined {
        return Ok(None);
    }
    let ra = value(X86_64::RA, Err(()))?;
    Ok(Some([ra, cfa, value(X86_64::RBP, Ok(FP))?]))
}

/// Compares every row of every function of a file with gimli's own evaluation; returns how many were compared, and how
/// many of them have no compact form.
fn compare(path: &std::path::Path) -> Option<(usize, usize)> {
    let bytes = std::fs::read(path).ok()?;
    let elf = Elf::parse(&bytes[..]).ok()?;
    let table = compile(&elf).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(table.rows.is_sorted_by_key(|row| row.pc()), "rows are sorted");
    let placed = Placed::of(&table);
    let section = elf.section(".eh_frame")?;
    let mut data = vec![0; section.size as usize];
    elf.read_vaddr(section.vaddr, &mut data).ok()?;
    let mut eh_frame = EhFrame::new(&data, LittleEndian);
    eh_frame.set_address_size(8);
    let bases = BaseAddresses::default().set_eh_frame(section.vaddr);
    let (mut compared, mut unsupported) = (0, 0);
    let mut context = UnwindContext::new();
    let mut entries = eh_frame.entries(&bases);
    while let Some(entry) = entries.next().expect("a linker wrote it") {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(EhFrame::cie_from_offset).expect("a linker wrote it");
        if fde.initial_address() == 0 {
            continue;
        }
        let mut rows = fde.rows(&eh_frame, &bases, &mut context).expect("a compiler wrote them");
        while let Some(row) = rows.next_row().expect("a compiler wrote them") {
            if row.start_address() >= row.end_address().min(fde.end_address()) {
                continue;
            }
            for ip in [row.start_address(), row.end_address().min(fde.end_address()) - 1] {
                compared += 1;
                let expected = oracle(&eh_frame, row, ip);
                // For the functions that end a throw, their own rules are wrong (`eh_return.rs`).
                if [kind::UNSUPPORTED, kind::THROW].contains(&table.rule(ip).kind()) {
                    unsupported += 1;
                    continue;
                }
                let mut walk = NativeWalk::start(ip, SP, FP);
                walk.leaf_known = 1;
                walk.leaf = std::array::from_fn(|register| other(register as u16));
                let (stop, walk, addresses) = placed.step(machine::X86_64, walk);
                assert_eq!(addresses, [ip]);
                match expected {
                    Ok(Some(caller)) => {
                        assert_eq!([walk.ip, walk.sp, walk.fp], caller, "{}: {ip:#x} {row:?}", path.display());
                        assert_eq!(stop, Some(StopReason::UnknownCode), "the made-up caller is no code");
                    }
                    Ok(None) => assert_eq!(stop, Some(StopReason::Complete)),
                    Err(()) => panic!("{}: {ip:#x} has a rule that gimli cannot evaluate: {row:?}", path.display()),
                }
            }
        }
    }
    Some((compared, unsupported))
}

/// The files of this very process and the interpreters of the machine.
fn files() -> Vec<std::path::PathBuf> {
    let maps = std::fs::read("/proc/self/maps").expect("own mappings");
    let maps = crate::remote::parse_maps(&maps).expect("the kernel wrote them");
    let mut files: Vec<_> = maps.iter().filter(|map| map.executable).filter_map(|map| map.file_path()).collect();
    files.dedup();
    let mut files: Vec<_> = files.into_iter().map(std::path::Path::to_path_buf).collect();
    let libraries = ["libcrypto.so.3", "libffi.so.8", "libstdc++.so.6", "libz.so.1"];
    files.extend(libraries.map(|name| std::path::Path::new("/lib/x86_64-linux-gnu").join(name)));
    files.extend(["/usr/bin/python3.11", "/usr/bin/python3"].map(Into::into));
    files.retain(|path| path.exists());
    files
}

#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn every_rule_of_real_files_is_what_gimli_evaluates() {
    let mut compared = 0;
    for path in files() {
        let Some((rows, unsupported)) = compare(&path) else { continue };
        println!("{}: {rows} places compared, {unsupported} without a compact rule", path.display());
        // libgcc is small.
        let most = if path.to_string_lossy().contains("libgcc_s") { rows / 20 } else { rows.max(10_000) / 500 };
        assert!(unsupported < most, "{}: {unsupported} of {rows}", path.display());
        compared += rows;
    }
    assert!(compared > 10_000, "this test program alone has more");
}

#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn a_file_without_section_headers_has_the_same_table() {
    let path = std::env::current_exe().expect("known");
    let whole = compile(&Elf::parse(File::open(&path).expect("there")).expect("an ELF file")).expect("has rules");
    let mut bytes = std::fs::read(&path).expect("there");
    // `e_shoff`, `e_shnum`, `e_shstrndx`.
    bytes[40..48].fill(0);
    bytes[60..64].fill(0);
    let stripped = Elf::parse(&bytes[..]).expect("an ELF file");
    assert!(stripped.section(".eh_frame").is_none());
    assert_eq!(compile(&stripped).expect("has rules"), whole);
}

/// Compiled without tables, a file has the end mark of the compiler's start files: it has no rules, and says so.
#[test]
#[cfg_attr(miri, ignore = "runs a compiler")]
fn an_empty_table_is_none() {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (folder.path().join("bare.c"), folder.path().join("bare.so"));
    std::fs::write(&source, "int f(int x) { return x + 1; }\n").expect("written");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-o"]).arg(&library);
    assert!(cc.arg(&source).status().expect("a C compiler is part of the build").success());
    let file = File::open(&library).expect("it was made");
    assert!(matches!(compile(&Elf::parse(&file).expect("an ELF file")), Err(Refusal::NoTable)));
}

/// A file's rules where all entries describe one function and share that many instructions.
fn crafted(entries: usize, shared: usize) -> Result<Table, Refusal> {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (folder.path().join("rules.s"), folder.path().join("rules.so"));
    // Version, augmentation, alignments, return address; encoding of pointers: relative, 4 bytes; then `DW_CFA_same_value` of a register
    // again and again (a linker would throw `DW_CFA_nop` away).
    let common = "cie:\n.long cie_end - cie_start\ncie_start:\n.long 0\n.byte 1\n.asciz \"zR\"\n.byte 1, 0x78, 16, 1, 0x1b\n\
        .byte 0x0c, 7, 8, 0x90, 1\n";
    let entry = ".long 16\n.long . - cie\n.long spot - .\n.long 16\n.byte 0, 0, 0, 0\n";
    let text = format!(
        ".text\nspot: .rept 16\nnop\n.endr\n.section .eh_frame, \"a\", %progbits\n\
         {common}.fill {shared}, 2, 0x0608\ncie_end:\n.rept {entries}\n{entry}.endr\n.long 0\n"
    );
    std::fs::write(&source, text).expect("written");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-Wl,--no-eh-frame-hdr", "-o"]).arg(&library).arg(&source);
    assert!(cc.status().expect("a C compiler is part of the build").success());
    compile(&Elf::parse(File::open(&library).expect("it was made")).expect("an ELF file"))
}

/// Each function runs again the instructions that it shares with others.
#[test]
#[cfg_attr(miri, ignore = "runs a compiler")]
fn shared_rules_cost_no_more_than_their_file_explains() {
    assert_eq!(crafted(4, 2).expect("it has rules").rows.len(), 2);
    let refusal = crafted(40_000, 1 << 19).expect_err("all but the first add nothing but work");
    assert!(matches!(refusal, Refusal::TooDear), "{refusal}");
}

#[test]
fn rules_that_do_not_fit_are_refused() {
    assert_eq!(Rule::new(kind::SP, 4, 0), None, "no multiple of a word");
    assert_eq!(Rule::new(kind::SP, 1 << 20, 0), None, "more than a megabyte");
    let rule = Rule::new(kind::FP, -8, 1022).expect("fits");
    assert_eq!((rule.kind(), rule.words(), rule.saved()), (kind::FP, -1, 1022));
    let rule = Rule::deref(kind::DEREF_FP, -8, 16, saved::AT_FP).expect("fits");
    assert_eq!((rule.words() >> 7, rule.words() & 127, rule.saved()), (-1, 2, saved::AT_FP));
    assert_eq!(Rule::deref(kind::DEREF_SP, 0, 1024, 0), None);
    assert_eq!(Rule::deref(kind::DEREF_SP, 0, -8, 0), None);
}

#[test]
fn where_functions_overlap_the_later_start_is_believed() {
    let rule = |words: i64| Rule::new(kind::SP, words * 8, 0).expect("fits");
    let piece = |start, end, words| Piece { start, end, rule: rule(words) };
    let table = rows_of(
        vec![piece(0x1100, 0x1200, 2), piece(0x1000, 0x1180, 1), piece(0x1300, 0x1310, 3)],
        Assembly::default(),
        0x1000,
    );
    let found = [0xfff, 0x1000, 0x10ff, 0x1100, 0x11ff, 0x1200, 0x12ff, 0x130f, 0x1310].map(|at| table.rule(at));
    let gap = Rule::GAP;
    assert_eq!(found, [gap, rule(1), rule(1), rule(2), rule(2), gap, gap, rule(3), gap]);
}

/// Window by window, a file's rows say the same as for the whole file.
#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn windows_have_the_rules_of_the_whole() {
    let mut compared = 0;
    for path in ["/proc/self/exe", "/lib/x86_64-linux-gnu/libc.so.6", "/lib/x86_64-linux-gnu/libstdc++.so.6"] {
        let Ok(file) = File::open(path) else { continue };
        let elf = Elf::parse(file).expect("an ELF file");
        let whole = compile(&elf).expect("it has rules");
        let windows = Windows::of(&elf).expect("linkers write a search table");
        let code = elf.loads().iter().find(|load| load.executable).expect("code");
        let mut vaddr = code.vaddr;
        while let Some(window) = windows.at(vaddr).filter(|_| vaddr < code.vaddr + code.file_size) {
            let table = windows.compile(&elf, &window).expect("its rules can be read");
            let mut at = window.start;
            // At its end a window has no rule for the few bytes between its last function and the next.
            while at + 16 < window.end {
                assert_eq!(table.rule(at), whole.rule(at), "{path} {at:#x}");
                (at, compared) = (at + 13, compared + 1);
            }
            vaddr = window.end;
        }
    }
    assert!(compared > 100_000, "{compared}");
}

/// While libgcc overwrites its own registers with those of the catching frame, that frame is its caller. Its very last
/// instructions have no rule.
#[test]
#[cfg(target_arch = "x86_64")]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn a_context_that_is_being_installed_is_the_caller() {
    let (elf, function) = match File::open("/lib/x86_64-linux-gnu/libgcc_s.so.1") {
        Ok(file) => (Elf::parse(file).expect("an ELF file"), "_Unwind_RaiseException"),
        Err(_) => return,
    };
    let symbol = elf.dynamic_symbol(function).expect("readable").expect("exported");
    let table = compile(&elf).expect("it has rules");
    let end = symbol.vaddr + symbol.size;
    let with = |kind| (symbol.vaddr..end).filter(|&at| table.rule(at).kind() == kind).collect::<Vec<u64>>();
    let (throws, missing) = (with(kind::THROW), with(kind::UNSUPPORTED));
    // Only the end of the function: the search for a handler takes up nearly all of a throw.
    assert!((20..300).contains(&throws.len()), "{} of {} bytes", throws.len(), symbol.size);
    assert!((4..10).contains(&missing.len()), "{} of {} bytes", missing.len(), symbol.size);
    assert_eq!(throws[throws.len() - 1] + 1, missing[0]);
    assert_eq!(table.rule(throws[0] - 1).kind(), kind::FP, "before the call nothing is written");
    assert_eq!(table.rule(symbol.vaddr + 0x40).kind(), kind::FP);
}
