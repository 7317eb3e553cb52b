//! Rules of arm64: those of a small library from a cross compiler, and of Debian's arm64 programs if the kernel tests
//! have fetched them.

use super::*;
use gimli::AArch64;
use std::path::{Path, PathBuf};

const LINK: u64 = 0x7fff_5555_0000;

/// `extension.c` by GCC 12 (`-mbranch-protection=standard`, so return addresses are signed), without its debug information.
const LIBRARY: &[u8] = include_bytes!("../../../../../fuzz/seeds/extension-arm64.so");

/// The caller's pc, sp and fp by the rules as gimli reads them; `None`: registers are needed that the walk does not have.
fn oracle(row: &UnwindTableRow<usize>) -> Option<[u64; 3]> {
    let cfa = match *row.cfa() {
        CfaRule::RegisterAndOffset { register: AArch64::SP, offset } => SP.wrapping_add_signed(offset),
        CfaRule::RegisterAndOffset { register: AArch64::X29, offset } => FP.wrapping_add_signed(offset),
        _ => return None,
    };
    let value = |register, unchanged| match row.register(register) {
        RegisterRule::Undefined | RegisterRule::SameValue => Some(unchanged),
        RegisterRule::Offset(offset) => Some(MadeUp::word(cfa.wrapping_add_signed(offset))),
        _ => None,
    };
    Some([value(AArch64::X30, LINK)?, cfa, value(AArch64::X29, FP)?])
}

/// What was found in a file: the number of places compared, of those without a compact rule, and of outermost functions.
#[derive(Debug, Default)]
struct Found {
    compared: usize,
    unsupported: usize,
    outermost: usize,
    signed: usize,
}

fn compare(name: &str, bytes: &[u8]) -> Found {
    let elf = Elf::parse(bytes).expect("a linker wrote it");
    let table = compile(&elf).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert!(table.rows.is_sorted_by_key(|row| row.pc()), "rows are sorted");
    let placed = Placed::of(&table);
    let section = elf.section(".eh_frame").expect("it has rules");
    let mut data = vec![0; section.size as usize];
    elf.read_vaddr(section.vaddr, &mut data).expect("it is in the file");
    let mut eh_frame = EhFrame::new(&data, LittleEndian);
    eh_frame.set_address_size(8);
    eh_frame.set_vendor(Vendor::AArch64);
    let bases = BaseAddresses::default().set_eh_frame(section.vaddr);
    let mut context = UnwindContext::new();
    let (mut entries, mut found) = (eh_frame.entries(&bases), Found::default());
    while let Some(entry) = entries.next().expect("a linker wrote it") {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(EhFrame::cie_from_offset).expect("a linker wrote it");
        let mut rows = fde.rows(&eh_frame, &bases, &mut context).expect("a compiler wrote them");
        while let Some(row) = rows.next_row().expect("a compiler wrote them") {
            if row.start_address() >= row.end_address().min(fde.end_address()) {
                continue;
            }
            let ip = row.start_address();
            found.compared += 1;
            found.signed += usize::from(row.register(AArch64::RA_SIGN_STATE) == RegisterRule::Constant(1));
            match table.rule(ip) {
                Rule::UNSUPPORTED => found.unsupported += 1,
                Rule::END => found.outermost += 1,
                _ => {
                    let mut walk = NativeWalk::start(ip, SP, FP);
                    walk.link = LINK;
                    let (stop, walk, _) = placed.step(machine::ARM64, walk);
                    let caller = oracle(row).unwrap_or_else(|| panic!("{name}: {ip:#x} {row:?}"));
                    assert_eq!([walk.ip, walk.sp, walk.fp], caller, "{name}: {ip:#x} {row:?}");
                    assert_eq!(stop, Some(StopReason::UnknownCode), "the made-up caller is no code");
                }
            }
        }
    }
    found
}

#[test]
#[cfg_attr(miri, ignore = "slow there")]
fn every_rule_of_a_library_is_what_gimli_reads() {
    let found = compare("the library", LIBRARY);
    println!("{found:?}");
    assert!(found.compared > 60 && found.signed > 20, "{found:?}");
    assert_eq!((found.unsupported, found.outermost), (0, 0), "{found:?}");
}

#[test]
#[cfg_attr(miri, ignore = "slow there")]
fn slots_of_the_linkage_table_are_leaves() {
    let elf = Elf::parse(LIBRARY).expect("an ELF file");
    let table = compile(&elf).expect("has rules");
    let plt = elf.section(".plt").expect("it calls others").vaddr;
    let leaf = tachyon_common::unwind::arm64::Rule::LEAF.0;
    assert_eq!([plt, plt + 31, plt + 32, plt + 48].map(|at| table.rule(at)), [Rule::GAP, Rule::GAP, leaf, leaf]);
}

/// Where `cargo xtask test` unpacks Debian's arm64 packages.
fn debian() -> Option<PathBuf> {
    let cache = std::env::var_os("TACHYON_CACHE").map(PathBuf::from);
    let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache/tachyon-bpf")))?;
    Some(cache.join("vm/userland-arm64")).filter(|root| root.is_dir())
}

#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn every_rule_of_debians_programs_is_what_gimli_reads() {
    let Some(root) = debian() else {
        crate::not_run::not_run("Debian's programs for arm64\nhint: cargo xtask test --setup-only");
        return;
    };
    let files =
        ["usr/bin/python3.11", "lib/aarch64-linux-gnu/libc.so.6", "lib/aarch64-linux-gnu/ld-linux-aarch64.so.1"];
    for file in files {
        let found = compare(file, &std::fs::read(root.join(file)).expect("it was unpacked"));
        println!("{file}: {found:?}");
        assert!(found.compared > 1_000 && found.unsupported < 5, "{file}: {found:?}");
        // `_start`, and a thread's first function.
        assert!((1..10).contains(&found.outermost), "{file}: {found:?}");
    }
}

/// There are no rules from the call that installs the catching frame's context to the function's end.
#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn a_context_that_is_being_installed_has_no_rule() {
    let Some(root) = debian() else {
        crate::not_run::not_run("Debian's libgcc for arm64\nhint: cargo xtask test --setup-only");
        return;
    };
    let bytes = std::fs::read(root.join("lib/aarch64-linux-gnu/libgcc_s.so.1")).expect("it was unpacked");
    let elf = Elf::parse(&bytes[..]).expect("an ELF file");
    let table = compile(&elf).expect("has rules");
    for name in ["_Unwind_RaiseException", "_Unwind_Resume", "_Unwind_ForcedUnwind", "_Unwind_Resume_or_Rethrow"] {
        let symbol = elf.dynamic_symbol(name).expect("readable").expect("exported");
        let (start, end) = (symbol.vaddr, symbol.vaddr + symbol.size);
        let word = |at| {
            let mut word = [0; 4];
            elf.read_vaddr(at, &mut word).expect("it is in the file");
            u32::from_le_bytes(word)
        };
        let missing: Vec<u64> = (start..end).step_by(4).filter(|&at| table.rule(at + 1) == Rule::UNSUPPORTED).collect();
        assert!((15..40).contains(&missing.len()), "{name}: {missing:x?}");
        let count = |mask: u32, value: u32| missing.iter().filter(|&&at| word(at) & mask == value).count();
        assert_eq!(count(0xfc00_0000, 0x9400_0000), 2, "{name}: what installs, and the debugger's hook");
        assert_eq!(count(u32::MAX, 0x8b24_63ff), 1, "{name}: add sp, sp, x4");
        assert_eq!(count(u32::MAX, 0xd65f_03c0), 1, "{name}: ret");
        let install = *missing.iter().find(|&&at| word(at) >> 26 == 0x25).expect("counted");
        assert_ne!(table.rule(install), Rule::UNSUPPORTED, "before the call nothing is written");
        assert_ne!(table.rule(start + 0x40), Rule::UNSUPPORTED);
        assert_ne!(table.rule(end - 1), Rule::GAP);
    }
}

/// A made-up vdso: two functions of two instructions, and between them the way back from a signal handler. (`cc -shared`,
/// from assembly: without `.eh_frame`, as Linux links its own.)
const VDSO: &[u8] = include_bytes!("../../../../../fuzz/seeds/vdso-arm64.so");

#[test]
fn the_way_back_from_a_signal_handler_is_told_by_its_instructions() {
    let elf = Elf::parse(VDSO).expect("an ELF file");
    assert!(matches!(compile(&elf), Err(Refusal::NoTable)));
    let table = compile_vdso(&elf).expect("the trampoline is there");
    let trampoline = elf.dynamic_symbol("__kernel_rt_sigreturn").expect("readable").expect("there").vaddr;
    let found = [trampoline - 8, trampoline - 1, trampoline, trampoline + 4, trampoline + 8].map(|at| table.rule(at));
    assert_eq!(found, [Rule::CHAIN, Rule::SIGNAL, Rule::SIGNAL, Rule::SIGNAL, Rule::CHAIN]);
    // A thread in the system call has the address after it, which is not in the next function.
    let behind = VDSO.windows(4).position(|bytes| bytes == [0x01, 0, 0, 0xd4]).expect("svc #0") + 4;
    for padding in [[0x1f, 0x20, 0x03, 0xd5], [0xd5, 0x03, 0x20, 0x1f]] {
        let mut padded = VDSO.to_vec();
        padded[behind..behind + 4].copy_from_slice(&padding);
        let table = compile_vdso(&Elf::parse(&padded[..]).expect("an ELF file")).expect("the trampoline is there");
        assert_eq!([trampoline + 8, trampoline + 12].map(|at| table.rule(at)), [Rule::SIGNAL, Rule::CHAIN]);
    }
    // Another system call's number.
    let mut other = VDSO.to_vec();
    let at = other.windows(4).position(|bytes| bytes == [0x68, 0x11, 0x80, 0xd2]).expect("mov x8, #139");
    other[at] = 0x48;
    let elf = Elf::parse(&other[..]).expect("an ELF file");
    assert!(matches!(compile_vdso(&elf), Err(Refusal::NoTable)));
}
