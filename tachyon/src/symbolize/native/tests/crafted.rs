//! DWARF crafted to cost more than its size suggests. Each program is small and is read in a moment.

use super::*;

/// One function, and how DWARF describes it: abbreviations 1 (unit), 2 (function), 3 (inlined, with children), 4 (inlined,
/// with the ranges at the beginning of `.debug_ranges`), 5 (inlined, with the name of entry 6), 6 (a function's name).
const FUNCTION: &str = r#"
.text
.globl spot
.type spot, %function
spot:
.rept 16
nop
.endr
.size spot, .-spot
.section .debug_abbrev, "", %progbits
.byte 1, 0x11, 1, 0x11, 1, 0x12, 6, 0, 0
.byte 2, 0x2e, 1, 0x11, 1, 0x12, 6, 3, 8, 0, 0
.byte 3, 0x1d, 1, 0x11, 1, 0x12, 6, 0, 0
.byte 4, 0x1d, 0, 0x55, 0x17, 0, 0
.byte 5, 0x1d, 0, 0x31, 0x13, 0x11, 1, 0x12, 6, 0, 0
.byte 6, 0x2e, 0, 3, 8, 0, 0
.byte 0
.section .debug_info, "", %progbits
info:
.long info_end - info_start
info_start:
.short 4
.long 0
.byte 8
.byte 1
.quad spot
.long 16
.byte 2
.quad spot
.long 16
.asciz "spot"
"#;

/// What is found for the function when these entries, each with its end, are inside it.
fn described(entries: &str) -> Vec<SourceFrame> {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, path) = (folder.path().join("spot.s"), folder.path().join("spot.so"));
    std::fs::write(&source, format!("{FUNCTION}{entries}\n.byte 0, 0\ninfo_end:\n")).expect("written");
    tool("cc", &["-shared", "-nostdlib", "-o"], &[&path, &source]);
    let file = Arc::new(std::fs::File::open(&path).expect("there").into());
    let elf = Elf::parse(&*file).expect("good");
    let spot = elf.dynamic_symbol("spot").expect("a good table").expect("it is exported");
    let mut lines = Lines::of_file(&file).expect("it has DWARF");
    let frames = lines.frames(spot.vaddr);
    let whole = Lines::whole(&elf).map_or(Vec::new(), |mut whole| whole.frames(spot.vaddr));
    assert_eq!(frames, whole, "one unit or all");
    frames
}

fn inlined(depth: usize) -> String {
    format!(".rept {depth}\n.byte 3\n.quad spot\n.long 16\n.endr\n.rept {depth}\n.byte 0\n.endr")
}

#[test]
fn functions_inside_of_each_other_cost_no_stack() {
    assert_eq!(described(&inlined(60)).len(), 61);
    assert_eq!(described(&inlined(200_000)), []);
}

#[test]
fn ranges_that_all_share_cost_no_memory() {
    let ranges = |entries: usize, ranges: usize| {
        let list = format!(".rept {ranges}\n.quad 0, 16\n.endr\n.quad 0, 0");
        let section = |name: &str| format!("\n.section {name}, \"\", %progbits\n");
        let entries = format!(".rept {entries}\n.byte 4\n.long 0\n.endr");
        format!("{entries}{}{list}{}", section(".debug_ranges"), section(".debug_info"))
    };
    assert_eq!(described(&ranges(1, 1)).len(), 2);
    assert_eq!(described(&ranges(50_000, 50_000)), []);
}

#[test]
fn a_name_that_all_share_costs_no_time() {
    let named = |entries: usize, len: usize| {
        let inlined = ".byte 5\n.long name - info\n.quad spot\n.long 16";
        format!(".rept {entries}\n{inlined}\n.endr\nname:\n.byte 6\n.fill {len}, 1, 0x61\n.byte 0")
    };
    let frames = described(&named(1, 8));
    assert_eq!(frames[0].function.as_deref(), Some("aaaaaaaa"));
    assert_eq!(described(&named(100_000, 4 << 20)), []);
}

/// Units of a real file have a line program each; these share one, most of which is padding behind its header.
#[test]
fn a_line_program_that_all_share_costs_no_memory() {
    const UNITS: usize = 16;
    const PADDING: usize = 1 << 20;
    let unit = |number: usize| {
        let entry = format!(".quad spot + 16 * {number}\n.long 16\n");
        format!(
            ".long end_{number} - start_{number}\nstart_{number}:\n.short 4\n.long 0\n.byte 8\n\
             .byte 1\n{entry}.long 0\n.byte 2\n{entry}.asciz \"spot\"\n.byte 0\nend_{number}:\n"
        )
    };
    let units: String = (0..UNITS).map(unit).collect();
    let source = format!(
        ".text\n.globl spot\n.type spot, %function\nspot:\n.rept 16 * {UNITS}\nnop\n.endr\n.size spot, .-spot\n\
         .section .debug_abbrev, \"\", %progbits\n\
         .byte 1, 0x11, 1, 0x11, 1, 0x12, 6, 0x10, 0x17, 0, 0\n.byte 2, 0x2e, 0, 0x11, 1, 0x12, 6, 3, 8, 0, 0\n.byte 0\n\
         .section .debug_line, \"\", %progbits\n.long line_end - line_start\nline_start:\n.short 4\n.long program - header\nheader:\n\
         .byte 1, 1, 1, 0, 1, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1\n.byte 0\n.asciz \"spot.c\"\n.byte 0, 0, 0\n.byte 0\n\
         .fill {PADDING}, 1, 0\nprogram:\n.byte 0, 9, 2\n.quad spot\n.byte 1, 2\n.uleb128 16 * {UNITS}\n.byte 0, 1, 1\nline_end:\n\
         .section .debug_info, \"\", %progbits\n{units}"
    );
    let folder = tempfile::tempdir().expect("a folder");
    let (text, path) = (folder.path().join("spot.s"), folder.path().join("spot.so"));
    std::fs::write(&text, source).expect("written");
    tool("cc", &["-shared", "-nostdlib", "-o"], &[&path, &text]);
    let file = Arc::new(std::fs::File::open(&path).expect("there").into());
    let elf = Elf::parse(&*file).expect("good");
    let spot = elf.dynamic_symbol("spot").expect("a good table").expect("it is exported");
    let mut lines = Lines::of_file(&file).expect("it has DWARF");
    let first = lines.frames(spot.vaddr);
    assert_eq!((first.len(), first[0].line), (1, Some(1)), "{first:?}");
    let one = lines.bytes();
    assert!(one > PADDING, "{one}");
    for number in 1..UNITS as u64 {
        let _refused = lines.frames(spot.vaddr + 16 * number);
    }
    assert!(lines.bytes() < 2 * one, "{} bytes, {one} for one unit", lines.bytes());
}
