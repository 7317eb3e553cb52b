//! Rules derived from instructions, checked against those that compilers write, and against functions whose frames are
//! known.

use super::*;
use std::ops::Range;

/// Most functions of a file that are compared.
const FUNCTIONS: usize = 3000;

/// The functions of a file that its `.eh_frame` describes.
fn described<R: ReadAt>(elf: &Elf<R>) -> Option<Vec<Range<u64>>> {
    let found = elf.section(".eh_frame")?;
    let mut data = vec![0; found.size as usize];
    elf.read_vaddr(found.vaddr, &mut data).ok()?;
    let section = section(&data, Machine::X86_64);
    let bases = BaseAddresses::default().set_eh_frame(found.vaddr);
    let (mut entries, mut functions) = (section.entries(&bases), Vec::new());
    while let Some(entry) = entries.next().expect("a linker wrote it") {
        let CieOrFde::Fde(partial) = entry else { continue };
        let fde = partial.parse(EhFrame::cie_from_offset).expect("a linker wrote it");
        if fde.initial_address() != 0 {
            functions.push(fde.initial_address()..fde.end_address());
        }
    }
    Some(functions)
}

/// Treats functions as if they had no rules: those that can be verified get the rules that their compiler wrote.
#[test]
#[cfg_attr(miri, ignore = "reads the machine's own files")]
fn rules_read_off_instructions_are_those_of_compilers() {
    let mut all = 0;
    for path in files() {
        let bytes = std::fs::read(&path).expect("it is there");
        let Ok(elf) = Elf::parse(&bytes[..]) else { continue };
        let (Ok(table), Some(functions)) = (compile(&elf), described(&elf)) else { continue };
        let (mut proven, mut compared) = (0, 0);
        for function in functions.iter().take(FUNCTIONS) {
            let found = super::super::assembly::functions(&elf, &[], std::iter::once(function.clone()))
                .expect("it is there")
                .pieces;
            proven += usize::from(found.first().is_some_and(|first| first.start == function.start));
            // A part of a function that the compiler has moved elsewhere begins with a frame.
            let begins = Rule::new(kind::SP, 8, saved::UNCHANGED).expect("fits");
            if table.rule(function.start) != begins {
                continue;
            }
            // What follows a first function that cannot be verified does not count; and glibc's `__mpn_mul_1` and the like, in
            // assembly language, have one rule throughout although they push registers.
            let told = found.len() == 1 || function.clone().any(|at| table.rule(at) != begins);
            for piece in found.iter().filter(|_| found[0].start == function.start && told) {
                let (ours, theirs) = (piece.rule, table.rule(piece.start));
                if (ours.kind(), theirs.kind()) != (kind::SP, kind::SP) {
                    continue;
                }
                compared += 1;
                let place = format!("{}: {:#x}", path.display(), piece.start);
                assert_eq!(ours.words(), theirs.words(), "{place}");
                // Where the register was saved but not changed yet, or is already restored, both are true.
                if ours.saved() != saved::UNCHANGED {
                    assert_eq!(ours.saved(), theirs.saved(), "{place}");
                }
            }
        }
        println!("{}: {proven} functions of {}, {compared} rules compared", path.display(), functions.len());
        all += compared;
    }
    assert!(all > 5000, "{all}: libc alone has more");
}

/// Functions of at most 128 bytes each, without rules, after one that has some.
const SOURCE: &str = "
.text
.globl first
first: .cfi_startproc
    ret
    .cfi_endproc

.balign 128, 0xcc             # 0: a leaf
    lea (%rdi,%rsi), %rax
    ret

.balign 128, 0xcc             # 1: OpenBLAS's dgemm_kernel_HASWELL
    sub $96, %rsp
    mov %rbx, (%rsp)
    mov %rbp, 8(%rsp)
    vzeroupper
    mov %rsp, %rbx
    sub $28800, %rsp
    and $-4096, %rsp
1:  mov %rdi, 24(%rsp)
    mov $7, %rbp
    dec %rdi
    jne 1b
    mov %rbx, %rsp
    mov (%rsp), %rbx
    mov 8(%rsp), %rbp
    add $96, %rsp
    ret

.balign 128, 0xcc             # 2: libjpeg-turbo: the old stack pointer lies at the aligned one
    push %rbp
    mov %rsp, %rax
    sub $8, %rsp
    and $-32, %rsp
    mov %rax, (%rsp)
    mov %rsp, %rbp
    lea -256(%rbp), %rsp
    xor %eax, %eax
    nop
    mov %rbp, %rsp
    pop %rsp
    pop %rbp
    ret

.balign 128, 0xcc             # 3: a frame pointer
    push %rbp
    mov %rsp, %rbp
    push %r12
    and $-64, %rsp
    call *%rdi
    lea -8(%rbp), %rsp
    pop %r12
    leave
    ret

.balign 128, 0xcc             # 4: ends in another function
    push %rbx
    test %rdi, %rdi
    je 1f
    pop %rbx
    jmp first
1:  pop %rbx
    ret

.balign 128, 0xcc             # 5: does not restore rbx
    mov %rdi, %rbx
    ret

.balign 128, 0xcc             # 6: returns in the middle of its frame
    sub $8, %rsp
    ret

.balign 128, 0xcc             # 7: a table of jumps
    push %rbx
    jmp *(%rdi,%rsi,8)

.balign 128, 0xcc             # 8: two paths with different frames
    test %rdi, %rdi
    je 1f
    push %rdi
1:  mov %rdi, %rax
    ret

.balign 128, 0xcc             # 9: overwrites what it saved
    push %rbx
    mov %rdi, %rbx
    movups %xmm0, -8(%rsp)
    pop %rbx
    ret

.balign 128, 0xcc             # 10: looks where it is
    call 1f
1:  pop %rax
    ret

.balign 128, 0xcc             # 11: keeps rbx where a call may write
    mov %rbx, -8(%rsp)
    call *%rdi
    mov -8(%rsp), %rbx
    ret

.balign 128, 0xcc             # 12: the last one
    ret

.balign 128, 0xcc
    .fill 64, 1, 0x06    # no instruction
";

#[test]
#[cfg_attr(miri, ignore = "runs a compiler")]
fn functions_that_prove_themselves_have_rules() {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (folder.path().join("assembly.s"), folder.path().join("assembly.so"));
    std::fs::write(&source, SOURCE).expect("written");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-o"]).arg(&library).arg(&source);
    assert!(cc.status().expect("a C compiler is part of the build").success());
    let elf = Elf::parse(File::open(&library).expect("it was made")).expect("an ELF file");
    let table = compile(&elf).expect("one function has rules");
    let text = elf.section(".text").expect("it has code").vaddr;
    // By function: its rules where they change.
    let rules = |number: u64| {
        let start = text + (number + 1) * 128;
        let mut rules: Vec<Rule> = (start..start + 128).map(|at| table.rule(at)).collect();
        rules.dedup();
        rules
    };
    let sp = |cfa, fp| Rule::new(kind::SP, cfa, fp).expect("fits");
    let (none, gap) = (saved::UNCHANGED, Rule::GAP);
    assert_eq!(rules(0), [sp(8, none), gap]);
    // In the loop it is unknown whether `rbp` still holds the caller's; where it was saved it is in any case.
    let rbx = Rule::register(3, 104, 12).expect("fits");
    assert_eq!(
        rules(1),
        [sp(8, none), sp(104, none), sp(28904, none), rbx, sp(104, 12), sp(104, none), sp(8, none), gap]
    );
    let aligned = |kind, inner| Rule::deref(kind, inner, 16, 2).expect("fits");
    assert_eq!(rules(2)[..3], [sp(8, none), sp(16, none), sp(24, none)]);
    assert!(rules(2).contains(&aligned(kind::DEREF_FP, 0)), "{:?}", rules(2));
    assert_eq!(rules(2)[rules(2).len() - 3..], [sp(16, 2), sp(8, none), gap]);
    let fp = Rule::new(kind::FP, 16, 2).expect("fits");
    assert_eq!(rules(3), [sp(8, none), sp(16, none), sp(16, 2), sp(24, 2), fp, sp(24, 2), sp(16, 2), sp(8, none), gap]);
    assert_eq!(rules(4), [sp(8, none), sp(16, none), sp(8, none), sp(16, none), sp(8, none), gap]);
    for number in 5..=11 {
        assert_eq!(rules(number), [gap], "function {number}");
    }
    assert_eq!(rules(12), [sp(8, none), gap]);
    assert_eq!(rules(13), [gap]);
    // All of it is reported, and nothing else.
    let starts: Vec<u64> = table.assembly.iter().map(|part| (part.start - text) / 128 - 1).collect();
    assert_eq!(starts, [0, 1, 2, 3, 4, 12]);
    // Made window by window, it is the same.
    let windows = Windows::of(&elf).expect("it has a search table");
    let window = windows.at(text).expect("it is code");
    let by_window = windows.compile(&elf, &window).expect("it has rules");
    assert_eq!((0..128 * 15).find(|at| by_window.rule(text + at) != table.rule(text + at)), None);
    assert_eq!(by_window.assembly, table.assembly);
}
