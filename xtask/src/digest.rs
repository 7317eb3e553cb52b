//! One digest over everything the BPF object is made of, and one over the page of the HTML report. Also compiled into the
//! test `tachyon/tests/prebuilt.rs`, which notices when sources and results diverge.

use std::fs;
use std::io::{Error, Result};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The crates that end up in the object, as directories of the project.
const CRATES: [&str; 2] = ["tachyon-common", "tachyon-ebpf"];

/// Only these count: an editor's backup or a note beside the sources changes no object.
const EXTENSIONS: [&str; 3] = ["lock", "rs", "toml"];

/// The sources of the page, as a directory of the project.
const PAGE: &str = "tachyon/report-page";

/// The digest of the BPF object's sources below `project`, see [`of_files`].
///
/// # Errors
/// A file cannot be read, or a path is not UTF-8.
pub(crate) fn of_sources(project: &Path) -> Result<String> {
    of_files(project, sources(project)?)
}

/// The digest of the page's sources below `project`, see [`of_files`].
///
/// # Errors
/// A file cannot be read, or a path is not UTF-8.
pub(crate) fn of_page(project: &Path) -> Result<String> {
    of_files(project, page_sources(project)?)
}

/// SHA-256, in hexadecimal, over files below `project`: for each file, in the order of their paths, the path with
/// `/` between its parts, a zero byte, the length in 8 bytes (little endian) and the bytes.
///
/// # Errors
/// A file cannot be read, or a path is not UTF-8.
fn of_files(project: &Path, files: Vec<PathBuf>) -> Result<String> {
    let mut named = Vec::new();
    for file in files {
        let relative = file.strip_prefix(project).map_err(Error::other)?;
        let parts: Option<Vec<_>> = relative.iter().map(|part| part.to_str()).collect();
        let parts = parts.ok_or_else(|| Error::other(format!("{} is not UTF-8", file.display())))?;
        named.push((parts.join("/"), file));
    }
    named.sort();
    let mut hash = Sha256::new();
    for (name, file) in named {
        let bytes = fs::read(file)?;
        hash.update(name.as_bytes());
        hash.update([0]);
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    }
    Ok(format!("{:x}", hash.finalize()))
}

/// The files that [`of_sources`] covers, in no particular order: a crate's own `tests` do not affect the object.
///
/// # Errors
/// A directory cannot be read.
pub(crate) fn sources(project: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for name in CRATES {
        let tests = project.join(name).join("tests");
        collect(&project.join(name), &EXTENSIONS, &mut files)?;
        files.retain(|file| !file.starts_with(&tests));
    }
    Ok(files)
}

/// The files that [`of_page`] covers, in no particular order: everything except what npm installs there.
///
/// # Errors
/// A directory cannot be read.
pub(crate) fn page_sources(project: &Path) -> Result<Vec<PathBuf>> {
    let dir = project.join(PAGE);
    let mut files = vec![dir.join(".npmrc")];
    collect(&dir, &["css", "html", "json", "mjs", "ts", "tsx"], &mut files)?;
    Ok(files)
}

/// SHA-256 of one file's bytes, in hexadecimal.
pub(crate) fn of_bytes(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn collect(dir: &Path, extensions: &[&str], files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            if !path.ends_with("target") && !path.ends_with("node_modules") {
                collect(&path, extensions, files)?;
            }
        } else if path.extension().is_some_and(|found| extensions.iter().any(|wanted| found == *wanted)) {
            files.push(path);
        }
    }
    Ok(())
}
