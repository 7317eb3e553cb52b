//! What `cargo deny` says about the dependencies, by the rules of `deny.toml`: licences, duplicate versions, sources, and
//! known vulnerabilities if their database can be reached.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::{command, tools};

/// The newest that Rust 1.95 builds.
const VERSION: &str = "0.20.2";

/// What cargo-deny says when it has no database of advisories and cannot get one.
const NO_DATABASE: &str = "failed to fetch advisory database";

/// The workspaces whose lock files are checked, including the kernel side's.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "tachyon-ebpf/Cargo.toml"];

/// Runs `cargo xtask dependencies`.
///
/// # Errors
/// cargo-deny is not available, or a dependency breaks a rule.
pub(crate) fn run() -> Result<()> {
    let deny = tools::from_crates("cargo-deny", VERSION)?;
    for manifest in MANIFESTS {
        command::run(check(&deny, manifest, &["bans", "licenses", "sources"], &[]).arg("--hide-inclusion-graph"))?;
    }
    let mut old = false;
    for manifest in MANIFESTS {
        old |= !advisories(&deny, manifest, old)?;
    }
    let homes = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let homes = homes.or_else(|| Some(std::env::home_dir()?.join(".cargo")));
    let date = homes.and_then(|home| database_date(&home.join("advisory-dbs")));
    // Printed at the end of a CI run either way.
    command::notice(&if old { not_renewed(date.as_deref()) } else { renewed(date.as_deref()) })
}

/// Looks a workspace's dependencies up among the advisories, with the previous database if `old` or if no newer one can be
/// reached; returns whether it is today's.
fn advisories(deny: &Path, manifest: &str, old: bool) -> Result<bool> {
    for fetch in [true, false].into_iter().skip(usize::from(old)) {
        let network: &[&str] = if fetch { &[] } else { &["--offline"] };
        let output = check(deny, manifest, &["advisories"], network).output().context("cannot start cargo-deny")?;
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() {
            eprint!("{said}");
            return Ok(fetch);
        }
        if !is_unreachable(&said) {
            eprint!("{said}");
            bail!("cargo deny check advisories failed for {manifest}: {}", output.status);
        }
    }
    Ok(false)
}

/// Whether cargo-deny failed for want of a database, not because of what is in it.
fn is_unreachable(said: &str) -> bool {
    [NO_DATABASE, "failed to load advisory database", "failed to get 'FETCH_HEAD' metadata"]
        .iter()
        .any(|sentence| said.contains(sentence))
}

/// The message at the end of a run if the database was renewed.
fn renewed(date: Option<&str>) -> String {
    let date = date.unwrap_or("an unknown date");
    format!("advisories: the dependencies of both lock files were compared with the database of {date}")
}

/// The message at the end of a run if the database could not be renewed.
fn not_renewed(date: Option<&str>) -> String {
    match date {
        Some(date) => format!(
            "advisories: the database cannot be reached from here; both lock files were compared with its state of {date}, \
             and not with what became known since"
        ),
        None => {
            "advisories: NOT COMPARED: the database cannot be reached from here and there is no older copy; whether a \
                 dependency has a known hole was not looked up"
                .to_owned()
        }
    }
}

/// When the newest of the databases was last changed: the date of its last commit.
fn database_date(databases: &Path) -> Option<String> {
    let dates = std::fs::read_dir(databases).ok()?.filter_map(|entry| {
        let dir = entry.ok()?.path();
        let date = command::stdout(Command::new("git").arg("-C").arg(dir).args(["log", "-1", "--format=%cs"])).ok()?;
        Some(date.trim().to_owned()).filter(|date| !date.is_empty())
    });
    dates.max()
}

fn check(deny: &Path, manifest: &str, what: &[&str], network: &[&str]) -> Command {
    let mut command = Command::new(deny);
    command.current_dir(command::project_root()).args([
        "--locked",
        "--config",
        "deny.toml",
        "--manifest-path",
        manifest,
    ]);
    command.args(network).arg("check").args(what);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_compared_is_said() {
        assert!(renewed(Some("2026-11-01")).contains("of 2026-11-01"));
        assert!(not_renewed(None).contains("NOT COMPARED"));
        assert!(not_renewed(Some("2026-11-01")).contains("its state of 2026-11-01"));
        assert!(is_unreachable("error: failed to fetch advisory database https://github.com/rustsec/advisory-db"));
        assert!(!is_unreachable("error[vulnerability]: a use after free"));
    }

    #[test]
    fn the_date_is_that_of_the_last_commit() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(database_date(dir.path()), None);
        let database = dir.path().join("advisory-db-1");
        let git = |words: &[&str]| {
            let mut git = Command::new("git");
            git.arg("-C").arg(dir.path()).args(["-c", "user.name=a", "-c", "user.email=a@b"]).args(words);
            git.env("GIT_COMMITTER_DATE", "2026-03-04T05:06:07Z").env("GIT_CONFIG_GLOBAL", "/dev/null");
            command::stdout(&mut git).unwrap()
        };
        git(&["init", "-q", "advisory-db-1"]);
        git(&["-C", &database.display().to_string(), "commit", "-q", "--allow-empty", "-m", "a"]);
        assert_eq!(database_date(dir.path()).as_deref(), Some("2026-03-04"));
    }
}
