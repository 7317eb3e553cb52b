//! `convert`: TACH files to tables, and tables to a TACH file.

pub use crate::args::ConvertArgs;
use crate::compact::compact;
use crate::lake::Lake;
use crate::net::bucket::is_url;
use crate::segment::{self, Options};
use crate::tables::Table;
use crate::{load, restore, tables};
use anyhow::{Context as _, bail};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tachyon::advice::Refusal;
use tachyon::input::find;
use tachyon::sinks::text::escape_controls;
use tempfile::NamedTempFile;

/// Runs the command; reports what the user should know.
///
/// # Errors
/// When a file cannot be read or written.
pub fn run(args: &ConvertArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    if args.output.extension() == Some(OsStr::new("tach")) { to_tach(args, out) } else { to_tables(args, out) }
}

fn to_tables(args: &ConvertArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let options = Options { slice: args.slice, start: args.start };
    let (lakes, inputs): (Vec<PathBuf>, Vec<PathBuf>) = args.inputs.iter().cloned().partition(|path| is_lake(path));
    if let [lake] = &lakes[..] {
        return to_larger_tables(lake, &inputs, args, out);
    }
    if lakes.len() > 1 {
        bail!(
            Refusal::new("several directories of tables at once are not read")
                .with_hint("copy their files into one directory: no two hosts write the same")
        );
    }
    let found = find(&args.inputs)?;
    tell(out, found.notes.iter().map(String::as_str));
    // Two files of one name in one hour would replace each other.
    let mut written: HashMap<String, PathBuf> = HashMap::new();
    let (mut samples, mut bytes) = (0, 0);
    for path in &found.files {
        let cannot = || format!("cannot read {}", path.display());
        let segment = segment::read(path, options).with_context(cannot)?;
        if segment.is_undated {
            tell(
                out,
                [format!("{} does not say when it was recorded: taken for 1970-01-01 (--start)", path.display())
                    .as_str()],
            );
        }
        samples += segment.sample_count;
        for file in tables::files(&segment).with_context(cannot)? {
            if let Some(other) = written.insert(file.path.clone(), path.clone()) {
                let message = format!("{} and {} would both be {}", other.display(), path.display(), file.path);
                let hint = "two files of one name and start are one recording twice, or need other names";
                return Err(Refusal::new(message).with_hint(hint).into());
            }
            bytes += file.bytes.len();
            write(&args.output.join(&file.path), &file.bytes)?;
        }
    }
    let count = found.files.len();
    tell(
        out,
        [format!("{samples} samples of {count} files in {} files of tables, {bytes} bytes", written.len()).as_str()],
    );
    Ok(())
}

/// A URL, or a directory with tables in it.
fn is_lake(path: &Path) -> bool {
    path.to_str().is_some_and(is_url) || path.join(Table::Samples.name()).is_dir()
}

fn to_larger_tables(root: &Path, others: &[PathBuf], args: &ConvertArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    if let Some(other) = others.first() {
        bail!(
            Refusal::new(format!("{} has no tables, and {} has", other.display(), root.display()))
                .with_hint("convert recordings and tables one after the other")
        );
    }
    if args.output.canonicalize().ok().is_some_and(|output| Some(output) == root.canonicalize().ok()) {
        bail!(Refusal::new("tables cannot be written where they are read").with_hint("give another directory as -o"));
    }
    let lake = Lake::open(&root.to_string_lossy())?;
    lake.expect_some(&[])?;
    let (mut files, mut bytes) = (0, 0);
    let samples = compact(&lake, args.slice, |file| {
        (files, bytes) = (files + 1, bytes + file.bytes.len());
        write(&args.output.join(&file.path), &file.bytes)
    })?;
    tell(out, [format!("{samples} samples in {files} files of tables, {bytes} bytes").as_str()]);
    Ok(())
}

fn to_tach(args: &ConvertArgs, out: &mut dyn Write) -> anyhow::Result<()> {
    let path = &args.output;
    // A file that appears meanwhile is noticed at the end, too.
    if path.exists() && !args.force {
        bail!(exists(path));
    }
    let tables = load::read(&args.inputs)?;
    let cannot = || format!("cannot write {}", path.display());
    let mut file = beside(path).with_context(cannot)?;
    let samples = restore::write(&tables, file.as_file_mut()).with_context(cannot)?;
    if args.force {
        file.persist(path).map_err(|error| error.error).with_context(cannot)?;
    } else if let Err(error) = file.persist_noclobber(path) {
        match error.error.kind() {
            io::ErrorKind::AlreadyExists => bail!(exists(path)),
            _ => return Err(error.error).with_context(cannot),
        }
    }
    tell(out, [format!("{samples} samples in {}", path.display()).as_str()]);
    Ok(())
}

fn exists(path: &Path) -> Refusal {
    Refusal::new(format!("{} exists already", path.display())).with_hint("--force replaces it")
}

/// Writes a file that appears only when complete; an existing one is replaced, because its name says what is in it.
fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let cannot = || format!("cannot write {}", path.display());
    fs::create_dir_all(path.parent().unwrap_or(path)).with_context(cannot)?;
    let mut file = beside(path).with_context(cannot)?;
    file.write_all(bytes).with_context(cannot)?;
    file.persist(path).map_err(|error| error.error).with_context(cannot)?;
    Ok(())
}

/// A file in the directory of another, with the permissions of a new file.
pub(crate) fn beside(path: &Path) -> io::Result<NamedTempFile> {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // Less the umask.
    let rights = fs::Permissions::from_mode(0o666);
    tempfile::Builder::new().prefix(".tachyon-fleet-").suffix(".part").permissions(rights).tempfile_in(directory)
}

/// Standard error may be closed: everything is done all the same.
fn tell<'a>(out: &mut dyn Write, lines: impl IntoIterator<Item = &'a str>) {
    for line in lines {
        let _closed = writeln!(out, "{}", escape_controls(line));
    }
}
