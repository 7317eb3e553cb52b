//! `cargo xtask layouts`: where each CPython version keeps the fields of `tachyon_common`'s `Layout`, taken from its own headers.
//!
//! A small C program (`layouts.c`) is compiled against every version's headers at hand and run; what it prints becomes
//! `tachyon/src/inspect/builtin.rs`. Versions whose headers are not at hand keep the rows they have in that file, so it
//! can be renewed on a machine that has only some of them. `--check` writes nothing and fails if the file and the
//! headers at hand differ.

mod diff;
mod suites;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

/// Where the generated table is, from the workspace's root.
const TABLE: &str = "tachyon/src/inspect/builtin.rs";

/// The program compiled against every version's headers.
const PROGRAM: &str = include_str!("layouts.c");

/// Oldest minor version that has a row.
const OLDEST_MINOR: u32 = 8;

/// First minor version that can be built without a GIL.
const FIRST_FREE_THREADED_MINOR: u32 = 13;

/// What a row says of one version, besides the offsets.
const PER_VERSION: [&str; 3] = ["runtime_size", "interp_size", "tstate_size"];

/// Sizes that are the same in all versions of a row.
const PER_ROW: [&str; 3] = ["frame_size", "code_size", "type_size"];

/// Generate the table of CPython's structure layouts from its headers.
#[derive(Debug, clap::Args)]
pub(crate) struct LayoutsArgs {
    /// Folder with a `Python.h` and CPython's `internal/` headers, besides those of pyenv and of the system.
    #[arg(long = "include", value_name = "DIR")]
    include: Vec<PathBuf>,
    /// Write nothing; fail when the committed table differs from what the headers at hand say.
    #[arg(long)]
    check: bool,
    /// Write nothing; compare the committed table with the headers of every Debian suite, of pyenv and of the zoo.
    #[arg(long)]
    suites: bool,
    /// Report what changed between two versions instead: each a folder of headers or a version of the table.
    #[arg(long, num_args = 2, value_names = ["A", "B"])]
    diff: Option<Vec<String>>,
    /// Root of the workspace.
    #[arg(long, value_name = "DIR", default_value = ".")]
    root: PathBuf,
}

/// What the headers of one version say.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Headers {
    version: String,
    version_hex: u32,
    free_threaded: bool,
    sizes: [u32; PER_VERSION.len()],
    common: Common,
}

/// What versions must have in common to share a row: name and value, `None` for an absent field.
type Common = Vec<(String, Option<u32>)>;

/// Runs `cargo xtask layouts`.
///
/// # Errors
/// When there are no headers or no C compiler, or with `--check` if the table is out of date.
pub(crate) fn run(args: LayoutsArgs) -> anyhow::Result<()> {
    let table = args.root.join(TABLE);
    let mut known: BTreeMap<(u32, bool), Headers> = BTreeMap::new();
    let committed = std::fs::read_to_string(&table).unwrap_or_default();
    if let Some([from, to]) = args.diff.as_deref() {
        return diff::run(from, to, &committed);
    }
    let rows = parse_table(&committed).with_context(|| format!("cannot read {}", table.display()))?;
    if args.suites {
        return suites::run(&rows);
    }
    for headers in rows {
        known.insert((headers.version_hex, headers.free_threaded), headers);
    }
    let mut include = args.include.clone();
    include.extend(installed_headers());
    let mut asked = 0;
    for dir in &include {
        for free_threaded in [false, true] {
            if let Some(headers) = ask(dir, free_threaded)? {
                println!("{}: CPython {}", dir.display(), label(&headers));
                known.insert((headers.version_hex, headers.free_threaded), headers);
                asked += 1;
            }
        }
    }
    ensure!(asked > 0, "no CPython headers found: give a folder with --include");
    let text = render(known.values())?;
    if args.check {
        ensure!(text == committed, "{TABLE} is out of date: run `cargo xtask layouts` and commit it");
        println!("{TABLE} agrees with the headers of {asked} builds");
    } else {
        std::fs::write(&table, text).with_context(|| format!("cannot write {}", table.display()))?;
        println!("{TABLE} written");
    }
    Ok(())
}

/// Header folders of pyenv and of the system.
fn installed_headers() -> Vec<PathBuf> {
    let pyenv = std::env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".pyenv")));
    let versions = pyenv.into_iter().flat_map(|root| folders(&root.join("versions")));
    let mut found: Vec<PathBuf> = versions.flat_map(|version| folders(&version.join("include"))).collect();
    found.extend(folders(Path::new("/usr/include")));
    found.retain(|dir| dir.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3")));
    found.retain(|dir| dir.join("internal").is_dir());
    found
}

/// The folders in `dir`, in order of name.
fn folders(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten();
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    found.sort();
    found
}

/// Compiles the program against the headers in `dir` and runs it. `None` when they are of a version without a row.
fn ask(dir: &Path, free_threaded: bool) -> anyhow::Result<Option<Headers>> {
    let patchlevel = dir.join("patchlevel.h");
    let text = std::fs::read_to_string(&patchlevel).with_context(|| format!("cannot read {}", patchlevel.display()))?;
    let number = |name: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix("#define ")?.trim().strip_prefix(name)?.trim().parse::<u32>().ok())
    };
    let (Some(3), Some(minor)) = (number("PY_MAJOR_VERSION"), number("PY_MINOR_VERSION")) else { return Ok(None) };
    if minor < OLDEST_MINOR || (free_threaded && minor < FIRST_FREE_THREADED_MINOR) {
        return Ok(None);
    }
    let work = tempfile::tempdir().context("cannot make a folder for the C program")?;
    let (source, binary) = (work.path().join("layouts.c"), work.path().join("layouts"));
    std::fs::write(&source, PROGRAM).with_context(|| format!("cannot write {}", source.display()))?;
    let mut compile = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compile.arg("-w").arg("-I").arg(dir).arg("-I").arg(dir.join("internal"));
    // Debian's `pyconfig.h` includes the architecture's own, which lies beside the `python3.x` folder.
    if let Some(parent) = dir.parent() {
        compile.arg("-I").arg(parent);
    }
    if free_threaded {
        compile.arg("-DPy_GIL_DISABLED=1");
    }
    let compiled = compile.arg(&source).arg("-o").arg(&binary).output().context("cannot run the C compiler")?;
    if !compiled.status.success() {
        bail!("cannot compile against {}: {}", dir.display(), String::from_utf8_lossy(&compiled.stderr));
    }
    let output = Command::new(&binary).output().context("cannot run the compiled program")?;
    ensure!(output.status.success(), "the program compiled against {} failed", dir.display());
    parse_answer(std::str::from_utf8(&output.stdout).context("the program's answer is not text")?).map(Some)
}

/// Parses what the program printed.
fn parse_answer(text: &str) -> anyhow::Result<Headers> {
    let mut values = Vec::new();
    let mut version = String::new();
    for line in text.lines() {
        let (name, value) = line.split_once(' ').with_context(|| format!("odd line {line:?}"))?;
        match value {
            "-" => values.push((name.to_owned(), None)),
            _ if name == "version" => value.clone_into(&mut version),
            _ => values.push((name.to_owned(), Some(value.parse().with_context(|| format!("odd line {line:?}"))?))),
        }
    }
    let mut take = |wanted: &str| -> anyhow::Result<u32> {
        let at = values.iter().position(|(name, _)| name == wanted).with_context(|| format!("no {wanted}"))?;
        values.remove(at).1.with_context(|| format!("{wanted} is absent"))
    };
    let version_hex = take("version_hex")?;
    let free_threaded = take("free_threaded")? != 0;
    let mut sizes = [0; PER_VERSION.len()];
    for (size, name) in sizes.iter_mut().zip(PER_VERSION) {
        *size = take(name)?;
    }
    Ok(Headers { version, version_hex, free_threaded, sizes, common: values })
}

/// Writes the table: one row for each group of versions that agree on everything in common.
fn render<'a>(known: impl Iterator<Item = &'a Headers>) -> anyhow::Result<String> {
    let mut rows: Vec<Vec<&Headers>> = Vec::new();
    for headers in known {
        let same = |row: &&mut Vec<&Headers>| {
            let first = row[0];
            first.version_hex >> 16 == headers.version_hex >> 16
                && first.free_threaded == headers.free_threaded
                && first.common == headers.common
        };
        match rows.iter_mut().find(same) {
            Some(row) => row.push(headers),
            None => rows.push(vec![headers]),
        }
    }
    let mut text = String::from(
        "// Generated by `cargo xtask layouts` from CPython's own headers. Do not edit; run that command again.\n\
         //! Layouts of the CPython versions that do not (or not wholly) publish their own.\n\
         //!\n\
         //! Taken on x86-64. Each row names the versions whose headers agree on it; sizes grow at a structure's end\n\
         //! between patch releases and tell them apart.\n\n\
         use tachyon_common::layout::{Layout, UNLINKED};\n\n\
         use super::layout::{BuiltinLayout, Headers};\n\n\
         const ABSENT: u32 = Layout::ABSENT;\n\n\
         /// One row for each minor version and kind of build; several where patch releases differ.\n\
         pub(super) const BUILTIN: &[BuiltinLayout] = &[\n",
    );
    for row in &rows {
        let first = row[0];
        let (major, minor) = (first.version_hex >> 24, first.version_hex >> 16 & 0xff);
        writeln!(text, "    BuiltinLayout {{")?;
        writeln!(text, "        minor_version: ({major}, {minor}),")?;
        writeln!(text, "        free_threaded: {},", first.free_threaded)?;
        writeln!(text, "        headers: &[")?;
        for headers in row {
            writeln!(text, "            // CPython {}", label(headers))?;
            let [runtime, interp, tstate] = headers.sizes;
            let hex = headers.version_hex;
            writeln!(
                text,
                "            Headers {{ version_hex: {hex:#010x}, runtime_size: {runtime}, interp_size: {interp}, \
                 tstate_size: {tstate} }},"
            )?;
        }
        writeln!(text, "        ],")?;
        for name in PER_ROW {
            let size = first.common.iter().find(|(of, _)| of == name).and_then(|(_, size)| *size);
            writeln!(text, "        {name}: {},", size.with_context(|| format!("no {name}"))?)?;
        }
        writeln!(text, "        layout: Layout {{")?;
        writeln!(text, "            version_hex: 0,")?;
        writeln!(text, "            flags: 0,")?;
        writeln!(text, "            unlinked: [0; UNLINKED],")?;
        for (name, value) in first.common.iter().filter(|(name, _)| !PER_ROW.contains(&name.as_str())) {
            match value {
                Some(value) => writeln!(text, "            {name}: {value},")?,
                None => writeln!(text, "            {name}: ABSENT,")?,
            }
        }
        writeln!(text, "        }},")?;
        writeln!(text, "    }},")?;
    }
    text.push_str("];\n");
    Ok(text)
}

/// A version's name in comments: `3.13.0`, or `3.13.0t` of a free-threaded build.
fn label(headers: &Headers) -> String {
    format!("{}{}", headers.version, if headers.free_threaded { "t" } else { "" })
}

/// Reads the table that [`render`] wrote. An empty text is an empty table.
fn parse_table(text: &str) -> anyhow::Result<Vec<Headers>> {
    let mut found = Vec::new();
    let mut row: Vec<Headers> = Vec::new();
    let mut common: Common = Vec::new();
    let mut version = String::new();
    let rows = text.lines().skip_while(|line| !line.starts_with("pub(super) const BUILTIN")).skip(1);
    let mut free_threaded = false;
    for line in rows {
        let line = line.trim().trim_end_matches(',');
        if let Some(name) = line.strip_prefix("// CPython ") {
            name.trim_end_matches('t').clone_into(&mut version);
        } else if let Some(fields) = line.strip_prefix("Headers {") {
            let numbers = fields.trim_end_matches('}').split(',').map(|field| number(field).map(|(_, value)| value));
            let numbers: Vec<Option<u32>> = numbers.collect::<anyhow::Result<_>>()?;
            let [Some(version_hex), Some(runtime), Some(interp), Some(tstate)] = numbers[..] else {
                bail!("odd line {line:?}");
            };
            let sizes = [runtime, interp, tstate];
            let version = version.clone();
            row.push(Headers { version, version_hex, free_threaded, sizes, common: Vec::new() });
        } else if let Some(value) = line.strip_prefix("free_threaded: ") {
            free_threaded = value == "true";
        } else if line == "}" && !row.is_empty() && !common.is_empty() {
            for mut headers in row.drain(..) {
                headers.common.clone_from(&common);
                found.push(headers);
            }
            common.clear();
        } else if line.contains(": ") && !line.ends_with(['{', '[', ']', ')']) {
            let (name, value) = number(line)?;
            if name != "version_hex" && name != "flags" {
                common.push((name, value));
            }
        }
    }
    Ok(found)
}

/// Parses `name: value` with a decimal, hexadecimal or absent value.
fn number(field: &str) -> anyhow::Result<(String, Option<u32>)> {
    let odd = || format!("odd field {field:?}");
    let (name, value) = field.trim().split_once(": ").with_context(odd)?;
    let value = match value.strip_prefix("0x") {
        _ if value == "ABSENT" => None,
        Some(digits) => Some(u32::from_str_radix(&digits.replace('_', ""), 16).with_context(odd)?),
        None => Some(value.parse().with_context(odd)?),
    };
    Ok((name.to_owned(), value))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = "version 3.13.0\nversion_hex 51183856\nfree_threaded 0\nruntime_size 283320\n\
        interp_size 194968\ntstate_size 304\nframe_size 88\ncode_size 208\ntype_size 416\n\
        runtime_interpreters_head 632\nruntime_gil -\n";

    #[test]
    fn a_table_reads_back_as_what_was_written() {
        let one = parse_answer(ANSWER).expect("the answer is whole");
        let mut two = one.clone();
        two.version = "3.13.5".into();
        two.version_hex = 0x030d_05f0;
        two.sizes[0] += 56;
        let mut other = one.clone();
        other.free_threaded = true;
        other.common[3].1 = Some(640);
        let known = [one, two, other];
        let text = render(known.iter()).expect("all sizes are there");
        assert_eq!(text.matches("BuiltinLayout {").count(), 2);
        assert_eq!(parse_table(&text).expect("the table is whole"), known);
    }

    #[test]
    fn an_answer_without_its_sizes_is_refused() {
        for cut in ["version_hex", "runtime_size", "free_threaded"] {
            let lines: Vec<&str> = ANSWER.lines().filter(|line| !line.starts_with(&format!("{cut} "))).collect();
            assert!(parse_answer(&lines.join("\n")).is_err(), "without {cut}");
        }
    }
}
