//! Which files are meant: named files, and the TACH files of named directories.

use super::InputError;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// The files to read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// In the order of the arguments, those of a directory by name: `--rotate` names them by start and sequence.
    pub files: Vec<PathBuf>,
    /// What was left out, with the reason, for users.
    pub notes: Vec<String>,
}

/// Finds the files. A directory stands for the `.tach` files in it, but not for those in its subdirectories. A file that is
/// named twice is read once.
///
/// # Errors
/// When a directory cannot be read or has no such file. Whether a named file exists is not checked.
pub fn find(paths: &[PathBuf]) -> Result<Found, InputError> {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    for path in paths {
        let files = if path.is_dir() { in_directory(path, &mut found.notes)? } else { vec![path.clone()] };
        for file in files {
            // A file that does not exist is reported when it is opened.
            let known = std::fs::metadata(&file).is_ok_and(|stat| !seen.insert((stat.dev(), stat.ino())));
            if known {
                found.notes.push(format!("{} is named twice, and read once", file.display()));
            } else {
                found.files.push(file);
            }
        }
    }
    Ok(found)
}

fn in_directory(directory: &Path, notes: &mut Vec<String>) -> Result<Vec<PathBuf>, InputError> {
    let cannot = |source: io::Error| InputError::OpenOneOf { path: directory.to_owned(), source };
    let (mut files, mut live) = (Vec::new(), false);
    for entry in std::fs::read_dir(directory).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        if !path.is_file() {
            continue;
        }
        if path.extension() == Some(OsStr::new("tach")) {
            files.push(path);
        } else if path.extension() == Some(OsStr::new("part")) {
            live = true;
            notes.push(format!("left out {}: it is not finished", path.display()));
        }
    }
    if files.is_empty() {
        return Err(InputError::Empty { path: directory.to_owned(), live });
    }
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_its_finished_files_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["h-2-000001.tach", "h-2-000000.tach", "h-2-000000.json", "h-2-000002.tach.part", "x.svg"] {
            std::fs::write(path(name), "").unwrap();
        }
        std::fs::create_dir(path("inner.tach")).unwrap();
        let found = find(&[dir.path().to_owned(), path("h-2-000000.tach"), path("none")]).unwrap();
        assert_eq!(found.files, [path("h-2-000000.tach"), path("h-2-000001.tach"), path("none")]);
        let notes = [
            format!("left out {}: it is not finished", path("h-2-000002.tach.part").display()),
            format!("{} is named twice, and read once", path("h-2-000000.tach").display()),
        ];
        assert_eq!(found.notes, notes);
    }

    #[test]
    fn a_directory_without_files_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let told = || find(&[dir.path().to_owned()]).unwrap_err().to_string();
        assert_eq!(told(), format!("there is no TACH file in {}", dir.path().display()));
        std::fs::write(dir.path().join("a.tach.part"), "").unwrap();
        assert!(told().ends_with(", only one that is being recorded"));
    }
}
