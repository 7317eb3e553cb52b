//! `cargo xtask layouts --diff A B`: what changed between two versions' headers, as far as it matters to a walk.
//!
//! The first thing to look at when a new CPython is out; `docs/dev/new-python-version.md` says what to make of it.

use std::path::Path;

use anyhow::{Context as _, bail};

use super::{Headers, PER_VERSION, ask, label, parse_table};

/// Prints the differences. Each side is a folder of headers, or a version of the committed table (`3.14.10`, `3.15.2t`).
pub(super) fn run(from: &str, to: &str, committed: &str) -> anyhow::Result<()> {
    let (old, new) = (sides(from, committed)?, sides(to, committed)?);
    for old in &old {
        let Some(new) = new.iter().find(|new| new.free_threaded == old.free_threaded) else { continue };
        println!("CPython {} -> {}", label(old), label(new));
        let lines = changes(old, new);
        if lines.is_empty() {
            println!("  nothing that a walk reads");
        }
        for line in lines {
            println!("  {line}");
        }
    }
    if let (Some(old), Some(new)) = (published(Path::new(from))?, published(Path::new(to))?) {
        println!("_Py_DebugOffsets: {} -> {} words", old.len(), new.len());
        let missing = |of: &[String], from: &[String]| -> Vec<String> {
            of.iter().filter(|name| !from.contains(name)).cloned().collect()
        };
        for (sign, names) in [("-", missing(&old, &new)), ("+", missing(&new, &old))] {
            for name in names {
                println!("  {sign} {name}");
            }
        }
    }
    Ok(())
}

/// One side: with and without a GIL if it has both.
fn sides(side: &str, committed: &str) -> anyhow::Result<Vec<Headers>> {
    let dir = Path::new(side);
    if dir.is_dir() {
        let mut found = Vec::new();
        for free_threaded in [false, true] {
            let headers = ask(dir, free_threaded)?;
            found.extend(headers.filter(|headers| headers.free_threaded == free_threaded));
        }
        return Ok(found);
    }
    let found: Vec<Headers> = parse_table(committed)?.into_iter().filter(|headers| label(headers) == side).collect();
    if found.is_empty() {
        bail!("{side} is neither a folder with headers nor a version of the table");
    }
    Ok(found)
}

/// One line for each field that moved, came or went.
fn changes(old: &Headers, new: &Headers) -> Vec<String> {
    let mut lines = Vec::new();
    for ((name, old), new) in PER_VERSION.iter().zip(old.sizes).zip(new.sizes) {
        if old != new {
            lines.push(format!("{name}: {old} -> {new}"));
        }
    }
    let shown = |value: Option<u32>| value.map_or("absent".to_owned(), |value| value.to_string());
    for (name, value) in &new.common {
        let before = old.common.iter().find(|(of, _)| of == name).and_then(|(_, value)| *value);
        if before != *value {
            lines.push(format!("{name}: {} -> {}", shown(before), shown(*value)));
        }
    }
    lines
}

/// Names of the words of `_Py_DebugOffsets`, in order; `None` for a version without it, or if it is not a folder.
fn published(dir: &Path) -> anyhow::Result<Option<Vec<String>>> {
    // 3.13 has it in another header.
    for header in ["pycore_debug_offsets.h", "pycore_runtime.h"] {
        let path = dir.join("internal").join(header);
        if path.is_file() {
            let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
            return Ok(words(&text));
        }
    }
    Ok(None)
}

/// The words of the structure in a header's text: `structure.field`.
fn words(text: &str) -> Option<Vec<String>> {
    let body = text.split("typedef struct _Py_DebugOffsets {").nth(1)?.split("} _Py_DebugOffsets;").next()?;
    let (mut names, mut open) = (Vec::new(), None);
    for line in body.lines().map(str::trim) {
        if line.starts_with("struct ") && line.ends_with('{') {
            open = Some(names.len());
        } else if let Some(field) = line.strip_prefix("uint64_t ").and_then(|rest| rest.split(';').next()) {
            names.push(field.to_owned());
        } else if let Some(name) = line.strip_prefix("} ").and_then(|rest| rest.split(';').next())
            && let Some(first) = open.take()
        {
            for field in names.iter_mut().skip(first) {
                *field = format!("{name}.{field}");
            }
        }
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_structure_have_their_names() {
        let text = "x\ntypedef struct _Py_DebugOffsets {\n    char cookie[8] _Py_NONSTRING;\n    uint64_t version;\n    \
            // Runtime\n    struct _runtime_state {\n        uint64_t size;\n        uint64_t finalizing; // why\n    } \
            runtime_state;\n    struct _gc {\n        uint64_t size;\n    } gc;\n} _Py_DebugOffsets;\nuint64_t other;\n";
        assert_eq!(words(text).unwrap(), ["version", "runtime_state.size", "runtime_state.finalizing", "gc.size"]);
        assert_eq!(words("nothing"), None);
    }

    #[test]
    fn what_moved_is_told() {
        let old = Headers {
            version: "3.14.0".into(),
            version_hex: 0x030e_00f0,
            free_threaded: false,
            sizes: [1, 2, 3],
            common: vec![("a".into(), Some(8)), ("b".into(), None), ("c".into(), Some(1))],
        };
        let mut new = old.clone();
        new.sizes[1] = 4;
        new.common = vec![("a".into(), Some(16)), ("b".into(), Some(2)), ("c".into(), Some(1))];
        assert_eq!(changes(&old, &new), ["interp_size: 2 -> 4", "a: 8 -> 16", "b: absent -> 2"]);
    }
}
