//! `symbolize`: names native functions that a recording only knew by address.
//!
//! Functions in a file without symbols are named by where they start (`etree.so!0x4a3c0`). With the debug file from a
//! distribution or debuginfod they get their names: build ids show which file belongs to which. The samples stay as they are,
//! byte for byte.

use super::args::SymbolizeArgs;
use super::output::{Destination, OutputFile};
use crate::input;
use crate::profile::SPECIAL_FILENAME;
use crate::profile::address_of_name;
use crate::remote::elf::Elf;
use crate::sinks::metadata::{Metadata, ObjectMetadata};
use crate::symbolize::native::FunctionNames;
use crate::tach::{Reader, Tables};
use anyhow::{Context, bail};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{BufReader, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

/// The outcome of naming.
#[derive(Debug, Default)]
struct Outcome {
    /// Number of functions that were only known by address.
    nameless: usize,
    /// New names, by index of the string.
    names: HashMap<u32, String>,
    /// Objects without a debug file, each with the reason.
    missing: BTreeSet<String>,
}

/// Renames what can be renamed, in place by default, and reports what was done.
///
/// # Errors
/// When the file cannot be read or written, or nothing in it got a name.
pub fn run(args: &SymbolizeArgs, told: &mut dyn Write) -> anyhow::Result<()> {
    let reading = || format!("cannot symbolize {}", args.file.display());
    let reader = Reader::new(BufReader::new(input::open(&args.file).with_context(reading)?)).with_context(reading)?;
    if !reader.can_be_copied() {
        bail!("cannot symbolize {}: it has another byte order; export it to a TACH file first", args.file.display());
    }
    let folders = if args.debug_dirs.is_empty() { default_folders() } else { args.debug_dirs.clone() };
    let outcome = look_up(reader.tables(), &folders);
    for missing in &outcome.missing {
        writeln!(told, "tachyon-bpf: {}", super::escape::escape(missing))?;
    }
    let renamed = outcome.names.len();
    if outcome.nameless > 0 && renamed == 0 {
        bail!("cannot symbolize {}: none of {} functions got a name", args.file.display(), outcome.nameless);
    }
    if outcome.nameless > 0 || args.output.is_some() {
        let path = args.output.clone().unwrap_or_else(|| args.file.clone());
        let in_place = args.output.is_none();
        let output = OutputFile::create(&Destination::from_argument(path), args.force || in_place)?;
        let file = output.try_clone_file()?;
        reader.copy_renamed(file, |index| outcome.names.get(&index).cloned()).with_context(reading)?;
        output.commit()?;
    }
    writeln!(told, "tachyon-bpf: {renamed} of {} unnamed functions now have a name", outcome.nameless)?;
    Ok(())
}

fn look_up(tables: &Tables, folders: &[PathBuf]) -> Outcome {
    let mut outcome = Outcome::default();
    let objects = Metadata::find(tables).map(|metadata| metadata.objects).unwrap_or_default();
    let mut files: HashMap<&str, Option<FunctionNames>> = HashMap::new();
    let functions: BTreeSet<u32> = tables
        .frames()
        .iter()
        .filter(|frame| frame.is_called() || tables.string(frame.filename) == Some(SPECIAL_FILENAME))
        .map(|frame| frame.function)
        .collect();
    for index in functions {
        let Some((object, vaddr)) = tables.string(index).and_then(address_of_name) else { continue };
        outcome.nameless += 1;
        let missing = &mut outcome.missing;
        let names = files.entry(object).or_insert_with(|| match find(object, &objects, folders) {
            Ok(names) => Some(names),
            Err(reason) => {
                missing.insert(reason);
                None
            }
        });
        if let Some(name) = names.as_ref().and_then(|names| names.at(vaddr)) {
            outcome.names.insert(index, format!("{object}!{name}"));
        }
    }
    outcome
}

/// The names of an object's functions.
fn find(object: &str, objects: &[ObjectMetadata], folders: &[PathBuf]) -> Result<FunctionNames, String> {
    let ids: BTreeSet<&str> =
        objects.iter().filter(|known| known.name == object).map(|known| known.build_id.as_str()).collect();
    let id = match Vec::from_iter(ids)[..] {
        [] => return Err(format!("{object}: the recording does not have its build id")),
        [id] => id,
        _ => return Err(format!("{object}: several files with this name were recorded, with different build ids")),
    };
    let valid = id.len() > 2 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !valid {
        return Err(format!("{object}: its build id is malformed"));
    }
    let candidates = folders.iter().flat_map(|folder| candidates(folder, id, object));
    let found = candidates.into_iter().find_map(|path| {
        // A FIFO must not hold this up.
        let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()?;
        let own =
            file.metadata().ok()?.is_file() && Elf::parse(&file).ok()?.build_id().is_some_and(|own| hex(&own) == id);
        own.then(|| FunctionNames::of(file.into()))?
    });
    found.ok_or_else(|| format!("{object}: no debug file has its build id {id}"))
}

/// Where a debug file may be: as distributions lay them out (GDB manual, "Separate Debug Files"), as the client of debuginfod
/// keeps them (debuginfod_find_debuginfo(3)), or simply in the folder.
fn candidates(folder: &Path, id: &str, object: &str) -> Vec<PathBuf> {
    let (first, rest) = id.split_at(2);
    let by_id = Path::new(first).join(format!("{rest}.debug"));
    // An object's name is the last part of a path, but a recording may be forged.
    let plain = object != ".." && !object.contains('/');
    let mut found = vec![
        folder.join(".build-id").join(&by_id),
        folder.join(&by_id),
        folder.join(id).join("debuginfo"),
        folder.join(id).join("executable"),
    ];
    if plain {
        found.extend([folder.join(format!("{object}.debug")), folder.join(object)]);
    }
    found
}

fn default_folders() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| Some(home?.join(".cache")));
    let debuginfod = std::env::var_os("DEBUGINFOD_CACHE_PATH").map(PathBuf::from);
    let debuginfod = debuginfod.or_else(|| Some(cache?.join("debuginfod_client")));
    std::iter::once(PathBuf::from("/usr/lib/debug")).chain(debuginfod).collect()
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").expect("a string takes all text");
        hex
    })
}
