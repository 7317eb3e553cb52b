//! `cargo xtask manifests`: checks that the Kubernetes manifests are valid, with `kubernetes-validate`, and request no more
//! privileges than `docs/privileges.md` names.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{cache, command, tools, zoo};

/// It comes with the Kubernetes schemas of its own version.
const VALIDATOR: &str = "kubernetes-validate==1.37.0";

/// The oldest version with all fields that are used, and the newest one of the validator.
const VERSIONS: [&str; 2] = ["1.30", "1.37"];

const MANIFESTS: [&str; 2] = ["deploy/kubernetes/daemonset.yaml", "deploy/kubernetes/sidecar.yaml"];

/// Runs `cargo xtask manifests`.
///
/// # Errors
/// The validator is not available, or a manifest is not as it must be.
pub(crate) fn run() -> Result<()> {
    let python = zoo::newest_supported().context("no CPython 3.11 to 3.13 in pyenv")?;
    let programs = tools::in_venv(&python, &cache::dir()?.join("kubernetes-validate"), VALIDATOR)?;
    let root = command::project_root();
    for version in VERSIONS {
        let mut validate = Command::new(programs.join("kubernetes-validate"));
        command::run(validate.current_dir(root).args(["--strict", "-k", version]).args(MANIFESTS))?;
    }
    let script: PathBuf = root.join("xtask/src/manifests.py");
    let page = root.join("docs/privileges.md");
    let page = std::fs::read_to_string(&page).with_context(|| format!("cannot read {}", page.display()))?;
    let capabilities = documented(&page);
    ensure!(!capabilities.is_empty(), "docs/privileges.md has no table of capabilities");
    let list = capabilities.into_iter().collect::<Vec<_>>().join(",");
    command::run(Command::new(programs.join("python")).current_dir(root).arg(script).arg(list).args(MANIFESTS))
}

/// The capabilities of the page's table, as Kubernetes calls them: without `CAP_`.
fn documented(page: &str) -> BTreeSet<&str> {
    let rows = page.lines().skip_while(|line| *line != "<!-- table -->").take_while(|line| *line != "<!-- end -->");
    rows.flat_map(|row| row.split("`CAP_").skip(1)).filter_map(|rest| rest.split('`').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_table_counts() {
        let page = "`CAP_SYS_ADMIN`\n<!-- table -->\n| `-p` | `CAP_BPF`, `CAP_PERFMON` |\n<!-- end -->\n`CAP_KILL`\n";
        assert_eq!(documented(page), BTreeSet::from(["BPF", "PERFMON"]));
    }
}
