//! The files of a program that has not started yet. What it will map first is examined before it runs, because the program may be
//! over sooner than that takes.
//!
//! A guess, by what the dynamic linker would do: a script's interpreter, an ELF file's libraries. Files that it misses are
//! examined when they are mapped; files that it lists in error are examined for nothing.

use crate::remote::elf::Elf;
use crate::remote::{FileIdentity, MappedFile, RemoteProcess};
use std::collections::{HashSet, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

/// Most files that are examined: a python and its libraries are ten.
const MOST: usize = 32;

/// Longest chain of scripts whose interpreter is itself a script.
const MOST_SCRIPTS: usize = 4;

/// Longest first line of a script (`BINPRM_BUF_SIZE` of Linux).
const FIRST_LINE: usize = 256;

/// Where the dynamic linkers of Debian, Fedora and musl look, apart from what their configuration adds.
const LIBRARIES: [&str; 8] = [
    "/usr/local/lib",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/usr/lib",
];

/// A file that a program will map.
#[derive(Debug)]
pub(super) struct Expected {
    pub file: MappedFile,
    /// Whether it is the program itself.
    pub is_exe: bool,
}

/// The files of a program, the program itself first. `process` will execute it; paths are taken in its root directory.
pub(super) fn files_of(process: &RemoteProcess, program: &Path) -> Vec<Expected> {
    let mut found = Vec::new();
    let mut seen: HashSet<FileIdentity> = HashSet::new();
    let mut waiting = VecDeque::from([interpreter_of(process, program)]);
    while let Some(path) = waiting.pop_front() {
        if found.len() == MOST {
            break;
        }
        // A virtual environment's python is a link; its libraries are next to the link's target.
        let path = std::fs::canonicalize(&path).unwrap_or(path);
        let Ok(file) = process.file_at(&path) else { continue };
        if !seen.insert(file.identity()) {
            continue;
        }
        if let Some(elf) = file.open().ok().and_then(|file| Elf::parse(file).ok()) {
            waiting.extend(elf.linker().map(|linker| PathBuf::from(OsStr::from_bytes(&linker))));
            let folders = folders(elf.run_path().as_deref(), &path);
            let library = |name: Vec<u8>| {
                folders.iter().map(|folder| folder.join(OsStr::from_bytes(&name))).find(|path| path.is_file())
            };
            waiting.extend(elf.needed().into_iter().filter_map(library));
        }
        found.push(Expected { file, is_exe: found.is_empty() });
    }
    found
}

/// What runs a program: the program itself or, for a script, what its first line names.
fn interpreter_of(process: &RemoteProcess, program: &Path) -> PathBuf {
    let mut program = program.to_owned();
    for _ in 0..MOST_SCRIPTS {
        let mut line = [0; FIRST_LINE];
        let read = process.file_at(&program).map_err(io::Error::other).and_then(|file| {
            let file = file.open().map_err(io::Error::other)?;
            file.read_at(&mut line, 0)
        });
        let Some(next) = read.ok().and_then(|len| named_by(&line[..len])) else { break };
        program = next;
    }
    program
}

/// The interpreter that the first line of a script names, directly or through `env`.
fn named_by(line: &[u8]) -> Option<PathBuf> {
    let line = line.strip_prefix(b"#!")?.split(|&byte| byte == b'\n').next()?;
    let mut words = line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).map(OsStr::from_bytes);
    let program = Path::new(words.next()?);
    if program.file_name() != Some(OsStr::new("env")) {
        return Some(program.to_owned());
    }
    let name = words.find(|word| !word.as_bytes().starts_with(b"-") && !word.as_bytes().contains(&b'='))?;
    on_path(name)
}

/// Where a program of this name is, as `exec` finds it.
pub fn on_path(name: &OsStr) -> Option<PathBuf> {
    if name.as_bytes().contains(&b'/') {
        return std::path::absolute(name).ok();
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Where a file's libraries are looked for.
fn folders(run_path: Option<&[u8]>, of: &Path) -> Vec<PathBuf> {
    let origin = of.parent().unwrap_or(Path::new("/"));
    let own =
        run_path.into_iter().flat_map(|path| path.split(|&byte| byte == b':')).filter(|folder| !folder.is_empty());
    let own = own.map(|folder| {
        let rest = folder.strip_prefix(b"$ORIGIN").or_else(|| folder.strip_prefix(b"${ORIGIN}"));
        match rest {
            Some(rest) => origin.join(OsStr::from_bytes(rest.strip_prefix(b"/").unwrap_or(rest))),
            None => PathBuf::from(OsStr::from_bytes(folder)),
        }
    });
    own.chain(LIBRARIES.map(PathBuf::from)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_interprets_a_script() {
        let of = |line: &str| named_by(line.as_bytes());
        assert_eq!(of("#!/usr/bin/python3 -B\nimport x"), Some("/usr/bin/python3".into()));
        assert_eq!(of("#! /bin/sh\n"), Some("/bin/sh".into()));
        assert_eq!(of("#!/usr/bin/env -S A=1 sh -c x\n"), on_path(OsStr::new("sh")));
        assert_eq!((of("\x7fELF"), of("#!\n"), of("")), (None, None, None));
    }

    #[test]
    fn a_program_and_its_libraries() {
        let own = std::env::current_exe().unwrap();
        let found = files_of(&RemoteProcess::at(crate::types::Pid(std::process::id())), &own);
        let names: Vec<_> = found.iter().map(|one| one.file.found_at().to_string_lossy().into_owned()).collect();
        assert!(found[0].is_exe && found.iter().skip(1).all(|one| !one.is_exe), "{names:?}");
        assert!(["ld-linux", "libc.so.6"].iter().all(|part| names.iter().any(|name| name.contains(part))), "{names:?}");
    }

    #[test]
    fn libraries_beside_their_program() {
        let found = folders(Some(b"$ORIGIN/../lib:/opt/x"), Path::new("/venv/bin/python"));
        assert_eq!(found[..2], [PathBuf::from("/venv/bin/../lib"), PathBuf::from("/opt/x")]);
        assert!(found.len() > 4 && folders(None, Path::new("/x")).len() == LIBRARIES.len());
    }
}
