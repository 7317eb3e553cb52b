//! Licences, duplicate versions and sources of the dependencies, by the rules of `deny.toml`.
//!
//! A part of what `cargo deny check` does, for machines without it: its build takes longer than all other checks. Known
//! holes (advisories) are not looked up here, for that needs its database.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::command;

#[derive(Deserialize)]
struct Rules {
    graph: Graph,
    licenses: Licences,
}

#[derive(Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Deserialize)]
struct Licences {
    allow: BTreeSet<String>,
    #[serde(default)]
    exceptions: Vec<Exception>,
}

#[derive(Deserialize)]
struct Exception {
    #[serde(rename = "crate")]
    name: String,
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    version: String,
    license: Option<String>,
    /// `None`: a member of this workspace.
    source: Option<String>,
}

/// Runs `cargo xtask dependencies`.
///
/// # Errors
/// A licence that `deny.toml` does not allow, or a source that is no registry.
pub(crate) fn run() -> Result<()> {
    let root = command::project_root();
    let rules = std::fs::read_to_string(root.join("deny.toml")).context("cannot read deny.toml")?;
    let rules: Rules = toml::from_str(&rules).context("cannot parse deny.toml")?;
    let mut wrong = Vec::new();
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for target in &rules.graph.targets {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut metadata = Command::new(cargo);
        metadata.args(["metadata", "--locked", "--format-version", "1", "--filter-platform", target]);
        let output = metadata.current_dir(root).output().context("cannot run cargo metadata")?;
        if !output.status.success() {
            bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr));
        }
        let metadata: Metadata = serde_json::from_slice(&output.stdout).context("cannot parse cargo's metadata")?;
        for package in metadata.packages {
            let Package { name, version, license, source } = package;
            if source.as_deref().is_some_and(|source| !source.starts_with("registry+")) {
                wrong.push(format!("{name} {version} comes from {}", source.unwrap_or_default()));
            }
            let license = license.unwrap_or_default();
            let exception = rules.licenses.exceptions.iter().find(|exception| exception.name == name);
            let allowed = |one: &str| {
                rules.licenses.allow.contains(one) || exception.is_some_and(|exception| exception.allow.contains(one))
            };
            if !satisfied(&license, &allowed) {
                wrong.push(format!("{name} {version} has the licence {license:?}, which deny.toml does not allow"));
            }
            versions.entry(name).or_default().insert(version);
        }
    }
    for (name, versions) in versions.iter().filter(|(_, versions)| versions.len() > 1) {
        let versions: Vec<_> = versions.iter().map(String::as_str).collect();
        println!("twice: {name} {}", versions.join(", "));
    }
    println!("{} dependencies; advisories are not checked here", versions.len());
    wrong.sort();
    wrong.dedup();
    if wrong.is_empty() { Ok(()) } else { bail!("{}", wrong.join("\n")) }
}

/// Whether an SPDX expression can be met with what is allowed. (`AND` binds before `OR`; old ones say `/` for `OR`.)
fn satisfied(expression: &str, allowed: &dyn Fn(&str) -> bool) -> bool {
    let expression = expression.replace('/', " OR ");
    let expression = expression.trim();
    if let Some(parts) = split(expression, " OR ") {
        return parts.iter().any(|part| satisfied(part, allowed));
    }
    if let Some(parts) = split(expression, " AND ") {
        return parts.iter().all(|part| satisfied(part, allowed));
    }
    match expression.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => satisfied(inner, allowed),
        // An exception (`WITH`) only grants more.
        None => allowed(expression.split(" WITH ").next().unwrap_or_default()),
    }
}

/// The parts between an operator that stands outside of parentheses; `None` when there is none.
fn split<'a>(expression: &'a str, operator: &str) -> Option<Vec<&'a str>> {
    let (mut parts, mut depth, mut start) = (Vec::new(), 0_usize, 0);
    for (at, character) in expression.char_indices() {
        match character {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ if depth == 0 && expression[at..].starts_with(operator) => {
                parts.push(&expression[start..at]);
                start = at + operator.len();
            }
            _ => {}
        }
    }
    parts.push(&expression[start..]);
    (parts.len() > 1).then_some(parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions() {
        let allowed = |one: &str| ["MIT", "Apache-2.0", "Unicode-3.0"].contains(&one);
        for (expression, met) in [
            ("MIT", true),
            ("GPL-3.0", false),
            ("MIT OR GPL-3.0", true),
            ("GPL-3.0/MIT", true),
            ("MIT AND GPL-3.0", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(GPL-2.0 OR GPL-3.0) AND MIT", false),
            ("GPL-2.0 OR MIT AND Apache-2.0", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("", false),
        ] {
            assert_eq!(satisfied(expression, &allowed), met, "{expression}");
        }
    }
}
