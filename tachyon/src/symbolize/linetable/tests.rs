//! Line tables against tables written by hand, against noise, and against what each interpreter itself says.

use super::*;
use std::path::PathBuf;
use std::process::Command;

const fn at(lineno: i32, end_lineno: i32, column: i32, end_column: i32) -> Position {
    Position { lineno, end_lineno, column, end_column }
}

#[test]
fn every_kind_of_entry_decodes() {
    use Format::{Lnotab, Locations, Ranges};
    const NONE: Position = Position::NONE;
    let line = Position::line;
    // Format, table, then pairs of lasti and the position expected with first line 10.
    type Case<'a> = (&'a str, Format, &'a [u8], &'a [(i32, Position)]);
    let cases: &[Case<'_>] = &[
        ("lnotab, empty", Lnotab, &[], &[(-1, line(10)), (0, line(10)), (i32::MAX, line(10))]),
        (
            "lnotab",
            Lnotab,
            &[0, 1, 8, 2, 6, 0xff],
            &[(-1, line(10)), (0, line(11)), (7, line(11)), (8, line(13)), (14, line(12))],
        ),
        ("lnotab, odd byte", Lnotab, &[4, 1, 4], &[(2, line(10)), (4, line(11)), (400, line(11))]),
        ("lnotab, wide gap", Lnotab, &[255, 0, 5, 127, 0, 3], &[(259, line(10)), (260, line(140))]),
        (
            "ranges",
            Ranges,
            &[4, 1, 0, 5, 2, 0x80, 6, 0xff],
            &[(-1, line(10)), (0, line(11)), (4, NONE), (6, line(15)), (11, line(15)), (12, NONE)],
        ),
        ("ranges, half an entry", Ranges, &[4, 1, 9], &[(0, line(11)), (4, NONE)]),
        ("locations, empty", Locations, &[], &[(-1, line(10)), (0, NONE)]),
        ("short", Locations, &[0x80 | 2 << 3, 0x35], &[(0, at(10, 10, 19, 24)), (1, at(10, 10, 19, 24)), (2, NONE)]),
        (
            "one line",
            Locations,
            &[0x80 | 11 << 3 | 1, 200, 255, 0x80 | 12 << 3, 0, 1],
            &[(3, at(11, 11, 200, 255)), (4, at(13, 13, 0, 1))],
        ),
        ("no columns", Locations, &[0x80 | 13 << 3, 5], &[(0, at(8, 8, -1, -1))]),
        ("long", Locations, &[0x80 | 14 << 3 | 7, 0x46, 3, 2, 0x41, 2, 2], &[(15, at(109, 111, 128, 1))]),
        (
            "none keeps the running line",
            Locations,
            &[0x80 | 15 << 3, 0x80 | 10 << 3, 1, 2],
            &[(0, NONE), (2, at(10, 10, 1, 2))],
        ),
        ("start bit missing", Locations, &[0x80 | 15 << 3, 0x50, 1, 2], &[(0, NONE), (2, NONE)]),
        ("varint without end", Locations, &[0x80 | 13 << 3, 127, 127, 127, 127, 127, 127, 127, 0], &[(0, NONE)]),
    ];
    for &(what, format, bytes, expected) in cases {
        let table = LineTable::new(format, 10, bytes.into(), true);
        for &(lasti, position) in expected {
            assert_eq!(table.locate(lasti), position, "{what}: lasti {lasti}");
        }
    }
}

#[test]
fn what_a_cut_table_does_not_cover_has_no_position() {
    let lnotab = LineTable::new(Format::Lnotab, 10, [8, 1].into(), false);
    assert_eq!((lnotab.locate(7), lnotab.locate(8)), (Position::line(10), Position::NONE));
    let locations = LineTable::new(Format::Locations, 10, [0xd8, 1, 2, 0xd8, 1].into(), false);
    assert_eq!((locations.locate(0), locations.locate(2)), (at(11, 11, 1, 2), Position::NONE));
}

#[test]
fn soundness_tells_tables_from_noise() {
    let cases: &[(&str, Format, &[u8], bool)] = &[
        ("empty lnotab: all on the first line", Format::Lnotab, &[], true),
        ("empty ranges", Format::Ranges, &[], false),
        ("empty locations", Format::Locations, &[], false),
        ("half a range", Format::Ranges, &[4], false),
        ("short entry", Format::Locations, &[0x80, 0], true),
        ("text", Format::Locations, b"def f(): pass", false),
        ("zeros", Format::Locations, &[0; 16], false),
    ];
    for &(what, format, bytes, sound) in cases {
        assert_eq!(LineTable::new(format, 1, bytes.into(), true).is_sound(), sound, "{what}");
    }
}

/// Decoding any bytes ends without a panic (the tests run with overflow checks), and a lookup through marks equals one
/// without.
#[test]
fn noise_ends() {
    let mut state: u64 = 0x1234_5678_9abc_def1;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..600 {
        let len = (random() % 2000) as usize;
        // Every other round keeps the bit by which location entries start, so that many entries decode.
        let bytes: Box<[u8]> = (0..len).map(|_| random() as u8 | if round % 2 == 0 { 0x80 } else { 0 }).collect();
        for format in [Format::Lnotab, Format::Ranges, Format::Locations] {
            for firstlineno in [i32::MIN, 1, i32::MAX] {
                let table = LineTable::new(format, firstlineno, bytes.clone(), round % 3 == 0);
                let plain = LineTable {
                    marks: Box::default(),
                    ..LineTable::new(format, firstlineno, bytes.clone(), round % 3 == 0)
                };
                for lasti in [i32::MIN, -1, 0, 1, (random() % 4000) as i32, (random() % 40000) as i32, i32::MAX] {
                    assert_eq!(table.locate(lasti), plain.locate(lasti));
                }
            }
        }
    }
}

#[test]
fn a_lookup_decodes_few_entries_of_a_long_table() {
    let bytes: Box<[u8]> = [0x80 | 11 << 3, 1, 2].repeat(100_000).into();
    let table = LineTable::new(Format::Locations, 1, bytes, true);
    assert!(table.marks.windows(2).all(|pair| pair[1].at - pair[0].at == ENTRIES_PER_MARK * 3));
    for unit in [0, 1, 127, 128, 129, 55_555, 99_999] {
        assert_eq!(table.locate(unit * 2), at(unit + 2, unit + 2, 1, 2));
    }
    assert_eq!(table.locate(200_000), Position::NONE);
}

/// One line of `oracle.py`.
#[derive(serde::Deserialize)]
struct Fact {
    name: String,
    firstlineno: i32,
    table: String,
    not_started: i32,
    /// For each code unit, as runs.
    lines: Vec<(i32, i32)>,
    positions: Option<Vec<(i32, [i32; 4])>>,
}

/// The newest pyenv interpreter of a minor version; in CI it must be there.
pub(in crate::symbolize) fn pyenv_python(version: &str) -> Option<PathBuf> {
    let python = find_pyenv_python(version);
    if python.is_none() {
        crate::not_run::not_run(&format!("a pyenv python{version}"));
    }
    python
}

fn find_pyenv_python(version: &str) -> Option<PathBuf> {
    let root = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let root = root.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")))?;
    let prefix = format!("{version}.");
    let mut found: Vec<_> = std::fs::read_dir(root.join("versions"))
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
        .map(|path| path.join("bin").join(format!("python{version}")))
        .filter(|path| path.exists())
        .collect();
    found.sort();
    found.pop()
}

/// Every code unit of thousands of code objects, as the interpreter itself locates it.
fn compare_with(version: &str, format: Format, options: &[&str]) {
    let Some(python) = pyenv_python(version) else { return };
    let output = Command::new(python).args(options).args(["-c", include_str!("oracle.py")]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (mut codes, mut units) = (0, 0);
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let fact: Fact = serde_json::from_str(line).unwrap();
        let bytes: Box<[u8]> = (0..fact.table.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&fact.table[at..at + 2], 16).unwrap())
            .collect();
        let table = LineTable::new(format, fact.firstlineno, bytes, true);
        assert!(table.is_sound(), "{version}: {}", fact.name);
        codes += 1;
        assert_eq!(table.locate(-1), Position::line(fact.not_started), "{version}: {}", fact.name);
        let mut lasti = 0;
        for &(run, line) in &fact.lines {
            for _ in 0..run {
                assert_eq!(table.locate(lasti).lineno, line, "{version}: {} at {lasti}", fact.name);
                assert!(table.covers(lasti));
                lasti += 2;
            }
        }
        assert_eq!(table.covers(lasti), format == Format::Lnotab, "{version}: {}", fact.name);
        units += lasti / 2;
        assert_eq!(fact.positions.is_some(), format == Format::Locations);
        lasti = 0;
        for &(run, [lineno, end_lineno, column, end_column]) in fact.positions.iter().flatten() {
            for _ in 0..run {
                let expected = at(lineno, end_lineno, column, end_column);
                assert_eq!(table.locate(lasti), expected, "{version}: {} at {lasti}", fact.name);
                lasti += 2;
            }
        }
    }
    eprintln!("python{version} {options:?}: {codes} code objects, {units} code units");
    assert!(codes > 2000, "{version}: only {codes} code objects");
}

#[test]
fn python_3_8_agrees() {
    compare_with("3.8", Format::Lnotab, &[]);
}

#[test]
fn python_3_9_agrees() {
    compare_with("3.9", Format::Lnotab, &[]);
}

#[test]
fn python_3_10_agrees() {
    compare_with("3.10", Format::Ranges, &[]);
}

#[test]
fn python_3_11_agrees() {
    compare_with("3.11", Format::Locations, &[]);
    compare_with("3.11", Format::Locations, &["-X", "no_debug_ranges"]);
}

#[test]
fn python_3_12_agrees() {
    compare_with("3.12", Format::Locations, &[]);
}

#[test]
fn python_3_13_agrees() {
    compare_with("3.13", Format::Locations, &[]);
    compare_with("3.13", Format::Locations, &["-X", "no_debug_ranges"]);
}
