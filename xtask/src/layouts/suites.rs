//! `cargo xtask layouts --suites`: does the committed table agree with the headers of every Debian suite, of pyenv, and
//! of what `cargo xtask zoo` built?
//!
//! A patch release that the table does not name yet must agree with a row of its minor version: sid has a new one every
//! few weeks, and if one moved a field, that has to be noticed here, not by users.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use super::{Headers, OLDEST_MINOR, ask, installed_headers, label};
use crate::{apt, cache};

/// From the oldest suite that the mirrors have to the newest.
const SUITES: [&str; 4] = ["bullseye", "bookworm", "trixie", "sid"];

/// Compares, and names each set of headers.
///
/// # Errors
/// A set of headers differs from the table, or is not available.
pub(super) fn run(known: &[Headers]) -> anyhow::Result<()> {
    let dir = cache::dir()?;
    // The size of the runtime depends on how a build was configured (musl's differs), the position of its fields does not.
    let own: Vec<PathBuf> = zoo_headers(&dir.join("zoo"));
    let mut folders = installed_headers();
    folders.extend(own.iter().cloned());
    let unpacked = tempfile::tempdir().context("cannot make a folder for headers")?;
    for suite in SUITES {
        let found = suite_headers(suite, &dir, unpacked.path())?;
        ensure!(!found.is_empty(), "{suite} has no headers of CPython 3.{OLDEST_MINOR} or newer");
        folders.extend(found);
    }
    let mut faults = Vec::new();
    for folder in &folders {
        for free_threaded in [false, true] {
            // The headers of a free-threaded build only describe that one.
            if !free_threaded && folder.to_string_lossy().ends_with('t') {
                continue;
            }
            let Some(mut headers) = ask(folder, free_threaded)? else { continue };
            if own.contains(folder)
                && let Some(row) = known
                    .iter()
                    .find(|row| (row.version_hex, row.free_threaded) == (headers.version_hex, headers.free_threaded))
            {
                headers.sizes = row.sizes;
            }
            let name = label(&headers);
            match judge(&headers, known) {
                Ok(how) => println!("{name:<9} {how} ({})", folder.display()),
                Err(fault) => faults.push(format!("  {name} ({}): {fault}", folder.display())),
            }
        }
    }
    if !faults.is_empty() {
        bail!(
            "the table differs from CPython's headers:\n{}\nhint: docs/dev/new-python-version.md, step 2",
            faults.join("\n")
        );
    }
    println!("{} folders of headers agree with the table", folders.len());
    Ok(())
}

/// How the headers agree with the table, or the first difference.
fn judge(headers: &Headers, known: &[Headers]) -> Result<&'static str, String> {
    let minor = |of: &Headers| (of.version_hex >> 16, of.free_threaded);
    let same_minor: Vec<&Headers> = known.iter().filter(|row| minor(row) == minor(headers)).collect();
    if let Some(row) = same_minor.iter().find(|row| row.version_hex == headers.version_hex) {
        return if row.common == headers.common && row.sizes == headers.sizes {
            Ok("is in the table")
        } else {
            Err(difference(row, headers))
        };
    }
    if same_minor.iter().any(|row| row.common == headers.common) {
        return Ok("agrees with a row of its minor version");
    }
    match same_minor.last() {
        Some(row) => Err(difference(row, headers)),
        None => Err("its minor version has no row".to_owned()),
    }
}

fn difference(row: &Headers, headers: &Headers) -> String {
    let fields = row.common.iter().zip(&headers.common).find(|(row, headers)| row != headers);
    fields.map_or_else(
        || format!("sizes {:?}, the table has {:?}", headers.sizes, row.sizes),
        |(row, headers)| format!("{} is at {:?}, in the table at {:?}", headers.0, headers.1, row.1),
    )
}

/// The folders that the zoo's own builds have installed.
fn zoo_headers(zoo: &Path) -> Vec<PathBuf> {
    let builds = super::folders(zoo).into_iter().flat_map(|build| super::folders(&build.join("include")));
    builds.filter(|dir| dir.join("internal").is_dir()).collect()
}

/// Fetches the `-dev` packages of a suite and unpacks them; returns the folders with `Python.h`.
fn suite_headers(suite: &str, cache: &Path, unpacked: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mirrors = apt::Mirrors::of_this_machine()?;
    let index = apt::Suite::open(&cache.join("apt").join(suite), suite, &mirrors)?;
    let found = fetch(&index, suite, unpacked)?;
    if !found.is_empty() {
        return Ok(found);
    }
    // The index may be older than the archive.
    index.update(suite)?;
    fetch(&index, suite, unpacked)
}

fn fetch(index: &apt::Suite, suite: &str, unpacked: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found: Vec<PathBuf> = Vec::new();
    // Newest first: an archive may list one that it no longer has.
    for (package, version) in index.versions(r"^libpython3\.[0-9]+-dev$")? {
        let minor = package.trim_start_matches("libpython").trim_end_matches("-dev").to_owned();
        let target = unpacked.join(suite).join(&minor);
        let headers = target.join("usr/include").join(format!("python{minor}"));
        let supported = minor
            .strip_prefix("3.")
            .and_then(|minor| minor.parse().ok())
            .is_some_and(|minor: u32| minor >= OLDEST_MINOR);
        if !supported || found.contains(&headers) {
            continue;
        }
        std::fs::create_dir_all(&target).with_context(|| format!("cannot create {}", target.display()))?;
        match index.unpack(&package, &version, &target) {
            Ok(()) => {
                ensure!(headers.join("Python.h").is_file(), "{package} {version} has no Python.h");
                found.push(headers);
            }
            Err(error) => eprintln!("trying the next version: {error:#}"),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moved_is_named() {
        let row = Headers {
            version: "3.14.9".into(),
            version_hex: 0x030e_09f0,
            free_threaded: false,
            sizes: [1, 2, 3],
            common: vec![("tstate_frame".into(), Some(72)), ("frame_size".into(), Some(80))],
        };
        let known = [row.clone()];
        assert_eq!(judge(&row, &known), Ok("is in the table"));
        let newer = Headers { version_hex: 0x030e_0af0, sizes: [9, 9, 9], ..row.clone() };
        assert_eq!(judge(&newer, &known), Ok("agrees with a row of its minor version"));
        let grown = Headers { sizes: [9, 9, 9], ..row.clone() };
        assert_eq!(judge(&grown, &known), Err("sizes [9, 9, 9], the table has [1, 2, 3]".to_owned()));
        let mut moved = newer;
        moved.common[0].1 = Some(80);
        assert_eq!(judge(&moved, &known), Err("tstate_frame is at Some(80), in the table at Some(72)".to_owned()));
        let other = Headers { free_threaded: true, ..row };
        assert_eq!(judge(&other, &known), Err("its minor version has no row".to_owned()));
    }
}
