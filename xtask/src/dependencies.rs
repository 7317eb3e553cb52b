//! What `cargo deny` says of the dependencies, by the rules of `deny.toml`: licences, duplicate versions, sources, and known
//! holes where their database can be reached.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{cache, command};

/// The newest that Rust 1.95 builds.
const VERSION: &str = "0.20.2";

/// What cargo-deny says when it has no database of advisories and cannot get one.
const NO_DATABASE: &str = "failed to fetch advisory database";

/// Runs `cargo xtask dependencies`.
///
/// # Errors
/// cargo-deny cannot be had, or a dependency breaks a rule.
pub(crate) fn run() -> Result<()> {
    let deny = installed()?;
    command::run(check(&deny, &["bans", "licenses", "sources"]).arg("--hide-inclusion-graph"))?;
    let output = check(&deny, &["advisories"]).output().context("cannot start cargo-deny")?;
    let said = String::from_utf8_lossy(&output.stderr);
    eprint!("{said}");
    match output.status.success() {
        true => Ok(()),
        false if said.contains(NO_DATABASE) => {
            eprintln!(
                "xtask: NOT COMPARED: advisories. Whether a dependency has a known hole was not looked up, for the database \
                 cannot be reached from here"
            );
            Ok(())
        }
        false => bail!("cargo deny check advisories failed: {}", output.status),
    }
}

fn check(deny: &PathBuf, what: &[&str]) -> Command {
    let mut command = Command::new(deny);
    command.current_dir(command::project_root()).args(["--locked", "check"]).args(what);
    command
}

/// cargo-deny in the cache, built when it is not there: in the development profile, which takes a third of the time.
fn installed() -> Result<PathBuf> {
    let dir = cache::dir()?.join("cargo-deny");
    let _lock = cache::lock(&dir)?;
    let deny = dir.join("bin/cargo-deny");
    if !cache::is_finished(&dir, VERSION) {
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["install", "--locked", "--debug", "--force", "--root"]).arg(&dir);
        // What is set for this project's own builds is not for this one.
        cargo.env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
        command::run(cargo.arg(format!("cargo-deny@{VERSION}")))?;
        cache::finish(&dir, VERSION)?;
    }
    Ok(deny)
}
