//! The programs that judge exports: both `pprof`s, a browser, and the viewers' own importers.

use crate::{apt, cache, command};
use anyhow::Result;
use std::process::Command;

/// Programs and their Debian packages.
const PROGRAMS: [(&str, &str); 4] =
    [("go", "golang-go"), ("google-pprof", "google-perftools"), ("chromium", "chromium"), ("npm", "npm")];

/// npm packages: speedscope, Firefox's importer as a command line, and what drives the browser.
const NPM_PACKAGES: [&str; 3] =
    ["speedscope@1.25.0", "@firefox-devtools/profiler-cli@0.10.0", "playwright-core@1.65.1"];

/// Installs what is missing, the npm packages into the cache directory's `tools`.
///
/// # Errors
/// A package cannot be had.
pub(crate) fn set_up() -> Result<()> {
    apt::ensure(&PROGRAMS)?;
    let dir = cache::dir()?.join("tools");
    let _lock = cache::lock(&dir)?;
    let stamp = NPM_PACKAGES.join("\n");
    if cache::is_finished(&dir, &stamp) {
        return Ok(());
    }
    command::run_quietly(
        "npm install of the viewers",
        Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"])
            .arg(&dir)
            .args(NPM_PACKAGES),
    )?;
    cache::finish(&dir, &stamp)
}
