//! Checks the sources against what `ARCHITECTURE.md` and the shared crate promise about them: which room uses which, that
//! every type shared with the kernel has its size asserted, that errors state that they have advice, and that both workspaces
//! have the same lints.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Arrows = BTreeSet<(String, String)>;

/// Arrows that the table forbids and that still exist, each with its reason. One that no longer exists must be removed here.
const KNOWN_VIOLATIONS: [(&str, &str, &str); 0] = [];

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crate is a directory of the project")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

/// All Rust files below a directory.
fn sources(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("cannot list {}: {error}", dir.display()));
    let paths = entries.map(|entry| entry.expect("the directory can be read").path());
    let (dirs, mut files): (Vec<_>, Vec<_>) = paths.partition(|path| path.is_dir());
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files.extend(dirs.iter().flat_map(|dir| sources(dir)));
    files
}

/// The code without its line comments: a link in a comment does not use a room.
fn without_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn word(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// The rooms that a file names by `crate::room` or `crate::{room, other::Thing}`.
fn used(text: &str) -> BTreeSet<String> {
    let text = without_comments(text);
    let mut rooms = BTreeSet::new();
    for (at, path) in text.match_indices("crate::") {
        // `$crate` in a macro is this crate too; `my_crate::` is not.
        if text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let rest = &text[at + path.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            rooms.insert(word(rest).to_owned());
            continue;
        };
        let (mut depth, mut start) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if start && depth == 0 && !c.is_whitespace() => {
                    rooms.insert(word(&group[at..]).to_owned());
                    start = false;
                }
                _ => {}
            }
        }
    }
    rooms
}

/// Which room uses which; a file next to the rooms, `report.rs`, is one too.
fn arrows() -> Arrows {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut arrows = Arrows::new();
    for file in sources(&src) {
        let below = file.strip_prefix(&src).expect("it was found there");
        let first = below.iter().next().and_then(|name| name.to_str()).expect("file names are UTF-8");
        let room = first.trim_end_matches(".rs");
        if ["lib", "main"].contains(&room) {
            continue;
        }
        let text = read(&file);
        assert!(!text.contains("super::super::super::"), "{}: say `crate::`, which can be followed", file.display());
        // `not_run` is the tests' own (`lib.rs`).
        let others = used(&text).into_iter().filter(|other| *other != room && other != "not_run");
        arrows.extend(others.map(|other| (room.to_owned(), other)));
    }
    arrows
}

/// The column "uses" of the table of rooms. `all` is every room except `cli`; `all, cli` is every room.
fn allowed(architecture: &str) -> BTreeMap<String, BTreeSet<String>> {
    let rows = architecture.lines().skip_while(|line| !line.starts_with("| room |")).skip(2);
    let rows: Vec<Vec<&str>> = rows
        .take_while(|line| line.starts_with('|'))
        .map(|line| line.trim_matches('|').split('|').map(str::trim).collect())
        .collect();
    let name = |cell: &str| cell.trim_matches('`').to_owned();
    let all: BTreeSet<String> = rows.iter().map(|row| name(row[0])).filter(|room| room != "cli").collect();
    rows.iter()
        .map(|row| {
            let uses = row.get(3).unwrap_or_else(|| panic!("the row of {} has no column `uses`", row[0]));
            let words = uses.split(',').map(|cell| name(cell.trim())).filter(|cell| !cell.is_empty());
            let rooms = words.flat_map(|cell| if cell == "all" { all.clone() } else { BTreeSet::from([cell]) });
            (name(row[0]), rooms.collect())
        })
        .collect()
}

#[test]
fn rooms_use_what_the_table_allows() {
    let allowed = allowed(&read(&project().join("ARCHITECTURE.md")));
    let arrows = arrows();
    let is_known = |from: &str, to: &str| KNOWN_VIOLATIONS.iter().any(|(a, b, _)| (*a, *b) == (from, to));
    let mut wrong = Vec::new();
    for (from, to) in &arrows {
        let Some(rooms) = allowed.get(from) else {
            wrong.push(format!("{from} is no room of the table in ARCHITECTURE.md"));
            continue;
        };
        if !rooms.contains(to) && !is_known(from, to) {
            wrong.push(format!("{from} uses {to}, which the table in ARCHITECTURE.md does not allow"));
        }
    }
    for (from, to, _) in KNOWN_VIOLATIONS {
        if !arrows.contains(&(from.to_owned(), to.to_owned())) {
            wrong.push(format!("{from} uses {to} no more: take it out of KNOWN_VIOLATIONS"));
        }
    }
    // The table allows nothing that no room uses: it is a description too.
    for (from, rooms) in allowed.iter().filter(|(from, _)| !["recording", "cli"].contains(&from.as_str())) {
        let unused = rooms.iter().filter(|to| !arrows.contains(&(from.clone(), (*to).clone())));
        wrong.extend(unused.map(|to| format!("the table says that {from} uses {to}, and it does not")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn imports_are_found() {
    let text = "use crate::remote::Pid; // crate::cli\nuse crate::{types::{A, B},\n profile, sinks::x};\nmy_crate::no; $crate::yes!()";
    let found: Vec<_> = used(text).into_iter().collect();
    assert_eq!(found, ["profile", "remote", "sinks", "types", "yes"]);
}

#[test]
fn a_table_is_read() {
    let text = "| room | in | not | uses |\n|---|---|---|---|\n| `a` | x | y | |\n| `b` | x | y | `a` |\n| `c` | x | y | all |\n\nend";
    let rooms = allowed(text);
    let of = |room: &str| rooms[room].iter().map(String::as_str).collect::<Vec<_>>();
    assert_eq!((of("a"), of("b"), of("c")), (vec![], vec!["a"], vec!["a", "b", "c"]));
}

/// Names of the `#[repr(C)]` types of a file, and of those whose size a `const` assertion names.
fn shared_types(text: &str) -> (Vec<String>, BTreeSet<String>) {
    let text = without_comments(text);
    let declared = text.split("#[repr(C)]").skip(1).filter_map(|after| {
        let after = after.split_once("struct ").or_else(|| after.split_once("union "))?.1;
        Some(word(after).to_owned())
    });
    let asserted = text.split("const _: () = assert!(").skip(1).flat_map(|after| {
        let assertion = after.split(';').next().unwrap_or_default();
        let sizes = assertion.split("size_of::<").skip(1);
        sizes.map(|size| word(size).to_owned()).collect::<Vec<_>>()
    });
    (declared.collect(), asserted.collect())
}

#[test]
fn sizes_of_shared_types_are_asserted() {
    let (mut declared, mut asserted) = (Vec::new(), BTreeSet::new());
    for file in sources(&project().join("tachyon-common/src")) {
        let (types, sizes) = shared_types(&read(&file));
        declared.extend(types);
        asserted.extend(sizes);
    }
    assert!(declared.len() > 15, "only these types were found: {declared:?}");
    declared.retain(|name| !asserted.contains(name));
    assert!(declared.is_empty(), "their sizes are not asserted at compile time: {declared:?}");
}

/// An error's hint and exit status are found only if its type states next to them that it has some.
#[test]
fn errors_with_advice_say_so() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut with_advice = 0;
    for file in sources(&src) {
        let text = read(&file);
        for name in text.lines().filter_map(|line| line.strip_prefix("impl Advice for ")).map(word) {
            assert!(text.contains(&format!("\nadvises!({name});\n")), "{}: {name}", file.display());
            with_advice += 1;
        }
    }
    assert!(with_advice > 5, "{with_advice} found");
}

/// CI's toolchains are the one that the object is built with and one that is no older than the workspace asks for.
#[test]
fn ci_pins_its_toolchains() {
    let (ci, bpf) = (read(&project().join(".ci/run")), read(&project().join("xtask/src/bpf.rs")));
    let of_object = bpf.split("TOOLCHAIN: &str = \"").nth(1).and_then(|rest| rest.split('"').next());
    let value = |name: &str| ci.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    assert_eq!(value("nightly"), of_object, "the nightly of .ci/run and that of xtask/src/bpf.rs");
    let lints = value("lints").expect("clippy's toolchain is pinned");
    let minor = |version: &str| version.split('.').nth(1).and_then(|minor| minor.parse::<u32>().ok());
    let manifest = read(&project().join("Cargo.toml"));
    let oldest =
        manifest.lines().find_map(|line| line.strip_prefix("rust-version = ")).expect("it names an oldest Rust");
    assert!(
        minor(lints) >= minor(oldest.trim_matches('"')) && minor(lints).is_some(),
        "{lints} is older than {oldest}"
    );
    assert!(!ci.contains("cargo +nightly "), "a nightly of the day judges nothing here");
}

/// The kernel side is a workspace of its own and cannot inherit them.
#[test]
fn the_kernel_side_has_the_lints_of_the_workspace() {
    let toml = |path: &str| read(&project().join(path)).parse::<toml::Table>().expect("it is TOML");
    let lints = |table: &toml::Table, tool: &str| table["lints"][tool].as_table().expect("a table").clone();
    let workspace = toml("Cargo.toml");
    let (workspace, ebpf) = (workspace["workspace"].as_table().expect("a table"), toml("tachyon-ebpf/Cargo.toml"));
    for tool in ["rust", "clippy"] {
        let own = lints(&ebpf, tool);
        for (lint, level) in lints(workspace, tool) {
            assert_eq!(own.get(&lint), Some(&level), "{tool}::{lint} of tachyon-ebpf/Cargo.toml");
        }
    }
}
